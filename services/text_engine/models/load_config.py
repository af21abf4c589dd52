"""Reads the config files of a checkpoint folder: as its family says, or as transformers does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from services.text_engine.models.config import Fields, Implementation, ModelConfig, read_json
from services.text_engine.models.families.registry import FAMILIES
from services.text_engine.models.families.text_config import merge_token_ids
from services.text_engine.models.transformers_config import read_transformers_config


def load_model_config(folder: Path, implementation: Literal["auto"] | Implementation = "native") -> ModelConfig:
    """Read the config files of a checkpoint folder. Raises ConfigError for one that the engine cannot serve.

    implementation  whose code is to run it; auto: ours where it is one of our families
    """
    fields = read_json(folder / "config.json")
    architecture = next(iter(fields.strings("architectures")), "")
    supported = ", ".join(FAMILIES)
    if architecture in FAMILIES and implementation != "transformers":
        _check_format(fields)
        config = FAMILIES[architecture].read_config(fields)
    elif implementation == "native":
        raise fields.error("architectures", f"supported: {supported}")
    else:
        config = read_transformers_config(folder, fields, supported)
    config = dataclasses.replace(config, architecture=architecture)
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        generation_ids = read_json(generation_file).token_ids("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=merge_token_ids(generation_ids, config.eos_token_ids))
    return config


def _check_format(fields: Fields) -> None:
    """Raises ConfigError for quantized weights that the engine does not read."""
    if "quantization_config" in fields or "quantization_config" in fields.nested("text_config"):
        # Late: it needs torch, and who only asks what a plain checkpoint is like does not.
        from services.text_engine.models.quantization.formats import read_format

        read_format(fields)
