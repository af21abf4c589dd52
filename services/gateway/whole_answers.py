"""An answer that is sent as a whole: nobody has seen anything of it before, so an engine may be replaced midway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.gateway.balancer import Replica
from services.gateway.generation import AnswerCut
from shared.wire import ModelInfo

Running = TypeVar("Running")
Answer = TypeVar("Answer")
Avoid = Replica[ModelInfo] | None


async def read_whole(
    start: Callable[[Avoid], Awaitable[Running]], read: Callable[[Running], Awaitable[Answer]]
) -> Answer:
    """What `read` makes of what `start` begins; once more on another engine if the first breaks over it.

    start   gets the engine to be passed over if there is another
    read    closes what it reads. Raises AnswerCut if the engine breaks
    """
    try:
        return await read(await start(None))
    except AnswerCut as cut:
        return await read(await start(cut.replica))
