"""LoRA adapters in the engine: the tokens of merged weights, alone and mixed, apart in the cache, coming and going."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.text_engine.models.layers import Linear
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.lora.adapted import LoadedAdapters
from services.text_engine.models.lora.adapter_files import (
    AdapterError,
    AdapterFiles,
    AdapterIdentity,
    LowRank,
    read_adapter,
)
from shared.errors import InvalidRequest, ModelNotFound, Overloaded
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.lora_adapters import ATTENTION, MLP, merge, write_adapter
from tests.models.oracle import load_oracle, oracle_greedy
from tests.models.test_cuda_graphs import Rerun

CPU = torch.device("cpu")


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def of_merged_weights(base: Path, adapter: Path, folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    return oracle_greedy(load_oracle(merge(base, adapter, folder)), num_tokens, input_ids=torch.tensor([prompt]))


@pytest.fixture(scope="module")
def llama(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(llama, folder / "all", rank=5, seed=1),
        "few": write_adapter(llama, folder / "few", targets=("q_proj", "v_proj"), rank=3, seed=2),
        "mlp": write_adapter(llama, folder / "mlp", targets=MLP, rank=8, seed=3),
    }


def modules(adapters: dict[str, Path]) -> tuple[str, ...]:
    return tuple(f"{name}={folder}" for name, folder in adapters.items())


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama_biased", {"targets": ("k_proj", "up_proj"), "rank": 3}),
        ("qwen2", {"targets": ("q_proj", "v_proj"), "rank": 1}),
        ("qwen2_tied", {"rank": 16, "use_rslora": True}),
        ("qwen3", {"targets": ATTENTION, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 3}}),
        ("gemma3_text", {"rank": 2}),
        ("llama", {"target_modules": r".*\.(self_attn|mlp)\..*_proj"}),
    ],
)
def test_greedy_tokens_equal_those_of_merged_weights_in_transformers(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str, options: dict[str, Any], backend: str
):
    base, prompt = checkpoint(family), tokens(37)
    adapter = write_adapter(base, tmp_path / "adapter", **options)
    driver = EngineDriver(base, lora_modules=(f"mine={adapter}",), attention_backend=backend)
    expected = of_merged_weights(base, adapter, tmp_path / "merged", prompt, 24)
    assert driver.generate(prompt, adapter="mine", max_tokens=24).token_ids == expected
    assert driver.generate(prompt, max_tokens=24).token_ids != expected, "an adapter that changes nothing tests nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_mixed_batch_each_has_the_very_log_probabilities_it_has_alone(
    llama: Path, adapters: dict[str, Path], dtype: str
):
    """With the compiled kernels bit for bit; chunked, and with the rows of an adapter apart from each other."""
    settings = {"attention_backend": "cpu", "batch_invariant": True, "dtype": dtype, "enable_prefix_caching": False}
    settings |= {"lora_modules": modules(adapters)}
    asked = [(None, 33), ("all", 21), ("few", 40), (None, 7), ("all", 18), ("mlp", 1), ("few", 64)]

    def told(driver: EngineDriver, numbers: list[int]) -> dict[str, list[Any]]:
        for number in numbers:
            adapter, length = asked[number]
            driver.add(str(number), tokens(length, seed=number), adapter=adapter, max_tokens=9, logprobs=2)
        return {name: answer.logprobs for name, answer in driver.run().items()}

    together = told(EngineDriver(llama, max_num_batched_tokens=40, max_num_seqs=8, **settings), list(range(len(asked))))
    for number in range(len(asked)):
        assert together[str(number)] == told(EngineDriver(llama, **settings), [number])[str(number)]


def test_without_an_adapter_in_the_batch_the_model_computes_the_same_bits(llama: Path, adapters: dict[str, Path]):
    plain = EngineDriver(llama, dtype="bfloat16")
    adapted = EngineDriver(llama, dtype="bfloat16", lora_modules=modules(adapters))
    assert adapted.generate(tokens(50), max_tokens=20).token_ids == plain.generate(tokens(50), max_tokens=20).token_ids


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_beside_quantized_weights_the_adapter_adds_the_same(llama: Path, adapters: dict[str, Path], kind: str):
    """The quantized products are the model's own: only the difference is compared, as it comes out of each layer."""
    driver = EngineDriver(llama, lora_modules=modules(adapters), quantization=kind, attention_backend="cpu")
    plain = EngineDriver(llama, lora_modules=modules(adapters), attention_backend="cpu")
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(5))
    rows = np.array([0, 1, 1, 0, 2, 1, 0], dtype=np.int32)
    added = []
    for each in (driver, plain):
        forward_pass = each.engine.runner._forward_pass
        product: Any = forward_pass._decoder._layers[1]._qkv_proj  # type: ignore[attr-defined]
        assert forward_pass._adapters is not None
        with forward_pass._adapters.applied(rows):
            adapted = product(x)
        added.append(adapted - product(x))
    torch.testing.assert_close(added[0], added[1], atol=1e-4, rtol=1e-4)
    assert added[0][rows > 0].abs().amax(dim=1).min() > 0.1
    assert added[0][rows == 0].abs().max() == 0
    answers = [driver.generate(tokens(30), adapter=name).token_ids for name in (None, "all", "mlp")]
    assert len({tuple(answer) for answer in answers}) == 3


