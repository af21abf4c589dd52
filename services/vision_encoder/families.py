"""Model families: what an architecture adds to tower and projector, and which architectures there are.

A family answers two questions with one rule, so that they cannot disagree: how many positions an image takes, from its
size alone, and which rows stand there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.preprocess import Preprocessing, load_preprocessing
from services.vision_encoder.projector import Projector
from services.vision_encoder.towers import TowerConfig, VisionTower
from services.vision_encoder.weights import WeightReader, load_projector, load_tower, prepare
from shared.hashing import digest
from shared.torch_io import Checkpoint, dtype_name

# Raise when a change of our code changes embeddings: keys of older versions are then never read again.
CODE_SCHEME: Final = b"diptych-encoder-v1"


class Family(Protocol):
    """One loaded model. `prepare_weights` once, then `encode` from one thread."""

    preprocessing: Preprocessing

    @property
    def hidden_size(self) -> int:
        """Width of an embedding row: the text model's hidden size."""
        ...

    def num_tokens(self, width: int, height: int) -> int:
        """Rows that an upright image of this size becomes."""
        ...

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        """Hex digest over everything but the image that changes an embedding."""
        ...

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None: ...

    def encode(self, images: Sequence[Tensor]) -> list[Tensor]:
        """images: 8-bit [num_tiles, 3, height, width] of equal shape -> per image [num_tokens, hidden_size]"""
        ...


@dataclass(slots=True)
class Llava:
    """LLaVA-1.5, BakLLaVA, LLaVA-Interleave: one tile per image, one row per patch.

    drops_first   the "default" strategy, which leaves out the first position: CLIP's class token, and for a tower
                  without one its first patch, as the reference does
    """

    tower: VisionTower
    projector: Projector
    preprocessing: Preprocessing
    drops_first: bool
    weights_digest: bytes

    @property
    def hidden_size(self) -> int:
        return self.projector.output_size

    def num_tokens(self, width: int, height: int) -> int:
        return self.tower.config.num_positions - int(self.drops_first)

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        choices = {
            "feature_layers": self.tower.feature_layers,
            "drops_first": self.drops_first,
            "hidden_act": self.tower.config.hidden_act,
            "layer_norm_eps": self.tower.config.layer_norm_eps,
            "num_heads": self.tower.config.num_heads,
            "projector_hidden_act": self.projector.hidden_act,
            "dtype": dtype_name(dtype),
            "background": background,
        }
        parts = (json.dumps(choices, sort_keys=True), self.preprocessing.to_json())
        return digest(CODE_SCHEME, self.weights_digest, *(part.encode() for part in parts)).hex()

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        prepare(self.tower, device, dtype)
        prepare(self.projector, device, dtype)

    @torch.inference_mode()
    def encode(self, images: Sequence[Tensor]) -> list[Tensor]:
        weight = self.tower.position_embedding
        pixels = normalize(torch.cat(list(images)).to(weight.device), self.preprocessing).to(weight.dtype)
        states = [state[:, 1:] if self.drops_first else state for state in self.tower(pixels)]
        return list(self.projector(torch.cat(states, dim=-1)).unbind())


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """8-bit [batch, 3, height, width] -> fp32 of the same shape, rounded step by step as the reference rounds."""
    rescaled = (pixels.to(torch.float64) * preprocessing.rescale_factor).to(torch.float32)
    mean = torch.tensor(preprocessing.mean, dtype=torch.float32, device=pixels.device)[:, None, None]
    std = torch.tensor(preprocessing.std, dtype=torch.float32, device=pixels.device)[:, None, None]
    return (rescaled - mean) / std


def load_llava(folder: Path, config: dict[str, Any]) -> Llava:
    tower_config = TowerConfig.from_hf(config.get("vision_config") or LLAVA_15_TOWER)
    feature_layers = resolve_feature_layers(config.get("vision_feature_layer", -2), tower_config.num_layers)
    preprocessing = load_preprocessing(
        folder, {"model_type": _kind(tower_config), "image_size": tower_config.image_size}
    )
    if preprocessing.size != (tower_config.image_size, tower_config.image_size):
        raise UnsupportedCheckpoint(
            f"the image processor makes pictures of {preprocessing.size[1]} x {preprocessing.size[0]} pixels, "
            f"the vision tower takes {tower_config.image_size} x {tower_config.image_size}"
        )
    reader = WeightReader(Checkpoint(folder))
    projector_act = str(config.get("projector_hidden_act", "gelu"))
    return Llava(
        tower=load_tower(reader, tower_config, feature_layers),
        projector=load_projector(reader, tower_config.hidden_size * len(feature_layers), projector_act),
        preprocessing=preprocessing,
        drops_first=_strategy(config.get("vision_feature_select_strategy", "default")) == "default",
        weights_digest=reader.digest,
    )


# What LlavaConfig means where a checkpoint has no vision_config.
LLAVA_15_TOWER: Final = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def _kind(config: TowerConfig) -> str:
    return "clip_vision_model" if config.is_clip else "siglip_vision_model"


def _strategy(value: object) -> Literal["default", "full"]:
    if value == "default" or value == "full":
        return value
    raise UnsupportedCheckpoint(f"vision_feature_select_strategy must be 'default' or 'full', not {value!r}")


def resolve_feature_layers(value: object, num_layers: int) -> tuple[int, ...]:
    """Indices from 0 (before the first layer) to num_layers; negative ones count from the end."""
    layers: list[Any] = value if isinstance(value, list) else [value]
    if not layers or not all(type(layer) is int and -num_layers - 1 <= layer <= num_layers for layer in layers):
        raise UnsupportedCheckpoint(f"vision_feature_layer {value!r} does not fit a tower of {num_layers} layers")
    return tuple(layer % (num_layers + 1) for layer in layers)


FAMILIES: Final[dict[str, Callable[[Path, dict[str, Any]], Family]]] = {
    "LlavaForConditionalGeneration": load_llava,
}


def load_family(folder: Path) -> Family:
    """The model in `folder`, weights read and digested. Raises UnsupportedCheckpoint with the reason."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UnsupportedCheckpoint(f"{folder} holds no config.json: not a checkpoint in Hugging Face format")
    config = json.loads(config_file.read_text())
    architectures = config.get("architectures") or ["(none)"]
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture](folder, config)
    raise UnsupportedCheckpoint(
        f"architecture {', '.join(architectures)} is not supported; supported: {', '.join(FAMILIES)}"
    )
