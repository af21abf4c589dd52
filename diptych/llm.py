"""`LLM`: batches of prompts and pictures answered in this process, without servers.

The same engine and the same vision encoder as the services run, driven by one loop; answers are the same tokens.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from diptych.batch.counter import Counter
from diptych.models import resolve
from diptych.vision import LocalEncoder
from services.text_engine.build import build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.batch import Logprobs
from services.text_engine.core.sequence import PromptLogprob
from services.text_engine.engine_io import EngineRequest, RequestFailed, RequestFinished, TokenOutput
from services.text_engine.prompt import Prompt
from services.vision_encoder.families.interface import PreparedImage
from shared.errors import DiptychError, InvalidRequest
from shared.log import get_logger
from shared.sampling import SamplingParams
from shared.settings import load_settings
from shared.wire.engine import ChatMessage, ImagePart, TextPart
from shared.wire.images import Detail, ImageRef

Image = str | Path | bytes
Message = dict[str, Any]
OnProgress = Callable[[int, int], None]

log = get_logger(__name__)


@dataclass(slots=True)
class Choice:
    """One answer to one prompt.

    logprobs   of each token, if `sampling` asks for them
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """All answers to one prompt, or the reason why there is none.

    prompt_logprobs   of the prompt's tokens but the first, if `sampling` asks for them
    error   the batch goes on when one prompt fails
    """

    choices: list[Choice]
    num_prompt_tokens: int = 0
    num_image_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[PromptLogprob] | None = None
    error: DiptychError | None = None

    @property
    def text(self) -> str:
        """The first answer. Raises the prompt's error if it failed."""
        if self.error is not None:
            raise self.error
        return self.choices[0].text


