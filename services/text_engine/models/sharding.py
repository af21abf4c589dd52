"""Which part of the model one of several ranks holds, by Megatron's scheme.

The first product of each half of a layer is split by its outputs (query, key and value by heads; gate and up by
features), the second (o_proj, down_proj) by its inputs, so that a half needs one sum over the ranks, after its second
product, and nothing in between. With more ranks than KV heads each KV head is held by several ranks. The head is split
by rows of the vocabulary, because all of it is read for every token; the embedding is held by rank 0 alone, which
hands the input rows of a step, images included, to the others.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from services.text_engine.models.config import ModelConfig, MoeConfig
from shared.settings_errors import SettingRefused

SPLIT_BY_ROWS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
SPLIT_BY_COLUMNS: Final = ("o_proj", "down_proj")
HEAD_ROWS_MULTIPLE: Final = 8  # keeps the rows of every rank's logits aligned


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `index` of `size`. Every tensor of a layer has the same shape on each of them."""

    index: int
    size: int

    def config(self, config: ModelConfig) -> ModelConfig:
        """The decoder that this rank runs: fewer heads and features. Raises SettingRefused if they do not divide."""
        problem = _indivisible(config, self.size)
        if problem is not None:
            sizes = [size for size in range(1, config.num_heads + 1) if _indivisible(config, size) is None]
            raise SettingRefused(
                "tensor_parallel_size", self.size, f"{problem}; this model can have {', '.join(map(str, sizes))}"
            )
        num_kv_heads = config.num_kv_heads
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
            moe=None if config.moe is None else self._moe(config.moe),
        )

    def _moe(self, moe: MoeConfig) -> MoeConfig:
        """Every rank has a part of every expert, so that all ranks have work whatever the router chooses."""
        shared = moe.shared_intermediate_size
        return dataclasses.replace(
            moe,
            intermediate_size=moe.intermediate_size // self.size,
            shared_intermediate_size=None if shared is None else shared // self.size,
        )

    def part(self, name: str, config: ModelConfig) -> tuple[slice, ...] | None:
        """The part of the tensor `name` (ours, not fused; the whole model's config) that this rank reads; None: all."""
        owner, _, kind = name.rpartition(".")
        matrix = owner.rpartition(".")[2]
        if name == "lm_head.weight":
            return (self.head_rows(config.vocab_size),)
        if matrix in SPLIT_BY_ROWS:
            return (self._rows(owner, config),)
        if matrix in SPLIT_BY_COLUMNS and kind == "weight":
            is_output = matrix == "o_proj"
            columns = config.num_heads * config.head_dim if is_output else _num_features(owner, config)
            return (slice(None), self._even(columns))
        return None

    def head_rows(self, vocab_size: int) -> slice:
        """Rows of the vocabulary whose logits this rank computes; the last ranks may have fewer than the others."""
        each = head_rows_of_a_rank(vocab_size, self.size)
        return slice(min(self.index * each, vocab_size), min((self.index + 1) * each, vocab_size))

    def _rows(self, owner: str, config: ModelConfig) -> slice:
        matrix = owner.rpartition(".")[2]
        if matrix == "q_proj":
            return self._even(config.num_heads * config.head_dim)
        if matrix in ("k_proj", "v_proj"):
            num_held = max(1, config.num_kv_heads // self.size)
            first = self.index * config.num_kv_heads // self.size
            return slice(first * config.head_dim, (first + num_held) * config.head_dim)
        return self._even(_num_features(owner, config))

    def _even(self, count: int) -> slice:
        each = count // self.size
        return slice(self.index * each, (self.index + 1) * each)


def _indivisible(config: ModelConfig, size: int) -> str | None:
    """Why a model cannot be split among `size` ranks; None: it can."""
    counts = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.moe is not None:
        counts["moe_intermediate_size"] = config.moe.intermediate_size
        counts["shared_expert_intermediate_size"] = config.moe.shared_intermediate_size or 0
    for name, count in counts.items():
        if count % size:
            return f"must divide the model's {name} = {count}"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"must divide the model's num_key_value_heads = {config.num_kv_heads} or be a multiple of it"
    return None


def _num_features(owner: str, config: ModelConfig) -> int:
    """Of the whole MLP that a matrix belongs to: "layers.0.mlp.up_proj", "layers.0.mlp.experts.3.up_proj"."""
    if config.moe is not None and ".shared_expert." in owner:
        return config.moe.shared_intermediate_size or 0
    if config.moe is not None and ".experts." in owner:
        return config.moe.intermediate_size
    return config.intermediate_size


def head_rows_of_a_rank(vocab_size: int, size: int) -> int:
    return -(-vocab_size // size // HEAD_ROWS_MULTIPLE) * HEAD_ROWS_MULTIPLE