def test_two_ranks_give_the_tokens_of_one(llama: Path, adapters: dict[str, Path]):
    found = []
    for size in (1, 2):
        driver = EngineDriver(llama, lora_modules=modules(adapters), tensor_parallel_size=size, max_num_seqs=8)
        for number, name in enumerate((None, *adapters)):
            driver.add(str(number), tokens(20 + number, seed=number), adapter=name)
        try:
            found.append([answer.token_ids for answer in driver.run().values()])
        finally:
            driver.engine.close()
    assert found[0] == found[1]


def test_where_decode_steps_are_graphs_those_with_adapters_run_as_they_are(llama: Path, adapters: dict[str, Path]):
    driver = EngineDriver(llama, lora_modules=modules(adapters))
    expected = {name: driver.generate(tokens(20), adapter=name).token_ids for name in (None, "few")}
    capture = Rerun()
    driver.engine.runner._forward_pass.capture(capture, [1, 2, 4], max_blocks=8)
    for name, answer in expected.items():
        before = capture.num_replays
        assert driver.generate(tokens(20), adapter=name).token_ids == answer
        assert (capture.num_replays > before) == (name is None)


@given(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=17))
def test_any_rows_get_what_their_own_adapter_adds_to_its_part_of_a_fused_product(llama: Path, numbers: list[int]):
    config = load_model_config(llama)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    loaded = LoadedAdapters(config, make_product=Linear, dtype=torch.float32, device=CPU)
    name = "layers.0.self_attn.qkv_proj"
    product = loaded.adapt(name, Linear(torch.zeros(q_size + 2 * kv_size, config.hidden_size)))
    generator = torch.Generator().manual_seed(3)
    pairs = [
        LowRank(torch.randn(n, config.hidden_size), torch.randn(kv_size, n, generator=generator)) for n in (1, 2, 3)
    ]
    for number, pair in enumerate(pairs, start=1):
        identity = AdapterIdentity(f"a{number}", "", bytes([number]), number)
        loaded.put(number, AdapterFiles(identity, {"layers.0.self_attn.k_proj": pair}))
    x = torch.randn(len(numbers), config.hidden_size)
    expected = torch.zeros(len(numbers), q_size + 2 * kv_size)
    for row, number in enumerate(numbers):
        if number:
            down, up = pairs[number - 1]
            expected[row, q_size : q_size + kv_size] = up @ (down @ x[row])
    with loaded.applied(np.array(numbers, dtype=np.int32)):
        torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-4)
    assert not product(x).any()


