"""The pages in a real browser: Chromium as the system has it, driven by Playwright, and axe-core's opinion of them.

Pictures of the pages are written where SCREENSHOTS says, and nowhere without it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DESKTOP: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 375, "height": 760}
ACCESSIBILITY = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}}


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with sync_playwright() as playwright:
        # Its own sandbox wants a user namespace, which containers often lack; the pages are ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page of one origin, and what it should never do: fail, break its own policy, or ask anybody else.

    expected   statuses of answers that the test wants to see fail
    """

    page: Page
    origin: str
    expected: set[int] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("console", self._hear)
        self.page.on("request", self._see)

    def _hear(self, message: ConsoleMessage) -> None:
        is_wanted = any(f"status of {status}" in message.text for status in self.expected)
        if message.type in ("error", "warning") and not is_wanted:
            self.complaints.append(f"{message.type}: {message.text}")

    def _see(self, request: Request) -> None:
        if not request.url.startswith((self.origin, "blob:", "data:")):
            self.complaints.append(f"a request to {request.url}")

    def shoot(self, name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")

    def overflow_px(self) -> int:
        """By how much the page is wider than its window."""
        wide: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wide

    def assert_accessible(self) -> None:
        found = Axe().run(self.page, options=ACCESSIBILITY).response["violations"]
        assert not found, "\n".join(f"{each['id']}: {each['help']}\n  {_places(each)}" for each in found)


def _places(violation: dict[str, Any]) -> str:
    return "\n  ".join(f"{node['target']} {node.get('failureSummary', '')}" for node in violation["nodes"][:5])


@contextmanager
def watched_page(browser: Browser, origin: str, **settings: Any) -> Iterator[Watched]:
    """A page in a browser profile of its own. settings   of Playwright's `new_context`"""
    context = browser.new_context(**{"viewport": DESKTOP, "base_url": origin, **settings})
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=origin)
    watched = Watched(context.new_page(), origin)
    try:
        yield watched
        assert not watched.complaints
    finally:
        context.close()
