"""Messages that wait to be published are bounded in bytes and in age, and dropped ones are counted."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.doors.mqtt.outbox import Outbox
from edge_runtime.doors.mqtt.packets import MESSAGE_BYTES, Outgoing


class Dropped(Counter[str]):
    """Counters of an outbox, without the beginning that their names share."""

    def count(self, name: str, count: int = 1) -> None:
        self[name.removeprefix("mqtt_replies_")] += count


def outbox(bound_bytes: int = 1 << 20) -> tuple[Outbox, Dropped]:
    dropped = Dropped()
    return Outbox("dev1", bound_bytes, dropped), dropped


def message(name: str, qos: int = 0, expires_s: float = 100.0, nbytes: int = 0) -> Outgoing:
    return Outgoing(name, b"x" * nbytes, qos, properties=b"", expires_s=expires_s)


def taken(box: Outbox, now_s: float = 0.0, *, with_qos1: bool = True) -> list[str]:
    found = []
    while (each := box.take(now_s, with_qos1=with_qos1)) is not None:
        found.append(each.topic)
    return found


def test_messages_leave_in_the_order_they_came_within_their_qos() -> None:
    box, _ = outbox()
    for name, qos in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        box.add(message(name, qos))
    assert taken(box) == ["b", "d", "a", "c"]
    assert (len(box), box.nbytes) == (0, 0)


def test_qos_1_waits_for_acknowledgements_and_holds_nobody_up() -> None:
    box, _ = outbox()
    box.add(message("first", 1))
    box.add(message("second", 0))
    assert taken(box, with_qos1=False) == ["second"]
    assert not box.has(with_qos1=False)
    assert box.has(with_qos1=True)


def test_a_message_that_is_too_old_is_dropped_and_counted_when_it_would_leave() -> None:
    box, dropped = outbox()
    box.add(message("old", expires_s=1.0))
    box.add(message("young", expires_s=3.0))
    assert taken(box, 2.0) == ["young"]
    assert dropped == {"expired": 1}


def test_a_message_that_grows_old_while_nothing_leaves_is_dropped_wherever_it_stands() -> None:
    box, dropped = outbox()
    for name, qos, expires_s in (("a", 0, 5.0), ("b", 0, 1.0), ("c", 1, 1.0), ("d", 1, 5.0)):
        box.add(message(name, qos, expires_s, nbytes=100))
    box.expire(2.0)
    assert dropped == {"expired": 2}
    assert box.nbytes == 2 * (100 + 1 + MESSAGE_BYTES)
    assert taken(box, 2.0) == ["a", "d"]


def test_a_full_box_drops_its_oldest_and_qos_0_first() -> None:
    box, dropped = outbox(3 * (MESSAGE_BYTES + 101))
    for name, qos in (("promised", 1), ("a", 0), ("b", 0), ("c", 0), ("d", 0)):
        box.add(message(name[:1], qos, nbytes=100))
    assert dropped == {"overflow": 2}
    assert taken(box) == ["c", "d", "p"]


def test_one_message_larger_than_the_bound_is_kept() -> None:
    box, dropped = outbox(10)
    box.add(message("large", nbytes=1000))
    assert taken(box) == ["large"]
    assert not dropped


def test_messages_that_were_not_acknowledged_go_out_first_again() -> None:
    box, _ = outbox()
    box.add(message("new", 1))
    box.put_back([message("first", 1), message("second", 1)])
    assert taken(box) == ["first", "second", "new"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 10), st.integers(0, 2000)),
            st.tuples(st.just("take"), st.booleans(), st.integers(0, 10), st.just(0)),
            st.tuples(st.just("expire"), st.just(0), st.integers(0, 10), st.just(0)),
        ),
        max_size=60,
    )
)
def test_every_message_leaves_or_is_counted_and_the_bytes_agree(steps: list[tuple[str, int, int, int]]) -> None:
    box, dropped = outbox(6000)
    added = left = 0
    for kind, flag, at_s, nbytes in steps:
        if kind == "add":
            box.add(message("m", flag, at_s, nbytes))
            added += 1
        elif kind == "take":
            left += box.take(at_s, with_qos1=bool(flag)) is not None
        else:
            box.expire(at_s)
        assert box.nbytes <= 6000 or len(box) == 1
    assert added == left + dropped.total() + len(box)
    taken(box)
    assert box.nbytes == 0


def test_a_removal_of_a_retained_message_is_published_once_and_waits_for_a_connection() -> None:
    box, _ = outbox()
    box.retain(message("kept", 1, nbytes=1), is_online=True)
    box.retain(message("gone", 1, nbytes=1), is_online=True)
    assert taken(box) == ["kept", "gone"]

    box.retain(message("gone", 1), is_online=False)

    assert taken(box) == ["gone"]
    box.connected()
    assert taken(box) == ["kept"]
