"""The adapters that an engine starts with, as its settings name them; every rank reads its part of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from services.text_engine.config import TextEngineSettings
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.layers import MakeProduct
from services.text_engine.models.lora.adapted import LoadedAdapters
from services.text_engine.models.lora.adapter_files import AdapterFiles, AdapterIdentity, read_adapter
from services.text_engine.models.sharding import Shard


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """config   the whole model's
    adapters   of this rank's part of it
    first      those that it started with: numbers 1, 2, … in this order
    """

    config: ModelConfig
    adapters: LoadedAdapters
    first: list[AdapterIdentity]


def wants_adapters(settings: TextEngineSettings) -> bool:
    return bool(settings.lora_modules) or settings.lora_folder is not None


def read_lora_modules(settings: TextEngineSettings, config: ModelConfig) -> list[AdapterFiles]:
    """Raises ValueError or OSError subclasses whose message says which adapter is wrong."""
    pairs = [module.split("=", 1) for module in settings.lora_modules]
    names = [settings.served_model_name or settings.model.name, *(name for name, _ in pairs)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"lora_modules: the name {twice!r} is given twice, or is the model's own")
    if len(pairs) > settings.max_loras:
        raise ValueError(f"lora_modules names {len(pairs)} adapters; max_loras is {settings.max_loras}")
    return [read_adapter(name, Path(folder), config, max_rank=settings.max_lora_rank) for name, folder in pairs]


def adapters_of_rank(
    settings: TextEngineSettings,
    config: ModelConfig,
    make_product: MakeProduct,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None,
) -> LoadedAdapters | None:
    """None: no adapter will ever be loaded. Raises ValueError where adapters cannot be had."""
    if not wants_adapters(settings):
        return None
    if config.implementation != "native":
        raise ValueError(f"{config.architecture} is served by transformers' own code, which takes no LoRA adapters")
    if settings.lora_folder is not None and settings.tensor_parallel_size > 1:
        raise ValueError(
            "lora_folder, to load adapters while serving, works with tensor_parallel_size 1 only; name them in "
            "lora_modules"
        )
    return LoadedAdapters(config, make_product=make_product, dtype=dtype, device=device, shard=shard)
