"""Qwen2.5-VL: pictures at their own size, attention in windows, a row per square of patches, positions in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from services.vision_encoder.families.features import normalize
from services.vision_encoder.families.interface import LOW_DETAIL_SIDE, PreparedImage, fingerprint
from services.vision_encoder.preprocessing.native_resolution import WithinBudget, load_within_budget
from services.vision_encoder.rotary_tower import (
    Groups,
    RmsNorm,
    RotaryTower,
    RotaryTowerConfig,
    axial_angles,
    patches_of,
    rope_frequencies,
)
from services.vision_encoder.weights import WeightReader, prepare
from shared.cuda_capture import Capture
from shared.torch_io import Checkpoint
from shared.wire.images import ImageMetadata

PREFIXES: Final = ("visual.", "model.visual.")
NORM_EPS: Final = 1e-6
THETA: Final = 10_000.0

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


class PatchMerger(nn.Module):
    """The patches of a cell to one row: [batch, num_cells * cell_size, width] -> [batch, num_cells, output_size]"""

    def __init__(self, width: int, cell_size: int, output_size: int) -> None:
        super().__init__()
        self.cell_size = cell_size
        self.output_size = output_size
        self.norm = RmsNorm(width, NORM_EPS)
        self.linear_1 = nn.Linear(width * cell_size, width * cell_size)
        self.linear_2 = nn.Linear(width * cell_size, output_size)

    def forward(self, features: Tensor) -> Tensor:
        cells = self.norm(features).unflatten(1, (-1, self.cell_size)).flatten(2)
        rows: Tensor = self.linear_2(gelu(self.linear_1(cells)))
        return rows


@dataclass(frozen=True, slots=True)
class Qwen25Vl:
    """
    merge_size   patches on the side of a cell, which becomes one row
    window_size  cells on the side of a window
    full_layers  those in which patches see beyond their window
    """

    tower: RotaryTower
    merger: PatchMerger
    merge_size: int
    window_size: int
    full_layers: frozenset[int]
    preprocessing: WithinBudget
    weights_digest: bytes

    @property
    def hidden_size(self) -> int:
        return self.merger.output_size

    @property
    def low_detail(self) -> Qwen25Vl | None:
        """Within a smaller budget."""
        budget = self.preprocessing
        smaller = replace(budget, max_pixels=min(budget.max_pixels, max(budget.min_pixels, LOW_DETAIL_SIDE**2)))
        return None if smaller == budget else replace(self, preprocessing=smaller)

    @property
    def reads_several_in_low_detail(self) -> bool:
        return False

    def describe(self, width: int, height: int) -> ImageMetadata:
        lines, columns = self.preprocessing.grid(width, height)
        return ImageMetadata(num_tokens=lines * columns, width=width, height=height, grid=(1, lines, columns))

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        return fingerprint(
            weights_digest=self.weights_digest,
            preprocessing=self.preprocessing,
            choices={
                "hidden_act": self.tower.config.hidden_act,
                "num_heads": self.tower.config.num_heads,
                "merge_size": self.merge_size,
                "window_size": self.window_size,
                "full_layers": sorted(self.full_layers),
            },
            dtype=dtype,
            background=background,
        )

    def record_graphs(self, capture: Capture) -> None:
        """None: pictures have sizes of their own."""

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        prepare(self.tower, device, dtype)
        prepare(self.merger, device, dtype)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        weight = self.merger.norm.weight
        pixels = torch.cat([image.pixels for image in images]).to(weight.device)
        patches = patches_of(normalize(pixels, self.preprocessing).to(weight.dtype), self.tower.config.patch_size)
        lines, columns = patches.shape[1] // self.merge_size, patches.shape[2] // self.merge_size
        order, groups = window_order(lines, columns, self.window_size, self.merge_size**2)
        order = order.to(weight.device)
        everyone = [(1, lines * columns * self.merge_size**2)]
        [features] = self.tower(
            self._in_order(patches, order),
            self._in_order(self._angles(patches)[None], order)[0],
            [everyone if layer in self.full_layers else groups for layer in range(self.tower.config.num_layers)],
        )
        return list(self.merger(features)[:, order.argsort()].unbind())

    def _in_order(self, grid: Tensor, order: Tensor) -> Tensor:
        """[batch, lines, columns, size] of patches -> [batch, num_patches, size], cell by cell as `order` says"""
        _, lines, columns, size = grid.shape
        merge = self.merge_size
        cells = grid.reshape(-1, lines // merge, merge, columns // merge, merge, size).transpose(2, 3)
        return cells.flatten(3, 4).flatten(1, 2)[:, order].flatten(1, 2)

    def _angles(self, patches: Tensor) -> Tensor:
        """[lines, columns, head_dim / 2] for patches [batch, lines, columns, …]"""
        _, lines, columns, _ = patches.shape
        frequencies = rope_frequencies(THETA, self.tower.config.head_dim // 2).to(patches.device)
        line = torch.arange(lines, device=patches.device).repeat_interleave(columns)
        column = torch.arange(columns, device=patches.device).repeat(lines)
        return axial_angles(line, column, frequencies, frequencies).view(lines, columns, -1)


def window_order(lines: int, columns: int, window_size: int, cell_size: int) -> tuple[Tensor, Groups]:
    """Cells of one window next to each other, windows of one shape, too: those cut by the picture's edges come last.

    cell_size   patches in a cell
    returns     [lines * columns], the cell at each place; and how many windows of how many patches follow each other
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


