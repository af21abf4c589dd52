"""Text models that are none of our families, by transformers' own code over our paged cache: its tokens, however the
work is cut up; and what it cannot serve is refused by name before anybody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.models.config import ConfigError
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.transformers_decoder import load_transformers_decoder
from services.text_engine.runner.kv_cache import BLOCK_SIZE
from tests.checkpoints import TINY_TEXT, randomise
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.models.oracle import CPU, oracle_greedy, prompt_tokens
from tests.tiny_tokenizer import build_tokenizer

# Traits that our decoder lacks: fused projections, scales in four places, half a head rotated, layers in parallel,
# norms after attention and MLP, interleaved rotation, experts with a norm over all heads, caps and windows.
SERVED: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": {"sliding_window": None},
    "GraniteForCausalLM": {
        "logits_scaling": 3.0,
        "embedding_multiplier": 5.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.8,
    },
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "Olmo2ForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 0.2},
    "OlmoeForCausalLM": {"num_experts": 5, "num_experts_per_tok": 2},
    "Gemma2ForCausalLM": {"sliding_window": 20, "query_pre_attn_scalar": 16, "head_dim": 16},
}
WriteModel = Callable[..., Path]


@pytest.fixture(scope="module")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> WriteModel:
    written: dict[str, Path] = {}

    def write(architecture: str, **fields: Any) -> Path:
        key = f"{architecture} {sorted(fields.items())}"
        if key not in written:
            folder = written[key] = tmp_path_factory.mktemp(architecture)
            tokenizer = build_tokenizer(with_image_token=False)
            model_class = getattr(transformers, architecture)
            values = TINY_TEXT | {"vocab_size": len(tokenizer)} | fields
            config = model_class.config_class(**values, architectures=[architecture], dtype="float32")
            model = model_class(config).eval()
            randomise(model)
            model.generation_config = transformers.GenerationConfig(bos_token_id=0, pad_token_id=0, eos_token_id=2)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return written[key]

    return write


def oracle(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("architecture", SERVED)
def test_a_batch_of_odd_lengths_gives_transformers_greedy_tokens(
    write_model: WriteModel, architecture: str, backend: str
):
    """In chunks, beside each other, and the last one again with its prefix cached."""
    folder = write_model(architecture, **SERVED[architecture])
    prompts = [prompt_tokens(length, seed=length) for length in (1, 16, 33, 70)]
    model = oracle(folder)
    want = [oracle_greedy(model, 12, input_ids=prompt[None]) for prompt in prompts]
    driver = EngineDriver(folder, attention_backend=backend, max_num_batched_tokens=24, max_num_seqs=8)
    for i, prompt in enumerate(prompts):
        driver.add(f"r{i}", prompt.tolist())
    assert [answer.token_ids for answer in driver.run().values()] == want
    again = driver.generate(prompts[-1].tolist())
    assert again.token_ids == want[-1]
    assert again.finished is not None
    assert again.finished.num_cached_tokens == 64
    assert driver.info.implementation == "transformers"


def test_preempted_requests_equal_undisturbed_ones(write_model: WriteModel):
    folder = write_model("GraniteForCausalLM", **SERVED["GraniteForCausalLM"])
    answers = []
    for memory in ("64MiB", "200KB"):
        driver = EngineDriver(folder, max_num_seqs=4, kv_cache_memory=memory)
        for i in range(4):
            driver.add(f"r{i}", prompt_tokens(20 + i, seed=i).tolist(), max_tokens=60)
        answers.append([answer.token_ids for answer in driver.run().values()])
    assert driver.engine.scheduler.num_preemptions > 0
    assert answers[0] == answers[1]


def test_guesses_at_coming_tokens_change_no_answer(write_model: WriteModel):
    folder = write_model("Olmo2ForCausalLM")
    prompt = prompt_tokens(6).tolist() * 9
    answers = [EngineDriver(folder, speculative=kind).generate(prompt, max_tokens=40) for kind in ("off", "ngram")]
    assert answers[0].token_ids == answers[1].token_ids


def test_log_probabilities_of_a_prompt_are_those_of_the_model(write_model: WriteModel):
    folder = write_model("CohereForCausalLM", **SERVED["CohereForCausalLM"])
    prompt = prompt_tokens(21)
    with torch.inference_mode():
        want = oracle(folder)(input_ids=prompt[None]).logits[0].log_softmax(-1)
    answer = EngineDriver(folder).generate(prompt.tolist(), prompt_logprobs=1, max_tokens=1)
    expected = [want[i, token].item() for i, token in enumerate(prompt[1:].tolist())]
    assert [each.logprob for each in answer.prompt_logprobs or []] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_moe"])
def test_our_own_families_can_be_run_by_transformers_too(checkpoint: CheckpointFactory, name: str):
    prompt = prompt_tokens(45).tolist()
    drivers = {kind: EngineDriver(checkpoint(name), model_implementation=kind) for kind in ("auto", "transformers")}
    assert {kind: driver.info.implementation for kind, driver in drivers.items()} == {
        "auto": "native",
        "transformers": "transformers",
    }
    auto, other = (driver.generate(prompt, max_tokens=24).token_ids for driver in drivers.values())
    assert auto == other


def test_bfloat16_is_served_too(write_model: WriteModel):
    folder = write_model("Phi3ForCausalLM", sliding_window=None)
    driver = EngineDriver(folder, dtype="bfloat16", attention_backend="cpu")
    assert len(driver.generate(prompt_tokens(30).tolist(), max_tokens=8).token_ids) == 8


def test_long_rope_is_served_as_far_as_its_angles_stay(write_model: WriteModel):
    """Beyond that every key in the cache would have to be turned again."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    folder = write_model(
        "Phi3ForCausalLM", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=128
    )
    driver = EngineDriver(folder)
    assert driver.info.max_model_len == 128
    prompt = prompt_tokens(100)
    assert driver.generate(prompt.tolist()).token_ids == oracle_greedy(oracle(folder), 12, input_ids=prompt[None])


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("StableLmForCausalLM", {}, "StableLmForCausalLM.*takes no other attention"),
        ("BloomForCausalLM", {}, "BloomForCausalLM.*takes no other attention"),
        ("MambaForCausalLM", {}, "MambaForCausalLM.*takes no other attention"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}, "layer_types has conv"),
        ("DeepseekV3ForCausalLM", {}, "its values have another size than its keys"),
        ("GptOssForCausalLM", {"num_local_experts": 4}, "its attention has s_aux"),
        ("Llama4ForCausalLM", {}, "attention_chunk_size is 8192; attention in chunks is not supported"),
    ],
)
def test_what_a_paged_cache_is_not_enough_for_is_refused_by_name(
    write_model: WriteModel, architecture: str, fields: dict[str, Any], reason: str
):
    with pytest.raises(ConfigError, match=reason):
        EngineDriver(write_model(architecture, **fields))


