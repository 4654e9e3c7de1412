"""Shared memory as any client in any language uses it: the memory socket, places in headers, and hostile peers.

`MemoryPeer` speaks the protocol of docs/shared-memory.md by itself, so that it holds more than our own client does.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest

from edge_runtime.config.settings import SharedMemorySettings, ZmqSettings
from tests.contract.running_daemon import ANSWER_S, RawClient, error_code, floats, header, op, put_model, running_daemon
from tests.models import onnx_models

ASK = struct.Struct("<IIQ")
TOLD = struct.Struct("<IIQQ16s")
ALLOCATE, FREE = 1, 2
PAGE = mmap.PAGESIZE


class MemoryPeer:
    """One connection to a memory socket. Use as a context manager."""

    def __init__(self, endpoint: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(ANSWER_S)
        self.socket.connect(endpoint.removeprefix("ipc://") + ".memory")
        self.secret = b""
        self.fds: list[int] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def ask(self, operation: int, argument: int, version: int = 1):
        self.socket.send(ASK.pack(version, operation, argument))
        return self.told()

    def told(self):
        message, ancillary, _, _ = self.socket.recvmsg(TOLD.size + 1, socket.CMSG_SPACE(4))
        if not message:
            return None
        version, answer, region, nbytes, self.secret = TOLD.unpack(message)
        assert version == 1
        for _, _, rights in ancillary:
            self.fds.extend(array.array("i", rights))
        return answer, region, nbytes

    def allocate(self, nbytes: int):
        """A region's number and its bytes."""
        answer, region, size = self.ask(ALLOCATE, nbytes)
        assert answer == 0
        return region, np.frombuffer(mmap.mmap(self.fds[-1], size), np.uint8)

    def is_closed(self) -> bool:
        """Whether the daemon ended it."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    put_model(models, "truth", onnx_models.identity, datatype="BOOL")
    return models


@pytest.fixture(scope="module")
def daemon_here(models, tmp_path_factory):
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


@pytest.fixture
def endpoint(daemon_here):
    return daemon_here.endpoints[1]


@contextmanager
def shared(endpoint: str, nbytes: int = 4 * PAGE):
    """A client with one region: the client, its memory connection, the region's number and bytes."""
    with RawClient(endpoint) as client, MemoryPeer(endpoint) as memory:
        region, data = memory.allocate(nbytes)
        assert client.result("attach_memory", parameters={"secret": memory.secret.hex()}) is True
        yield client, memory, region, data


def placed(region: int, offset: int = 0, shape=(1, 16), **fields) -> dict:
    return {"name": "x", "datatype": "FP32", "shape": list(shape), "region": region, "offset": offset, **fields}


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def answered(frames: list[bytes]) -> dict:
    fields = msgpack.unpackb(frames[0])
    assert "error" not in fields, fields
    return fields


def scores(frames: list[bytes]) -> np.ndarray:
    answered(frames)
    return np.frombuffer(frames[2], np.float32)


def memory_use(client: RawClient) -> dict:
    return client.result("stats")["shared_memory"]


