"""MqttClient on a real broker and daemon: what is its own beside test_client_contract.py, which holds the rest."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import pytest

import edge_runtime
from edge_runtime.client.in_flight import Call, InFlight
from edge_runtime.doors.mqtt.broker import broker_access
from edge_runtime.doors.mqtt.client import Device, MqttClient
from edge_runtime.doors.mqtt.link import MqttLink
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.errors import ConfigError, Forbidden, QueueFull, RequestError, TensorMismatch
from tests.contract.running_daemon import ANSWER_S, floats, header, put_held_model, put_model, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.clock import FakeClock
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = needs_mosquitto

X = floats(1, 16)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    return models


@pytest.fixture(scope="module")
def url(models, broker, tmp_path_factory) -> Iterator[str]:
    """A daemon that answers."""
    with running_daemon(models, tmp_path_factory.mktemp("run"), mqtt=settings(broker)):
        wait_ready(f"{broker.url}/dev1")
        yield f"{broker.url}/dev1"


@pytest.fixture
def client(url) -> Iterator[MqttClient]:
    with MqttClient(url) as client:
        yield client


@pytest.fixture
def own_broker(tmp_path) -> Iterator[Broker]:
    """One that the test may kill."""
    with Broker(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
def mute(own_broker) -> Iterator[MqttDevice]:
    """A device that takes requests, and answers when it is told."""
    with MqttDevice(own_broker.url) as device:
        yield device


class MqttDevice:
    """A device of a test's own, `mute`: online, listening, and answering only by `answer`."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/mute"
        self._peer = Peer(url)

    def __enter__(self) -> Self:
        self._peer.connect()
        self._peer.subscribe("edge/mute/infer/#", 1)
        self._peer.publish("edge/mute/status", b"online", 1, retain=True)
        return self

    def __exit__(self, *_) -> None:
        self._peer.close()

    def say(self, status: bytes) -> None:
        self._peer.publish("edge/mute/status", status, 1, retain=True)

    def request(self):
        return self._peer.next()

    def answer(self, request, payload: bytes, **changed) -> None:
        correlation = changed.pop("correlation", request.properties.CorrelationData)
        topic = changed.pop("topic", request.properties.ResponseTopic)
        self._peer.publish(topic, payload, correlation=correlation, **changed)


LIVE = msgpack.packb([{"v": 1, "result": True}])
EMPTY = msgpack.packb([{"v": 1, "model": "m", "version": 1, "outputs": []}])


def settings(broker: Broker, device: str = "dev1", **more) -> MqttSettings:
    return MqttSettings(url=f"{broker.url}/{device}", reconnect_min_s=0.05, **more)


def wait_ready(url: str, **options) -> None:
    with MqttClient(url, **options) as client:
        client.wait_ready(ANSWER_S)


def status_is(client: MqttClient, status: str) -> None:
    """Read all that the broker has told this client, and see that it is this."""
    client.devices()
    assert client.device_status() == status


# ---- requests as they are sent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1])
def test_a_request_carries_what_the_wire_says_and_no_more(mute, qos):
    with MqttClient(mute.url, qos=qos) as client:
        future = client.submit("m", {"x": X}, version=3, timeout_ms=61_200)
        request = mute.request()
        properties = request.properties
        fields, tensor = msgpack.unpackb(request.payload)

        assert request.topic == "edge/mute/infer/m/3"
        assert request.qos == qos
        assert not request.retain
        assert properties.ResponseTopic.startswith("reply/edge-client-")
        assert len(properties.CorrelationData) == 8
        assert properties.ContentType == "application/msgpack"
        assert properties.MessageExpiryInterval == 62
        assert not hasattr(properties, "UserProperty")
        assert fields["timeout_ms"] == 61_200
        assert (fields["model"], fields["version"]) == ("m", 3)
        assert not {"reply_to", "id"} & set(fields)
        assert tensor == X.tobytes()
        mute.answer(request, msgpack.packb([{"v": 1, "error": {"code": "queue_full", "message": "no"}}]))
        assert isinstance(future.exception(ANSWER_S), QueueFull)


def test_without_a_timeout_a_request_does_not_expire(mute):
    with MqttClient(mute.url) as client:
        client.submit("m", {"x": X})
        assert not hasattr(mute.request().properties, "MessageExpiryInterval")


def test_an_expiry_below_the_headers_timeout_counts_also_when_the_header_is_known(broker, tmp_path):
    models, gate = tmp_path / "models", tmp_path / "gate"
    gate.touch()
    put_held_model(models, gate)
    x = np.zeros((1, 1), np.float32)
    payload = msgpack.packb([msgpack.unpackb(header("held", x.shape, timeout_ms=60_000)), x.tobytes()])
    with (
        running_daemon(models, tmp_path / "run", mqtt=settings(broker, "held"), python_models=True),
        Peer(broker.url) as peer,
    ):
        wait_ready(f"{broker.url}/held")
        for _ in range(3):
            assert "outputs" in msgpack.unpackb(peer.ask("edge/held/infer/held", payload, expiry_s=60).payload)[0]
        gate.unlink()
        peer.publish("edge/held/infer/held", payload, response_topic="reply/other")
        late = msgpack.unpackb(peer.ask("edge/held/infer/held", payload, expiry_s=3).payload)[0]
        gate.touch()
        assert late["error"]["code"] in {"deadline_exceeded", "deadline_unmeetable"}


def test_correlation_data_begins_where_nobody_guesses_and_never_repeats(mute):
    seen = []
    for _ in range(2):
        with MqttClient(mute.url) as client:
            for _ in range(3):
                client.submit("m", {"x": X})
                seen.append(mute.request().properties.CorrelationData)
    assert len(set(seen)) == 6
    assert abs(int.from_bytes(seen[0], "big") - int.from_bytes(seen[3], "big")) > 1_000


def test_the_reply_topic_names_the_user_and_may_be_given(mute):
    with MqttClient(mute.url, username="alice") as client, MqttClient(mute.url, reply_topic="reply/mine") as other:
        client.submit("m", {"x": X})
        assert mute.request().properties.ResponseTopic.startswith("reply/alice/")
        future = other.submit("m", {"x": X})
        request = mute.request()
        assert request.properties.ResponseTopic == "reply/mine"
        mute.answer(request, b"\x91\x80")
        assert isinstance(future.exception(ANSWER_S), RequestError)


def test_only_the_reply_to_a_request_answers_it(mute):
    with MqttClient(mute.url) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.models)
        request = mute.request()
        number = request.properties.CorrelationData
        mute.answer(request, b"forged", correlation=bytes(8))
        mute.answer(request, b"forged", correlation=None)
        mute.answer(request, b"forged", correlation=number + b"x")
        mute.answer(request, b"forged", topic="reply/somebody/else")
        mute.answer(request, b"forged", retain=True, topic=request.properties.ResponseTopic + "x")
        mute.answer(request, msgpack.packb([{"v": 1, "result": ["true"]}]))
        mute.answer(request, msgpack.packb([{"v": 1, "result": ["twice"]}]))

        assert answer.result(ANSWER_S) == ["true"]


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"\xc1", b"\x90", b"\x91\x80", LIVE + b"x", msgpack.packb([{"v": 1, "outputs": [1]}])]
)
def test_a_reply_that_is_none_is_an_error_and_the_next_is_read(mute, payload):
    with MqttClient(mute.url) as client:
        bad, good = client.submit("m", {"x": X}), client.submit("m", {"x": X})
        mute.answer(mute.request(), payload)
        with pytest.raises(RequestError):
            bad.result(ANSWER_S)
        mute.answer(mute.request(), EMPTY)
        assert good.result(ANSWER_S).outputs == {}


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_no_more_are_in_flight_than_allowed_and_callers_wait_their_turn(mute):
    with MqttClient(mute.url, max_in_flight=2) as client:
        held = [client.submit("m", {"x": X}) for _ in range(2)]
        requests = [mute.request() for _ in held]

        with pytest.raises(TimeoutError, match="2 requests were in flight"):
            client.submit("m", {"x": X}, timeout_ms=-900)
        for request in requests:
            mute.answer(request, EMPTY)
        for future in held:
            future.result(ANSWER_S)
        client.submit("m", {"x": X})
        mute.request()


def test_a_request_that_waited_long_for_its_slot_is_given_time_for_its_answer(mute):
    clock = FakeClock()

    class LateSlots(InFlight):
        @property
        def is_full(self) -> bool:
            clock.advance(0.9e6)
            return super().is_full

    link = MqttLink(
        broker_access(MqttSettings(url=mute.url)),
        "late",
        "reply/late/1",
        DeviceTopics("mute"),
        qos=0,
        in_flight=LateSlots(1, looks=1),
        clock=clock,
    )
    with closing(link):
        call = Call(msgpack.packb({"v": 1}), (), 1e6, len)
        call.topic = "edge/mute/infer/m"
        future = link.submit(call)
        clock.advance(0.9e6)
        for _ in range(2):
            link.beat()
        mute.answer(mute.request(), EMPTY)
        assert future.result(ANSWER_S) > 0


