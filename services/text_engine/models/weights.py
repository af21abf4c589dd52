"""Loads a decoder straight from safetensors: checks the checkpoint against the config, then reads tensor by tensor.

Beside the finished part of the model, memory holds one fused tensor at a time; the checkpoint itself is mapped, not
read in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from services.text_engine.attention.interface import AttentionBackend
from services.text_engine.kernels.interface import Kernels
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.decoder import Decoder
from services.text_engine.models.families import FAMILIES
from services.text_engine.models.layers import Linear, MakeProduct
from shared.torch_io import Checkpoint

FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MAX_NAMES_SHOWN: Final = 5

OnProgress = Callable[[float], None]


class CheckpointError(ValueError):
    """The checkpoint's tensors are not the ones its config promises."""


def load_decoder(
    folder: Path,
    config: ModelConfig,
    attention: AttentionBackend,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make_product: MakeProduct = Linear,
    on_progress: OnProgress | None = None,
) -> Decoder:
    """The decoder of the checkpoint in `folder`, with weights in `dtype` on `device`.

    config        as `families.load_model_config` read it from the same folder
    make_product  keeps a weight matrix for its products
    on_progress   called with the share of tensors loaded, rising to 1.0
    Raises FileNotFoundError without safetensors files, CheckpointError for missing, unexpected or misshapen tensors.
    """
    weights = CheckpointWeights(Checkpoint(folder), config, dtype, device, on_progress)
    config = dataclasses.replace(config, tie_word_embeddings=weights.is_tied)
    return Decoder(config, weights.read, attention, kernels, device, make_product)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the decoder needs, by our name before fusing, an untied head included."""
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    matrices = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in matrices.items():
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes = {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    vocabulary = (config.vocab_size, hidden)
    return shapes | {"embed_tokens.weight": vocabulary, "norm.weight": (hidden,), "lm_head.weight": vocabulary}


class CheckpointWeights:
    """A checkpoint's tensors by our names, fused ones included; read and converted when asked for, never kept."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._num_read = 0
        family = FAMILIES[config.architecture]
        names = ((family.our_name(name), name) for name in checkpoint.names)
        self._names = {ours: theirs for ours, theirs in names if ours is not None}
        self._shapes = parameter_shapes(config)
        self.is_tied = config.tie_word_embeddings and self._head_adds_nothing()
        if self.is_tied:
            self._shapes.pop("lm_head.weight")
            self._names.pop("lm_head.weight", None)
        self._check_names()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, made of its parts if it is a fused one, on the device; always memory of its own."""
        parts = [self._read_part(part) for part in unfused(name)]
        fused = torch.cat(parts) if len(parts) > 1 else parts[0]
        # The file's mapping must not outlive the load: a checkpoint may be replaced while it is being served.
        return fused.to(self._device, self._dtype, copy=len(parts) == 1)

    def _read_part(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(self._names[name])
        if tuple(tensor.shape) != self._shapes[name]:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {self._names[name]} has shape {tuple(tensor.shape)}; "
                f"config.json asks for {self._shapes[name]}"
            )
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {self._names[name]} is stored as {tensor.dtype}; "
                "only bfloat16, float16 and float32 weights are supported"
            )
        self._num_read += 1
        if self._on_progress is not None:
            self._on_progress(self._num_read / len(self._shapes))
        return tensor

    def _head_adds_nothing(self) -> bool:
        """Some checkpoints store a head although the config ties it; like transformers, believe a head that differs."""
        if "lm_head.weight" not in self._names or "embed_tokens.weight" not in self._names:
            return True
        head, embedding = (self._checkpoint.tensor(self._names[f"{n}.weight"]) for n in ("lm_head", "embed_tokens"))
        return torch.equal(head, embedding)

    def _check_names(self) -> None:
        missing = sorted(self._shapes.keys() - self._names.keys())
        unexpected = sorted(self._names[name] for name in self._names.keys() - self._shapes.keys())
        problems = [
            f"{len(names)} {kind} ({', '.join(names[:MAX_NAMES_SHOWN])}{', …' if len(names) > MAX_NAMES_SHOWN else ''})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        if problems:
            raise CheckpointError(
                f"{self._checkpoint.folder}: the tensors do not fit config.json: {'; '.join(problems)}"
            )


def unfused(name: str) -> list[str]:
    """["layers.0.self_attn.q_proj.weight", …k…, …v…] for "layers.0.self_attn.qkv_proj.weight"; else the name alone."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]
