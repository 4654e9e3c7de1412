"""A real Chromium for scenarios, driven as tests of pages drive it: how soon a page is painted and shows its rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

LIMIT_MS = 60_000.0


def missing() -> str:
    """What keeps pages from being painted here; nothing when they can be."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return "not painted: there is no Chromium. Do: sudo apt-get install chromium"
    return "" if find_spec("playwright") else "not painted: playwright is not installed. Do: make setup"


@contextmanager
def browser() -> Iterator[Any]:
    """A browser; each `paint` opens a profile of its own in it."""
    from tests.contract.browsing import chromium  # skips the test that imports it where there is none

    with chromium() as found:
        yield found


def paint(chromium: Any, url: str, rows: str, count: int) -> tuple[float, float]:
    """Seconds from the visit of a page, by a browser that keeps nothing of before, to its first paint, and to its rows.

    rows: a selector, of which `count` must be there.
    """
    context = chromium.new_context(viewport={"width": 1180, "height": 820})
    try:
        visit = context.new_page()
        visit.set_default_timeout(LIMIT_MS)
        visit.goto(url)
        shown = visit.wait_for_function(
            "([rows, count]) => document.querySelectorAll(rows).length >= count && performance.now()", arg=[rows, count]
        ).json_value()
        first = visit.wait_for_function(
            "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        ).json_value()
        return first / 1e3, shown / 1e3
    finally:
        context.close()
