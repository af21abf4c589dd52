"""Image embeddings into the merged token stream:

    hidden[token_index[i]] = rows[row_index[i]]        unless either index is -1

Indices are read on the device, so a captured graph serves any number of image tokens up to its padded size, and the
host never waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.text_engine.kernels.compile_check import CompileCase

BLOCK = 1024


@triton.jit
def _merge_rows(
    hidden_ptr,
    rows_ptr,
    token_index_ptr,
    row_index_ptr,
    hidden_stride,
    row_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    token = tl.load(token_index_ptr + entry).to(tl.int64)
    row = tl.load(row_index_ptr + entry).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (columns < DIM) & (token >= 0) & (row >= 0)
    # Reads a piece of one image row, writes it over the placeholder's.
    values = tl.load(rows_ptr + row * row_stride + columns, mask=mask)
    tl.store(hidden_ptr + token * hidden_stride + columns, values.to(hidden_ptr.dtype.element_ty), mask=mask)


def merge_rows(
    hidden: torch.Tensor, rows: torch.Tensor, token_index: torch.Tensor, row_index: torch.Tensor
) -> torch.Tensor:
    """Overwrite rows of `hidden`, in place.

    hidden       [num_tokens, dim]
    rows         [num_rows, dim] of any float dtype
    token_index  [num_entries] int32 or int64; no token twice; -1 marks padding and is skipped
    row_index    [num_entries], alike
    returns      hidden
    """
    dim = hidden.shape[1]
    assert rows.shape[1] == dim
    assert hidden.stride(1) == rows.stride(1) == 1
    assert token_index.shape == row_index.shape
    assert token_index.is_contiguous()
    assert row_index.is_contiguous()
    num_entries = token_index.numel()
    if num_entries > 0:
        grid = (num_entries, triton.cdiv(dim, BLOCK))
        _merge_rows[grid](
            hidden, rows, token_index, row_index, hidden.stride(0), rows.stride(0), DIM=dim, BLOCK=BLOCK, num_warps=4
        )
    return hidden


def compile_cases() -> list[CompileCase]:
    return [
        CompileCase(
            name=f"merge_rows from {rows}",
            kernel=_merge_rows,
            signature={
                "hidden_ptr": "*bf16",
                "rows_ptr": f"*{rows}",
                **dict.fromkeys(("token_index_ptr", "row_index_ptr"), "*i64"),
                **dict.fromkeys(("hidden_stride", "row_stride"), "i32"),
                **dict.fromkeys(("DIM", "BLOCK"), "constexpr"),
            },
            constexprs={"DIM": 4096, "BLOCK": BLOCK},
            ptx_contains=("ld.global.v4.b32", "st.global.v4.b32"),
            divisible_by_16=frozenset(
                ("hidden_ptr", "rows_ptr", "token_index_ptr", "row_index_ptr", "hidden_stride", "row_stride")
            ),
        )
        for rows in ("bf16", "fp32")
    ]
