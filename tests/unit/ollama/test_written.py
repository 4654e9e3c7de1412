"""Thoughts are parted from an answer however its text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.ollama.written import Thoughts


def parted(pieces: list[str]) -> tuple[str, str]:
    """Answer and thoughts of a text that comes in pieces."""
    thoughts = Thoughts()
    read = [thoughts.read(each, is_last=index == len(pieces) - 1) for index, each in enumerate(pieces)]
    return "".join(each for each, _ in read), "".join(each for _, each in read)


@pytest.mark.parametrize(
    ("text", "answer", "thought"),
    [
        ("<think>\nSo.</think>\n\nYes.", "Yes.", "So."),
        ("\n <think>a < b</thin</think>c</think>", "c</think>", "a < b</thin"),
        ("<think></think>Yes", "Yes", ""),
        ("Yes <think>no</think>", "Yes <think>no</think>", ""),
        ("<thinking>Yes", "<thinking>Yes", ""),
        (" Yes", " Yes", ""),
        ("<think>without end </th", "", "without end </th"),
        ("<thi", "<thi", ""),
        ("", "", ""),
    ],
)
def test_thoughts_are_parted_alike_whole_and_letter_by_letter(text: str, answer: str, thought: str) -> None:
    assert parted([text]) == (answer, thought)
    assert parted([*text, ""]) == (answer, thought)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "a", " ", "\n", "</"]), max_size=8))
def test_thoughts_and_answer_are_the_same_however_a_text_is_cut(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert parted([*pieces, ""]) == parted([text]) == parted([*text, ""])
