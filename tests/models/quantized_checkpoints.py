"""Quantizes a tiny checkpoint into each published format, number by number as the format's description says.

Written apart from the engine's readers on purpose: plain loops over whole numbers, no code shared. Every packer takes a
matrix [out_features, in_features] and returns the stored tensors and, in fp32, what they stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, np.dtype[Any]]
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Pack = Callable[[Array], Packed]


@dataclass(frozen=True)
class Scheme:
    """What to write: `quantization_config`, and the packer of each matrix."""

    config: dict[str, Any]
    pack: Pack


def write_quantized(source: Path, folder: Path, scheme: Scheme) -> tuple[Path, Path]:
    """All layers' matrices of the checkpoint `source` quantized, and beside it a checkpoint of what they stand for."""
    quantized, plain = folder / "quantized", folder / "plain"
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = meant[name] = tensor
            continue
        tensors, meant[name] = scheme.pack(tensor.numpy())
        stored |= {f"{name.removesuffix('weight')}{end}": value for end, value in tensors.items()}
    for target, tensors in ((quantized, stored), (plain, meant)):
        shutil.copytree(source, target)
        save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    return quantized, plain


def rounded(weight: Array, bits: int, groups: Array, *, symmetric: bool) -> tuple[Array, Array, Array]:
    """quants [out, in], scales (exact in fp16) and zeros [out, num_groups], for the group of each input [in]"""
    num_groups = int(groups.max()) + 1
    steps = 2**bits - 1
    scales = np.zeros((len(weight), num_groups), np.float32)
    zeros = np.zeros((len(weight), num_groups), np.int64)
    for group in range(num_groups):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scales[:, group] = ((high - low) / steps).astype(np.float16)
        zeros[:, group] = 2 ** (bits - 1) if symmetric else np.round(-low / scales[:, group])
    quants = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, steps).astype(np.int64)
    return quants, scales, zeros


def words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """numbers [rows, columns]: of the 32 // bits in a word, number order[i] stands i-th from the lowest bits up."""
    per_word = 32 // bits
    out = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint32)
    for word in range(out.shape[1]):
        for place in range(per_word):
            column = word * per_word + (order[place] if order else place)
            out[:, word] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32))


def runs(in_features: int, group_size: int) -> Array:
    return np.arange(in_features) // (in_features if group_size == -1 else group_size)


def meaning(quants: Array, scales: Array, zeros: Array, groups: Array) -> torch.Tensor:
    return torch.from_numpy(((quants - zeros[:, groups]) * scales[:, groups]).astype(np.float32))


def awq(group_size: int) -> Scheme:
    def pack(weight: Array) -> Packed:
        groups = runs(weight.shape[1], group_size)
        quants, scales, zeros = rounded(weight, 4, groups, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": words(quants.T, 4, order),
            "qzeros": words(zeros.T, 4, order),
            "scales": torch.from_numpy(scales.T.astype(np.float16)),
        }
        return tensors, meaning(quants, scales, zeros, groups)

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Scheme(config, pack)


def gptq(
    group_size: int, *, bits: int = 4, symmetric: bool = True, act_order: bool = False, v2: bool = False
) -> Scheme:
    def pack(weight: Array) -> Packed:
        groups = runs(weight.shape[1], group_size)
        if act_order:
            groups = np.random.default_rng(weight.shape[1]).permutation(groups)
        quants, scales, zeros = rounded(weight, bits, groups, symmetric=symmetric)
        zeros = np.maximum(zeros, 1)  # less one, a zero of 0 cannot be stored
        tensors = {
            "qweight": words(quants, bits).t(),
            "qzeros": words((zeros if v2 else zeros - 1).T, bits),
            "scales": torch.from_numpy(scales.T.astype(np.float16)),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
            "bias": torch.zeros(len(weight), dtype=torch.float16),  # as AutoGPTQ writes for models without
        }
        return tensors, meaning(quants, scales, zeros, groups)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric}
    return Scheme(config | ({"checkpoint_format": "gptq_v2"} if v2 else {}), pack)


def packed_ints(group_size: int, *, bits: int = 4, symmetric: bool = True) -> Scheme:
    def pack(weight: Array) -> Packed:
        groups = runs(weight.shape[1], group_size)
        quants, scales, zeros = rounded(weight, bits, groups, symmetric=symmetric)
        tensors = {
            "weight_packed": words(quants, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).t()
        return tensors, meaning(quants, scales, zeros, groups)

    stated = {"num_bits": bits, "group_size": None if group_size == -1 else group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": stated}}
    return Scheme({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}, pack)


def int8_channels() -> Scheme:
    def pack(weight: Array) -> Packed:
        groups = runs(weight.shape[1], -1)
        quants, scales, zeros = rounded(weight, 8, groups, symmetric=True)
        signed = np.clip(quants - 128, -128, 127).astype(np.int8)
        return {"weight": torch.from_numpy(signed), "weight_scale": torch.from_numpy(scales)}, meaning(
            quants, scales, zeros, groups
        )

    return Scheme({"quant_method": "compressed-tensors", "format": "int-quantized"}, pack)


def floats8(config: dict[str, Any], scale_name: str, tile: tuple[int, int]) -> Scheme:
    """tile   outputs and inputs that share a scale"""

    def pack(weight: Array) -> Packed:
        values = torch.from_numpy(weight)
        out_features, in_features = values.shape
        down, across = min(tile[0], out_features), min(tile[1], in_features)
        scales = torch.zeros(-(-out_features // down), -(-in_features // across))
        quants = torch.zeros(values.shape, dtype=torch.float8_e4m3fn)
        meant = torch.zeros_like(values)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
                scales[i, j] = values[at].abs().max() / 448
                quants[at] = (values[at] / scales[i, j]).to(torch.float8_e4m3fn)
                meant[at] = quants[at].float() * scales[i, j]
        stored = scales.reshape(()) if scales.numel() == 1 else scales
        return {"weight": quants, scale_name: stored, "input_scale": torch.ones(())}, meant

    return Scheme(config, pack)


SCHEMES: dict[str, Scheme] = {
    "awq, groups of 32": awq(32),
    "awq, one group": awq(-1),
    "gptq, groups of 32": gptq(32),
    "gptq, one group": gptq(-1),
    "gptq, act-order": gptq(32, act_order=True, symmetric=False),
    "gptq, 8 bits": gptq(32, bits=8),
    "gptq, version 2": gptq(16, symmetric=False, v2=True),
    "packed int4": packed_ints(32),
    "packed int4 with zeros": packed_ints(32, symmetric=False),
    "packed int4, the last group short": packed_ints(64),
    "packed int8": packed_ints(-1, bits=8),
    "int8": int8_channels(),
}
EVERYTHING = 1 << 30
FLOAT_SCHEMES: dict[str, Scheme] = {
    "fp8, one scale": floats8({"quant_method": "fp8"}, "weight_scale", (EVERYTHING, EVERYTHING)),
    "fp8, tiles": floats8({"quant_method": "fp8", "weight_block_size": [48, 40]}, "weight_scale_inv", (48, 40)),
    "compressed-tensors fp8": floats8(
        {"quant_method": "compressed-tensors", "format": "float-quantized"}, "weight_scale", (1, EVERYTHING)
    ),
}
