"""A real Chromium for tests of pages: visits that note what the browser said, and what axe finds against WCAG.

Skips the module that imports it where there is no Chromium (Debian's package `chromium`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from tests.contract.running_daemon import ANSWER_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

if CHROMIUM is None:
    pytest.skip("no Chromium here; install Debian's package: apt-get install chromium", allow_module_level=True)

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1180, "height": 820}
WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
expect.set_options(timeout=ANSWER_S * 1e3)


class Visit:
    """A page, and what its browser said of it. asked: addresses of all requests."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.asked: list[str] = []
        self.faults: list[str] = []
        self.may_fail: tuple[str, ...] = ()
        page.set_default_timeout(ANSWER_S * 1e3)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        place = (message.location or {}).get("url", "")
        if message.type in {"error", "warning"} and not any(each in place for each in self.may_fail):
            self.faults.append(f"{message.type}: {message.text} ({place})")

    def open(self, place: str = "#/") -> Any:
        """Go to a view, and wait until its heading is there."""
        self.page.goto(f"{self.url}/{place}")
        self.page.locator("main h1").first.wait_for(state="attached")
        return self.page

    def check(self) -> None:
        """Nothing went wrong, and no other machine was asked."""
        assert not self.faults
        strange = [each for each in self.asked if not each.startswith((self.url, "blob:", "data:"))]
        assert not strange


@contextmanager
def chromium(*more: str) -> Iterator[Any]:
    """A browser for a file of tests. It goes without a sandbox of its own only where root may not have one.

    more: switches of its command line.
    """
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*options, *more, "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Makes visits, each in a browser's profile of its own, and looks at what went wrong in them."""
    contexts, made = [], []

    def visit(url: str, size: dict[str, int] = DESK, scheme: str = "light", **options: Any) -> Visit:
        context = browser.new_context(viewport=size, color_scheme=scheme, locale="en-GB", **options)
        contexts.append(context)
        made.append(Visit(context.new_page(), url))
        return made[-1]

    yield visit
    for each in contexts:
        each.close()
    for each in made:
        each.check()


def wcag_violations(page: Any) -> list[str]:
    """What axe finds: each rule, and the element that breaks it."""
    found = Axe().run(page, options={"runOnly": {"type": "tag", "values": WCAG}}).response["violations"]
    return [f"{each['id']}: {node['html'][:160]}" for each in found for node in each["nodes"]]
