"""GGUF files: the blocks of each type as `GroupedWeight`, and the file as a checkpoint under Hugging Face's names.

A block is 32 weights with a scale, or, in the K types, 256 in groups of 16 or 32 whose scales are integers themselves.
Types that are not sums of scaled integers (IQ4_NL and the like) are dequantized, one matrix at a time, and rounded to
int8 in groups of 32. Layouts: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from services.text_engine.kernels.grouped_weight import GroupedWeight, quantize
from services.text_engine.models.config import ConfigError
from services.text_engine.models.quantization.interface import QuantizedFormat

PLAIN_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)


def find_file(folder: Path) -> Path | None:
    """The GGUF file of a checkpoint folder without safetensors. Raises ConfigError where there are several."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ConfigError(f"{folder} holds {len(files)} GGUF files; name one of them as the model")
    return files[0]


class GgufCheckpoint:
    """Satisfies `expert_tensors.TensorSource`: a quantized matrix is two tensors, "….blocks" [rows, bytes] and
    "….block_type".

    Raises ConfigError without the package gguf.
    """

    def __init__(self, file: Path) -> None:
        self.folder = file.parent
        self._file = file
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._names: dict[str, tuple[str, str]] = {}
        for name, tensor in self._tensors.items():
            owner, _, kind = name.rpartition(".")
            ours = hugging_face_name(owner)
            if ours is None:
                continue
            is_plain = tensor.tensor_type.name in PLAIN_TYPES
            for end in (kind,) if is_plain else ("blocks", "block_type"):
                self._names[f"{ours}.{end}"] = (name, end)

    @cached_property
    def _reader(self) -> Any:
        return open_gguf(self._file)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        stored, end = self._names[name]
        tensor = self._tensors[stored]
        if end == "block_type":
            return ()
        sizes = tensor.data.shape if end == "blocks" else reversed(tensor.shape)
        return tuple(int(size) for size in sizes)

    def tensor(self, name: str) -> torch.Tensor:
        stored, end = self._names[name]
        tensor = self._tensors[stored]
        if end == "block_type":
            return torch.tensor(int(tensor.tensor_type))
        data = torch.from_numpy(tensor.data.copy())
        if end == "blocks":
            return self._unpermuted(stored, data.view(torch.uint8))
        plain = data.view(PLAIN_TYPES[tensor.tensor_type.name])
        return self._unpermuted(stored, plain)

    def part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        return self.tensor(name)[part]

    def _unpermuted(self, stored: str, rows: torch.Tensor) -> torch.Tensor:
        """Llama's files interleave the two rotary halves of each head of query and key; Hugging Face keeps them apart.

        rows  [num_heads * head_dim, …]
        """
        architecture = metadata(self._reader, "general.architecture")
        kind = stored.split(".")[2] if stored.startswith("blk.") else ""
        if architecture != "llama" or kind not in ("attn_q", "attn_k"):
            return rows
        key = "head_count" if kind == "attn_q" else "head_count_kv"
        num_heads = metadata(self._reader, f"llama.attention.{key}")
        half_dim = rows.shape[0] // num_heads // 2
        return rows.view(num_heads, half_dim, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def open_gguf(file: Path) -> Any:
    """gguf's reader, which maps the file. Raises ConfigError without the package, or for a damaged file."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ConfigError(f"{file.name}: reading GGUF files needs the package gguf: pip install gguf") from error
    try:
        return GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise ConfigError(f"{file} is damaged or no GGUF file: {error}") from error


def metadata(reader: Any, key: str, default: Any = None) -> Any:
    """One field of a file. Raises ConfigError where it is missing and there is no default."""
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise ConfigError(f"the GGUF file has no field {key}, which this model needs")
    return default


def hugging_face_name(owner: str) -> str | None:
    """ "model.layers.0.mlp.up_proj" for "blk.0.ffn_up"; None for what is no weight; unknown names stay as they are"""
    if owner in OTHER_NAMES:
        return OTHER_NAMES[owner]
    if owner == "rope_freqs":
        return None
    block, _, rest = owner.partition(".")
    layer, _, kind = rest.partition(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}" if block == "blk" and kind in LAYER_NAMES else owner


def unpack(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> GroupedWeight:
    """
    blocks      [out_features, bytes] uint8
    block_type  ggml's number of the type
    """
    from gguf import GGMLQuantizationType, quants
    from gguf.constants import GGML_QUANT_SIZES

    block_type = GGMLQuantizationType(int(tensors["block_type"]))
    rows = tensors["blocks"]
    reader = READERS.get(block_type.name)
    if reader is None:
        try:
            values = torch.from_numpy(quants.dequantize(rows.numpy(), block_type))
        except NotImplementedError as error:
            raise ValueError(
                f"weights of type {block_type.name}; supported: {', '.join((*PLAIN_TYPES, *READERS))} and those that "
                "the package gguf dequantizes"
            ) from error
        return quantize(values, bits=8, group_size=32, symmetric=True)
    _, block_bytes = GGML_QUANT_SIZES[block_type]
    weight = reader(rows.view(-1, block_bytes), shape[0])
    if tuple(weight.quants.shape) != shape:
        raise ValueError(f"blocks hold {tuple(weight.quants.shape)} weights; {shape} are needed")
    return weight


FORMAT = QuantizedFormat("gguf", "blocks", ("blocks", "block_type"), unpack)


def _fp16(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The number in bytes first and first + 1 of each block, fp32 [num_blocks, 1]"""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[num_blocks, bytes] -> [num_blocks, 2 * bytes], all low ones first"""
    return torch.cat((packed & 15, packed >> 4), 1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 4] -> [num_blocks, 32], worth 16 each"""
    return (((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1) << 4).flatten(1)


def _grouped(
    quants: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    num_rows: int,
    *,
    bits: int,
    group_size: int = 32,
) -> GroupedWeight:
    minimums = None if minimums is None else minimums.reshape(num_rows, -1)
    return GroupedWeight(quants.reshape(num_rows, -1), scales.reshape(num_rows, -1), minimums, bits, group_size)


def _q4_0(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    return _grouped(_nibbles(blocks[:, 2:]), _fp16(blocks, 0), None, num_rows, bits=4)


def _q4_1(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    return _grouped(_nibbles(blocks[:, 4:]), _fp16(blocks, 0), _fp16(blocks, 2), num_rows, bits=4)


def _q5_0(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    quants = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])) + (128 - 16)
    return _grouped(quants, _fp16(blocks, 0), None, num_rows, bits=8)


def _q5_1(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _grouped(quants, _fp16(blocks, 0), _fp16(blocks, 2), num_rows, bits=8)


def _q8_0(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    return _grouped(blocks[:, 2:] ^ 128, _fp16(blocks, 0), None, num_rows, bits=8)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and eight minimums of 6 bits in 12 bytes, each [num_blocks, 8]"""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minimums = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales.float(), minimums.float()


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 128] -> [num_blocks, 256]: of each 32 bytes the low ones, then the high ones"""
    quarters = packed.reshape(-1, 4, 32)
    return torch.stack((quarters & 15, quarters >> 4), 2).flatten(1)


def _q4_k(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    scales, minimums = _k_scales(blocks[:, 4:16])
    return _grouped(
        _k_nibbles(blocks[:, 16:]), scales * _fp16(blocks, 0), minimums * -_fp16(blocks, 2), num_rows, bits=4
    )


def _q5_k(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    scales, minimums = _k_scales(blocks[:, 4:16])
    bits = (blocks[:, 16:48, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [num_blocks, 32, 8 groups]
    quants = _k_nibbles(blocks[:, 48:]) | (bits << 4).transpose(1, 2).flatten(1)
    return _grouped(quants, scales * _fp16(blocks, 0), minimums * -_fp16(blocks, 2), num_rows, bits=8)


def _q6_k(blocks: torch.Tensor, num_rows: int) -> GroupedWeight:
    low = blocks[:, :128].reshape(-1, 2, 64)
    nibbles = torch.cat((low & 15, low >> 4), 2)  # [num_blocks, 2 halves, 128]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    quants = (nibbles | ((high & 3) << 4).flatten(2)).flatten(1) + (128 - 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _fp16(blocks, 208)
    return _grouped(quants, scales, None, num_rows, bits=8, group_size=16)


READERS: Mapping[str, Callable[[torch.Tensor, int], GroupedWeight]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
