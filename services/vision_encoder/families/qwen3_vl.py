"""Qwen3-VL, dense and with experts: layer norms, plain MLPs, learned positions beside the rotary ones, and rows made of
several of the tower's layers, for several of the text model's (DeepStack).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import torch

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.qwen_vl import (
    NORM_EPS,
    PREFIXES,
    PatchMerger,
    QwenVl,
    line_by_line,
    load_tower,
    read_linear,
    read_norm,
)
from services.vision_encoder.preprocessing.native_resolution import load_within_budget
from services.vision_encoder.rotary_tower import RotaryTowerConfig
from services.vision_encoder.stretched_positions import StretchedPositions
from services.vision_encoder.weights import WeightReader
from shared.torch_io import Checkpoint

# What transformers assumes where a checkpoint's vision_config is silent.
TOWER_DEFAULTS: Final = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
MLP_NAMES: Final = {"up_proj": ("linear_fc1",), "down_proj": ("linear_fc2",)}


def load_qwen3_vl(folder: Path, config: dict[str, Any]) -> QwenVl:
    vision: dict[str, Any] = TOWER_DEFAULTS | (config.get("vision_config") or {})
    merge_size, patch_size = int(vision["spatial_merge_size"]), int(vision["patch_size"])
    tower_config = RotaryTowerConfig(
        hidden_size=int(vision["hidden_size"]),
        intermediate_size=int(vision["intermediate_size"]),
        num_layers=int(vision["depth"]),
        num_heads=int(vision["num_heads"]),
        patch_size=patch_size,
        hidden_act=str(vision["hidden_act"]),
        norm="layer",
        norm_eps=NORM_EPS,
        mlp="plain",
        has_bias=True,
        has_patch_bias=True,
        has_pre_norm=False,
    )
    deep_layers = _deep_layers(vision["deepstack_visual_indexes"], tower_config.num_layers)
    positions_side = _side_of_square(int(vision["num_position_embeddings"]))
    reader = WeightReader(Checkpoint(folder))
    return QwenVl(
        tower=load_tower(
            reader,
            tower_config,
            frames=int(vision["temporal_patch_size"]),
            mlp_names=MLP_NAMES,
            # A layer's output is the input of the next: what is counted from 0 there is counted from 1 here.
            feature_layers=(tower_config.num_layers, *(layer + 1 for layer in deep_layers)),
        ),
        merger=_load_merger(reader, "merger", tower_config.hidden_size, merge_size**2),
        merge_size=merge_size,
        arrange=line_by_line,
        choices={"deep_layers": deep_layers},
        preprocessing=load_within_budget(folder, patch_size * merge_size),
        positions=_load_positions(reader, positions_side, tower_config.hidden_size),
        deep_mergers=tuple(
            _load_merger(reader, f"deepstack_merger_list.{i}", tower_config.hidden_size, merge_size**2, is_deep=True)
            for i in range(len(deep_layers))
        ),
        weights_digest=reader.digest,
    )


def _deep_layers(value: object, num_layers: int) -> tuple[int, ...]:
    """Counted from 0. Raises UnsupportedCheckpoint unless they rise: the i-th has the i-th merger, and its rows go to
    the text model's i-th layer."""
    layers = tuple(value) if isinstance(value, list | tuple) else (value,)
    is_sound = all(type(layer) is int and 0 <= layer < num_layers for layer in layers)
    if not is_sound or list(layers) != sorted(set(layers)):
        raise UnsupportedCheckpoint(
            f"vision_config.deepstack_visual_indexes is {value!r}; rising numbers below depth = {num_layers} are needed"
        )
    return layers


def _side_of_square(num_positions: int) -> int:
    side = math.isqrt(num_positions)
    if side * side != num_positions:
        raise UnsupportedCheckpoint(f"vision_config.num_position_embeddings is {num_positions}; a square is needed")
    return side


def _load_positions(reader: WeightReader, side: int, size: int) -> StretchedPositions:
    with torch.device("meta"):
        positions = StretchedPositions(side, size)
    weight = reader.read(PREFIXES, "pos_embed.weight", (side * side, size))
    positions.load_state_dict({"weight": weight.view(side, side, size)}, assign=True)
    return positions


def _load_merger(reader: WeightReader, name: str, width: int, cell_size: int, *, is_deep: bool = False) -> PatchMerger:
    """is_deep   its norm is of whole cells, not of patches"""
    inner = width * cell_size
    output_size = reader.read(PREFIXES, f"{name}.linear_fc2.bias").shape[0]
    state = read_norm(reader, "norm", f"{name}.norm", "layer", inner if is_deep else width)
    state |= read_linear(reader, "linear_1", f"{name}.linear_fc1", shape=(inner, inner))
    state |= read_linear(reader, "linear_2", f"{name}.linear_fc2", shape=(output_size, inner))
    with torch.device("meta"):
        merger = PatchMerger("layer", width, cell_size, output_size, norms_cells=is_deep)
    merger.load_state_dict(state, assign=True)
    return merger
