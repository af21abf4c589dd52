"""What Qwen2-VL, Qwen2.5-VL and Qwen3-VL share: pictures at their own size, a row per square of patches, positions in a
grid.

How a tower's layers look, whether patches see their window or everything, and what a row is made of, is in the
families' own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from services.vision_encoder.families.features import normalize
from services.vision_encoder.families.interface import LOW_DETAIL_SIDE, PreparedImage, fingerprint
from services.vision_encoder.norms import NormKind, make_norm
from services.vision_encoder.preprocessing.native_resolution import WithinBudget
from services.vision_encoder.rotary_tower import (
    Groups,
    RotaryTower,
    RotaryTowerConfig,
    axial_angles,
    patches_of,
    rope_frequencies,
)
from services.vision_encoder.stretched_positions import StretchedPositions
from services.vision_encoder.weights import WeightReader, prepare
from shared.cuda_capture import Capture
from shared.wire.images import ImageMetadata

PREFIXES: Final = ("visual.", "model.visual.")
NORM_EPS: Final = 1e-6
THETA: Final = 10_000.0

# Our matrix of a layer's MLP -> what is stacked in it.
MLP_NAMES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "gated": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "plain": {"up_proj": ("fc1",), "down_proj": ("fc2",)},
}


class PatchMerger(nn.Module):
    """The patches of a cell to one row: [batch, num_cells * cell_size, width] -> [batch, num_cells, output_size]

    norms_cells   the norm is of whole cells, not of patches
    """

    def __init__(
        self, norm: NormKind, width: int, cell_size: int, output_size: int, *, norms_cells: bool = False
    ) -> None:
        super().__init__()
        self.cell_size = cell_size
        self.output_size = output_size
        self.norms_cells = norms_cells
        self.norm = make_norm(norm, width * cell_size if norms_cells else width, NORM_EPS)
        self.linear_1 = nn.Linear(width * cell_size, width * cell_size)
        self.linear_2 = nn.Linear(width * cell_size, output_size)

    def forward(self, features: Tensor) -> Tensor:
        normed = features if self.norms_cells else self.norm(features)
        cells = normed.unflatten(1, (-1, self.cell_size)).flatten(2)
        if self.norms_cells:
            cells = self.norm(cells)
        rows: Tensor = self.linear_2(gelu(self.linear_1(cells)))
        return rows


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the cells of a picture stand in the tower.

    order              [num_cells], the cell at each place
    groups_of_layers   per layer, which patches see each other; None: everywhere all of them
    """

    order: Tensor
    groups_of_layers: Sequence[Groups] | None