def wait_for(condition) -> None:
    """Until the daemon has noted the end of a memory connection, which nothing announces."""
    for _ in range(2_000):
        if condition():
            return
    raise AssertionError("it never came")


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_an_input_in_a_region_gives_the_answer_that_a_frame_gives(endpoint, model):
    with shared(endpoint) as (client, _, region, data):
        x = floats(3, 16)
        data[256 : 256 + x.nbytes] = np.frombuffer(x, np.uint8)
        packed = header(model, inputs=[placed(region, 256, (3, 16))])
        for _ in range(4):  # the header is known from the third time on
            reply = client.ask(packed, b"7")
            assert reply[1] == b"7"
            np.testing.assert_allclose(scores(reply).reshape(3, 4), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_headers_of_a_ring_of_offsets_are_answered_each_with_its_own_rows(endpoint, model):
    with shared(endpoint) as (client, _, region, data):
        rows = [floats(1, 16, seed=seed) for seed in range(8)]
        for index, x in enumerate(rows):
            data[index * 64 : index * 64 + 64] = np.frombuffer(x, np.uint8)
        for turn in range(5):
            for index in range(8):
                client.send(header(model, inputs=[placed(region, index * 64)]), b"%d" % (turn * 8 + index))
        for _ in range(40):
            reply = client.receive()
            np.testing.assert_allclose(scores(reply), expected(rows[int(reply[1]) % 8])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_an_output_is_written_to_its_place_and_has_no_frame(endpoint, model):
    with shared(endpoint) as (client, _, region, data):
        x = floats(2, 16)
        packed = header(model, (2, 16), outputs=[{"name": "y", "region": region, "offset": 64, "nbytes": 32}])
        for _ in range(4):
            data[:] = 7
            reply = client.ask(packed, b"", x.tobytes())
            assert len(reply) == 2
            assert answered(reply)["outputs"] == [
                {"name": "y", "datatype": "FP32", "shape": [2, 4], "region": region, "offset": 64, "nbytes": 32}
            ]
            written = data[64:96].view(np.float32).reshape(2, 4)
            np.testing.assert_allclose(written, expected(x), rtol=1e-4, atol=1e-4)
            assert set(data[:64]) | set(data[96:]) == {7}


def test_frames_and_places_mix_in_the_order_of_the_header(endpoint):
    with shared(endpoint) as (client, _, region, data):
        specs = client.result("metadata", model="pair")["inputs"]
        names, shapes = [spec["name"] for spec in specs], [spec["shape"][1:] for spec in specs]
        given = [floats(1, *shape, seed=index) for index, shape in enumerate(shapes)]
        plain = [
            {"name": name, "datatype": "FP32", "shape": list(x.shape)} for name, x in zip(names, given, strict=True)
        ]
        want = client.ask(header("pair", inputs=plain), b"", *[x.tobytes() for x in given])
        data[: given[0].nbytes] = np.frombuffer(given[0], np.uint8)
        first = plain[0] | {"region": region, "offset": 0}
        mixed = header("pair", inputs=[first, plain[1]])
        for _ in range(4):
            assert client.ask(mixed, b"", given[1].tobytes())[2:] == want[2:]
        assert error_code(client.ask(mixed, b"")) == "tensor_mismatch"
        assert error_code(client.ask(mixed, b"", b"short")) == "tensor_mismatch"
        assert client.ask(mixed, b"", given[1].tobytes())[2:] == want[2:]


WRONG = {
    "a region that it has not": {"region": 9},
    "region 0": {"region": 0},
    "an offset beyond the end": {"offset": 4 * PAGE},
    "an end beyond the end": {"offset": 4 * PAGE - 8},
    "an offset off every address": {"offset": 1 << 47},
    "an offset between two elements": {"offset": 2},
}


@pytest.mark.parametrize("wrong", list(WRONG))
@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_a_wrong_place_is_a_tensor_mismatch_and_harms_no_neighbour(endpoint, model, wrong):
    with shared(endpoint) as (client, _, region, _):
        good = header(model, inputs=[placed(region)])
        bad_input = header(model, inputs=[placed(region) | WRONG[wrong]])
        bad_output = header(model, outputs=[{"name": "y", "region": region, "offset": 0} | WRONG[wrong]])
        for _ in range(3):
            client.send(good, b"good")
            client.send(bad_input, b"bad")
            client.send(bad_output, b"bad", floats(1, 16).tobytes())
            client.send(good, b"good")
            replies = [client.receive() for _ in range(4)]
            assert [error_code(reply) for reply in replies if reply[1] == b"bad"] == ["tensor_mismatch"] * 2
            assert all(len(scores(reply)) == 4 for reply in replies if reply[1] == b"good")


@pytest.mark.parametrize(
    "fields",
    [{"region": -1}, {"region": "1"}, {"region": True}, {"offset": None}, {"offset": -8}, {"offset": 1.5}],
    ids=str,
)
def test_a_place_that_is_not_a_place_is_refused_as_a_header(endpoint, fields):
    with RawClient(endpoint) as client:
        packed = header(inputs=[placed(1) | fields])
        assert error_code(client.ask(packed, b"")) == "decode_failed"
        packed = header(outputs=[{"name": "y", "region": 1, "offset": 0} | fields])
        assert error_code(client.ask(packed, b"", floats(1, 16).tobytes())) == "decode_failed"


def test_an_output_that_its_place_cannot_hold_is_refused_before_it_runs(endpoint):
    with shared(endpoint) as (client, _, region, data):
        data[:] = 7
        for _ in range(3):
            packed = header("queued", outputs=[{"name": "y", "region": region, "offset": 0, "nbytes": 12}])
            assert error_code(client.ask(packed, b"", floats(1, 16).tobytes())) == "tensor_mismatch"
            packed = header("queued", outputs=[{"name": "y", "region": region, "offset": 4 * PAGE - 8}])
            assert error_code(client.ask(packed, b"", floats(1, 16).tobytes())) == "tensor_mismatch"
        assert set(data) == {7}


def test_bytes_stay_in_frames(endpoint):
    with shared(endpoint) as (client, _, region, _):
        inputs = [{"name": "x", "datatype": "BYTES", "shape": [1, 2], "region": region, "offset": 0}]
        assert error_code(client.ask(header("text", inputs=inputs), b"")) == "tensor_mismatch"
        inputs = [{"name": "x", "datatype": "BYTES", "shape": [1, 2]}]
        packed = header("text", inputs=inputs, outputs=[{"name": "y", "region": region, "offset": 0}])
        assert error_code(client.ask(packed, b"", 2 * (struct.pack("<I", 2) + b"hi"))) == "tensor_mismatch"


def test_a_bool_in_a_region_is_checked(endpoint):
    with shared(endpoint) as (client, _, region, data):
        packed = header("truth", inputs=[placed(region, 0, (1, 2), datatype="BOOL")])
        data[:2] = [1, 0]
        for _ in range(3):
            assert client.ask(packed, b"")[2:] == [b"\x01\x00"]
        data[1] = 2
        assert error_code(client.ask(packed, b"")) == "tensor_mismatch"


def test_a_region_is_nobodys_but_its_own_connections(endpoint):
    with shared(endpoint) as (client, memory, region, data), RawClient(endpoint) as other:
        packed = header("queued", inputs=[placed(region)])
        for _ in range(3):
            assert len(scores(client.ask(packed, b""))) == 4
            assert error_code(other.ask(packed, b"")) == "tensor_mismatch"
        for secret in ("", "zz", "00" * 16, "00" * 17, memory.secret.hex()[:-2]):
            refused = other.ask(op("attach_memory", parameters={"secret": secret}), b"")
            assert error_code(refused) == "decode_failed"
        with MemoryPeer(endpoint) as own:  # its own region of the same number is another one
            number, mine = own.allocate(PAGE)
            assert number == region
            other.result("attach_memory", parameters={"secret": own.secret.hex()})
            x = floats(1, 16)
            mine[:64] = np.frombuffer(x, np.uint8)
            np.testing.assert_allclose(scores(other.ask(packed, b"")), expected(x)[0], rtol=1e-4, atol=1e-4)
            assert set(data) == {0}


def test_a_connection_loses_its_regions_to_the_next_that_shows_the_secret(endpoint):
    with shared(endpoint) as (client, memory, region, _), RawClient(endpoint) as other:
        packed = header("queued", inputs=[placed(region)])
        other.result("attach_memory", parameters={"secret": memory.secret.hex()})
        assert len(scores(other.ask(packed, b""))) == 4
        assert error_code(client.ask(packed, b"")) == "tensor_mismatch"


def test_another_process_that_takes_over_an_identity_does_not_get_its_regions(endpoint, tmp_path):
    """The identity is the client's to choose, and free once its connection has ended."""
    import subprocess
    import sys

    with MemoryPeer(endpoint) as memory:
        region, _ = memory.allocate(PAGE)
        packed = header("queued", inputs=[placed(region)])
        with RawClient(endpoint, identity=b"camera") as client:
            client.result("attach_memory", parameters={"secret": memory.secret.hex()})
            assert len(scores(client.ask(packed, b""))) == 4
        script = (
            "import sys, zmq\n"
            "s = zmq.Context().socket(zmq.DEALER); s.set(zmq.LINGER, 0); s.set(zmq.ROUTING_ID, b'camera')\n"
            f"s.connect({endpoint!r}); s.send_multipart([bytes.fromhex({packed.hex()!r}), b''])\n"
            "assert s.poll(20_000); sys.stdout.buffer.write(s.recv_multipart()[0])\n"
        )
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60).stdout
        assert error_code([told]) == "tensor_mismatch"


def test_the_client_rewrites_its_data_while_the_model_runs(endpoint):
    """What runs inside the daemon reads a copy, so each answer is that of one whole input."""
    with shared(endpoint) as (client, _, region, data):
        x = data[:64].view(np.float32)
        packed = header("queued", inputs=[placed(region)])
        for number in range(300):
            client.send(packed, b"%d" % number)
            x[:] = number
        for _ in range(300):
            assert len(scores(client.receive())) == 4


def test_a_memory_connection_that_ends_before_the_run_costs_the_run_nothing(endpoint):
    """The requests that were sent before are answered, by a run or by a refusal; later ones are refused."""
    with shared(endpoint) as (client, memory, region, data):
        data[:64] = np.frombuffer(floats(1, 16), np.uint8)
        packed = header("queued", inputs=[placed(region)], outputs=[{"name": "y", "region": region, "offset": 512}])
        for number in range(200):
            client.send(packed, b"%d" % number)
        memory.close()
        codes = {
            error_code(reply) if b"error" in reply[0] else "ok" for reply in (client.receive() for _ in range(200))
        }
        assert codes <= {"ok", "tensor_mismatch"}
        wait_for(lambda: b"error" in client.ask(packed, b"")[0])
        assert error_code(client.ask(packed, b"")) == "tensor_mismatch"
        wait_for(lambda: memory_use(client)["bytes"] == 0)
        assert memory_use(client)["regions"] == 0


def test_the_pages_are_given_up_when_the_connection_ends_though_the_client_keeps_the_file(endpoint):
    with MemoryPeer(endpoint) as memory, RawClient(endpoint) as client:
        _, data = memory.allocate(64 * PAGE)
        data[:] = 7
        kept = os.dup(memory.fds[0])
        try:
            assert os.fstat(kept).st_blocks
            memory.socket.close()
            wait_for(lambda: memory_use(client)["regions"] == 0)
            assert os.fstat(kept).st_blocks == 0
            assert set(data) == {0}
        finally:
            os.close(kept)


def test_no_client_can_resize_a_region_or_unseal_it(endpoint):
    with shared(endpoint) as (client, memory, region, _):
        fd = memory.fds[0]
        for size in (0, PAGE, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            os.posix_fallocate(fd, 0, 1 << 20)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))  # opened anew it is the same sealed file
        assert len(scores(client.ask(header("queued", inputs=[placed(region)]), b""))) == 4