def test_a_callback_may_submit_and_close_and_learns_that_it_cannot_wait(mute):
    ends, done = [], threading.Event()

    def called(_) -> None:
        for ask in (client.models, client.devices, lambda: client.infer("m", {"x": X})):
            try:
                ask()
            except RuntimeError as error:
                ends.append(str(error))
        client.submit("m", {"x": X}).add_done_callback(finished)

    def finished(future) -> None:
        ends.append(future.result().version)
        client.close()
        done.set()

    client = MqttClient(mute.url)
    client.submit("m", {"x": X}).add_done_callback(called)
    for _ in range(2):
        mute.answer(mute.request(), EMPTY)

    assert done.wait(ANSWER_S)
    *refusals, version = ends
    assert len(refusals) == 3
    assert all("use submit there" in refusal for refusal in refusals)
    assert version == 1


def test_a_callback_of_a_full_client_is_refused_rather_than_held_up(mute):
    ends, done = [], threading.Event()

    def called(_) -> None:
        try:
            for _ in range(3):
                client.submit("m", {"x": X})
        except QueueFull as error:
            ends.append(error)
        done.set()

    with MqttClient(mute.url, max_in_flight=2) as client:
        client.submit("m", {"x": X}).add_done_callback(called)
        mute.answer(mute.request(), EMPTY)
        assert done.wait(ANSWER_S)
    assert len(ends) == 1


def test_a_request_larger_than_the_broker_takes_is_refused_before_it_is_sent(models, tmp_path):
    with (
        Broker(tmp_path / "broker", config="max_packet_size 20000") as broker,
        running_daemon(models, tmp_path / "run", mqtt=settings(broker)),
        MqttClient(f"{broker.url}/dev1") as client,
    ):
        client.wait_ready(ANSWER_S)
        assert client.infer("mlp", {"x": floats(200, 16)})["y"].shape == (200, 4)
        for ask in (client.infer, lambda *request: client.submit(*request).result()):
            with pytest.raises(TensorMismatch, match=r"at most 20000 in one message.*ZeroMQ"):
                ask("mlp", {"x": floats(400, 16)})
        assert client.infer("mlp", {"x": X}).version == 1


def test_a_request_larger_than_the_device_takes_is_refused_before_it_is_sent(models, broker, tmp_path):
    with (
        running_daemon(models, tmp_path / "run", mqtt=settings(broker, "small", max_packet_bytes=1 << 20)),
        MqttClient(f"{broker.url}/small") as client,
    ):
        client.wait_ready(ANSWER_S)
        with pytest.raises(TensorMismatch, match=r"small takes at most 1048576 in one message.*ZeroMQ"):
            client.infer("mlp", {"x": floats(20_000, 16)})
        assert client.infer("mlp", {"x": X}).version == 1


def test_many_large_requests_at_once_are_all_sent(url):
    with MqttClient(url) as client:
        futures = [client.submit("nope", {"x": floats(10_000, 16)}) for _ in range(60)]  # 38 MB
        assert {type(future.exception(ANSWER_S)).__name__ for future in futures} == {"ModelNotFound"}


# ---- silence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["infer", "submit"])
def test_silence_is_a_timeout_that_says_what_is_known_of_the_device(mute, way):
    def ask() -> None:
        if way == "infer":
            client.infer("m", {"x": X}, timeout_ms=-900)
        else:
            client.submit("m", {"x": X}, timeout_ms=-900).result(ANSWER_S)

    with MqttClient(mute.url) as client:
        status_is(client, "online")
        with pytest.raises(TimeoutError, match=r"no reply from edge/mute .* within 0.100 s; it is online"):
            ask()
        mute.say(b"offline")
        status_is(client, "offline")
        with pytest.raises(TimeoutError, match="its retained status is 'offline'"):
            ask()


