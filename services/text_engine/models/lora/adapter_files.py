"""An adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors in a folder.

Read whole and checked against the model before anything of it is used. What an adapter asks for beyond low-rank
products beside the decoder's own matrices is refused by its name: leaving it out would be another adapter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors import torch as safetensors

from services.text_engine.models.config import ModelConfig
from services.text_engine.models.families.registry import FAMILIES
from services.text_engine.models.weights import MAX_NAMES_SHOWN, parameter_shapes
from shared.hashing import digest

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
Number = TypeVar("Number", int, float)
WRAPPERS: Final = ("base_model.model.", "base_model.")
# What can have an adapter: experts and the head cannot.
ADAPTABLE: Final = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight")
TENSOR_NAME: Final = re.compile(r"(?P<module>.+)\.lora_(?P<kind>[AB])(?:\.default)?\.weight")

# Fields of adapter_config.json that ask for something else than low-rank products, and the value that does not.
PLAIN: Final[Mapping[str, object]] = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
}
# These start from a changed copy of the model's own weights, which the adapter's folder does not hold.
CHANGING_INITS: Final = ("pissa", "olora", "corda", "loftq")


class AdapterError(ValueError):
    """The folder holds no adapter that this model can be served with; the message says why."""


class LowRank(NamedTuple):
    """Of one matrix, as stored but for the scale, which is in `up`.

    down  [rank, in_features]
    up    [out_features, rank] fp32
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterIdentity:
    """name   what requests ask for
    root   its folder's own name
    key    digest over the name and both files: equal only where every computed key and value is
    rank   the largest of its matrices'
    """

    name: str
    root: str
    key: bytes
    rank: int


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """matrices   by our names, not fused ("layers.0.self_attn.q_proj")"""

    identity: AdapterIdentity
    matrices: dict[str, LowRank]


class _PeftConfig(BaseModel):
    """Of adapter_config.json, what decides the arithmetic. Patterns: module name or regular expression -> its own."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str
    r: int = Field(gt=0)
    lora_alpha: float
    use_rslora: bool = False
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str, rank: int) -> float:
        divisor: float = rank**0.5 if self.use_rslora else rank
        return _of_pattern(self.alpha_pattern, module, self.lora_alpha) / divisor


def read_adapter(name: str, folder: Path, config: ModelConfig, *, max_rank: int) -> AdapterFiles:
    """The adapter in `folder`, to be served as `name`.

    config   the whole model's
    Raises AdapterError; FileNotFoundError if the folder holds no adapter.
    """
    stored_config, stored_weights = (_bytes(folder, file) for file in (CONFIG_FILE, WEIGHTS_FILE))
    try:
        settings = _parse(stored_config)
        tensors = safetensors.load(stored_weights)
        pairs = _pairs(tensors, settings, FAMILIES[config.architecture].our_name)
        matrices = _checked(pairs, settings, parameter_shapes(config))
        rank = max(low_rank.down.shape[0] for low_rank in matrices.values())
        if rank > max_rank:
            raise AdapterError(f"its rank is {rank}; max_lora_rank is {max_rank}")
    except SafetensorError as error:
        problem = f"{WEIGHTS_FILE} is damaged or no safetensors file: {error}"
        raise AdapterError(f"the adapter {name!r}: {problem}") from error
    except re.error as error:
        raise AdapterError(f"the adapter {name!r}: {CONFIG_FILE} holds a pattern that is none: {error}") from error
    except AdapterError as error:
        raise AdapterError(f"the adapter {name!r}: {error}") from error
    key = digest(b"lora", name.encode(), stored_config, stored_weights)
    return AdapterFiles(AdapterIdentity(name, folder.name, key, rank), matrices)


def _bytes(folder: Path, file: str) -> bytes:
    """The digest is to be of what is used: each file is read once."""
    try:
        return (folder / file).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        pickled = (folder / "adapter_model.bin").is_file() and file == WEIGHTS_FILE
        hint = "; adapter_model.bin holds pickled objects and is not read: save it as safetensors" if pickled else ""
        raise FileNotFoundError(f"{folder} holds no {file}{hint}") from None


def _parse(stored: bytes) -> _PeftConfig:
    try:
        raw = json.loads(stored)
        config = _PeftConfig.model_validate(raw)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise AdapterError(f"{CONFIG_FILE}: {'; '.join(problems)}") from error
    except ValueError as error:
        raise AdapterError(f"{CONFIG_FILE} is no JSON: {error}") from error
    if config.peft_type != "LORA":
        raise AdapterError(f"peft_type is {config.peft_type!r}; only LORA is supported")
    asked = {
        field: raw[field] for field, plain in PLAIN.items() if raw.get(field, plain) not in (plain, None, False, [], {})
    }
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(CHANGING_INITS):
        asked["init_lora_weights"] = init
    if asked:
        named = ", ".join(f"{field} = {value!r}" for field, value in asked.items())
        raise AdapterError(f"{CONFIG_FILE} asks for what is not supported: {named}")
    return config


Pairs = dict[tuple[str, str], dict[str, torch.Tensor]]  # (PEFT's name of the module, ours) -> "A" and "B"


def _pairs(tensors: dict[str, torch.Tensor], config: _PeftConfig, our_name: Callable[[str], str | None]) -> Pairs:
    """Raises AdapterError for tensors that belong to no matrix of the decoder's layers."""
    pairs: Pairs = {}
    foreign: list[str] = []
    for name, tensor in tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        module = "" if match is None else _unwrapped(match["module"])
        ours = None if match is None else our_name(f"{module}.weight")
        if match is None or ours is None or not ADAPTABLE.fullmatch(ours):
            foreign.append(name)
            continue
        if not _is_targeted(module, config.target_modules):
            raise AdapterError(f"it holds weights of {module}, which is none of its target_modules")
        pairs.setdefault((module, ours.removesuffix(".weight")), {})[match["kind"]] = tensor
    if foreign:
        raise AdapterError(
            f"it holds tensors that are not supported: {_shown(foreign)}; only attention and MLP projections of the "
            "language model can have adapters"
        )
    if not pairs:
        raise AdapterError("it holds no tensors")
    return pairs


