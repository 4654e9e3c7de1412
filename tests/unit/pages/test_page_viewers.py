"""Who looks at the page: what they are sent, and when they are sent away."""

from __future__ import annotations

from typing import Any

import pytest

from edge_runtime.doors.http.answer import EventStream
from edge_runtime.pages.stream import ALIVE_S, MOST_UNREAD_BYTES, MOST_VIEWERS, OVERVIEW_S, Viewer, Viewers
from tests.fakes.clock import FakeClock


class FakeStream(EventStream):
    """A stream whose reader a test decides about."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[bytes] = []
        self.unread = 0
        self.fate = ""

    @property
    def is_open(self) -> bool:
        return not self.fate

    @property
    def unread_bytes(self) -> int:
        return self.unread

    def send(self, text: bytes) -> None:
        self.texts.append(text)

    def end(self, text: bytes = b"") -> None:
        self.texts.append(text)
        self.fate = "ended"

    def drop(self) -> None:
        self.fate = "dropped"


class Daemon:
    """What the viewers are told."""

    def __init__(self) -> None:
        self.overviews = 0
        self.events: list[dict[str, Any]] = []
        self.clock = FakeClock()
        self.viewers = Viewers(self.clock, self._overview, lambda last: [e for e in self.events if e["id"] > last])

    def look(self, *, is_allowed: bool = True) -> FakeStream:
        stream = FakeStream()
        self.viewers.add(Viewer(stream, lambda: is_allowed), {"started": 1}, len(self.events))
        return stream

    def _overview(self) -> dict[str, Any]:
        self.overviews += 1
        return {"n": self.overviews}


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def test_nothing_is_made_while_nobody_looks(daemon: Daemon) -> None:
    for _ in range(20):
        daemon.clock.advance(OVERVIEW_S)
        daemon.viewers.beat()
    assert daemon.overviews == 0


def test_an_overview_is_made_once_for_all_who_look(daemon: Daemon) -> None:
    first, second = daemon.look(), daemon.look()
    made = daemon.overviews
    daemon.clock.advance(OVERVIEW_S)
    daemon.viewers.beat()
    assert daemon.overviews == made + 1
    assert first.texts[-1] == second.texts[-1] == b'event: overview\ndata: {"n":%d}\n\n' % (made + 1)


def test_an_event_goes_out_at_the_next_beat_and_once(daemon: Daemon) -> None:
    daemon.events.append({"id": 1})
    stream = daemon.look()
    daemon.viewers.beat()
    daemon.events.append({"id": 2})
    daemon.viewers.beat()
    daemon.viewers.beat()
    sent = b"".join(stream.texts)
    assert sent.count(b"event: event\n") == 1
    assert b'{"id":2}' in sent


def test_a_viewer_that_leaves_too_much_unread_is_dropped_and_others_go_on(daemon: Daemon) -> None:
    slow, other = daemon.look(), daemon.look()
    slow.unread = MOST_UNREAD_BYTES + 1
    other.unread = MOST_UNREAD_BYTES
    daemon.clock.advance(OVERVIEW_S)
    daemon.viewers.beat()
    assert (slow.fate, other.fate) == ("dropped", "")
    count = len(slow.texts)
    daemon.clock.advance(OVERVIEW_S)
    daemon.viewers.beat()
    assert len(slow.texts) == count
    assert b"overview" in other.texts[-1]


def test_a_viewer_that_may_look_no_more_is_told_nothing_further(daemon: Daemon) -> None:
    stream = daemon.look(is_allowed=False)
    daemon.clock.advance(OVERVIEW_S)
    daemon.viewers.beat()
    assert stream.fate == "ended"
    assert stream.texts[-1] == b""


def test_viewers_beyond_the_bound_are_refused_until_one_has_left(daemon: Daemon) -> None:
    streams = [daemon.look() for _ in range(MOST_VIEWERS)]
    assert daemon.viewers.is_full
    assert daemon.look().fate == "ended"
    streams[0].fate = "left"
    assert not daemon.viewers.is_full


def test_a_silent_stream_is_kept_alive(daemon: Daemon) -> None:
    stream = daemon.look()
    daemon.viewers.beat()
    daemon.clock.advance(ALIVE_S - OVERVIEW_S / 2)
    daemon.viewers.beat()
    assert stream.texts[-1]


def test_the_end_says_bye_to_all_and_takes_no_more(daemon: Daemon) -> None:
    stream = daemon.look()
    daemon.viewers.close()
    daemon.viewers.close()
    assert stream.texts[-1] == b"event: bye\ndata: {}\n\n"
    assert daemon.look().fate == "ended"
