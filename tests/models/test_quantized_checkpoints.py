"""Quantized checkpoints, written in their published formats, against plain ones of the weights they stand for."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import load_file, save_file

from diptych import gguf_folder
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.kernels import reference
from services.text_engine.kernels.grouped_weight import GroupedWeight
from services.text_engine.kernels.native_library import load_native
from services.text_engine.kernels.native_quantized import NativeQuantizedLinear
from services.text_engine.models.config import ConfigError
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.quantization import compressed_tensors, gguf_file
from services.text_engine.models.quantization.formats import load_format
from services.text_engine.models.quantization.on_the_fly import quantizer
from services.text_engine.models.sharding import Shard
from services.text_engine.models.weights import CheckpointError, CheckpointWeights, load_decoder
from shared.torch_io import Checkpoint
from tests.conftest import CheckpointFactory
from tests.models.oracle import CPU, load_oracle, load_ours, oracle_logits, prompt_tokens
from tests.models.paged import PagedDecoder
from tests.models.quantized_checkpoints import FLOAT_SCHEMES, SCHEMES, awq, write_quantized

every_format = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
TOKENS = prompt_tokens(40)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def loaded(folder: Path, **parts) -> PagedDecoder:
    attention = TorchReferenceAttention(torch.float32, CPU)
    config = load_model_config(folder)
    decoder = load_decoder(folder, config, attention, reference, dtype=torch.float32, device=CPU, **parts)
    return PagedDecoder(decoder, attention)


@every_format
def test_logits_are_those_of_the_weights_that_are_meant(checkpoint: CheckpointFactory, tmp_path: Path, scheme):
    quantized, plain = write_quantized(checkpoint("llama"), tmp_path, scheme)
    torch.testing.assert_close(
        load_ours(quantized).logits(TOKENS), oracle_logits(load_oracle(plain), TOKENS), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("scheme", FLOAT_SCHEMES.values(), ids=list(FLOAT_SCHEMES))
def test_fp8_matrices_lose_at_most_half_a_step_of_int8(checkpoint: CheckpointFactory, tmp_path: Path, scheme):
    quantized, plain = write_quantized(checkpoint("llama"), tmp_path, scheme)
    weights = CheckpointWeights(
        Checkpoint(quantized), load_model_config(quantized), torch.float32, CPU, stored_format=load_format(quantized)
    )
    meant = load_file(plain / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    groups = meant.view(len(meant), -1, 32)
    difference = (weights.read("layers.1.mlp.down_proj.weight") - meant).view_as(groups).abs()
    assert (difference <= groups.abs().amax(2, keepdim=True) / 254 * 1.001).all()
    assert relative_error(load_ours(quantized).logits(TOKENS), load_ours(plain).logits(TOKENS)) < 0.1


@every_format
def test_the_compiled_kernels_stay_near_with_the_matrices_packed(checkpoint: CheckpointFactory, tmp_path: Path, scheme):
    library = load_native()
    if library is None:
        pytest.skip("no compiled kernels here")
    quantized, plain = write_quantized(checkpoint("llama"), tmp_path, scheme)
    ours = loaded(quantized, make_quantized=partial(NativeQuantizedLinear, library))
    assert relative_error(ours.logits(TOKENS), load_ours(plain).logits(TOKENS)) < 0.1  # activations round to 8 bits


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_biased", "gemma3_text"])
def test_plain_matrices_are_quantized_as_they_are_loaded(checkpoint: CheckpointFactory, name: str, kind):
    folder = checkpoint(name)
    seen: dict[str, GroupedWeight] = {}

    def quantize(matrix: str, weight: torch.Tensor) -> GroupedWeight:
        seen[matrix] = quantizer(kind, CPU)(matrix, weight)
        return seen[matrix]

    ours = loaded(folder, quantize=quantize)
    assert len(seen) == load_model_config(folder).num_layers * 7 + 1
    assert {weight.bits for matrix, weight in seen.items() if matrix != "lm_head.weight"} == {int(kind[3:])}
    assert seen["lm_head.weight"].bits == 8
    error = relative_error(ours.logits(TOKENS), load_ours(folder).logits(TOKENS))
    assert 0 < error < (0.1 if kind == "int8" else 0.7)


def test_a_checkpoint_in_which_some_matrices_are_plain_is_read_as_it_is(checkpoint: CheckpointFactory, tmp_path: Path):
    quantized, plain = write_quantized(checkpoint("llama_biased"), tmp_path, awq(32))
    tensors, meant = (load_file(folder / "model.safetensors") for folder in (quantized, plain))
    name = "model.layers.0.self_attn.k_proj"
    for end in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{end}"]
    tensors[f"{name}.weight"] = meant[f"{name}.weight"]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    expected = load_ours(plain).logits(TOKENS)
    torch.testing.assert_close(load_ours(quantized).logits(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_a_missing_tensor_of_a_matrix_is_named(checkpoint: CheckpointFactory, tmp_path: Path):
    quantized, _ = write_quantized(checkpoint("llama"), tmp_path, awq(32))
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.scales"]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"2\.mlp\.up_proj, stored as awq: the tensor 'scales' is missing"):
        load_ours(quantized)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method is 'bitsandbytes'; supported: awq, .*--quantization int8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"version is 'gemv'; the layout \"gemm\""),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; GPTQ checkpoints of 4 and 8 bits"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format is 'nvfp4"),
    ],
)
def test_what_is_not_read_is_refused_by_name(checkpoint: CheckpointFactory, tmp_path: Path, stated, message: str):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(ConfigError, match=message):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("in_features", "num_groups", "stated", "size"),
    [(320, 3, {128}, 128), (320, 3, {64, 112}, 112), (96, 2, {64}, 64), (96, 2, {64, 48}, 48), (96, 3, (), 32)],
)
def test_how_long_a_group_is_where_the_last_may_be_short(in_features: int, num_groups: int, stated, size: int):
    tensors = {
        "weight_packed": torch.zeros(5, in_features // 8, dtype=torch.int32),
        "weight_scale": torch.ones(5, num_groups),
    }
    assert compressed_tensors.unpack(tensors, (5, in_features), stated_sizes=stated).group_size == size


def test_groups_that_nothing_explains_are_refused_with_the_numbers():
    tensors = {"weight_packed": torch.zeros(5, 40, dtype=torch.int32), "weight_scale": torch.ones(5, 3)}
    with pytest.raises(ValueError, match="3 groups for 320 inputs"):
        compressed_tensors.unpack(tensors, (5, 320), stated_sizes={64})


@pytest.mark.parametrize("index", [0, 1])
def test_a_ranks_part_is_a_part_of_the_whole(checkpoint: CheckpointFactory, tmp_path: Path, index: int):
    quantized, _ = write_quantized(checkpoint("llama"), tmp_path, awq(32))
    config, shard = load_model_config(quantized), Shard(index, 2)
    read = [
        CheckpointWeights(
            Checkpoint(quantized), config, torch.float32, CPU, shard=part, stored_format=load_format(quantized)
        ).read
        for part in (shard, None)
    ]
    for name in ("layers.0.self_attn.q_proj.weight", "layers.1.self_attn.o_proj.weight"):
        part, whole = (reader(name) for reader in read)
        assert torch.equal(part, whole[shard.part(name, config)])
    with pytest.raises(CheckpointError, match="tensor_parallel_size cannot share it"):  # 48 of 96 inputs
        read[0]("layers.0.mlp.down_proj.weight")


# GGUF


def write_gguf(source: Path, file: Path, block_type: GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """The checkpoint as a converter writes it; returns what its matrices stand for, under their names in `source`."""
    config = json.loads((source / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    theirs = {ours: name for name, ours in gguf_file.LAYER_NAMES.items()}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        ours = name.removeprefix("model.").removesuffix(".weight")
        _, _, rest = ours.partition("layers.")
        layer, _, kind = rest.partition(".")
        outside = {"lm_head": "output", "norm": "output_norm", "embed_tokens": "token_embd"}
        stored = f"blk.{layer}.{theirs[kind]}" if rest else outside[ours]
        if tensor.dim() == 1:
            writer.add_tensor(f"{stored}.weight", tensor.numpy())
            meant[name] = tensor
            continue
        rows = tensor.numpy()
        blocks = quants.quantize(rows, block_type)
        meant[name] = torch.from_numpy(quants.dequantize(blocks, block_type).copy())
        if num_heads := heads.get(theirs.get(kind, "")):
            halves = blocks.reshape(num_heads, 2, -1, blocks.shape[1])
            blocks = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(blocks.shape))
        writer.add_tensor(f"{stored}.weight", blocks, raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16", "F32"])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_gguf_file_is_served_as_it_is(checkpoint: CheckpointFactory, tmp_path: Path, name: str, block_type: str):
    source, beside = checkpoint(name), tmp_path / "beside"
    beside.mkdir()
    shutil.copy(source / "tokenizer.json", beside)
    meant = write_gguf(source, beside / "tiny.gguf", GGMLQuantizationType[block_type])
    folder = gguf_folder.checkpoint(beside / "tiny.gguf", tmp_path / "cache", say=lambda _text: None)
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(load_ours(folder).logits(TOKENS), load_ours(plain).logits(TOKENS), rtol=1e-4, atol=1e-4)
    assert load_model_config(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("name", [*gguf_file.READERS, "Q2_K", "Q3_K", "IQ4_NL"])
def test_blocks_stand_for_what_the_package_gguf_says(name: str):
    block_type = GGMLQuantizationType[name]
    block_size, block_bytes = GGML_QUANT_SIZES[block_type]
    generator = np.random.default_rng(5)
    num_rows, num_blocks = 7, 768 // block_size
    raw = generator.integers(0, 256, (num_rows * num_blocks, block_bytes), dtype=np.uint8)
    places = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82]}
    has_minimums = name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    for at in places.get(
        name, [0, 2] if has_minimums else [0]
    ):  # of the scales: random bytes would be infinite now and then
        raw[:, at : at + 2] = generator.normal(0, 0.01, (len(raw), 1)).astype(np.float16).view(np.uint8)
    rows = torch.from_numpy(raw.reshape(num_rows, -1))
    weight = gguf_file.unpack({"blocks": rows, "block_type": torch.tensor(int(block_type))}, (num_rows, 768))
    expected = torch.from_numpy(quants.dequantize(rows.numpy(), block_type))
    tolerance = 0.0 if name in gguf_file.READERS else float(expected.abs().max()) / 250
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-5, atol=tolerance + 1e-6)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path):
    from diptych.errors import ModelUnavailable

    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnavailable, match="architecture 'mamba' in a GGUF file; supported: llama, qwen2, qwen3"):
        gguf_folder.checkpoint(tmp_path / "other.gguf", tmp_path / "cache", say=lambda _text: None)