@dataclass(frozen=True, slots=True)
class QwenVl:
    """Satisfies `Family`.

    merge_size   patches on the side of a cell, which becomes one row
    arrange      lines, columns of cells -> how they stand in the tower
    choices      for the fingerprint: what `arrange` depends on, and all else that is in no weight
    positions    learned ones, added to the patches' embeddings; None: there are the rotary ones only
    deep_mergers   of the tower's further feature layers: each adds a part to the rows (DeepStack)
    """

    tower: RotaryTower
    merger: PatchMerger
    merge_size: int
    arrange: Callable[[int, int], Arrangement]
    choices: Mapping[str, object]
    preprocessing: WithinBudget
    weights_digest: bytes
    positions: StretchedPositions | None = None
    deep_mergers: tuple[PatchMerger, ...] = ()

    @property
    def hidden_size(self) -> int:
        return self.merger.output_size

    @property
    def num_row_parts(self) -> int:
        return 1 + len(self.deep_mergers)

    @property
    def low_detail(self) -> QwenVl | None:
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
                **self.choices,
            },
            dtype=dtype,
            background=background,
        )

    def record_graphs(self, capture: Capture) -> None:
        """None: pictures have sizes of their own."""

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        others = () if self.positions is None else (self.positions,)
        for module in (self.tower, self.merger, *self.deep_mergers, *others):
            prepare(module, device, dtype)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        weight = self.merger.norm.weight
        pixels = torch.cat([image.pixels for image in images]).to(weight.device)
        patches = patches_of(normalize(pixels, self.preprocessing).to(weight.dtype), self.tower.config.patch_size)
        arrangement = self.arrange(patches.shape[1] // self.merge_size, patches.shape[2] // self.merge_size)
        order = arrangement.order.to(weight.device)
        features = self.tower(
            self._in_order(patches, order),
            self._in_order(self._angles(patches)[None], order)[0],
            arrangement.groups_of_layers,
            self._learned_positions(patches, order),
        )
        parts = [merger(each) for merger, each in zip((self.merger, *self.deep_mergers), features, strict=True)]
        return list(torch.cat(parts, dim=-1)[:, order.argsort()].unbind())

    def _in_order(self, grid: Tensor, order: Tensor) -> Tensor:
        """[batch, lines, columns, size] of patches -> [batch, num_patches, size], cell by cell as `order` says"""
        _, lines, columns, size = grid.shape
        merge = self.merge_size
        cells = grid.reshape(-1, lines // merge, merge, columns // merge, merge, size).transpose(2, 3)
        return cells.flatten(3, 4).flatten(1, 2)[:, order].flatten(1, 2)

    def _learned_positions(self, patches: Tensor, order: Tensor) -> Tensor | None:
        """[num_patches, hidden_size of the tower] in the patches' dtype"""
        if self.positions is None:
            return None
        stretched = self.positions(*patches.shape[1:3]).to(patches.dtype)
        return self._in_order(stretched[None], order)[0]

    def _angles(self, patches: Tensor) -> Tensor:
        """[lines, columns, head_dim / 2] for patches [batch, lines, columns, …]"""
        _, lines, columns, _ = patches.shape
        frequencies = rope_frequencies(THETA, self.tower.config.head_dim // 2).to(patches.device)
        line = torch.arange(lines, device=patches.device).repeat_interleave(columns)
        column = torch.arange(columns, device=patches.device).repeat(lines)
        return axial_angles(line, column, frequencies, frequencies).view(lines, columns, -1)


def line_by_line(lines: int, columns: int) -> Arrangement:
    """Every patch sees every other."""
    return Arrangement(torch.arange(lines * columns), groups_of_layers=None)


def load_tower(
    reader: WeightReader,
    config: RotaryTowerConfig,
    frames: int,
    *,
    mlp_names: Mapping[str, tuple[str, ...]] | None = None,
    feature_layers: tuple[int, ...] | None = None,
) -> RotaryTower:
    """
    frames           that one patch spans in a film
    mlp_names        None: `MLP_NAMES` of its kind
    feature_layers   None: the last
    """
    size, inner = config.hidden_size, config.intermediate_size
    patch = reader.read(PREFIXES, "patch_embed.proj.weight", (size, 3, frames, config.patch_size, config.patch_size))
    # A picture is a film of equal frames: their weights add up.
    state = {"patch_embedding.weight": patch.float().sum(dim=2).flatten(1)}
    if config.has_patch_bias:
        state["patch_embedding.bias"] = reader.read(PREFIXES, "patch_embed.proj.bias", (size,))
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"blocks.{index}."
        state |= read_norm(reader, f"{ours}attention_norm", f"{theirs}norm1", config.norm, size)
        state |= read_norm(reader, f"{ours}mlp_norm", f"{theirs}norm2", config.norm, size)
        state |= read_linear(reader, f"{ours}qkv_proj", f"{theirs}attn.qkv", shape=(3 * size, size))
        state |= read_linear(reader, f"{ours}out_proj", f"{theirs}attn.proj", shape=(size, size))
        for name, stacked in (mlp_names or MLP_NAMES[config.mlp]).items():
            shape = (size, inner) if name == "down_proj" else (inner, size)
            state |= read_linear(reader, f"{ours}mlp.{name}", *(f"{theirs}mlp.{part}" for part in stacked), shape=shape)
    with torch.device("meta"):
        tower = RotaryTower(config, feature_layers or (config.num_layers,))
    tower.load_state_dict(state, assign=True)
    return tower


def load_merger(reader: WeightReader, norm: NormKind, width: int, cell_size: int) -> PatchMerger:
    inner = width * cell_size
    output_size = reader.read(PREFIXES, "merger.mlp.2.bias").shape[0]
    state = read_norm(reader, "norm", "merger.ln_q", norm, width)
    state |= read_linear(reader, "linear_1", "merger.mlp.0", shape=(inner, inner))
    state |= read_linear(reader, "linear_2", "merger.mlp.2", shape=(output_size, inner))
    with torch.device("meta"):
        merger = PatchMerger(norm, width, cell_size, output_size)
    merger.load_state_dict(state, assign=True)
    return merger


def read_norm(reader: WeightReader, ours: str, theirs: str, kind: NormKind, size: int) -> dict[str, Tensor]:
    parts = ("weight",) if kind == "rms" else ("weight", "bias")
    return {f"{ours}.{part}": reader.read(PREFIXES, f"{theirs}.{part}", (size,)) for part in parts}


def read_linear(reader: WeightReader, ours: str, *theirs: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Matrices of one shape, and their biases, on top of each other."""
    return {
        f"{ours}.weight": torch.cat([reader.read(PREFIXES, f"{name}.weight", shape) for name in theirs]),
        f"{ours}.bias": torch.cat([reader.read(PREFIXES, f"{name}.bias", shape[:1]) for name in theirs]),
    }
