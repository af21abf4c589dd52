"""The one decoder network of every family: pre-norm, rotary grouped-query attention, gated MLP.

Families differ in `ModelConfig` only. Plain objects, no autograd: the caller holds torch.inference_mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from services.text_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionShape
from services.text_engine.kernels.interface import Kernels
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.layers import Linear, MakeProduct, Product
from services.text_engine.models.rope import cos_sin_table

ReadWeight = Callable[[str], torch.Tensor]


def attention_shapes(config: ModelConfig) -> tuple[AttentionShape, ...]:
    """Per layer, what its KV cache and its attention look like."""
    scale = config.head_dim**-0.5
    return tuple(
        AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale, window)
        for window in config.sliding_windows
    )


class Decoder:
    """Token ids to logits, over KV caches that the caller owns.

    read_weight   our name ("layers.0.self_attn.qkv_proj.weight") -> the tensor on `device`; asked once for each name,
                  layer by layer, so that a lazy reader never holds more than one tensor beside the finished layers
    make_product  keeps a weight matrix for its products
    """

    def __init__(
        self,
        config: ModelConfig,
        read_weight: ReadWeight,
        attention: AttentionBackend,
        kernels: Kernels,
        device: torch.device,
        make_product: MakeProduct = Linear,
    ) -> None:
        self.config = config
        self.attention_shapes = attention_shapes(config)
        self._kernels = kernels
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, config.max_position_embeddings, device)
        self._embed_tokens = read_weight("embed_tokens.weight")
        self._layers = [
            DecoderLayer(config, read_weight, f"layers.{i}.", shape, attention, kernels, make_product)
            for i, shape in enumerate(self.attention_shapes)
        ]
        final_norm = read_weight("norm.weight")
        self._norms_after_layers = [layer.input_norm for layer in self._layers[1:]] + [final_norm]
        # Tied: the embedding needs plain rows, the head may repack its own copy.
        head = self._embed_tokens if config.tie_word_embeddings else read_weight("lm_head.weight")
        self._lm_head = make_product(head, None)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [num_tokens] -> a new tensor [num_tokens, hidden_size]"""
        return functional.embedding(token_ids, self._embed_tokens)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """All layers and the final norm.

        hidden     [num_tokens, hidden_size]: embeddings of tokens and images; may be overwritten
        positions  [num_tokens] int64
        kv_caches  one per layer, made by the attention backend for `attention_shapes`; receives the new tokens
        returns    [num_tokens, hidden_size]
        """
        kernels, eps = self._kernels, self.config.rms_norm_eps
        cos_sin = self._cos_sin[positions]
        residual = hidden
        x = kernels.rms_norm(hidden, self._layers[0].input_norm, eps)
        for layer, kv_cache, next_norm in zip(self._layers, kv_caches, self._norms_after_layers, strict=True):
            x = layer.attend(x, cos_sin, kv_cache, metadata)
            x, residual = kernels.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = layer.feed_forward(x)
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size], as `forward` returns it -> [num_rows, vocab_size] fp32"""
        return self._lm_head(hidden).float()


class DecoderLayer:
    """One layer's weights and its two halves; the residual stream and its norms are handled by `Decoder.forward`."""

    def __init__(
        self,
        config: ModelConfig,
        read_weight: ReadWeight,
        prefix: str,
        shape: AttentionShape,
        attention: AttentionBackend,
        kernels: Kernels,
        make_product: MakeProduct,
    ) -> None:
        def linear(name: str, has_bias: bool = False) -> Product:
            bias = read_weight(f"{prefix}{name}.bias") if has_bias else None
            return make_product(read_weight(f"{prefix}{name}.weight"), bias)

        self._shape = shape
        self._attention = attention
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self.input_norm = read_weight(f"{prefix}input_layernorm.weight")
        self._qkv_proj = linear("self_attn.qkv_proj", config.qkv_bias)
        self._q_norm = read_weight(f"{prefix}self_attn.q_norm.weight") if config.qk_norm else None
        self._k_norm = read_weight(f"{prefix}self_attn.k_norm.weight") if config.qk_norm else None
        self._o_proj = linear("self_attn.o_proj", config.output_bias)
        self.post_attention_norm = read_weight(f"{prefix}post_attention_layernorm.weight")
        self._gate_up_proj = linear("mlp.gate_up_proj", config.mlp_bias)
        self._down_proj = linear("mlp.down_proj", config.mlp_bias)

    def attend(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size], cos_sin [num_tokens, head_dim] fp32 -> like x"""
        shape = self._shape
        heads = self._qkv_proj(x).view(x.shape[0], -1, shape.head_dim)
        query, key, value = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            query = self._kernels.rms_norm(query, self._q_norm, self._eps)
            key = self._kernels.rms_norm(key, self._k_norm, self._eps)
        return self._o_proj(self._attention.attend(query, key, value, cos_sin, kv_cache, metadata, shape))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> alike"""
        return self._down_proj(self._kernels.silu_mul(self._gate_up_proj(x)))
