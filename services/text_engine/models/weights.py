"""Loads a decoder straight from safetensors: checks the checkpoint against the config, then reads tensor by tensor.

Beside the finished part of the model, memory holds one fused tensor at a time; the checkpoint itself is mapped, not
read in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

import torch

from services.text_engine.attention.interface import AttentionBackend
from services.text_engine.kernels.grouped_weight import GroupedWeight, stack
from services.text_engine.kernels.interface import Kernels
from services.text_engine.kernels.native_quantized import UnpackingLinear
from services.text_engine.models.config import ModelConfig, MoeConfig
from services.text_engine.models.decoder import Decoder
from services.text_engine.models.expert_tensors import SeparateExperts, TensorSource
from services.text_engine.models.families.registry import FAMILIES
from services.text_engine.models.layers import (
    Adapt,
    Linear,
    MakeProduct,
    MakeQuantizedProduct,
    Matrix,
    Ranks,
    product_maker,
)
from services.text_engine.models.quantization.formats import load_format
from services.text_engine.models.quantization.gguf_file import GgufCheckpoint, find_file
from services.text_engine.models.quantization.interface import QuantizedFormat
from services.text_engine.models.quantization.on_the_fly import Quantize
from services.text_engine.models.sharding import Shard
from shared.torch_io import Checkpoint

FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MAX_NAMES_SHOWN: Final = 5
RANDOM_STD: Final = 0.02

# Ends of names of what some quantized checkpoints hold beside the weights: scales for a quantized KV cache.
CACHE_SCALES: Final = (".k_scale", ".v_scale")

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
    make_quantized: MakeQuantizedProduct = UnpackingLinear,
    quantize: Quantize | None = None,
    matrix_dtypes: AbstractSet[torch.dtype] = frozenset(),
    ranks: Ranks | None = None,
    on_progress: OnProgress | None = None,
    adapt: Adapt | None = None,
) -> Decoder:
    """The decoder of the checkpoint in `folder`, with weights in `dtype` on `device`.

    config          as `families.load_model_config` read it from the same folder
    make_product    keeps a weight matrix for its products
    make_quantized  alike, for a quantized one
    quantize        makes quantized matrices of those stored plain; None: they stay so
    matrix_dtypes   what matrices, the embedding too, may stay in if they are stored so; `make_product` takes them
    ranks           the processes that share the model, of which this one reads and keeps its part only; None: it is
                    alone
    on_progress     called with the share of tensors loaded, rising to 1.0
    adapt           see Decoder
    Raises FileNotFoundError without safetensors files, CheckpointError for missing, unexpected or misshapen tensors,
    ConfigError if the ranks cannot share the model.
    """
    shard = None if ranks is None else Shard(ranks.index, ranks.size)
    gguf_file = find_file(folder)
    checkpoint: TensorSource
    if gguf_file is None:
        checkpoint = SeparateExperts(Checkpoint(folder), config.hidden_size)
    else:
        checkpoint = GgufCheckpoint(gguf_file)
    weights = CheckpointWeights(
        checkpoint,
        config,
        dtype,
        device,
        on_progress,
        shard,
        stored_format=load_format(folder),
        quantize=quantize,
        matrix_dtypes=matrix_dtypes,
    )
    config = dataclasses.replace(config, tie_word_embeddings=weights.shares_head)
    if shard is not None:
        config = shard.config(config)
    make = product_maker(make_product, make_quantized)
    return Decoder(config, weights.read, attention, kernels, device, weights.read_matrix, make, ranks, adapt)


def random_decoder(
    config: ModelConfig,
    attention: AttentionBackend,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make_product: MakeProduct = Linear,
    make_quantized: MakeQuantizedProduct = UnpackingLinear,
    quantize: Quantize | None = None,
    matrix_dtypes: AbstractSet[torch.dtype] = frozenset(),
    ranks: Ranks | None = None,
    adapt: Adapt | None = None,
) -> Decoder:
    """As `load_decoder`, but with random weights, made on the device; matrices in bf16 if they may be."""
    shard = None if ranks is None else Shard(ranks.index, ranks.size)
    matrix_dtype = torch.bfloat16 if torch.bfloat16 in matrix_dtypes else dtype
    weights = RandomWeights(config, dtype, device, shard, quantize, matrix_dtype=matrix_dtype)
    if quantize is not None:
        config = dataclasses.replace(config, tie_word_embeddings=False)
    config = config if shard is None else shard.config(config)
    make = product_maker(make_product, make_quantized)
    return Decoder(config, weights.read, attention, kernels, device, weights.read_matrix, make, ranks, adapt)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the decoder needs, by our name before fusing, an untied head included."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.output_norms:
        layer |= {"self_attn.output_norm.weight": (hidden,), "mlp.output_norm.weight": (hidden,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        for name, (rows, columns, has_bias) in (attention | _feed_forward_matrices(config, config.moe_at(i))).items():
            shapes[f"layers.{i}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"layers.{i}.{name}.bias"] = (rows,)
    vocabulary = (config.vocab_size, hidden)
    return shapes | {"embed_tokens.weight": vocabulary, "norm.weight": (hidden,), "lm_head.weight": vocabulary}


def _feed_forward_matrices(config: ModelConfig, moe: MoeConfig | None) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, by our name within a layer."""
    hidden = config.hidden_size

    def mlp(name: str, intermediate: int, has_bias: bool = False) -> dict[str, tuple[int, int, bool]]:
        return {
            f"{name}.gate_proj": (intermediate, hidden, has_bias),
            f"{name}.up_proj": (intermediate, hidden, has_bias),
            f"{name}.down_proj": (hidden, intermediate, has_bias),
        }

    if moe is None:
        return mlp("mlp", config.intermediate_size, config.mlp_bias)
    matrices = {"mlp.gate": (moe.num_experts, hidden, False)}
    for i in range(moe.num_experts):
        matrices |= mlp(f"mlp.experts.{i}", moe.intermediate_size)
    if moe.shared_intermediate_size is not None:
        matrices |= mlp("mlp.shared_expert", moe.shared_intermediate_size)
        matrices["mlp.shared_expert_gate"] = (1, hidden, False)
    return matrices


