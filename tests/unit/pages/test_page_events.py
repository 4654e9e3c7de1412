"""The last events of a daemon, out of its log."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.pages.events import ADVICE, BUG, KEPT, LONGEST, Events
from edge_runtime.telemetry.logs import configure_logging, log_level, set_log_level
from tests.fakes.clock import FakeClock

log = logging.getLogger("edge_runtime.test")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Iterator[Events]:
    caplog.set_level("INFO", "edge_runtime")
    events = Events()
    events.start()
    yield events
    events.close()


def test_a_warning_is_kept_with_its_fields_and_what_to_do(events: Events) -> None:
    log.warning("rolled back", extra={"model": "digits", "version": 4, "reason": "slower", "share": 0.5})
    (event,) = events.last(5)
    assert (event["level"], event["what"], event["model"], event["version"]) == ("warning", "rolled back", "digits", 4)
    assert event["fields"] == {"reason": "slower", "share": 0.5}
    assert event["advice"].startswith("The release before serves")
    assert event["docs"] == "deploy/runbook.md#a-bad-release-is-in-the-field"


def test_events_do_not_depend_on_what_the_log_leaves_out() -> None:
    root, package = logging.getLogger(), logging.getLogger("edge_runtime")
    before, level, stream = list(root.handlers), package.level, io.StringIO()
    events, other = Events(), logging.NullHandler()  # of another program; it has no level
    try:
        configure_logging("warning", "json", stream, FakeClock())
        package.addHandler(other)
        events.start()
        log.info("loaded")
        log.warning("slow")
        set_log_level(logging.ERROR)
        log.info("swapped")
        log.debug("looked")
        assert log_level() == logging.ERROR
        assert [event["what"] for event in events.last(5)] == ["swapped", "slow", "loaded"]
        assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["slow"]
        events.close()
        assert package.level == logging.ERROR
    finally:
        events.close()
        package.removeHandler(other)
        root.handlers[:] = before
        package.setLevel(level)


def test_a_traceback_asks_for_a_report(events: Events) -> None:
    try:
        raise ValueError("no such thing")
    except ValueError:
        log.exception("a step failed")
    (event,) = events.last(5)
    assert event["what"] == "a step failed: ValueError: no such thing"
    assert (event["advice"], event["docs"]) == BUG


def test_a_line_of_success_has_no_advice(events: Events) -> None:
    log.info("loaded", extra={"model": "camera"})
    (event,) = events.last(5)
    assert (event["level"], event["advice"], event["docs"]) == ("info", "", "")


def test_the_prints_of_models_are_left_out_and_their_warnings_are_not(events: Events) -> None:
    host = logging.getLogger("edge_runtime.hosts.process")
    host.info("%s: %s", "digits", "hello")
    host.warning("%s: %d bytes that it printed are left out", "digits", 7)
    assert [each["level"] for each in events.last(5)] == ["warning"]


def test_a_flood_of_one_warning_is_one_event(events: Events) -> None:
    for _ in range(1000):
        log.warning("a host ended", extra={"model": "digits"})
    assert len(events.last(1000)) == 1


def test_events_are_bounded_in_number_and_in_length(events: Events) -> None:
    for number in range(KEPT + 50):
        log.info("x" * 10_000, extra={"model": f"m{number}", **{f"f{each}": "y" * 10_000 for each in range(50)}})
    kept = events.last(1000)
    assert len(kept) == KEPT
    assert kept[0]["id"] == events.last_id == KEPT + 50
    assert max(len(str(each)) for each in kept) < 20 * LONGEST
    assert [each["id"] for each in events.since(KEPT + 48)] == [KEPT + 49, KEPT + 50]


def test_a_value_that_cannot_be_shown_ends_nothing(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("odd")

    log.info("loaded", extra={"of": Odd()})
    log.info("loaded")
    assert len(events.last(5)) == 1
    capsys.readouterr()


@pytest.mark.parametrize("docs", sorted({docs for _, docs in (*ADVICE.values(), BUG)}))
def test_the_advice_names_documents_and_headings_that_are_there(docs: str) -> None:
    page, _, anchor = docs.partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
    assert not anchor or anchor in anchors
