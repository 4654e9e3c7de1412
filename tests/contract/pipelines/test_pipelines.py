"""Pipelines behind a real daemon: models like any other through every door, whose steps may be loaded anew."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DeadlineUnmeetable, EdgeRuntimeError, RunFailed
from tests.contract.open_doors import ASKED, OpenDoors, open_doors
from tests.contract.running_daemon import ANSWER_S, put_model, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.models import onnx_models, python_models

INLINE = 'mode = "inline"\nisolation = "never"\n'
HOSTED = 'mode = "workers"\nisolation = "always"\n'

THREE = """
[[step]]
name = "first"
model = "{0}1"
inputs = {{x = "input.x"}}
[[step]]
name = "second"
model = "{0}2"
inputs = {{x = "first.y"}}
[[step]]
name = "third"
model = "{0}3"
inputs = {{x = "second.y"}}
[output]
y = "third.y"
"""

MAPPED = """
[[step]]
name = "found"
model = "tiny1"
inputs = {x = "input.x"}
[[step]]
name = "each"
model = "hosted1"
map = "found.y"
inputs = {x = "found.y"}
[[step]]
name = "many"
model = "tiny3"
when = "found.y > 100"
inputs = {x = "found.y"}
[output]
each = "each.y"
many = "many.y"
"""

CROPPED = """
[[step]]
name = "crop"
model = "means"
raw = true
crop = {picture = "input.picture", box = "input.boxes"}
inputs = {image = "input.boxes"}
[input.picture]
datatype = "BYTES"
shape = [1]
[input.boxes]
datatype = "FP32"
shape = [-1, 4]
[output]
scores = "crop.scores"
"""

FAILING = """
[[step]]
name = "good"
model = "tiny1"
inputs = {x = "input.x"}
[[step]]
name = "bad"
model = "raises"
inputs = {x = "good.y"}
[output]
y = "bad.y"
"""


def put_pipeline(models: Path, name: str, text: str) -> None:
    (models / name).mkdir()
    (models / name / "pipeline.toml").write_text(text)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for index in (1, 2, 3):
        put_model(models, f"tiny{index}", onnx_models.added, toml=INLINE, constant=float(index))
        put_model(models, f"hosted{index}", onnx_models.added, toml=HOSTED, constant=float(index))
    tensors = [("x", "FP32", [-1, 2])], [("y", "FP32", [-1, 2])]
    python_models.write(models / "raises" / "1", *tensors, "def infer(inputs):\n    raise ValueError('no luck')\n")
    (models / "raises" / "model.toml").write_text("batch = true\n[warmup]\nruns = 0\n")
    put_pipeline(models, "tiny", THREE.format("tiny"))
    put_pipeline(models, "hosted", THREE.format("hosted"))
    put_pipeline(models, "mapped", MAPPED)
    put_pipeline(models, "failing", FAILING)
    put_model(models, "means", onnx_models.colours, toml='[input.image]\nfit = "stretch"\nrange = "0..1"\n')
    put_pipeline(models, "cropped", CROPPED)
    return models


@pytest.fixture(scope="module")
def daemon(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(models, tmp_path_factory.mktemp("run"), python_models=True, calibrate=False) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.endpoints[1], max_in_flight=256) as client:
        yield client


def rows(value: float, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((count, 2), value, np.float32)}


@pytest.mark.smoke
@needs_mosquitto
def test_a_pipeline_is_a_model_through_every_door(models: Path, tmp_path: Path) -> None:
    settings = {"python_models": True, "calibrate": False}
    with (
        Broker(tmp_path / "broker") as broker,
        open_doors(models, broker, tmp_path / "doors", "p", **settings) as doors,
    ):
        assert isinstance(doors, OpenDoors)
        for door in ASKED:
            with doors.asking(door) as ask:
                for name in ("tiny", "hosted"):
                    assert ask(name, rows(1.0, 3))["y"].tolist() == [[7.0, 7.0]] * 3, (door, name)
                mapped = ask("mapped", rows(1.0, 2))
                assert mapped["each"].tolist() == [[3.0, 3.0]] * 2, door
                assert mapped["many"].shape == (0, 2), door
                with pytest.raises(EdgeRuntimeError, match=r"step bad: .*no luck"):
                    ask("failing", rows(1.0))


@pytest.mark.parametrize("name", ["tiny", "hosted"])
def test_many_requests_in_flight_each_get_their_own_answer(client: Client, name: str) -> None:
    asked = [client.submit(name, rows(float(index))) for index in range(500)]
    assert [float(each.result(ANSWER_S)["y"][0, 0]) for each in asked] == [index + 6.0 for index in range(500)]


@pytest.mark.parametrize("name", ["tiny", "hosted"])
def test_steps_may_be_loaded_anew_under_load_and_no_request_fails(client: Client, name: str) -> None:
    is_over = threading.Event()
    answers: set[float] = set()
    failures: list[EdgeRuntimeError] = []

    def ask() -> None:
        while not is_over.is_set():
            for each in [client.submit(name, rows(1.0)) for _ in range(32)]:
                try:
                    answers.add(float(each.result(ANSWER_S)["y"][0, 0]))
                except EdgeRuntimeError as error:
                    failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(9):
            client.load(f"{name}{turn % 3 + 1}")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert answers == {7.0}


def test_stats_report_each_steps_share(client: Client) -> None:
    client.infer("hosted", rows(1.0))
    steps = client.stats()["metrics"]["models"]["hosted"]["steps"]
    assert list(steps) == ["first", "second", "third"]
    assert all(each["requests"] >= 1 and each["run_s"] > 0 for each in steps.values())


def test_a_deadline_of_the_whole_is_refused_at_the_door(client: Client) -> None:
    client.infer("hosted", rows(1.0))
    ran = client.stats()["metrics"]["models"]["hosted"]["steps"]["first"]["requests"]
    with pytest.raises(DeadlineUnmeetable):
        client.infer("hosted", rows(1.0), timeout_ms=0.001)
    assert client.stats()["metrics"]["models"]["hosted"]["steps"]["first"]["requests"] == ran


def test_a_failure_says_its_step_once(client: Client) -> None:
    with pytest.raises(RunFailed, match=r"^step bad: [^:]+: ValueError: no luck \(model.py:[0-9]+\)$"):
        client.infer("failing", rows(1.0))
    assert client.infer("tiny", rows(1.0))["y"][0, 0] == 7.0


def test_boxes_of_an_encoded_picture_are_cut_out_in_a_host(client: Client) -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    image[:20, :30, 0] = image[20:, 30:, 2] = 250
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    boxes = np.array([[0, 0, 30, 20], [30, 20, 60, 40]], np.float32)
    given = {"picture": np.array([file.getvalue()], object), "boxes": boxes}
    assert client.infer("cropped", given)["scores"].argmax(axis=1).tolist() == [0, 2]
    assert client.infer("cropped", given | {"boxes": boxes[:0]})["scores"].shape == (0, 3)
    with pytest.raises(EdgeRuntimeError, match=r"step decode_1: no picture can be read"):
        client.infer("cropped", given | {"picture": np.array([b"no picture"], object)})


def test_a_client_that_leaves_takes_its_chains_with_it(daemon: Daemon, client: Client) -> None:
    with Client(daemon.endpoints[1], max_in_flight=2000) as leaving:
        for _ in range(1500):
            leaving.submit("hosted", rows(1.0))
    assert client.infer("hosted", rows(2.0))["y"][0, 0] == 8.0


def test_a_stop_answers_the_chains_under_way(models: Path, tmp_path: Path) -> None:
    with running_daemon(models, tmp_path / "run", python_models=True, calibrate=False) as daemon:
        client = Client(daemon.endpoints[1], max_in_flight=256)
        client.infer("hosted", rows(1.0))
        asked = [client.submit("hosted", rows(float(index))) for index in range(64)]
        asked[0].result(ANSWER_S)
    with client:
        ends = [each.exception(ANSWER_S) for each in asked]
        assert {getattr(end, "code", None) for end in ends} <= {None, "draining"}  # the rest came after the stop
        values = [float(each.result(0)["y"][0, 0]) for each, end in zip(asked, ends, strict=True) if end is None]
        assert values
        assert values == [index + 6.0 for index, end in enumerate(ends) if end is None]
