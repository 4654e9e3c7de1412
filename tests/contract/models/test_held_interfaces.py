"""A new version with other tensors than its clients use: told where it serves, refused where the model holds them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import LoadFailed, TensorMismatch
from tests.models import onnx_models

HELD = "[versions]\nhold_interface = true\n"
OF_TWO = "input 'x' is gone (there are a, b)"


@contextmanager
def serving(tmp_path: Path) -> Iterator[Runtime]:
    config = Config(watch=False, calibrate=False, state=str(tmp_path / "state"))
    with Runtime(tmp_path / "models", config=config) as runtime:
        yield runtime


def put(tmp_path: Path, version: int, make: Any = onnx_models.mlp, toml: str = "") -> None:
    make(tmp_path / "models" / "m" / str(version))
    if toml:
        (tmp_path / "models" / "m" / "model.toml").write_text(toml)


def told(runtime: Runtime) -> dict[int, tuple[str, str]]:
    return {each["version"]: (each["state"], each["reason"]) for each in runtime.models()}


def numbers(runtime: Runtime) -> dict[str, Any]:
    return runtime.core.metrics.model("m").snapshot()


def test_a_version_with_other_tensors_serves_and_its_state_the_log_and_a_metric_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 1)
    with serving(tmp_path) as runtime:
        assert "interface_changed" not in numbers(runtime)
        put(tmp_path, 2, onnx_models.two_in_two_out)
        with caplog.at_level(logging.WARNING):
            runtime.load("m")
        state, reason = told(runtime)[2]
        assert state == "ready"
        assert reason.startswith("clients of the version before cannot use it: input 'a' is new")
        assert OF_TWO in reason
        assert OF_TWO in caplog.text
        assert numbers(runtime)["interface_changed"] == 1
        put(tmp_path, 3, onnx_models.two_in_two_out)
        runtime.load("m")
        assert told(runtime)[3] == ("ready", "")
        assert "interface_changed" not in numbers(runtime)


def test_a_held_interface_refuses_it_and_the_old_version_serves_on_also_after_a_restart(tmp_path: Path) -> None:
    put(tmp_path, 1, toml=HELD)
    x = {"x": np.ones((2, 16), np.float32)}
    with serving(tmp_path) as runtime:
        put(tmp_path, 2, onnx_models.two_in_two_out)
        with pytest.raises(LoadFailed, match="hold_interface"):
            runtime.load("m")
        state, reason = told(runtime)[2]
        assert (state, OF_TWO in reason) == ("failed", True)
        assert runtime.infer("m", x).version == 1
    with serving(tmp_path) as runtime:
        assert told(runtime)[2][0] == "failed"
        assert runtime.infer("m", x).version == 1


def test_an_interface_that_is_held_no_more_is_what_serves_next(tmp_path: Path) -> None:
    put(tmp_path, 1, toml=HELD)
    with serving(tmp_path):
        pass
    shutil.rmtree(tmp_path / "models" / "m" / "1")
    put(tmp_path, 2, onnx_models.two_in_two_out)
    with serving(tmp_path) as runtime:
        assert told(runtime)[2][0] == "failed"
        put(tmp_path, 2, onnx_models.two_in_two_out, toml="[versions]\nhold_interface = false\n")
        runtime.load("m")
        assert told(runtime)[2][0] == "ready"
    put(tmp_path, 2, onnx_models.two_in_two_out, toml=HELD)
    with serving(tmp_path) as runtime:
        assert told(runtime)[2] == ("ready", "")
        with pytest.raises(TensorMismatch):
            runtime.infer("m", {"x": np.ones((1, 16), np.float32)})


def test_an_older_version_beside_the_one_that_clients_use_may_have_any_interface(tmp_path: Path) -> None:
    put(tmp_path, 1, onnx_models.two_in_two_out)
    put(tmp_path, 2, toml="[versions]\nall = true\nhold_interface = true\n")
    with serving(tmp_path) as runtime:
        assert told(runtime) == {1: ("ready", ""), 2: ("ready", "")}
        runtime.load("m", 1)
        assert told(runtime)[1] == ("ready", "")
