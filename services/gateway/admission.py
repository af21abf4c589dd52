"""The images of one request after admission: their refs, and the encodes that still run behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from services.gateway.balancer import is_worth_another_replica
from services.gateway.encoding import Encoding
from services.gateway.generation import Generation
from services.gateway.images import at_part
from services.gateway.timeline import ImageTrace, Timeline
from shared.errors import DiptychError, EmbeddingNotFound, InvalidImage, UpstreamFailed
from shared.wire.encoder import Encoded
from shared.wire.images import ImageRef

# When the engine complains about an image, the encoder's own words, which name the part, are at most this far behind.
GRACE_S: Final = 0.5
# An answer may be there before the encoder's last word, which it says once Redis has the embedding; the answer's
# last line, which tells how long encoding took, waits this long for it.
LAST_WORD_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class AdmittedImage:
    """encoding      the encode that this request started or joined; None if the image was known
    admitted_by   see services.gateway.timeline.ImageTrace
    """

    ref: ImageRef
    param: str
    encoding: Encoding | None
    admitted_by: str


class Admission:
    def __init__(self) -> None:
        self.images: list[AdmittedImage] = []
        self._joined: list[Encoding] = []

    @property
    def refs(self) -> list[ImageRef]:
        return [image.ref for image in self.images]

    @property
    def timings(self) -> list[dict[str, float]]:
        """Stages of the encodes that have ended by now."""
        return [e.encoded.result().timings for e in self._joined if e.encoded.done() and not e.encoded.exception()]

    async def tell(self, timeline: Timeline) -> None:
        """Note how every picture came to be known, and when it was admitted and encoded."""
        if running := self._running():
            await asyncio.wait(running, timeout=LAST_WORD_S)
        for number, image in enumerate(self.images):
            timeline.images.append(ImageTrace(image.ref.num_tokens, image.admitted_by))
            if image.encoding is not None:
                _tell_encode(image.encoding, number, timeline)

    def numbers(self) -> dict[str, list[int]]:
        """Image key -> where that picture stands in the request."""
        numbers: dict[str, list[int]] = {}
        for number, image in enumerate(self.images):
            numbers.setdefault(image.ref.image_key, []).append(number)
        return numbers

    def join(self, encoding: Encoding) -> None:
        encoding.join()
        self._joined.append(encoding)

    def release(self, *, abandoned: bool) -> None:
        """This request is over. `abandoned`: nobody is left to read an answer."""
        while self._joined:
            self._joined.pop().leave(abandoned=abandoned)

    async def guard(self, opening: Coroutine[Any, Any, Generation]) -> Generation:
        """The opened generation, unless an encode fails first: then that failure, naming its part.

        Raises EmbeddingNotFound if not the image was at fault but its encoder: then it is worth encoding it again.
        """
        if not self.images:
            return await opening
        task = asyncio.create_task(opening)
        try:
            while not task.done():
                if (failure := self._failure()) is not None:
                    raise failure
                either: list[asyncio.Future[Any]] = [task, *self._running()]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if isinstance(task.exception(), (EmbeddingNotFound, InvalidImage, UpstreamFailed)):
                await self._settle()
                if (failure := self._failure()) is not None:
                    raise failure
            return task.result()
        except BaseException:
            await _discard(task)
            raise

    def _running(self) -> list[asyncio.Future[Encoded]]:
        return [image.encoding.encoded for image in self.images if image.encoding and not image.encoding.encoded.done()]

    def _failure(self) -> DiptychError | None:
        for image in self.images:
            if image.encoding is not None and image.encoding.has_failed:
                error = image.encoding.encoded.exception()
                assert isinstance(error, DiptychError)
                if is_worth_another_replica(error):
                    error = EmbeddingNotFound(error.message)
                return at_part(error, image.param)
        return None

    async def _settle(self) -> None:
        if running := self._running():
            await asyncio.wait(running, timeout=GRACE_S, return_when=asyncio.FIRST_EXCEPTION)


def _tell_encode(encoding: Encoding, number: int, timeline: Timeline) -> None:
    """Its last span ends with its last word: that is where its clock and ours meet."""
    is_complete = encoding.encoded.done() and not encoding.encoded.exception()
    spans = encoding.encoded.result().spans if is_complete else []
    began_at = encoding.encoded_at - max((span.start_s + span.duration_s for span in spans), default=0)
    # We may hear of the admission when the work has begun: it ended when the work began, at the latest.
    work_at = min((began_at + span.start_s for span in spans), default=encoding.admitted_at)
    admitted_at = max(encoding.asked_at, min(encoding.admitted_at, work_at))
    timeline.add("admit", encoding.asked_at, admitted_at, encoding.where, number)
    timeline.add_all(spans, began_at=began_at, where=encoding.where, image=number)


async def _discard(task: asyncio.Task[Generation]) -> None:
    task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, Generation):
        await outcome.aclose()
