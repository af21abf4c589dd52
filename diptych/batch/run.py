"""The story of a batch: what is not done yet is asked, so many at a time, and each answer written down at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console

from diptych import launch, machine, models
from diptych.batch.answers import BatchOutput, response_part
from diptych.batch.counter import Counter
from diptych.batch.requests import BadLine, BatchInput, Place
from diptych.chat import DEFAULT_MODEL, DEFAULT_SERVER, choose_model
from diptych.client import Client, RequestFailed
from diptych.errors import CommandFailed
from shared.errors import Overloaded

# An answer may take minutes on a slow machine: only connecting has a limit.
TIMEOUT: Final = httpx.Timeout(None, connect=5.0)
BUSY: Final = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
LONGEST_PAUSE_S: Final = 30.0
LONGEST_ASKED_S: Final = 600.0
NUM_FAILURES_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do.

    url           a running server; None: the one on this machine's default port, or one that is started for the batch
    model         for lines that name none; None: the server's first, or the demo model if one is started
    concurrency   requests under way at a time
    num_retries   of a request that finds no server, or one that is not ready
    """

    source: Path
    destination: Path
    image_root: Path | None = None
    url: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
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
        counter = Counter(console, len(batch.places), num_before=num_before)
        counter.num_failed = sum(place.name in output.failed for place in batch.places)
        try:
            if waiting:
                asyncio.run(_run(plan, batch, waiting, output, counter, console))
        finally:
            _summarise(counter, plan, batch, output, console)
    return 1 if counter.num_failed else 0


def _summarise(counter: Counter, plan: Plan, batch: BatchInput, output: BatchOutput, console: Console) -> None:
    """How it went, and which lines have no good answer and why."""
    if counter.num_done > counter.num_before:
        console.print(f"{counter.line()}; {counter.seconds:.1f} s; answers in {plan.destination}")
    failures = [(place, output.failed[place.name]) for place in batch.places if place.name in output.failed]
    for place, reason in failures[:NUM_FAILURES_SHOWN]:
        name = "" if place.custom_id is None else f", custom_id {place.custom_id}"
        console.print(f"line {place.number}{name}: {reason}", markup=False, soft_wrap=True)
    if len(failures) > NUM_FAILURES_SHOWN:
        console.print(f"and {len(failures) - NUM_FAILURES_SHOWN} more, each with its reason in {plan.destination}")
    if counter.num_done < counter.num_total:
        console.print("The same command goes on from here.")
    elif failures:
        lines = "1 line has" if len(failures) == 1 else f"{len(failures)} lines have"
        console.print(f"{lines} no good answer; mend the input, then --retry-failed asks again.")


async def _run(
    plan: Plan, batch: BatchInput, waiting: list[Place], output: BatchOutput, counter: Counter, console: Console
) -> None:
    url = await asyncio.to_thread(_running_server, plan)
    if url is not None:
        await _ask_all(url, plan, batch, waiting, output, counter)
        return
    console.print(f"No server answers at {DEFAULT_SERVER}: starting one for this batch.")
    model = models.resolve(plan.model or DEFAULT_MODEL, say=console.print)
    system = launch.Plan(model=model, port=machine.free_ports(1)[0])
    plan = dataclasses.replace(plan, model=None)  # only one is served, perhaps under another name
    async with launch.running(system, console, show_logs=False):
        await _ask_all(system.base_url, plan, batch, waiting, output, counter)


def _running_server(plan: Plan) -> str | None:
    """The server to ask; None: one is to be started. Raises CommandFailed."""
    url = plan.url or DEFAULT_SERVER
    with Client(url, api_key=plan.api_key) as client:
        reason = client.why_not_ready()
        if reason is None:
            if plan.model is not None:
                _check_model(client, plan.model, url)
            return url
    if reason:
        raise CommandFailed(f"the server at {url} is not ready: {reason}")
    if plan.url is not None:
        raise CommandFailed(f"no server answers at {url}; is the address right, and diptych serve running there?")
    return None


def _check_model(client: Client, model: str, url: str) -> None:
    try:
        choose_model(client.models(), model, url)
    except (RequestFailed, httpx.HTTPError) as error:
        raise CommandFailed(f"the server at {url} does not say which models it has: {error}") from None


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
        asker = _Asker(http, plan, batch, output, counter)
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
        self, http: httpx.AsyncClient, plan: Plan, batch: BatchInput, output: BatchOutput, counter: Counter
    ) -> None:
        self._http = http
        self._num_retries = plan.num_retries
        self._model = plan.model
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
            self._output.add(place, response=None, error={"code": "invalid_line", "message": str(error)})
            self._counter.note(failed=True)
            return
        if self._model is not None:
            request.body.setdefault("model", self._model)
        response = await self._ask(request.url, request.body)
        part = response_part(response)
        self._output.add(place, response=part, error=None)
        self._counter.note(failed=response.status_code != httpx.codes.OK, num_tokens=_num_tokens(part["body"]))

    async def _ask(self, url: str, body: object) -> httpx.Response:
        """The server's answer. Raises CommandFailed if it cannot be reached, however often it is tried.

        A server that is full and says when it will have room is waited for as long as it takes: others go first.
        """
        attempt = 0
        while True:
            response = problem = None
            try:
                response = await self._http.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"the server cannot be reached: {error or type(error).__name__}"
            if response is not None and response.status_code not in BUSY:
                return response
            asked_s = None if response is None else _asked_pause_s(response)
            if response is not None and asked_s is not None and _is_full(response):
                await asyncio.sleep(asked_s)
                continue
            if attempt == self._num_retries:
                if response is None:
                    raise CommandFailed(f"{problem}; the same command goes on from here")
                return response
            await asyncio.sleep(_pause_s(attempt) if asked_s is None else min(asked_s, LONGEST_PAUSE_S))
            attempt += 1


def _is_full(response: httpx.Response) -> bool:
    """It works, for others; a server that is not ready may stay so."""
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return True
    body = response_part(response)["body"]
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("code") == Overloaded.code


def _asked_pause_s(response: httpx.Response) -> float | None:
    """How long the server wants to be left alone, or a little longer: not all are to come back at once."""
    asked = response.headers.get("retry-after", "")
    if not (asked.isascii() and asked.isdigit()):
        return None
    return min(float(asked), LONGEST_ASKED_S) * random.uniform(1.0, 1.25)  # noqa: S311 - spreads load, guards nothing


def _pause_s(attempt: int) -> float:
    """Twice as long each time."""
    return min(0.25 * 2.0**attempt, LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)  # noqa: S311 - as above


def _num_tokens(body: object) -> int:
    usage = body.get("usage") if isinstance(body, dict) else None
    counts = usage if isinstance(usage, dict) else {}
    found = counts.get("completion_tokens") or counts.get("output_tokens") or 0
    return found if isinstance(found, int) else 0
