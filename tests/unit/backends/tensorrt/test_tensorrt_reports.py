"""What TensorRT says while it builds and of what it built, in our words. Pure."""

from __future__ import annotations

import json

import pytest

from edge_runtime.backends.tensorrt.backend import precision_run
from edge_runtime.backends.tensorrt.build import BuildProgress


def told(events: list[tuple[object, ...]]) -> list[float]:
    shares: list[float] = []
    progress = BuildProgress()
    for kind, *rest in events:
        share = getattr(progress, str(kind))(*rest)
        if share is not None:
            shares.append(round(share, 3))
    return shares


def test_a_phase_inside_another_is_one_step_of_it():
    events = [
        ("start", "Building engine", None, 2),
        ("start", "Timing", "Building engine", 4),
        ("step", "Timing", 0),
        ("step", "Timing", 1),
        ("finish", "Timing"),
        ("step", "Building engine", 0),
        ("step", "Building engine", 1),
    ]
    assert told(events) == [0.125, 0.25, 0.5, 1.0]


def test_progress_never_falls_and_is_reported_only_when_it_grows():
    events = [
        ("start", "Building engine", None, 2),
        ("step", "Building engine", 0),
        ("start", "A second root", None, 10),
        ("step", "A second root", 0),
        ("step", "Building engine", 0),
    ]
    assert told(events) == [0.5]


def test_phases_that_make_no_sense_do_no_harm():
    events = [
        ("step", "never begun", 3),
        ("finish", "never begun"),
        ("start", "own parent", "own parent", 0),
        ("step", "own parent", 99),
        ("start", "orphan", "nobody", 2),
        ("step", "orphan", 0),
    ]
    assert told(events) == [1.0]


def layers(*described: tuple[str, list[str]], key: str = "Format/Datatype") -> str:
    return json.dumps(
        {"Layers": [{"LayerType": kind, "Inputs": [{key: text} for text in texts]} for kind, texts in described]}
    )


FP32, FP16, INT8 = (f"Row major linear {name} format" for name in ("FP32", "FP16 (kHALF)", "INT8"))


@pytest.mark.parametrize(
    ("information", "precision"),
    [
        (layers(("CaskConvolution", [FP32]), ("Reformat", [FP16])), "f32"),
        (layers(("CaskConvolution", [FP16]), ("CaskGemmConvolution", [FP16])), "f16"),
        (layers(("CaskConvolution", [FP16]), ("CaskConvolution", [FP32])), "mixed"),
        (layers(("CaskConvolution", [INT8, FP32]), ("Gemm", [INT8]), ("Gemm", [INT8]), ("Gemm", [FP32])), "int8"),
        (layers(("CaskConvolution", [INT8]), ("Gemm", [FP32])), "mixed"),
        (layers(("gemm", ["Half"]), key="Datatype"), "f16"),
        (layers(("gemm", ["BFloat16"]), key="DataType"), "bf16"),
        (layers(("kgen", ["Float"]), key="Datatype"), "f32"),
        (layers(("Shuffle", [FP16])), "planned"),
        ('{"Layers": ["conv1", "conv2"]}', "planned"),
        ('{"Layers": 3}', "planned"),
        ("[]", "planned"),
        ("not json", "planned"),
    ],
)
def test_the_precision_that_runs_is_what_compute_layers_read(information, precision):
    assert precision_run(information, "planned") == precision
