"""A body of OpenAI's becomes one request to a language model, and its parts become a message or chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.doors.http.call import HttpCall
from edge_runtime.errors import (
    DeadlineExceeded,
    DecodeFailed,
    EdgeRuntimeError,
    PromptTooLong,
    QueueFull,
    TensorMismatch,
    Unsupported,
)
from edge_runtime.language.asking import OUTPUTS, BadField
from edge_runtime.messages import RequestHeader
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.openai.chat import chat_requests
from edge_runtime.openai.completions import completion_requests
from edge_runtime.openai.writing import WritingAnswer

NOW_S = 1_800_000_000.9
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "turn_on", "arguments": '{"room": "Küche"}'}}
SCORE = {"token": "He", "logprob": -0.5, "bytes": [72, 101]}
SCORES = {**SCORE, "top_logprobs": [SCORE, {"token": "Ho", "logprob": -1.5, "bytes": [72, 111]}]}


def servable(*inputs: str) -> Any:
    def specs(*names: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(each, "BYTES", (1,)) for each in names)

    return SimpleNamespace(model="m", number=3, spec=ModelSpec(specs(*inputs or ("text", "chat")), specs(*OUTPUTS)))


def asked(
    requests_of: Any = chat_requests, call: HttpCall | None = None, **fields: Any
) -> tuple[Any, RequestHeader, Any]:
    """The encoding of a body's answer, the header of its request, and what it says to the model."""
    encoding, ((header, (tensor,)),) = requests_of(servable(), fields, call or HttpCall(), NOW_S)
    text = tensor[0].decode()
    return encoding, header, json.loads(text) if header.inputs[0].name == "chat" else text


def part(
    text: str = "", reason: str = "", usage=(0, 0, 0), calls: Sequence[Any] = (), scores: Sequence[Any] = ()
) -> Any:
    values = [text.encode(), reason.encode(), None, json.dumps(list(calls)).encode(), json.dumps(list(scores)).encode()]
    outputs = [np.array([each], object) for each in values]
    outputs[2] = np.array(usage, np.int32)
    return SimpleNamespace(plan=SimpleNamespace(select=lambda arrays: arrays), outputs=outputs)


def chunks(encoding: WritingAnswer, *parts: Any) -> list[dict[str, Any]]:
    text = b"".join(encoding.event(each, None) for each in parts).decode()
    events = text.split("\n\n")
    assert events.pop() == ""
    return [json.loads(each.removeprefix("data: ")) for each in events]


def choices(*given: Mapping[str, Any]) -> list[Any]:
    return [each["choices"][0] for each in given if each["choices"]]


def whole(encoding: WritingAnswer, answered: Any) -> Any:
    (frames,) = encoding.answer(answered, None)
    return json.loads(frames.partition(b"\r\n\r\n")[2])


# ---- bodies ---------------------------------------------------------------------------------------------------------