def test_a_device_that_nobody_knows_is_a_timeout_that_names_what_to_check(own_broker):
    with MqttClient(f"{own_broker.url}/ghost", timeout_ms=-900) as client:
        with pytest.raises(TimeoutError, match=r"retains no status of it: .*ACL .* edge/ghost/infer and read reply/"):
            client.models()
        assert not client.is_live()
        with pytest.raises(TimeoutError, match=r"was not ready within 0\.2 s"):
            client.wait_ready(0.2)


def test_a_late_reply_reaches_nobody_else(mute):
    with MqttClient(mute.url) as client:
        late = client.submit("m", {"x": X}, timeout_ms=-900)
        request = mute.request()
        with pytest.raises(TimeoutError):
            late.result(ANSWER_S)
        next_one = client.submit("m", {"x": X})
        mute.answer(request, b"late")
        mute.answer(mute.request(), msgpack.packb([{"v": 1, "model": "m", "version": 7, "outputs": []}]))
        assert next_one.result(ANSWER_S).version == 7


def test_a_device_that_says_it_is_away_is_neither_live_nor_ready_and_is_not_asked(mute):
    mute.say(b"stopped")
    with MqttClient(mute.url) as client:
        assert client.device_status() == "stopped"
        assert not client.is_live()
        assert not client.is_ready()
        mute.say(b"online")
        status_is(client, "online")
        with ThreadPoolExecutor(1) as pool:
            is_live = pool.submit(client.is_live)
            mute.answer(mute.request(), LIVE)
            assert is_live.result(ANSWER_S)


@pytest.mark.parametrize("qos", [0, 1])
def test_a_request_made_before_the_device_came_is_made_again_when_it_is_online(own_broker, qos):
    with MqttClient(f"{own_broker.url}/mute", qos=qos) as client:
        assert client.device_status() == ""
        early = [client.submit("m", {"x": X}) for _ in range(3)]
        client.devices()  # the broker has had them
        with MqttDevice(own_broker.url) as device:
            for _ in early:
                device.answer(device.request(), EMPTY)
            assert [future.result(ANSWER_S).version for future in early] == [1, 1, 1]


def test_a_request_lost_with_its_device_is_answered_when_it_is_back_and_an_answered_one_is_not_asked_again(own_broker):
    with MqttClient(f"{own_broker.url}/mute") as client:
        with MqttDevice(own_broker.url) as device:
            answered, lost = client.submit("a", {"x": X}), client.submit("b", {"x": X})
            device.answer(device.request(), EMPTY)
            assert answered.result(ANSWER_S).version == 1
            assert device.request().topic == "edge/mute/infer/b"
        with MqttDevice(own_broker.url) as device:
            request = device.request()
            assert request.topic == "edge/mute/infer/b"
            device.answer(request, EMPTY)
            assert lost.result(ANSWER_S).version == 1


def test_a_request_to_a_daemon_that_has_yet_to_connect_is_answered(models, own_broker, tmp_path):
    with MqttClient(f"{own_broker.url}/dev1") as client:
        assert client.device_status() == ""
        early = client.submit("mlp", {"x": X})
        client.devices()
        with running_daemon(models, tmp_path, mqtt=settings(own_broker)):
            assert early.result(ANSWER_S).version == 1


# ---- the connection -------------------------------------------------------------------------------------------------


def test_no_broker_is_an_error_at_once_that_says_why():
    with MqttClient("mqtt://127.0.0.1:1/dev1") as client:
        for _ in range(2):
            with pytest.raises(ConnectionError, match="nothing listens there"):
                client.infer("m", {"x": X})
        assert not client.is_live()
        with pytest.raises(ConnectionError, match="nothing listens there"):
            client.devices()
        with pytest.raises(TimeoutError, match="not ready"):
            client.wait_ready(0.2)


def test_a_broker_that_dies_fails_what_is_pending_and_is_used_again_when_it_is_back(mute, own_broker):
    with MqttClient(mute.url, qos=1) as client, ThreadPoolExecutor(1) as pool:
        futures = [client.submit("m", {"x": X}) for _ in range(5)]
        asked = pool.submit(client.models)
        for _ in range(6):
            mute.request()

        own_broker.kill()

        for future in (*futures, asked):
            with pytest.raises(ConnectionError, match="was lost before an answer was there"):
                future.result(ANSWER_S)
        with pytest.raises(ConnectionError):
            client.infer("m", {"x": X})
        own_broker.restart()
        with MqttDevice(own_broker.url) as device:
            again = next(attempts(client))
            request = device.request()
            device.answer(request, msgpack.packb([{"v": 1, "model": "m", "version": 2, "outputs": []}]))
            assert again.result(ANSWER_S).version == 2


