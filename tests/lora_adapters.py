"""LoRA adapters in PEFT's format for tiny checkpoints, and those models with adapters merged into their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
STD = 0.25  # large enough to change nearly every greedy token of a tiny model


def write_adapter(
    base: Path, folder: Path, *, targets: Sequence[str] = ATTENTION + MLP, rank: int = 4, seed: int = 1, **config: Any
) -> Path:
    """Random weights for every matrix of `base` that ends in one of the targets."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    fields |= config
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(base_weights(base).items()):
        module = name.removesuffix(".weight")
        if ".layers." in name and module.rpartition(".")[2] in targets:
            own_rank = fields.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = STD * torch.randn(own_rank, weight.shape[1], generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = STD * torch.randn(weight.shape[0], own_rank, generator=generator)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """A checkpoint whose weights are W + scale * B @ A, as PEFT's merge_and_unload makes it."""
    shutil.copytree(base, folder)
    weights = base_weights(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (len(down) ** 0.5 if config.get("use_rslora") else len(down))
        weight = weights[module.removeprefix("base_model.model.") + ".weight"]
        weight += (scale * tensors[f"{module}.lora_B.weight"] @ down).to(weight.dtype)
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def base_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }
