"""Every example of docs/python-models.md does what the page says."""

from __future__ import annotations

import logging
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import edge_runtime
from edge_runtime.cli.main import main
from edge_runtime.daemon.daemon import Daemon
from tests.contract.running_daemon import running_daemon

PAGE = (Path(__file__).parents[3] / "docs" / "python-models.md").read_text(encoding="utf-8")

BLOCKS: dict[str, str] = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
"""Each fenced block of the page by the file that its first line names."""

FILES = {n: text for n, text in BLOCKS.items() if "import torch" not in text and "import catboost" not in text}
"""Those that need neither PyTorch nor CatBoost; tests/converters has the others."""


def test_every_block_of_the_page_names_its_file() -> None:
    assert len(BLOCKS) == PAGE.count("\n```") // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of the page, and a picture of a cat, more or less."""
    made = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    Image.new("RGB", (40, 30), (51, 51, 51)).save(made / "cat.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        exec(FILES["sample.py"], {})
    return made


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = folder / "config.toml"
    assert config.read_text().strip() == "python_models = true"
    with running_daemon(folder / "models", tmp_path_factory.mktemp("run"), python_models=True) as daemon:
        with edge_runtime.Client(daemon.endpoints[0]) as client:  # the worker that stands in for one that waits stays
            assert brightness(client, folder, 1) == pytest.approx([0.2])
        yield daemon


def brightness(client: edge_runtime.Client, folder: Path, rows: int) -> list[float]:
    picture = np.array([(folder / "cat.png").read_bytes()] * rows, object)
    return list(client.infer("brightness", {"picture": picture}, timeout_ms=60_000)["brightness"])


@pytest.fixture
def client(daemon: Daemon) -> Iterator[edge_runtime.Client]:
    with edge_runtime.Client(daemon.endpoints[0]) as client:
        yield client


def test_every_model_of_the_page_is_ready(client: edge_runtime.Client) -> None:
    told = {each["name"]: (each["state"], each["reason"]) for each in client.models()}
    assert told == dict.fromkeys(("average", "brightness", "doubler", "scaler", "talking", "thumbnail"), ("ready", ""))


@pytest.mark.smoke
def test_the_first_model_scales(client: edge_runtime.Client) -> None:
    got = client.infer("scaler", {"x": np.ones((2, 4), np.float32)})["y"]
    assert got.tolist() == [[3.0] * 4] * 2


def test_a_model_of_tritons_fails_one_request_of_a_batch_alone(client: edge_runtime.Client) -> None:
    given = [np.full((1, 4), number, np.float32) for number in (1, -1, 2)]
    one, bad, two = [client.submit("doubler", {"x": x}) for x in given]
    assert (one.result(60.0)["y"].tolist(), two.result(60.0)["y"].tolist()) == ([[2.0] * 4], [[4.0] * 4])
    with pytest.raises(edge_runtime.errors.TensorMismatch, match="x is negative"):
        bad.result(60.0)


def test_state_lives_from_request_to_request(client: edge_runtime.Client) -> None:
    def mean(sensor: int, value: float) -> float:
        given = {"sensor": np.array([sensor]), "value": np.array([value], np.float32)}
        return float(client.infer("average", given)["mean"][0])

    assert [mean(1, 2.0), mean(1, 4.0), mean(2, 10.0)] == [2.0, 3.0, 10.0]


def test_a_client_sends_the_file_as_it_is(
    folder: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    endpoint, real = daemon.endpoints[0], edge_runtime.Client
    monkeypatch.setattr(edge_runtime, "Client", lambda: real(endpoint), raising=False)
    exec(FILES["ask.py"], {})
    assert capsys.readouterr().out == "(1, 3, 32, 32)\n"


def test_a_model_asks_another_one(folder: Path, client: edge_runtime.Client) -> None:
    assert brightness(client, folder, 3) == pytest.approx([0.2] * 3)


def test_a_model_logs_to_the_daemons_log(client: edge_runtime.Client, caplog: pytest.LogCaptureFixture) -> None:
    heard = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "models/talking/1: INFO:root:got 5 rows" in record.getMessage():
                heard.set()

    caplog.set_level(logging.INFO)
    listener = Listener()
    logging.getLogger().addHandler(listener)
    try:
        client.infer("talking", {"x": np.zeros(5, np.float32)})
        assert heard.wait(60)
    finally:
        logging.getLogger().removeHandler(listener)


def test_the_command_of_the_page_asks_a_model(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"`edge-runtime (infer scaler .*?)`", PAGE)
    assert main([*shlex.split(command), "--connect", daemon.endpoints[0]]) == 0
    assert "y" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("test_")])
def test_the_tests_of_the_page_pass(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    found: dict[str, Any] = {}
    exec(FILES[name], found)
    tests = [each for key, each in found.items() if key.startswith("test_")]
    assert tests
    for test in tests:
        test()
