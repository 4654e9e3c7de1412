"""The demonstration from outside: it shows what it promises, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo import make_vision_model
from demo.broker import find_mosquitto

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0


@pytest.fixture(scope="module", autouse=True)
def _vision_model() -> None:
    if not make_vision_model.MODEL_FILE.exists():
        assert make_vision_model.main([]) == 0


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    """The demonstration, measuring for a moment only, with its output as a pipe."""
    started = subprocess.Popen(
        [sys.executable, "-m", "demo.run_demo", "--quick"],
        cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    yield started
    if started.poll() is None:
        started.terminate()
    started.communicate(timeout=LIMIT_S)


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
    if find_mosquitto() is not None:
        assert re.search(
            r'^  \{"id":null,"model_name":"digits".*\n  digit \d; the scan shows a \d$', shown, re.MULTILINE
        ), shown
    else:
        assert "left out: no mosquitto here" in shown
    assert "exit status 0" in shown


def test_stopped_in_the_middle_it_leaves_no_daemon_and_no_folder(demo: subprocess.Popen[str]) -> None:
    assert demo.stdout is not None
    shown = ""
    while "ready after" not in shown:
        line = demo.stdout.readline()
        assert line, shown
        shown += line
    found = re.search(r"ipc://(\S+)/infer\.sock", shown)
    assert found is not None
    folder = Path(found[1])
    children = psutil.Process(demo.pid).children()
    assert any("edge-runtime" in " ".join(child.cmdline()) for child in children)
    assert folder.is_dir()
    demo.send_signal(signal.SIGTERM)
    rest, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 128 + signal.SIGTERM, rest
    assert not folder.exists()
    end_s = time.monotonic() + 3
    while any(child.is_running() for child in children) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not any(child.is_running() for child in children)
