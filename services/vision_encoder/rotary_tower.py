"""RotaryTower: the ViT of Pixtral, Qwen2-VL, Qwen2.5-VL and Qwen3-VL, for pictures of any size: rotary positions in
two dimensions. What differs between them is in RotaryTowerConfig.

A batch holds pictures of one size, so that nothing is padded and no picture sees another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from services.vision_encoder.norms import NormKind, make_norm
from services.vision_encoder.towers import activation

# (count, length) of neighbouring groups of patches; a patch sees its own group only.
Groups = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTowerConfig:
    """The shape of the tower. `num_layers` counts the whole tower, however many are used.

    norm           of every layer
    mlp            gated: activation(gate(x)) * up(x) before the last matrix; plain: activation(up(x))
    has_bias       in all matrices but the patch embedding
    has_pre_norm   a norm before the first layer
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    hidden_act: str
    norm: NormKind
    norm_eps: float
    mlp: Literal["gated", "plain"]
    has_bias: bool
    has_pre_norm: bool
    has_patch_bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class RotaryTower(nn.Module):
    """patches [batch, num_patches, 3 * patch_size ** 2] -> for each of `feature_layers` [.., num_patches, hidden_size]

    feature_layers   0 is the input of the first layer, i the output of the i-th
    """

    def __init__(self, config: RotaryTowerConfig, feature_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.feature_layers = feature_layers
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=config.has_patch_bias)
        self.pre_norm = (
            make_norm(config.norm, config.hidden_size, config.norm_eps) if config.has_pre_norm else nn.Identity()
        )
        self.layers = nn.ModuleList(RotaryTowerLayer(config) for _ in range(max(feature_layers)))

    def forward(
        self,
        patches: Tensor,
        angles: Tensor,
        groups_of_layers: Sequence[Groups] | None = None,
        positions: Tensor | None = None,
    ) -> list[Tensor]:
        """
        angles             [num_patches, head_dim / 2] fp32: how far each pair of a head's values is turned
        groups_of_layers   per layer, who sees whom; None: every patch sees every other
        positions          [num_patches, hidden_size], added to the patches' embeddings
        """
        everyone = [(1, patches.shape[1])]
        cos, sin = angles.cos(), angles.sin()
        embedded = self.patch_embedding(patches)
        hidden = self.pre_norm(embedded if positions is None else embedded + positions)
        states = {0: hidden}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, everyone if groups_of_layers is None else groups_of_layers[index])
            states[index + 1] = hidden
        return [states[index] for index in self.feature_layers]


class GatedMlp(nn.Module):
    def __init__(self, config: RotaryTowerConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.activation = activation(config.hidden_act)
        self.gate_up_proj = nn.Linear(size, 2 * inner, bias=config.has_bias)
        self.down_proj = nn.Linear(inner, size, bias=config.has_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        out: Tensor = self.down_proj(self.activation(gate) * up)
        return out


class PlainMlp(nn.Module):
    def __init__(self, config: RotaryTowerConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.activation = activation(config.hidden_act)
        self.up_proj = nn.Linear(size, inner, bias=config.has_bias)
        self.down_proj = nn.Linear(inner, size, bias=config.has_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.up_proj(hidden)))
        return out


MLPS: Final = {"gated": GatedMlp, "plain": PlainMlp}


class RotaryTowerLayer(nn.Module):
    def __init__(self, config: RotaryTowerConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.has_bias
        self.num_heads = config.num_heads
        self.attention_norm = make_norm(config.norm, size, config.norm_eps)
        self.qkv_proj = nn.Linear(size, 3 * size, bias=bias)
        self.out_proj = nn.Linear(size, size, bias=bias)
        self.mlp_norm = make_norm(config.norm, size, config.norm_eps)
        self.mlp = MLPS[config.mlp](config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, groups: Groups) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), cos, sin, groups)
        mlp: Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + mlp

    def _attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, groups: Groups) -> Tensor:
        # [batch, patches, 3 * hidden] -> three times [batch, heads, patches, head_dim]
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        attended, start = [], 0
        for count, length in groups:
            end = start + count * length
            part_query, part_key, part_value = (_split(x[:, :, start:end], count) for x in (query, key, value))
            attended.append(_join(scaled_dot_product_attention(part_query, part_key, part_value), count))
            start = end
        out: Tensor = self.out_proj(torch.cat(attended, dim=1))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., patches, head_dim]; cos, sin [patches, head_dim / 2] fp32"""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _split(x: Tensor, count: int) -> Tensor:
    """[batch, heads, count * length, head_dim] -> [batch * count, heads, length, head_dim]"""
    return torch.unflatten(x, 2, (count, -1)).transpose(1, 2).flatten(0, 1)


def _join(x: Tensor, count: int) -> Tensor:
    """[batch * count, heads, length, head_dim] -> [batch, count * length, heads * head_dim]"""
    return torch.unflatten(x.transpose(1, 2).flatten(2), 0, (-1, count)).flatten(1, 2)


def patches_of(pixels: Tensor, patch_size: int) -> Tensor:
    """[batch, 3, height, width] -> [batch, lines, columns, 3 * patch_size ** 2], values ordered as in a convolution"""
    lines, columns = pixels.shape[2] // patch_size, pixels.shape[3] // patch_size
    grid = pixels.reshape(-1, 3, lines, patch_size, columns, patch_size)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3)


def axial_angles(line: Tensor, column: Tensor, line_frequencies: Tensor, column_frequencies: Tensor) -> Tensor:
    """The first half of a head's pairs turns with the patch's line, the second with its column.

    line, column   [num_patches]
    frequencies    [head_dim / 4] each, radians per patch
    returns        [num_patches, head_dim / 2] fp32
    """
    return torch.cat((line[:, None] * line_frequencies, column[:, None] * column_frequencies), dim=-1)


def rope_frequencies(theta: float, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32, falling"""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
