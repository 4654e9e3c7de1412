"""What every error promises: a code, a message of bounded length."""

from __future__ import annotations

import pytest

from edge_runtime.errors import MAX_ERROR_CHARACTERS, LoadFailed, ModelNotFound, shortened


@pytest.mark.parametrize("length", [0, 1, MAX_ERROR_CHARACTERS])
def test_a_message_within_the_bound_is_as_it_was_made(length: int) -> None:
    assert LoadFailed("m" * length).message == "m" * length


@pytest.mark.parametrize("length", [MAX_ERROR_CHARACTERS + 1, 10**6])
def test_a_longer_message_keeps_its_beginning_and_its_end_and_says_how_long_it_was(length: int) -> None:
    message = "what, " + "m" * (length - 17) + ", what to do"
    error = ModelNotFound(message)
    assert len(error.message) == MAX_ERROR_CHARACTERS
    assert str(error) == error.message
    assert error.message.startswith("what, mmm")
    assert f"({len(message)} characters, not all shown)" in error.message
    assert error.message.endswith("mmm, what to do")
    assert shortened(error.message) == error.message
