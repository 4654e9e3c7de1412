"""Which connections are closed because their peers do not read."""

from __future__ import annotations

from typing import Any

from edge_runtime.transports.zmq_transport import REPLY_BYTES, UNREAD_S, UnreadReplies

BOUND = 10 * REPLY_BYTES


class Unread:
    """A connection whose peer does not read."""

    def __init__(self, identity: bytes, unread_since_s: float, unread_bytes: int = 0) -> None:
        self.identity = identity
        self.unread_since_s = unread_since_s
        self.unread_bytes = unread_bytes


def look(replies: UnreadReplies, now_s: float, *unread: Any) -> list[Any]:
    return replies.look(unread, now_s, lambda _: 0)


def test_replies_to_a_peer_that_does_not_read_are_bounded() -> None:
    replies = UnreadReplies(BOUND, 100 * BOUND)
    look(replies, 0.0, Unread(b"deaf", 0.0))
    assert [replies.add(b"deaf", 0) for _ in range(11)] == [True] * 10 + [False]


def test_a_peer_that_reads_again_may_be_sent_as_much_again() -> None:
    replies = UnreadReplies(BOUND, 100 * BOUND)
    look(replies, 0.0, Unread(b"deaf", 0.0))
    replies.add(b"deaf", 0)
    look(replies, 1.0)
    assert not replies.of
    look(replies, 2.0, Unread(b"deaf", 2.0))
    assert [replies.add(b"deaf", 0) for _ in range(11)] == [True] * 10 + [False]


def test_replies_to_all_peers_that_do_not_read_are_bounded_and_the_longest_silent_is_closed_first() -> None:
    replies = UnreadReplies(BOUND, BOUND)
    first, second = Unread(b"first", 0.0, BOUND // 2), Unread(b"second", 1.0, BOUND // 2)
    assert look(replies, 2.0, first, second) == []
    assert not replies.add(b"second", 0)
    second.unread_bytes += 1
    assert look(replies, 3.0, first, second) == [first]


def test_a_peer_that_reads_nothing_for_long_is_closed_however_little_it_costs() -> None:
    replies = UnreadReplies(BOUND, 100 * BOUND)
    long, short = Unread(b"long", 0.0, 1), Unread(b"short", 1.0, 1)
    assert look(replies, UNREAD_S - 0.1, long, short) == []
    assert look(replies, UNREAD_S, long, short) == [long]
