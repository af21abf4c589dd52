"""What the engine asks of a model: token ids in, logits out, over KV caches that the caller owns."""

from __future__ import annotations

from typing import Protocol

import torch

from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.models.config import ModelConfig


class CausalModel(Protocol):
    """`decoder.Decoder` says what arguments and results are; the other one is `transformers_decoder`'s.

    attention_shapes  per layer, what its KV cache and its attention look like
    """

    config: ModelConfig
    attention_shapes: tuple[AttentionShape, ...]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
