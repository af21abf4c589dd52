"""Mixtures of experts: what the router chooses, every spelling of a checkpoint, and what a mixture shares with an MLP.

That the tokens are transformers' is in `test_decoder`, for every family.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.kernels import reference
from services.text_engine.kernels.native import NativeKernels
from services.text_engine.kernels.native_library import load_native
from services.text_engine.kernels.native_matmul import PackedLinear
from services.text_engine.models.config import ConfigError
from services.text_engine.models.layers import Linear, MakeProduct
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.moe import GatedMlp, GatedProduct, MixtureOfExperts, SharedExpert
from services.text_engine.models.quantization.on_the_fly import quantizer
from services.text_engine.models.sharding import Shard
from services.text_engine.models.weights import load_decoder, parameter_shapes
from shared.settings import SettingRefused
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.models.oracle import CPU, load_oracle, load_ours, oracle_logits, prompt_tokens
from tests.models.paged import PagedDecoder
from tests.models.quantized_checkpoints import Scheme, awq, packed_ints, write_quantized

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe"]
HIDDEN, INTERMEDIATE = 22, 10


def experts_by_hand(x: torch.Tensor, weights: dict[str, torch.Tensor], num_chosen: int, normalizes: bool):
    """Token by token and expert by expert, in fp64."""
    rows = []
    for row in x.double():
        probabilities = functional.linear(row, weights["gate"].double()).softmax(-1)
        chosen = probabilities.argsort(descending=True)[:num_chosen]
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert in chosen.tolist():
            gate, up = functional.linear(row, weights["gate_up"][expert].double()).chunk(2)
            share = probabilities[expert] / (probabilities[chosen].sum() if normalizes else 1.0)
            total += share * functional.linear(functional.silu(gate) * up, weights["down"][expert].double())
        rows.append(total)
    return torch.stack(rows)


def random_weights(num_experts: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "gate": torch.randn(num_experts, HIDDEN, generator=generator),
        "gate_up": 0.3 * torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator),
        "down": 0.3 * torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=generator),
    }


def mixture(
    weights: dict[str, torch.Tensor],
    num_chosen: int,
    normalizes: bool,
    make: MakeProduct = Linear,
    gated_product: GatedProduct = reference.silu_mul,
) -> MixtureOfExperts:
    experts = [
        GatedMlp(make(gate_up, None), gated_product, make(down, None))
        for gate_up, down in zip(weights["gate_up"], weights["down"], strict=True)
    ]
    return MixtureOfExperts(make(weights["gate"], None), experts, num_chosen, normalizes)


@settings(deadline=None, max_examples=30)
@given(
    num_rows=st.integers(1, 19),
    num_experts=st.integers(1, 7),
    num_chosen=st.integers(1, 7),
    normalizes=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_mixture_is_the_weighted_sum_of_each_tokens_best_experts(
    num_rows: int, num_experts: int, num_chosen: int, normalizes: bool, seed: int
):
    num_chosen = min(num_chosen, num_experts)
    weights = random_weights(num_experts, seed)
    x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    got = mixture(weights, num_chosen, normalizes)(x)
    torch.testing.assert_close(got.double(), experts_by_hand(x, weights, num_chosen, normalizes), rtol=1e-4, atol=1e-5)


def test_the_shared_expert_counts_as_much_as_its_gate_says():
    weights = random_weights(3, seed=4)
    shared = GatedMlp(Linear(weights["gate_up"][2]), reference.silu_mul, Linear(weights["down"][2]))
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(8))
    gate = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(9))
    alone = mixture(weights, 2, normalizes=True)
    both = MixtureOfExperts(alone.router, alone.experts, 2, normalizes=True, shared=SharedExpert(shared, Linear(gate)))
    torch.testing.assert_close(both(x) - alone(x), torch.sigmoid(x @ gate.T) * shared(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bit_for_bit_whatever_rows_are_beside_it(dtype: torch.dtype):
    library = load_native()
    if library is None:
        pytest.skip("no compiled kernels here")
    weights = {name: weight.to(dtype) for name, weight in random_weights(5, seed=2).items()}

    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedLinear(library, weight, bias)

    silu_mul = NativeKernels(library).silu_mul
    shared = SharedExpert(
        GatedMlp(make(weights["gate_up"][0]), silu_mul, make(weights["down"][0])), make(weights["gate"][:1])
    )
    mixed = replace(mixture(weights, 2, normalizes=False, make=make, gated_product=silu_mul), shared=shared)
    x = torch.randn(37, HIDDEN, generator=torch.Generator().manual_seed(6)).to(dtype)
    whole = mixed(x)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 22), slice(36, 37)):
        assert torch.equal(mixed(x[rows]), whole[rows])


def stack_experts(folder: Path, into: Path) -> Path:
    """The same checkpoint with the tensors that transformers 5 holds in memory: a layer's experts in one."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stacked = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    save_file(stacked, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_one_tensor_give_the_same_bits_as_each_in_its_own(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str
):
    separate = checkpoint(family)
    stacked = stack_experts(separate, tmp_path / "stacked")
    assert not any(".experts.0." in name for name in load_file(stacked / "model.safetensors"))
    tokens = prompt_tokens(21)
    assert torch.equal(load_ours(stacked).logits(tokens), load_ours(separate).logits(tokens))