def _checked(pairs: Pairs, config: _PeftConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LowRank]:
    """Raises AdapterError for a matrix that the model does not have, or not so large, and for one that is missing."""
    matrices: dict[str, LowRank] = {}
    for (module, ours), pair in pairs.items():
        shape = shapes.get(f"{ours}.weight", ())
        if len(shape) != 2:
            raise AdapterError(f"the model has no matrix {module}")
        if pair.keys() != {"A", "B"}:
            raise AdapterError(f"{module} has lora_{next(iter(pair))} only")
        down, up, rank = pair["A"], pair["B"], config.rank(module)
        if (tuple(down.shape), tuple(up.shape)) != ((rank, shape[1]), (shape[0], rank)):
            raise AdapterError(
                f"{module} has lora_A {tuple(down.shape)} and lora_B {tuple(up.shape)}; this model and rank {rank} "
                f"want {(rank, shape[1])} and {(shape[0], rank)}"
            )
        if not (_is_plain(down) and _is_plain(up)):
            raise AdapterError(f"{module} is stored as {down.dtype}; only bfloat16, float16 and float32 are supported")
        matrices[ours] = LowRank(down, up.float() * config.scale(module, rank))
    missing = sorted(_wanted(config, shapes) - matrices.keys())
    if missing:
        raise AdapterError(f"tensors are missing: target_modules names {_shown(missing)} as well")
    return matrices


def _wanted(config: _PeftConfig, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Matrices that must be there; where a choice of layers or a pattern decides, what is there is believed."""
    targets = config.target_modules
    if not isinstance(targets, list) or config.layers_to_transform is not None or config.exclude_modules:
        return set()
    matrices = (name.removesuffix(".weight") for name in shapes if ADAPTABLE.fullmatch(name))
    projections = {target.rpartition(".")[2] for target in targets if "layers." not in target}
    return {name for name in matrices if name.rpartition(".")[2] in projections}


def _unwrapped(module: str) -> str:
    return next((module.removeprefix(wrapper) for wrapper in WRAPPERS if module.startswith(wrapper)), module)


def _is_targeted(module: str, targets: str | list[str] | None) -> bool:
    """As PEFT decides it: a pattern fits the whole name, a name its end. None: PEFT chose by the model's type."""
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _of_pattern(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The first that fits the module's name or its end, as PEFT looks it up."""
    fits = (value for pattern, value in patterns.items() if re.match(rf"(?:.*?\.)?({pattern})$", module))
    return next(fits, default)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _shown(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (", …" if len(names) > MAX_NAMES_SHOWN else "")
