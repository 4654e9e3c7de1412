"""Texts that come together run together, by a curve that was measured on texts."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.models import calibration
from edge_runtime.steps import Form
from tests.models import bert_models

TEXTS = bert_models.texts(64)

TEXT_ANSWERED = Form("text", answers=True)


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
    """The inputs of all measured runs: 2 ms however many rows they have, and half of that on all cores."""
    seen: list[dict[str, Any]] = []
    instances: list[object] = []

    def time_run(instance: object, inputs: dict[str, Any]) -> float:
        seen.append(inputs)
        if instance not in instances:
            instances.append(instance)
        return 0.002 if instance is instances[0] else 0.001

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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is all cores")
def test_a_lone_text_runs_on_all_cores_where_that_is_quicker(calibrated):
    (form,) = [
        each for each in calibrated.core.table.resolve("sentiment", None).forms.values() if each.form == TEXT_ANSWERED
    ]
    wide = form.scheduled.wide
    assert wide.run_times.known() == {1: 0.001}

    for text in TEXTS:
        calibrated.infer("sentiment", {"text": np.array([text], object)})

    assert wide.run_times.known() != {1: 0.001}
