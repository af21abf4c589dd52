"""The control room in a real browser, over real panels under load: replicas, a killed one, moving blocks and batches.

Skipped without playwright and a Chromium. SCREENSHOTS=docs/images takes the documentation's pictures anew.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CheckpointFactory
from tests.e2e.system import System, picture, running_system, user

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MODELS = Path(__file__).resolve().parents[2] / "models"
WITHIN_MS = 30_000
POLL_MS = 50

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


@pytest.fixture(scope="module")
def system(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("logs")
    small = {"DIPTYCH_ENGINE_KV_CACHE_MEMORY": "256KiB", "DIPTYCH_GATEWAY_STATUS_INTERVAL_S": "0.1"}
    with running_system(checkpoint("llava_clip_llama"), folder, num_engines=2, **small) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Room:
    """The page, and what its console said."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.goto(f"{url}/status")
        self.wait("document.getElementById('live').textContent === 'live'")

    def wait(self, condition: str) -> None:
        """A condition in the page's own words. Asked from outside: the page's policy lets no text be run as code."""
        for _ in range(WITHIN_MS // POLL_MS):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(POLL_MS)
        raise AssertionError(f"it did not happen in time: {condition[:200]}")

    def pixels(self, canvas: str) -> str:
        drawn: str = self.page.evaluate(f"document.getElementById('{canvas}').toDataURL()")
        return drawn

    def text(self, selector: str) -> str:
        found: str = self.page.locator(selector).inner_text()
        return found


@contextmanager
def load(system: System, num_users: int = 4) -> Iterator[None]:
    """Users who ask about old and new pictures until the block ends; refusals do not bother them."""
    is_over = threading.Event()
    shared = picture(1)

    def ask(number: int) -> None:
        turn = 0
        while not is_over.is_set():
            turn += 1
            image = shared if turn % 2 else picture()
            system.post(user(f"Question {turn} of {number}: " + "and then " * turn, image), max_tokens=60)

    users = [threading.Thread(target=ask, args=(number,)) for number in range(num_users)]
    for each in users:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in users:
            each.join()


def test_everything_moves_under_load_and_nothing_is_complained_of(system: System, browser: Any):
    room = Room(browser, system.gateway.url)
    room.wait("document.querySelectorAll('.replica').length === 3")
    assert room.page.locator(".replica.down").count() == 0
    before = {name: room.pixels(name) for name in ("blocks", "steps")}
    with load(system):
        room.wait("document.querySelectorAll('.sequence').length > 0")
        room.wait("parseFloat(document.querySelector('#tiles .value').textContent) > 0")
        room.page.locator(".sequence").first.hover()
        for name, drawn in before.items():
            room.wait(f"document.getElementById('{name}').toDataURL() !== {drawn!r}")
        middle = room.pixels("blocks")
        room.wait(f"document.getElementById('blocks').toDataURL() !== {middle!r}")
        for engine in (2, 1):
            room.page.click(f"#engine-{engine} .look")
            room.wait(f"document.getElementById('chosen').textContent.startsWith('text engine {engine}')")
    assert "holds picture tokens" in room.text("#legend")
    assert room.complaints == []
    room.page.close()


def test_the_figures_are_those_of_the_metrics(system: System, browser: Any):
    system.ask(user("What is it?", picture()))
    system.assert_idle()
    room = Room(browser, system.gateway.url)
    generated = int(sum(engine.metric("generation_tokens_total") for engine in system.engines))
    room.wait(f"document.querySelector('#tiles .more').textContent.startsWith('{generated:,} since')")
    images = int(system.encoder.metric("encoder_images_total", outcome="encoded"))
    room.wait(f"document.querySelector('#encoder-1 .figures').innerText.includes('encoded\\n{images:,}')")
    room.page.close()


def test_a_killed_engine_turns_red_and_its_return_is_seen(system: System, browser: Any):
    room = Room(browser, system.gateway.url)
    try:
        system.engines[1].kill()
        room.wait("document.getElementById('engine-2').classList.contains('down')")
        assert "not ready" in room.text("#engine-2 .badge")
        assert room.text("#num-engines") == "1 of 2 ready"
        assert room.page.locator("#engine-1.down").count() == 0
        assert room.page.locator("#engine-2 :is(svg, dl, .meter)").filter(visible=True).count() == 0
        system.arrange()
        room.wait("!document.getElementById('engine-2').classList.contains('down')")
    finally:
        system.arrange()
        room.page.close()


def test_a_gateway_that_is_gone_is_said_and_its_return_is_seen(system: System, browser: Any):
    room = Room(browser, system.gateway.url)
    try:
        system.gateway.kill()
        room.wait("document.getElementById('live').classList.contains('bad')")
        system.arrange()
        room.wait("document.getElementById('live').textContent === 'live'")
    finally:
        system.arrange()
        room.page.close()


def test_a_paused_page_asks_nothing(system: System, browser: Any):
    room = Room(browser, system.gateway.url)
    room.page.click("#pause")
    asked: list[str] = []
    room.page.on("request", lambda request: asked.append(request.url))
    room.page.evaluate("new Promise((done) => setTimeout(done, 500))")
    assert len(asked) <= 1, "one look may have been under way"
    room.page.click("#pause")
    room.wait("document.getElementById('live').textContent === 'live'")
    room.page.close()


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="asked for by SCREENSHOTS=folder")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_for_the_docs(browser: Any, tmp_path: Path, scheme: str):
    demo = {"DIPTYCH_ENGINE_KV_CACHE_MEMORY": "32MiB", "DIPTYCH_GATEWAY_STATUS_INTERVAL_S": "0.25"}
    with running_system(MODELS / "demo" / "checkpoint", tmp_path, num_encoders=2, num_engines=2, **demo) as system:
        room = Room(browser, system.gateway.url, color_scheme=scheme, viewport={"width": 1280, "height": 800})
        with load(system, num_users=14):
            room.page.wait_for_timeout(15_000)
            room.wait("document.querySelectorAll('.sequence').length > 2")
            room.page.screenshot(path=Path(os.environ["SCREENSHOTS"]) / f"control-room-{scheme}.png", full_page=True)
        room.page.close()