def attempts(client: MqttClient):
    """Futures of requests that could be sent."""
    for _ in range(100):
        try:
            yield client.submit("m", {"x": X})
        except ConnectionError:
            continue


def test_a_request_given_up_is_not_sent_to_a_broker_that_comes_back(own_broker):
    with (
        FaultProxy(own_broker.port) as proxy,
        MqttDevice(own_broker.url) as device,
        MqttClient(f"mqtt://127.0.0.1:{proxy.port}/mute", qos=1) as client,
    ):
        assert client.device_status() == "online"
        proxy.black_hole()
        lost = client.submit("given-up", {"x": X})
        proxy.cut()
        with pytest.raises(ConnectionError):
            lost.result(ANSWER_S)
        proxy.heal()
        kept = next(attempts(client))
        request = device.request()
        assert request.topic == "edge/mute/infer/m"
        device.answer(request, EMPTY)
        assert kept.result(ANSWER_S).version == 1


def test_closing_fails_what_is_pending_and_is_final(mute):
    client = MqttClient(mute.url)
    future = client.submit("m", {"x": X})
    mute.request()
    client.close()
    client.close()

    with pytest.raises(ConnectionError, match="closed before an answer"):
        future.result(0)
    with pytest.raises(ConnectionError, match="the client is closed"):
        client.infer("m", {"x": X})
    MqttClient(mute.url).close()


def test_closing_ends_a_listing_of_devices(own_broker):
    with FaultProxy(own_broker.port) as proxy, MqttClient(f"mqtt://127.0.0.1:{proxy.port}") as client:
        assert client.devices() == []
        proxy.black_hole()
        with ThreadPoolExecutor(1) as pool:
            listing = pool.submit(client.devices)
            client.close()
            with pytest.raises(ConnectionError, match="closed"):
                listing.result(ANSWER_S)


def test_a_cancelled_future_discards_its_answer_and_frees_its_place(mute):
    with MqttClient(mute.url, max_in_flight=1) as client:
        cancelled = client.submit("m", {"x": X})
        assert cancelled.cancel()
        mute.answer(mute.request(), EMPTY)
        kept = client.submit("m", {"x": X})  # when the first one's answer has come
        mute.answer(mute.request(), EMPTY)
        assert kept.result(ANSWER_S).version == 1
        assert cancelled.cancelled()


def test_threads_that_all_come_first_share_one_connection(url):
    with FaultProxy(int(url.rpartition("/")[0].rpartition(":")[2])) as proxy, ThreadPoolExecutor(16) as pool:
        start = threading.Barrier(16)

        def ask(_) -> int:
            start.wait()
            return client.infer("mlp", {"x": X}).version

        with MqttClient(f"mqtt://127.0.0.1:{proxy.port}/dev1") as client:
            assert set(pool.map(ask, range(16))) == {1}
        assert proxy.connections == 1


def test_a_client_that_was_never_closed_does_not_keep_its_process(url):
    program = f"import edge_runtime; c = edge_runtime.MqttClient({url!r}); assert c.is_live()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "call",
    [
        "c.infer('mlp', {'x': X}, timeout_ms=100)",
        "c.submit('mlp', {'x': X}, timeout_ms=100)",
        "c.models()",
        "c.is_live()",
        "c.devices()",
    ],
)
def test_a_client_in_use_says_in_the_child_of_a_fork_that_it_is_the_parents(url, call):
    program = f"""
import os, signal, warnings, edge_runtime, numpy as np
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12, of every fork
X = np.zeros((1, 16), np.float32)
c = edge_runtime.MqttClient({url!r})
c.infer("mlp", {{"x": X}})
if (pid := os.fork()) == 0:
    signal.alarm(60)
    try:
        {call}
    except RuntimeError as error:
        c.close()
        os._exit(0 if "make a new one" in str(error) else 4)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
c.infer("mlp", {{"x": X}})
c.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_client_in_a_reference_cycle_does_not_keep_its_process(url):
    program = f"""
