"""What a machine runs out of: room on its disk, memory, and a clock that can be trusted.

Limits are those of `prlimit`, set on running processes and lifted again: no other process feels them, and no rights are
needed. The clock is libfaketime's (Debian: libfaketime), whose file says how far from the truth it is.
"""

from __future__ import annotations

import io
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image

from tests.chaos.cluster import Cluster, restart
from tests.chaos.traffic import GIVE_UP_S, End, Outcome, Traffic
from tests.e2e.system import Service, picture
from tests.gateway_stack import data_url

HOLD_S: Final = 4.0
CLOCK_FILE: Final = "clock"
JUMPS_S: Final = (26 * 3600, -26 * 3600, 0)  # beyond a day, which is how long embeddings and files are kept
LIBRARIES: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
NOISE: Final = (900, 700)  # as a file more bytes than forms are kept in memory with by default
PLAIN: Final = (5000, 4000)  # as pixels 60 MB
LONG_QUESTION: Final = "How many words are there in this? " * 100
NUM_LARGE: Final = 4
LIVENESS_S: Final = 15.0


@contextmanager
def limited(pids: Iterable[int], kind: int, soft: int) -> Iterator[None]:
    """These processes may have so much of it; a process that ends meanwhile is no matter."""
    with ExitStack() as stack:
        for pid in pids:
            before = resource.prlimit(pid, kind)
            stack.callback(_set_limit, pid, kind, before)
            _set_limit(pid, kind, (soft, before[1]))
        yield


def _set_limit(pid: int, kind: int, limits: tuple[int, int]) -> None:
    if Path(f"/proc/{pid}").exists():
        resource.prlimit(pid, kind, limits)


# --- disk -------------------------------------------------------------------------------------------------------------


def fill_disk(cluster: Cluster, traffic: Traffic) -> None:
    """No service can write a byte to any file: no log, no upload that spills to disk."""
    pids = [pid for service in cluster.system.services for pid in (service.pid, *service.workers())]
    with limited(pids, resource.RLIMIT_FSIZE, 0):
        traffic.outcomes.append(_upload(traffic.url))
        time.sleep(HOLD_S)


def _upload(url: str) -> Outcome:
    image = picture(size=NOISE)
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=GIVE_UP_S, trust_env=False) as http:
        answer = http.post("/v1/files", files={"file": ("large.png", image)}, data={"purpose": "vision"})
        whole = answer.is_success and http.get(f"/v1/files/{answer.json()['id']}/content").content == image
    end: End = "right" if whole else "failed" if answer.is_error else "wrong"
    return Outcome("known picture", False, began, time.monotonic(), end, answer.status_code, "" if whole else "upload")


def fill_disk_of_redis(cluster: Cluster, _traffic: Traffic) -> None:
    """It is told to save, cannot, and takes no more writes until it can."""
    cache = cluster.system.cache
    with cache.client() as redis:
        before = redis.config_get("save")["save"], redis.config_get("loglevel")["loglevel"]
        redis.config_set("loglevel", "nothing")  # a line that it cannot write would end it
        redis.config_set("save", "1 1")
        redis.set("diptych:chaos", "a change, so that there is something to save")
        with limited([cache.pid], resource.RLIMIT_FSIZE, 0):
            redis.bgsave()
            time.sleep(HOLD_S)
            assert redis.info("persistence")["rdb_last_bgsave_status"] == "err", "the save was to fail"
        redis.config_set("save", before[0])
        redis.config_set("loglevel", before[1])
        redis.delete("diptych:chaos")


# --- memory -----------------------------------------------------------------------------------------------------------


def starve_encoder(cluster: Cluster, traffic: Traffic) -> None:
    _starve(cluster.system.encoders[0], [_body(traffic, _large_picture()) for _ in range(NUM_LARGE)], traffic)


def starve_engine(cluster: Cluster, traffic: Traffic) -> None:
    _starve(cluster.system.engines[0], [_body(traffic, LONG_QUESTION) for _ in range(NUM_LARGE)], traffic)


def _starve(service: Service, bodies: Sequence[dict[str, Any]], traffic: Traffic) -> None:
    """It and its workers get no more memory than they have, while large requests come besides the usual ones.

    Whoever supervises it starts it again if it ends over that, or if it says nothing for so long that its liveness
    probe would give it up: a thread that found no memory to begin with leaves whoever started it waiting.
    """
    with limited([service.pid, *service.workers()], resource.RLIMIT_AS, 0):
        traffic.outcomes += [_ask(traffic.url, body) for body in bodies]
        time.sleep(HOLD_S)
    given_up = time.monotonic() + LIVENESS_S
    while service.is_running and not service.is_ready() and time.monotonic() < given_up:
        time.sleep(0.1)
    if not service.is_ready():
        restart(service)
        service.wait_until_ready()


def _body(traffic: Traffic, content: Any) -> dict[str, Any]:
    body, _ = traffic.questions.body("text", 0)
    return body | {"messages": [{"role": "user", "content": content}]}


def _large_picture() -> list[dict[str, Any]]:
    """Few bytes, and many pixels in memory."""
    buffer = io.BytesIO()
    Image.new("RGB", PLAIN, tuple(os.urandom(3))).save(buffer, "PNG")
    return [{"type": "image_url", "image_url": {"url": data_url(buffer.getvalue())}}]


def _ask(url: str, body: dict[str, Any]) -> Outcome:
    """What the answer says does not matter here: that there is one, or an error in time."""
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=GIVE_UP_S, trust_env=False) as http:
        try:
            answer = http.post("/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            return Outcome("text", False, began, time.monotonic(), "hung", 0, type(error).__name__)
    end: End = "right" if answer.is_success else "failed"
    code = "" if answer.is_success else answer.json()["error"]["code"]
    return Outcome("text", False, began, time.monotonic(), end, answer.status_code, code)


# --- clock ------------------------------------------------------------------------------------------------------------


def no_false_clock() -> str:
    """Why none can be had here; empty if it can."""
    return "" if LIBRARIES else "libfaketime is not installed"


def with_false_clock(folder: Path) -> dict[str, str]:
    """Variables under which a service's wall clock says what a file in `folder` adds to it. Its timers stay right."""
    file = folder / CLOCK_FILE
    file.write_text("+0\n")
    return {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",  # its name in older releases
    }


def jump(cluster: Cluster, _traffic: Traffic) -> None:
    """All services' clocks go forward, back behind the truth, and right again; Redis keeps its own."""
    file = cluster.folder / CLOCK_FILE
    for offset_s in JUMPS_S:
        file.write_text(f"{offset_s:+d}\n")
        time.sleep(HOLD_S)
