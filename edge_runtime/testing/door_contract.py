"""The promises of every door, as tests of pytest: a class to inherit from, with a `door_kit`.

    from edge_runtime.testing import DoorContract, DoorKit

    class TestLines(DoorContract):
        door_kit = DoorKit(("edge-runtime-lines",), 'lines.endpoint = "127.0.0.1:0"', asking)

A door answers what ZeroMQ answers, bit for bit, and refuses by the same codes. Our own doors run through these tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from edge_runtime.client.core import is_starting
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.tensors import Array
from edge_runtime.testing.door_kit import DATATYPES, Ask, DoorKit, asked_door


def floats(*shape: int, seed: int = 0) -> Array:
    """Return numbers of this shape, FP32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def values_of(datatype: str) -> Array:
    """Two rows with the hardest values of a datatype."""
    if datatype == "BYTES":
        return np.array([["né".encode(), b""], ["日本".encode(), b"x" * 300]], dtype=object)
    dtype = np.dtype({"FP32": "f4", "FP64": "f8", "BOOL": "?"}.get(datatype, datatype.lower()))
    if dtype.kind == "b":
        return np.array([[True, False], [False, True]])
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        return np.array([[limits.max, limits.smallest_subnormal], [0.1, -1 / 3]], dtype)
    limits = np.iinfo(dtype)
    return np.array([[limits.min, limits.max], [1, limits.max - 1]], dtype)


def same_bits(one: Array, other: Array) -> bool:
    """Return whether two arrays are the same, not a number and the sign of 0 included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tolist() == other.tolist() if one.dtype.kind == "O" else one.tobytes() == other.tobytes()


X = {"x": floats(1, 16)}
REFUSED = [
    ("an unknown model", "nope", X, {}, "model_not_found"),
    ("an unknown version", "mlp", X, {"version": 9}, "model_not_found"),
    ("an unknown input", "mlp", {"z": X["x"]}, {}, "tensor_mismatch"),
    ("an input too many", "mlp", {**X, "z": X["x"]}, {}, "tensor_mismatch"),
    ("a missing input", "pair", {"a": floats(1, 3)}, {}, "tensor_mismatch"),
    ("a wrong datatype", "mlp", {"x": np.zeros((1, 16))}, {}, "tensor_mismatch"),
    ("a wrong shape", "mlp", {"x": floats(1, 15)}, {}, "tensor_mismatch"),
    ("a wrong rank", "mlp", {"x": floats(16)}, {}, "tensor_mismatch"),
    ("inputs of different rows", "pair", {"a": floats(2, 3), "b": np.array([[4, 5]])}, {}, "tensor_mismatch"),
    ("too many rows", "mlp", {"x": floats(2_000, 16)}, {}, "tensor_mismatch"),
    ("an unknown output", "mlp", X, {"outputs": ["z"]}, "tensor_mismatch"),
    ("a model that failed to load", "broken", X, {}, "not_ready"),
    ("a model that was unloaded", "gone", X, {}, "not_ready"),
    ("a deadline that is over", "mlp", X, {"timeout_ms": 0.000001}, "deadline_unmeetable"),
]


class DoorContract:
    """The promises. A subclass has a `door_kit`."""

    door_kit: ClassVar[DoorKit]

    @pytest.fixture(scope="class")
    @classmethod
    def asks(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ask, Ask]]:
        """Serve the models of the contract, and ask through the door and over ZeroMQ."""
        with asked_door(cls.door_kit, tmp_path_factory.mktemp("door")) as asks:
            yield asks

    @pytest.fixture
    def ask(self, asks: tuple[Ask, Ask]) -> Ask:
        """Ask through the door."""
        return asks[0]

    @pytest.fixture
    def reference(self, asks: tuple[Ask, Ask]) -> Ask:
        """Ask over ZeroMQ, which the door is held against."""
        return asks[1]

    @pytest.mark.parametrize("model", ["mlp", "two"])
    @pytest.mark.parametrize("rows", [1, 5])
    def test_an_answer_is_the_same_bit_for_bit_the_first_time_and_when_the_request_is_known(
        self, ask: Ask, reference: Ask, model: str, rows: int
    ) -> None:
        x = floats(rows, 16, seed=rows)
        wanted = reference(model, {"x": x})

        for _ in range(4):
            found = ask(model, {"x": x})
            assert (found.model, found.version) == (wanted.model, wanted.version)
            assert same_bits(found["y"], wanted["y"])

    @pytest.mark.parametrize("datatype", DATATYPES)
    def test_every_datatype_comes_back_as_it_went(self, ask: Ask, datatype: str) -> None:
        x = values_of(datatype)
        assert same_bits(ask(datatype.lower(), {"x": x})["y"], x)

    def test_outputs_come_in_the_order_asked_for_and_no_others(self, ask: Ask) -> None:
        inputs = {"b": np.array([[4, 5]]), "a": floats(1, 3)}

        assert list(ask("pair", inputs, outputs=["twice", "sum"]).outputs) == ["twice", "sum"]
        assert list(ask("pair", inputs, outputs=["sum"]).outputs) == ["sum"]
        assert list(ask("pair", inputs).outputs) == ["sum", "twice"]

    def test_a_named_version_answers_and_else_the_newest(self, ask: Ask) -> None:
        x = {"x": floats(1, 16)}
        assert [ask("two", x, version=version).version for version in (1, 2, None)] == [1, 2, 2]

    def test_a_timeout_and_a_priority_change_no_answer(self, ask: Ask, reference: Ask) -> None:
        x = floats(2, 16)
        found = ask("mlp", {"x": x}, timeout_ms=12_345.5, priority=1)
        assert same_bits(found["y"], reference("mlp", {"x": x})["y"])

    @pytest.mark.parametrize(
        ("model", "inputs", "options", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
    )
    def test_a_refusal_has_the_same_code_every_time_and_the_door_stays_open(
        self, ask: Ask, model: str, inputs: Mapping[str, Array], options: Mapping[str, Any], code: str
    ) -> None:
        for _ in range(3):
            with pytest.raises(EdgeRuntimeError) as caught:
                ask(model, inputs, **options)
            assert caught.value.code == code, caught.value
            assert caught.value.message
        assert ask("mlp", X).version == 1

    def test_a_model_that_failed_to_load_says_why_through_every_door(self, ask: Ask) -> None:
        with pytest.raises(EdgeRuntimeError, match="model broken version 1 failed to load: ") as caught:
            ask("broken", X)
        assert not is_starting(caught.value), "a client would wait for it"
