"""`ModelConfig`: the facts about a checkpoint that the engine needs, and the reader that gets them out of JSON.

Parsed from config.json and generation_config.json without transformers. Which field means what in which model is
`families`' business; a wrong or unsupported value raises `ConfigError` naming the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


class ConfigError(ValueError):
    """A field of the checkpoint's config is missing, wrong, or asks for something the engine does not do."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """`attention_factor` multiplies cosines and sines; `truncate` rounds the corrected range to whole dimensions."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
# native: `decoder`, for the families that it knows; transformers: its own classes, over our cache
Implementation = Literal["native", "transformers"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """
    sections     where a position has three coordinates: how many of a head's frequencies turn with each, over and over
                 in their order; None: one coordinate
    interleaved  they take turns, frequency by frequency, until the second and the third have had their number
    """

    theta: float
    scaling: RopeScaling | None = None
    sections: tuple[int, ...] | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The layers whose feed-forward is a mixture of experts.

    layers                    per layer: whether it is one
    num_experts_per_token     that the router chooses for each token
    intermediate_size         of one expert
    normalizes                the weights of a token's experts add up to one
    shared_intermediate_size  of the expert that every token takes; None: there is none
    """

    layers: tuple[bool, ...]
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalizes: bool
    shared_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_token}; the model has {self.num_experts} experts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder's shape. Field names are Hugging Face's where they say the same thing.

    architecture          the checkpoint's class in transformers; for Llava the whole model's, not the text part's
    implementation        whose code runs the model
    local_rope            of the layers with a sliding window; None: the same as of the others
    sliding_windows       per layer: how many positions a token sees, itself included; None: all before it
    output_norms          what attention and MLP give is normed before it is added
    norm_offset           added to the stored weights of every norm
    embedding_scale       multiplies the tokens' embeddings; images' rows come scaled
    attention_scale       multiplies q.k; None: head_dim ** -0.5
    image_token_id        the id that stands for an image position in the prompt; None: the model takes no images
    image_mark_id         what the chat template writes for an image; None: `image_token_id`
    num_deepstack_layers  the first ones, to whose outputs images' rows are added: each layer has its own part of a row
    moe                   of layers that are mixtures of experts; None: no layer is
    eos_token_ids         any of them ends a sequence
    dtype                 of the stored weights, "bfloat16" or the like; None: the config does not say
    """

    architecture: str = ""
    implementation: Implementation = "native"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    local_rope: RopeConfig | None = None
    output_norms: bool = False
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float | None = None
    attention_scale: float | None = None
    moe: MoeConfig | None = None
    image_token_id: int | None = None
    image_mark_id: int | None = None
    num_deepstack_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def num_row_parts(self) -> int:
        """Vectors of `hidden_size` that an image's row is made of: one for the input, one for each DeepStack layer."""
        return 1 + self.num_deepstack_layers

    def moe_at(self, layer: int) -> MoeConfig | None:
        """None: the layer has an ordinary MLP."""
        return self.moe if self.moe is not None and self.moe.layers[layer] else None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads is {self.num_kv_heads}; it must divide num_attention_heads = {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        sections = self.rope.sections
        if sections is not None and (len(sections) % 3 or 2 * sum(sections) != self.head_dim):
            raise ConfigError(
                f"mrope_section is {list(sections)}; three, or three times as many, that add up to half of head_dim = "
                f"{self.head_dim} are needed"
            )
        if sections is not None and self.rope.interleaved and len(sections) != 3:
            raise ConfigError(f"mrope_section is {list(sections)}; three are needed to interleave them")
        if self.num_deepstack_layers > self.num_layers:
            raise ConfigError(
                f"deepstack_visual_indexes are {self.num_deepstack_layers}, one for each of the text model's first "
                f"layers; it has {self.num_layers}"
            )


class Fields:
    """One JSON object of a config file, read field by field; every complaint names the field with its path.

    A null field counts as absent, except to `is_null`. A missing field without a default is an error.
    """

    def __init__(self, values: Mapping[str, object], path: str) -> None:
        self._values = values
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, field: str) -> bool:
        """Stated, and stated as null: for the few fields where that differs from being left out."""
        return field in self._values and self._values[field] is None

    def name(self, field: str) -> str:
        """ "config.json: text_config.hidden_size", for messages."""
        return f"{self._path}{field}"

    def raw(self, field: str) -> object:
        return self._values.get(field)

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._required(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"a whole number of at least {minimum} is needed")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self._required(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.error(field, "a positive number is needed")
        return float(value)

    def integers(self, field: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 1; it must be there."""
        value = self._required(field, None)
        if not isinstance(value, list) or not all(type(item) is int and item > 0 for item in value):
            raise self.error(field, "a list of positive whole numbers is needed")
        return tuple(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self._required(field, default)
        if not isinstance(value, bool):
            raise self.error(field, "true or false is needed")
        return value

    def layer_numbers(self, field: str) -> frozenset[int]:
        """A list of whole numbers from 0; absent: none."""
        value = self._required(field, [])
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(field, "a list of layers, counted from 0, is needed")
        return frozenset(value)

    def strings(self, field: str) -> tuple[str, ...]:
        """A list of strings; absent: none."""
        value = self._required(field, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(field, "a list of strings is needed")
        return tuple(value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        """A token id or a list of them; absent: none."""
        value = self._required(field, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise self.error(field, "a token id or a list of token ids is needed")
        return tuple(ids)

    def nested(self, field: str) -> Fields:
        value = self._required(field, {})
        if not isinstance(value, dict):
            raise self.error(field, "an object is needed")
        return Fields(value, f"{self._path}{field}.")

    def error(self, field: str, wanted: str) -> ConfigError:
        given = f"is {self._values[field]!r}" if field in self._values else "is missing"
        return ConfigError(f"{self.name(field)} {given}; {wanted}")

    def _required(self, field: str, default: object) -> Any:
        value = self._values.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "this model needs it")
            return default
        return value


def read_json(file: Path) -> Fields:
    """The JSON object in `file`. Raises ConfigError if it is missing or not an object."""
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file.parent} holds no {file.name}: it is not a checkpoint in Hugging Face format"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return Fields(values, f"{file.name}: ")
