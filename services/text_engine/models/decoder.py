"""The one decoder network of every family: pre-norm, rotary grouped-query attention, gated MLP or a mixture of them.

Families differ in `ModelConfig` only. Plain objects, no autograd: the caller holds torch.inference_mode.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from services.text_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionShape
from services.text_engine.kernels.interface import Kernels
from services.text_engine.models.config import ModelConfig, MoeConfig
from services.text_engine.models.layers import (
    Adapt,
    GatheredProduct,
    MakeProductOfAll,
    Product,
    Ranks,
    ReadMatrix,
    ReadWeight,
    SummedProduct,
)
from services.text_engine.models.moe import GatedMlp, read_mixture
from services.text_engine.models.rope import cos_sin_at, cos_sin_table
from services.text_engine.models.sharding import head_rows_of_a_rank


def attention_shapes(config: ModelConfig) -> tuple[AttentionShape, ...]:
    """Per layer, what its KV cache and its attention look like."""
    scale = config.attention_scale or config.head_dim**-0.5
    return tuple(
        AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale, window)
        for window in config.sliding_windows
    )


class Decoder:
    """Token ids to logits, over KV caches that the caller owns.

    read_weight   our name ("layers.0.self_attn.qkv_proj.weight") -> the tensor on `device`; asked once for each name,
                  layer by layer, so that a lazy reader never holds more than one tensor beside the finished layers
    read_matrix   alike, for the matrices that are only multiplied with, which may be quantized
    make_product  keeps weight matrices for their products
    ranks         those that share the model, each with a Decoder of its own and the config of its part, as `sharding`
                  makes it; None: this one is all of it
    adapt         name and product of an attention or MLP matrix ("layers.0.self_attn.qkv_proj") -> the product to use
                  in its place; experts have none. None: they are used as they are
    """

    def __init__(
        self,
        config: ModelConfig,
        read_weight: ReadWeight,
        attention: AttentionBackend,
        kernels: Kernels,
        device: torch.device,
        read_matrix: ReadMatrix,
        make_product: MakeProductOfAll,
        ranks: Ranks | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        self.config = config
        self.attention_shapes = attention_shapes(config)
        self._kernels = kernels
        self._ranks = ranks
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self._cos_sin_tables = [
            cos_sin_table(rope, config.head_dim, config.max_position_embeddings, device) for rope in ropes
        ]
        self._table_of_layers = [
            0 if config.local_rope is None or window is None else 1 for window in config.sliding_windows
        ]
        is_first = ranks is None or ranks.index == 0
        self._embed_tokens = read_weight("embed_tokens.weight") if is_first else None
        self._layers = [
            DecoderLayer(
                config,
                read_weight,
                read_matrix,
                f"layers.{i}.",
                shape,
                attention,
                kernels,
                make_product,
                ranks,
                config.moe_at(i),
                adapt,
            )
            for i, shape in enumerate(self.attention_shapes)
        ]
        final_norm = read_weight("norm.weight")
        self._norms_after_layers = [layer.input_norm for layer in self._layers[1:]] + [final_norm]
        self._lm_head = self._make_head(read_matrix, make_product)
        scale = config.embedding_scale
        # Rounded as transformers rounds it, to the weights' dtype.
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=final_norm.dtype).item()

    def _make_head(self, read_matrix: ReadMatrix, make_product: MakeProductOfAll) -> Product:
        # Tied: the embedding needs plain rows, the head may repack its own copy.
        tied = self._embed_tokens if self.config.tie_word_embeddings else None
        if self._ranks is None:
            return make_product(read_matrix("lm_head.weight") if tied is None else [tied], None)
        num_rows = head_rows_of_a_rank(self.config.vocab_size, self._ranks.size)
        head = make_product(read_matrix("lm_head.weight") if tied is None else [tied[:num_rows]], None)
        return GatheredProduct(head, self._ranks, num_outputs=self.config.vocab_size, num_outputs_of_a_rank=num_rows)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [num_tokens] -> a new tensor [num_tokens, hidden_size]; on ranks but the first, without content"""
        dtype = self._layers[0].input_norm.dtype
        if self._embed_tokens is None:
            return torch.empty((len(token_ids), self.config.hidden_size), dtype=dtype, device=token_ids.device)
        rows = functional.embedding(token_ids, self._embed_tokens).to(dtype)
        return rows if self._embedding_scale is None else rows.mul_(self._embedding_scale)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """All layers and the final norm.

        hidden     [num_tokens, hidden_size]: embeddings of tokens and images, those of the first rank where there are
                   several; may be overwritten. With images' rows among them [num_tokens, num_row_parts * hidden_size],
                   zeros behind the tokens': each further part is added to what one of the first layers gives
        positions  [num_tokens] int64; [3, num_tokens] where the rope has sections
        kv_caches  one per layer, made by the attention backend for `attention_shapes`; receives the new tokens
        returns    [num_tokens, hidden_size]
        """
        kernels, eps = self._kernels, self.config.rms_norm_eps
        if self._ranks is not None:
            hidden = self._ranks.share(hidden)
        deep_parts: list[torch.Tensor] = []
        if hidden.shape[1] > self.config.hidden_size:
            first_part, *deep_parts = torch.split(hidden, self.config.hidden_size, dim=1)
            hidden = first_part.contiguous()
        cos_sins = [cos_sin_at(table, positions, self.config.rope) for table in self._cos_sin_tables]
        residual = hidden
        x = kernels.rms_norm(hidden, self._layers[0].input_norm, eps)
        for i, (layer, kv_cache, next_norm, table) in enumerate(
            zip(self._layers, kv_caches, self._norms_after_layers, self._table_of_layers, strict=True)
        ):
            x = layer.attend(x, cos_sins[table], kv_cache, metadata)
            x, residual = kernels.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = layer.feed_forward(x)
            if i < len(deep_parts):
                x += deep_parts[i]
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size], as `forward` returns it -> [num_rows, vocab_size] fp32, on the first rank"""
        return self._lm_head(hidden).float()


class DecoderLayer:
    """One layer's weights and its two halves; the residual stream and its norms are handled by `Decoder.forward`."""

    def __init__(
        self,
        config: ModelConfig,
        read_weight: ReadWeight,
        read_matrix: ReadMatrix,
        prefix: str,
        shape: AttentionShape,
        attention: AttentionBackend,
        kernels: Kernels,
        make_product: MakeProductOfAll,
        ranks: Ranks | None,
        moe: MoeConfig | None,
        adapt: Adapt | None,
    ) -> None:
        def linear(name: str, has_bias: bool = False) -> Product:
            bias = read_weight(f"{prefix}{name}.bias") if has_bias else None
            product = make_product(read_matrix(f"{prefix}{name}.weight"), bias)
            return product if adapt is None else adapt(f"{prefix}{name}", product)

        def summed(name: str, has_bias: bool) -> Product:
            if ranks is None:
                return linear(name, has_bias)
            return SummedProduct(linear(name, has_bias and ranks.index == 0), ranks)

        def norm(name: str, is_there: bool) -> torch.Tensor | None:
            return read_weight(f"{prefix}{name}.weight") if is_there else None

        self._shape = shape
        self._attention = attention
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self.input_norm = read_weight(f"{prefix}input_layernorm.weight")
        self._qkv_proj = linear("self_attn.qkv_proj", config.qkv_bias)
        self._q_norm = norm("self_attn.q_norm", config.qk_norm)
        self._k_norm = norm("self_attn.k_norm", config.qk_norm)
        self._o_proj = summed("self_attn.o_proj", config.output_bias)
        self._attention_output_norm = norm("self_attn.output_norm", config.output_norms)
        self.post_attention_norm = read_weight(f"{prefix}post_attention_layernorm.weight")
        gated_product = kernels.gelu_tanh_mul if config.activation == "gelu_tanh" else kernels.silu_mul
        self._mlp: Product
        if moe is None:
            gate_up = linear("mlp.gate_up_proj", config.mlp_bias)
            self._mlp = GatedMlp(gate_up, gated_product, summed("mlp.down_proj", config.mlp_bias))
        else:
            mixture = read_mixture(moe, f"{prefix}mlp.", read_weight, read_matrix, make_product, gated_product)
            self._mlp = mixture if ranks is None else SummedProduct(mixture, ranks)
        self._mlp_output_norm = norm("mlp.output_norm", config.output_norms)

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
        attended = self._attention.attend(query, key, value, cos_sin, kv_cache, metadata, shape)
        return self._normed(self._o_proj(attended), self._attention_output_norm)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> alike"""
        return self._normed(self._mlp(x), self._mlp_output_norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._kernels.rms_norm(x, weight, self._eps)