class LLM:
    """A model loaded into this process.

        llm = LLM("demo")
        [output] = llm.chat([[{"role": "user", "content": ["What is this?", Path("cat.png")]}]])
        print(output.text)

    model      a folder in Hugging Face format, a hub id, "demo" or "smollm2"
    settings   any field of TextEngineSettings: dtype, max_model_len, kv_cache_memory, max_num_seqs ...
    Raises SettingsError for a bad setting, ValueError or OSError for a checkpoint that cannot be loaded.
    """

    def __init__(self, model: str | Path = "demo", **settings: Any) -> None:
        if not structlog.is_configured():  # answers go to stdout; what is said about them does not
            structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
        found = resolve(str(model), say=log.info)
        if settings.get("speculative_model") is not None:
            settings["speculative_model"] = resolve(str(settings["speculative_model"]), say=log.info).folder
        self._wanted: list[ImageRef] = []
        settings.setdefault("max_prefill_tokens_while_decoding", sys.maxsize)  # nobody reads along while it writes
        if settings.get("max_queue_wait_s") is None:
            settings["max_queue_wait_s"] = math.inf  # nor waits for one answer more than for another
        loaded = load_settings(TextEngineSettings, model=found.folder, **settings)
        if loaded.served_model_name is None:
            loaded = loaded.model_copy(update={"served_model_name": found.name})
        self._built = build_engine(loaded, self._wanted.append)
        self._window = 2 * loaded.max_num_seqs
        self._encoder = LocalEncoder(found.folder) if self._built.info.supports_images else None
        self._images: dict[str, tuple[bytes, Detail]] = {}
        self._num_requests = 0

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        show_progress: bool = False,
    ) -> list[Output]:
        """Complete plain prompts (text or token ids), all in one batch; outputs in the prompts' order.

        adapter         name of one of the setting `lora_modules`, to answer in the model's place
        show_progress   on stderr: a bar with rate and time left, or a line now and then where there is no terminal
        """
        vocab_size = self._built.info.vocab_size
        builders = [partial(self._built.prompts.from_prompt, prompt, vocab_size) for prompt in prompts]
        with _told(on_progress, len(builders), shown=show_progress) as tell:
            return self._run(builders, sampling, tell, adapter)

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        show_progress: bool = False,
    ) -> list[Output]:
        """Answer conversations, all in one batch.

        A message is {"role", "content"}; content is a string or a list whose items are strings (text), paths or bytes
        (images), in any order. Else as `generate`.
        """
        builders = [partial(self._prompt, c) for c in conversations]
        with _told(on_progress, len(builders), shown=show_progress) as tell:
            return self._run(builders, sampling, tell, adapter)

    # --- one batch ------------------------------------------------------------------------------------------------

    def _run(
        self,
        builders: Sequence[Callable[[], Prompt]],
        sampling: SamplingParams | None,
        on_progress: OnProgress | None,
        adapter: str | None,
    ) -> list[Output]:
        sampling = sampling or SamplingParams(temperature=0.0)
        outputs: dict[str, Output] = {}
        remaining = iter(builders)
        engine = self._built.engine
        num_finished = 0
        try:
            while len(outputs) < len(builders) or engine.num_requests:
                # A window, not all at once: the engine's queue is bounded, and pictures are encoded when queued.
                while engine.num_requests < self._window and (build := next(remaining, None)) is not None:
                    num_finished += self._start(outputs, build, sampling, adapter)
                num_finished += self._step(outputs)
                self._forget_images()
                if on_progress is not None:
                    on_progress(num_finished, len(builders))
        finally:  # after Ctrl-C as well: what is left in the engine would come up in the next batch
            for request_id in outputs:
                engine.abort(request_id)
            self._wanted.clear()
            self._images.clear()
        return list(outputs.values())

    def _start(
        self,
        outputs: dict[str, Output],
        build: Callable[[], Prompt],
        sampling: SamplingParams,
        adapter: str | None,
    ) -> int:
        """Queue one prompt; returns 1 if it has failed already, else 0."""
        request_id = str(self._num_requests)
        self._num_requests += 1
        output = outputs[request_id] = Output([Choice() for _ in range(sampling.n)])
        try:
            self._add(request_id, build(), sampling, adapter)
        except DiptychError as error:
            output.error = error
            return 1
        return 0

    def _add(self, request_id: str, prompt: Prompt, sampling: SamplingParams, adapter: str | None) -> None:
        self._built.engine.add(
            EngineRequest(
                request_id=request_id,
                token_ids=prompt.token_ids,
                sampling=sampling,
                reasoning=prompt.reasoning,
                images=prompt.images,
                image_refs=prompt.image_refs,
                adapter=adapter,
            )
        )

    def _step(self, outputs: dict[str, Output]) -> int:
        """One engine step; returns how many prompts it finished."""
        num_finished = self._deliver_images(outputs)
        for event in self._built.engine.step() or []:
            output = outputs[event.request_id]
            if isinstance(event, TokenOutput):
                choice = output.choices[event.index]
                choice.text += event.text
                choice.token_ids += event.token_ids
                choice.logprobs += [logprobs for _, logprobs in event.logprobs]
                if event.prompt_logprobs is not None:
                    output.prompt_logprobs = event.prompt_logprobs
                choice.finish_reason = event.finish.reason if event.finish else None
                continue
            num_finished += 1
            if isinstance(event, RequestFinished):
                output.num_prompt_tokens = event.num_prompt_tokens
                output.num_image_tokens = event.num_image_tokens
                output.num_cached_tokens = event.num_cached_tokens
            elif isinstance(event, RequestFailed):
                output.error = event.error
        return num_finished

    def _deliver_images(self, outputs: dict[str, Output]) -> int:
        """Encode what the engine has asked for; a picture that cannot be decoded fails the prompts that show it."""
        num_failed = 0
        ready: list[tuple[ImageRef, PreparedImage]] = []
        wanted, self._wanted[:] = list(self._wanted), []
        for ref in wanted:
            assert self._encoder is not None
            try:
                ready.append((ref, self._encoder.prepare(*self._images[ref.image_key])))
            except DiptychError as error:
                for event in self._built.engine.image_failed(ref, error):
                    outputs[event.request_id].error = error
                    num_failed += 1
        if ready and self._encoder is not None:
            embeddings = self._encoder.encode([image for _, image in ready])
            for (ref, _), rows in zip(ready, embeddings, strict=True):
                self._built.engine.put_image(ref.image_key, rows)
        return num_failed

    def _forget_images(self) -> None:
        """Keep no bytes of images that no prompt in the engine shows: a batch may have more than memory holds."""
        embeddings = self._built.engine.embeddings
        self._images = {key: image for key, image in self._images.items() if embeddings.needs(key)}

    # --- prompts --------------------------------------------------------------------------------------------------

    def _prompt(self, conversation: Sequence[Message]) -> Prompt:
        messages = [(str(message["role"]), _items(message["content"])) for message in _checked(conversation)]
        num_images = sum(isinstance(item, Path | bytes) for _, items in messages for item in items)
        return self._built.prompts.from_messages(
            [
                ChatMessage(role=role, content=[self._part(item, num_images) for item in items])
                for role, items in messages
            ]
        )

    def _part(self, item: object, num_images: int) -> TextPart | ImagePart:
        if isinstance(item, str):
            return TextPart(text=item)
        if isinstance(item, Path):
            item = _read(item)
        if not isinstance(item, bytes):
            raise InvalidRequest(f"content holds a {type(item).__name__}; give strings, paths or image bytes")
        if self._encoder is None:
            raise InvalidRequest("this model takes text only")
        detail = self._encoder.detail(num_images)
        ref = self._encoder.reference(item, detail)
        self._images[ref.image_key] = item, detail
        return ImagePart(image=ref)


@contextlib.contextmanager
def _told(on_progress: OnProgress | None, num_prompts: int, *, shown: bool) -> Iterator[OnProgress | None]:
    """The caller's own callback, and a bar beside it where that is wanted."""
    if not shown:
        yield on_progress
        return
    with Counter(Console(stderr=True, highlight=False), num_prompts) as counter:

        def tell(num_finished: int, num_total: int) -> None:
            for _ in range(num_finished - counter.num_done):
                counter.note()
            if on_progress is not None:
                on_progress(num_finished, num_total)

        yield tell


def _checked(conversation: object) -> list[Message]:
    """Raises InvalidRequest for anything but a list of messages."""
    if not isinstance(conversation, (list, tuple)):
        raise InvalidRequest(f"a conversation is a list of messages, not a {type(conversation).__name__}")
    for message in conversation:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise InvalidRequest(f"{message!r} is no message; give a dict with role and content")
    return list(conversation)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the picture {path} cannot be read: {error.strerror}") from error


def _items(content: object) -> list[object]:
    return list(content) if isinstance(content, (list, tuple)) else [content]
