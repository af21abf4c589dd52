"""Reads a Triton KV cache back in plain PyTorch, as `kv_layout` describes it."""

from __future__ import annotations

import torch

from services.text_engine.kernels.kv_layout import KVLayout


def stored_keys_and_values(cache: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache stands for, each [num_slots, num_kv_heads, head_dim] fp32."""
    num_blocks, size, row = cache.shape[0], layout.block_size, layout.row_stride
    elements = cache[..., : 2 * size * row]
    keys, values = elements.unflatten(-1, (2, size * row)).unbind(2)
    keys = keys.unflatten(-1, (size, row))
    values = values.unflatten(-1, (row, size)).mT if layout.is_quantized else values.unflatten(-1, (size, row))
    both = [_decode(part, layout) for part in (keys, values)]
    if layout.is_quantized:
        scales = cache[..., 2 * size * row :].contiguous().view(torch.float32).unflatten(-1, (2, size))
        both = [part * scales[:, :, i, :, None] / layout.largest for i, part in enumerate(both)]
    keys, values = (
        part.transpose(1, 2).reshape(num_blocks * size, layout.num_kv_heads, row)[..., : layout.head_dim]
        for part in both
    )
    return keys, values


def poison(cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """NaN wherever there can be one: what is read of a slot that was never written spoils the result."""
    if not layout.is_quantized:
        return cache.fill_(torch.nan)
    cache.view(torch.float32).fill_(torch.nan)
    cache[..., : 2 * layout.block_size * layout.row_stride] = 0x7E  # the largest number: no byte ever stored is a NaN
    return cache


def _decode(elements: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    if layout.format == "int8":
        return elements.float() - 128
    if layout.format == "fp8":
        return elements.contiguous().view(torch.float8_e4m3fn).float()
    return elements.float()
