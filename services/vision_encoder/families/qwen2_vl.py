"""Qwen2-VL: layer norms, plain MLPs, and every patch sees every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from services.vision_encoder.families.qwen_vl import NORM_EPS, QwenVl, line_by_line, load_merger, load_tower
from services.vision_encoder.preprocessing.native_resolution import load_within_budget
from services.vision_encoder.rotary_tower import RotaryTowerConfig
from services.vision_encoder.weights import WeightReader
from shared.torch_io import Checkpoint

# What transformers assumes where a checkpoint's vision_config is silent.
TOWER_DEFAULTS: Final = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def load_qwen2_vl(folder: Path, config: dict[str, Any]) -> QwenVl:
    vision: dict[str, Any] = TOWER_DEFAULTS | (config.get("vision_config") or {})
    merge_size, patch_size = int(vision["spatial_merge_size"]), int(vision["patch_size"])
    # Here `hidden_size` is the text model's.
    width = int(vision["embed_dim"])
    tower_config = RotaryTowerConfig(
        hidden_size=width,
        intermediate_size=int(width * vision["mlp_ratio"]),
        num_layers=int(vision["depth"]),
        num_heads=int(vision["num_heads"]),
        patch_size=patch_size,
        hidden_act=str(vision["hidden_act"]),
        norm="layer",
        norm_eps=NORM_EPS,
        mlp="plain",
        has_bias=True,
        has_pre_norm=False,
    )
    reader = WeightReader(Checkpoint(folder))
    return QwenVl(
        tower=load_tower(reader, tower_config, frames=int(vision["temporal_patch_size"])),
        merger=load_merger(reader, tower_config.norm, width, merge_size**2),
        merge_size=merge_size,
        arrange=line_by_line,
        choices={},
        preprocessing=load_within_budget(folder, patch_size * merge_size),
        weights_digest=reader.digest,
    )
