"""Callers who leave before their answer: their requests leave the replica's queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

from edge_runtime.errors import Cancelled
from edge_runtime.ray_serve import infer_async
from tests.ray.conftest import ONE, deploying, sleeping_model, tensor


@pytest.fixture(scope="module")
def slow(proxy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The handle of a replica whose `sleeper` takes two seconds."""
    folder = tmp_path_factory.mktemp("slow")
    sleeping_model(folder / "models", 2.0)
    with deploying(folder / "state") as run:
        yield run(folder / "models")


async def counted(handle: Any) -> dict[str, Any]:
    """The metrics of `sleeper` in the only replica."""
    status = await handle.status.remote()
    found: dict[str, Any] = status["metrics"]["models"]["sleeper"]
    return found


async def waiting(handle: Any) -> float:
    """Rows in its queue."""
    return float((await counted(handle))["queue_rows"])


async def cancelled(handle: Any) -> int:
    """Requests that left its queue."""
    return int((await counted(handle))["refused"].get(Cancelled.code, 0))


def asked(handle: Any, count: int) -> list[asyncio.Task[Any]]:
    """Requests by the handle."""
    return [asyncio.create_task(infer_async(handle, "sleeper", {"x": ONE})) for _ in range(count)]


def test_cancelled_response_leaves_the_queue(slow: Any) -> None:
    async def scenario() -> int:
        before = await cancelled(slow)
        first = asked(slow, 8)  # one runs alone, then four
        while await waiting(slow) < 7:
            pass
        later = asked(slow, 8)
        while await waiting(slow) < 11:
            pass
        for each in later:
            each.cancel()
        await asyncio.gather(*later, return_exceptions=True)
        assert all(each.cancelled() for each in later)
        while await waiting(slow) > 7:
            pass
        answers = await asyncio.gather(*first)
        assert [each["y"].shape for each in answers] == [(1, 4)] * 8
        return await cancelled(slow) - before

    assert asyncio.run(scenario()) == 8


def test_request_of_a_closed_connection_leaves_the_queue(slow: Any, proxy: str) -> None:
    async def scenario() -> int:
        before = await cancelled(slow)
        first = asked(slow, 4)  # one runs alone, then three
        while await waiting(slow) < 3:
            pass
        address = urlsplit(proxy)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps(tensor(ONE)).encode()
        head = (
            f"POST /v2/models/sleeper/infer HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        while await waiting(slow) < 4:
            pass
        writer.close()
        await asyncio.gather(*first)
        while (left := await cancelled(slow) - before) < 1:
            pass
        return left

    assert asyncio.run(scenario()) == 1
