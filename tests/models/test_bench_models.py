"""What the benchmarks do with models: a deepened one answers as before, and the memory of weights is counted whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.deepen import deepen
from bench.quantization import num_bytes
from services.text_engine.models.load_config import load_model_config
from tests.checkpoints import write_checkpoint
from tests.models.oracle import load_ours, prompt_tokens


@pytest.mark.parametrize("max_shard_size", [None, "100KB"])
@pytest.mark.parametrize("name", ["llama", "llama_biased", "qwen2_window_upper_layers", "gemma3_text"])
def test_a_deepened_model_answers_as_it_did(name: str, max_shard_size: str | None, tmp_path: Path):
    given = write_checkpoint(name, tmp_path / "given", max_shard_size=max_shard_size)
    num_layers = load_model_config(given).num_layers
    deepen(given, tmp_path / "deep", num_layers + 2)
    assert load_model_config(tmp_path / "deep").num_layers == num_layers + 2
    prompt = prompt_tokens(40)
    expected, found = (load_ours(folder).logits(prompt) for folder in (given, tmp_path / "deep"))
    assert torch.equal(expected, found)


def test_lists_of_the_config_get_an_entry_for_every_added_layer(tmp_path: Path):
    given = write_checkpoint("qwen2_window_upper_layers", tmp_path / "given", layout="transformers")
    config = json.loads((given / "config.json").read_text())
    deepen(given, tmp_path / "deep", config["num_hidden_layers"] + 2)
    deepened = json.loads((tmp_path / "deep" / "config.json").read_text())
    assert deepened["layer_types"] == config["layer_types"] + config["layer_types"][:1] * 2
    assert len(set(config["layer_types"])) == 2
    assert deepened["architectures"] == config["architectures"]


def test_added_layers_have_no_biases_but_those_inside(tmp_path: Path):
    given = write_checkpoint("llama_biased", tmp_path / "given")
    num_layers = load_model_config(given).num_layers
    deepen(given, tmp_path / "deep", num_layers + 1)
    weights = load_file(tmp_path / "deep" / "model.safetensors")
    added = {name.partition(f".layers.{num_layers}.")[2]: tensor for name, tensor in weights.items()}
    zeros = {name for name, tensor in added.items() if name and not tensor.any()}
    assert zeros == {f"{name}.{kind}" for name in ("self_attn.o_proj", "mlp.down_proj") for kind in ("weight", "bias")}


def test_a_model_is_not_made_shallower(tmp_path: Path):
    given = write_checkpoint("llama", tmp_path / "given")
    with pytest.raises(ValueError, match="more than 1"):
        deepen(given, tmp_path / "deep", 1)


class Slotted:
    __slots__ = ("bias",)

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias


class Owner:
    def __init__(self) -> None:
        matrix = torch.zeros(25, dtype=torch.float32)
        self.matrix, self.view = matrix, matrix[:5]
        self.experts = {"up": torch.zeros(10, dtype=torch.int8), "others": [(torch.zeros(3, dtype=torch.int8),)]}
        self.slotted = Slotted(torch.zeros(1, dtype=torch.int8))


def test_the_memory_of_all_tensors_is_counted_once_wherever_they_are_kept(monkeypatch: pytest.MonkeyPatch):
    for kind in (Owner, Slotted):
        monkeypatch.setattr(kind, "__module__", "services.of_a_test")
    owner = Owner()
    assert num_bytes([owner, owner]) == 100 + 10 + 3 + 1
