"""RMSNorm, plain and with the residual added first.

    y = round(x / sqrt(mean(x²) + eps)) * weight        statistics in fp32; rounded to x's dtype where transformers does

One pass over memory: a row stays in registers between its sum and its scaling. Short rows (the heads of q and k)
share a program, so that its loads are wide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.text_engine.kernels.compile_check import CompileCase

MAX_DIM = 16384  # of one program's registers
ELEMENTS_PER_PROGRAM = 2048  # of short rows together


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    rows_per_token,
    token_stride,
    row_stride,
    eps,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """With a residual: out_ptr is x_ptr, and residual_ptr receives x + residual."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_DIM)
    mask = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    row_starts = (rows // rows_per_token).to(tl.int64) * token_stride + (rows % rows_per_token) * row_stride
    dense = rows.to(tl.int64)[:, None] * DIM + columns[None, :]

    # Reads the weight, shared by all programs (L2), and each row once.
    weight = tl.load(weight_ptr + columns, mask=columns < DIM, other=0.0)
    x = tl.load(x_ptr + row_starts[:, None] + columns[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + dense, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        # Writes the new residual stream.
        tl.store(residual_ptr + dense, x, mask=mask)
    x_fp32 = x.to(tl.float32)
    mean_square = tl.sum(x_fp32 * x_fp32, axis=1) / DIM
    normed = (x_fp32 * tl.rsqrt(mean_square + eps)[:, None]).to(x.dtype)
    # Writes each row once.
    out = normed.to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + dense, out.to(x.dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x²) + eps) * weight over the last dimension.

    x        [num_tokens, dim] or [num_tokens, num_heads, head_dim], any stride but 1 in the last dimension
    weight   [dim], contiguous
    returns  like x, contiguous
    """
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows_per_token, row_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    _launch(x, x, weight, out, rows_per_token, row_stride, eps, has_residual=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [num_tokens, dim], in the inputs' own memory."""
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype
    assert x.is_contiguous()
    assert residual.is_contiguous()
    _launch(x, residual, weight, x, 1, 0, eps, has_residual=True)
    return x, residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rows_per_token: int,
    row_stride: int,
    eps: float,
    *,
    has_residual: bool,
) -> None:
    dim = x.shape[-1]
    assert weight.shape == (dim,)
    assert weight.is_contiguous()
    assert dim <= MAX_DIM, f"rows of {dim} do not fit into one program's registers"
    num_rows = x.shape[0] * rows_per_token
    if num_rows == 0:
        return
    block_dim, block_rows, num_warps = _tile(dim)
    _rms_norm[(triton.cdiv(num_rows, block_rows),)](
        x,
        residual,
        weight,
        out,
        num_rows,
        rows_per_token,
        x.stride(0),
        row_stride,
        eps,
        DIM=dim,
        BLOCK_DIM=block_dim,
        BLOCK_ROWS=block_rows,
        HAS_RESIDUAL=has_residual,
        num_warps=num_warps,
    )


def _tile(dim: int) -> tuple[int, int, int]:
    """(BLOCK_DIM, BLOCK_ROWS, num_warps): 16 bytes a load of bf16, at least one a thread."""
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, ELEMENTS_PER_PROGRAM // block_dim)
    return block_dim, block_rows, min(max(block_dim * block_rows // 512, 1), 16)


def compile_cases() -> list[CompileCase]:
    cases = []
    for name, dim, has_residual in (
        ("rms_norm 4096", 4096, False),
        ("rms_norm heads of 128", 128, False),
        ("add_rms_norm 896", 896, True),
        ("add_rms_norm 4096", 4096, True),
        ("add_rms_norm 8192", 8192, True),
    ):
        block_dim, block_rows, num_warps = _tile(dim)
        pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
        integers = dict.fromkeys(("num_rows", "rows_per_token", "token_stride", "row_stride"), "i32")
        constexprs = {"DIM": dim, "BLOCK_DIM": block_dim, "BLOCK_ROWS": block_rows, "HAS_RESIDUAL": has_residual}
        cases.append(
            CompileCase(
                name=name,
                kernel=_rms_norm,
                signature={**pointers, **integers, "eps": "fp32", **dict.fromkeys(constexprs, "constexpr")},
                constexprs=constexprs,
                num_warps=num_warps,
                ptx_contains=("ld.global.v4.b32", "st.global.v4.b32"),
                divisible_by_16=frozenset((*pointers, "token_stride", "row_stride")),
            )
        )
    return cases
