"""Every protocol on the HTTP door says when a refused request may come again, in seconds and in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from edge_runtime.doors.http.answer import OipAnswer
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.errors import Draining, EdgeRuntimeError, ModelNotFound, QueueFull
from edge_runtime.models.executor import Executor
from edge_runtime.models.model_table import ModelTable
from edge_runtime.ollama.errors import OllamaErrors
from edge_runtime.openai.errors import OpenAiErrors
from edge_runtime.pages.protocol import PageEncoding
from edge_runtime.request.replies import Encoding
from edge_runtime.tensorflow_serving.message import PredictedColumns
from edge_runtime.tensorflow_serving.protocol import TensorFlowErrors
from edge_runtime.torchserve.message import TorchServeAnswer


@dataclass(frozen=True)
class Protocol:
    """A protocol's words. busy: its status where the daemon is healthy and full."""

    name: str
    encoding: Encoding
    busy: int


PROTOCOLS = (
    Protocol("open inference", OipAnswer(), 503),
    Protocol("openai", OpenAiErrors(), 429),
    Protocol("ollama", OllamaErrors(), 429),
    Protocol("tensorflow serving", TensorFlowErrors(), 503),
    Protocol("tensorflow serving, answers", PredictedColumns(None), 503),
    Protocol("torchserve", TorchServeAnswer(ModelTable(Executor()), HttpCall()), 503),
    Protocol("page", PageEncoding(as_text=False), 503),
    Protocol("page, text", PageEncoding(as_text=True), 503),
)


@pytest.fixture(params=PROTOCOLS, ids=lambda each: each.name)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    found: Protocol = request.param
    return found


def refused(protocol: Protocol, error: EdgeRuntimeError) -> tuple[int, dict[str, str]]:
    """Status and headers of a refusal."""
    frames: Frames = protocol.encoding.refusal(error, None)
    status, *lines = b"".join(frames).partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in lines}
    return int(status.split(" ")[1]), headers


def test_a_refusal_says_when_to_come_again_in_seconds_and_in_milliseconds(protocol: Protocol) -> None:
    status, headers = refused(protocol, QueueFull("the queue is full", retry_after_ms=1200.2))
    assert (status, headers["retry-after"], headers["retry-after-ms"]) == (protocol.busy, "2", "1201")


def test_a_refusal_without_a_forecast_says_a_second(protocol: Protocol) -> None:
    status, headers = refused(protocol, Draining("the daemon stops"))
    assert (status, headers["retry-after"], headers["retry-after-ms"]) == (503, "1", "1000")


def test_an_error_that_no_later_try_mends_says_no_time(protocol: Protocol) -> None:
    status, headers = refused(protocol, ModelNotFound("there is no such model"))
    assert status in (400, 404)
    assert not headers.keys() & {"retry-after", "retry-after-ms"}