class CheckpointWeights:
    """A checkpoint's tensors by our names, fused ones included; read and converted when asked for, never kept."""

    def __init__(
        self,
        checkpoint: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress | None = None,
        shard: Shard | None = None,
        *,
        stored_format: QuantizedFormat | None = None,
        quantize: Quantize | None = None,
        matrix_dtypes: AbstractSet[torch.dtype] = frozenset(),
    ) -> None:
        """As `load_decoder`."""
        self._checkpoint = checkpoint
        self._config = config
        self._shard = shard
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._format = stored_format
        self._quantize = quantize
        self._matrix_dtypes = matrix_dtypes
        self._num_read = 0
        family = FAMILIES[config.architecture]
        names = ((family.our_name(name), name) for name in checkpoint.names)
        self._names = {ours: theirs for ours, theirs in names if ours is not None}
        self._shapes = parameter_shapes(config)
        self.is_tied = config.tie_word_embeddings and self._head_adds_nothing()
        if self.is_tied:
            self._shapes.pop("lm_head.weight")
            self._names = {name: theirs for name, theirs in self._names.items() if not name.startswith("lm_head.")}
        self._check_names()
        # The embedding is read row by row and stays plain; a head that is to be quantized cannot be the same tensor.
        quantizes_head = quantize is not None or bool(self._stored_tensors("embed_tokens.weight"))
        self.shares_head = self.is_tied and not quantizes_head
        if self.is_tied and (shard is not None or quantizes_head):  # the head is read as such
            self._shapes["lm_head.weight"] = self._shapes["embed_tokens.weight"]
            ends = {name: theirs for name, theirs in self._names.items() if name.startswith("embed_tokens.")}
            self._names |= {name.replace("embed_tokens", "lm_head"): theirs for name, theirs in ends.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor, made of its parts if it is a fused one, on the device; always memory of its own."""
        parts = [self._read_part(part) for part in unfused(name)]
        fused = torch.cat(parts) if len(parts) > 1 else parts[0]
        # The file's mapping must not outlive the load: a checkpoint may be replaced while it is being served.
        return fused.to(self._device, self._dtype_for(fused), copy=len(parts) == 1)

    def read_matrix(self, name: str) -> list[Matrix]:
        """As `read`, but quantized where the checkpoint holds it so or `quantize` makes it so; in as few matrices, side
        by side, as its parts can be joined to."""
        parts = unfused(name)
        if self._quantize is None and not any(map(self._stored_tensors, parts)):
            return [self.read(name)]
        joined: list[Matrix] = []
        for part in map(self._matrix_part, parts):
            last = joined[-1] if joined else None
            if isinstance(part, GroupedWeight) and isinstance(last, GroupedWeight) and last.fits(part):
                joined[-1] = stack([last, part])
            elif isinstance(part, torch.Tensor) and isinstance(last, torch.Tensor):
                joined[-1] = torch.cat((last, part))
            else:
                joined.append(part)
        return [
            matrix.to(self._device)
            if isinstance(matrix, GroupedWeight)
            else matrix.to(self._device, self._dtype_for(matrix), copy=True)
            for matrix in joined
        ]

    def _dtype_for(self, tensor: torch.Tensor) -> torch.dtype:
        stays = tensor.dim() == 2 and tensor.dtype in self._matrix_dtypes
        return tensor.dtype if stays else self._dtype

    def _matrix_part(self, name: str) -> Matrix:
        if self._stored_tensors(name):
            return self._quantized_part(name)
        plain = self._read_part(name)
        return plain if self._quantize is None else self._quantize(name, plain)

    def _stored_tensors(self, name: str) -> dict[str, str]:
        """What holds the tensor `name` if it is stored quantized."""
        matrix, _, kind = name.rpartition(".")
        return self._format.tensors_of(matrix, self._names) if self._format and kind == "weight" else {}

    def _quantized_part(self, name: str) -> GroupedWeight:
        assert self._format is not None
        tensors = {end: self._checkpoint.tensor(self._names[full]) for end, full in self._stored_tensors(name).items()}
        problem = f"{self._checkpoint.folder}: {name.removesuffix('.weight')}, stored as {self._format.name}"
        shape = self._shapes[name]
        try:
            weight = self._format.unpack(tensors, (shape[0], shape[1]))
            if tuple(weight.quants.shape) != shape:
                raise CheckpointError(f"{problem}: its shape is {tuple(weight.quants.shape)}; wanted {shape}")
            part = None if self._shard is None else self._shard.part(name, self._config)
            for dimension, piece in enumerate(part or ()):
                weight = weight.columns(piece) if dimension else weight.rows(piece)
        except KeyError as error:
            raise CheckpointError(f"{problem}: the tensor {error} is missing") from error
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{problem}: {error}") from error
        self._count_read()
        return weight

    def _count_read(self) -> None:
        self._num_read += 1
        if self._on_progress is not None:
            self._on_progress(self._num_read / len(self._shapes))

    def _read_part(self, name: str) -> torch.Tensor:
        if self._stored_tensors(name):
            return self._quantized_part(name).dequantize()
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
        self._count_read()
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
        quantized = {name: self._stored_tensors(name) for name in self._shapes}
        found = self._names.keys() | {name for name, tensors in quantized.items() if tensors}
        known = self._shapes.keys() | {full for tensors in quantized.values() for full in tensors.values()}
        missing = sorted(self._shapes.keys() - found)
        unexpected = sorted(self._names[name] for name in self._names.keys() - known if not self._says_nothing(name))
        problems = [
            f"{len(names)} {kind} ({', '.join(names[:MAX_NAMES_SHOWN])}{', …' if len(names) > MAX_NAMES_SHOWN else ''})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        if problems:
            raise CheckpointError(
                f"{self._checkpoint.folder}: the tensors do not fit config.json: {'; '.join(problems)}"
            )

    def _says_nothing(self, name: str) -> bool:
        """Some quantizers write a bias of zeros for every matrix."""
        if self._format is None:
            return False
        is_bias = name.endswith(".bias")
        return name.endswith(CACHE_SCALES) or (is_bias and not self._checkpoint.tensor(self._names[name]).any())


class RandomWeights:
    """Weights that no file holds, of the shapes that the config says: what a model costs, without what it knows."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
        quantize: Quantize | None = None,
        *,
        matrix_dtype: torch.dtype | None = None,
    ) -> None:
        """matrix_dtype   None: `dtype`, as all others"""
        self._config = config
        self._matrix_dtype = matrix_dtype or dtype
        self._shapes = parameter_shapes(config)
        self._dtype = dtype
        self._device = device
        self._shard = shard
        self._quantize = quantize

    def read(self, name: str) -> torch.Tensor:
        """As `CheckpointWeights.read`."""
        parts = [self._make(part) for part in unfused(name)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def read_matrix(self, name: str) -> list[Matrix]:
        """As `CheckpointWeights.read_matrix`."""
        plain = self.read(name)
        return [plain if self._quantize is None else self._quantize(name, plain)]

    def _make(self, name: str) -> torch.Tensor:
        shape = list(self._shapes[name])
        part = None if self._shard is None else self._shard.part(name, self._config)
        for dimension, piece in enumerate(part or ()):
            shape[dimension] = len(range(*piece.indices(shape[dimension])))
        dtype = self._matrix_dtype if len(shape) == 2 else self._dtype
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return tensor.fill_(1.0) if name.endswith("norm.weight") else tensor.normal_(std=RANDOM_STD)


def unfused(name: str) -> list[str]:
    """["layers.0.self_attn.q_proj.weight", …k…, …v…] for "layers.0.self_attn.qkv_proj.weight"; else the name alone."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]
