"""Fields of Ollama's bodies mean parameters of a request, or are refused by their names."""

from __future__ import annotations

from typing import Any

import pytest

from edge_runtime.errors import DecodeFailed
from edge_runtime.language.parameters import parameters_of as checked
from edge_runtime.ollama.fields import content_of, model_name, parameters_of, response_format, template_of


def test_options_are_parameters_that_a_language_model_knows() -> None:
    options = {
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 40.0,
        "seed": -1,
        "num_predict": 5,
        "repeat_penalty": 1.5,
        "stop": "x",
    }
    found = parameters_of({"options": options, "logprobs": True})
    assert found == {
        "temperature": 0.5, "top_p": 1, "top_k": 40, "seed": -1, "max_tokens": 5, "repetition_penalty": 1.5,
        "stop": '["x"]', "logprobs": 0,
    }  # fmt: skip
    assert checked(found).stop == ("x",)
    assert parameters_of({"options": {"top_p": 0, "num_predict": -2, "top_k": 0, "seed": None}}) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": []}, "options: got list"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_k": 1.5}}, "options.top_k"),
        ({"options": {"seed": True}}, "options.seed"),
        ({"options": {"stop": [1]}}, "options.stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": "2"}, "top_logprobs"),
    ],
)
def test_options_of_a_wrong_type_are_refused_by_their_names(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DecodeFailed, match=words):
        parameters_of(fields)


@pytest.mark.parametrize(("read", "fields"), [
    (response_format, {"format": "yaml"}), (response_format, {"format": 5}),
    (template_of, {"think": "much"}), (template_of, {"think": 1}),
    (model_name, {}), (model_name, {"model": ""}), (model_name, {"model": 5}),
])  # fmt: skip
def test_other_fields_that_mean_nothing_are_refused(read: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(DecodeFailed):
        read(fields)


def test_pictures_that_are_no_texts_are_refused() -> None:
    with pytest.raises(DecodeFailed, match="images"):
        content_of("x", [5])
