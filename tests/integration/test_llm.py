"""The offline LLM on a tiny LLaVA: equal to transformers with real pictures, and one bad prompt spoils no batch."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from structlog.testing import capture_logs

from diptych import LLM, Constraint, SamplingParams
from shared.errors import InvalidImage, InvalidRequest
from tests.conftest import CheckpointFactory

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logit_bias={316: -100.0})


def png(seed: int, size: tuple[int, int] = (61, 47)) -> bytes:
    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    buffer = io.BytesIO()
    Image.fromarray(noise.to(torch.uint8).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def transformers_answer(folder: Path, question: str, image: bytes) -> list[int]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    picture = {"type": "image", "image": Image.open(io.BytesIO(image))}
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [picture, {"type": "text", "text": question}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(
        **inputs, do_sample=False, max_new_tokens=16, min_new_tokens=16, eos_token_id=None, suppress_tokens=[316]
    )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(
    scope="module", params=["llava_clip_llama", "llava_siglip_qwen2", "llava_clip_full", "llava_next_vicuna"]
)
def folder(checkpoint: CheckpointFactory, request: pytest.FixtureRequest) -> Path:
    return checkpoint(request.param)


def test_a_batch_of_pictures_is_answered_as_transformers_answers_each(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_ENCODER_DTYPE", "float32")
    llm = LLM(folder, dtype="float32", num_threads=1, kv_cache_memory="32MiB")
    pictures = [png(1), png(2, (30, 90)), png(1)]
    outputs = llm.chat([[{"role": "user", "content": [p, "What is it?"]}] for p in pictures], GREEDY)
    for picture, output in zip(pictures, outputs, strict=True):
        assert output.choices[0].token_ids == transformers_answer(folder, "What is it?", picture)
        assert output.num_image_tokens > 0
    assert outputs[0].text == outputs[2].text


def test_a_bad_picture_fails_its_own_prompt_and_no_other(checkpoint: CheckpointFactory):
    llm = LLM(checkpoint("llava_clip_llama"), num_threads=1, kv_cache_memory="32MiB")
    cut = png(3)[:-200]
    good, no_image, truncated = llm.chat(
        [[{"role": "user", "content": [data, "Hm?"]}] for data in (png(4), b"not a picture", cut)], GREEDY
    )
    assert good.error is None
    assert len(good.choices[0].token_ids) == 16
    for output in (no_image, truncated):
        assert isinstance(output.error, InvalidImage)
        with pytest.raises(InvalidImage):
            _ = output.text


def test_the_log_names_the_model_as_the_caller_does(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_DEMO_MODEL", str(checkpoint("llama")))
    with capture_logs() as entries:
        LLM("demo", num_threads=1, kv_cache_memory="32MiB")
    assert {entry["model"] for entry in entries if "model" in entry} == {"demo"}
    with capture_logs() as entries:
        LLM("demo", served_model_name="mine", num_threads=1, kv_cache_memory="32MiB")
    assert {entry["model"] for entry in entries if "model" in entry} == {"mine"}


def test_plain_prompts_report_progress(checkpoint: CheckpointFactory):
    llm = LLM(checkpoint("llama"), num_threads=1, kv_cache_memory="32MiB")
    seen: list[tuple[int, int]] = []
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate(["The quick", [5, 6, 7]], sampling, on_progress=lambda done, of: seen.append((done, of)))
    assert [len(output.choices[0].token_ids) for output in outputs] == [16, 16]
    assert seen[-1] == (2, 2)


def test_a_batch_may_be_longer_than_the_engines_queue(checkpoint: CheckpointFactory):
    llm = LLM(checkpoint("llama"), num_threads=1, kv_cache_memory="4MiB", max_num_seqs=4, max_waiting_requests=8)
    outputs = llm.generate([[5 + i % 200] for i in range(40)], SamplingParams(temperature=0.0, max_tokens=2))
    assert all(output.error is None for output in outputs)


def test_a_long_batch_of_pictures_keeps_the_bytes_of_few(checkpoint: CheckpointFactory):
    llm = LLM(checkpoint("llava_clip_llama"), num_threads=1, kv_cache_memory="32MiB", max_num_seqs=2)
    kept: list[int] = []
    chats = [[{"role": "user", "content": [png(seed), "Hm?"]}] for seed in range(12)]
    outputs = llm.chat(chats, GREEDY, on_progress=lambda _done, _of: kept.append(len(llm._images)))
    assert all(output.error is None for output in outputs)
    assert max(kept) <= 4, "twice max_num_seqs are queued at a time"


def test_a_missing_picture_and_a_malformed_message_fail_their_own_prompts(checkpoint: CheckpointFactory):
    llm = LLM(checkpoint("llava_clip_llama"), num_threads=1, kv_cache_memory="32MiB")
    question = {"role": "user", "content": "Hm?"}
    missing, malformed, no_list, good = llm.chat(
        [[{"role": "user", "content": [Path("/no/such.png"), "Hm?"]}], [{"role": "user"}], "hello", [question]],  # type: ignore[list-item]
        GREEDY,
    )
    assert all(isinstance(output.error, InvalidRequest) for output in (missing, malformed, no_list))
    assert good.error is None


def test_an_interrupted_batch_leaves_nothing_for_the_next_one(checkpoint: CheckpointFactory):
    llm = LLM(checkpoint("llama"), num_threads=1, kv_cache_memory="4MiB")

    def interrupt(_done: int, _of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], SamplingParams(max_tokens=50), on_progress=interrupt)
    [output] = llm.generate(["three"], SamplingParams(temperature=0.0, max_tokens=3))
    assert output.error is None


def test_a_constraint_holds_and_a_bad_one_fails_its_prompts_alone(checkpoint: CheckpointFactory):
    llm = LLM(checkpoint("llama"), dtype="float32", num_threads=1, kv_cache_memory="16MiB")
    choice = Constraint(kind="choice", value='["yes", "no"]')
    outputs = llm.generate(["a", "b"], SamplingParams(temperature=1.0, max_tokens=20, seed=1, constraint=choice))
    assert {output.text for output in outputs} <= {"yes", "no"}
    [refused] = llm.generate(["a"], SamplingParams(constraint=Constraint(kind="regex", value="(", param="constraint")))
    assert isinstance(refused.error, InvalidRequest)
    assert refused.error.param == "constraint"
