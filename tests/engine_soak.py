"""A real engine on a tiny model under all that can happen to it at once, for as long as one likes.

Every question it is asked was answered before by an engine that had nothing else to do, no prefix cache and no guesses
at coming tokens: each token that comes is held against that answer. All invariants are checked after every step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from services.text_engine.build import BuiltEngine, build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.batch import Batch, Draft, SampledToken
from services.text_engine.core.sequence import ImageSpan, Sequence
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineOutput, EngineRequest, RequestFailed, RequestFinished, TokenOutput
from services.text_engine.metrics import EngineMetrics
from shared.embedding_cache import EmbeddingCache
from shared.errors import ContextTooLong, EncodeFailed, Overloaded
from shared.metrics import counts_by_label
from shared.sampling import SamplingParams
from shared.wire.images import ImageRef
from tests.engine_invariants import check_engine

NUM_PICTURES: Final = 5
NUM_ROWS: Final = 23  # of each picture: more than a block and no multiple of one
NUM_KINDS: Final = 60
VOCABULARY: Final = range(3, 300)
MAX_WAITING: Final = 24
LOADS: Final = (1, 3, 6, 12, 16, 30)  # requests at once; the last is more than the queue takes


@dataclass(frozen=True, slots=True)
class Choice:
    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(slots=True)
class Kind:
    """A question that may be asked any number of times, and what it is answered."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...]
    sampling: dict[str, Any]
    choices: list[Choice] = field(default_factory=list)

    def request(self, request_id: str, *, priority: int = 0, cache_salt: str = "") -> EngineRequest:
        refs = {
            span.image_key: ImageRef(
                image_key=span.image_key, num_tokens=span.num_tokens, width=1, height=1, encoder_url="http://x"
            )
            for span in self.images
        }
        return EngineRequest(
            request_id=request_id,
            token_ids=self.token_ids,
            sampling=SamplingParams(**self.sampling),
            images=self.images,
            image_refs=tuple(refs.values()),
            priority=priority,
            cache_salt=cache_salt,
        )


@dataclass(slots=True)
class Asked:
    """A request on its way, and what has come of it."""

    kind: Kind
    added_at_step: int
    token_ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[str | None]


class Rumours:
    """A drafter that knows the answers and is often wrong all the same."""

    def __init__(self, asked: dict[str, Asked], rng: random.Random) -> None:
        self._asked = asked
        self._rng = rng

    def propose(
        self, sequences: AbstractSequence[Sequence], *, num_step_tokens: int, max_draft_tokens: int
    ) -> dict[Sequence, Draft]:
        drafts = {}
        for sequence in sequences:
            length = min(self._rng.randrange(6), sequence.max_draft_tokens, max_draft_tokens)
            start = sequence.num_generated_tokens
            answer = self._asked[sequence.request_id].kind.choices[sequence.index].token_ids
            draft = answer[start : start + length]
            if draft and self._rng.random() < 0.5:
                draft[self._rng.randrange(len(draft))] = self._rng.choice(VOCABULARY)
            if draft:
                drafts[sequence] = Draft(draft, "ngram")
                max_draft_tokens -= len(draft)
        return drafts


