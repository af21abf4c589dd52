"""What the model asks of attention: one call per layer over one ragged batch, whatever mix of prefill and decode it is.

A backend owns the layout of its KV cache; nobody else looks inside. Backends: `torch_reference` (the oracle, any
device), `cpu_backend` (native kernels over the paged cache), `triton_backend` (CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each sequence's tokens are, in the flat batch and in the paged cache. All tensors on the model's device.

    cu_seqlens_q  [num_seqs + 1] int32; sequence i's new tokens are rows cu_seqlens_q[i] : cu_seqlens_q[i + 1]; a
                  sequence may have none, and the last rows may be in no sequence: what comes out for them is arbitrary
    seq_lens      [num_seqs] int32; cached tokens plus this step's: new token j of sequence i sits at position
                  seq_lens[i] - num_new_tokens[i] + j and sees every position up to its own
    block_tables  [num_seqs, max_blocks] int32; padding entries are 0 and never read
    slot_mapping  [num_tokens] int64; block * block_size + offset where each new token's key and value go; -1: nowhere
    image_spans   [num_tokens, 2] int32, or None if all of the batch is causal. A token inside a span of positions
                  start : end sees all of it, even later positions, window or not; the span then lies whole within the
                  sequence's seq_len. 0, 0 for every other token
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    image_spans: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What stays the same for every call of one layer.

    scale            multiplies q.k before the softmax
    sliding_window   a token sees itself and the `sliding_window - 1` positions before it; None: all
    soft_cap         scores become soft_cap * tanh(score / soft_cap) before the softmax; None: unchanged
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None


class AttentionBackend(Protocol):
    """Rotates queries and keys, stores keys and values into the paged cache, attends over the cache.

    kv_block_dim   the dimension of a layer's cache that counts blocks
    """

    kv_block_dim: int

    def allocate_kv_cache(self, num_blocks: int, block_size: int, shape: AttentionShape) -> torch.Tensor:
        """One layer's cache, in the backend's own layout; its size in bytes is what `num_blocks` blocks cost."""
        ...

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
        """Attention of every new token over its own sequence, causal but for `image_spans`.

        query    [num_tokens, num_heads, head_dim], not yet rotated; may be overwritten, as key may
        key      [num_tokens, num_kv_heads, head_dim], not yet rotated; value alike
        cos_sin  [num_tokens, head_dim] fp32, as `kernels.reference.rotary` takes it
        returns  [num_tokens, num_heads * head_dim] in query's dtype
        """
        ...
