"""Real models that crash or never end, in real hosts: what their callers, other callers and other models see."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal

import msgpack
import pytest

from edge_runtime.config.settings import LimitSettings
from edge_runtime.tensors import datatype_name
from tests.contract.running_daemon import RawClient, floats, header, put_model, running_daemon
from tests.models import onnx_models
from tests.models.harmful_models import HARMFUL, counting

GOOD = HARMFUL["dividing"].good["x"].tobytes()
BAD = HARMFUL["dividing"].bad["x"].tobytes()
X = floats(1, 16).tobytes()


@pytest.fixture
def models(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp, toml='mode = "workers"\n')
    return tmp_path / "models"


def dividing(**fields) -> bytes:
    return header("dividing", (1, 2), **fields)


def asked(name: str, which: str, **fields) -> tuple[bytes, ...]:
    """A message to a harmful model, with its "good" or "bad" inputs."""
    arrays = getattr(HARMFUL[name], which)
    inputs = [
        {"name": name, "datatype": datatype_name(array.dtype), "shape": list(array.shape)}
        for name, array in arrays.items()
    ]
    frames = [array.tobytes() for array in arrays.values()]
    return (header(name, inputs=inputs, **fields), b"id", *frames)


def ends(client: RawClient, count: int) -> dict[bytes, str]:
    """The replies to `count` requests, by their ids: "answered", or the code and message of an error."""
    found: dict[bytes, str] = {}
    for _ in range(count):
        fields, request_id = [
            msgpack.unpackb(frame) if not at else frame for at, frame in enumerate(client.receive()[:2])
        ]
        assert request_id not in found, "a second reply"
        error = fields.get("error")
        found[request_id] = f"{error['code']}: {error['message']}" if error else "answered"
    return found


@pytest.mark.smoke
def test_a_crash_costs_the_culprit_alone(models, tmp_path):
    put_model(models, "dividing", HARMFUL["dividing"].make, toml="max_batch_rows = 8\n")
    with (
        running_daemon(models, tmp_path / "run", isolation="always", calibrate=False) as daemon,
        RawClient(daemon.endpoints[1]) as greedy,
        RawClient(daemon.endpoints[1]) as polite,
        RawClient(daemon.endpoints[1]) as elsewhere,
    ):
        polite.ask(dividing(), b"", GOOD)
        for index in range(40):
            polite.send(dividing(), b"%d" % index, GOOD)
            elsewhere.send(header("mlp"), b"%d" % index, X)
            if index in {5, 25}:
                greedy.send(dividing(), b"%d" % index, BAD)

        assert ends(polite, 40) == {b"%d" % index: "answered" for index in range(40)}
        assert ends(elsewhere, 40) == {b"%d" % index: "answered" for index in range(40)}
        failed = ends(greedy, 2)
        assert all(end.startswith("run_failed: ") and "SIGFPE" in end for end in failed.values()), failed
        host = next(entry["host"] for entry in polite.result("models") if entry["name"] == "dividing")
        assert host["restarts"] >= 2
        assert {entry["state"] for entry in polite.result("models")} == {"ready"}


CRASHES = [
    (name, library)
    for name, harmful in HARMFUL.items()
    for library, end in harmful.ends.items()
    if end == "crash" and harmful.bad is not None and harmful.make is not counting  # which ends at its warm-up
]


@pytest.mark.parametrize(("name", "library"), CRASHES, ids=[f"{name}-{library}" for name, library in CRASHES])
def test_each_way_to_crash_a_library_costs_the_culprit_alone(models, tmp_path, name, library):
    backend, _, wanted = library.partition(" ")
    there = importlib.util.find_spec(backend) and importlib.metadata.version(backend)
    if not there or (wanted and there != wanted):
        pytest.skip(f"{library} is not here, but {there}")
    put_model(models, name, HARMFUL[name].make, toml=f'backend = "{backend}"\n')
    with (
        running_daemon(models, tmp_path / "run", isolation="always", calibrate=False) as daemon,
        RawClient(daemon.endpoints[1]) as greedy,
        RawClient(daemon.endpoints[1]) as polite,
    ):
        greedy.send(*asked(name, "bad"))
        polite.send(*asked(name, "good"))
        polite.send(header("mlp"), b"mlp", X)
        assert ends(polite, 2) == {b"id": "answered", b"mlp": "answered"}
        assert ends(greedy, 1)[b"id"].startswith("run_failed: ")
        polite.send(*asked(name, "good"))
        assert ends(polite, 1) == {b"id": "answered"}


def test_where_nothing_may_run_again_the_batch_fails(models, tmp_path):
    put_model(models, "dividing", HARMFUL["dividing"].make, toml="rerun = false\n")
    with (
        running_daemon(models, tmp_path / "run", isolation="always", calibrate=False) as daemon,
        RawClient(daemon.endpoints[1]) as client,
    ):
        client.send(dividing(), b"bad", BAD)
        assert ends(client, 1)[b"bad"].startswith("run_failed: ")
        client.send(dividing(), b"good", GOOD)
        assert ends(client, 1) == {b"good": "answered"}


@pytest.mark.parametrize("limit_ms", [1_000.0, 3_600_000.0], ids=["ended", "not yet ended"])
def test_an_endless_run_is_answered_at_its_deadline(models, tmp_path, limit_ms):
    put_model(models, "looping", HARMFUL["looping"].make, toml=f"[limits]\nrun_limit_ms = {limit_ms}\n")
    with (
        running_daemon(models, tmp_path / "run", isolation="always", calibrate=False) as daemon,
        RawClient(daemon.endpoints[1]) as client,
    ):
        client.ask(*asked("looping", "good"))
        client.send(*asked("looping", "bad", timeout_ms=300.0))
        assert ends(client, 1)[b"id"].startswith("deadline_exceeded")


def test_an_endless_run_without_a_deadline_is_ended_at_its_limit(models, tmp_path):
    put_model(models, "looping", HARMFUL["looping"].make, toml="[limits]\nrun_limit_ms = 1000.0\n")
    with (
        running_daemon(models, tmp_path / "run", isolation="always", calibrate=False) as daemon,
        RawClient(daemon.endpoints[1]) as greedy,
        RawClient(daemon.endpoints[1]) as polite,
    ):
        polite.ask(*asked("looping", "good"))
        greedy.send(*asked("looping", "bad"))

        polite.send(header("mlp"), b"mlp", X)
        polite.send(*asked("looping", "good"))
        assert ends(polite, 2) == {b"mlp": "answered", b"id": "answered"}
        assert ends(greedy, 1)[b"id"].startswith("run_failed")


def test_endless_runs_on_every_worker_cost_other_models_no_answer(models, tmp_path):
    put_model(models, "looping", HARMFUL["looping"].make, toml="[limits]\nrun_limit_ms = 1000.0\n")
    with (
        running_daemon(
            models, tmp_path / "run", isolation="always", calibrate=False, limits=LimitSettings(cores=2)
        ) as daemon,
        RawClient(daemon.endpoints[1]) as greedy,
        RawClient(daemon.endpoints[1]) as polite,
    ):
        polite.ask(*asked("looping", "good"))
        for number in range(2):
            name, _, *frames = asked("looping", "bad", timeout_ms=5_000.0 + number)
            greedy.send(name, b"%d" % number, *frames)
        for index in range(10):
            polite.send(header("mlp"), b"%d" % index, X)
        assert ends(polite, 10) == {b"%d" % index: "answered" for index in range(10)}
        assert not any(end == "answered" for end in ends(greedy, 2).values())
        polite.send(*asked("looping", "good"))
        assert ends(polite, 1) == {b"id": "answered"}


def test_a_host_killed_from_outside_costs_nobody_an_answer(models, tmp_path):
    put_model(models, "dividing", HARMFUL["dividing"].make)
    with (
        running_daemon(models, tmp_path / "run", isolation="always", calibrate=False) as daemon,
        RawClient(daemon.endpoints[1]) as client,
        RawClient(daemon.endpoints[1]) as other,
    ):
        for restarts in range(1, 5):
            for index in range(30):
                client.send(dividing(), b"%d" % index, GOOD)
                other.send(header("mlp"), b"%d" % index, X)
            host = next(entry["host"] for entry in daemon_models(daemon) if entry["name"] == "dividing")
            os.kill(host["pid"], signal.SIGKILL)
            wanted = {b"%d" % index: "answered" for index in range(30)}
            assert ends(client, 30) == wanted
            assert ends(other, 30) == wanted
            client.send(dividing(), b"after", GOOD)
            assert ends(client, 1) == {b"after": "answered"}
            host = next(entry["host"] for entry in daemon_models(daemon) if entry["name"] == "dividing")
            assert host["restarts"] == restarts
            assert "SIGKILL" in host["last_end"]


def daemon_models(daemon) -> list[dict]:
    """The result of `models`, asked by a connection of its own: the replies of others stay in order."""
    with RawClient(daemon.endpoints[0]) as client:
        return client.result("models")
