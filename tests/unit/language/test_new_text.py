from __future__ import annotations

from collections.abc import Sequence

import pytest

from edge_runtime.language.new_text import NewText


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte."""
    return bytes(tokens).decode(errors="replace")


def told(text: str | bytes, stops: Sequence[str] = ()) -> tuple[list[str], str]:
    """What is told of a text byte by byte, and at its end."""
    new = NewText(decode, stops)
    data = text.encode() if isinstance(text, str) else text
    return [new.add([each]) for each in data], new.end()


def test_a_character_is_told_when_its_last_byte_came() -> None:
    assert told("aü😀") == (["a", "", "ü", "", "", "", "😀"], "")


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff\xffa", b"a\xf0\x9f", b"\xc3(", "ok ü".encode() + b"\xe2\x82", b"\x80" * 9]
)
def test_bytes_that_are_no_text_are_told_as_the_whole_is_decoded(data: bytes) -> None:
    parts, rest = told(data)
    assert "".join(parts) + rest == data.decode(errors="replace")


def test_a_replaced_character_of_the_answer_itself_is_told() -> None:
    parts, rest = told("a\N{REPLACEMENT CHARACTER}b")
    assert "".join(parts) + rest == "a\N{REPLACEMENT CHARACTER}b"


def test_a_stop_text_over_several_tokens_is_never_told() -> None:
    parts, rest = told("one STOP two", ["STOP"])
    assert ("".join(parts), rest) == ("one ", "")


def test_a_text_that_only_began_as_a_stop_text_is_told_whole() -> None:
    assert told("a STO b", ["STOP"])[0] == ["a", " ", "", "", "", "STO ", "b"]
    assert told("a STO", ["STOP"]) == (["a", " ", "", "", ""], "STO")


def test_the_first_stop_text_ends_the_answer_and_nothing_follows() -> None:
    new = NewText(decode, ["yz", "xy"])
    assert new.add(list(b"wxyz")) == "w"
    assert (new.is_stopped, new.add([97]), new.end()) == (True, "", "")


def test_a_stop_text_that_repeats_its_beginning_is_found() -> None:
    parts, rest = told("aabaabaaa", ["aabaaa"])
    assert "".join(parts) + rest == "aab"


def test_an_incomplete_character_is_not_taken_for_the_end_of_a_stop_text() -> None:
    parts, rest = told("abü", ["ab\N{REPLACEMENT CHARACTER}"])
    assert "".join(parts) + rest == "abü"


def test_a_decoder_that_strips_the_first_space_keeps_those_between_words() -> None:
    words = [" the", " cat", " sat"]

    def stripping(tokens: Sequence[int]) -> str:
        return "".join(words[each] for each in tokens).removeprefix(" ")

    new = NewText(stripping)
    assert [new.add([each]) for each in (0, 1, 2)] == ["the", " cat", " sat"]
