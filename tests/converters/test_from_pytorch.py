"""PyTorch programs as people export them: fixed rows, several inputs by name, half-open shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime.sandbox.child import ChildFunction, TaskT
from edge_runtime.sandbox.ending import Cause, Ending, ResultT
from edge_runtime_converters import conversion
from edge_runtime_converters.comparison import Report
from edge_runtime_converters.onnx_from_pytorch import convert_module
from edge_runtime_converters.options import ConversionOptions
from edge_runtime_converters.original import serve
from tests.contract.running_daemon import floats
from tests.converters.sources import FEATURES, needs, network, present

pytestmark = pytest.mark.long


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    present("onnxscript")
    (progress,) = needs("tqdm")
    monkeypatch.setattr(progress.tqdm, "monitor_interval", 0)  # its thread would outlive the test
    return needs("torch")[0]


Convert = Callable[[ConversionOptions], Report]


@pytest.fixture
def convert(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Convert in this process, which has imported PyTorch: these tests are about what is made, not about where."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)  # a conversion's child sets both for itself
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")

    def run(function: ChildFunction[TaskT, ResultT], task: TaskT, **_: Any) -> Ending[ResultT]:
        return Ending(Cause.RETURNED, result=function(task, lambda *_: None))

    return lambda options: conversion.convert(options, run=run)


def test_a_program_of_fixed_rows_converts_and_the_report_says_that_it_will_not_batch(
    torch: Any, convert: Convert, tmp_path: Path
) -> None:
    program = torch.export.export(network(torch), (torch.zeros(2, FEATURES),))
    torch.export.save(program, str(tmp_path / "model.pt2"))
    report = convert(ConversionOptions(source=str(tmp_path / "model.pt2"), target="onnx"))
    assert report.is_near_enough
    assert any("axis 0 is not open" in note for note in report.notes)


def test_several_inputs_by_name_and_several_outputs_keep_their_places(
    torch: Any, convert: Convert, tmp_path: Path
) -> None:
    class Mixed(torch.nn.Module):  # type: ignore[misc]
        def forward(self, left: Any, *, ids: Any, right: Any) -> Any:
            return {"sum": left + right, "parts": (left * 2, ids + 1)}

    rows = torch.export.Dim("rows")
    program = torch.export.export(
        Mixed(), (torch.zeros(2, 3),), {"ids": torch.zeros(2, 4, dtype=torch.int64), "right": torch.ones(2, 3)},
        dynamic_shapes={"left": {0: rows}, "ids": {0: rows}, "right": {0: rows}},
    )  # fmt: skip
    torch.export.save(program, str(tmp_path / "model.pt2"))
    random = np.random.default_rng(2)
    np.savez(
        tmp_path / "data.npz", left=random.random((5, 3), np.float32), right=random.random((5, 3), np.float32),
        ids=random.integers(0, 9, (5, 4)),
    )  # fmt: skip
    report = convert(
        ConversionOptions(source=str(tmp_path / "model.pt2"), target="onnx", data=str(tmp_path / "data.npz"))
    )
    assert report.is_near_enough, report.faults
    assert report.rows == 5
    assert [output.name for output in report.outputs] == ["sum", "parts_0", "parts_1"]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, that TorchScript is not for new models
def test_torchscript_of_two_outputs_gets_its_shapes(torch: Any, convert: Convert, tmp_path: Path) -> None:
    class Two(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, scale: Any) -> Any:
            return x * scale, x.sum(1)

    torch.jit.trace(Two(), (torch.zeros(2, 3), torch.ones(3))).save(str(tmp_path / "model.pt"))
    report = convert(
        ConversionOptions(
            source=str(tmp_path / "model.pt"), target="onnx", shapes=("x=-1,3", "scale=3"), tolerance=1e-5
        )
    )
    assert report.is_near_enough, report.faults
    assert [output.name for output in report.outputs] == ["output_0", "output_1"]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, that TorchScript is not for new models
def test_a_shape_that_torchscript_cannot_run_is_named_with_what_pytorch_says(
    torch: Any, convert: Convert, tmp_path: Path
) -> None:
    torch.jit.trace(torch.nn.Linear(3, 2), torch.zeros(2, 3)).save(str(tmp_path / "model.pt"))
    with pytest.raises(ConversionFailed, match=r"cannot run it with x=-1,5:FP32; check --shapes.*shapes cannot be mul"):
        convert(ConversionOptions(source=str(tmp_path / "model.pt"), target="onnx", shapes=("x=-1,5",)))


def test_outputs_are_named_by_their_place_and_not_by_the_last_operation(torch: Any, tmp_path: Path) -> None:
    class Many(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            total = x + y
            return {"scores": total, "more": {"logits": total * 2}, "a b": (total + 1, None, x), "again": total}

    class Two(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x * 2, x + 1

    class One(torch.nn.Module):  # type: ignore[misc]
        def forward(self, output_0: Any, output: Any) -> Any:
            return output_0 + output

    def names(module: Any, inputs: int) -> list[str]:
        made = tmp_path / f"{type(module).__name__}.onnx"
        original = convert_module(module, [torch.zeros(1, 3)] * inputs, made)
        served = serve(made)
        x = [floats(2, 3, seed=seed) for seed in range(inputs)]
        given = {spec.name: array for spec, array in zip(served.spec.inputs, x, strict=True)}
        for wanted, got in zip(original.run(given), served.run(given), strict=True):
            np.testing.assert_allclose(wanted, got, rtol=1e-5)
        served.close()
        return [output.name for output in served.spec.outputs]

    assert names(torch.nn.Linear(3, 2), 1) == ["output"]
    assert names(Two(), 1) == ["output_0", "output_1"]
    assert names(Many(), 2)[:3] == ["scores", "more_logits", "a_b_0"]
    assert names(One(), 2) != ["output"]  # which is an input's
