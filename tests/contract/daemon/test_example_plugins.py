"""The plug-ins of docs/plugins.md: installed by pip into a folder, without a network, and used by a daemon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Client
from edge_runtime.testing import mlp_answer, mlp_input, mlp_weights
from tests.fakes.daemon_process import DaemonProcess

EXAMPLES = Path(__file__).parents[3] / "examples" / "plugins"
MOST_LINES = {"dense-backend": 100, "lines-door": 150}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    examples = [str(EXAMPLES / name) for name in MOST_LINES]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *examples], check=True, timeout=300
    )
    return folder


@pytest.mark.parametrize(("name", "most"), MOST_LINES.items())
def test_an_example_is_short(name: str, most: int) -> None:
    files = [file for file in (EXAMPLES / name).rglob("*.py") if "tests" not in file.parts]
    assert sum(len(file.read_text().splitlines()) for file in files) < most


@pytest.mark.parametrize("name", MOST_LINES)
def test_an_example_passes_our_contract_by_one_command(name: str, site: Path) -> None:
    tests = EXAMPLES / name / "tests" / "test_contract.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tests),
         "-k", "not again_and_again"],
        env={**os.environ, "PYTHONPATH": str(site)}, cwd=tests.parent, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_daemon_serves_the_made_up_format_through_the_made_up_door(site: Path, tmp_path: Path) -> None:
    first, second = mlp_weights()
    folder = tmp_path / "models" / "mlp" / "1"
    folder.mkdir(parents=True)
    biases = {"b0": np.zeros(32, np.float32), "b1": np.zeros(4, np.float32)}
    with (folder / "model.dense").open("wb") as file:
        np.savez(file, w0=first, w1=second, **biases)
    config = (
        'plugins = ["edge-runtime-dense", "edge-runtime-lines"]\nlines.endpoint = "127.0.0.1:0"\n'
        '[[backends]]\nname = "dense"\n'
    )
    x = mlp_input(2)
    with DaemonProcess(tmp_path, config=config, PYTHONPATH=str(site)) as daemon:
        daemon.wait_ready()
        with Client(daemon.endpoint) as client:
            np.testing.assert_allclose(client.infer("mlp", {"x": x})["y"], mlp_answer(x), rtol=1e-4, atol=1e-4)
            stats = client.stats()
        assert [each["state"] for each in stats["plugins"]] == ["ready", "ready"]
        assert (stats["models"][0]["backend"], stats["models"][0]["state"]) == ("dense", "ready")
        assert stats["models"][0]["host"]["pid"] not in (None, daemon.process.pid)
        host, _, port = stats["lines"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rwb") as file:
            tensor = {"name": "x", "datatype": "FP32", "shape": [2, 16], "data": x.ravel().tolist()}
            file.write(json.dumps({"model": "mlp", "inputs": [tensor]}).encode() + b"\n")
            file.flush()
            answer = json.loads(file.readline())
        y = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, 4)
        np.testing.assert_allclose(y, mlp_answer(x), rtol=1e-4, atol=1e-4)
        assert daemon.stop() == 0