@pytest.mark.parametrize(("family", "stacked"), [("mixtral", True), ("qwen2_moe", False), ("qwen3_moe", True)])
def test_two_ranks_give_the_tokens_of_one(checkpoint: CheckpointFactory, tmp_path: Path, family: str, stacked: bool):
    folder = checkpoint(family)
    if stacked:
        folder = stack_experts(folder, tmp_path / "stacked")
    answers = []
    for size in (1, 2):
        driver = EngineDriver(folder, tensor_parallel_size=size, max_num_batched_tokens=24, max_num_seqs=8)
        try:
            for i in range(3):
                driver.add(f"r{i}", prompt_tokens(9 + 17 * i, seed=i).tolist(), max_tokens=8)
            answers.append([answer.token_ids for answer in driver.run().values()])
        finally:
            driver.engine.close()
    assert answers[0] == answers[1]


def test_ranks_that_cannot_share_an_expert_are_refused(checkpoint: CheckpointFactory):
    config = load_model_config(checkpoint("qwen2_moe"))
    with pytest.raises(SettingRefused, match=r"must divide the model's moe_intermediate_size|num_attention_heads"):
        Shard(0, 16).config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_quantized_and_gates_are_not(checkpoint: CheckpointFactory, family: str):
    folder = checkpoint(family)
    config = load_model_config(folder)
    to_int8 = quantizer("int8", CPU)
    seen = []

    def quantize(name: str, weight: torch.Tensor):
        seen.append(name)
        return to_int8(name, weight)

    attention = TorchReferenceAttention(torch.float32, CPU)
    decoder = load_decoder(folder, config, attention, reference, dtype=torch.float32, device=CPU, quantize=quantize)
    shapes = parameter_shapes(config)
    plain = {name for name, shape in shapes.items() if len(shape) == 2 and (".gate." in name or "_gate." in name)}
    assert plain
    assert set(seen) == {name for name, shape in shapes.items() if len(shape) == 2} - plain - {"embed_tokens.weight"}
    tokens = prompt_tokens(60)
    exact = load_ours(folder).logits(tokens)
    error = (PagedDecoder(decoder, attention).logits(tokens) - exact).square().mean(-1).sqrt()
    # Of most tokens: a few stand between two experts, and what decides is below what int8 keeps.
    assert error.median() < 0.1 * exact.std()


@pytest.mark.parametrize("scheme", [awq(16), packed_ints(16)], ids=["awq", "compressed-tensors"])
def test_quantized_experts_give_the_logits_of_the_weights_that_are_meant(
    checkpoint: CheckpointFactory, tmp_path: Path, scheme: Scheme
):
    quantized, plain = write_quantized(checkpoint("qwen3_moe"), tmp_path, scheme)
    tokens = prompt_tokens(40)
    want = oracle_logits(load_oracle(plain), tokens)
    torch.testing.assert_close(load_ours(quantized).logits(tokens), want, rtol=1e-4, atol=1e-4)


def test_more_chosen_experts_than_there_are_is_a_wrong_config(checkpoint: CheckpointFactory, tmp_path: Path):
    config = (checkpoint("mixtral") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 6'))
    with pytest.raises(ConfigError, match="num_experts_per_tok is 6; the model has 5 experts"):
        load_model_config(tmp_path)
