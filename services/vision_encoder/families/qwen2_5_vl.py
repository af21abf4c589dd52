"""Qwen2.5-VL: RMS norms, gated MLPs, and attention in windows in most layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from services.vision_encoder.families.qwen_vl import NORM_EPS, Arrangement, QwenVl, load_merger, load_tower
from services.vision_encoder.preprocessing.native_resolution import load_within_budget
from services.vision_encoder.rotary_tower import Groups, RotaryTowerConfig
from services.vision_encoder.weights import WeightReader
from shared.torch_io import Checkpoint

# What transformers assumes where a checkpoint's vision_config is silent.
TOWER_DEFAULTS: Final = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


def load_qwen2_5_vl(folder: Path, config: dict[str, Any]) -> QwenVl:
    vision: dict[str, Any] = TOWER_DEFAULTS | (config.get("vision_config") or {})
    merge_size, patch_size = int(vision["spatial_merge_size"]), int(vision["patch_size"])
    tower_config = RotaryTowerConfig(
        hidden_size=int(vision["hidden_size"]),
        intermediate_size=int(vision["intermediate_size"]),
        num_layers=int(vision["depth"]),
        num_heads=int(vision["num_heads"]),
        patch_size=patch_size,
        hidden_act=str(vision["hidden_act"]),
        norm="rms",
        norm_eps=NORM_EPS,
        mlp="gated",
        has_bias=True,
        has_pre_norm=False,
    )
    window_size = int(vision["window_size"]) // merge_size // patch_size
    full_layers = frozenset(vision["fullatt_block_indexes"])

    def arrange(lines: int, columns: int) -> Arrangement:
        order, windows = window_order(lines, columns, window_size, merge_size**2)
        everyone = [(1, lines * columns * merge_size**2)]
        layers = range(tower_config.num_layers)
        return Arrangement(order, [everyone if layer in full_layers else windows for layer in layers])

    reader = WeightReader(Checkpoint(folder))
    return QwenVl(
        tower=load_tower(reader, tower_config, frames=int(vision["temporal_patch_size"])),
        merger=load_merger(reader, tower_config.norm, tower_config.hidden_size, merge_size**2),
        merge_size=merge_size,
        arrange=arrange,
        choices={"window_size": window_size, "full_layers": sorted(full_layers)},
        preprocessing=load_within_budget(folder, patch_size * merge_size),
        weights_digest=reader.digest,
    )


def window_order(lines: int, columns: int, window_size: int, cell_size: int) -> tuple[Tensor, Groups]:
    """Cells of one window next to each other, windows of one shape, too: those cut by the picture's edges come last.

    window_size   cells on the side of a window
    cell_size     patches in a cell
    returns       [lines * columns], the cell at each place; and how many windows of how many patches follow each other
    """
    cells = torch.arange(lines * columns).view(lines, columns)
    whole_lines, whole_columns = lines - lines % window_size, columns - columns % window_size
    order, groups = [], []
    for strip in (cells[:whole_lines], cells[whole_lines:]):
        for block in (strip[:, :whole_columns], strip[:, whole_columns:]):
            if not block.numel():
                continue
            height, width = min(window_size, block.shape[0]), min(window_size, block.shape[1])
            down, across = block.shape[0] // height, block.shape[1] // width
            windows = block.reshape(down, height, across, width).transpose(1, 2)
            order.append(windows.flatten())
            groups.append((down * across, height * width * cell_size))
    return torch.cat(order), groups
