"""Checkpoint tensors to loaded modules: names, dtype, and a digest of every value that was used.

Names come in three spellings (published checkpoints, transformers 4.52 to 4.57, transformers 5); a prefix is all that
differs. The digest is over canonical names, so the same weights saved anew share cached embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.packed_linear import pack_linears
from services.vision_encoder.projector import Projector
from services.vision_encoder.towers import TowerConfig, VisionTower
from shared.torch_io import Checkpoint

TOWER_PREFIXES: Final = (
    "vision_tower.vision_model.",
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.",
    "model.vision_model.",
)
PROJECTOR_PREFIXES: Final = ("multi_modal_projector.", "model.multi_modal_projector.")
PROJECTOR_NORMS: Final = ("projector_layernorm", "layer_norm")  # VIP-LLaVA's name and InternVL's


class WeightReader:
    """Reads tensors by canonical name and digests what it reads: name, dtype, shape and bytes as stored."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._state = hashlib.sha256()

    def read(self, prefixes: Iterable[str], name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor called `name` behind whichever of `prefixes`. Raises UnsupportedCheckpoint if there is none."""
        full_name = self._find(prefixes, name)
        if full_name is None:
            raise UnsupportedCheckpoint(f"the checkpoint {self._checkpoint.folder} has no tensor {name!r}")
        tensor = self._checkpoint.tensor(full_name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise UnsupportedCheckpoint(f"{full_name} has shape {tuple(tensor.shape)}; the config means {shape}")
        self._digest(name, tensor)
        return tensor

    def has(self, prefixes: Iterable[str], name: str) -> bool:
        return self._find(prefixes, name) is not None

    @property
    def digest(self) -> bytes:
        return self._state.digest()

    def _find(self, prefixes: Iterable[str], name: str) -> str | None:
        return next((prefix + name for prefix in prefixes if prefix + name in self._checkpoint.names), None)

    def _digest(self, name: str, tensor: Tensor) -> None:
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)} "
        self._state.update(head.encode())
        self._state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def load_tower(reader: WeightReader, config: TowerConfig, feature_layers: tuple[int, ...]) -> VisionTower:
    """CLIP or SigLIP, fp32 or half-precision as stored; see `prepare` for the dtype it runs in."""
    width = config.hidden_size

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(TOWER_PREFIXES, name, shape)

    def pair(ours: str, theirs: str, *shape: int) -> dict[str, Tensor]:
        return {
            f"{ours}.weight": read(f"{theirs}.weight", *shape),
            f"{ours}.bias": read(f"{theirs}.bias", shape[0]),
        }

    patch = read("embeddings.patch_embedding.weight", width, 3, config.patch_size, config.patch_size)
    state = {"patch_embedding.weight": patch.flatten(1)}
    state["position_embedding"] = read("embeddings.position_embedding.weight", config.num_positions, width)
    if config.traits.has_class_token:
        state["class_embedding"] = read("embeddings.class_embedding", width)
    if config.traits.has_pre_norm:
        state |= pair("pre_layernorm", "pre_layrnorm", width)
    if config.traits.has_patch_bias:
        state["patch_embedding.bias"] = read("embeddings.patch_embedding.bias", width)
    for index in range(max(feature_layers)):
        ours, theirs = f"layers.{index}.", f"encoder.layers.{index}."
        parts = [pair("", f"{theirs}self_attn.{name}_proj", width, width) for name in "qkv"]
        state |= {
            f"{ours}qkv_proj.{kind}": torch.cat([part[f".{kind}"] for part in parts]) for kind in ("weight", "bias")
        }
        state |= pair(f"{ours}out_proj", f"{theirs}self_attn.out_proj", width, width)
        state |= pair(f"{ours}layer_norm1", f"{theirs}layer_norm1", width)
        state |= pair(f"{ours}layer_norm2", f"{theirs}layer_norm2", width)
        state |= pair(f"{ours}fc1", f"{theirs}mlp.fc1", config.intermediate_size, width)
        state |= pair(f"{ours}fc2", f"{theirs}mlp.fc2", width, config.intermediate_size)
    with torch.device("meta"):
        tower = VisionTower(config, feature_layers)
    tower.load_state_dict(state, assign=True)
    return tower


def load_projector(reader: WeightReader, input_size: int, hidden_act: str, *, layer_norm_eps: float) -> Projector:
    """Its width is that of its weights: published configs often leave the text model's hidden size out.

    layer_norm_eps   of the leading norm, if the checkpoint has one
    """
    state = {"linear_2.weight": reader.read(PROJECTOR_PREFIXES, "linear_2.weight")}
    output_size = state["linear_2.weight"].shape[0]
    state["linear_1.weight"] = reader.read(PROJECTOR_PREFIXES, "linear_1.weight", (output_size, input_size))
    has_bias = reader.has(PROJECTOR_PREFIXES, "linear_1.bias")
    if has_bias:
        for name in ("linear_1.bias", "linear_2.bias"):
            state[name] = reader.read(PROJECTOR_PREFIXES, name, (output_size,))
    norm = next((name for name in PROJECTOR_NORMS if reader.has(PROJECTOR_PREFIXES, f"{name}.weight")), None)
    if norm is not None:
        for kind in ("weight", "bias"):
            state[f"layer_norm.{kind}"] = reader.read(PROJECTOR_PREFIXES, f"{norm}.{kind}", (input_size,))
    with torch.device("meta"):
        projector = Projector(
            input_size,
            output_size,
            hidden_act,
            has_bias=has_bias,
            layer_norm_eps=None if norm is None else layer_norm_eps,
        )
    projector.load_state_dict(state, assign=True)
    return projector


def prepare(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move to device and dtype, for inference only; on a CPU also lay the matrices out for its kernels."""
    module.requires_grad_(False).eval().to(device=device, dtype=dtype)
    if device.type == "cpu":
        pack_linears(module)