def load_qwen2_5_vl(folder: Path, config: dict[str, Any]) -> Qwen25Vl:
    vision: dict[str, Any] = TOWER_DEFAULTS | (config.get("vision_config") or {})
    merge_size, patch_size = int(vision["spatial_merge_size"]), int(vision["patch_size"])
    tower_config = RotaryTowerConfig(
        hidden_size=int(vision["hidden_size"]),
        intermediate_size=int(vision["intermediate_size"]),
        num_layers=int(vision["depth"]),
        num_heads=int(vision["num_heads"]),
        patch_size=patch_size,
        hidden_act=str(vision["hidden_act"]),
        norm_eps=NORM_EPS,
        has_bias=True,
        has_pre_norm=False,
    )
    reader = WeightReader(Checkpoint(folder))
    return Qwen25Vl(
        tower=_load_tower(reader, tower_config, frames=int(vision["temporal_patch_size"])),
        merger=_load_merger(reader, tower_config.hidden_size, merge_size**2),
        merge_size=merge_size,
        window_size=int(vision["window_size"]) // merge_size // patch_size,
        full_layers=frozenset(vision["fullatt_block_indexes"]),
        preprocessing=load_within_budget(folder, patch_size * merge_size),
        weights_digest=reader.digest,
    )


def _load_tower(reader: WeightReader, config: RotaryTowerConfig, frames: int) -> RotaryTower:
    size, inner = config.hidden_size, config.intermediate_size

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(PREFIXES, name, shape)

    def pair(ours: str, *theirs: str, rows: int, columns: int) -> dict[str, Tensor]:
        return {
            f"{ours}.weight": torch.cat([read(f"{name}.weight", rows, columns) for name in theirs]),
            f"{ours}.bias": torch.cat([read(f"{name}.bias", rows) for name in theirs]),
        }

    patch = read("patch_embed.proj.weight", size, 3, frames, config.patch_size, config.patch_size)
    # A picture is a film of equal frames: their weights add up.
    state = {"patch_embedding.weight": patch.float().sum(dim=2).flatten(1)}
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"blocks.{index}."
        state[f"{ours}attention_norm.weight"] = read(f"{theirs}norm1.weight", size)
        state[f"{ours}mlp_norm.weight"] = read(f"{theirs}norm2.weight", size)
        state |= pair(f"{ours}qkv_proj", f"{theirs}attn.qkv", rows=3 * size, columns=size)
        state |= pair(f"{ours}out_proj", f"{theirs}attn.proj", rows=size, columns=size)
        gate_up = (f"{theirs}mlp.gate_proj", f"{theirs}mlp.up_proj")
        state |= pair(f"{ours}gate_up_proj", *gate_up, rows=inner, columns=size)
        state |= pair(f"{ours}down_proj", f"{theirs}mlp.down_proj", rows=size, columns=inner)
    with torch.device("meta"):
        tower = RotaryTower(config, (config.num_layers,))
    tower.load_state_dict(state, assign=True)
    return tower


def _load_merger(reader: WeightReader, width: int, cell_size: int) -> PatchMerger:
    inner = width * cell_size
    bias = reader.read(PREFIXES, "merger.mlp.2.bias")
    output_size = bias.shape[0]
    state = {
        "norm.weight": reader.read(PREFIXES, "merger.ln_q.weight", (width,)),
        "linear_1.weight": reader.read(PREFIXES, "merger.mlp.0.weight", (inner, inner)),
        "linear_1.bias": reader.read(PREFIXES, "merger.mlp.0.bias", (inner,)),
        "linear_2.weight": reader.read(PREFIXES, "merger.mlp.2.weight", (output_size, inner)),
        "linear_2.bias": bias,
    }
    with torch.device("meta"):
        merger = PatchMerger(width, cell_size, output_size)
    merger.load_state_dict(state, assign=True)
    return merger
