"""Loading: what does not fit is named, what is not needed is not read, and dtypes are converted on the way."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.kernels import reference
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.sharding import Shard
from services.text_engine.models.weights import CheckpointError, CheckpointWeights, RandomWeights, load_decoder
from shared.torch_io import Checkpoint
from tests.conftest import CheckpointFactory
from tests.models.oracle import CPU, load_oracle, load_ours, oracle_logits, prompt_tokens

Tensors = dict[str, torch.Tensor]


def edited(folder: Path, tmp_path: Path, edit) -> Path:
    """A copy of the checkpoint whose tensors went through `edit`, in place."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def load(folder: Path, on_progress=None):
    config = load_model_config(folder)
    attention = TorchReferenceAttention(torch.float32, CPU)
    return load_decoder(folder, config, attention, reference, dtype=torch.float32, device=CPU, on_progress=on_progress)


def test_missing_and_unexpected_tensors_are_named_together(checkpoint: CheckpointFactory, tmp_path: Path):
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.qweight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

    with pytest.raises(CheckpointError) as failure:
        load(edited(checkpoint("llama"), tmp_path, edit))
    assert "1 missing (layers.1.mlp.up_proj.weight)" in str(failure.value)
    assert "1 unexpected (model.layers.1.mlp.up_proj.qweight)" in str(failure.value)


def test_a_long_list_of_missing_tensors_is_cut_short_but_counted(checkpoint: CheckpointFactory, tmp_path: Path):
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.2." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"9 missing \(layers\.2\.input_layernorm\.weight, .*, …\)"):
        load(edited(checkpoint("llama"), tmp_path, edit))


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(checkpoint: CheckpointFactory, tmp_path: Path):
    def edit(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.ones(63)

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(63,\); config\.json asks for \(64,\)"):
        load(edited(checkpoint("llama"), tmp_path, edit))


def test_integer_weights_are_refused(checkpoint: CheckpointFactory, tmp_path: Path):
    def edit(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    with pytest.raises(CheckpointError, match=r"down_proj\.weight is stored as torch\.int8; only bfloat16"):
        load(edited(checkpoint("llama"), tmp_path, edit))


def test_a_folder_without_safetensors_is_named(checkpoint: CheckpointFactory, tmp_path: Path):
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.safetensors"):
        load(tmp_path)


def test_stored_rotary_frequencies_of_old_checkpoints_are_ignored(checkpoint: CheckpointFactory, tmp_path: Path):
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    folder = edited(checkpoint("llama"), tmp_path, edit)
    tokens = prompt_tokens(9)
    assert torch.equal(load_ours(folder).logits(tokens), load_ours(checkpoint("llama")).logits(tokens))


@pytest.mark.parametrize("differs", [False, True])
def test_a_stored_head_wins_over_tying_only_if_it_differs(checkpoint: CheckpointFactory, tmp_path: Path, differs: bool):
    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone().mul_(2.0 if differs else 1.0)

    folder = edited(checkpoint("llama_tied"), tmp_path, edit)
    tokens = prompt_tokens(30)
    torch.testing.assert_close(
        load_ours(folder).logits(tokens), oracle_logits(load_oracle(folder), tokens), rtol=1e-4, atol=1e-4
    )
    assert load_ours(folder).decoder.config.tie_word_embeddings is not differs


def test_no_vision_tensor_is_read(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch):
    read = []
    original = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: read.append(name) or original(self, name))
    folder = checkpoint("llava_clip_llama")
    load(folder)
    text_names = {name for name in Checkpoint(folder).names if name.startswith("language_model.")}
    assert sorted(read) == sorted(text_names)


def test_progress_rises_to_one(checkpoint: CheckpointFactory):
    shares: list[float] = []
    load(checkpoint("qwen3"), shares.append)
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1.0


def test_a_fused_tensor_is_its_parts_one_below_the_other(checkpoint: CheckpointFactory):
    folder = checkpoint("qwen2")
    config = load_model_config(folder)
    weights = CheckpointWeights(Checkpoint(folder), config, torch.bfloat16, CPU)
    stored = load_file(folder / "model.safetensors")
    for kind in ("weight", "bias"):
        parts = [stored[f"model.layers.1.self_attn.{part}.{kind}"] for part in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(weights.read(f"layers.1.self_attn.qkv_proj.{kind}"), torch.cat(parts).bfloat16())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_matrices_may_stay_in_the_sixteen_bits_they_are_stored_in(
    checkpoint: CheckpointFactory, tmp_path: Path, stored: torch.dtype
):
    folder = tmp_path / "narrow"
    shutil.copytree(checkpoint("qwen2"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = load_model_config(folder)
    weights = CheckpointWeights(Checkpoint(folder), config, torch.float32, CPU, matrix_dtypes={stored})
    for name in ("layers.1.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight", "embed_tokens.weight"):
        assert [matrix.dtype for matrix in weights.read_matrix(name)] == [stored]
        assert weights.read(name).dtype == stored
    for name in ("layers.1.self_attn.qkv_proj.bias", "norm.weight"):
        assert weights.read(name).dtype == torch.float32


def test_the_decoder_keeps_no_memory_of_the_file(checkpoint: CheckpointFactory, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint("llama"), folder)
    tokens = prompt_tokens(9)
    ours = load_ours(folder)
    want = ours.logits(tokens)
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert torch.equal(ours.logits(tokens), want)


def test_a_config_of_fewer_layers_finds_the_rest_unexpected(checkpoint: CheckpointFactory):
    folder = checkpoint("llama")
    config = dataclasses.replace(load_model_config(folder), num_layers=2, sliding_windows=(None, None))
    with pytest.raises(CheckpointError, match="9 unexpected"):
        CheckpointWeights(Checkpoint(folder), config, torch.float32, CPU)


@pytest.mark.parametrize("shard", [None, Shard(0, 2), Shard(1, 2)])
def test_random_weights_have_the_checkpoints_shapes_and_norms_of_one(
    checkpoint: CheckpointFactory, shard: Shard | None
):
    folder = checkpoint("llama_biased")
    config = load_model_config(folder)
    stored = CheckpointWeights(Checkpoint(folder), config, torch.float32, CPU, shard=shard)
    made = RandomWeights(config, torch.float32, CPU, shard)
    for name in (
        "self_attn.qkv_proj.weight",
        "self_attn.qkv_proj.bias",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
    ):
        assert made.read(f"layers.1.{name}").shape == stored.read(f"layers.1.{name}").shape
        assert made.read(f"layers.1.{name}").std() > 0.01
    assert made.read("lm_head.weight").shape == stored.read("lm_head.weight").shape
    assert torch.equal(made.read("norm.weight"), torch.ones(config.hidden_size))
