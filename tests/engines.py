"""Engines on tiny checkpoints for tests, driven step by step in the test's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.text_engine.build import build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.batch import Batch, Logprobs
from services.text_engine.core.sequence import ImageSpan, PromptLogprob
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineOutput, EngineRequest, RequestFailed, RequestFinished, TokenOutput
from shared.errors import DiptychError
from shared.sampling import SamplingParams
from shared.wire.images import ImageRef
from tests.engine_invariants import check_engine


@dataclass
class Answer:
    """Everything one request got. ended: the choices that are over"""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    finished: RequestFinished | None = None
    error: DiptychError | None = None
    num_outputs: int = 0
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] | None = None
    ended: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.error is not None


class EngineDriver:
    """One engine, its answers so far, and invariants checked after every step.

    pictures   image key -> rows [num_tokens, row_size]; delivered as soon as the engine asks unless `hold_images`
    """

    def __init__(self, folder: Path, *, hold_images: bool = False, **settings: Any) -> None:
        options: dict[str, Any] = {
            "model": folder,
            "dtype": "float32",
            "device": "cpu",
            "attention_backend": "reference",
            "kv_cache_memory": "64MiB",
            "num_threads": 1,
            "speculative": "off",  # which drafts pay is measured, and differs from run to run: tests say which
        }
        self.wanted: list[ImageRef] = []
        built = build_engine(TextEngineSettings(**(options | settings)), self.wanted.append)
        self.engine: Engine = built.engine
        self.prompts = built.prompts
        self.info = built.info
        self.row_size = built.num_row_parts * built.info.hidden_size
        self.hold_images = hold_images
        self.pictures: dict[str, torch.Tensor] = {}
        self.answers: dict[str, Answer] = {}
        self.batches: list[Batch] = []
        schedule = self.engine.scheduler.schedule

        def recorded() -> Batch:
            batch = schedule()
            self.batches.append(batch)
            return batch

        self.engine.scheduler.schedule = recorded  # type: ignore[method-assign]

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        images: Sequence[ImageSpan] = (),
        image_refs: tuple[ImageRef, ...] | None = None,
        **sampling: Any,
    ) -> None:
        priority = sampling.pop("priority", 0)
        salt = sampling.pop("cache_salt", "")
        adapter = sampling.pop("adapter", None)
        reasoning = sampling.pop("reasoning", None)
        only_echoes = sampling.pop("only_echoes", False)
        sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | sampling
        if image_refs is None:
            image_refs = tuple(
                ImageRef(
                    image_key=span.image_key, num_tokens=span.num_tokens, width=1, height=1, encoder_url="http://x"
                )
                for span in images
            )
        self.answers[request_id] = Answer()
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                token_ids=list(token_ids),
                sampling=SamplingParams(**sampling),
                images=tuple(images),
                image_refs=image_refs,
                reasoning=reasoning,
                priority=priority,
                cache_salt=salt,
                adapter=adapter,
                only_echoes=only_echoes,
            )
        )

    def step(self) -> bool:
        """False: nothing can run."""
        if not self.hold_images:
            self.deliver_images()
        outputs = self.engine.step()
        self._take(outputs or [])
        self.check_invariants()
        return outputs is not None

    def deliver_images(self) -> None:
        while self.wanted:
            ref = self.wanted.pop()
            self.engine.put_image(ref.image_key, self.pictures[ref.image_key])

    def run(self, max_steps: int = 10_000) -> dict[str, Answer]:
        """Step until every request is over."""
        for _ in range(max_steps):
            if not self.step() and not self.wanted:
                break
        assert all(answer.is_over for answer in self.answers.values()), "requests are stuck"
        return self.answers

    def generate(self, token_ids: Sequence[int], **options: Any) -> Answer:
        """One request from start to end."""
        request_id = f"request-{len(self.answers)}"
        self.add(request_id, token_ids, **options)
        return self.run()[request_id]

    def check_invariants(self) -> None:
        check_engine(self.engine)

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            answer = self.answers[output.request_id]
            if isinstance(output, TokenOutput):
                assert output.index not in answer.ended
                answer.token_ids += output.token_ids
                answer.text += output.text
                answer.num_outputs += 1
                answer.logprobs += output.logprobs
                if output.prompt_logprobs is not None:
                    assert answer.prompt_logprobs is None, "a prompt is told once"
                    answer.prompt_logprobs = output.prompt_logprobs
                if output.finish is not None:
                    answer.finish_reason = output.finish.reason
                    answer.ended.add(output.index)
            elif isinstance(output, RequestFinished):
                answer.finished = output
            elif isinstance(output, RequestFailed):
                answer.error = output.error


DriverFactory = Callable[..., EngineDriver]
