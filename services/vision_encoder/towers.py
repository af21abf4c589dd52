"""VisionTower: one ViT for CLIP and SigLIP. What differs between them is in TowerConfig.

Stops at the deepest layer whose features are asked for: LLaVA-1.5 takes layer -2, so the last layer is neither loaded
nor computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from services.vision_encoder.errors import UnsupportedCheckpoint


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "quick_gelu": quick_gelu,
    "gelu": gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "gelu_new": tanh_gelu,
    "silu": silu,
    "relu": relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise UnsupportedCheckpoint(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The shape of a ViT. `num_layers` counts the whole tower, however many are used.

    is_clip   a class token in front, a layer norm before the first layer, no bias in the patch embedding; SigLIP has
              none of the first two and the third
    """

    is_clip: bool
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float

    @property
    def model_type(self) -> str:
        """As in a checkpoint's `vision_config`."""
        return "clip_vision_model" if self.is_clip else "siglip_vision_model"

    @property
    def grid_size(self) -> int:
        """Patches per side; pixels that do not fill a patch are left out, as a strided convolution does."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        return self.grid_size**2 + int(self.is_clip)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TowerConfig:
        """From a checkpoint's `vision_config`; absent fields have the defaults of its `model_type`."""
        kind = config.get("model_type")
        if kind not in _DEFAULTS:
            raise UnsupportedCheckpoint(f"vision tower {kind!r} is not supported; supported: {', '.join(_DEFAULTS)}")
        fields = _DEFAULTS[kind] | dict(config)
        if fields.get("num_channels", 3) != 3:
            raise UnsupportedCheckpoint(f"a vision tower takes 3 colour channels, not {fields['num_channels']}")
        return cls(
            is_clip=kind == "clip_vision_model",
            hidden_size=int(fields["hidden_size"]),
            intermediate_size=int(fields["intermediate_size"]),
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=int(fields["num_attention_heads"]),
            image_size=_side(fields["image_size"], "image_size"),
            patch_size=_side(fields["patch_size"], "patch_size"),
            hidden_act=str(fields["hidden_act"]),
            layer_norm_eps=float(fields["layer_norm_eps"]),
        )


_BASE: Final = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "clip_vision_model": _BASE
    | {"image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": _BASE
    | {"image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}


def _side(value: object, name: str) -> int:
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int):
        raise UnsupportedCheckpoint(f"vision_config.{name} must be one number, not {value!r}")
    return value


class VisionTower(nn.Module):
    """pixels [batch, 3, image_size, image_size] -> for each of `feature_layers` [batch, num_positions, hidden_size]

    feature_layers   indices as in transformers' `hidden_states`: 0 is the input of the first layer, i the output of
                     the i-th; in any order, repeated at will
    """

    def __init__(self, config: TowerConfig, feature_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.feature_layers = feature_layers
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=not config.is_clip)
        self.class_embedding = nn.Parameter(torch.empty(config.hidden_size)) if config.is_clip else None
        self.position_embedding = nn.Parameter(torch.empty(config.num_positions, config.hidden_size))
        self.pre_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.is_clip else None
        self.layers = nn.ModuleList(TowerLayer(config) for _ in range(max(feature_layers)))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        hidden = self._embed(pixels)
        states = {0: hidden}
        for index, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden)
            if index in self.feature_layers:
                states[index] = hidden
        return [states[index] for index in self.feature_layers]

    def _embed(self, pixels: Tensor) -> Tensor:
        grid, patch = self.config.grid_size, self.config.patch_size
        used = pixels[:, :, : grid * patch, : grid * patch]
        # A convolution whose stride is its kernel is a matrix product over unfolded patches, and runs faster as one.
        patches = used.reshape(-1, 3, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        hidden: Tensor = self.patch_embedding(patches)
        if self.class_embedding is not None:
            hidden = torch.cat((self.class_embedding.expand(len(hidden), 1, -1), hidden), dim=1)
        hidden = hidden + self.position_embedding
        return hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)


class TowerLayer(nn.Module):
    """Pre-norm attention and MLP over [batch, num_positions, hidden_size]; every position sees every other."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.activation = activation(config.hidden_act)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.layer_norm1(hidden))
        mlp: Tensor = self.fc2(self.activation(self.fc1(self.layer_norm2(hidden))))
        return hidden + mlp

    def _attend(self, hidden: Tensor) -> Tensor:
        # [batch, positions, 3 * hidden] -> three times [batch, heads, positions, head_dim]
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out
