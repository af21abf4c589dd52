"""The elementwise operations in plain PyTorch: any device, and the oracle that every other kernel is compared with.

The module satisfies `kernels.interface.Kernels`. Roundings are where transformers has them; nothing works in place.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from services.text_engine.kernels.quant_layout import Int8Weight, QuantizedWeight
from services.text_engine.kernels.sampling_tensors import SamplingTensors

_MASK = 2**64 - 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension. x [..., dim], weight [dim]."""
    x_fp32 = x.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); both [num_tokens, dim]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves of each head (NeoX style), in fp32.

    query    [num_tokens, num_heads, head_dim], key [num_tokens, num_kv_heads, head_dim]
    cos_sin  [num_tokens, head_dim] fp32: at each token's position the cosines of the head_dim / 2 frequencies, then
             their sines
    """
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)  # each [num_tokens, 1, head_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * intermediate] -> [num_tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, GELU in its tanh form, for gate_up [num_tokens, 2 * intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def merge_rows(
    hidden: torch.Tensor, rows: torch.Tensor, token_index: torch.Tensor, row_index: torch.Tensor
) -> torch.Tensor:
    """`hidden` [num_tokens, dim] with hidden[token_index[i]] = rows[row_index[i]] wherever neither index is -1."""
    wanted = (token_index >= 0) & (row_index >= 0)
    return hidden.index_copy(0, token_index[wanted].long(), rows[row_index[wanted].long()].to(hidden.dtype))


def quantize_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values as an int8 cache keeps them: x is step * (byte - 128), a head's largest magnitude 127 steps.

    x        [..., head_dim]
    returns  bytes [..., head_dim] uint8 and steps [..., 1] fp32, NaN where an element of the head is not finite
    """
    x = x.float()
    magnitude = x.abs().amax(-1, keepdim=True)
    magnitude = magnitude.masked_fill(~torch.isfinite(magnitude), torch.nan)
    inverse = torch.where(magnitude > 1e-30, magnitude.new_tensor(127) / magnitude, 0.0)  # a division, rounded once
    return ((x * inverse).round().nan_to_num() + 128).to(torch.uint8), magnitude / 127


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """What a quantized matrix stands for, fp32 [out_features, in_features], in the layer's order of inputs."""
    if isinstance(weight, Int8Weight):
        quants = weight.values.transpose(0, 1).flatten(1)[:, : weight.in_features]
        return quants.float() * weight.scales[:, None]
    nibbles = torch.stack((weight.packed & 15, weight.packed >> 4), 1)  # [num_chunks, 2, out_features, half]
    quants = nibbles.permute(2, 0, 1, 3).flatten(1)[:, : weight.in_features].float()
    scales = (weight.groups & 0xFFFF).to(torch.int16).view(weight.scale_dtype).float()
    groups = torch.arange(weight.in_features, device=quants.device) // weight.group_size
    values = (quants - (weight.groups >> 16)[groups].t()) * scales[groups].t()
    if weight.input_order is None:
        return values
    return torch.empty_like(values).index_copy(1, weight.input_order, values)


def sample(logits: torch.Tensor, vocab_size: int, sampling: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, as `runner.sampler` draws it, but that among equal logits the order is that of the ids.

    logits   [num_rows, at least vocab_size] fp32
    returns  token_ids [num_rows] int64 and is_finite [num_rows] bool; token 0 where not finite
    """
    rows = logits[:, :vocab_size].double()
    is_finite = torch.isfinite(rows.max(dim=-1).values)
    token_ids = [_sample_row(row, sampling, i) if is_finite[i] else 0 for i, row in enumerate(rows)]
    return torch.tensor(token_ids, dtype=torch.int64, device=logits.device), is_finite


def _sample_row(row: torch.Tensor, sampling: SamplingTensors, i: int) -> int:
    temperature, top_k = sampling.temperatures[i].item(), int(sampling.top_ks[i])
    top_p, min_p = sampling.top_ps[i].item(), sampling.min_ps[i].item()
    if temperature == 0.0 or top_k == 1 or top_p == 0.0:
        return int(row.argmax())
    has_top_k = 0 < top_k < row.numel()
    weights = torch.exp((row - row.max()) / temperature)
    weights = weights * (weights >= min_p)
    order = row.argsort(descending=True, stable=True) if has_top_k or top_p < 1.0 else torch.arange(row.numel())
    weights = weights[order][: top_k if has_top_k else None]
    before = weights.cumsum(0) - weights
    weights = weights * (before < top_p * weights.sum()) if top_p < 1.0 else weights
    cumulative = weights.cumsum(0)
    seed, index, position = (int(column[i]) for column in (sampling.seeds, sampling.indices, sampling.positions))
    state = _splitmix64((seed & _MASK) ^ _splitmix64(index))
    uniform = (_splitmix64(state ^ _splitmix64(position)) >> 11) / 2**53
    chosen = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    return int(order[min(chosen, int(weights.nonzero()[-1]))])


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
