"""`allocate`: arrays in shared memory, whose place alone is sent; the same answers by frames where there is none."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

from edge_runtime import AsyncClient, Client
from edge_runtime.config.settings import SharedMemorySettings, ZmqSettings
from edge_runtime.errors import QueueFull, TensorMismatch
from tests.contract.running_daemon import floats, put_model, running_daemon
from tests.models import onnx_models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    put_model(models, "half", onnx_models.identity, datatype="BF16")
    return models


@pytest.fixture(scope="module")
def daemon_here(models, tmp_path_factory):
    endpoints = (f"ipc://{tmp_path_factory.mktemp('ipc')}/infer.sock", "tcp://127.0.0.1:*")
    with running_daemon(models, tmp_path_factory.mktemp("run"), zmq=ZmqSettings(endpoints=endpoints)) as daemon:
        yield daemon


@pytest.fixture
def endpoint(daemon_here):
    return daemon_here.endpoints[1]


@pytest.fixture
def client(endpoint):
    with Client(endpoint) as client:
        yield client


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def check(result, x, shared=("x",)) -> None:
    np.testing.assert_allclose(result["y"], expected(x), rtol=1e-4, atol=1e-4)
    assert result.shared == shared


def bytes_in_use(client) -> int:
    return client.stats()["shared_memory"]["bytes"]


def wait_until_unused(client) -> None:
    """Until the daemon has noted it, which nothing announces, and given the memory up."""
    assert any(bytes_in_use(client) == 0 for _ in range(5_000)), "the memory is still in use"


def test_an_array_is_zeroed_contiguous_and_sent_by_its_place(client):
    frame = client.allocate((2, 16), np.float32)
    assert frame.shape == (2, 16)
    assert frame.dtype == np.float32
    assert frame.flags.c_contiguous
    assert frame.flags.writeable
    assert not frame.any()
    for model in ("mlp", "queued"):
        for seed in range(4):
            frame[:] = floats(2, 16, seed=seed)
            check(client.infer(model, {"x": frame}), frame)
            check(client.submit(model, {"x": frame}).result(), frame)


def test_a_contiguous_view_goes_by_place_and_any_other_array_in_a_frame(client):
    frame = client.allocate((8, 16), np.float32)
    frame[:] = floats(8, 16)
    check(client.infer("mlp", {"x": frame[2:5]}), frame[2:5])
    check(client.infer("mlp", {"x": frame.reshape(-1)[16:48].reshape(2, 16)}), frame[1:3])
    check(client.infer("mlp", {"x": frame[::2]}), frame[::2], shared=())
    check(client.infer("mlp", {"x": frame.copy()}), frame, shared=())
    wide = client.allocate((16, 16), np.float32)
    wide[:] = floats(16, 16, seed=3)
    check(client.infer("mlp", {"x": wide.T}), wide.T, shared=())


@pytest.mark.smoke
def test_an_output_is_written_into_the_callers_array(client):
    frame, scores = client.allocate((2, 16), np.float32), client.allocate((2, 4), np.float32)
    for model in ("mlp", "queued"):
        for seed in range(4):
            frame[:] = floats(2, 16, seed=seed)
            result = client.infer(model, {"x": frame}, outputs={"y": scores})
            assert result["y"] is scores
            check(result, frame)


def test_an_output_array_of_any_memory_gives_the_same_answer(client):
    x = floats(2, 16)
    plain, large = np.zeros((2, 4), np.float32), client.allocate((5, 4), np.float32)
    assert client.infer("queued", {"x": x}, outputs={"y": plain})["y"] is plain
    np.testing.assert_allclose(plain, expected(x), rtol=1e-4, atol=1e-4)
    large[:] = 7
    smaller = client.infer("queued", {"x": x}, outputs={"y": large})["y"]
    assert np.shares_memory(smaller, large)
    np.testing.assert_allclose(smaller, expected(x), rtol=1e-4, atol=1e-4)
    assert (large[2:] == 7).all()


def test_an_output_array_that_does_not_fit_is_an_error_and_its_neighbours_are_not_touched(client):
    small, neighbour = client.allocate((1, 2), np.float32), client.allocate(1024, np.uint8)
    wrong = client.allocate((1, 4), np.int32)
    neighbour[:] = 7
    for target in (small, np.zeros((1, 2), np.float32), wrong, np.zeros((1, 4), np.int32)):
        with pytest.raises(TensorMismatch):
            client.infer("queued", {"x": floats(1, 16)}, outputs={"y": target})
    with pytest.raises(TensorMismatch, match="C-contiguous"):
        client.infer("queued", {"x": floats(1, 16)}, outputs={"y": np.zeros((1, 8), np.float32)[:, ::2]})
    assert (neighbour == 7).all()


def test_many_small_arrays_share_a_region_and_none_gets_anothers_memory(client):
    frames = [client.allocate((1, 16), np.float32) for _ in range(300)]
    for seed, frame in enumerate(frames):
        frame[:] = floats(1, 16, seed=seed)
    assert client.stats()["shared_memory"]["regions"] == 1
    futures = [client.submit("queued", {"x": frame}) for frame in frames]
    for future, frame in zip(futures, frames, strict=True):
        check(future.result(), frame)


def test_memory_is_free_when_the_array_and_its_views_are_gone(client):
    frame = client.allocate((1, 1024, 1024), np.float32)
    assert bytes_in_use(client) == 4 << 20
    view = frame[0, 7:9].reshape(-1)
    del frame
    assert bytes_in_use(client) == 4 << 20
    del view
    gc.collect()
    wait_until_unused(client)
    frame = client.allocate((1, 16), np.float32)
    frame[:] = floats(1, 16)
    check(client.infer("mlp", {"x": frame}), frame)


def test_a_part_that_is_used_again_is_zeroed(client):
    kept = client.allocate(64, np.uint8)
    first = client.allocate(1000, np.uint8)
    first[:] = 7
    place = first.ctypes.data
    del first
    again = client.allocate(900, np.uint8)
    assert again.ctypes.data == place
    assert not again.any()
    assert not kept.any()


def test_an_array_of_a_request_under_way_stays_the_requests(client):
    kept = client.allocate(64, np.uint8)
    futures, wanted = [], []
    for seed in range(64):
        frame = client.allocate((1, 16), np.float32)
        frame[:] = floats(1, 16, seed=seed)
        wanted.append(frame.copy())
        futures.append(client.submit("queued", {"x": frame}))
        del frame
    for future, x in zip(futures, wanted, strict=True):
        check(future.result(), x)
    assert not kept.any()


def test_over_a_bound_is_queue_full_and_dropping_an_array_helps(models, tmp_path):
    bounds = SharedMemorySettings(per_connection_bytes=1 << 20)
    with (
        running_daemon(models, tmp_path / "run", shared_memory=bounds) as daemon,
        Client(daemon.endpoints[1]) as client,
    ):
        frame = client.allocate(1 << 19, np.uint8)
        with pytest.raises(QueueFull, match="shared_memory"):
            client.allocate(1 << 20, np.uint8)
        small = client.allocate(1 << 18, np.uint8)
        del frame, small
        wait_until_unused(client)
        assert client.allocate(1 << 20, np.uint8).nbytes == 1 << 20


def test_datatypes_that_numpy_has_not_and_those_without_a_fixed_size(client):
    bits = client.allocate((1, 2), np.uint16)
    bits[:] = [0x3F80, 0x4000]
    assert client.infer("half", {"x": bits}).shared == ("x",)
    texts = client.allocate((1, 2), object)
    texts[:] = [[b"a", b"b"]]
    result = client.infer("text", {"x": texts}, outputs={"y": np.empty((1, 2), object)})
    assert result["y"].tolist() == [[b"a", b"b"]]
    assert result.shared == ()
    assert client.allocate(0, np.float32).shape == (0,)
    assert client.allocate((), np.float32).shape == ()


def test_tcp_has_no_shared_memory_and_gives_the_same_answers(daemon_here):
    with Client(daemon_here.endpoints[2]) as client:
        frame, scores = client.allocate((1, 16), np.float32), client.allocate((1, 4), np.float32)
        frame[:] = floats(1, 16)
        check(client.infer("mlp", {"x": frame}, outputs={"y": scores}), frame, shared=())
        np.testing.assert_allclose(scores, expected(frame), rtol=1e-4, atol=1e-4)


def test_without_a_memory_socket_the_same_calls_give_the_same_answers(models, tmp_path):
    off = SharedMemorySettings(total_bytes=0)
    with running_daemon(models, tmp_path / "run", shared_memory=off) as daemon, Client(daemon.endpoints[1]) as client:
        frame = client.allocate((1, 16), np.float32)
        frame[:] = floats(1, 16)
        check(client.infer("mlp", {"x": frame}), frame, shared=())


def test_after_a_restart_old_arrays_go_in_frames_and_new_ones_by_place(models, tmp_path):
    with running_daemon(models, tmp_path / "run") as daemon:
        client = Client(daemon.endpoints[1])
        frame, scores = client.allocate((1, 16), np.float32), client.allocate((1, 4), np.float32)
        frame[:] = floats(1, 16)
        check(client.infer("queued", {"x": frame}), frame)
        kept = frame.copy()
    with client, running_daemon(models, tmp_path / "run"):
        for _ in range(3):
            check(client.infer("queued", {"x": frame}, outputs={"y": scores}), kept, shared=())
            np.testing.assert_allclose(scores, expected(kept), rtol=1e-4, atol=1e-4)
            check(client.submit("queued", {"x": frame}).result(), kept, shared=())
        new = client.allocate((1, 16), np.float32)
        new[:] = kept
        check(client.infer("queued", {"x": new}), kept)


def test_a_restart_that_no_call_has_noticed_yet(models, tmp_path):
    """The first call after it finds the connection lost while it is sent."""
    with running_daemon(models, tmp_path / "run") as daemon:
        client = Client(daemon.endpoints[1])
        frame = client.allocate((1, 16), np.float32)
        frame[:] = floats(1, 16)
        check(client.submit("queued", {"x": frame}).result(), frame)
    with client, running_daemon(models, tmp_path / "run"):
        check(client.submit("queued", {"x": frame}).result(), frame, shared=())


def test_an_array_outlives_its_client_and_reads_as_zeros(endpoint):
    with Client(endpoint) as client, Client(endpoint) as other:
        frame = client.allocate(4096, np.uint8)
        frame[:] = 7
        client.close()
        wait_until_unused(other)
        assert not frame.any()
        assert client.allocate(16, np.uint8).nbytes == 16  # an ordinary one
        frame[:] = 7


def test_threads_allocate_and_infer_side_by_side(client):
    wrong = []

    def work(seed: int) -> None:
        for turn in range(20):
            frame = client.allocate((1, 16), np.float32)
            frame[:] = x = floats(1, 16, seed=seed * 100 + turn)
            result = client.infer("queued", {"x": frame})
            if not np.allclose(result["y"], expected(x), rtol=1e-4, atol=1e-4):
                wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_client_for_an_event_loop_shares_memory_likewise(endpoint):
    async def work() -> None:
        async with AsyncClient(endpoint) as client:
            frame, scores = await client.allocate((2, 16), np.float32), await client.allocate((2, 4), np.float32)
            for seed in range(4):
                frame[:] = floats(2, 16, seed=seed)
                result = await client.infer("queued", {"x": frame}, outputs={"y": scores})
                assert result["y"] is scores
                check(result, frame)
            frames = [await client.allocate((1, 16), np.float32) for _ in range(16)]
            for seed, each in enumerate(frames):
                each[:] = floats(1, 16, seed=seed)
            results = await asyncio.gather(*(client.infer("queued", {"x": each}) for each in frames))
            for result, each in zip(results, frames, strict=True):
                check(result, each)

    asyncio.run(work())


def test_the_client_for_an_event_loop_survives_a_restart(models, tmp_path):
    async def work() -> None:
        with running_daemon(models, tmp_path / "run") as daemon:
            client = AsyncClient(daemon.endpoints[1])
            frame = await client.allocate((1, 16), np.float32)
            frame[:] = floats(1, 16)
            check(await client.infer("queued", {"x": frame}), frame)
        with running_daemon(models, tmp_path / "run"):
            for _ in range(2):
                check(await client.infer("queued", {"x": frame}), frame, shared=())
            await client.close()

    asyncio.run(work())
