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
from services.text_engine.models.layers import Linear, MakeProduct, Ranks
from services.text_engine.models.sharding import Shard
from shared.torch_io import Checkpoint

FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MAX_NAMES_SHOWN: Final = 5
RANDOM_STD: Final = 0.02

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
    ranks: Ranks | None = None,
    on_progress: OnProgress | None = None,
) -> Decoder:
    """The decoder of the checkpoint in `folder`, with weights in `dtype` on `device`.

    config        as `families.load_model_config` read it from the same folder
    make_product  keeps a weight matrix for its products
    ranks         the processes that share the model, of which this one reads and keeps its part only; None: it is alone
    on_progress   called with the share of tensors loaded, rising to 1.0
    Raises FileNotFoundError without safetensors files, CheckpointError for missing, unexpected or misshapen tensors,
    ConfigError if the ranks cannot share the model.
    """
    shard = None if ranks is None else Shard(ranks.index, ranks.size)
    weights = CheckpointWeights(Checkpoint(folder), config, dtype, device, on_progress, shard)
    config = dataclasses.replace(config, tie_word_embeddings=weights.is_tied)
    if shard is not None:
        config = shard.config(config)
    return Decoder(config, weights.read, attention, kernels, device, make_product, ranks)


def random_decoder(
    config: ModelConfig,
    attention: AttentionBackend,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make_product: MakeProduct = Linear,
    ranks: Ranks | None = None,
) -> Decoder:
    """As `load_decoder`, but with random weights, made on the device."""
    shard = None if ranks is None else Shard(ranks.index, ranks.size)
    weights = RandomWeights(config, dtype, device, shard)
    config = config if shard is None else shard.config(config)
    return Decoder(config, weights.read, attention, kernels, device, make_product, ranks)


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
    if config.output_norms:
        layer |= {"self_attn.output_norm.weight": (hidden,), "mlp.output_norm.weight": (hidden,)}
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
        shard: Shard | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._shard = shard
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
        if self.is_tied and shard is not None:  # a rank's part of the head is read as such
            self._shapes["lm_head.weight"] = self._shapes["embed_tokens.weight"]
            self._names["lm_head.weight"] = self._names["embed_tokens.weight"]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, made of its parts if it is a fused one, on the device; always memory of its own."""
        parts = [self._read_part(part) for part in unfused(name)]
        fused = torch.cat(parts) if len(parts) > 1 else parts[0]
        # The file's mapping must not outlive the load: a checkpoint may be replaced while it is being served.
        return fused.to(self._device, self._dtype, copy=len(parts) == 1)

    def _read_part(self, name: str) -> torch.Tensor:
        part = None if self._shard is None else self._shard.part(name, self._config)
        shape = self._checkpoint.shape(self._names[name])
        if shape != self._shapes[name]:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {self._names[name]} has shape {shape}; "
                f"config.json asks for {self._shapes[name]}"
            )
        stored = self._names[name]
        tensor = self._checkpoint.tensor(stored) if part is None else self._checkpoint.part(stored, part)
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {self._names[name]} is stored as {tensor.dtype}; "
                "only bfloat16, float16 and float32 weights are supported"
            )
        self._num_read += 1
        if self._on_progress is not None:
            self._on_progress(self._num_read / len(self._shapes))
        if self._config.norm_offset and name.endswith("norm.weight"):
            return tensor.float() + self._config.norm_offset
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


class RandomWeights:
    """Weights that no file holds, of the shapes that the config says: what a model costs, without what it knows."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
    ) -> None:
        self._config = config
        self._shapes = parameter_shapes(config)
        self._dtype = dtype
        self._device = device
        self._shard = shard

    def read(self, name: str) -> torch.Tensor:
        """As `CheckpointWeights.read`."""
        parts = [self._make(part) for part in unfused(name)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _make(self, name: str) -> torch.Tensor:
        shape = list(self._shapes[name])
        part = None if self._shard is None else self._shard.part(name, self._config)
        for dimension, piece in enumerate(part or ()):
            shape[dimension] = len(range(*piece.indices(shape[dimension])))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.fill_(1.0) if name.endswith("norm.weight") else tensor.normal_(std=RANDOM_STD)


def unfused(name: str) -> list[str]:
    """["layers.0.self_attn.q_proj.weight", …k…, …v…] for "layers.0.self_attn.qkv_proj.weight"; else the name alone."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]
