"""A draft model in the engine: whatever it guesses, an answer is what it would have been without.

The target's own weights, a noisy copy of them and another model guess. Those of the same weights must hold, all of
them: a key or value that is wrong in the draft model's cache would show.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.errors import BadSetting
from diptych.start_checks import draft_folder
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.core.speculation.draft_model import DraftModelDrafter
from services.text_engine.core.speculation.interface import DraftCounts
from services.text_engine.core.speculation.step_costs import StepCosts
from services.text_engine.metrics import EngineMetrics
from shared.settings_errors import SettingRefused
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.lora_adapters import write_adapter
from tests.models.test_cuda_graphs import Rerun
from tests.models.test_speculative import SHAPES, Recorder, check_same, run, tokens

FREE = StepCosts([(1, 1.0), (64, 1.0)])
CHEAP = StepCosts([(1, 0.05), (64, 0.05)])


@pytest.fixture(scope="module")
def llama(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def noisy(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, a little out of tune: some of its guesses hold."""
    folder = tmp_path_factory.mktemp("noisy") / "checkpoint"
    shutil.copytree(llama, folder)
    generator = torch.Generator().manual_seed(7)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for tensor in weights.values():
            tensor.add_(0.03 * tensor.std() * torch.randn(tensor.shape, generator=generator))
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def driver_with(folder: Path, draft: Path, **settings: Any) -> Recorder:
    """Costs are given, not measured: which drafts pay differs from run to run."""
    driver = Recorder(folder, speculative="ngram", speculative_model=draft, **settings)
    drafter = drafter_of(driver)
    drafter.lookup.costs, drafter.costs = FREE, CHEAP
    return driver


def drafter_of(driver: EngineDriver) -> DraftModelDrafter:
    drafter = driver.engine.scheduler.drafter
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


def run_with(folder: Path, draft: Path, requests: list[dict[str, Any]], **settings: Any) -> Recorder:
    driver = driver_with(folder, draft, **settings)
    for i, request in enumerate(requests):
        driver.add(f"r{i}", **request)
    driver.run()
    return driver


def counts(driver: EngineDriver) -> DraftCounts:
    return driver.engine.scheduler.draft_counts["draft_model"]


