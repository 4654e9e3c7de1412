"""Frigate's detectors at the daemon's own door: handshakes, models that they send, and what they are answered."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import zmq

from edge_runtime.backends import registry
from edge_runtime.builds.build_store import BuildNews
from edge_runtime.config.settings import BackendSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.errors import ConfigError
from edge_runtime.frigate import frontend as frigate_frontend
from edge_runtime.frigate.settings import FrigateSettings
from edge_runtime.hosts import instance as host_instance
from tests.contract.running_daemon import (
    ANSWER_S,
    RawClient,
    error_code,
    frigate_url,
    http_url,
    put_model,
    running_daemon,
)
from tests.contract.updates.updated_device import update_settings
from tests.fakes.frigate_detector import Detector, picture
from tests.fakes.slow_compiler import SlowCompiler
from tests.fakes.update_site import UpdateSite
from tests.models import onnx_models

FOUND = [0.25, 0.25, 0.75, 0.75]
"""Where the finder's box is."""

SHORT_MS = 300
"""Timeout of a detector that is to get no answer."""


@contextmanager
def serving(tmp_path, *, frigate=None, **settings):
    (tmp_path / "models").mkdir(exist_ok=True)
    own = FrigateSettings(
        endpoint=f"ipc://{tmp_path}/detector",
        **{"accept_models": True, "timeout_ms": 10_000.0, "models": {"mapped.onnx": "served"}, **(frigate or {})},
    )
    with running_daemon(tmp_path / "models", tmp_path / "run", frigate=own, calibrate=False, **settings) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models that detectors have: each finds another class."""
    folder = tmp_path_factory.mktemp("files")
    return [onnx_models.finder(folder / str(label), label=label) for label in range(3)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("daemon")
    put_model(folder / "models", "served", onnx_models.finder, label=2, toml='isolation = "always"\n')
    with serving(folder) as daemon:
        yield daemon


def listing(daemon):
    with RawClient(daemon.endpoints[0]) as client:
        return {each["name"]: each for each in client.result("models")}


def received(daemon):
    """The models that detectors sent, once the loader has done what was asked of it so far."""
    with RawClient(daemon.endpoints[0]) as client:
        client.ask_json(op="load", model="absent")
    return {name: each for name, each in listing(daemon).items() if name.startswith("frigate-")}


def finds(detector, label):
    """Whether a detector is answered by the model that finds this class."""
    table = detector.detect_raw(picture())
    assert not detector.errors, detector.errors
    np.testing.assert_allclose(table[0], [label, 1.0, *FOUND], atol=1e-5)
    assert not table[1:].any()
    return True


# ---- handshakes ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_detector_sends_its_model_once_and_is_answered_by_it(daemon, files):
    with Detector(frigate_url(daemon), files[0]) as detector:
        assert detector.handshakes == [
            {"model_available": False, "model_loaded": False},
            {"model_available": True, "model_loaded": True, "model_saved": True},
        ]
        assert finds(detector, 0)


def test_a_name_is_not_an_identity_each_detector_is_answered_by_the_model_that_it_sent(daemon, files):
    with (
        Detector(frigate_url(daemon), files[0], name="model.onnx") as first,
        Detector(frigate_url(daemon), files[1], name="model.onnx") as second,
    ):
        for _ in range(3):
            assert finds(first, 0)
            assert finds(second, 1)


def test_a_mapped_name_is_the_served_model_and_takes_no_bytes(daemon):
    with Detector(frigate_url(daemon), None, name="mapped.onnx") as detector:
        assert detector.handshakes == [{"model_available": True, "model_loaded": True}]
        assert finds(detector, 2)


def test_a_mapped_model_may_run_inside_the_daemon(tmp_path):
    put_model(tmp_path / "models", "served", onnx_models.finder, label=2, toml='mode = "inline"\n')
    with serving(tmp_path) as daemon, Detector(frigate_url(daemon), None, name="mapped.onnx") as detector:
        assert listing(daemon)["served"]["mode"] == "inline"
        assert finds(detector, 2)


def test_a_name_mapped_to_what_is_not_served_fails_with_the_reason(tmp_path):
    with (
        serving(tmp_path, frigate={"models": {"mapped.onnx": "absent"}}) as daemon,
        Detector(frigate_url(daemon), None, name="mapped.onnx") as detector,
    ):
        (reply,) = detector.handshakes
        assert reply["model_available"] is True
        assert reply["model_loaded"] is False
        assert "'absent' is not found" in reply["error"]
        assert not detector.is_ready


def test_a_connection_that_is_not_known_gets_no_answer_and_shakes_hands_again(daemon, files):
    with Detector(frigate_url(daemon), files[0], request_timeout_ms=SHORT_MS) as detector:
        detector._create_socket()  # as after a restart of ours: a connection that sent nothing
        assert not detector.detect_raw(picture()).any()
        assert not detector.errors
        assert len(detector.handshakes) == 4
        detector._request_timeout_ms = 10_000
        detector._socket.set(zmq.RCVTIMEO, 10_000)
        assert finds(detector, 0)


@pytest.mark.parametrize("fields", [{}, {"model_name": ""}, {"model_name": 7}, {"model_name": None}])
def test_a_handshake_without_a_name_is_refused_and_the_connection_keeps_its_model(daemon, files, fields):
    with Detector(frigate_url(daemon), files[1]) as detector:
        assert finds(detector, 1)
        header, _ = detector.send(json.dumps({"model_request": True, **fields}).encode())
        assert "model_name: got" in json.loads(header)["error"]
        assert finds(detector, 1)
        assert len(detector.handshakes) == 2


def test_a_connection_whose_model_was_not_taken_gets_no_answer_to_pictures(daemon, tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with Detector(frigate_url(daemon), broken, request_timeout_ms=SHORT_MS) as detector:
        assert detector.handshakes[1]["model_saved"] is True
        assert detector.handshakes[1]["model_loaded"] is False
        assert detector.handshakes[1]["error"]
        with pytest.raises(zmq.Again):
            detector.send(detector._header(picture()), picture().tobytes())
    assert all(each["state"] != "failed" for each in received(daemon).values())


def test_a_detector_waits_while_its_model_loads_and_is_answered_in_time(daemon, files, monkeypatch):
    monkeypatch.setattr(frigate_frontend, "HANDSHAKE_S", 0.2)
    may_load = threading.Event()
    loader = daemon._core.loader
    loader._executor.submit(lambda: may_load.wait(ANSWER_S) and None)
    try:
        with Detector(frigate_url(daemon), files[1]) as detector:
            assert detector.handshakes[-1] == {"model_available": True, "model_loaded": True, "model_saved": True}
            assert not detector.detect_raw(picture()).any(), "nothing is found before the model is loaded"
            assert "not loaded yet" in detector.errors[0]
            may_load.set()
            while not detector.detect_raw(picture()).any():
                assert "load" in detector.errors[-1]
            detector.errors.clear()
            assert finds(detector, 1)
            assert len(detector.handshakes) == 2, "the same connection all along"
    finally:
        may_load.set()


@pytest.fixture
def building(tmp_path, monkeypatch):
    """A daemon that runs models by engines alone, which are there when the test says so: it, and the compiler."""
    compiler = SlowCompiler()
    monkeypatch.setattr(registry, "backend", compiler.in_place_of)
    monkeypatch.setattr(registry, "installed", compiler.in_place_of_installed)
    monkeypatch.setattr(host_instance, "HostedBackend", compiler.in_place_of_hosts)
    monkeypatch.setattr(frigate_frontend, "HANDSHAKE_S", 0.2)
    with serving(tmp_path, backends=(BackendSettings(name="tensorrt"),)) as daemon:
        yield daemon, compiler


def end_build(daemon, compiler, tmp_path, failure=""):
    (kept,) = (tmp_path / "run" / "state" / "frigate").glob("*/1/model.onnx")
    if failure:
        compiler.failed[str(kept)] = failure
    else:
        compiler.built.add(str(kept))
    daemon._core.builds.builder.news.put(BuildNews(str(kept), failure, has_ended=True))


def test_a_handshake_is_answered_in_time_while_the_engine_builds_which_then_answers(building, tmp_path, files):
    daemon, compiler = building
    with Detector(frigate_url(daemon), files[1]) as detector:
        assert detector.is_ready
        (found,) = received(daemon).values()
        assert found["state"] == "building"
        assert not detector.detect_raw(picture()).any()
        assert "its engine is being built" in detector.errors[0]
        end_build(daemon, compiler, tmp_path)
        (found,) = received(daemon).values()
        assert (found["state"], found["backend"]) == ("ready", "tensorrt")
        detector.errors.clear()
        assert finds(detector, 1)
        assert len(detector.handshakes) == 2, "the same connection all along"


def test_a_connection_whose_engine_could_not_be_built_is_not_known_any_more(building, tmp_path, files):
    daemon, compiler = building
    with Detector(frigate_url(daemon), files[1], request_timeout_ms=SHORT_MS) as detector:
        assert detector.is_ready
        end_build(daemon, compiler, tmp_path, "TensorRT cannot build it: no kernel")
        while len(detector.handshakes) == 2:  # until a picture gets no answer; one may ask for another load before
            assert not detector.detect_raw(picture()).any()
        assert detector.handshakes[-1]["model_loaded"] is False
        assert "no kernel" in detector.handshakes[-1]["error"]
        assert not received(daemon), "what cannot be served does not stay"


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_bytes_for_a_float_model_are_cast_and_not_scaled(daemon, files):
    with Detector(frigate_url(daemon), files[0]) as detector:
        for dtype in ("uint8", "float32"):
            np.testing.assert_allclose(detector.detect_raw(picture(204, dtype=dtype))[0, 1], 0.8, atol=1e-5)
        assert not detector.detect_raw(picture(101)).any(), "scores below 0.4 are left out"


def test_a_model_of_bytes_takes_bytes_and_says_so_of_floats(daemon, tmp_path):
    file = onnx_models.finder(tmp_path, datatype="UINT8")
    with Detector(frigate_url(daemon), file) as detector:
        assert detector.detect_raw(picture())[0, 1] == pytest.approx(1.0)
        assert not detector.detect_raw(picture(dtype="float32")).any()
        assert "set input_dtype" in detector.errors[0]


@pytest.mark.parametrize("shape", [(3, 16, 48), (16, 48, 3)], ids=["channels first", "channels last"])
@pytest.mark.parametrize("rows", ["rows", 1], ids=["any rows", "one row"])
def test_boxes_are_shares_of_the_picture_however_it_lies_in_memory(daemon, tmp_path, shape, rows):
    file = onnx_models.finder(tmp_path, label=1, shape=shape, rows=rows)
    with Detector(frigate_url(daemon), file) as detector:
        table = detector.detect_raw(np.full((1, *shape), 255, np.uint8))
        assert not detector.errors
        np.testing.assert_allclose(table[0], [1, 1.0, *FOUND], atol=1e-5)


def test_a_model_that_wants_height_and_width_too_gets_them(daemon, tmp_path):
    file = onnx_models.sized_finder(tmp_path, height=16, width=64)
    with Detector(frigate_url(daemon), file, "dfine") as detector:
        table = detector.detect_raw(np.full((1, 3, 16, 64), 255, np.uint8))
        assert not detector.errors
        np.testing.assert_allclose(table[0], [7, 1.0, 0.1, 0.2, 0.5, 0.8], atol=1e-5)


MALFORMED = {
    "no JSON": [b"\xff\xfe", b"x"],
    "a list": [b"[1]", b"x"],
    "nothing": [b"", b""],
    "no shape": [b'{"dtype":"uint8","model_type":"ssd"}', b"x"],
    "a negative length": [b'{"shape":[1,3,-32,32],"dtype":"uint8","model_type":"ssd"}', b"x"],
    "a length that is true": [b'{"shape":[true,3,32,32],"dtype":"uint8","model_type":"ssd"}', b"x"],
    "another dtype": [b'{"shape":[1,3,32,32],"dtype":"object","model_type":"ssd"}', b"x"],
    "another type": [b'{"shape":[1,3,32,32],"dtype":"uint8","model_type":"odd"}', bytes(3072)],
    "too few bytes": [b'{"shape":[1,3,32,32],"dtype":"uint8","model_type":"ssd"}', bytes(3071)],
    "another size": [b'{"shape":[1,3,64,64],"dtype":"uint8","model_type":"yolox"}', bytes(12288)],
    "two pictures": [b'{"shape":[2,3,32,32],"dtype":"uint8","model_type":"yolox"}', bytes(6144)],
    "outputs of another type": [b'{"shape":[1,3,32,32],"dtype":"uint8","model_type":"dfine"}', bytes(3072)],
    "three frames": [b'{"shape":[1,3,32,32],"dtype":"uint8","model_type":"ssd"}', bytes(3072), b""],
    "one frame": [b'{"shape":[1,3,32,32],"dtype":"uint8","model_type":"ssd"}'],
    "a long header": [b'{"shape":' + b" " * 20_000 + b"}", b"x"],
    "twelve frames": [b"{}"] * 12,
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
def test_everything_malformed_from_a_known_connection_gets_an_error_and_zeros(daemon, files, frames):
    with Detector(frigate_url(daemon), files[0]) as detector:
        header, data = detector.send(*frames)
        fields = json.loads(header)
        assert fields["error"]
        assert fields["shape"] == [20, 6]
        assert data == bytes(480)
        assert finds(detector, 0), "the connection is as before"


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
def test_nothing_malformed_from_an_unknown_connection_is_answered(daemon, frames):
    with RawClient(frigate_url(daemon), zmq.REQ) as client:
        client.send(*frames)
        with Detector(frigate_url(daemon), None, name="mapped.onnx") as detector:
            assert finds(detector, 2)
        assert client.is_silent()


def test_a_deadline_that_cannot_be_met_is_an_error_in_time_and_the_connection_stays(tmp_path):
    put_model(tmp_path / "models", "served", onnx_models.finder, label=2)
    with (
        serving(tmp_path, frigate={"timeout_ms": 0.001}) as daemon,
        Detector(frigate_url(daemon), None, name="mapped.onnx") as detector,
    ):
        assert not detector.detect_raw(picture()).any()
        assert detector.errors
        assert len(detector.handshakes) == 1


def test_two_detectors_at_once_share_a_batch(tmp_path):
    toml = 'mode = "workers"\nmax_queue_delay_ms = 5000\npreferred_batch_rows = [2]\nmax_batch_rows = 2\n'
    put_model(tmp_path / "models", "served", onnx_models.finder, label=2, toml=toml)
    with (
        serving(tmp_path) as daemon,
        Detector(frigate_url(daemon), None, name="mapped.onnx") as first,
        Detector(frigate_url(daemon), None, name="mapped.onnx") as second,
    ):
        tables = {}
        threads = [
            threading.Thread(target=lambda d=d, level=level: tables.update({level: d.detect_raw(picture(level))}))
            for d, level in ((first, 255), (second, 153))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tables[255][0, 1] == pytest.approx(1.0)
        assert tables[153][0, 1] == pytest.approx(0.6, abs=1e-5)
        with RawClient(daemon.endpoints[0]) as client:
            found = client.result("stats")["metrics"]["models"]["served"]
        assert found["runs"] == 1, found
        assert found["rows"] == 2


# ---- models that detectors send --------------------------------------------------------------------------------------


def test_a_received_model_runs_in_a_host_whatever_the_isolation(tmp_path, files):
    with serving(tmp_path, isolation="never") as daemon, Detector(frigate_url(daemon), files[0]) as detector:
        assert finds(detector, 0)
        (found,) = received(daemon).values()
        assert found["host"]["pid"] > 0


def test_a_received_model_is_listed_by_its_digest_and_no_other_door_may_ask_it(daemon, files):
    with Detector(frigate_url(daemon), files[0]) as detector:
        assert finds(detector, 0)
        names = list(received(daemon))
        assert all(len(name) == len("frigate-") + 32 for name in names)
        inputs = [{"name": "image", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": [1.0] * 3072}]
        with RawClient(daemon.endpoints[1]) as client:
            for name in names:
                refused = client.ask_json(op="infer", model=name, inputs=inputs)
                assert refused["error"]["code"] == "forbidden", refused
                posed = client.ask_json(op="infer", model=name, inputs=inputs, parameters={"door": "frigate"})
                assert posed["error"]["code"] == "forbidden"


def test_a_received_model_is_kept_over_a_restart_and_answers_once_the_detector_has_shaken_hands(tmp_path, files):
    with serving(tmp_path) as daemon, Detector(frigate_url(daemon), files[1]) as detector:
        assert finds(detector, 1)
        (name,) = received(daemon)
    with serving(tmp_path) as daemon:
        found = received(daemon)
        assert list(found) == [name]
        assert found[name]["state"] == "on_demand"
        with Detector(frigate_url(daemon), files[1]) as detector:
            assert detector.handshakes[0]["model_available"] is False, "a name is not an identity"
            assert finds(detector, 1)
        assert list(received(daemon)) == [name]


def test_a_detector_that_outlives_the_daemon_is_answered_by_the_next_one(tmp_path, files):
    with serving(tmp_path) as daemon:
        detector = Detector(frigate_url(daemon), files[1])
        detector.__enter__()
        assert finds(detector, 1)
    try:
        with serving(tmp_path):
            detector._socket.set(zmq.RCVTIMEO, SHORT_MS)
            assert not detector.detect_raw(picture()).any(), "its connection is not known any more"
            assert not detector.errors
            assert finds(detector, 1)
    finally:
        detector.__exit__()


def test_the_model_that_no_detector_uses_leaves_when_too_many_are_kept(tmp_path, files):
    with serving(tmp_path, frigate={"keep_models": 1}) as daemon:
        with Detector(frigate_url(daemon), files[0]) as first:
            assert finds(first, 0)
            with Detector(frigate_url(daemon), files[1]) as second:
                assert second.handshakes[1]["model_loaded"] is False
                assert "frigate.keep_models" in second.handshakes[1]["error"]
            assert finds(first, 0), "a model in use never leaves for another"
            (before,) = received(daemon)
        with Detector(frigate_url(daemon), files[1]) as second:
            assert finds(second, 1)
            (after,) = received(daemon)
            assert after != before
        kept = [each.name for each in (tmp_path / "run" / "state" / "frigate").iterdir()]
        assert kept == [after]


def test_no_model_is_taken_unless_that_is_allowed(tmp_path, files):
    with (
        serving(tmp_path, frigate={"accept_models": False}) as daemon,
        Detector(frigate_url(daemon), files[0]) as detector,
    ):
        reply = detector.handshakes[1]
        assert (reply["model_available"], reply["model_saved"], reply["model_loaded"]) == (False, False, False)
        assert "frigate.accept_models" in reply["error"]
        assert not received(daemon)


def test_no_model_is_taken_while_only_signed_releases_are_served(tmp_path, files):
    with (
        serving(tmp_path, update=update_settings(tmp_path, UpdateSite().root)) as daemon,
        Detector(frigate_url(daemon), files[0]) as detector,
    ):
        reply = detector.handshakes[1]
        assert reply["model_available"] is False
        assert "require_signed" in reply["error"]
        assert not received(daemon)


def test_a_load_by_another_door_cannot_change_how_a_received_model_runs(tmp_path, files):
    http = HttpSettings(endpoint="127.0.0.1:0", control=True)
    with serving(tmp_path, http=http) as daemon, Detector(frigate_url(daemon), files[0]) as detector:
        assert finds(detector, 0)
        (name,) = received(daemon)
        place = f"{http_url(daemon)}/v2/repository/models/{name}/load"
        config = json.dumps({"parameters": {"config": '{"max_batch_size": 1}'}}).encode()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(place, config)
        with caught.value as reply:
            assert json.load(reply)["code"] == "forbidden"
        with urllib.request.urlopen(place, b"{}") as reply:
            assert reply.status == 200
        assert finds(detector, 0)


def test_an_unloaded_model_makes_its_detector_shake_hands_again(daemon, files):
    with Detector(frigate_url(daemon), files[0], request_timeout_ms=SHORT_MS) as detector:
        with RawClient(daemon.endpoints[0]) as client:
            for name in received(daemon):
                assert "result" in client.ask_json(op="unload", model=name)
        assert not detector.detect_raw(picture()).any()
        assert not detector.errors
        detector._socket.set(zmq.RCVTIMEO, 10_000)
        assert finds(detector, 0)


# ---- the socket ------------------------------------------------------------------------------------------------------


def test_without_an_endpoint_there_is_no_door_and_nothing_of_it_is_imported(tmp_path):
    (tmp_path / "models").mkdir()
    script = (
        "import sys\n"
        "from edge_runtime.config.settings import Config\n"
        "from edge_runtime.daemon.assemble import assemble_daemon\n"
        f"daemon = assemble_daemon(Config(models={str(tmp_path / 'models')!r}, state={str(tmp_path / 'state')!r}))\n"
        "print(daemon.doors, [name for name in sys.modules if 'frigate' in name])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["{}", "[]"]


def test_an_address_off_this_machine_has_to_be_asked_for(tmp_path):
    settings = FrigateSettings(endpoint="tcp://0.0.0.0:0", accept_models=True)
    (tmp_path / "models").mkdir()
    with (
        pytest.raises(ConfigError, match=r"frigate\.insecure = true"),
        running_daemon(tmp_path / "models", tmp_path / "run", frigate=settings),
    ):
        pass
    allowed = FrigateSettings(endpoint="tcp://0.0.0.0:*", accept_models=True, insecure=True)
    with running_daemon(tmp_path / "models", tmp_path / "run", frigate=allowed) as daemon:
        assert frigate_url(daemon).startswith("tcp://0.0.0.0:")


def test_an_endpoint_that_could_answer_nobody_is_refused():
    with pytest.raises(ValueError, match="accept_models = true"):
        FrigateSettings(endpoint="ipc:///tmp/never")


def test_the_door_takes_no_other_operation(daemon):
    with RawClient(frigate_url(daemon)) as client, Detector(frigate_url(daemon), None, name="mapped.onnx") as d:
        client.send(b'{"op":"models"}')
        assert finds(d, 2)
        assert client.is_silent()


def test_a_model_that_was_sent_is_not_found_under_its_file_name(daemon):
    with RawClient(daemon.endpoints[1]) as client:
        got = client.ask(b"\x84\xa1v\x01\xa2op\xa5infer\xa5model\xaamodel.onnx\xa6inputs\x90", b"1")
        assert error_code(got) == "model_not_found"