def test_a_freed_region_is_gone_and_its_number_free(endpoint):
    with shared(endpoint) as (client, memory, region, _):
        memory.socket.send(ASK.pack(1, FREE, region))
        packed = header("queued", inputs=[placed(region)])
        wait_for(lambda: b"error" in client.ask(packed, b"")[0])
        assert memory.allocate(PAGE)[0] == region
        assert len(scores(client.ask(packed, b""))) == 4


@pytest.mark.parametrize(
    "message",
    [
        b"\x01", ASK.pack(1, ALLOCATE, PAGE)[:-1], ASK.pack(1, ALLOCATE, PAGE) + b"\x00", ASK.pack(1, 7, PAGE),
        ASK.pack(1, ALLOCATE, 0), ASK.pack(1, FREE, 5), ASK.pack(1, FREE, (1 << 64) - 1), b"\xff" * 16, b"\x00" * 4096,
    ],
    ids=range(9),
)  # fmt: skip
def test_a_message_that_is_not_the_protocols_ends_that_connection_alone(endpoint, message):
    with shared(endpoint) as (client, _, region, _), MemoryPeer(endpoint) as hostile:
        hostile.allocate(PAGE)
        hostile.socket.send(message)
        hostile.socket.settimeout(ANSWER_S)
        if message[:4] == b"\x01\x00\x00\x00" or len(message) != ASK.size:
            assert hostile.is_closed()
        else:
            assert hostile.told()[0] == 2  # another version
            assert hostile.is_closed()
        assert len(scores(client.ask(header("queued", inputs=[placed(region)]), b""))) == 4


