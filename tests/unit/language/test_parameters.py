from __future__ import annotations

from typing import Any

import pytest

from edge_runtime.errors import DecodeFailed
from edge_runtime.language.parameters import MAX_STOPS, Parameters, parameters_of


def test_parameters_of_other_models_are_left_out_and_none_means_the_models_own() -> None:
    assert parameters_of({"raw": True, "temperature": None}) == Parameters()


def test_parameters_are_read_with_their_types() -> None:
    given = {"max_tokens": 7, "temperature": 1, "top_p": 0.5, "top_k": 0, "seed": -1, "ignore_eos": True, "logprobs": 0}
    assert parameters_of(given) == Parameters(7, 1.0, 0.5, 0, -1, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize(
    ("given", "found"),
    [("END", ("END",)), ('["a", "b"]', ("a", "b")), ("[/INST]", ("[/INST]",)), (["a", "a", ""], ("a",)), ("", ())],
)
def test_stop_is_one_text_or_a_list_or_its_json_and_empty_texts_end_nothing(
    given: object, found: tuple[str, ...]
) -> None:
    assert parameters_of({"stop": given}).stop == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1 << 70}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": [str(number) for number in range(MAX_STOPS + 1)]}, "stop"),
        ({"stop": "x" * 1000}, "stop"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": 21}, "logprobs"),
        ({"first_token_ms": 0}, "first_token_ms"),
    ],
)
def test_a_bad_parameter_is_named_with_what_was_given(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DecodeFailed, match=f"parameter {words}: "):
        parameters_of(given)
