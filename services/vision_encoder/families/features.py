"""The part that all LLaVA-like families share: tower and projector, from tiles to rows of the text model's width.

What a family adds is how the tiles are cut and in which order their rows stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.pass_graphs import PassGraphs
from services.vision_encoder.preprocessing.interface import Preprocessing
from services.vision_encoder.projector import Projector
from services.vision_encoder.towers import TowerConfig, VisionTower
from services.vision_encoder.weights import WeightReader, load_projector, load_tower, prepare
from shared.cuda_capture import Capture

# What the LLaVA configs mean where a checkpoint has no vision_config.
CLIP_L_336: Final = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}

# A picture may have 37 tiles and a batch eight such pictures; what a pass needs of memory must not follow from that.
MAX_TILES_PER_PASS: Final = 32


class TilePasses:
    """8-bit tiles [num_tiles, 3, side, side] -> `run` of them, a bounded number at once, as graphs where recorded.

    run   normalized pixels [num_tiles, 3, side, side] -> [num_tiles, num_rows, hidden_size], each tile by itself
    """

    def __init__(self, tower: VisionTower, run: Callable[[Tensor], Tensor]) -> None:
        self._tower = tower
        self._run = run
        self._graphs: PassGraphs | None = None

    @torch.inference_mode()
    def record_graphs(self, capture: Capture) -> None:
        side, weight = self._tower.config.image_size, self._tower.position_embedding
        self._graphs = PassGraphs(self._run, weight.new_zeros(3, side, side), capture)

    @torch.inference_mode()
    def __call__(self, tiles: Tensor, preprocessing: Preprocessing) -> Tensor:
        return torch.cat([self._one_pass(some, preprocessing) for some in torch.split(tiles, MAX_TILES_PER_PASS)])

    def _one_pass(self, tiles: Tensor, preprocessing: Preprocessing) -> Tensor:
        weight = self._tower.position_embedding
        pixels = normalize(tiles.to(weight.device), preprocessing).to(weight.dtype)
        return self._run(pixels) if self._graphs is None else self._graphs(pixels)


@dataclass(slots=True)
class TileFeatures:
    """Tower and projector of one checkpoint.

    drops_first   the "default" strategy, which leaves out the first position: CLIP's class token, and for a tower
                  without one its first patch, as the reference does
    """

    tower: VisionTower
    projector: Projector
    drops_first: bool
    passes: TilePasses = field(init=False)

    def __post_init__(self) -> None:
        self.passes = TilePasses(self.tower, self._rows)

    @property
    def hidden_size(self) -> int:
        return self.projector.output_size

    @property
    def num_rows(self) -> int:
        """Rows of one tile."""
        return self.tower.config.num_positions - int(self.drops_first)

    @property
    def choices(self) -> dict[str, object]:
        """For the fingerprint: what changes rows and is not in the weights."""
        return {
            "feature_layers": self.tower.feature_layers,
            "drops_first": self.drops_first,
            "hidden_act": self.tower.config.hidden_act,
            "layer_norm_eps": self.tower.config.layer_norm_eps,
            "num_heads": self.tower.config.num_heads,
            "projector_hidden_act": self.projector.hidden_act,
            "projector_layer_norm_eps": self.projector.layer_norm_eps,
        }

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        prepare(self.tower, device, dtype)
        prepare(self.projector, device, dtype)

    def record_graphs(self, capture: Capture) -> None:
        self.passes.record_graphs(capture)

    def __call__(self, tiles: Tensor, preprocessing: Preprocessing) -> Tensor:
        """8-bit tiles [num_tiles, 3, height, width] -> [num_tiles, num_rows, hidden_size]"""
        return self.passes(tiles, preprocessing)

    def _rows(self, pixels: Tensor) -> Tensor:
        states = [state[:, 1:] if self.drops_first else state for state in self.tower(pixels)]
        rows: Tensor = self.projector(torch.cat(states, dim=-1))
        return rows


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """8-bit [batch, 3, height, width] -> fp32 of the same shape, rounded step by step as the reference rounds."""
    rescaled = (pixels.to(torch.float64) * preprocessing.rescale_factor).to(torch.float32)
    mean = torch.tensor(preprocessing.mean, dtype=torch.float32, device=pixels.device)[:, None, None]
    std = torch.tensor(preprocessing.std, dtype=torch.float32, device=pixels.device)[:, None, None]
    return (rescaled - mean) / std


def load_tile_features(
    reader: WeightReader, config: Mapping[str, Any], tower_config: TowerConfig, *, feature_layer: object, strategy: str
) -> TileFeatures:
    """feature_layer, strategy   what the config says or, where it is silent, the family's default"""
    feature_layers = resolve_feature_layers(feature_layer, tower_config.num_layers)
    if strategy not in ("default", "full"):
        raise UnsupportedCheckpoint(f"vision_feature_select_strategy must be 'default' or 'full', not {strategy!r}")
    return TileFeatures(
        tower=load_tower(reader, tower_config, feature_layers),
        projector=load_projector(
            reader,
            tower_config.hidden_size * len(feature_layers),
            str(config.get("projector_hidden_act", "gelu")),
            layer_norm_eps=float(config.get("projector_layernorm_eps", 1e-5)),
        ),
        drops_first=strategy == "default",
    )


def resolve_feature_layers(value: object, num_layers: int) -> tuple[int, ...]:
    """Indices from 0 (before the first layer) to num_layers; negative ones count from the end."""
    layers: list[Any] = value if isinstance(value, list) else [value]
    if not layers or not all(type(layer) is int and -num_layers - 1 <= layer <= num_layers for layer in layers):
        raise UnsupportedCheckpoint(f"vision_feature_layer {value!r} does not fit a tower of {num_layers} layers")
    return tuple(layer % (num_layers + 1) for layer in layers)


def check_tile_size(preprocessing: Preprocessing, tower_config: TowerConfig) -> None:
    """Raises UnsupportedCheckpoint if the processor's tiles are not what the tower takes."""
    height, width = preprocessing.size
    if (height, width) != (tower_config.image_size, tower_config.image_size):
        raise UnsupportedCheckpoint(
            f"the image processor makes pictures of {width} x {height} pixels, "
            f"the vision tower takes {tower_config.image_size} x {tower_config.image_size}"
        )
