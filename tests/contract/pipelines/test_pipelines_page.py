"""The pipeline of docs/pipelines.md does what the page says."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import edge_runtime
from edge_runtime.cli.main import main
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.errors import DecodeFailed, RunFailed
from tests.contract.running_daemon import running_daemon
from tests.models import onnx_models

PAGE = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text(encoding="utf-8")

FILES: dict[str, str] = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))

DETECT = (
    '[input.image]\nfit = "stretch"\nrange = "0..255"\n[output.boxes]\nlayout = "yolov8"\nlabels = ["a", "b", "c"]\n'
)
CLASSIFY = '[input.image]\nfit = "stretch"\nrange = "0..255"\n[output.scores]\nanswer = "classes"\nsoftmax = false\n'


OOPS = """
[[step]]
name = "first"
python = "steps.py:find"
inputs = {x = "input.x"}
outputs = {y = {datatype = "FP32", shape = [-1]}}
[input.x]
datatype = "FP32"
shape = [-1]
[output]
y = "first.y"
"""
BROKEN = "import json\n\n\ndef look(text):\n    return json.loads(text)\n\n\ndef find(x):\n    return look('{')\n"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("page")
    models = folder / "models"
    onnx_models.finder(models / "detect" / "1")
    (models / "detect" / "model.toml").write_text(DETECT)
    onnx_models.colours(models / "classify" / "1")
    (models / "classify" / "model.toml").write_text(CLASSIFY)
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (models / "oops").mkdir()
    (models / "oops" / "pipeline.toml").write_text(OOPS)
    (models / "oops" / "steps.py").write_text(BROKEN)
    run = tmp_path_factory.mktemp("run")
    doors = {
        "http": HttpSettings(endpoint=f"unix:{run}/http.sock"),
        "grpc": GrpcSettings(endpoint=f"unix:{run}/grpc.sock"),
    }
    with running_daemon(models, run, python_models=True, **doors) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[edge_runtime.Client]:
    with edge_runtime.Client(daemon.endpoints[0]) as client:
        yield client


def green(width: int, height: int) -> np.ndarray:
    """A white frame whose middle is green."""
    frame = np.full((1, height, width, 3), 255, np.uint8)
    frame[:, height // 4 : -height // 4, width // 4 : -width // 4] = (0, 255, 0)
    return frame


def png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame[0]).save(file, "PNG")
    return file.getvalue()


def test_the_pages_pipeline_finds_cuts_out_and_classifies(client: edge_runtime.Client) -> None:
    answer = client.infer("shelf", picture=png(green(80, 40)), timeout_ms=60_000)
    assert answer["text"].tolist() == [b"green at 20,10: 0.83"]
    assert answer["boxes"].shape[2] == 6


def test_data_that_is_not_a_picture_fails_its_own_request(client: edge_runtime.Client) -> None:
    with pytest.raises(DecodeFailed, match=r"step (detect|decode_1): no picture can be read"):
        client.infer("shelf", picture=b"no picture", timeout_ms=60_000)


def test_the_page_asks_as_it_says(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", daemon.endpoints[0])
    Image.fromarray(green(80, 40)[0]).save("scene.jpg", quality=95)
    exec(FILES["ask.py"].replace("timeout_ms=500", "timeout_ms=60_000"), {})
    assert "green at 20,10" in capsys.readouterr().out


def test_a_step_that_fails_names_the_line_of_its_own_code(client: edge_runtime.Client) -> None:
    with pytest.raises(RunFailed, match=r"^step first: find failed: JSONDecodeError: .* \(steps.py:5\)$"):
        client.infer("oops", {"x": np.zeros(1, np.float32)}, timeout_ms=60_000)


def test_nothing_found_is_an_empty_answer(client: edge_runtime.Client) -> None:
    answer = client.infer("shelf", picture=png(np.zeros((1, 40, 80, 3), np.uint8)), timeout_ms=60_000)
    assert answer["text"].tolist() == []


@pytest.mark.parametrize("door", ["zmq", "http", "grpc"])
def test_models_show_draws_it_as_the_page_does_over_every_door(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], door: str
) -> None:
    folder = Path(daemon.endpoints[0].removeprefix("ipc://")).parent
    endpoint = {"zmq": daemon.endpoints[0]}.get(door, f"{door}+unix://{folder}/{door}.sock")
    assert main(["models", "show", "shelf", "--connect", endpoint]) == 0
    drawn = PAGE.split("```text\n")[1].split("```")[0]
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in drawn.splitlines():
        assert line.rstrip() in shown, "\n".join(shown)


def test_metadata_and_config_report_it(client: edge_runtime.Client) -> None:
    metadata = client.metadata("shelf")
    assert metadata["platform"] == "pipeline"
    assert metadata["pipeline"]["levels"] == [["detect", "decode_1"], ["classify"], ["join"]]
    assert [each["name"] for each in metadata["inputs"]] == ["picture"]
    assert {each["name"]: each["shape"] for each in metadata["outputs"]} == {"text": [-1], "boxes": [-1, 100, 6]}
