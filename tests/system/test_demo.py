"""The demonstration from outside: it shows what it promises, and leaves nothing behind however it ends."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo import make_vision_model
from demo.broker import find_mosquitto
from tests.fakes.demo_process import LIMIT_S, ROOT, demo_process, read_until, stop


@pytest.fixture(scope="module", autouse=True)
def _vision_model() -> None:
    if not make_vision_model.MODEL_FILE.exists():
        assert make_vision_model.main([]) == 0


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    """The demonstration, measuring for a moment only, with its output as a pipe."""
    with demo_process("demo.run_demo", "--quick") as started:
        yield started


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