class Soak:
    """num_requests are asked in all; what happens to them follows from `seed`."""

    def __init__(self, folder: Path, *, num_requests: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.num_requests = num_requests
        self._pictures = _pictures(folder)
        self._kinds = _answered_kinds(folder, self._pictures, random.Random(seed + 1))
        self._wanted: list[tuple[int, ImageRef]] = []  # when it will be decided whether it comes
        built = _build(folder, self._wants, kv_cache_memory=_memory_of_blocks(folder, 20), max_num_seqs=8)
        self.engine: Engine = built.engine
        self.metrics = EngineMetrics()
        self.metrics.watch(built, EmbeddingCache(None), max_num_seqs=8, prefix_caching=True)
        self._num_warm_up_steps = self.engine.num_steps
        self.asked: dict[str, Asked] = {}
        self.engine.scheduler.drafter = Rumours(self.asked, random.Random(seed + 2))
        self.counts: Counter[str] = Counter()
        self.longest_wait = 0  # steps from a request's arrival to its end
        self.num_tokens = 0
        self.num_steps = 0  # also those in which nothing could run
        self._load = LOADS[0]
        self._doomed: set[str] = set()  # requests that have to fail
        self._poisoned: str | None = None
        self._breaks: str | None = None
        self._spoil_runner()

    @property
    def is_over(self) -> bool:
        return self.counts["asked"] >= self.num_requests and not self.asked

    def run(self, max_requests: int | None = None) -> None:
        """Until all requests are over, or so many have been asked."""
        limit = self.num_requests if max_requests is None else min(max_requests, self.num_requests)
        while not self.is_over if limit == self.num_requests else self.counts["asked"] < limit:
            self._requests_come()
            self._clients_leave()
            self._operators_interfere()
            self._images_arrive()
            self._work()

    def check_end(self) -> None:
        """Nothing is left of all that, and the metrics have counted what really came."""
        engine, pool = self.engine, self.engine.scheduler.blocks.pool
        check_engine(engine)
        assert engine.num_requests == pool.num_referenced == 0
        engine.reset_cache()
        assert pool.num_free == pool.num_blocks
        assert engine.embeddings.num_idle_bytes == 0
        metrics, counts = self.metrics, self.counts
        assert counts_by_label(metrics.generation_tokens)[""] == self.num_tokens
        assert sum(counts_by_label(metrics.success).values()) == counts["choices finished"]
        assert sum(counts_by_label(metrics.failures).values()) == counts["failed"]
        assert counts_by_label(metrics.preemptions)[""] == engine.scheduler.num_preemptions
        assert counts_by_label(metrics.evictions)[""] == pool.num_evictions
        num_computed_steps = engine.num_steps - self._num_warm_up_steps
        assert _observations(metrics.step_seconds) == _observations(metrics.step_tokens) == num_computed_steps
        assert _observations(metrics.latency) == counts["finished"]
        for gauge in (metrics.running, metrics.waiting, metrics.awaiting_image, metrics.kv_usage, metrics.kv_waste):
            assert next(iter(gauge.collect())).samples[0].value == 0
        ended = ("finished", "failed", "aborted")
        assert sum(counts[name] for name in ended) == counts["admitted"]
        assert counts["admitted"] + counts["refused"] == counts["asked"]

    # --- what happens ---------------------------------------------------------------------------------------------

    def _requests_come(self) -> None:
        if self.num_steps % 100 == 0:
            self._load = self._rng.choice(LOADS)
        while len(self.asked) < self._load and self.counts["asked"] < self.num_requests and self._rng.random() < 0.7:
            self.counts["asked"] += 1
            if not self._ask(f"soak {self.counts['asked']}"):
                break

    def _ask(self, request_id: str) -> bool:
        """False: it was refused."""
        kind = self._rng.choice(self._kinds)
        if self._rng.random() < 0.01:
            kind = Kind([*kind.token_ids, *[5] * self.engine.scheduler.blocks.max_sequence_tokens], (), {})
        request = kind.request(
            request_id, priority=self._rng.choice([-1, 0, 0, 0, 1]), cache_salt=self._rng.choice(["", "", "ann"])
        )
        asked = Asked(
            kind, self.num_steps, [[] for _ in kind.choices], [""] * len(kind.choices), [None] * len(kind.choices)
        )
        try:
            self.engine.add(request)
        except ContextTooLong:
            assert not kind.choices, "a prompt that fits was refused"
            self.counts["refused"] += 1
        except Overloaded:
            assert len(self.engine.scheduler.waiting) + request.sampling.n > MAX_WAITING
            self.counts["refused"] += 1
        else:
            self.asked[request_id] = asked
            self.counts["admitted"] += 1
        return request_id in self.asked

    def _clients_leave(self) -> None:
        while self.asked and self._rng.random() < 0.05:
            request_id = self._rng.choice(list(self.asked))
            self.engine.abort(request_id)
            del self.asked[request_id]
            self.counts["aborted"] += 1
            check_engine(self.engine)

    def _operators_interfere(self) -> None:
        """Caches are reset, embeddings evicted, rows and steps break, an idle engine is put to sleep."""
        chance = self._rng.random()
        if chance < 0.003:
            self.engine.reset_cache()
            self.counts["resets"] += 1
        elif chance < 0.1:
            self.engine.embeddings.drop_idle()
        elif chance < 0.11 and self.asked:
            self._poisoned = self._rng.choice(list(self.asked))
        elif chance < 0.115:
            self._breaks = self._rng.choice(["before", "after"])
        if not self.asked and self._rng.random() < 0.3:
            self.engine.sleep()
            self.engine.wake()
            self.counts["slept"] += 1

    def _wants(self, ref: ImageRef) -> None:
        self._wanted.append((self.num_steps + self._rng.choice([0, 1, 3, 40]), ref))

    def _images_arrive(self) -> None:
        due = [ref for step, ref in self._wanted if step <= self.num_steps]
        self._wanted[:] = [(step, ref) for step, ref in self._wanted if step > self.num_steps]
        for ref in due:
            if self._rng.random() < 0.1:
                self._doomed.update(name for name, asked in self.asked.items() if _shows(asked.kind, ref.image_key))
                self._take(self.engine.image_failed(ref, EncodeFailed("no such luck")))
                self.counts["images failed"] += 1
            else:
                self.engine.put_image(ref.image_key, self._pictures[ref.image_key])
            check_engine(self.engine)

    # --- the engine's work ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        outputs = self.engine.step()
        self.num_steps += 1
        self.metrics.observe_step(self.engine, 0.001)
        if outputs is None:
            assert self._wanted or not self.asked, "nothing can run, nothing is awaited, and yet somebody waits"
        self._take(outputs or [])
        if not self.asked:
            self.metrics.observe_step(self.engine, None)
        check_engine(self.engine)

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            asked = self.asked[output.request_id]  # a request that has left, or is over, hears nothing more
            if isinstance(output, TokenOutput):
                self._take_token(asked, output)
                continue
            del self.asked[output.request_id]
            self.longest_wait = max(self.longest_wait, self.num_steps - asked.added_at_step)
            if isinstance(output, RequestFinished):
                self._check_finished(asked, output)
            elif isinstance(output, RequestFailed):
                assert output.request_id in self._doomed, f"it fails for no reason: {output.error}"
                self.metrics.observe_failed(output)
                self.counts["failed"] += 1

    def _take_token(self, asked: Asked, output: TokenOutput) -> None:
        self.metrics.observe_token(output)
        self.num_tokens += 1
        expected = asked.kind.choices[output.index]
        assert asked.finish_reasons[output.index] is None, "a token after the end"
        got = asked.token_ids[output.index]
        got += output.token_ids
        asked.texts[output.index] += output.text
        assert got == expected.token_ids[: len(got)], f"{output.request_id} says something else at token {len(got)}"
        assert expected.text.startswith(asked.texts[output.index])
        if output.finish is not None:
            asked.finish_reasons[output.index] = output.finish.reason
            self.counts["choices finished"] += 1

    def _check_finished(self, asked: Asked, finished: RequestFinished) -> None:
        self.metrics.observe_finished(finished)
        self.counts["finished"] += 1
        choices = [Choice(*parts) for parts in zip(asked.token_ids, asked.texts, asked.finish_reasons, strict=True)]
        assert choices == asked.kind.choices
        assert finished.num_generated_tokens == sum(len(choice.token_ids) for choice in choices)
        assert finished.num_prompt_tokens == len(asked.kind.token_ids)
        assert 0 <= finished.num_cached_tokens < finished.num_prompt_tokens

    def _spoil_runner(self) -> None:
        """Steps raise and rows become NaN where somebody has asked for it."""
        runner, sampler = self.engine.runner, self.engine.runner._sampler
        execute, sample = runner.execute_model, sampler.sample

        def breaking(batch: Batch) -> list[SampledToken]:
            how, self._breaks = self._breaks, None
            sampled = [] if how == "before" else execute(batch)
            if how is not None:
                self._doomed.update(item.sequence.request_id for item in batch.scheduled)
                self.counts["broken steps"] += 1
                raise RuntimeError("this step was to break")
            return sampled

        def poisoning(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
            rows = [i for i, sequence in enumerate(sequences) if sequence.request_id == self._poisoned]
            if rows and self._poisoned is not None:
                logits[rows] = float("nan")
                self._doomed.add(self._poisoned)
            return sample(logits, sequences)

        runner.execute_model = breaking  # type: ignore[method-assign]
        sampler.sample = poisoning  # type: ignore[method-assign]


# --- making it ------------------------------------------------------------------------------------------------------


def _build(folder: Path, wants: Any, **settings: Any) -> BuiltEngine:
    options: dict[str, Any] = {
        "model": folder,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "speculative": "off",
        "max_num_batched_tokens": 64,
        "max_prefill_tokens_while_decoding": 40,
        "max_waiting_requests": MAX_WAITING,
    }
    return build_engine(TextEngineSettings(**(options | settings)), wants)


def _memory_of_blocks(folder: Path, num_blocks: int) -> str:
    probe = _build(folder, lambda ref: None, kv_cache_memory="1MiB", max_num_seqs=8)
    return str(num_blocks * (probe.engine.runner.kv_cache_bytes // probe.info.num_kv_blocks))


def _pictures(folder: Path) -> dict[str, torch.Tensor]:
    """image key -> [NUM_ROWS, hidden_size]"""
    info = _build(folder, lambda ref: None, kv_cache_memory="1MiB", max_num_seqs=8).info
    generator = torch.Generator().manual_seed(1)
    return {
        f"{number:064d}": torch.randn(NUM_ROWS, info.hidden_size, generator=generator) * 0.5
        for number in range(NUM_PICTURES)
    }


def _shows(kind: Kind, image_key: str) -> bool:
    return any(span.image_key == image_key for span in kind.images)


def _answered_kinds(folder: Path, pictures: dict[str, torch.Tensor], rng: random.Random) -> list[Kind]:
    built = _build(folder, lambda ref: None, kv_cache_memory="8MiB", max_num_seqs=4, enable_prefix_caching=False)
    placeholder = built.prompts._image_token_id
    assert placeholder is not None
    kinds = []
    for _ in range(NUM_KINDS):
        kind = _kind(rng, list(pictures), placeholder)
        kind.choices = _answer_alone(built.engine, kind, pictures)
        if rng.random() < 0.3 and len(kind.choices[0].text) > 6:
            start = rng.randrange(3, len(kind.choices[0].text) - 2)
            kind.sampling["stop"] = (kind.choices[0].text[start : start + 2],)
            kind.choices = _answer_alone(built.engine, kind, pictures)
        kinds.append(kind)
    return kinds


def _kind(rng: random.Random, image_keys: list[str], placeholder: int) -> Kind:
    """Beginnings are shared, lengths lie around the multiples of a block, and some show one picture or two."""
    shared = random.Random(rng.randrange(3))
    token_ids = [shared.choice(VOCABULARY) for _ in range(rng.choice([0, 0, 16, 40, 100]))]
    images: list[ImageSpan] = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        images.append(ImageSpan(rng.choice(image_keys), len(token_ids), NUM_ROWS))
        token_ids += [placeholder] * NUM_ROWS
        token_ids += [rng.choice(VOCABULARY) for _ in range(rng.choice([0, 5]))]
    token_ids += [rng.choice(VOCABULARY) for _ in range(rng.choice([1, 2, 15, 16, 17, 33]))]
    sampling: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 7, 16, 60]), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.5:
        sampling |= {"temperature": 0.0}
    else:
        sampling |= {"temperature": 0.9, "seed": rng.randrange(1000), "n": rng.choice([1, 1, 2, 3])}
    sampling |= rng.choice([{}, {}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"presence_penalty": 0.5}])
    return Kind(token_ids, tuple(images), sampling)


def _answer_alone(engine: Engine, kind: Kind, pictures: dict[str, torch.Tensor]) -> list[Choice]:
    num_choices = SamplingParams(**kind.sampling).n
    token_ids: list[list[int]] = [[] for _ in range(num_choices)]
    texts, reasons = [""] * num_choices, [""] * num_choices
    engine.add(kind.request("alone"))
    for span in kind.images:
        engine.put_image(span.image_key, pictures[span.image_key])
    while engine.num_requests:
        for output in engine.step() or []:
            if isinstance(output, TokenOutput):
                token_ids[output.index] += output.token_ids
                texts[output.index] += output.text
                reasons[output.index] = "" if output.finish is None else output.finish.reason
    return [Choice(*parts) for parts in zip(token_ids, texts, reasons, strict=True)]


def _observations(histogram: Any) -> int:
    [family] = histogram.collect()
    return max(int(sample.value) for sample in family.samples if sample.name.endswith(("_count", "_bucket")))
