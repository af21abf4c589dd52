"""The gated MLP's activation: silu(gate) * up, or gelu_tanh(gate) * up (Gemma).

    silu(x) = x * sigmoid(x)        gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x³))

since (1 + tanh(u)) / 2 = sigmoid(2u). In fp32; the activation is rounded to the input's dtype before the product, as in
transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.text_engine.kernels.compile_check import CompileCase

BLOCK = 1024  # 16 bytes of bf16 for each of 128 threads, from gate and from up


@triton.jit
def _gated_mul(gate_up_ptr, out_ptr, token_stride, intermediate, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    # Reads gate and up once, writes the product once.
    gate = tl.load(gate_up_ptr + token * token_stride + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * token_stride + intermediate + columns, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    inner = x
    if IS_GELU:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    # Not x * sigmoid(inner): the quotient of an overflown exponential is 0, as it should be.
    activated = (x / (1.0 + tl.exp(-inner))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + token * intermediate + columns, product.to(gate.dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * intermediate] -> [num_tokens, intermediate]."""
    return _launch(gate_up, is_gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, GELU in its tanh form, for gate_up [num_tokens, 2 * intermediate]."""
    return _launch(gate_up, is_gelu=True)


def _launch(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    num_tokens, double = gate_up.shape
    assert double % 2 == 0
    assert gate_up.stride(1) == 1 or double == 0
    intermediate = double // 2
    out = torch.empty((num_tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        grid = (num_tokens, triton.cdiv(intermediate, BLOCK))
        _gated_mul[grid](gate_up, out, gate_up.stride(0), intermediate, IS_GELU=is_gelu, BLOCK=BLOCK, num_warps=4)
    return out


def compile_cases() -> list[CompileCase]:
    return [
        CompileCase(
            name=name,
            kernel=_gated_mul,
            signature={
                **dict.fromkeys(("gate_up_ptr", "out_ptr"), "*bf16"),
                **dict.fromkeys(("token_stride", "intermediate"), "i32"),
                **dict.fromkeys(("IS_GELU", "BLOCK"), "constexpr"),
            },
            constexprs={"IS_GELU": is_gelu, "BLOCK": BLOCK},
            ptx_contains=("ld.global.v4.b32", "st.global.v4.b32"),
            divisible_by_16=frozenset(("gate_up_ptr", "out_ptr", "token_stride", "intermediate")),
        )
        for name, is_gelu in (("silu_mul", False), ("gelu_tanh_mul", True))
    ]
