"""`edge-runtime convert`: what it prints, what it exits with, and that nothing half is ever there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_runtime.cli.main import main
from edge_runtime_converters import command
from tests.converters.sources import DIGITS, ROOT, images, present, write_held_out, write_samples

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the verb in an empty folder that holds model.onnx; its exit status, stdout and stderr."""
    (tmp_path / "model.onnx").write_bytes(DIGITS.read_bytes())
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["convert", *words])
        return status, *capsys.readouterr()

    return call


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_conversion_prints_what_came_out(run: Run, tmp_path: Path) -> None:
    status, out, err = run("model.onnx", "--to", "onnx", "--precision", "fp16")
    assert status == 0, err
    assert "model.f16.onnx" in out
    assert "compared with" in out
    assert "scores" in out
    assert left(tmp_path) == ["model.f16.onnx", "model.onnx"]


def test_json_has_every_figure(run: Run, tmp_path: Path) -> None:
    samples = write_samples(tmp_path, "image")
    data, labels = write_held_out(tmp_path, "image")
    status, out, err = run(
        "model.onnx", "--to", "onnx", "--precision", "int8", "--calibration", str(samples), "--data", str(data),
        "--labels", str(labels), "--json",
    )  # fmt: skip
    assert status == 0, err
    report = json.loads(out)
    assert report["files"] == [str(tmp_path / "model.int8.onnx")] or report["files"] == ["model.int8.onnx"]
    assert report["rows"] == 450
    assert 0 < report["target_bytes"] < report["source_bytes"]
    assert report["target_bytes"] == (tmp_path / "model.int8.onnx").stat().st_size
    assert report["opset"].split(",")[0] == "17"
    assert {output["name"] for output in report["outputs"]} == {"scores", "digit"}
    assert report["outputs"][0]["max_error"] > report["outputs"][0]["mean_error"] > 0
    assert 0 < report["outputs"][0]["spread_error"] < 0.2
    assert {output["distinct"] for output in report["outputs"]} == {10}
    assert report["source_accuracy"] - report["accuracy"] <= 0.005
    assert report["faults"] == []


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_digits_in_int8_stay_within_half_a_per_cent_of_fp32_on_writers_never_seen(
    run: Run, tmp_path: Path, target: str
) -> None:
    """The project's own bar for its digits, calibrated with training images, judged on held-out ones."""
    if target == "openvino":
        present("nncf")
    np.save(tmp_path / "training.npy", images(1347))
    data, labels = write_held_out(tmp_path, "image")
    status, out, err = run(
        "model.onnx", "--to", target, "--precision", "int8", "--calibration", "training.npy", "--data", str(data),
        "--labels", str(labels), "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert report["source_accuracy"] - report["accuracy"] <= 0.005
    assert status == 0, err


@pytest.mark.parametrize(
    ("folder", "target", "name"), [("net/1/", "onnx", "model.f16.onnx"), ("net", "ort", "model.f16.ort")]
)
def test_a_folder_as_output_gets_what_a_version_folder_holds(
    run: Run, tmp_path: Path, folder: str, target: str, name: str
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "digits.onnx").write_bytes(DIGITS.read_bytes())
    status, _, err = run("digits.onnx", "--to", target, "--precision", "f16", "--output", folder, "--tolerance", "1%")
    assert status == 0, err
    assert left(tmp_path / folder) == [name]


@pytest.mark.parametrize("output", ["models/net/1/", "models/net/1/model.ort"])
def test_a_format_that_the_daemon_does_not_serve_is_not_written_to_a_versions_folder(
    run: Run, tmp_path: Path, output: str
) -> None:
    (tmp_path / "models/net/1").mkdir(parents=True)
    status, _, err = run("model.onnx", "--to", "ort", "--output", output)
    assert status == 1
    assert "model.ort: the daemon serves no .ort from a version's folder" in err
    assert "--to onnx" in err
    assert "reading" not in err
    assert not left(tmp_path / "models/net/1")


def test_labels_that_do_not_fit_are_reported_before_the_long_part(run: Run, tmp_path: Path) -> None:
    samples = write_samples(tmp_path, "image")
    (tmp_path / "labels.txt").write_text("1\n2\n")
    status, _, err = run(
        "model.onnx", "--to", "onnx", "--precision", "int8", "--calibration", str(samples), "--labels", "labels.txt"
    )
    assert status == 1
    assert "wanted" in err
    assert "writing" not in err


@pytest.mark.parametrize(
    "words", [("--precision", "half"), ("--tolerance", "101%"), ("--tolerance", "2"), ("--timeout", "0")]
)
def test_a_value_that_is_not_a_precision_share_or_time_is_wrong_usage(run: Run, words: tuple[str, ...]) -> None:
    assert run("model.onnx", "--to", "ort", *words)[0] == 2


def test_too_far_from_its_source_leaves_nothing_and_exits_1(run: Run, tmp_path: Path) -> None:
    status, out, err = run("model.onnx", "--to", "onnx", "--precision", "fp16", "--tolerance", "1e-9")
    assert status == 1
    assert "largest error" in err
    assert "--keep" in err
    assert "nothing" in out
    assert left(tmp_path) == ["model.onnx"]


def test_keep_writes_it_all_the_same_and_still_exits_1(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("model.onnx", "--to", "onnx", "--precision", "fp16", "--tolerance", "1e-9", "--keep", "--json")
    assert status == 1
    assert json.loads(out)["faults"]
    assert left(tmp_path) == ["model.f16.onnx", "model.onnx"]


def test_data_that_get_one_answer_judge_nothing_and_are_accepted_by_name_only(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "alike.npy", np.repeat(images(1), 20, axis=0))
    words = ("model.onnx", "--to", "ort", "--data", "alike.npy")
    status, out, err = run(*words)
    assert status == 1
    assert "the source gives 1 answer to 20 rows, 100.0% of them the same" in err
    assert "cannot tell whether it is near its source, so nothing was written; give others with --data" in err
    assert "--keep" not in err
    assert "nothing" in out
    assert left(tmp_path) == ["alike.npy", "model.onnx"]
    status, out, err = run(*words, "--accept-unjudged", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["is_accepted"]
    assert report["unjudged"]
    assert [output["distinct"] for output in report["outputs"]] == [1, 1]
    assert left(tmp_path) == ["alike.npy", "model.onnx", "model.ort"]


def test_a_file_that_is_there_is_not_replaced_unless_it_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.ort").write_text("mine")
    status, _, err = run("model.onnx", "--to", "ort")
    assert status == 1
    assert "--overwrite" in err
    assert (tmp_path / "model.ort").read_text() == "mine"
    assert run("model.onnx", "--to", "ort", "--overwrite")[0] == 0
    assert (tmp_path / "model.ort").stat().st_size > 1000


def test_ir_has_both_its_files(run: Run, tmp_path: Path) -> None:
    assert run("model.onnx", "--to", "openvino", "--output", "served/1/model.xml")[0] == 0
    assert left(tmp_path / "served" / "1") == ["model.bin", "model.xml"]


def test_a_source_and_data_that_are_links_are_followed_since_a_person_named_them(run: Run, tmp_path: Path) -> None:
    samples, data = tmp_path / "kept" / "samples.npy", tmp_path / "data"
    data.mkdir()
    samples.parent.mkdir()
    np.save(samples, np.random.default_rng(0).random((64, 64), np.float32))
    (tmp_path / "model.onnx").rename(samples.with_name("blob"))
    (tmp_path / "model.onnx").symlink_to("kept/blob")
    (data / "one.npy").symlink_to(samples)
    status, _, err = run("model.onnx", "--to", "openvino", "--output", "served/1/model.xml", "--data", "data/one.npy")
    assert status == 0, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.onnx"], "--to"),
        (["model.onnx", "--to", "coreml"], "coreml"),
        (["model.onnx", "--to", "onnx", "--precision", "int4"], "int4"),
        (["model.onnx", "--to", "ort", "--tolerance", "2"], "0 to 1"),
        (["model.onnx", "--to", "ort", "--timeout", "0"], "more than 0"),
    ],
)
def test_wrong_usage_exits_2(run: Run, words: list[str], said: str) -> None:
    status, _, err = run(*words)
    assert status == 2
    assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.onnx", "--to", "ort"], "No such file"),
        (["model.onnx", "--to", "onnx", "--precision", "int8"], "--calibration"),
        (["model.onnx", "--to", "ort", "--labels", "labels.npy"], "--data"),
        (["model.onnx", "--to", "ort", "--output", "model.bin"], "ends in .ort"),
        (["model.onnx", "--to", "tensorrt"], "[tensorrt]"),
        (["model.onnx", "--to", "ort", "--gpu", "SM89"], "--to ort fits any device"),
        (["model.onnx", "--to", "ort", "--for-tensorrt"], "--to onnx --precision int8"),
        (["model.onnx", "--to", "onnx", "--precision", "bf16"], "model.toml"),
        (["model.onnx", "--to", "ort", "--shapes", "image=a b"], "not a dimension"),
        (["model.onnx", "--to", "ort", "--data", "gone"], "No such file"),
    ],
)
def test_a_conversion_that_cannot_be_done_says_what_to_do_and_writes_nothing(
    run: Run, tmp_path: Path, words: list[str], said: str
) -> None:
    status, _, err = run(*words)
    assert status == 1
    assert said in err
    assert left(tmp_path) == ["model.onnx"]


