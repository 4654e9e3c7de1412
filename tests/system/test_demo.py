"""The demonstration from outside: it shows what it promises, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from demo import make_vision_model
from demo.broker import find_mosquitto
from demo.daemon import DemoFailed, running_daemon, short_folder
from demo.digits import load_held_out
from demo.latency import flood
from demo.screen import Screen
from edge_runtime import Client
from edge_runtime.messages import InferResult
from tests.fakes.demo_process import LIMIT_S, ROOT, demo_process, read_until, stop
from tests.models import python_models


@pytest.fixture(scope="module", autouse=True)
def _vision_model() -> None:
    if not make_vision_model.MODEL_FILE.exists():
        assert make_vision_model.main([]) == 0


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    """The demonstration, measuring for a moment only, with its output as a pipe."""
    with demo_process("demo.run_demo", "--quick") as started:
        yield started


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with short_folder() as folder:
        yield folder


def test_it_shows_answers_accuracy_latencies_and_a_clean_end(demo: subprocess.Popen[str]) -> None:
    shown, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, shown
    assert re.search(r"accuracy on the held-out images: 9[89]\.\d% \(44\d of 450; training stated 44\d\)", shown)
    assert "same digit as the model run in process: 450 of 450" in shown
    for model, answered_by, in_flight in (
        ("digits", "raw ONNX Runtime", 1), ("digits", "edge-runtime", 64),
        ("mobilenetv2", "raw ONNX Runtime", 1), ("mobilenetv2", "edge-runtime", 16),
    ):  # fmt: skip
        numbers = r"(\s+[\d.,]+){5}"
        assert re.search(rf"^  {model} +{answered_by} +{in_flight}{numbers}$", shown, re.MULTILINE), shown
    assert "every one accounted for" in shown
    if shutil.which("curl") is not None:
        assert re.search(r'^  \{"model_name":"digits".*\n  digit \d; the scan shows a \d$', shown, re.MULTILINE), shown
    if find_mosquitto() is not None:
        assert re.search(
            r'^  \{"id":null,"model_name":"digits".*\n  digit \d; the scan shows a \d$', shown, re.MULTILINE
        ), shown
    else:
        assert "left out: no mosquitto here" in shown
    assert re.search(r"^    7  0\.99\d\d$", shown, re.MULTILINE), shown
    assert (ROOT / "build" / "demo" / "seven.jpg").exists()
    assert "exit status 0" in shown


def test_stopped_in_the_middle_it_leaves_no_daemon_and_no_folder(demo: subprocess.Popen[str]) -> None:
    shown = read_until(demo, "ready after")
    found = re.search(r"ipc://(\S+)/infer\.sock", shown)
    assert found is not None
    folder = Path(found[1])
    children = psutil.Process(demo.pid).children()
    assert any("edge-runtime" in " ".join(child.cmdline()) for child in children)
    assert folder.is_dir()
    stop(demo)
    assert not folder.exists()
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_with_stay_the_page_is_there_until_ctrl_c() -> None:
    with demo_process("demo.run_demo", "--quick", "--stay") as demo:
        shown = read_until(demo, "Ctrl-C ends it")
        found = re.search(r"^  (http://127\.0\.0\.1:\d+/)$", shown, re.MULTILINE)
        assert found is not None, shown
        with urllib.request.urlopen(found[1], timeout=LIMIT_S) as page:
            assert b"<!doctype html>" in page.read(4096).lower()
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=LIMIT_S)
        assert demo.returncode == 0, rest
        assert "exit status 0" in rest


def test_ready_is_each_model_also_where_the_daemon_serves_before_that(tmp_path: Path, short: Path) -> None:
    """A busy machine: `start_limit_s` is over, and a model still loads."""
    folder = tmp_path / "models" / "held" / "1"
    folder.mkdir(parents=True)
    file = python_models.mlp(folder)
    held = "    while not (folder / 'go').exists():\n        time.sleep(0.002)\n"
    file.write_text("import time\n" + file.read_text().replace("def load(folder):\n", f"def load(folder):\n{held}"))
    (tmp_path / "config.toml").write_text("python_models = true\nstart_limit_s = 0.001\n")

    class Polled(Screen):
        """Lets the load end once the daemon says that it is ready."""

        daemon_was_ready_first = False

        def progress(self, text: str) -> None:
            with contextlib.suppress(ConnectionError), Client(f"ipc://{short}/infer.sock") as client:
                if client.is_ready():
                    self.daemon_was_ready_first |= any(entry["state"] == "loading" for entry in client.models())
                    (folder / "go").touch()

    screen, options = Polled(), ["--models", str(tmp_path / "models"), "--config", str(tmp_path / "config.toml")]
    with running_daemon(screen, "starts", short, options, "loaded") as daemon, Client(daemon.endpoint) as client:
        assert [entry["state"] for entry in client.models()] == ["ready"]
    assert screen.daemon_was_ready_first


def test_a_model_that_cannot_be_loaded_fails_the_demonstration_at_once(tmp_path: Path, short: Path) -> None:
    (tmp_path / "models" / "broken" / "1").mkdir(parents=True)
    (tmp_path / "models" / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with (
        pytest.raises(DemoFailed, match="broken was not loaded: "),
        running_daemon(Screen(), "starts", short, ["--models", str(tmp_path / "models")], "loaded"),
    ):
        pass


def test_replies_after_their_client_gave_up_are_counted_as_the_daemons(short: Path) -> None:
    """A daemon that gets no core: stopped while the requests are sent, it goes on when they are given up."""
    options = ["--model", f"digits={ROOT / 'demo' / 'models' / 'digits'}"]
    with running_daemon(Screen(), "starts", short, options, "loaded") as daemon:

        class Starving(Client):
            runs = True

            def submit(self, *arguments: Any, **options: Any) -> Future[InferResult]:
                if self.runs:
                    daemon.process.send_signal(signal.SIGSTOP)
                    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED)  # until each of its threads has stopped
                    self.runs = False
                return super().submit(*arguments, **options)

            def stats(self) -> dict[str, Any]:
                daemon.process.send_signal(signal.SIGCONT)
                return super().stats()

        images = load_held_out().images.astype(np.float32)
        with Starving(daemon.endpoint) as client:
            found = flood(client, "digits", images, per_s=100, timeout_ms=1, seconds=0.1)
    assert found.asked == len(found.given_up_ms) > 0
