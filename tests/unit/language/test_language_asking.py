"""A text or a chat becomes one request to a language model, and each of its parts is read by its outputs' names."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.language.asking import OUTPUTS, chat_request, least_ms, part_of, text_request, writes_text
from edge_runtime.model_spec import ModelSpec, TensorSpec


def spec(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(each, "INT32" if each == "usage" else "BYTES", (1,)) for each in names)


def servable(inputs=("text", "chat"), outputs=OUTPUTS) -> Any:
    return SimpleNamespace(model="m", spec=ModelSpec(inputs=spec(*inputs), outputs=spec(*outputs)))


def outputs(*values: Any) -> list[np.ndarray[Any, Any]]:
    arrays = []
    for value in values:
        array = np.empty(1, object)
        array[0] = value
        arrays.append(np.array(value, np.int32) if isinstance(value, list) else array)
    return arrays


def part(*values: Any) -> Any:
    """A part as a run leaves it, in the order in which it was asked for."""
    plan = SimpleNamespace(select=lambda arrays: arrays)
    return part_of(SimpleNamespace(plan=plan, outputs=outputs(*values)))  # type: ignore[arg-type]


def test_a_model_with_the_tensors_of_a_language_model_is_one() -> None:
    assert writes_text(servable())
    assert not writes_text(servable(inputs=("text",)))
    assert not writes_text(servable(outputs=("text",)))


def test_a_text_is_one_element_and_asks_for_every_output() -> None:
    header, tensors = text_request(servable(), "Küche".encode(), {"max_tokens": 5}, 20.0)
    assert [(each.name, each.datatype, each.shape) for each in header.inputs] == [("text", "BYTES", (1,))]
    assert (header.model, header.outputs, header.timeout_ms) == ("m", OUTPUTS, 20.0)
    assert header.parameters == {"max_tokens": 5}
    assert [each.tolist() for each in tensors] == [["Küche".encode()]]


def test_a_chat_is_one_element_of_json() -> None:
    chat = {"messages": [{"role": "user", "content": "\N{SNOWMAN} \\ud83d"}], "tools": []}
    header, (tensor,) = chat_request(servable(), chat, {}, None)
    assert [each.name for each in header.inputs] == ["chat"]
    assert json.loads(tensor[0]) == chat


def test_half_a_surrogate_pair_in_a_chat_is_refused() -> None:
    with pytest.raises(DecodeFailed, match="half a surrogate pair"):
        chat_request(servable(), {"messages": [{"role": "user", "content": "\ud800"}]}, {}, None)


def test_a_model_of_another_kind_is_refused_with_what_it_takes() -> None:
    for ask in (
        lambda: text_request(servable(("x",)), b"a", {}, None),
        lambda: chat_request(servable(("x",)), {}, {}, None),
    ):
        with pytest.raises(TensorMismatch, match=r"model m is not a language model: it takes x BYTES \[1\]"):
            ask()


def test_a_part_is_read_with_its_calls_and_its_counts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "on", "arguments": "{}"}}
    found = part(b"a", b"tool_calls", [3, 2, 1], json.dumps([call]).encode(), b"[]")
    assert found == ("a", "tool_calls", 3, 2, 1, [call], [])
    assert part("Kü".encode(), b"", [0, 0, 0], b"[]", b"[]") == ("Kü", "", 0, 0, 0, [], [])


@pytest.mark.parametrize(
    ("values", "wanted"), [((None, None), None), (("250", None), 250.0), ((300, "20.5"), 20.5), ((0,), 0.0)]
)
def test_the_shortest_time_that_is_given_counts(values: tuple[Any, ...], wanted: float | None) -> None:
    assert least_ms("timeout_ms", *values) == wanted


@pytest.mark.parametrize("value", ["soon", True, -1, "nan", "inf", [], {}])
def test_a_time_that_is_not_one_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(DecodeFailed, match=r"first_token_ms: got .* wanted a number of milliseconds"):
        least_ms("first_token_ms", value)