def test_messages_go_to_the_model_as_they_came_and_unknown_fields_stay_behind() -> None:
    messages = [
        {"role": "system", "content": "be brief", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        {"role": "developer", "content": ""},
    ]
    _, header, chat = asked(
        model="m", messages=messages, store=True, metadata={"a": 1}, reasoning_effort="low", user="u"
    )
    assert chat == {"messages": messages}
    assert (header.model, header.outputs, header.parameters, header.timeout_ms) == ("m", OUTPUTS, {}, None)


def test_each_field_that_steers_the_writing_becomes_a_parameter() -> None:
    _, header, _ = asked(
        messages=USER, max_tokens=9, max_completion_tokens=7, temperature=0, top_p=0.5, presence_penalty=-2,
        frequency_penalty=2.0, repetition_penalty=1.1, top_k=4, seed=-1, stop=["\n", "]"], logprobs=True,
        top_logprobs=2, ignore_eos=True, n=1, first_token_ms=250, timeout_ms=900,
    )  # fmt: skip
    assert json.loads(header.parameters["stop"]) == ["\n", "]"]
    assert {key: value for key, value in header.parameters.items() if key != "stop"} == {
        "max_tokens": 7, "temperature": 0.0, "top_p": 0.5, "presence_penalty": -2.0, "frequency_penalty": 2.0,
        "repetition_penalty": 1.1, "top_k": 4, "seed": (1 << 63) - 1, "logprobs": 2, "ignore_eos": True,
        "first_token_ms": 250.0,
    }  # fmt: skip
    assert header.timeout_ms == 900.0


def test_null_is_as_absent() -> None:
    names = (
        "max_tokens", "max_completion_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed",
        "stop", "n", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format",
        "stream", "stream_options", "user", "logit_bias", "first_token_ms", "timeout_ms", "chat_template_kwargs",
    )  # fmt: skip
    encoding, header, chat = asked(messages=USER, **dict.fromkeys(names))
    assert (header.parameters, header.timeout_ms, encoding.is_stream) == ({}, None, False)
    assert chat == {"messages": USER}


def test_one_stop_text_is_a_list_of_one_even_where_it_begins_with_a_bracket() -> None:
    _, header, _ = asked(messages=USER, stop='["x"]')
    assert json.loads(header.parameters["stop"]) == ['["x"]']


def test_a_top_p_of_0_takes_the_best_token_alone() -> None:
    _, header, _ = asked(messages=USER, top_p=0, temperature=1.5)
    assert header.parameters == {"top_p": 1.0, "temperature": 0.0}


def test_the_shorter_deadline_of_header_and_body_counts() -> None:
    call = HttpCall(timeout_ms=500.0, values={"first_token_ms": "40"})
    _, header, _ = asked(call=call, messages=USER, timeout_ms=800, first_token_ms=60)
    assert (header.timeout_ms, header.parameters) == (500.0, {"first_token_ms": 40.0})


def test_tools_and_the_form_of_the_answer_go_to_the_model() -> None:
    named = {"type": "function", "function": {"name": "turn_on"}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": {"type": "object"}}}
    _, _, chat = asked(
        messages=USER, tools=[TOOL], tool_choice=named, parallel_tool_calls=False, response_format=schema,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert chat == {
        "messages": USER, "tools": [TOOL], "tool_choice": named, "parallel_tool_calls": False,
        "response_format": schema, "template": {"enable_thinking": False},
    }  # fmt: skip
    _, _, chat = asked(messages=USER, tools=[TOOL], tool_choice="auto", response_format={"type": "text"})
    assert chat == {"messages": USER, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}
    _, _, chat = asked(messages=USER, tools=[], tool_choice="none")
    assert chat == {"messages": USER}


@pytest.mark.parametrize("prompt", ["Once", ["Once"]])
def test_a_prompt_goes_to_the_model_as_it_is(prompt: Any) -> None:
    _, header, text = asked(
        completion_requests, prompt=prompt, max_tokens=5, logprobs=0, best_of=1, echo=False, suffix=""
    )
    assert (text, header.parameters) == ("Once", {"max_tokens": 5, "logprobs": 0})


MESSAGE = "messages[0]"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hello"}),
        (MESSAGE, {"messages": ["hello"]}),
        (f"{MESSAGE}.role", {"messages": [{"content": "x"}]}),
        (f"{MESSAGE}.role", {"messages": [{"role": "robot", "content": "x"}]}),
        (f"{MESSAGE}.content", {"messages": [{"role": "user"}]}),
        (f"{MESSAGE}.content", {"messages": [{"role": "assistant", "content": 5}]}),
        (f"{MESSAGE}.content", {"messages": [{"role": "user", "content": 5}]}),
        (f"{MESSAGE}.content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
        (f"{MESSAGE}.content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (f"{MESSAGE}.tool_calls", {"messages": [{"role": "assistant", "tool_calls": {}}]}),
        (f"{MESSAGE}.tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}),
        (f"{MESSAGE}.tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}),
        ("tools", {"tools": {}}),
        ("tools[0]", {"tools": [{"type": "web_search"}]}),
        ("tools[0].function", {"tools": [{"type": "function", "function": {}}]}),
        ("tools[0].function.parameters", {"tools": [{"function": {"name": "x", "parameters": []}}]}),
        ("tools[1].function.name", {"tools": [TOOL, TOOL]}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}),
        ("parallel_tool_calls", {"tools": [TOOL], "parallel_tool_calls": "no"}),
        ("response_format", {"response_format": "json"}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}),
        ("chat_template_kwargs", {"chat_template_kwargs": []}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 1.5}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 1.1}),
        ("presence_penalty", {"presence_penalty": 3}),
        ("frequency_penalty", {"frequency_penalty": True}),
        ("seed", {"seed": 1.5}),
        ("seed", {"seed": 1 << 63}),
        ("stop", {"stop": 5}),
        ("stop", {"stop": ["a", ""]}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("n", {"n": 2}),
        ("n", {"n": 0}),
        ("logit_bias", {"logit_bias": {"50256": -100}}),
        ("logprobs", {"logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream": True, "stream_options": True}),
        ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("first_token_ms", {"first_token_ms": "soon"}),
        ("timeout_ms", {"timeout_ms": -1}),
    ],
)
def test_each_wrong_field_of_a_chat_is_refused_by_its_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadField) as caught:
        asked(**{"messages": USER, **fields})
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a", "b"]}),
        ("prompt", {"prompt": [1, 2]}),
        ("prompt", {"prompt": [[1, 2]]}),
        ("prompt", {"prompt": {}}),
        ("prompt", {"prompt": "\ud800"}),
        ("echo", {"echo": True}),
        ("suffix", {"suffix": "}"}),
        ("best_of", {"best_of": 2}),
        ("logprobs", {"logprobs": True}),
        ("logprobs", {"logprobs": 21}),
        ("max_tokens", {"max_tokens": "5"}),
    ],
)
def test_each_wrong_field_of_a_completion_is_refused_by_its_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadField) as caught:
        asked(completion_requests, **{"prompt": "x", **fields})
    assert caught.value.param == param


