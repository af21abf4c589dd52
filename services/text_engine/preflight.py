"""What config.json and the settings alone say against a start: checked in milliseconds, before anything is loaded.

Imports no torch, so that the command line can ask before it starts a process. What depends on the machine (its GPUs,
its memory) is found out by `runner.loading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.text_engine.config import TextEngineSettings
from services.text_engine.models.config import ModelConfig, read_json
from services.text_engine.models.families.registry import FAMILIES
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.sharding import Shard
from shared.settings_errors import SettingRefused

ADAPTER_CONFIG = "adapter_config.json"


def check_settings(settings: TextEngineSettings) -> None:
    """Raises SettingRefused for a setting that this checkpoint cannot have, ConfigError for what is no checkpoint."""
    check_lora_modules(settings)
    _check_speculative_model(settings)
    config = _native_config(settings)
    if config is not None:
        check_max_model_len(settings.max_model_len, config.max_position_embeddings)
        Shard(0, settings.tensor_parallel_size).config(config)


def check_max_model_len(max_model_len: int | None, model_max_len: int) -> None:
    """model_max_len   what the model's positions allow"""
    if max_model_len is not None and max_model_len > model_max_len:
        raise SettingRefused(
            "max_model_len",
            max_model_len,
            f"is more than the {model_max_len} tokens that the model has positions for; give at most {model_max_len}, "
            "or leave it out",
        )


def check_lora_modules(settings: TextEngineSettings) -> None:
    """That every adapter has a name and a folder of its own, and that there are not too many."""
    modules = settings.lora_modules
    names = [settings.served_model_name or settings.model.name, *(name for name, _ in adapters_named_by(settings))]
    problem = None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problem = f"gives the name {twice!r} twice, or it is the model's own; give each adapter another"
    elif len(modules) > settings.max_loras:
        problem = f"names {len(modules)} adapters; max_loras is {settings.max_loras}: raise it, or name fewer"
    else:
        missing = next((f for _, f in adapters_named_by(settings) if not (f / ADAPTER_CONFIG).is_file()), None)
        if missing is not None:
            problem = f"names the folder {missing}, which holds no {ADAPTER_CONFIG}; give folders as PEFT writes them"
    if problem is not None:
        raise SettingRefused("lora_modules", ",".join(modules), problem)


def _check_speculative_model(settings: TextEngineSettings) -> None:
    """That a draft model is there, may guess, and is wanted where it can run."""
    folder = settings.speculative_model
    if folder is None:
        return
    problem = None
    if settings.speculative == "off":
        problem = "is never asked, because speculative is off; leave one of the two out"
    elif settings.tensor_parallel_size > 1:
        problem = "works with one process only, tensor_parallel_size 1; leave it out, and look-up alone guesses"
    elif not (folder / "config.json").is_file():
        problem = "holds no config.json; give the folder of a checkpoint in Hugging Face format"
    if problem is not None:
        raise SettingRefused("speculative_model", folder, problem)


def adapters_named_by(settings: TextEngineSettings) -> Iterator[tuple[str, Path]]:
    """Name and folder of each of `lora_modules`."""
    for module in settings.lora_modules:
        name, _, folder = module.partition("=")
        yield name, Path(folder)


def _native_config(settings: TextEngineSettings) -> ModelConfig | None:
    """None: transformers would have to be asked, which takes seconds; it is when the model is loaded."""
    architectures = read_json(settings.model / "config.json").strings("architectures")
    is_ours = bool(architectures) and architectures[0] in FAMILIES and settings.model_implementation != "transformers"
    return load_model_config(settings.model) if is_ours or settings.model_implementation == "native" else None