def test_descriptors_that_a_client_sends_along_are_not_taken(endpoint):
    with MemoryPeer(endpoint) as memory, Path(os.devnull).open("rb") as given:
        memory.ask(ALLOCATE, 1 << 60)
        mine = len(list(Path("/proc/self/fd").iterdir()))  # the daemon is this process
        for _ in range(50):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [given.fileno()]))]
            memory.socket.sendmsg([ASK.pack(1, ALLOCATE, 1 << 60)], rights)
            assert memory.told()[0] == 1
        assert len(list(Path("/proc/self/fd").iterdir())) == mine


def test_bounds_hold_by_connection_by_user_and_in_all(models, tmp_path):
    bounds = SharedMemorySettings(per_connection_bytes=4 * PAGE, per_user_bytes=6 * PAGE, total_bytes=1 << 30)
    with (
        running_daemon(models, tmp_path / "run", shared_memory=bounds) as daemon,
        MemoryPeer(daemon.endpoints[1]) as first,
        MemoryPeer(daemon.endpoints[1]) as second,
        MemoryPeer(daemon.endpoints[1]) as third,
    ):
        assert first.ask(ALLOCATE, 5 * PAGE) == (1, 0, 4 * PAGE)
        first.allocate(3 * PAGE + 1)
        assert first.ask(ALLOCATE, 1) == (1, 0, 0)
        assert second.ask(ALLOCATE, 3 * PAGE) == (1, 0, 2 * PAGE)
        second.allocate(2 * PAGE)
        assert third.ask(ALLOCATE, 1) == (1, 0, 0)
        first.close()
        wait_for(lambda: third.ask(ALLOCATE, 4 * PAGE)[0] == 0)


