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
from tests.ray.conftest import ENOUGH_MS, Held, deploying, look_until, tensor, waiting


@pytest.fixture(scope="module")
def held(proxy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Held]]:
    """The handle of a replica whose runs wait for a gate, one by one."""
    folder = tmp_path_factory.mktemp("held")
    model = Held(folder)
    with deploying(folder / "state") as run:
        yield run(model.models), model


def asked(handle: Any, model: Held, count: int) -> list[asyncio.Task[Any]]:
    """Requests by the handle."""
    inputs = {"x": model.row}
    return [asyncio.create_task(infer_async(handle, "held", inputs, timeout_ms=ENOUGH_MS)) for _ in range(count)]


async def cancelled(handle: Any) -> int:
    """Requests that left its queue."""
    status = await handle.status.remote()
    return int(status["metrics"]["models"]["held"]["refused"].get(Cancelled.code, 0))


def test_cancelled_response_leaves_the_queue(held: tuple[Any, Held]) -> None:
    handle, model = held
    model.close_gate()

    async def scenario() -> int:
        before = await cancelled(handle)
        first = asked(handle, model, 8)  # one runs
        await look_until(handle, lambda status: waiting(status) == 7)
        later = asked(handle, model, 8)
        await look_until(handle, lambda status: waiting(status) == 15)
        for each in later:
            each.cancel()
        await asyncio.gather(*later, return_exceptions=True)
        assert all(each.cancelled() for each in later)
        await look_until(handle, lambda status: waiting(status) == 7)
        model.open_gate()
        answers = await asyncio.gather(*first)
        assert [each["y"].shape for each in answers] == [(1, 1)] * 8
        return await cancelled(handle) - before

    assert asyncio.run(scenario()) == 8


def test_request_of_a_closed_connection_leaves_the_queue(held: tuple[Any, Held], proxy: str) -> None:
    handle, model = held
    model.close_gate()

    async def scenario() -> int:
        before = await cancelled(handle)
        first = asked(handle, model, 4)  # one runs
        await look_until(handle, lambda status: waiting(status) == 3)
        address = urlsplit(proxy)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps(tensor(model.row)).encode()
        head = f"POST /v2/models/held/infer HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await look_until(handle, lambda status: waiting(status) == 4)
        writer.close()
        await look_until(handle, lambda status: waiting(status) == 3)
        model.open_gate()
        await asyncio.gather(*first)
        return await cancelled(handle) - before

    assert asyncio.run(scenario()) == 1