def test_guesses_at_coming_tokens_change_nothing(llama: Path, adapters: dict[str, Path]):
    found = []
    for speculative in ("off", "ngram"):
        driver = EngineDriver(llama, lora_modules=modules(adapters), speculative=speculative)
        driver.engine.scheduler.max_prefill_tokens_while_decoding = None
        found.append(driver.generate(tokens(6) * 12, adapter="few", max_tokens=40).token_ids)
    assert found[0] == found[1]


# --- the prefix cache -------------------------------------------------------------------------------------------------


def num_cached(driver: EngineDriver, prompt: list[int], adapter: str | None) -> int:
    answer = driver.generate(prompt, adapter=adapter)
    assert answer.finished is not None
    return answer.finished.num_cached_tokens


def test_model_and_adapters_never_find_each_others_blocks(llama: Path, adapters: dict[str, Path]):
    driver = EngineDriver(llama, lora_modules=modules(adapters))
    prompt = tokens(70)
    for name in (None, *adapters):
        assert num_cached(driver, prompt, name) == 0
    for name in (None, *adapters):
        assert num_cached(driver, prompt, name) == 64


def test_another_content_under_the_same_name_finds_nothing_of_the_old(llama: Path, tmp_path: Path):
    config, prompt = load_model_config(llama), tokens(70)
    driver = EngineDriver(llama, lora_folder=tmp_path)
    first = read_adapter("a", write_adapter(llama, tmp_path / "a", seed=1), config, max_rank=64)
    other = read_adapter("a", write_adapter(llama, tmp_path / "b", seed=2), config, max_rank=64)
    driver.engine.adapters.load(first)
    expected = driver.generate(prompt, adapter="a").token_ids
    driver.engine.adapters.load(other, replace=True)
    assert num_cached(driver, prompt, "a") == 0
    driver.engine.adapters.load(first, replace=True)
    again = driver.generate(prompt, adapter="a")
    assert again.token_ids == expected
    assert again.finished is not None
    assert again.finished.num_cached_tokens == 64, "the same content is the same adapter"


# --- loading and unloading --------------------------------------------------------------------------------------------


def test_what_runs_when_its_adapter_goes_is_finished_with_it_and_then_its_weights_go(llama: Path, tmp_path: Path):
    config, prompt = load_model_config(llama), tokens(40)
    files = read_adapter("a", write_adapter(llama, tmp_path / "a"), config, max_rank=64)
    driver = EngineDriver(llama, lora_folder=tmp_path, max_loras=1)
    served = driver.engine.adapters
    served.load(files)
    expected = driver.generate(prompt, adapter="a", max_tokens=20).token_ids
    driver.add("running", prompt, adapter="a", max_tokens=20)
    driver.step()
    served.unload("a")
    with pytest.raises(ModelNotFound, match="'a' does not exist here"):
        driver.engine.add(_request(driver, "late", "a"))
    with pytest.raises(Overloaded, match="max_loras is 1"):
        served.load(files)
    assert (served.infos, served.num_held) == ([], 1)
    assert driver.run()["running"].token_ids == expected
    assert served.num_held == 0
    served.load(files)
    driver.add("aborted", prompt, adapter="a", max_tokens=20)
    driver.step()
    served.unload("a")
    driver.engine.abort("aborted")
    assert served.num_held == 0
    del driver.answers["aborted"]
    driver.check_invariants()


def _request(driver: EngineDriver, request_id: str, adapter: str) -> Any:
    from services.text_engine.engine_io import EngineRequest
    from shared.sampling import SamplingParams

    return EngineRequest(request_id=request_id, token_ids=tokens(5), sampling=SamplingParams(), adapter=adapter)


