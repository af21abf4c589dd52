"""The story of a batch: what is not done yet is asked, so many at a time, and each answer written down at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console

from diptych import launch, machine, models
from diptych.batch.answers import BatchOutput, response_part
from diptych.batch.counter import Counter
from diptych.batch.requests import BadLine, BatchInput, Place
from diptych.chat import DEFAULT_SERVER
from diptych.client import Client
from diptych.errors import CommandFailed

# An answer may take minutes on a slow machine: only connecting has a limit.
TIMEOUT: Final = httpx.Timeout(None, connect=5.0)
BUSY: Final = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
LONGEST_PAUSE_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do.

    url           a running server; None: the one on this machine's default port, or one that is started for the batch
    concurrency   requests under way at a time
    num_retries   of a request that a busy or unreachable server turns away
    """

    source: Path
    destination: Path
    image_root: Path | None = None
    url: str | None = None
    model: str = "demo"
    api_key: str | None = None
    concurrency: int = 16
    num_retries: int = 8
    retry_failed: bool = False


def run(plan: Plan, console: Console) -> int:
    """The whole batch; 0 if every line has a good answer, else 1. Raises CommandFailed if it cannot go on.

    Whatever happens, what has been answered stays in the output, and the same command goes on from there.
    """
    batch = BatchInput(plan.source, plan.image_root)
    with BatchOutput(plan.destination, retry_failed=plan.retry_failed) as output:
        waiting = [place for place in batch.places if place.name not in output.done]
        num_before = len(batch.places) - len(waiting)
        if num_before:
            console.print(f"{num_before} of {len(batch.places)} lines are in {plan.destination} already.")
        num_failed_before = len(output.failed.intersection(place.name for place in batch.places))
        if waiting:
            counter = Counter(console, len(batch.places), num_before=num_before)
            counter.num_failed = num_failed_before
            try:
                asyncio.run(_run(plan, batch, waiting, output, counter, console))
            finally:
                _summarise(counter, plan, console)
            return 1 if counter.num_failed else 0
    if num_failed_before:
        console.print(f"{num_failed_before} lines have no good answer; --retry-failed asks them again.")
    return 1 if num_failed_before else 0


def _summarise(counter: Counter, plan: Plan, console: Console) -> None:
    console.print(f"{counter.line()}; {counter.seconds:.1f} s; answers in {plan.destination}")
    if counter.num_done < counter.num_total:
        console.print("The same command goes on from here.")
    elif counter.num_failed:
        console.print(f"{counter.num_failed} lines have no good answer; --retry-failed asks them again.")


async def _run(
    plan: Plan, batch: BatchInput, waiting: list[Place], output: BatchOutput, counter: Counter, console: Console
) -> None:
    url = await asyncio.to_thread(_running_server, plan)
    if url is not None:
        await _ask_all(url, plan, batch, waiting, output, counter)
        return
    console.print(f"No server answers at {DEFAULT_SERVER}: starting one for this batch.")
    system = launch.Plan(model=models.resolve(plan.model, say=console.print), port=machine.free_ports(1)[0])
    async with launch.running(system, console, show_logs=False):
        await _ask_all(system.base_url, plan, batch, waiting, output, counter)


def _running_server(plan: Plan) -> str | None:
    """The server to ask; None: one is to be started. Raises CommandFailed."""
    url = plan.url or DEFAULT_SERVER
    with Client(url, api_key=plan.api_key) as client:
        reason = client.why_not_ready()
    if reason is None:
        return url
    if reason:
        raise CommandFailed(f"the server at {url} is not ready: {reason}")
    if plan.url is not None:
        raise CommandFailed(f"no server answers at {url}")
    return None


async def _ask_all(
    url: str, plan: Plan, batch: BatchInput, waiting: list[Place], output: BatchOutput, counter: Counter
) -> None:
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    is_local = httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")
    limits = httpx.Limits(max_connections=plan.concurrency, max_keepalive_connections=plan.concurrency)
    places = iter(waiting)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT, limits=limits, trust_env=not is_local
    ) as http:
        asker = _Asker(http, plan.num_retries, batch, output, counter)
        with counter, _first_error():
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(plan.concurrency, len(waiting))):
                    workers.create_task(asker.work(places))


@contextlib.contextmanager
def _first_error() -> Iterator[None]:
    """Of several workers that cannot go on one tells why."""
    try:
        yield
    except* CommandFailed as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class _Asker:
    def __init__(
        self, http: httpx.AsyncClient, num_retries: int, batch: BatchInput, output: BatchOutput, counter: Counter
    ) -> None:
        self._http = http
        self._num_retries = num_retries
        self._batch = batch
        self._output = output
        self._counter = counter

    async def work(self, places: Iterator[Place]) -> None:
        """Ask one line after another; the workers share `places`."""
        for place in places:
            await self._answer(place)

    async def _answer(self, place: Place) -> None:
        try:
            request = await asyncio.to_thread(self._batch.request, place)
        except BadLine as error:
            message = f"line {place.number}: {error}"
            self._output.add(place, response=None, error={"code": "invalid_line", "message": message})
            self._counter.note(failed=True)
            return
        response = await self._ask(request.url, request.body)
        part = response_part(response)
        self._output.add(place, response=part, error=None)
        self._counter.note(failed=response.status_code != httpx.codes.OK, num_tokens=_num_tokens(part["body"]))

    async def _ask(self, url: str, body: object) -> httpx.Response:
        """The server's answer. Raises CommandFailed if it cannot be reached, however often it is tried."""
        attempt = 0
        while True:
            response = problem = None
            try:
                response = await self._http.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"the server cannot be reached: {error or type(error).__name__}"
            if response is not None and response.status_code not in BUSY:
                return response
            if attempt == self._num_retries:
                if response is None:
                    raise CommandFailed(f"{problem}; the same command goes on from here")
                return response
            await asyncio.sleep(_pause_s(response, attempt))
            attempt += 1


def _pause_s(response: httpx.Response | None, attempt: int) -> float:
    """As long as the server wants, else twice as long each time; spread, so that not all come back at once."""
    asked = "" if response is None else response.headers.get("retry-after", "")
    seconds = float(asked) if asked.isdigit() else 0.25 * 2.0**attempt
    return min(seconds, LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)  # noqa: S311 - spreads load, guards nothing


def _num_tokens(body: object) -> int:
    usage = body.get("usage") if isinstance(body, dict) else None
    counts = usage if isinstance(usage, dict) else {}
    found = counts.get("completion_tokens") or counts.get("output_tokens") or 0
    return found if isinstance(found, int) else 0
