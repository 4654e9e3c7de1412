"""`edge-runtime tune` from end to end: real daemons, real load, the demo's digits; broken off, gone on with, refused.

Objectives are wide and times short: what is measured here is that it works, never how fast this machine is.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from demo.digits import load_held_out
from edge_runtime import Runtime
from edge_runtime.cli.main import main
from edge_runtime.config.settings import Config
from edge_runtime.tuning import daemons, trial
from edge_runtime.tuning.candidates import Candidate, Way
from edge_runtime.tuning.measurement import frames_of, look_first, take_slice
from edge_runtime.tuning.options import Objective
from tests.contract.running_daemon import running_daemon
from tests.models import litert_models
from tests.models.onnx_models import colours, endless, mlp

DIGITS = Path(__file__).parents[3] / "demo" / "models" / "digits"
WIDE = ["--slo", "p99=5s", "--time", "4s", "--write-anyway"]
"""Far too short to be settled."""

WAIT_S = 120.0

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def nobody_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have a daemon of its own, which a tune would not disturb."""
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", f"ipc://{tmp_path}/nobody.sock")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A device: models with the demo's digits, images with their labels."""
    shutil.copytree(DIGITS, tmp_path / "models" / "digits")
    held_out = load_held_out()
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "images.npy", held_out.images)
    np.save(tmp_path / "labels.npy", held_out.labels)
    return tmp_path


def words(site: Path, *others: str, model: str = "digits") -> list[str]:
    places = ["--models", str(site / "models"), "--state", str(site / "state"), "--profile", "x86-generic"]
    return ["tune", model, *places, "--json", *others]


def with_data(site: Path) -> list[str]:
    return ["--data", str(site / "data"), "--labels", str(site / "labels.npy")]


def tune(site: Path, capsys: pytest.CaptureFixture[str], *others: str, model: str = "digits") -> tuple[int, Any]:
    status = main(words(site, *others, model=model))
    out = capsys.readouterr().out
    return status, json.loads(out) if out else None


