"""Pixtral and Mistral 3: pictures at their own size, a row per patch or per square of them, text between the lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.features import normalize, resolve_feature_layers
from services.vision_encoder.families.interface import LOW_DETAIL_SIDE, PreparedImage, fingerprint
from services.vision_encoder.norms import RmsNorm
from services.vision_encoder.preprocessing.native_resolution import WithinBox, load_within_box
from services.vision_encoder.projector import Projector
from services.vision_encoder.rotary_tower import (
    RotaryTower,
    RotaryTowerConfig,
    axial_angles,
    patches_of,
    rope_frequencies,
)
from services.vision_encoder.weights import PROJECTOR_PREFIXES, TOWER_PREFIXES, WeightReader, load_projector, prepare
from shared.cuda_capture import Capture
from shared.torch_io import Checkpoint
from shared.wire.images import ImageMetadata

LINE_END: Final = "[IMG_BREAK]"
IMAGE_END: Final = "[IMG_END]"

# What transformers assumes where a checkpoint's vision_config is silent.
TOWER_DEFAULTS: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}
NORM_EPS: Final = 1e-5
DEFAULT_THETA: Final = 10_000.0


class PatchMerger(nn.Module):
    """Mistral 3: merge_size x merge_size patches to one: [batch, lines, columns, width] -> the same, but smaller"""

    def __init__(self, width: int, merge_size: int, eps: float) -> None:
        super().__init__()
        self.merge_size = merge_size
        self.norm = RmsNorm(width, eps)
        self.merging_layer = nn.Linear(width * merge_size**2, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        size = self.merge_size
        _, lines, columns, width = features.shape
        squares = self.norm(features).view(-1, lines // size, size, columns // size, size, width)
        merged: Tensor = self.merging_layer(squares.permute(0, 1, 3, 5, 2, 4).flatten(3))
        return merged


@dataclass(frozen=True, slots=True)
class Pixtral:
    """merger   None: every patch is a row"""

    tower: RotaryTower
    theta: float
    merger: PatchMerger | None
    projector: Projector
    preprocessing: WithinBox
    weights_digest: bytes

    @property
    def hidden_size(self) -> int:
        return self.projector.output_size

    @property
    def num_row_parts(self) -> int:
        return 1

    @property
    def low_detail(self) -> Pixtral | None:
        """In a smaller box."""
        box = tuple(min(side, LOW_DETAIL_SIDE) for side in self.preprocessing.box)
        smaller = replace(self.preprocessing, box=box)
        return None if smaller == self.preprocessing else replace(self, preprocessing=smaller)

    @property
    def reads_several_in_low_detail(self) -> bool:
        return False

    def describe(self, width: int, height: int) -> ImageMetadata:
        lines, columns = self.preprocessing.grid(width, height)
        layout = (columns, LINE_END) * (lines - 1) + (columns, IMAGE_END)
        return ImageMetadata(num_tokens=lines * columns, width=width, height=height, layout=layout)

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        return fingerprint(
            weights_digest=self.weights_digest,
            preprocessing=self.preprocessing,
            choices={
                "feature_layers": self.tower.feature_layers,
                "hidden_act": self.tower.config.hidden_act,
                "num_heads": self.tower.config.num_heads,
                "theta": self.theta,
                "merger_norm_eps": None if self.merger is None else self.merger.norm.eps,
                "projector_hidden_act": self.projector.hidden_act,
            },
            dtype=dtype,
            background=background,
        )

    def record_graphs(self, capture: Capture) -> None:
        """None: pictures have sizes of their own."""

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        for module in (self.tower, self.merger, self.projector):
            if module is not None:
                prepare(module, device, dtype)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        weight = next(self.tower.parameters())
        pixels = torch.cat([image.pixels for image in images]).to(weight.device)
        patches = patches_of(normalize(pixels, self.preprocessing).to(weight.dtype), self.tower.config.patch_size)
        features = torch.cat(self.tower(patches.flatten(1, 2), self._angles(patches)), dim=-1)
        if self.merger is not None:
            features = self.merger(torch.unflatten(features, 1, patches.shape[1:3])).flatten(1, 2)
        return list(self.projector(features).unbind())

    def _angles(self, patches: Tensor) -> Tensor:
        """[lines * columns, head_dim / 2] for patches [batch, lines, columns, …]; even frequencies are the lines'."""
        _, lines, columns, _ = patches.shape
        frequencies = rope_frequencies(self.theta, self.tower.config.head_dim).to(patches.device)
        line = torch.arange(lines, device=patches.device).repeat_interleave(columns)
        column = torch.arange(columns, device=patches.device).repeat(lines)
        return axial_angles(line, column, frequencies[0::2], frequencies[1::2])


