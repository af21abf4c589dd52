"""VisionTower: one ViT for CLIP, SigLIP and InternViT. What differs between them is in TowerTraits.

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
from services.vision_encoder.norms import NormKind, RmsNorm, make_norm

QK_NORM_EPS: Final = 1e-6


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
class TowerTraits:
    """What kinds of ViT differ in, beside their sizes.

    has_class_token   a position more than patches, in front of them
    has_pre_norm      a norm before the first layer
    has_qk_norm       an RMS norm each over all heads' queries and keys
    norm              of every layer
    """

    has_class_token: bool
    has_pre_norm: bool
    has_patch_bias: bool
    has_qkv_bias: bool = True
    has_qk_norm: bool = False
    norm: NormKind = "layer"


CLIP: Final = TowerTraits(has_class_token=True, has_pre_norm=True, has_patch_bias=False)
SIGLIP: Final = TowerTraits(has_class_token=False, has_pre_norm=False, has_patch_bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The shape of a ViT. `num_layers` counts the whole tower, however many are used."""

    traits: TowerTraits
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float

    @property
    def grid_size(self) -> int:
        """Patches per side; pixels that do not fill a patch are left out, as a strided convolution does."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        return self.grid_size**2 + int(self.traits.has_class_token)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TowerConfig:
        """CLIP or SigLIP, from a checkpoint's `vision_config`; absent fields have the defaults of its `model_type`."""
        kind = config.get("model_type")
        if kind not in _DEFAULTS:
            raise UnsupportedCheckpoint(f"vision tower {kind!r} is not supported; supported: {', '.join(_DEFAULTS)}")
        return cls.with_traits(CLIP if kind == "clip_vision_model" else SIGLIP, _DEFAULTS[kind] | dict(config))

    @classmethod
    def with_traits(cls, traits: TowerTraits, fields: Mapping[str, Any]) -> TowerConfig:
        """fields   a complete `vision_config`"""
        if fields.get("num_channels", 3) != 3:
            raise UnsupportedCheckpoint(f"a vision tower takes 3 colour channels, not {fields['num_channels']}")
        return cls(
            traits=traits,
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
    if isinstance(value, list | tuple) and len(set(value)) == 1:
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
        traits, width = config.traits, config.hidden_size
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, width, bias=traits.has_patch_bias)
        self.class_embedding = nn.Parameter(torch.empty(width)) if traits.has_class_token else None
        self.position_embedding = nn.Parameter(torch.empty(config.num_positions, width))
        self.pre_layernorm = nn.LayerNorm(width, config.layer_norm_eps) if traits.has_pre_norm else None
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
        traits, width, eps = config.traits, config.hidden_size, config.layer_norm_eps
        self.num_heads = config.num_heads
        self.activation = activation(config.hidden_act)
        self.layer_norm1 = make_norm(traits.norm, width, eps)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=traits.has_qkv_bias)
        self.q_norm = RmsNorm(width, QK_NORM_EPS) if traits.has_qk_norm else nn.Identity()
        self.k_norm = RmsNorm(width, QK_NORM_EPS) if traits.has_qk_norm else nn.Identity()
        self.out_proj = nn.Linear(width, width)
        self.layer_norm2 = make_norm(traits.norm, width, eps)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.layer_norm1(hidden))
        mlp: Tensor = self.fc2(self.activation(self.fc1(self.layer_norm2(hidden))))
        return hidden + mlp

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden).chunk(3, dim=-1)
        query, key, value = self._by_head(self.q_norm(query)), self._by_head(self.k_norm(key)), self._by_head(value)
        attended = scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """[batch, positions, hidden] -> [batch, heads, positions, head_dim]"""
        return torch.unflatten(x, -1, (self.num_heads, -1)).transpose(1, 2)
