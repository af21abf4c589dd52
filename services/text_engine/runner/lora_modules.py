"""The adapters that an engine starts with, as its settings name them; every rank reads its part of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.text_engine.config import TextEngineSettings
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.layers import MakeProduct
from services.text_engine.models.lora.adapted import LoadedAdapters
from services.text_engine.models.lora.adapter_files import AdapterFiles, AdapterIdentity, read_adapter
from services.text_engine.models.sharding import Shard
from services.text_engine.preflight import adapters_named_by, check_lora_modules
from shared.settings_errors import SettingRefused


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
    check_lora_modules(settings)
    return [
        read_adapter(name, folder, config, max_rank=settings.max_lora_rank)
        for name, folder in adapters_named_by(settings)
    ]


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
        raise SettingRefused(
            "lora_folder",
            settings.lora_folder,
            "works with one process only, tensor_parallel_size 1; name the adapters in lora_modules instead",
        )
    return LoadedAdapters(config, make_product=make_product, dtype=dtype, device=device, shard=shard)
