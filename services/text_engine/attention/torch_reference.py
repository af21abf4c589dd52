"""Attention in plain PyTorch, one sequence at a time: slow, on any device, and the oracle for the other backends."""

from __future__ import annotations

import torch

from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.kernels import reference
from services.text_engine.kernels.kv_layout import KVFormat

STEP_BYTES = 4


class TorchReferenceAttention:
    """Satisfies `AttentionBackend`. Gathers a sequence's keys and values, then one fp32 softmax over all scores.

    kv_cache_format  "auto": dtype; "bfloat16": that; "int8": bytes, see `reference.quantize_heads`
    """

    kv_block_dim = 1

    def __init__(self, dtype: torch.dtype, device: torch.device, *, kv_cache_format: KVFormat = "auto") -> None:
        if kv_cache_format == "fp8":
            raise ValueError("this attention keeps keys and values in their own dtype or in int8, not in fp8")
        self._dtype = dtype
        self._device = device
        self._is_int8 = kv_cache_format == "int8"
        self._cache_dtype = {"bfloat16": torch.bfloat16, "int8": torch.uint8}.get(kv_cache_format, dtype)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, shape: AttentionShape) -> torch.Tensor:
        """[2, num_blocks, block_size, num_kv_heads, row]: keys, then values.

        A row is head_dim elements; in int8 head_dim bytes, up to three for nothing, and an fp32 step.
        """
        row = -(-shape.head_dim // STEP_BYTES) * STEP_BYTES + STEP_BYTES if self._is_int8 else shape.head_dim
        size = (2, num_blocks, block_size, shape.num_kv_heads, row)
        return torch.zeros(size, dtype=self._cache_dtype, device=self._device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Shapes: see `AttentionBackend.attend`; kv_cache as `allocate_kv_cache` makes it."""
        query, key = reference.rotary(query, key, cos_sin)
        _store(key, kv_cache[0], metadata.slot_mapping)
        _store(value, kv_cache[1], metadata.slot_mapping)
        output = torch.empty_like(query)
        starts = metadata.cu_seqlens_q.tolist()
        for i, seq_len in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            keys, values = (_gather(cache, metadata.block_tables[i], seq_len, shape.head_dim) for cache in kv_cache)
            visible = _visible(seq_len, rows, shape, metadata)
            output[rows] = _attend_one(query[rows].float(), keys, values, visible, shape).to(query.dtype)
        return output.flatten(1)


def _store(new: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """new [num_tokens, num_kv_heads, head_dim] into cache [num_blocks, block_size, num_kv_heads, row]."""
    stored = slot_mapping >= 0
    slots, new = slot_mapping[stored], new[stored]
    if cache.dtype != torch.uint8:
        cache.flatten(0, 1)[slots] = new.to(cache.dtype)
        return
    quants, steps = reference.quantize_heads(new)
    cache.flatten(0, 1)[slots, :, : new.shape[-1]] = quants
    cache.view(torch.float32).flatten(0, 1)[slots, :, -1:] = steps


def _gather(cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, head_dim: int) -> torch.Tensor:
    """The first seq_len positions of one sequence -> [seq_len, num_kv_heads, head_dim] fp32."""
    num_blocks = -(-seq_len // cache.shape[1])
    rows = cache[block_table[:num_blocks].long()].flatten(0, 1)[:seq_len]
    if cache.dtype != torch.uint8:
        return rows.float()
    return (rows[..., :head_dim].float() - 128) * rows.view(torch.float32)[..., -1:]


def _visible(seq_len: int, rows: slice, shape: AttentionShape, metadata: AttentionMetadata) -> torch.Tensor:
    """[num_new, seq_len] bool: which positions each of a sequence's new tokens, rows of the batch, sees."""
    position = torch.arange(seq_len, device=metadata.seq_lens.device)
    distance = position[seq_len - (rows.stop - rows.start) :, None] - position
    visible = distance >= 0
    if shape.sliding_window is not None:
        visible &= distance < shape.sliding_window
    if metadata.image_spans is not None:
        start, end = metadata.image_spans[rows].unbind(1)
        visible |= (start[:, None] <= position) & (position < end[:, None])
    return visible


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """The last num_new positions of one sequence over all its positions, in fp32.

    query         [num_new, num_heads, head_dim]
    keys, values  [seq_len, num_kv_heads, head_dim]
    visible       [num_new, seq_len] bool
    returns       [num_new, num_heads, head_dim]
    """
    group = shape.num_heads // shape.num_kv_heads
    grouped_query = query.view(query.shape[0], shape.num_kv_heads, group, shape.head_dim)
    scores = torch.einsum("qkgd,skd->kgqs", grouped_query, keys) * shape.scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("kgqs,skd->qkgd", weights, values).flatten(1, 2)
