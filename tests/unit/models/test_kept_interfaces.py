"""Which changes of a model's tensors its clients bear."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.kept_interfaces import KeptInterfaces, why_clients_fail

X, Y = TensorSpec("x", "FP32", (-1, 3)), TensorSpec("y", "FP32", (-1, 2))
BEFORE = ModelSpec((X,), (Y,))


@pytest.mark.parametrize(
    "now",
    [
        BEFORE,
        ModelSpec((TensorSpec("more", "INT64", (1,), is_optional=True), X), (TensorSpec("z", "FP16", ()), Y)),
        ModelSpec((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (4, 2)),)),
    ],
    ids=["the same", "an optional input, another output, another order", "wider inputs, narrower outputs"],
)
def test_clients_bear_what_takes_all_that_they_send_and_answers_all_that_they_read(now: ModelSpec) -> None:
    assert why_clients_fail(BEFORE, now) == ""


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ((TensorSpec("a", "FP32", (-1, 3)),), (Y,), "input 'a' is new; input 'x' is gone (there are a)"),
        ((X, TensorSpec("more", "FP32", (1,))), (Y,), "input 'more' is new"),
        ((TensorSpec("x", "FP16", (-1, 3)),), (Y,), "input 'x' was FP32 [-1, 3], and is FP16 [-1, 3]"),
        ((TensorSpec("x", "FP32", (1, 3)),), (Y,), "input 'x' was FP32 [-1, 3], and is FP32 [1, 3]"),
        ((X,), (TensorSpec("scores", "FP32", (-1, 2)),), "output 'y' is gone (there are scores)"),
        ((X,), (TensorSpec("y", "FP32", (-1, -1)),), "output 'y' was FP32 [-1, 2], and is FP32 [-1, -1]"),
        ((X,), (TensorSpec("y", "FP32", (-1, 2, 1)),), "output 'y' was FP32 [-1, 2], and is FP32 [-1, 2, 1]"),
    ],
)  # fmt: skip
def test_clients_do_not_bear_what_they_could_not_send_or_read(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], reason: str
) -> None:
    assert why_clients_fail(BEFORE, ModelSpec(inputs, outputs)) == reason


def test_a_kept_interface_is_found_by_the_next_daemon_and_a_damaged_file_holds_nothing(tmp_path: Path) -> None:
    KeptInterfaces(tmp_path / "kept").keep("m", 3, BEFORE)
    kept = KeptInterfaces(tmp_path / "kept").find("m")
    assert kept is not None
    assert (kept.version, kept.spec()) == (3, BEFORE)
    (tmp_path / "kept" / "m.json").write_bytes(b"{")
    assert KeptInterfaces(tmp_path / "kept").find("m") is None
    KeptInterfaces(tmp_path / "kept").forget("m")
    assert list((tmp_path / "kept").iterdir()) == []