def check_all_held(driver: EngineDriver, at_least: int) -> None:
    assert counts(driver).num_accepted_tokens == counts(driver).num_draft_tokens >= at_least


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of rows in no sequence
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_a_model_that_is_its_own_draft_is_always_right(llama: Path, backend: str):
    num_requests, num_tokens = (2, 9) if backend == "triton" else (4, 40)
    requests = [{"token_ids": tokens(5 + 13 * i, seed=i), "max_tokens": num_tokens} for i in range(num_requests)]
    plain = run(llama, requests)
    guessed = run_with(llama, llama, requests, attention_backend=backend)
    check_same(plain, guessed)
    check_all_held(guessed, at_least=num_requests * num_tokens // 2)
    assert len(guessed.batches) < 0.5 * len(plain.batches)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mistral", "qwen2_5_vl", "qwen3_vl", "mixtral"])
def test_drafts_of_every_family_are_right_about_themselves(checkpoint: CheckpointFactory, family: str):
    folder = checkpoint(family)
    requests = [{"token_ids": tokens(5 + 13 * i, seed=i), "max_tokens": 30} for i in range(3)]
    guessed = run_with(folder, folder, requests)
    check_same(run(folder, requests), guessed)
    check_all_held(guessed, at_least=40)


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_shapes_an_answer_it_is_the_same_token_by_token(llama: Path, noisy: Path, shape: str):
    requests = [
        {"token_ids": tokens(14, seed=3), "max_tokens": 30, **SHAPES[shape]},
        {"token_ids": tokens(9, seed=4), "max_tokens": 33},
        {"token_ids": tokens(21, seed=5), "max_tokens": 25, **SHAPES[shape]},
    ]
    guessed = run_with(llama, noisy, requests)
    check_same(run(llama, requests), guessed)
    assert 0 < counts(guessed).num_accepted_tokens < counts(guessed).num_draft_tokens


@pytest.mark.parametrize("family", ["qwen3", "llama_padded"])
def test_answers_are_the_same_with_another_model_of_the_same_vocabulary(
    checkpoint: CheckpointFactory, llama: Path, family: str
):
    requests = [{"token_ids": tokens(14 + i, seed=i), "max_tokens": 30, "temperature": i / 2} for i in range(3)]
    requests = [{**request, "seed": 5} for request in requests]
    guessed = run_with(llama, checkpoint(family), requests)
    check_same(run(llama, requests), guessed)
    assert counts(guessed).num_drafts > 0


def test_a_draft_model_that_is_of_no_use_is_soon_left_alone(checkpoint: CheckpointFactory, llama: Path):
    driver = driver_with(llama, checkpoint("qwen3"))
    drafter_of(driver).lookup.costs = StepCosts([(1, 1.0), (16, 1.5)])
    drafter_of(driver).costs = StepCosts([(1, 0.3), (16, 0.4)])
    driver.generate(tokens(14), max_tokens=200)
    assert counts(driver).num_drafts < 50
    driver.engine.scheduler.take_draft_counts()
    for i in range(3):
        driver.generate(tokens(14, seed=i), max_tokens=40)
    assert counts(driver).num_drafts < 20


def test_adapters_answers_are_the_same_with_guesses_of_a_model_that_has_none(llama: Path, tmp_path: Path):
    adapter = write_adapter(llama, tmp_path / "adapter", rank=3, seed=1)
    requests = [{"token_ids": tokens(14), "max_tokens": 30, "adapter": name} for name in (None, "few")]
    settings = {"lora_modules": f"few={adapter}"}
    guessed = run_with(llama, llama, requests, **settings)
    check_same(run(llama, requests, **settings), guessed)
    assert counts(guessed).num_accepted_tokens > 10


def test_pictures_are_answered_without_it_and_texts_beside_them_with_it(checkpoint: CheckpointFactory, llama: Path):
    folder = checkpoint("llava_clip_llama")
    image_token = EngineDriver(folder).prompts._image_token_id
    assert image_token is not None
    picture = {
        "token_ids": [*tokens(9), *[image_token] * 6, *tokens(5, seed=1)],
        "images": [ImageSpan("a" * 64, 9, 6)],
        "max_tokens": 21,
    }
    text = {"token_ids": tokens(14), "max_tokens": 21}
    plain = run(folder, [picture, text])
    driver = driver_with(folder, llama)
    driver.pictures = plain.pictures
    for i, request in enumerate((picture, text)):
        driver.add(f"r{i}", **request)
    driver.run()
    check_same(plain, driver)
    asked = [item for batch in driver.batches for item in batch.scheduled if item.draft_method == "draft_model"]
    assert asked
    assert not any(item.sequence.images for item in asked)


# --- its cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 6},
        {"max_num_batched_tokens": 23, "max_num_seqs": 3, "enable_prefix_caching": False},
    ],
)
def test_chunks_and_small_steps_leave_it_right(llama: Path, settings: dict[str, Any]):
    requests = [{"token_ids": tokens(5 + 6 * i, seed=i % 3), "max_tokens": 18 + i} for i in range(6)]
    guessed = run_with(llama, llama, requests, **settings)
    check_same(run(llama, requests), guessed)
    check_all_held(guessed, at_least=40)


def test_preemptions_leave_it_right(llama: Path):
    requests = [{"token_ids": tokens(5 + 2 * i, seed=i), "max_tokens": 60} for i in range(6)]
    guessed = run_with(llama, llama, requests, kv_cache_memory="144KiB", max_num_batched_tokens=48, max_num_seqs=6)
    check_same(run(llama, requests), guessed)
    assert guessed.engine.scheduler.num_preemptions > 2
    check_all_held(guessed, at_least=100)


def test_prefix_hits_leave_it_right_whether_it_had_computed_them_or_not(llama: Path):
    driver = driver_with(llama, llama)
    drafter = driver.engine.scheduler.drafter
    first = driver.generate(tokens(70), max_tokens=20)
    conversation = [*tokens(70), *first.token_ids, *tokens(5, seed=1)]
    driver.engine.scheduler.drafter = None
    driver.generate(tokens(65, seed=2), max_tokens=5)
    driver.engine.scheduler.drafter = drafter
    requests = [conversation, [*tokens(65, seed=2), 9, 8, 7], [*tokens(65, seed=2), 6, 5, 4]]
    for token_ids in requests:
        answer = driver.generate(token_ids, max_tokens=20)
        assert answer.finished is not None
        assert answer.finished.num_cached_tokens >= 64
        assert answer.token_ids == EngineDriver(llama).generate(token_ids, max_tokens=20).token_ids
    check_all_held(driver, at_least=45)


def test_its_cache_takes_its_share_of_the_memory(llama: Path):
    settings = {"kv_cache_memory": "1MiB", "max_num_seqs": 64}
    without = Recorder(llama, **settings)
    with_draft = driver_with(llama, llama, **settings)
    assert with_draft.info.num_kv_blocks == without.info.num_kv_blocks // 2
    assert with_draft.engine.runner.kv_cache_bytes <= 1 << 20


