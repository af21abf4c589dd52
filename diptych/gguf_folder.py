"""MODEL.gguf -> a folder in Hugging Face format around it: configuration and tokenizer made from the file's metadata.

The weights are not converted: the folder links to the file, and the engine reads its blocks as they are. Tokenizers are
rebuilt by transformers; a tokenizer.json beside the file is taken instead.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diptych.errors import ModelUnavailable
from diptych.made_folder import make_whole

# general.architecture -> class and model_type in transformers. Mistral's files say "llama".
ARCHITECTURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", "llama"),
        "qwen2": ("Qwen2ForCausalLM", "qwen2"),
        "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    }
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
# Llama 3.1's and 3.2's scaling, of which a file holds only the resulting factors.
LLAMA3_ROPE: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)


def checkpoint(file: Path, cache: Path, *, say: Callable[[str], None]) -> Path:
    """The folder for `file` under `cache`; made first if it is not there yet, or the file has changed since.

    It appears there whole or not at all. Raises ModelUnavailable for a file that the engine cannot serve.
    """
    file = file.resolve()
    stat = file.stat()
    digest = hashlib.sha256(f"v1 {file} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache / "gguf" / f"{file.stem}-{digest}"
    if (folder / "config.json").is_file():
        return folder
    say(f"Reading the configuration and the tokenizer of {file.name} (once, some seconds).")
    make_whole(folder, partial(_fill, file))
    return folder


def _fill(file: Path, folder: Path) -> None:
    from services.text_engine.models.config import ConfigError
    from services.text_engine.models.quantization.gguf_file import open_gguf

    try:
        reader = open_gguf(file)
        config = read_config(reader)
    except ConfigError as error:
        raise ModelUnavailable(f"model {file}: {error}") from error
    (folder / "model.gguf").symlink_to(file)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    if (file.parent / "tokenizer.json").is_file():
        for name in TOKENIZER_FILES:
            if (file.parent / name).is_file():
                shutil.copy(file.parent / name, folder)
    else:
        _write_tokenizer(file, folder)


def read_config(reader: Any) -> dict[str, Any]:
    """config.json's fields, from a file's metadata. Raises ConfigError for a model that the engine does not know."""
    from services.text_engine.models.config import ConfigError
    from services.text_engine.models.quantization.gguf_file import metadata

    architecture = metadata(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} in a GGUF file; supported: {', '.join(ARCHITECTURES)}")

    def field(name: str, default: Any = None) -> Any:
        return metadata(reader, f"{architecture}.{name}", default)

    if field("expert_count", 0):
        raise ConfigError("mixtures of experts are not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    hidden_size, num_heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden_size // num_heads)
    class_name, model_type = ARCHITECTURES[architecture]
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": round(field("attention.layer_norm_rms_epsilon"), 12),  # stored in single precision
        "rope_theta": field("rope.freq_base", 10000.0),
        "max_position_embeddings": field("context_length"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id", -1),
        "eos_token_id": _end_tokens(reader),
    }
    if architecture != "qwen2":  # which always has them
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    scaling = _rope_scaling(field, tensors, config["rope_theta"], head_dim)
    return config if scaling is None else config | {"rope_scaling": scaling}


def _end_tokens(reader: Any) -> list[int]:
    from services.text_engine.models.quantization.gguf_file import metadata

    names = ("eos", "eot", "eom")
    found = [metadata(reader, f"tokenizer.ggml.{name}_token_id", -1) for name in names]
    return [token for token in dict.fromkeys(found) if token >= 0]


def _rope_scaling(
    field: Callable[..., Any], tensors: dict[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    from services.text_engine.models.config import ConfigError

    if "rope_freqs.weight" in tensors:
        import numpy as np
        import torch

        from services.text_engine.models.config import Llama3Scaling, RopeConfig
        from services.text_engine.models.rope import inverse_frequencies

        factors = np.array(tensors["rope_freqs.weight"].data, dtype=np.float32)
        scaling = dict(LLAMA3_ROPE) | {"factor": float(factors.max())}
        numbers = {name: value for name, value in scaling.items() if name != "rope_type"}
        plain = inverse_frequencies(RopeConfig(theta), head_dim)
        expected = plain / inverse_frequencies(RopeConfig(theta, Llama3Scaling(**numbers)), head_dim)
        if not torch.allclose(expected.float(), torch.from_numpy(factors), rtol=1e-3):
            raise ConfigError("rope_freqs.weight holds other factors than Llama 3.1's scaling gives")
        return scaling
    kind = field("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope.scaling.type is {kind!r}; supported: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": field("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = field("rope.scaling.original_context_length")
    return scaling


def _write_tokenizer(file: Path, folder: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ModelUnavailable(
            f"the tokenizer inside {file.name} is read by the package transformers: pip install transformers, or put a "
            "tokenizer.json beside the file"
        ) from error
    try:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except (
        Exception
    ) as error:  # it names no set of its own: KeyError, ValueError, OSError, and those of packages it lacks
        raise ModelUnavailable(
            f"the tokenizer inside {file.name} cannot be rebuilt ({error}); put the model's tokenizer.json and "
            "tokenizer_config.json beside the file"
        ) from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