def test_a_conversion_that_takes_too_long_is_ended(run: Run, tmp_path: Path) -> None:
    status, _, err = run("model.onnx", "--to", "ort", "--timeout", "0.01")
    assert status == 1
    assert "not done within 0.01 s" in err
    assert left(tmp_path) == ["model.onnx"]


def test_an_interrupted_conversion_leaves_nothing(run: Run, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", "convert", "model.onnx", "--to", "openvino"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    with child:
        assert child.stderr is not None
        assert b"converting" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        child.stderr.read()
        assert child.wait() == 130
    assert left(tmp_path) == ["model.onnx"]


def test_a_killed_conversion_leaves_no_process_no_artifact_and_no_hindrance(run: Run, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", "convert", "model.onnx", "--to", "openvino"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    with child:
        assert child.stderr is not None
        converting: list[psutil.Process] = []
        while not converting and child.poll() is None:
            converting = psutil.Process(child.pid).children()
        child.kill()
        child.stderr.read()
    assert psutil.wait_procs(converting, timeout=60)[1] == []
    assert [name for name in left(tmp_path) if not name.startswith(".")] == ["model.onnx"]
    assert run("model.onnx", "--to", "openvino")[0] == 0


def test_each_converter_is_a_program_of_its_own(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime_converters.ort_from_onnx", "model.onnx"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "model.ort" in done.stdout
    assert command.main("ort", words=["model.onnx", "--json"]) == 1
    assert "--overwrite" in capsys.readouterr().err


def test_every_file_named_from_to_can_be_run() -> None:
    for path in sorted((ROOT / "converters" / "edge_runtime_converters").glob("*_from_*.py")):
        assert 'if __name__ == "__main__":' in path.read_text(), path