def test_asleep_it_gives_its_memory_back_and_awake_it_is_right_again(llama: Path):
    driver = driver_with(llama, llama)
    before = driver.generate(tokens(40), max_tokens=20)
    size_bytes = driver.engine.runner.kv_cache_bytes
    driver.engine.sleep()
    assert driver.engine.runner.kv_cache_bytes == 0
    driver.engine.wake()
    assert driver.engine.runner.kv_cache_bytes == size_bytes
    assert driver.generate(tokens(40), max_tokens=20).token_ids == before.token_ids
    check_all_held(driver, at_least=24)


def test_a_wake_without_room_for_it_leaves_the_engine_asleep_and_the_next_wake_whole(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = driver_with(llama, llama)
    before = driver.generate(tokens(40), max_tokens=20)
    runner = driver.engine.runner
    size_bytes = runner.kv_cache_bytes
    driver.engine.sleep()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for the draft model's cache")

    monkeypatch.setattr(runner._draft, "restore_kv_cache", fail)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            driver.engine.wake()
        assert runner.kv_cache_bytes == 0
    monkeypatch.undo()
    driver.engine.wake()
    assert runner.kv_cache_bytes == size_bytes
    assert driver.generate(tokens(40), max_tokens=20).token_ids == before.token_ids
    with pytest.raises(AssertionError, match="not released"):
        runner._forward_pass.restore_kv_cache([])


def test_its_steps_run_as_graphs_and_its_prompts_do_not(llama: Path):
    driver = driver_with(llama, llama)
    capture = Rerun()
    draft = drafter_of(driver)._model
    draft._forward_pass.capture(capture, [1, 2, 4, 8], max_blocks=32)  # type: ignore[union-attr]
    requests = [{"token_ids": tokens(30 + i, seed=i), "max_tokens": 20} for i in range(3)]
    for i, request in enumerate(requests):
        driver.add(f"r{i}", **request)
    driver.run()
    check_same(run(llama, requests), driver)
    check_all_held(driver, at_least=40)
    assert capture.num_replays > 10


def test_a_draft_model_that_breaks_takes_no_answer_with_it(llama: Path, monkeypatch: pytest.MonkeyPatch):
    driver = driver_with(llama, llama)
    expected = EngineDriver(llama).generate(tokens(20), max_tokens=30)
    driver.add("a", tokens(20), max_tokens=30)
    for _ in range(3):
        driver.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(drafter_of(driver)._model, "_guess", fail)
    assert driver.run()["a"].token_ids == expected.token_ids
    driver.engine.scheduler.take_draft_counts()
    driver.generate(tokens(20), max_tokens=30)
    assert counts(driver).num_drafts == 0


def test_its_guesses_are_counted_apart(llama: Path):
    driver = driver_with(llama, llama)
    metrics = EngineMetrics()
    driver.add("a", tokens(20), max_tokens=30)
    while driver.step():
        metrics.observe_step(driver.engine, 0.01)
    accepted, drafted = (
        metrics.registry.get_sample_value(f"diptych:spec_decode_num_{name}_tokens_total", {"method": "draft_model"})
        for name in ("accepted", "draft")
    )
    assert accepted == drafted
    assert accepted is not None
    assert accepted > 20


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_draft_model_of_another_vocabulary_is_refused_with_the_token_that_differs(llama: Path, tmp_path: Path):
    folder = tmp_path / "other"
    shutil.copytree(llama, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(SettingRefused, match=r"speculative_model=.*another vocabulary.*b'b'.*b'a'.*same family"):
        EngineDriver(llama, speculative="ngram", speculative_model=folder)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"speculative": "off"}, "never asked, because speculative is off"),
        ({"tensor_parallel_size": 2}, "one process only, tensor_parallel_size 1"),
        ({"speculative_model": "/no/such/folder"}, "holds no config.json"),
    ],
)
def test_a_draft_model_that_could_not_be_used_is_refused(llama: Path, settings: dict[str, Any], problem: str):
    with pytest.raises(SettingRefused, match=problem):
        EngineDriver(llama, **({"speculative": "ngram", "speculative_model": llama} | settings))


def test_on_the_command_line_it_may_be_whatever_a_model_may_be(llama: Path):
    assert draft_folder(TextEngineSettings(model=llama)) is None
    assert draft_folder(TextEngineSettings(model=llama, speculative_model=llama)) == llama
    with pytest.raises(BadSetting, match="speculative_model='no such model'"):
        draft_folder(TextEngineSettings(model=llama, speculative_model="no such model"))