import gc, edge_runtime
c = edge_runtime.MqttClient({url!r})
assert c.is_live()
c.itself = c
del c
gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_broker_is_spoken_to_in_its_own_version(models, own_broker, tmp_path):
    with (
        running_daemon(models, tmp_path / "run", mqtt=settings(own_broker)),
        FaultProxy(own_broker.port, refuse_mqtt5=True) as proxy,
    ):
        wait_ready(f"{own_broker.url}/dev1")
        for qos in (0, 1):
            with MqttClient(f"mqtt://127.0.0.1:{proxy.port}/dev1", qos=qos) as client:
                assert client.infer("mlp", {"x": X}, timeout_ms=20_000).version == 1
                futures = [client.submit(model, {"x": X}) for model in ("mlp", "queued") * 50]
                assert {future.result(ANSWER_S).version for future in futures} == {1}
                assert {entry["name"] for entry in client.models()} == {"mlp", "queued"}
                assert [device.device_id for device in client.devices()] == ["dev1"]
                with pytest.raises(TensorMismatch):
                    client.infer("mlp", {"x": floats(1, 15)})


def test_a_wrong_password_or_a_broker_without_tls_is_an_error_at_once(tmp_path):
    password = tmp_path / "password"
    password.write_text("wrong\n")
    (tmp_path / "users").write_text("alice:$7$101$AAAAAAAAAAAAAAAA$" + "A" * 86 + "==\n")
    config = f"password_file {tmp_path / 'users'}"
    with Broker(tmp_path / "broker", config=config) as broker:
        where = f"mqtt://alice@127.0.0.1:{broker.port}/dev1"
        with (
            MqttClient(where, password_file=str(password)) as client,
            pytest.raises(ConnectionError, match="check username"),
        ):
            client.models()
        with (
            MqttClient(f"mqtts://127.0.0.1:{broker.port}/dev1") as client,
            pytest.raises(ConnectionError, match=f"^mqtts://127.0.0.1:{broker.port}: "),
        ):
            client.models()


# ---- who is there ---------------------------------------------------------------------------------------------------


def test_devices_lists_who_is_online_who_stopped_and_who_was_lost(models, own_broker, tmp_path):
    with running_daemon(models, tmp_path / "run", mqtt=settings(own_broker)), Peer(own_broker.url) as peer:
        peer.subscribe("edge/dev1/state", 1)
        peer.next()  # its first answer may come a moment before its first word of itself
        wait_ready(f"{own_broker.url}/dev1")
        peer.publish("edge/dev2/status", b"stopped", 1, retain=True)
        peer.publish("edge/dev2/state", json.dumps({"health": "stopping"}), 1, retain=True)
        peer.publish("edge/dev3/status", b"offline", 1, retain=True)
        peer.publish("edge/dev3/state", b"\xff not json", 1, retain=True)
        peer.publish("edge/ghost/state", b"{}", 1, retain=True)
        peer.publish("edge/not an id/status", b"online", 1, retain=True)
        peer.publish("other/dev4/status", b"online", 1, retain=True)

        with MqttClient(own_broker.url) as client:
            for _ in range(3):
                first, *others = client.devices()
                assert (first.device_id, first.status, first.is_online) == ("dev1", "online", True)
                assert first.state["models"]["mlp"]["version"] == 1
                assert others == [Device("dev2", "stopped", {"health": "stopping"}), Device("dev3", "offline")]
            with pytest.raises(ConfigError, match="names no device"):
                client.is_live()
            with pytest.raises(ConfigError, match="names no device"):
                client.infer("mlp", {"x": X})
        with MqttClient(own_broker.url, prefix="other") as client:
            assert client.devices() == [Device("dev4", "online")]
    with MqttClient(own_broker.url) as client:
        assert [device.status for device in client.devices()] == ["stopped", "stopped", "offline"]


def test_a_fleet_is_listed_whole_while_requests_go_on(client, broker):
    with Peer(broker.url) as peer:
        for index in range(600):
            peer.publish(f"fleet/site/d{index}/status", b"online", retain=True)
            peer.publish(f"fleet/site/d{index}/state", b'{"n": %d, "pad": "%s"}' % (index, b"x" * 400), retain=True)
        peer.publish("fleet/site/last/status", b"online", 1, retain=True)
        url = f"{broker.url}/dev1"
        with MqttClient(url, prefix="fleet/site") as lister:
            found = lister.devices()
            assert len(found) == 601
            assert sum(device.state is not None for device in found) == 600
            with ThreadPoolExecutor(4) as pool:
                lists = [pool.submit(lister.devices) for _ in range(6)]
                assert {client.infer("mlp", {"x": X}).version for _ in range(50)} == {1}
                assert {len(each.result(ANSWER_S)) for each in lists} == {601}


