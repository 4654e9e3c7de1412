"""`edge-runtime import` of folders that Optimum and sentence-transformers leave: without a flag, they take texts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.daemon.runtime import Runtime
from edge_runtime_converters.importing.report import ImportedModel
from edge_runtime_converters.importing.writing import ImportOptions, import_source
from tests.models import bert_models

TEXT = "Anna went to London, and the film was GREAT!"


def imported(source: Path, models: Path) -> ImportedModel:
    report = import_source(ImportOptions(source=str(source), models=str(models)))
    (model,) = report.models
    assert model.state == "taken", model.reason
    return model


def test_a_classifier_of_optimum_takes_texts_and_keeps_its_variant(tmp_path: Path) -> None:
    source = bert_models.classifier(tmp_path / "reviews")
    shutil.copyfile(source / "model.onnx", source / "model_quantized.onnx")
    model = imported(source, tmp_path / "models")
    assert {"model.toml", "1/model.onnx", "1/model.int8.onnx", "1/tokenizer.json", "1/config.json"} <= set(model.files)
    assert not any("tokenizer is not run" in note for note in model.notes)
    wanted = bert_models.PlainModel(source).probabilities(TEXT)
    with Runtime(tmp_path / "models") as runtime:
        best = runtime.infer("reviews", {"text": [TEXT]}).answer.classes[0]
    assert (best.label, best.score) == (
        bert_models.SENTIMENT[int(wanted.argmax())], pytest.approx(float(wanted.max()), abs=1e-5)
    )  # fmt: skip


def test_a_folder_of_sentence_transformers_gives_vectors(tmp_path: Path) -> None:
    source = bert_models.encoder(tmp_path / "sentences", length=16)
    (source / "onnx").mkdir()
    shutil.move(source / "model.onnx", source / "onnx" / "model.onnx")
    for name in ("model_O4", "model_qint8_avx512"):
        shutil.copyfile(source / "onnx" / "model.onnx", source / "onnx" / f"{name}.onnx")
    model = imported(source, tmp_path / "models")
    assert {"1/model.onnx", "1/1_Pooling/config.json", "1/sentence_bert_config.json"} <= set(model.files)
    assert any("left out: model_O4.onnx, model_qint8_avx512.onnx" in note for note in model.notes)
    shutil.copyfile(source / "onnx" / "model.onnx", source / "model.onnx")
    wanted = bert_models.PlainModel(source, length=16).sentence(TEXT)
    with Runtime(tmp_path / "models") as runtime:
        vector = runtime.infer("sentences", {"text": [TEXT]}).answer.embedding
    assert np.allclose(vector, wanted, atol=1e-5)


def test_a_model_of_entailment_says_how_it_chooses_among_labels(tmp_path: Path) -> None:
    model = imported(bert_models.classifier(tmp_path / "nli", labels=bert_models.ENTAILMENT), tmp_path / "models")
    assert any('preset = "zero-shot"' in note for note in model.notes)
