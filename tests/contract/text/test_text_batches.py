"""Texts that come together run together, by a curve that was measured on texts."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.models import calibration
from tests.models import bert_models

TEXTS = bert_models.texts(64)


class _Calibrated(logging.Handler):
    """Sets an event when a curve was put to work."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "calibrated":
            self.event.set()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The inputs of all measured runs, which take a millisecond however many rows they have."""
    seen: list[dict[str, Any]] = []

    def time_run(_instance: object, inputs: dict[str, Any]) -> float:
        seen.append(inputs)
        return 0.001

    monkeypatch.setattr(calibration, "time_run", time_run)
    return seen


@pytest.fixture
def calibrated(tmp_path: Path, measured: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> Any:
    del measured
    caplog.set_level(logging.INFO, "edge_runtime.models.calibration")
    bert_models.classifier(tmp_path / "models" / "sentiment")
    log, heard = logging.getLogger("edge_runtime.models.calibration"), _Calibrated()
    log.addHandler(heard)
    try:
        with Runtime(tmp_path / "models", config=Config(state=str(tmp_path / "state"), watch=False)) as runtime:
            assert heard.event.wait(60)
            yield runtime
    finally:
        log.removeHandler(heard)


def test_the_curve_is_measured_on_sentences_and_not_on_a_lone_token(calibrated, measured):
    del calibrated
    assert {name for inputs in measured for name in inputs} == {"text"}
    assert {len(inputs["text"]) for inputs in measured} >= {1, 2, 64}
    assert all(len(text) > 40 for inputs in measured for text in inputs["text"])


def test_texts_that_come_together_run_together_once_the_curve_is_known(calibrated):
    alone = [calibrated.infer("sentiment", {"text": np.array([text], object)}) for text in TEXTS[:4]]

    calls = [calibrated.submit("sentiment", {"text": np.array([text], object)}, timing=True) for text in TEXTS]
    together = [call.result(60) for call in calls]

    assert max(each.timing.batch_rows for each in together) > 8
    for one, same in zip(alone, together, strict=False):
        assert one.answers[0].classes[0].label == same.answers[0].classes[0].label