def load_pixtral(folder: Path, config: dict[str, Any]) -> Pixtral:
    """LlavaForConditionalGeneration around a Pixtral tower."""
    if config.get("vision_feature_select_strategy", "default") != "full":
        raise UnsupportedCheckpoint("a pixtral tower needs vision_feature_select_strategy 'full'")
    return _load(folder, config, merge_size=1, feature_layer=config.get("vision_feature_layer", -2))


def load_mistral3(folder: Path, config: dict[str, Any]) -> Pixtral:
    merge_size = int(config.get("spatial_merge_size", 2))
    return _load(folder, config, merge_size=merge_size, feature_layer=config.get("vision_feature_layer", -1))


def _load(folder: Path, config: dict[str, Any], *, merge_size: int, feature_layer: object) -> Pixtral:
    vision: dict[str, Any] = TOWER_DEFAULTS | (config.get("vision_config") or {})
    tower_config = RotaryTowerConfig(
        hidden_size=int(vision["hidden_size"]),
        intermediate_size=int(vision["intermediate_size"]),
        num_layers=int(vision["num_hidden_layers"]),
        num_heads=int(vision["num_attention_heads"]),
        patch_size=int(vision["patch_size"]),
        hidden_act=str(vision["hidden_act"]),
        norm="rms",
        norm_eps=NORM_EPS,
        mlp="gated",
        has_bias=False,
        has_pre_norm=True,
    )
    feature_layers = resolve_feature_layers(feature_layer, tower_config.num_layers)
    reader = WeightReader(Checkpoint(folder))
    has_merger = reader.has(PROJECTOR_PREFIXES, "patch_merger.merging_layer.weight")
    if has_merger and len(feature_layers) > 1:
        raise UnsupportedCheckpoint("vision_feature_layer must be one layer where patches are merged")
    # Before the rope fields of transformers 5 the base stood alone.
    rope = vision.get("rope_parameters") or {}
    return Pixtral(
        tower=_load_tower(reader, tower_config, feature_layers),
        theta=float(rope.get("rope_theta") or vision.get("rope_theta") or DEFAULT_THETA),
        merger=_load_merger(reader, config, tower_config.hidden_size, merge_size) if has_merger else None,
        projector=load_projector(
            reader,
            tower_config.hidden_size * len(feature_layers),
            str(config.get("projector_hidden_act", "gelu")),
            layer_norm_eps=NORM_EPS,
        ),
        preprocessing=load_within_box(folder, tower_config.patch_size * merge_size),
        weights_digest=reader.digest,
    )


def _load_tower(reader: WeightReader, config: RotaryTowerConfig, feature_layers: tuple[int, ...]) -> RotaryTower:
    size, inner = config.hidden_size, config.intermediate_size

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(TOWER_PREFIXES, f"{name}.weight", shape)

    patch = read("patch_conv", size, 3, config.patch_size, config.patch_size)
    state = {"patch_embedding.weight": patch.flatten(1), "pre_norm.weight": read("ln_pre", size)}
    for index in range(max(feature_layers)):
        ours, theirs = f"layers.{index}.", f"transformer.layers.{index}."
        qkv = [read(f"{theirs}attention.{name}_proj", size, size) for name in "qkv"]
        gate_up = [read(f"{theirs}feed_forward.{name}_proj", inner, size) for name in ("gate", "up")]
        state |= {
            f"{ours}attention_norm.weight": read(f"{theirs}attention_norm", size),
            f"{ours}qkv_proj.weight": torch.cat(qkv),
            f"{ours}out_proj.weight": read(f"{theirs}attention.o_proj", size, size),
            f"{ours}mlp_norm.weight": read(f"{theirs}ffn_norm", size),
            f"{ours}mlp.gate_up_proj.weight": torch.cat(gate_up),
            f"{ours}mlp.down_proj.weight": read(f"{theirs}feed_forward.down_proj", size, inner),
        }
    with torch.device("meta"):
        tower = RotaryTower(config, feature_layers)
    tower.load_state_dict(state, assign=True)
    return tower


def _load_merger(reader: WeightReader, config: Mapping[str, Any], width: int, merge_size: int) -> PatchMerger:
    state = {
        "norm.weight": reader.read(PROJECTOR_PREFIXES, "norm.weight", (width,)),
        "merging_layer.weight": reader.read(
            PROJECTOR_PREFIXES, "patch_merger.merging_layer.weight", (width, width * merge_size**2)
        ),
    }
    text = config.get("text_config") or {}
    with torch.device("meta"):
        merger = PatchMerger(width, merge_size, float(text.get("rms_norm_eps", 1e-6)))
    merger.load_state_dict(state, assign=True)
    return merger