def test_a_name_that_is_taken_is_refused_unless_it_is_to_be_replaced(llama: Path, tmp_path: Path):
    config = load_model_config(llama)
    driver = EngineDriver(llama, lora_folder=tmp_path, max_loras=1, served_model_name="base")
    folder = write_adapter(llama, tmp_path / "a")
    driver.engine.adapters.load(read_adapter("a", folder, config, max_rank=64))
    with pytest.raises(InvalidRequest, match="load_inplace"):
        driver.engine.adapters.load(read_adapter("a", folder, config, max_rank=64))
    driver.engine.adapters.load(read_adapter("a", folder, config, max_rank=64), replace=True)
    with pytest.raises(InvalidRequest, match="the model itself"):
        driver.engine.adapters.load(read_adapter("base", folder, config, max_rank=64))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r: Input should be greater than 0"),
        ({"r": 6}, "this model and rank 6"),
        ({"target_modules": ["q_proj"]}, "none of its target_modules"),
        ({"target_modules": "("}, "holds a pattern that is none"),
    ],
)
def test_what_an_adapter_asks_for_beyond_that_is_refused_by_name(
    llama: Path, tmp_path: Path, config: dict[str, Any], message: str
):
    folder = write_adapter(llama, tmp_path / "a")
    stored = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(stored | config))
    with pytest.raises(AdapterError, match=message):
        read_adapter("mine", folder, load_model_config(llama), max_rank=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "not supported: .*lm_head"),
        (lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 64)}, "embed_tokens"),
        (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up_proj.lora_B" not in k}, "up_proj has lora_A only"),
        (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up_proj" not in k}, "missing: .*layers.1.mlp.up_proj"),
        (lambda t: {k: v[:, :-1].contiguous() for k, v in t.items()}, "this model and rank 4 want"),
        (lambda t: {k: v.to(torch.int8) for k, v in t.items()}, "stored as torch.int8"),
        (lambda t: {k.replace("layers.0", "layers.9"): v for k, v in t.items()}, "no matrix .*layers.9"),
        (lambda t: {}, "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(llama: Path, tmp_path: Path, change: Any, message: str):
    folder = write_adapter(llama, tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(AdapterError, match=message):
        read_adapter("mine", folder, load_model_config(llama), max_rank=64)


def test_files_that_are_missing_damaged_or_pickled_are_refused(llama: Path, tmp_path: Path):
    config, folder = load_model_config(llama), write_adapter(llama, tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    with pytest.raises(AdapterError, match="rank is 4; max_lora_rank is 3"):
        read_adapter("mine", folder, config, max_rank=3)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="damaged"):
        read_adapter("mine", folder, config, max_rank=64)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="pickled"):
        read_adapter("mine", folder, config, max_rank=64)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        read_adapter("mine", tmp_path / "nowhere", config, max_rank=64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_modules": ("a=FOLDER", "a=FOLDER")}, "the name 'a' twice"),
        ({"lora_modules": ("base=FOLDER",)}, "the model's own"),
        ({"lora_modules": ("a=FOLDER", "b=FOLDER"), "max_loras": 1}, "max_loras is 1"),
        ({"lora_modules": ("FOLDER",)}, "NAME=FOLDER"),
    ],
)
def test_settings_that_cannot_be_meant_stop_the_start(
    llama: Path, adapters: dict[str, Path], settings: dict[str, Any], message: str
):
    given = tuple(each.replace("FOLDER", str(adapters["all"])) for each in settings["lora_modules"])
    with pytest.raises(ValueError, match=message):
        EngineDriver(llama, **(settings | {"lora_modules": given, "served_model_name": "base"}))


def test_the_offline_engine_answers_with_the_adapter_it_is_asked_for(llama: Path, adapters: dict[str, Path]):
    from diptych import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(llama, lora_modules=modules(adapters), num_threads=1, kv_cache_memory="8MiB", dtype="float32")
    driver = EngineDriver(llama, lora_modules=modules(adapters))
    for name in (None, "all"):
        [output] = llm.generate([tokens(21)], sampling, adapter=name)
        assert output.choices[0].token_ids == driver.generate(tokens(21), adapter=name).token_ids
    [refused] = llm.generate([tokens(21)], sampling, adapter="nobody")
    assert isinstance(refused.error, ModelNotFound)
