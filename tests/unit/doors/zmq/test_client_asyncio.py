"""The asyncio client against the same server: results, errors, cancelling, bounds, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.errors import ConfigError, Draining, ModelNotFound, QueueFull, TensorMismatch
from tests.fakes.server import MAX_FRAME_BYTES, FakeServer

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock") as server:
        yield server


def run(server: FakeServer, body: Callable[[AsyncClient], Awaitable[Any]], **arguments: Any) -> Any:
    async def main() -> Any:
        async with AsyncClient(server.endpoint, **arguments) as client:
            return await asyncio.wait_for(body(client), 120)

    return asyncio.run(main())


async def arrived(server: FakeServer, count: int) -> None:
    await asyncio.to_thread(server.wait_for, count)


def test_infer_returns_what_the_model_answered(server: FakeServer) -> None:
    async def body(client: AsyncClient) -> Any:
        return await client.infer("echo", {"a": X, "b": X + 1}, outputs=["b"], timing=True, version=9)

    result = run(server, body)
    assert (result.model, result.version, list(result.outputs)) == ("echo", 9, ["b"])
    assert result.timing.batch_rows == 2
    np.testing.assert_array_equal(result["b"], X + 1)


@pytest.mark.parametrize("shape", [(1, 4), (300_000,)])
def test_many_tasks_each_get_their_own_answers(server: FakeServer, shape: tuple[int, ...]) -> None:
    async def ask(client: AsyncClient, number: int) -> None:
        for round_ in range(10):
            value = np.full(shape, number * 1000 + round_, np.int32)
            got = await client.infer("echo", {"x": value})
            np.testing.assert_array_equal(got["x"], value)

    async def body(client: AsyncClient) -> None:
        await asyncio.gather(*(ask(client, number) for number in range(20)))

    run(server, body, max_in_flight=8)
    assert [request.header.op for request in server.requests].count("infer") == 200


def test_more_replies_than_one_turn_takes_all_arrive(server: FakeServer) -> None:
    async def body(client: AsyncClient) -> None:
        asked = [asyncio.ensure_future(client.infer("held", {"x": X + number})) for number in range(200)]
        await arrived(server, 200)
        server.release(order=lambda held: held[::-1])
        for number, result in enumerate(await asyncio.gather(*asked)):
            np.testing.assert_array_equal(result["x"], X + number)

    run(server, body)


def test_a_daemon_is_reached_over_tcp_as_over_ipc(tmp_path: Path) -> None:
    async def body(client: AsyncClient) -> None:
        np.testing.assert_array_equal((await client.infer("echo", {"x": X}))["x"], X)

    with FakeServer(tmp_path / "unused", uses_tcp=True) as server:
        run(server, body)


def test_errors_are_rebuilt(server: FakeServer) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(QueueFull) as caught:
            await client.infer("busy", {"x": X})
        assert caught.value.retry_after_ms == 12.5
        with pytest.raises(ModelNotFound):
            await client.infer("nobody", {"x": X})
        with pytest.raises(TensorMismatch, match="in one tensor"):
            await client.infer("echo", {"x": np.zeros(MAX_FRAME_BYTES + 1, np.uint8)})

    run(server, body)


def test_a_refused_request_is_sent_again_until_it_is_admitted(server: FakeServer) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.endpoint) as client:
            result = await client.infer("patient", {"x": X}, timeout_ms=5000, retry=True)
            assert np.array_equal(result["x"], X)

    asyncio.run(scenario())
    assert len(server.requests) == 3


def test_lists_take_the_models_datatype(server: FakeServer) -> None:
    async def body(client: AsyncClient) -> None:
        assert (await client.infer("echo", {"x": [[1, 2, 3, 4]]}))["x"].dtype == np.float32

    run(server, body)


def test_no_reply_is_a_timeout_one_second_after_the_requests_own(server: FakeServer) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(TimeoutError, match=r"within 1\.010 s"):
            await client.infer("silent", {"x": X}, timeout_ms=10)
        await client.infer("echo", {"x": X})

    run(server, body)


def test_a_cancelled_call_leaves_the_others_alone(server: FakeServer) -> None:
    async def body(client: AsyncClient) -> None:
        cancelled = asyncio.ensure_future(client.infer("held", {"x": X}))
        kept = asyncio.ensure_future(client.infer("held", {"x": X + 1}))
        await arrived(server, 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        server.release()
        np.testing.assert_array_equal((await kept)["x"], X + 1)
        np.testing.assert_array_equal((await client.infer("echo", {"x": X}))["x"], X)

    run(server, body)


def test_a_call_cancelled_while_it_waits_for_its_turn_takes_none(server: FakeServer) -> None:
    async def body(client: AsyncClient) -> None:
        first = asyncio.ensure_future(client.infer("held", {"x": X}))
        await arrived(server, 1)
        second = asyncio.ensure_future(client.infer("echo", {"x": X}))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        with pytest.raises(TimeoutError, match="max_in_flight"):
            await client.infer("echo", {"x": X}, timeout_ms=-990)
        server.release()
        await first
        await client.infer("echo", {"x": X})

    run(server, body, max_in_flight=1)


def test_nobody_listening_is_said_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient(f"ipc://{tmp_path}/none.sock") as client:
            with pytest.raises(ConnectionError, match="no such socket"):
                await client.infer("echo", {"x": X})
            assert not await client.is_live()
        async with AsyncClient("tcp://127.0.0.1:9") as client:
            with pytest.raises(ConnectionError, match="nobody listens"):
                await client.models()
            with pytest.raises(ConfigError, match="control="):
                await client.load("echo")

    asyncio.run(main())


def test_a_pending_request_fails_at_once_when_the_daemon_goes(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "infer.sock"
        async with AsyncClient(f"ipc://{path}") as client:
            with FakeServer(path) as server:
                asked = asyncio.ensure_future(client.infer("silent", {"x": X}))
                await arrived(server, 1)
            with pytest.raises(ConnectionError, match="lost before an answer"):
                await asyncio.wait_for(asked, 60)
            with FakeServer(path):
                await client.wait_ready(60)
                np.testing.assert_array_equal((await client.infer("echo", {"x": X}))["x"], X)

    asyncio.run(main())


def test_a_pending_request_fails_at_once_when_the_daemon_was_back_before_the_loop_looked(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "infer.sock"
        async with AsyncClient(f"ipc://{path}") as client:
            with FakeServer(path) as server:
                asked = asyncio.ensure_future(client.infer("silent", {"x": X}, timeout_ms=60_000))
                await arrived(server, 1)
            with FakeServer(path):  # and this loop was busy meanwhile
                with contextlib.suppress(ConnectionError):  # lost, where libzmq has not seen the old daemon go yet
                    await client.infer("echo", {"x": X})
                np.testing.assert_array_equal((await client.infer("echo", {"x": X}))["x"], X)
                with pytest.raises(ConnectionError, match="lost before an answer"):
                    await asyncio.wait_for(asked, 60)

    asyncio.run(main())


def test_closing_fails_what_is_pending(server: FakeServer) -> None:
    async def main() -> None:
        client = AsyncClient(server.endpoint)
        asked = asyncio.ensure_future(client.infer("silent", {"x": X}))
        await arrived(server, 1)
        await client.close()
        await client.close()
        with pytest.raises(ConnectionError, match="closed"):
            await asked
        with pytest.raises(ConnectionError, match="closed"):
            await client.infer("echo", {"x": X})

    asyncio.run(main())


def test_ops_return_what_the_daemon_says(tmp_path: Path, server: FakeServer) -> None:
    async def body(client: AsyncClient) -> None:
        assert await client.is_live()
        assert await client.is_ready("echo")
        assert await client.models() == server.results["models"]
        assert (await client.metadata("echo"))["max_batch_rows"] == 32
        assert await client.stats() == {"uptime_s": 1.5}
        with FakeServer(tmp_path / "infer.sock.control", is_control=True) as control:
            assert await client.load("echo") == control.results["load"]
            assert await client.unload("echo", 3) == []
        server.results["ready"] = False
        with pytest.raises(TimeoutError, match="not ready within"):
            await client.wait_ready(0.01)

    run(server, body)


def test_a_client_belongs_to_one_loop(server: FakeServer) -> None:
    client = AsyncClient(server.endpoint)

    async def ask() -> None:
        await client.infer("echo", {"x": X})

    loop = asyncio.new_event_loop()
    loop.run_until_complete(ask())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(ask())
    loop.run_until_complete(client.close())
    loop.close()


def test_a_stopped_daemons_answers_arrive_and_its_unanswered_requests_are_refused_as_draining(
    tmp_path: Path,
) -> None:
    server = FakeServer(tmp_path / "infer.sock")

    async def body(client: AsyncClient) -> list[Any]:
        tasks = [asyncio.ensure_future(client.infer(name, {"x": X})) for name in ["held"] * 100 + ["silent"] * 20]
        await arrived(server, 120)
        server.release()
        server.stop()  # the loop sees nothing until all of it is on the wire, and the connection ended
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(server, body)
    assert [type(each).__name__ for each in found] == ["InferResult"] * 100 + [Draining.__name__] * 20


def test_with_retry_a_request_that_a_stopped_daemon_did_not_run_goes_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    server = FakeServer(path)

    async def body(client: AsyncClient) -> Any:
        asked = asyncio.ensure_future(client.infer("silent", {"x": X}, retry=True))
        await arrived(server, 1)
        server.stop()
        after = FakeServer(path)
        try:
            await arrived(after, 1)
            assert [each.packed for each in after.requests] == [each.packed for each in server.requests]
        finally:
            asked.cancel()
            after.close()

    run(server, body)