def started(site: Path, *others: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edge_runtime", *words(site, *others)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def wait_for_results(site: Path, child: subprocess.Popen[bytes], count: int) -> dict[Path, Any]:
    """The journal's results, once there are so many."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        found = results(site)
        if len(found) >= count:
            return found
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.05)
        assert child.returncode is None
    raise AssertionError("the tune measured nothing")


def results(site: Path) -> dict[Path, Any]:
    """What the journal holds, but for the slices of a race that goes on; no two measurements agree."""
    found = {}
    for path in (site / "state" / "tuning" / "results").glob("*.json"):
        found[path] = json.loads(path.read_text())["result"]
        found[path].pop("slices", None)
    return found


def measured(found: dict[str, Any]) -> dict[tuple[Any, ...], tuple[float, float]]:
    """What was measured at the objective to its end, by candidate; no two measurements agree."""
    keys = ("backend", "precision", "threads", "instances", "max_batch_rows")
    return {
        tuple(row[key] for key in keys): (row["rate"], row["p99_ms"])
        for row in found["rows"]
        if row["at_objective"] and not row["is_cut"]
    }


def test_a_choice_is_measured_written_with_its_reasons_and_served(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = site / "models" / "digits" / "model.toml"
    settings.write_text("# the owner's own\npriority = 3\nthreads = 7  # once\n")
    status, found = tune(site, capsys, *WIDE, "--accuracy-drop", "0.5%", *with_data(site))
    assert status == 0
    assert found["choice"]["rate"] > 0
    assert found["rows"][0]["verdict"] == "chosen"
    accuracy = found["rows"][0]["accuracy"]
    assert accuracy["reference_correct"] - accuracy["correct"] <= 0.005
    text = settings.read_text()
    assert text.startswith("# the owner's own\npriority = 3\n# before tune: threads = 7  # once\n")
    assert "# tune: chosen on" in text
    assert {Path(path).name for path in found["written"]} >= {"model.toml", "tune.svg"}
    assert (site / "models" / "digits" / "tune.svg").read_text().startswith("<svg")
    with Runtime(site / "models") as runtime:
        (served,) = runtime.models()
        assert (served["state"], served["backend"]) == ("ready", found["choice"]["backend"])
        assert runtime.infer("digits", {"image": np.zeros((1, 64), np.float32)})["scores"].shape == (1, 10)

    kept = results(site)
    status, again = tune(site, capsys, *WIDE, "--accuracy-drop", "0.5%", *with_data(site))
    assert status == 0
    # What was measured before is not measured again, though model.toml says now what was chosen.
    after = results(site)
    assert kept
    assert kept == {path: after[path] for path in kept}
    again_measured = measured(again)
    assert all(again_measured[candidate] == figures for candidate, figures in measured(found).items())
    assert not list((site / "state" / "tuning").glob("now/*"))


def test_with_nothing_to_give_up_the_model_as_it_is_is_chosen(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = tune(site, capsys, *WIDE, "--accuracy-drop", "0", *with_data(site))
    assert status == 0
    assert (found["choice"]["precision"], found["rows"][0]["runs_in"]) == ("", "f32")
    assert not list((site / "models" / "digits" / "1").glob("*int8*"))
    assert 'precision = "f32"' in (site / "models" / "digits" / "model.toml").read_text()


def test_the_answers_that_data_get_are_counted_and_what_they_cannot_show_is_accepted_by_name(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = load_held_out()
    np.save(site / "data" / "images.npy", held_out.images[held_out.labels == 6])
    data = ["--dry-run", "--data", str(site / "data"), "--accept-unjudged"]
    status, found = tune(site, capsys, *WIDE, *data)
    assert status == 0
    accuracy = found["rows"][0]["accuracy"]
    assert (accuracy["distinct"], accuracy["constant_drop"], accuracy["is_accepted"]) == (1, 0.0, True)
    assert any("inputs is less than one of them; more inputs tell a drop so small" in note for note in found["notes"])


def test_a_search_that_is_not_settled_writes_nothing_and_says_what_to_do(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((site / "models").rglob("*"))
    status, found = tune(site, capsys, "--slo", "p99=5s", "--time", "4s")
    assert status == 1
    assert found["choice"] is not None
    assert (found["settled"], found["written"]) == (False, [])
    assert "--write-anyway" in found["doubt"]
    assert sorted((site / "models").rglob("*")) == before


def test_a_slice_counts_answers_within_the_objective_and_sees_other_work(site: Path) -> None:
    config = Config(models=str(site / "models"), state=str(site / "state"), profile="x86-generic")
    frames = frames_of("digits", {"image": np.zeros((1, 64), np.float32)})
    candidate = Candidate(Way("onnxruntime", "CPU"))
    with daemons.running_daemon(config, "digits", site / "log") as daemon:
        look = look_first(candidate, daemon, frames, Objective(0.99, 5.0))
        taken = take_slice(look, 1, daemon, frames, Objective(0.99, 5.0))
        late = take_slice(look, 2, daemon, frames, Objective(0.99, 1e-6))
    assert (look.reason, look.slices) == ("", ())
    assert min(look.alone_s, look.first_rate, taken.rate, taken.p99_s) > 0
    assert (taken.round, taken.takes) == (1, 1)
    assert 0 <= taken.others < 1
    assert (late.rate, late.p99_s > 0) == (0.0, True)


def test_an_objective_that_nothing_keeps_is_a_failure_that_writes_nothing(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((site / "models").rglob("*"))
    status, found = tune(site, capsys, "--slo", "p50=0.001ms", "--time", "4s")
    assert status == 1
    assert found["choice"] is None
    assert found["written"] == []
    assert sorted((site / "models").rglob("*")) == before


def test_a_variant_that_cannot_be_loaded_is_a_row_with_the_reason(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "models" / "digits" / "1" / "model.int8.onnx").write_bytes(b"\x08\x08\x3a\xff\xff")
    status, found = tune(site, capsys, "--slo", "p99=5s", "--time", "30s", "--accuracy-drop", "1%", "--dry-run")
    assert status == 0
    assert found["written"] == []
    failed = [row for row in found["rows"] if row["precision"] == "int8" and row["backend"] == "onnxruntime"]
    assert [(row["rate"], "model.int8.onnx" in row["verdict"] or "ONNX" in row["verdict"]) for row in failed] == [
        (0.0, True)
    ]
    assert found["choice"]["precision"] != "int8"


def test_a_variant_of_another_model_is_a_row_with_the_reason(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlp(site / "models" / "net" / "1")
    (site / "models" / "net" / "1" / "model.int8.onnx").write_bytes((DIGITS / "1" / "model.onnx").read_bytes())
    status, found = tune(
        site, capsys, "--slo", "p99=5s", "--time", "30s", "--accuracy-drop", "100%", "--dry-run", model="net"
    )
    assert status == 0
    assert any("int8 was asked for" in row["verdict"] for row in found["rows"] if row["precision"] == "int8")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_tune_that_is_broken_off_leaves_no_process_and_goes_on_where_it_was(
    site: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    before = sorted((site / "models").rglob("*"))
    child = started(site, "--slo", "p99=5s", "--time", "60s", "--accuracy-drop", "0")
    with child:
        kept = wait_for_results(site, child, 2)
        started_by_it = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(number)
        out, _ = child.communicate(timeout=WAIT_S)
    assert child.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(started_by_it, timeout=WAIT_S)
    assert alive == []
    assert sorted((site / "models").rglob("*")) == before
    if number == signal.SIGINT:
        assert json.loads(out)["rows"]
    status, found = tune(site, capsys, *WIDE, "--accuracy-drop", "0")
    assert status == 0
    assert found["choice"] is not None
    after = results(site)
    assert all(after[path] == written for path, written in kept.items())


def test_two_tunes_at_once_would_disturb_one_another(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = started(site, "--slo", "p99=5s", "--time", "60s")
    with child:
        wait_for_results(site, child, 1)
        status, found = tune(site, capsys, *WIDE)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=WAIT_S)
    assert (status, found["error"]["code"]) == (1, "config")
    assert "another tune runs here" in found["error"]["message"]


def test_a_model_that_never_answers_holds_a_tune_no_longer_than_its_time(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endless(site / "models" / "endless" / "1")
    monkeypatch.setattr(trial, "LEAST_S", 2.0)
    status, found = tune(site, capsys, "--slo", "p99=5s", "--time", "1s", model="endless")
    assert status == 1
    assert "was not done within 2 s" in found["error"]["message"]


def test_a_daemon_that_serves_here_is_named_and_not_disturbed(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon(site / "models", site / "daemon"):
        monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", f"ipc://{site}/daemon/infer.sock")
        status, found = tune(site, capsys, *WIDE)
    assert status == 1
    assert "a daemon serves at" in found["error"]["message"]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["--slo", "fast"], "--slo: got 'fast'"),
        (["--slo", "p99=20ms", "--accuracy-drop", "much"], "--accuracy-drop: got 'much'"),
        (["--slo", "p99=20ms", "--time", "soon"], "--time: got 'soon'"),
        (["--slo", "p99=20ms", "--labels", "x.txt"], "give the inputs with --data"),
        ([], "--slo"),
    ],
)
def test_wrong_words_are_wrong_usage(
    site: Path, capsys: pytest.CaptureFixture[str], others: list[str], said: str
) -> None:
    assert main(words(site, *others)) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named_with_the_nearest(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(site, *WIDE, model="digit")) == 1
    assert "did you mean 'digits'?" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_models_folder_that_is_not_there_is_named(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = tune(site, capsys, *WIDE, "--models", str(site / "elsewhere"))
    assert (status, found["error"]["code"]) == (1, "model_not_found")
    assert f"{site / 'elsewhere'}: no such folder" in found["error"]["message"]


def test_hostile_data_ends_it_before_anything_is_measured(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "data" / "a.npy").write_bytes(b"\x93NUMPY\x01\x00")
    status, found = tune(site, capsys, *WIDE, "--data", str(site / "data"))
    assert (status, found["error"]["code"]) == (1, "tensor_mismatch")
    assert "a.npy" in found["error"]["message"]
    assert results(site) == {}


def test_the_commands_of_the_tune_page_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tune.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 2
    shutil.copytree(DIGITS, tmp_path / "models" / "digits")
    for line in commands:
        program, *rest = shlex.split(line.replace("/tmp/tour", str(tmp_path)))
        asked = [str(Path(sys.executable).with_name(program)), *rest]
        if program == "edge-runtime":
            asked = [*asked, *WIDE]
        done = subprocess.run(
            asked, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "# tune: chosen on" in (tmp_path / "models" / "digits" / "model.toml").read_text()


def test_a_model_is_tuned_on_pictures_as_it_declares_them(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site / "models" / "colours"
    colours(folder / "1")
    (folder / "model.toml").write_text('[input.image]\nrange = "0..1"\n[output.scores]\nlabels = "labels.txt"\n')
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    for name, colour in (("a.png", "red"), ("b.jpg", "lime")):
        Image.new("RGB", (9, 5), colour).save(site / "data" / name)
    (site / "data" / "images.npy").unlink()
    status, found = tune(site, capsys, "--data", str(site / "data"), *WIDE, model="colours")
    assert status == 0
    assert not [note for note in found["notes"] if "pixels / 255" in note]
    assert found["choice"]["rate"] > 0
    assert 'labels = "labels.txt"' in (folder / "model.toml").read_text()


def test_a_tflite_file_is_tuned_and_served_by_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    litert_models.mlp(tmp_path / "models" / "m" / "1")
    status, found = tune(tmp_path, capsys, *WIDE, model="m")
    assert status == 0
    assert found["choice"]["backend"] in ("litert", "openvino")
    with Runtime(tmp_path / "models") as runtime:
        (served,) = runtime.models()
        assert (served["state"], served["backend"]) == ("ready", found["choice"]["backend"])