def test_a_model_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(TensorMismatch, match="model m is not a language model: it takes pixels"):
        chat_requests(servable("pixels"), {"messages": USER}, HttpCall(), NOW_S)


# ---- whole answers --------------------------------------------------------------------------------------------------


def test_a_whole_answer_has_the_message_why_it_ended_and_the_tokens() -> None:
    encoding, _, _ = asked(messages=USER)
    found = whole(encoding, part("Hello", "stop", (7, 5, 4)))
    assert found.pop("id").startswith("chatcmpl-")
    assert found == {
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "m",
        "system_fingerprint": "m-3",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_each_answer_has_an_id_of_its_own() -> None:
    ids = {whole(asked(messages=USER)[0], part("x", "stop"))["id"] for _ in range(100)}
    assert len(ids) == 100


def test_calls_of_tools_stand_in_the_message_whose_content_is_null_without_text() -> None:
    (choice,) = whole(asked(messages=USER)[0], part("", "tool_calls", calls=[CALL]))["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = whole(asked(messages=USER)[0], part("I do.", "tool_calls", calls=[CALL]))["choices"]
    assert choice["message"]["content"] == "I do."
    (choice,) = whole(asked(messages=USER)[0], part("", "stop"))["choices"]
    assert choice["message"]["content"] == ""


def test_probabilities_stand_in_the_form_of_each_path() -> None:
    (choice,) = whole(asked(messages=USER)[0], part("He", "stop", scores=[SCORES]))["choices"]
    assert choice["logprobs"] == {"content": [SCORES], "refusal": None}
    encoding, _, _ = asked(completion_requests, prompt="x")
    (choice,) = whole(encoding, part("HeHe", "length", scores=[SCORES, SCORES]))["choices"]
    assert choice == {
        "index": 0,
        "text": "HeHe",
        "finish_reason": "length",
        "logprobs": {
            "tokens": ["He", "He"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"He": -0.5, "Ho": -1.5}] * 2,
            "text_offset": [0, 2],
        },
    }


# ---- chunks ---------------------------------------------------------------------------------------------------------


def test_the_first_delta_has_the_role_and_no_other_text_is_empty() -> None:
    encoding, _, _ = asked(messages=USER, stream=True)
    assert encoding.is_stream
    found = chunks(encoding, part("He"), part(""), part("llo"), part("", "stop", (3, 2, 0)))
    assert [each["delta"] for each in choices(*found)] == [
        {"role": "assistant", "content": "He"},
        {"content": "llo"},
        {},
    ]
    assert [each["finish_reason"] for each in choices(*found)] == [None, None, "stop"]
    assert len({(each["id"], each["object"], each["created"], each["model"]) for each in found}) == 1
    assert found[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in each for each in found)
    assert encoding.end == b"data: [DONE]\n\n"


def test_the_last_text_comes_before_why_it_ended() -> None:
    encoding, _, _ = asked(messages=USER, stream=True)
    found = choices(*chunks(encoding, part("all", "length")))
    assert [(each["delta"], each["finish_reason"]) for each in found] == [
        ({"role": "assistant", "content": "all"}, None),
        ({}, "length"),
    ]


def test_an_answer_without_text_still_has_its_role() -> None:
    encoding, _, _ = asked(messages=USER, stream=True)
    assert [each["delta"] for each in choices(*chunks(encoding, part("", "stop")))] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_a_part_that_tells_nothing_is_no_bytes() -> None:
    encoding, _, _ = asked(messages=USER, stream=True)
    assert encoding.event(part(""), None) == b""


def test_the_usage_is_a_last_chunk_without_choices_where_it_is_asked_for() -> None:
    encoding, _, _ = asked(messages=USER, stream=True, stream_options={"include_usage": True})
    *before, last = chunks(encoding, part("He"), part("", "stop", (3, 2, 1)))
    assert [each["usage"] for each in before] == [None, None]
    assert last["choices"] == []
    assert (last["usage"]["total_tokens"], last["usage"]["prompt_tokens_details"]) == (5, {"cached_tokens": 1})


def test_each_call_of_a_tool_is_one_chunk_with_its_index_and_id_and_whole_arguments() -> None:
    other = {**CALL, "id": "call_2"}
    encoding, _, _ = asked(messages=USER, tools=[TOOL], stream=True)
    found = choices(*chunks(encoding, part("", calls=[CALL]), part("", "tool_calls", calls=[other])))
    assert [each["delta"] for each in found] == [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, **CALL}]},
        {"tool_calls": [{"index": 1, **other}]},
        {},
    ]
    assert [each["finish_reason"] for each in found] == [None, None, None, "tool_calls"]
    encoding, _, _ = asked(messages=USER, tools=[TOOL], stream=True)
    assert [
        len(each["delta"].get("tool_calls", ())) for each in choices(*chunks(encoding, part("", calls=[CALL, other])))
    ] == [0, 1, 1]


