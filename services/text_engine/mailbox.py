"""What the engine has said of one request and nobody has read yet, on its way to the task that streams it.

In place of `asyncio.Queue`: a task that wakes up for every token costs more by the queue than by all else it does.
"""

from __future__ import annotations

import asyncio

from services.text_engine.engine_io import EngineOutput, TokenOutput


class Mailbox:
    """For one reader. To be made and used on one event loop. Putting never waits: an answer is bounded by its length.

    What comes after the end of the request is dropped.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs: list[EngineOutput] = []
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: EngineOutput) -> None:
        if self._has_ended:
            return
        self._has_ended = not isinstance(output, TokenOutput)
        self._outputs.append(output)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[EngineOutput]:
        """All that is there, in order; waits until there is something."""
        if not self._outputs:
            assert self._reader is None or self._reader.done(), "two tasks read one mailbox"
            self._reader = self._loop.create_future()
            await self._reader
        outputs, self._outputs = self._outputs, []
        return outputs
