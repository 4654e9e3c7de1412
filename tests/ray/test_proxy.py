"""What stands before Serve's proxy, around one that does what Serve's does when a replica ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

from edge_runtime.ray_serve import proxy

PATH = "/v2/models/mlp/infer"
BODY = [b"half of it, ", b"and the rest"]

App = Callable[[Any, proxy.Receive, proxy.Send], Any]


class Serve:
    """Serve's proxy: as many replicas end as it has `endings`, which send nothing; then it answers with the body."""

    def __init__(self, endings: int = 0) -> None:
        self.endings = endings
        self.began: list[bytes] = []

    async def __call__(self, scope: Any, receive: proxy.Receive, send: proxy.Send) -> None:
        self.began.append(dict(scope["headers"]).get(proxy.BEGAN, b""))
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        if len(self.began) <= self.endings:
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def failing(status: int, *headers: tuple[bytes, bytes]) -> App:
    """Serve's proxy when it answers by itself."""

    async def app(scope: Any, receive: proxy.Receive, send: proxy.Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"words of Serve's"})

    return app


def response_of(app: App, path: str = PATH, body: Iterable[bytes] = BODY) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the response to one request."""
    parts = list(body)
    messages: list[Any] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)} for number, part in enumerate(parts, 1)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(proxy.BEGAN, b"a client's own")]}
    asyncio.run(proxy.OipIngress(app)(scope, receive, send))
    (start,) = (each for each in sent if each["type"] == "http.response.start")
    rest = b"".join(each["body"] for each in sent if each["type"] == "http.response.body")
    return start["status"], dict(start["headers"]), rest


def error_of(app: App, **options: Any) -> tuple[int, str, bytes | None]:
    """Status, code and Retry-After of a refusal."""
    status, headers, body = response_of(app, **options)
    return status, json.loads(body)["code"], headers.get(b"retry-after")


@pytest.mark.parametrize("endings", [0, 1, proxy.TRIES - 1])
def test_request_is_sent_again_whole_where_its_replica_ended(endings: int) -> None:
    serve = Serve(endings)
    assert response_of(serve)[0::2] == (200, b"".join(BODY))
    assert len(serve.began) == endings + 1
    assert len(set(serve.began)) == 1  # the deadline counts from the first
    assert serve.began[0] != b"a client's own"


def test_request_that_ends_its_replicas_is_refused_at_last() -> None:
    serve = Serve(endings=100)
    assert error_of(serve) == (503, "not_ready", b"1")
    assert len(serve.began) == proxy.TRIES


def test_body_that_is_not_kept_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "KEPT_BYTES", 4)
    serve = Serve(endings=1)
    assert error_of(serve) == (503, "not_ready", b"1")
    assert len(serve.began) == 1


def test_timeout_of_serve_is_a_deadline_of_ours() -> None:
    assert error_of(failing(408)) == (504, "deadline_exceeded", None)


def test_want_of_replicas_is_told_with_a_time_to_come_again() -> None:
    assert error_of(failing(503, (b"content-type", b"text/plain"))) == (503, "not_ready", b"1")


@pytest.mark.parametrize(
    "app", [failing(429, (b"content-type", b"text/plain")), failing(503, (b"content-type", b"application/json"))]
)
def test_other_refusals_go_on_as_they_are(app: App) -> None:
    assert response_of(app)[2] == b"words of Serve's"


def test_request_for_no_inference_is_not_sent_again() -> None:
    assert response_of(failing(408), path="/v2/health/ready")[0] == 408