def test_one_client_has_a_bounded_number_of_regions(endpoint):
    with MemoryPeer(endpoint) as memory:
        told = [memory.ask(ALLOCATE, 1)[0] for _ in range(80)]
        assert told == [0] * 64 + [1] * 16


def test_without_a_total_there_is_no_memory_socket(models, tmp_path):
    settings = SharedMemorySettings(total_bytes=0)
    with running_daemon(models, tmp_path / "run", shared_memory=settings) as daemon:
        assert not Path(daemon.endpoints[1].removeprefix("ipc://") + ".memory").exists()
        with RawClient(daemon.endpoints[1]) as client:
            assert error_code(client.ask(header(inputs=[placed(1)]), b"")) == "tensor_mismatch"


def test_a_flood_of_connections_is_bounded_and_others_are_served(endpoint, daemon_here):
    with shared(endpoint) as (client, _, region, _):
        packed = header("queued", inputs=[placed(region)])
        opened = []
        try:
            for number in range(1_500):
                one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                opened.append(one)
                one.connect(endpoint.removeprefix("ipc://") + ".memory")
                if number % 100 == 0:
                    assert len(scores(client.ask(packed, b""))) == 4
                if len(opened) > 300:
                    opened.pop(0).close()
            assert memory_use(client)["connections"] <= 128
        finally:
            for one in opened:
                one.close()
        wait_for(lambda: memory_use(client)["connections"] == 1)


def test_a_client_that_never_reads_and_one_that_floods_delay_nobody(endpoint):
    with shared(endpoint) as (client, _, region, _), MemoryPeer(endpoint) as mute:
        packed = header("queued", inputs=[placed(region)])
        mute.socket.setblocking(False)
        sent = 0
        for number in range(20_000):
            try:
                mute.socket.send(ASK.pack(1, ALLOCATE, 1 << 60))
                sent += 1
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                break  # it read none of its answers
            if number % 500 == 0:
                assert len(scores(client.ask(packed, b""))) == 4
        assert sent
        assert len(scores(client.ask(packed, b""))) == 4


