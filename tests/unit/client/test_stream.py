"""The iterator of an answer in parts: their order, its end, and that who leaves it has the rest cancelled."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from edge_runtime.client.core import ClientCore, DaemonCalls
from edge_runtime.client.frames import ReplyDecoder
from edge_runtime.client.in_flight import MOST_PARTS, Call
from edge_runtime.client.stream import ClientStream, stream_arguments
from edge_runtime.errors import QueueFull, RunFailed
from edge_runtime.messages import InferResult, TensorHeader
from edge_runtime.wire.codec import pack_answer, pack_error, part_marks, unpack_request


class Frame:
    def __init__(self, data: bytes) -> None:
        self.bytes = data


def result(part: int, *, final: bool = False, outputs: bool = True) -> InferResult:
    return InferResult("m", 1, {"y": np.zeros(1)} if outputs else {}, part=part, final=final)


def stream_of(*results: InferResult | Exception) -> tuple[ClientStream, list[Call]]:
    """A stream of these, and the calls that it left."""
    left: list[Call] = []
    core = ClientCore(None, DaemonCalls("ipc:///nowhere"))
    coming = iter(results)

    def next_part(call: Call) -> InferResult:
        found = next(coming)
        if isinstance(found, Exception):
            raise found
        return found

    def run(flow: Any) -> Any:
        call = next(flow)
        try:
            flow.send(next_part(call))
        except StopIteration as end:
            return end.value

    asked = stream_arguments(core, "m", {"x": np.zeros(1)}, None, None, None, None, None, None, 0, False, {})
    return ClientStream(core, asked, False, run, next_part, left.append), left


def test_stream_ends_with_its_final_part_and_leaves_nothing() -> None:
    stream, left = stream_of(result(0), result(1), result(2, final=True))
    assert [each.part for each in stream] == [0, 1, 2]
    assert left == []


def test_stream_gives_no_end_without_outputs() -> None:
    stream, left = stream_of(result(0), result(1, final=True, outputs=False))
    assert [each.part for each in stream] == [0]
    assert left == []


def test_stream_with_a_missing_part_is_an_error_and_is_left() -> None:
    stream, left = stream_of(result(0), result(2))
    next(stream)
    with pytest.raises(ConnectionError, match=r"part 2 .* wanted part 1"):
        next(stream)
    assert len(left) == 1
    assert list(stream) == []


def test_stream_that_fails_or_is_closed_is_left_once() -> None:
    stream, left = stream_of(result(0), RunFailed("no"))
    next(stream)
    with pytest.raises(RunFailed):
        next(stream)
    assert len(left) == 1
    stream, left = stream_of(result(0), result(1))
    next(stream)
    stream.close()
    assert (len(left), list(stream)) == (1, [])


def test_stream_sends_texts_chats_and_parameters_as_language_models_take_them() -> None:
    core = ClientCore(None, DaemonCalls("ipc:///nowhere"))
    messages = [{"role": "user", "content": "é"}]
    parameters = {"max_tokens": 3, "stop": ["a"], "seed": None}
    asked = stream_arguments(core, "m", None, None, messages, None, None, None, 20.0, 0, False, parameters)
    call = next(core.begin(asked, retry=False))
    assert isinstance(call, Call)
    header = unpack_request(call.header)
    assert header.inputs == (TensorHeader("chat", "BYTES", (1,)),)
    assert (header.stream, header.parameters, header.timeout_ms) == (True, {"max_tokens": 3, "stop": '["a"]'}, 20.0)
    assert bytes(call.tensors[0])[4:] == b'{"messages": [{"role": "user", "content": "\\u00e9"}]}'
    asked = stream_arguments(core, "m", {"x": np.zeros(1)}, "é", None, None, None, None, None, 0, False, {})
    text = next(core.begin(asked, retry=False))
    assert isinstance(text, Call)
    assert [each.name for each in unpack_request(text.header).inputs] == ["x", "text"]
    assert bytes(text.tensors[1])[4:] == "é".encode()


def part(number: int, *, final: bool = False) -> list[Frame]:
    return [Frame(pack_answer("m", 1, [], marks=part_marks(number, final=final))), Frame(b"")]


def test_stream_puts_pictures_before_the_text_or_into_the_last_message() -> None:
    core = ClientCore(None, DaemonCalls("ipc:///nowhere"))
    png = b"\x89PNG\r\n\x1a\n"
    seen = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}
    told = {"role": "user", "content": [seen, {"type": "text", "text": "What?"}]}

    def sent(text: str | None, chat: Any) -> dict[str, Any]:
        call = next(core.begin(stream_arguments(core, "m", None, text, chat, [png], None, None, None, 0, False, {}),
                               retry=False))  # fmt: skip
        assert isinstance(call, Call)
        assert unpack_request(call.header).inputs == (TensorHeader("chat", "BYTES", (1,)),)
        made: dict[str, Any] = json.loads(bytes(call.tensors[0])[4:])
        return made

    assert sent("What?", None) == {"messages": [told]}
    before = {"role": "system", "content": "Be brief."}
    assert sent(None, {"messages": [before, {"role": "user", "content": "What?"}], "tools": []}) == {
        "messages": [before, told],
        "tools": [],
    }
    with pytest.raises(TypeError, match="which has none"):
        sent(None, [])


def streaming_call() -> Call:
    core = ClientCore(None, DaemonCalls("ipc:///nowhere"))
    asked = stream_arguments(core, "m", {"x": np.zeros(1)}, None, None, None, None, None, None, 0, False, {})
    call = next(core.begin(asked, retry=False))
    assert isinstance(call, Call)
    return call


def test_call_knows_its_last_reply() -> None:
    call = streaming_call()
    assert call.take_part(part(0))
    assert not call.take_part(part(1, final=True))
    assert call.is_over
    assert [call.result().final for _ in range(2)] == [False, True]
    failed = streaming_call()
    assert not failed.take_part([Frame(pack_error(RunFailed("no"))), Frame(b"")])
    with pytest.raises(RunFailed):
        failed.result()
    broken = streaming_call()
    assert not broken.take_part([Frame(b"\xc1"), Frame(b"")])
    whole = streaming_call()  # of a daemon that knows no parts
    assert not whole.take_part([Frame(pack_answer("m", 1, [])), Frame(b"")])
    assert ReplyDecoder().result([Frame(pack_answer("m", 1, [])), Frame(b"")]).final


def test_call_whose_parts_are_not_taken_ends_with_an_error_behind_them() -> None:
    call, frames = streaming_call(), part(0)
    for _ in range(MOST_PARTS):
        assert call.take_part(frames)
    assert not call.take_part(frames)
    assert not call.is_over  # so it is cancelled
    for _ in range(MOST_PARTS + 1):
        call.result()
    with pytest.raises(QueueFull, match="take them sooner"):
        call.result()