def test_chunks_of_a_completion_have_text_and_the_last_says_why_it_ended() -> None:
    encoding, _, _ = asked(completion_requests, prompt="x", stream=True, stream_options={"include_usage": True})
    *found, last = chunks(encoding, part("He"), part(""), part("y", "stop", (1, 2, 0)))
    assert [(each["text"], each["finish_reason"]) for each in choices(*found)] == [("He", None), ("y", "stop")]
    assert found[0]["id"].startswith("cmpl-")
    assert {each["object"] for each in found} == {"text_completion"}
    assert last["usage"]["completion_tokens"] == 2


def test_offsets_of_tokens_go_on_from_chunk_to_chunk() -> None:
    encoding, _, _ = asked(completion_requests, prompt="x", stream=True, logprobs=1)
    found = choices(*chunks(encoding, part("He", scores=[SCORES]), part("He", "stop", scores=[SCORES])))
    assert [each["logprobs"]["text_offset"] for each in found] == [[0], [2]]


# ---- errors ---------------------------------------------------------------------------------------------------------


def told(encoding: WritingAnswer, error: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and fields of a refusal."""
    (frames,) = encoding.refusal(error, None)
    head, _, body = frames.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = json.loads(body)
    assert set(fields) == {"error"}
    assert set(fields["error"]) == {"message", "type", "param", "code"}
    return int(first.split()[1]), dict(each.split(": ", 1) for each in lines), fields["error"]


@pytest.mark.parametrize(
    ("requests_of", "fields", "param"),
    [(chat_requests, {"messages": USER}, "messages"), (completion_requests, {"prompt": "x"}, "prompt")],
)
def test_a_prompt_beyond_the_context_is_told_by_openais_code(
    requests_of: Any, fields: dict[str, Any], param: str
) -> None:
    encoding, _, _ = asked(requests_of, **fields)
    status, headers, error = told(encoding, PromptTooLong("got 900 tokens, wanted at most 512"))
    assert status == 400
    assert error == {
        "message": "got 900 tokens, wanted at most 512",
        "type": "invalid_request_error",
        "param": param,
        "code": "context_length_exceeded",
    }
    assert headers["x-should-retry"] == "false"


def test_a_full_model_says_when_to_ask_again() -> None:
    status, headers, error = told(asked(messages=USER)[0], QueueFull("full", retry_after_ms=120.4))
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert (headers["retry-after-ms"], headers["Retry-After"], headers["x-should-retry"]) == ("121", "1", "true")


def test_a_deadline_that_passed_is_not_asked_again_by_itself() -> None:
    status, headers, error = told(asked(messages=USER)[0], DeadlineExceeded("too late"))
    assert (status, error["code"], headers["x-should-retry"]) == (504, "deadline_exceeded", "false")


def test_a_request_for_something_that_is_not_offered_is_its_own_fault() -> None:
    status, headers, error = told(asked(messages=USER)[0], Unsupported("no images"))
    assert (status, error["type"], headers["x-should-retry"]) == (400, "invalid_request_error", "false")


def test_an_error_in_a_stream_is_an_event() -> None:
    encoding, _, _ = asked(messages=USER, stream=True)
    data = encoding.failed_event(DeadlineExceeded("too late"))
    assert json.loads(data.removeprefix(b"data: "))["error"] == {
        "message": "too late",
        "type": "server_error",
        "param": None,
        "code": "deadline_exceeded",
    }


# ---- strangers ------------------------------------------------------------------------------------------------------

FIELDS = (
    "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs",
    "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n", "logprobs",
    "top_logprobs", "echo", "suffix", "stream", "stream_options", "logit_bias", "first_token_ms", "timeout_ms",
    "best_of", "ignore_eos",
)  # fmt: skip
WORDS = (
    "role", "content", "type", "text", "function", "name", "tool_calls", "user", "assistant", "json_schema", "schema",
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(WORDS), each, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5), st.booleans())
def test_any_body_is_a_request_or_an_error_of_ours(fields: dict[str, Any], has_messages: bool) -> None:
    beside = {"messages": USER, "prompt": "x"} if has_messages else {}
    for requests_of in (chat_requests, completion_requests):
        with suppress(EdgeRuntimeError):
            asked(requests_of, **{**fields, **beside})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(1000):
        schema = {"items": schema}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(DecodeFailed, match="nested too deeply"):
        asked(messages=USER, response_format=form)