def test_the_socket_is_open_to_the_endpoints_own_users_and_goes_with_the_daemon(models, tmp_path):
    with running_daemon(models, tmp_path / "run") as daemon:
        path = Path(daemon.endpoints[1].removeprefix("ipc://"))
        memory = path.with_name(path.name + ".memory")
        assert memory.is_socket()
        assert (memory.stat().st_mode, memory.stat().st_uid) == (path.stat().st_mode, path.stat().st_uid)
        control = Path(daemon.endpoints[0].removeprefix("ipc://"))
        assert not control.with_name(control.name + ".memory").exists()
    assert not memory.exists()


def test_a_restart_leaves_a_client_its_data_and_forgets_its_regions(models, tmp_path):
    with running_daemon(models, tmp_path / "run") as daemon:
        memory = MemoryPeer(daemon.endpoints[1])
        region, data = memory.allocate(PAGE)
        data[:] = 7
    with memory, running_daemon(models, tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        assert memory.is_closed()
        assert set(data) == {7}
        attach = op("attach_memory", parameters={"secret": memory.secret.hex()})
        assert error_code(client.ask(attach, b"")) == "decode_failed"
        assert error_code(client.ask(header("queued", inputs=[placed(region)]), b"")) == "tensor_mismatch"


def test_tcp_and_json_share_no_memory(models, tmp_path):
    endpoints = (f"ipc://{tmp_path}/infer.sock", "tcp://127.0.0.1:*")
    with (
        running_daemon(models, tmp_path / "run", zmq=ZmqSettings(endpoints=endpoints)) as daemon,
        RawClient(daemon.endpoints[2]) as client,
    ):
        assert error_code(client.ask(header(inputs=[placed(1)]), b"")) == "tensor_mismatch"
        told = client.ask_json(model="mlp", inputs=[placed(1)])
        assert told["error"]["code"] == "decode_failed"


def test_a_model_in_a_host_reads_the_region_itself(models, tmp_path):
    with running_daemon(models, tmp_path / "run", isolation="always") as daemon, shared(daemon.endpoints[1]) as opened:
        client, memory, region, data = opened
        (host,) = {each["host"]["pid"] for each in client.result("models") if each["name"] == "queued"}
        packed = header("queued", inputs=[placed(region)], outputs=[{"name": "y", "region": region, "offset": 512}])
        for seed in range(4):
            x = floats(1, 16, seed=seed)
            data[:64] = np.frombuffer(x, np.uint8)
            answered(client.ask(packed, b""))
            np.testing.assert_allclose(data[512:528].view(np.float32), expected(x)[0], rtol=1e-4, atol=1e-4)
        assert "edge-runtime-region" in Path(f"/proc/{host}/maps").read_text()
        memory.close()
        wait_for(lambda: memory_use(client)["regions"] == 0)
        plain = header("queued")
        wait_for(lambda: len(scores(client.ask(plain, b"", floats(1, 16).tobytes()))) == 4)
        assert "edge-runtime-region" not in Path(f"/proc/{host}/maps").read_text()


def test_a_client_that_rewrites_its_data_while_a_host_runs_gets_answers_and_ends_nothing(models, tmp_path):
    with running_daemon(models, tmp_path / "run", isolation="always") as daemon, shared(daemon.endpoints[1]) as opened:
        client, _, region, data = opened
        hosts = {each["host"]["pid"] for each in client.result("models")}
        x = data[:64].view(np.float32)
        packed = header("queued", inputs=[placed(region)])
        for number in range(100):
            client.send(packed, b"%d" % number)
            x[:] = number if number % 2 else np.nan
        for _ in range(100):
            assert len(scores(client.receive())) == 4
        assert {each["host"]["pid"] for each in client.result("models")} == hosts