def test_a_fleet_larger_than_the_broker_queues_is_listed_whole_by_many_at_once(tmp_path):
    with (
        Broker(tmp_path / "broker", config="max_queued_messages 200") as broker,
        Peer(broker.url) as peer,
        ThreadPoolExecutor(6) as pool,
    ):
        for index in range(1_500):
            peer.publish(f"edge/d{index}/status", b"online", retain=True)
            peer.publish(f"edge/d{index}/state", b'{"pad": "%s"}' % (b"x" * 4_000), retain=True)
        peer.publish("edge/last/status", b"online", 1, retain=True)
        with MqttClient(broker.url) as client:
            for listing in [pool.submit(client.devices) for _ in range(6)]:
                found = listing.result(ANSWER_S)
                assert len(found) == 1_501
                assert sum(device.state is not None for device in found) == 1_500


def test_a_retained_message_comes_also_when_replies_fill_the_connection(mute):
    """mosquitto 2.0.11 keeps it back then, until it has something else to send."""
    may_go_on = threading.Event()
    with MqttClient(mute.url) as client, ThreadPoolExecutor(1) as pool:
        future = client.submit("m", {"x": X})
        future.add_done_callback(lambda _: may_go_on.wait(ANSWER_S))  # the thread that reads stands still
        request = mute.request()
        mute.answer(request, EMPTY)
        future.result(ANSWER_S)
        for _ in range(24):
            mute.answer(request, bytes(1 << 20))
        listing = pool.submit(client.devices)
        mute.say(b"online")  # acknowledged: the broker has taken what came before
        may_go_on.set()
        assert [device.device_id for device in listing.result(ANSWER_S)] == ["mute"]


def test_listing_devices_is_an_error_when_the_broker_dies_meanwhile(own_broker):
    with FaultProxy(own_broker.port) as proxy, MqttClient(f"mqtt://127.0.0.1:{proxy.port}") as client:
        assert client.devices() == []
        proxy.black_hole("down")
        with ThreadPoolExecutor(1) as pool:
            listing = pool.submit(client.devices)
            proxy.cut()
            with pytest.raises(ConnectionError):
                listing.result(ANSWER_S)


# ---- how it is made -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        (("tcp://h:1",), {}, "mqtt"),
        (("mqtt://alice:secret@h/d",), {}, "password_file"),
        (("mqtt://h/a+b",), {}, "wanted 1 to 64 letters"),
        (("mqtt://h/a", "b"), {}, "name one device"),
        (("mqtt://h/a",), {"qos": 2}, "wanted 0 or 1"),
        (("mqtt://h/a",), {"prefix": "a/#"}, "prefix"),
        (("mqtt://h/a",), {"username": "a+b"}, "cannot be part of a topic"),
        (("mqtt://h/a",), {"password_file": "/nowhere"}, "there is no file"),
        (("mqtts://h/a",), {"cert_file": "/etc/hostname"}, "needs both"),
    ],
)
def test_an_impossible_option_is_refused_when_the_client_is_made(arguments, options, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        MqttClient(*arguments, **options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("topic", ["edge/dev1/infer/x", "reply/#", "$SYS/x", "edge/dev1/command/check-update"])
def test_a_reply_topic_that_others_listen_to_is_refused(topic):
    with pytest.raises(Forbidden):
        MqttClient("mqtt://h/dev1", reply_topic=topic)


def test_the_device_may_stand_in_the_url_or_beside_it(broker, url):
    with MqttClient(broker.url, "dev1") as client:
        assert client.endpoint == url
        np.testing.assert_array_equal(client.infer("mlp", {"x": X.tolist()})["y"].shape, (1, 4))


def test_the_package_offers_it_and_imports_it_only_when_it_is_used():
    assert edge_runtime.MqttClient is MqttClient
    program = "import sys, edge_runtime; edge_runtime.Client; sys.exit('paho' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_arrays_that_a_client_allocates_give_the_same_answers(client):
    frame, scores = client.allocate((1, 16), np.float32), client.allocate((1, 4), np.float32)
    frame[:] = 0.5
    result = client.infer("mlp", {"x": frame}, outputs={"y": scores})
    assert result["y"] is scores
    assert result.shared == ()
    np.testing.assert_array_equal(client.infer("mlp", {"x": np.full((1, 16), 0.5, np.float32)})["y"], scores)