def test_a_state_beside_the_cache_is_noticed_before_anybody_asks(write_model: WriteModel):
    """A layer that looks at the row above, as convolutions and token shifts do: right for one prompt computed whole."""
    folder = write_model("Olmo2ForCausalLM")
    config = load_model_config(folder, "auto")
    attention = TorchReferenceAttention(torch.float32, CPU)
    decoder = load_transformers_decoder(
        folder, config, attention, dtype=torch.float32, device=CPU, block_size=BLOCK_SIZE
    )
    decoder.check(BLOCK_SIZE)
    layer = decoder._body.layers[1]
    layer.register_forward_hook(lambda module, inputs, output: output + output.roll(1, dims=1))
    with torch.inference_mode(), pytest.raises(ConfigError, match="it keeps a state that the cache does not hold"):
        decoder.check(BLOCK_SIZE)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"attention_backend": "cpu", "batch_invariant": True}])
def test_settings_that_need_our_own_network_are_refused(write_model: WriteModel, settings: dict[str, Any]):
    with pytest.raises(ValueError, match=rf"transformers' own code, which does not work with {list(settings)[-1]}"):
        EngineDriver(write_model("Olmo2ForCausalLM"), **settings)


def test_native_means_no_other_code(write_model: WriteModel):
    folder = write_model("Olmo2ForCausalLM")
    with pytest.raises(ConfigError, match="supported: LlamaForCausalLM, "):
        load_model_config(folder, "native")
    with pytest.raises(ConfigError, match="supported: LlamaForCausalLM, "):
        EngineDriver(folder, model_implementation="native")


def test_an_architecture_that_nobody_knows_is_refused(write_model: WriteModel, tmp_path: Path):
    config = (write_model("Olmo2ForCausalLM") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("Olmo2ForCausalLM", "UnheardOfForCausalLM"))
    with pytest.raises(ConfigError, match="and text models that transformers knows"):
        load_model_config(tmp_path, "auto")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(write_model: WriteModel, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    for file in write_model("Olmo2ForCausalLM").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        EngineDriver(tmp_path)
