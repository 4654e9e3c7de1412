"""The synchronous client against a ROUTER that speaks wire v1: results, errors, bounds, lost connections, threads."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from edge_runtime.doors.zmq.client import Client, CurveKeys
from edge_runtime.errors import (
    ConfigError,
    DecodeFailed,
    Draining,
    EdgeRuntimeError,
    Forbidden,
    ModelNotFound,
    QueueFull,
    TensorMismatch,
    Unsupported,
)
from edge_runtime.messages import InferResult, Timing
from tests.fakes.server import MAX_FRAME_BYTES, FakeServer

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock") as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.endpoint) as client:
        yield client


# ---- results --------------------------------------------------------------------------------------------------------


def test_infer_returns_what_the_model_answered(client: Client) -> None:
    result = client.infer("echo", {"x": X})
    assert (result.model, result.version, result.timing) == ("echo", 3, None)
    np.testing.assert_array_equal(result["x"], X)


def test_timing_is_there_when_asked_for(client: Client) -> None:
    assert client.infer("echo", {"x": X}, timing=True).timing == Timing(queue_ms=0.25, run_ms=1.5, batch_rows=2)


def test_outputs_come_in_the_order_asked_for(client: Client) -> None:
    result = client.infer("echo", {"a": X, "b": X + 1, "c": X + 2}, outputs=["c", "a"])
    assert list(result.outputs) == ["c", "a"]
    np.testing.assert_array_equal(result["c"], X + 2)


def test_options_reach_the_daemon(server: FakeServer, client: Client) -> None:
    client.infer("echo", {"x": X}, version=7, timeout_ms=25_000, priority=2, parameters={"tag": "t"})
    header = server.requests[-1].header
    assert (header.version, header.timeout_ms, header.priority) == (7, 25_000.0, 2)
    assert header.parameters == {"tag": "t"}


def test_equal_requests_send_the_same_header_bytes(server: FakeServer, client: Client) -> None:
    client.infer("echo", {"x": X}, timeout_ms=25_000)
    client.infer("echo", {"x": X + 1}, timeout_ms=25_000)
    client.infer("echo", {"x": X}, timeout_ms=25_100)
    first, second, other = server.requests
    assert first.packed == second.packed != other.packed
    assert first.id != second.id


@pytest.mark.parametrize(
    "array",
    [
        X[:, ::2],
        np.asfortranarray(X),
        X.astype(">f4"),
        X[:, ::2].astype(">i2"),
        np.float64(2.5),
        np.array(7, np.int64),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.array([1.5, -2], np.float16),
        np.arange(200_000, dtype=np.float32).reshape(2, -1)[:, ::-1],
        np.arange(100_000, dtype=">u4"),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}{'' if array.flags.c_contiguous else 'strided'}",
)
def test_any_numeric_array_comes_back_equal(client: Client, array: np.ndarray[Any, Any]) -> None:
    got = client.infer("echo", {"x": array})["x"]
    assert got.shape == array.shape
    assert got.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    "value",
    [["né", "b"], np.array(["né", "b"]), np.array(["né".encode(), b"b"]), np.array(["né", b"b"], dtype=object)],
    ids=["list", "text", "bytes", "objects"],
)
def test_strings_travel_as_bytes(server: FakeServer, client: Client, value: Any) -> None:
    assert client.infer("echo", {"text": value})["text"].tolist() == ["né".encode(), b"b"]
    assert server.requests[-1].header.inputs[0].datatype == "BYTES"


def test_lists_take_the_models_datatype(server: FakeServer, client: Client) -> None:
    client.infer("echo", {"x": [[1, 2, 3, 4]]})
    client.infer("echo", {"x": [[1.5, 2, 3, 4]]})
    infers = [request.header for request in server.requests if request.header.op == "infer"]
    assert [header.inputs[0].datatype for header in infers] == ["FP32", "FP32"]
    assert [request.header.op for request in server.requests].count("metadata") == 1


def test_a_fraction_is_not_cut_off_for_an_integer_input(server: FakeServer, client: Client) -> None:
    server.results["metadata"] = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [-1]}]}
    assert client.infer("echo", {"x": [1.5, 2]})["x"].dtype == np.float64
    assert client.infer("echo", {"x": [1, 2]})["x"].dtype == np.int32


def test_a_number_too_large_for_the_models_datatype_is_refused_before_sending(
    server: FakeServer, client: Client
) -> None:
    server.results["metadata"] = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [-1]}]}
    with pytest.raises(TensorMismatch, match="does not fit UINT8"):
        client.infer("echo", {"x": [1, 256]})
    assert client.infer("echo", {"x": [0, 255]})["x"].dtype == np.uint8


@pytest.mark.parametrize("value", [np.array([1 + 2j]), np.array(["2020-01-01"], dtype="datetime64[D]")])
def test_a_dtype_without_a_wire_name_is_refused(client: Client, value: Any) -> None:
    with pytest.raises(Unsupported, match="no OIP datatype"):
        client.infer("echo", {"x": value})


@pytest.mark.parametrize("value", [np.array([1, "a"], dtype=object), [[1, 2], [3]]])
def test_a_value_that_is_not_a_tensor_is_refused(client: Client, value: Any) -> None:
    with pytest.raises(TensorMismatch, match="input 'x'"):
        client.infer("echo", {"x": value})


@pytest.mark.parametrize("length", [4, 100_000])
def test_the_arrays_of_an_answer_are_writable_and_outlive_the_client(server: FakeServer, length: int) -> None:
    sent = np.arange(length, dtype=np.float32)
    with Client(server.endpoint) as client:
        got = client.infer("echo", {"x": sent})["x"]
    got[0] = 42
    assert got[0] == 42
    np.testing.assert_array_equal(got[1:], sent[1:])


def test_a_large_array_may_be_dropped_by_its_owner_while_it_is_on_its_way(client: Client) -> None:
    futures = [client.submit("echo", {"x": np.full(200_000, number, np.float32)}) for number in range(8)]
    for number, future in enumerate(futures):
        got = future.result(timeout=60)["x"]
        assert got[0] == got[-1] == number


def test_a_daemon_is_reached_over_tcp_as_over_ipc(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "unused", uses_tcp=True) as server, Client(server.endpoint) as client:
        large = np.arange(300_000, dtype=np.float32)
        np.testing.assert_array_equal(client.infer("echo", {"x": large})["x"], large)
        lost = client.submit("silent", {"x": X})
        server.wait_for(3)
        server.close()
        assert isinstance(lost.exception(timeout=60), ConnectionError)
        with pytest.raises(ConnectionError, match="nobody listens"):
            client.infer("echo", {"x": X})


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_refusal_is_rebuilt_with_its_forecast(client: Client) -> None:
    with pytest.raises(QueueFull, match="64 rows wait") as caught:
        client.infer("busy", {"x": X})
    assert caught.value.retryable
    assert caught.value.retry_after_ms == 12.5


def test_a_refused_request_is_sent_again_until_it_is_admitted(server: FakeServer, client: Client) -> None:
    result = client.infer("patient", {"x": X}, timeout_ms=5000, retry=True)

    assert np.array_equal(result["x"], X)
    first, second, third = [each.header.timeout_ms or 0.0 for each in server.requests if each.header.op == "infer"]
    assert first == 5000
    assert second <= first - 12.5
    assert third <= second - 12.5


def test_a_refused_request_is_sent_again_until_its_deadline_and_no_longer(server: FakeServer, client: Client) -> None:
    with pytest.raises(QueueFull):
        client.infer("busy", {"x": X}, timeout_ms=600, retry=True)

    left_ms = [each.header.timeout_ms or 0.0 for each in server.requests if each.header.op == "infer"]
    assert len(left_ms) >= 2
    assert all(after <= before - 12.5 for before, after in pairwise(left_ms))
    assert min(left_ms) > 0


def test_a_request_that_no_other_try_can_mend_is_not_sent_again(server: FakeServer, client: Client) -> None:
    with pytest.raises(ModelNotFound):
        client.infer("nobody", {"x": X}, retry=True)

    assert len([each for each in server.requests if each.header.op == "infer"]) == 1


def test_an_unknown_model_is_an_error_of_its_own(client: Client) -> None:
    with pytest.raises(ModelNotFound):
        client.infer("nobody", {"x": X})


def test_a_reply_that_is_none_is_an_error_of_the_call_alone(client: Client) -> None:
    with pytest.raises(DecodeFailed):
        client.infer("garbage", {"x": X})
    with pytest.raises(TensorMismatch, match="announces 2 outputs"):
        client.infer("short", {"x": X})
    np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)


def test_no_reply_is_a_timeout_one_second_after_the_requests_own(client: Client) -> None:
    with pytest.raises(TimeoutError, match=r"within 1\.010 s"):
        client.infer("silent", {"x": X}, timeout_ms=10)
    np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)


def test_the_clients_own_timeout_is_the_default(server: FakeServer) -> None:
    with Client(server.endpoint, timeout_ms=20_000) as client:
        client.infer("echo", {"x": X})
        client.infer("echo", {"x": X}, timeout_ms=30_000)
    with Client(server.endpoint, timeout_ms=20) as client, pytest.raises(TimeoutError, match=r"within 1\.020 s"):
        client.submit("silent", {"x": X}).result(timeout=60)
    assert [request.header.timeout_ms for request in server.requests] == [20_000, 30_000, 20]


def test_the_reply_to_a_request_given_up_is_not_taken_for_anothers(server: FakeServer, client: Client) -> None:
    with pytest.raises(TimeoutError):
        client.infer("held", {"x": X}, timeout_ms=0)
    server.release()
    np.testing.assert_array_equal(client.infer("echo", {"x": X + 1})["x"], X + 1)


def test_a_tensor_above_the_daemons_limit_is_refused_before_sending(server: FakeServer, client: Client) -> None:
    large = np.zeros(MAX_FRAME_BYTES + 1, np.uint8)
    for _ in range(2):
        with pytest.raises(TensorMismatch, match=f"at most {MAX_FRAME_BYTES} in one tensor"):
            client.infer("echo", {"x": large})
    assert client.infer("echo", {"x": large[1:]})["x"].nbytes == MAX_FRAME_BYTES
    assert [request.header.op for request in server.requests] == ["metadata", "infer"]


def test_nobody_listening_is_said_at_once_with_what_to_do(tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/none.sock") as client:
        with pytest.raises(ConnectionError, match=r"no such socket; start one with `edge-runtime serve"):
            client.infer("echo", {"x": X})
        assert not client.is_live()
        assert not client.is_ready()
    with Client("tcp://127.0.0.1:9") as client, pytest.raises(ConnectionError, match="nobody listens"):
        client.models()


def test_a_daemon_that_starts_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    with Client(f"ipc://{path}") as client:
        assert not client.is_live()
        with FakeServer(path):
            assert client.is_live()
            np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)


def test_a_pending_request_fails_at_once_when_the_daemon_goes(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    with Client(f"ipc://{path}") as client:
        with FakeServer(path) as server:
            futures = [client.submit("silent", {"x": X}) for _ in range(3)]
            server.wait_for(3)
        for future in futures:
            with pytest.raises(ConnectionError, match="lost before an answer"):
                future.result(timeout=60)
        with pytest.raises(ConnectionError, match="no daemon answers"):
            client.infer("echo", {"x": X})
        with FakeServer(path):
            client.wait_ready(10)
            np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)


def test_a_pending_request_fails_at_once_when_the_daemon_was_back_before_anybody_looked(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    server = FakeServer(path)
    looks, is_held = threading.Event(), threading.Event()
    try:
        with Client(f"ipc://{path}") as client:
            pending = client.submit("silent", {"x": X}, timeout_ms=60_000)
            held = client.submit("held", {"x": X})

            def hold(_: Future[InferResult]) -> None:
                is_held.set()
                looks.wait(60)

            held.add_done_callback(hold)
            server.wait_for(2)
            server.release()
            assert is_held.wait(60), "the thread that reads is kept from reading"
            server.close()
            server = FakeServer(path)
            late = client.submit("echo", {"x": X})
            while not server.has(1, within_s=0.1):  # lost with the old daemon, where libzmq has not seen it go yet
                late = client.submit("echo", {"x": X})
            looks.set()
            with pytest.raises(ConnectionError, match="lost before an answer"):
                pending.result(timeout=60)
            np.testing.assert_array_equal(late.result(timeout=60)["x"], X)
    finally:
        looks.set()
        server.close()


def test_an_idle_client_finds_a_daemon_that_was_restarted_as_often_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    with Client(f"ipc://{path}") as client:
        for _ in range(3):
            with FakeServer(path):
                np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)
            assert not client.is_live()


def test_a_stopped_daemons_answers_arrive_and_its_unanswered_requests_are_refused_as_draining(
    tmp_path: Path,
) -> None:
    with FakeServer(tmp_path / "infer.sock") as server, Client(server.endpoint) as client:
        held = [client.submit("held", {"x": X}) for _ in range(100)]
        silent = [client.submit("silent", {"x": X}) for _ in range(20)]
        server.wait_for(120)
        server.release()
        server.stop()
        for future in held:
            np.testing.assert_array_equal(future.result(30)["x"], X)
        for future in silent:
            with pytest.raises(Draining, match="stopped before it ran this request"):
                future.result(30)


def test_answers_that_came_before_the_end_of_a_connection_are_not_lost_with_it(tmp_path: Path) -> None:
    for _ in range(5):
        with FakeServer(tmp_path / "infer.sock") as server, Client(server.endpoint) as client:
            futures = [client.submit("held", {"x": X}) for _ in range(200)]
            server.wait_for(200)
            server.release()
            server.close(linger_ms=10_000)  # no notice: a daemon that ends otherwise
            assert [future.exception(30) for future in futures] == [None] * 200


def test_with_retry_a_request_that_a_stopped_daemon_did_not_run_goes_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    results: list[InferResult] = []
    with FakeServer(path) as server, Client(server.endpoint) as client:
        thread = threading.Thread(
            target=lambda: results.append(client.infer("held", {"x": X}, retry=True, timeout_ms=20_000))
        )
        thread.start()
        server.wait_for(1)
        server.stop()
        # Nobody is there, or this one was on its way when the server left; it is not to be tried again.
        with pytest.raises((ConnectionError, Draining)):
            client.infer("echo", {"x": X})
        with FakeServer(path) as after:
            after.wait_for(1)
            after.release()
            thread.join(30)
            assert len(after.requests) == len(server.requests) == 1
            assert after.requests[0].header.timeout_ms < 20_000
    np.testing.assert_array_equal(results[0]["x"], X)


def test_with_retry_a_request_whose_daemon_was_killed_is_not_sent_again(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "infer.sock") as server, Client(server.endpoint) as client:
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                client.infer("silent", {"x": X}, retry=True)
            except ConnectionError as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        server.wait_for(1)
        server.close()
        with FakeServer(tmp_path / "infer.sock") as after:
            thread.join(30)
            assert "it may have run the request" in str(failed[0])
            assert not after.requests


def test_a_call_that_waits_fails_at_once_when_the_daemon_goes(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    server = FakeServer(path)
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            client.infer("silent", {"x": X})
        except ConnectionError as error:
            caught.append(error)

    with Client(f"ipc://{path}") as client:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        server.wait_for(3)
        server.close()
        for thread in threads:
            thread.join(timeout=60)
    assert len(caught) == 3


def test_a_name_that_zeromq_cannot_take_is_refused_before_anything_else() -> None:
    with pytest.raises(ConfigError, match="a socket's path may have 107"):
        Client("ipc:///" + "x" * 120)


# ---- ops ------------------------------------------------------------------------------------------------------------


def test_ops_return_what_the_daemon_says(server: FakeServer, client: Client) -> None:
    assert client.is_live()
    assert client.is_ready("echo")
    assert client.models() == server.results["models"]
    assert client.metadata("echo", 3)["max_batch_rows"] == 32
    assert client.stats() == {"uptime_s": 1.5}
    assert [request.header.model for request in server.requests] == ["", "echo", "", "echo", ""]
    server.results["ready"] = False
    assert not client.is_ready()


def test_load_and_unload_go_to_the_control_endpoint_beside(tmp_path: Path, server: FakeServer, client: Client) -> None:
    with FakeServer(tmp_path / "infer.sock.control", is_control=True) as control:
        assert client.load("echo", 3) == control.results["load"]
        client.unload("echo")
        control.results["load"] = ModelNotFound("no folder 'nobody' in models/")
        with pytest.raises(ModelNotFound, match="no folder"):
            client.load("nobody")
        assert [(each.header.op, each.header.version) for each in control.requests] == [
            ("load", 3),
            ("unload", None),
            ("load", None),
        ]
    assert server.requests == []


def test_another_control_endpoint_can_be_named(server: FakeServer) -> None:
    with Client(server.endpoint, control=server.endpoint) as client, pytest.raises(Forbidden):
        client.load("echo")


def test_a_tcp_endpoint_reports_no_control_endpoint() -> None:
    with Client("tcp://127.0.0.1:9") as client, pytest.raises(ConfigError, match="control="):
        client.load("echo")


def test_wait_ready_says_how_long_it_waited(server: FakeServer, client: Client) -> None:
    server.results["ready"] = False
    with pytest.raises(TimeoutError, match=r"not ready within 0\.1 s"):
        client.wait_ready(0.1)
    server.results["ready"] = EdgeRuntimeError("something unforeseen")
    assert not client.is_ready()


# ---- futures and threads --------------------------------------------------------------------------------------------


def test_futures_finish_in_any_order(server: FakeServer, client: Client) -> None:
    futures = {client.submit("held", {"x": X + number}): number for number in range(20)}
    server.wait_for(20)
    server.release(order=lambda held: held[::-1])
    for future in as_completed(futures, timeout=60):
        np.testing.assert_array_equal(future.result()["x"], X + futures[future])


def test_a_refusal_ends_its_own_future_only(client: Client) -> None:
    good, bad = client.submit("echo", {"x": X}), client.submit("busy", {"x": X})
    assert isinstance(bad.exception(timeout=60), QueueFull)
    np.testing.assert_array_equal(good.result(timeout=60)["x"], X)


def test_a_cancelled_future_gets_nothing(server: FakeServer, client: Client) -> None:
    cancelled, kept = client.submit("held", {"x": X}), client.submit("held", {"x": X})
    assert cancelled.cancel()
    server.wait_for(2)
    server.release()
    np.testing.assert_array_equal(kept.result(timeout=60)["x"], X)
    assert cancelled.cancelled()


def test_submit_waits_when_as_many_are_in_flight_as_may(server: FakeServer) -> None:
    with Client(server.endpoint, max_in_flight=2) as client:
        first = [client.submit("held", {"x": X}) for _ in range(2)]
        server.wait_for(2)
        with pytest.raises(TimeoutError, match="2 requests were in flight"):
            client.submit("echo", {"x": X}, timeout_ms=0)
        third: list[Future[Any]] = []
        thread = threading.Thread(target=lambda: third.append(client.submit("echo", {"x": X})))
        thread.start()
        server.release()
        thread.join(timeout=60)
        third[0].result(timeout=60)
        for future in first:
            future.result(timeout=60)
    assert [request.header.model for request in server.requests] == ["held", "held", "echo"]


def test_a_callback_may_submit_but_not_block(server: FakeServer) -> None:
    outcomes: list[Any] = []
    done = threading.Event()
    with Client(server.endpoint, max_in_flight=1) as client:

        def submit_two(_: Future[Any]) -> None:
            outcomes.append(client.submit("echo", {"x": X}))
            try:
                client.submit("echo", {"x": X})
            except QueueFull as error:
                outcomes.append(error)
            done.set()

        client.submit("echo", {"x": X}).add_done_callback(submit_two)
        assert done.wait(60)
        np.testing.assert_array_equal(outcomes[0].result(timeout=60)["x"], X)
    assert "max_in_flight" in str(outcomes[1])


def test_many_threads_each_get_their_own_answers(client: Client) -> None:
    wrong: list[int] = []

    def ask(number: int) -> None:
        for round_ in range(50):
            value = np.full((1, 4), number * 1000 + round_, np.int32)
            if round_ % 3:
                got = client.infer("echo", {"x": value})["x"]
            else:
                got = client.submit("echo", {"x": value}).result(timeout=60)["x"]
            if not np.array_equal(got, value):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_callers_answer_arrives_while_others_are_held(server: FakeServer, client: Client) -> None:
    waiting = [threading.Thread(target=client.infer, args=("held", {"x": X})) for _ in range(4)]
    for thread in waiting:
        thread.start()
    server.wait_for(4)
    np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)
    np.testing.assert_array_equal(client.submit("echo", {"x": X}).result(timeout=60)["x"], X)
    server.release()
    for thread in waiting:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in waiting)


def test_a_shorter_timeout_than_the_one_waited_for_ends_in_time(server: FakeServer, client: Client) -> None:
    long = client.submit("held", {"x": X})
    with pytest.raises(TimeoutError):
        client.submit("silent", {"x": X}, timeout_ms=0).result(timeout=60)
    server.release()
    long.result(timeout=60)


def test_closing_fails_what_is_pending(server: FakeServer) -> None:
    client = Client(server.endpoint)
    future = client.submit("silent", {"x": X})
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            client.infer("silent", {"x": X})
        except ConnectionError as error:
            caught.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.wait_for(4)
    client.close()
    client.close()
    for thread in threads:
        thread.join(timeout=60)
    assert isinstance(future.exception(timeout=60), ConnectionError)
    assert len(caught) == 3
    with pytest.raises(ConnectionError, match="closed"):
        client.infer("echo", {"x": X})


def test_a_client_can_be_closed_by_a_callback(server: FakeServer) -> None:
    client = Client(server.endpoint)
    closed = threading.Event()

    def close(_: Future[Any]) -> None:
        client.close()
        closed.set()

    client.submit("echo", {"x": X}).add_done_callback(close)
    assert closed.wait(60)


@pytest.mark.parametrize("others", [0, 2])
def test_an_interrupted_caller_leaves_a_client_that_works(server: FakeServer, client: Client, others: int) -> None:
    waiting = [client.submit("held", {"x": X}) for _ in range(others)]
    main = threading.get_ident()

    def interrupt() -> None:
        server.wait_for(others + 1)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # Where SIGINT is ignored, as in a shell's background job, Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.infer("silent", {"x": X})
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes late would end the worker, and name no reason
        thread.join(timeout=60)
        signal.signal(signal.SIGINT, before)
    np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)
    server.release()
    for future in waiting:
        future.result(timeout=60)
    np.testing.assert_array_equal(client.submit("echo", {"x": X}).result(timeout=60)["x"], X)


def test_a_client_never_used_holds_nothing(tmp_path: Path) -> None:
    Client(f"ipc://{tmp_path}/none.sock").close()


# ---- CURVE ----------------------------------------------------------------------------------------------------------


def test_curve_keys_open_a_guarded_endpoint_and_wrong_ones_do_not(tmp_path: Path) -> None:
    server_public, server_secret = zmq.curve_keypair()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with FakeServer(tmp_path / "infer.sock", curve_secret=server_secret) as server:
        with Client(server.endpoint, curve=CurveKeys(server_public.decode(), public, secret)) as client:
            np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)
        client = Client(server.endpoint, curve=CurveKeys(public, public, secret), timeout_ms=0)
        with client, pytest.raises(ConnectionError, match="check the CURVE keys"):
            client.infer("echo", {"x": X})
        client = Client(server.endpoint, curve=CurveKeys("short", public, secret))
        with client, pytest.raises(ConfigError, match=r"curve\.server_key: got 5 characters"):
            client.infer("echo", {"x": X})


def test_an_interrupt_while_the_clients_thread_starts_does_not_keep_it_from_closing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SIGTERM inside threading's own wait for the thread: `start` has not returned."""

    class Interrupted(threading.Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    client = Client(server.endpoint)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.submit("echo", {"x": X})
    monkeypatch.undo()
    client.close()
