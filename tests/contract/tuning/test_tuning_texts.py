"""`edge-runtime tune` of models that take texts: what is measured is what callers send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import main
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.loading import steps_of
from edge_runtime.models.walk import scan
from edge_runtime.text.text_input import text_input
from edge_runtime.tuning.measurement import frames_of
from edge_runtime.tuning.samples import read_texts
from edge_runtime.wire.codec import unpack_request
from tests.models import bert_models

TEXTS = bert_models.texts(24)

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def nobody_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have a daemon of its own, which a tune would not disturb."""
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", f"ipc://{tmp_path}/nobody.sock")


def tune(site: Path, capsys: pytest.CaptureFixture[str], model: str, *others: str) -> tuple[int, Any]:
    places = ["--models", str(site / "models"), "--state", str(site / "state"), "--profile", "x86-generic"]
    wide = ["--slo", "p99=5s", "--time", "4s", "--write-anyway", "--json"]
    status = main(["tune", model, *places, *wide, *others])
    out = capsys.readouterr().out
    return status, json.loads(out) if out else None


def test_a_folder_of_hugging_faces_is_tuned_with_a_persons_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert_models.classifier(tmp_path / "models" / "sentiment")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    status, found = tune(tmp_path, capsys, "sentiment", "--data", str(tmp_path / "texts.txt"))
    assert status == 0, found
    assert found["choice"]["rate"] > 0
    assert found["rows"][0]["accuracy"]["inputs"] == 18  # a quarter calibrates
    assert (tmp_path / "models" / "sentiment" / "model.toml").read_text().count("tokenizer") == 0


@pytest.mark.parametrize(
    ("make", "toml"),
    [
        (lambda folder: bert_models.encoder(folder, length=16), ""),
        (lambda folder: bert_models.encoder(folder / "1", length=16), ""),
        (lambda folder: bert_models.classifier(folder, labels=("LABEL_0",)), ""),
        (lambda folder: bert_models.classifier(folder, labels=bert_models.ENTAILMENT), 'preset = "zero-shot"\n'),
    ],
)
def test_models_of_texts_are_tuned_with_made_up_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, toml: str
) -> None:
    make(tmp_path / "models" / "m")
    if toml:
        (tmp_path / "models" / "m" / "model.toml").write_text(toml)
    status, found = tune(tmp_path, capsys, "m", "--dry-run")
    assert status == 0, found
    assert found["choice"]["rate"] > 0
    assert found["rows"][0]["accuracy"]["inputs"] > 8


def test_a_load_is_of_texts_of_many_lengths_as_callers_send_them(tmp_path: Path) -> None:
    bert_models.classifier(tmp_path / "models" / "m")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    reader = reader_of(scan(tmp_path / "models").models["m"])
    samples = read_texts(tmp_path / "texts.txt", reader, None, pytest.fail)
    assert samples is not None
    requests = frames_of("m", *samples.load)
    assert [unpack_request(header).inputs[0].name for header, _ in requests] == ["text"] * len(TEXTS)
    assert [data[4:].decode() for _, data in requests] == TEXTS
    lengths = {each["input_ids"].shape for each in samples.inputs}
    assert len(lengths) > 8


def reader_of(model: ModelFolder) -> Any:
    (version,) = model.versions.values()
    artifact = version.files["model.onnx"]
    steps = steps_of(model.settings, model, version, artifact)
    assert steps is not None
    from edge_runtime.pictures.model_metadata import read_interface

    spec = read_interface(artifact)
    assert spec is not None
    return text_input(spec, steps, 1, 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [("one\ttwo\tthree\n", "the model takes [-1] or [-1, 2]"), ("caf\u00e9", "is not UTF-8 at byte 3")],
)
def test_texts_that_the_model_does_not_take_are_named_with_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, reason: str
) -> None:
    bert_models.classifier(tmp_path / "models" / "m")
    (tmp_path / "texts.txt").write_bytes(data.encode("latin-1"))
    status, found = tune(tmp_path, capsys, "m", "--data", str(tmp_path / "texts.txt"))
    assert (status, found["error"]["code"]) == (1, "tensor_mismatch")
    assert "texts.txt: " in found["error"]["message"]
    assert reason in found["error"]["message"]
