"""One use of an ONNX operator: its inputs and attributes, handed out once each, and what follows from them.

Owns: the notice of all that a row of the rule's table did not look at. Called by the rows, in onnx_rule.py and
onnx_ml_rule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.backends.onnx_graph import FLOAT, INT64, OnnxConstant, OnnxNode
from edge_runtime.backends.traced_values import Shape, TracedValue, require

FLOATS = (FLOAT,)


class NodeUse:
    """One node's inputs and attributes, handed out once each, so that what a row did not look at is noticed."""

    def __init__(self, node: OnnxNode, opset: int, values: Mapping[str, TracedValue]) -> None:
        self.opset = opset
        self.count = len(node.inputs)
        self._node = node
        self._values = values
        self._attributes = dict(node.attributes)
        self._seen: set[int] = set()
        self._is_constant = True

    def has(self, index: int) -> bool:
        """Whether there is such an input."""
        return index < self.count and self._node.inputs[index] != ""

    def value(self, index: int, datatypes: Sequence[int] = FLOATS) -> TracedValue:
        """Return an input of one of these types."""
        require(self.has(index), f"input {index} is missing")
        name = self._node.inputs[index]
        require(name in self._values, f"nothing has written its input {name!r}")
        value = self._values[name]
        require(value.datatype in datatypes, f"input {index} is of type {value.datatype}, wanted {list(datatypes)}")
        self._seen.add(index)
        self._is_constant = self._is_constant and value.is_constant
        return value

    def constant(self, index: int, datatypes: Sequence[int] = FLOATS) -> TracedValue:
        """Return an input that no client has a part in."""
        value = self.value(index, datatypes)
        require(value.is_constant, f"input {index} is not constant, so a client could choose it")
        return value

    def numbers(self, index: int, datatypes: Sequence[int] = (INT64,)) -> tuple[float, ...]:
        """Return the elements of a constant input of at most one axis."""
        value = self.constant(index, datatypes)
        require(value.numbers is not None and len(value.shape) <= 1, f"input {index} is no short list of constants")
        assert value.numbers is not None
        return value.numbers

    def number(self, name: str, default: float | None = None) -> float:
        """Return an attribute that is one number."""
        value = self._attributes.pop(name, default)
        require(isinstance(value, (int, float)), f"attribute {name!r} is {value!r}, wanted a number")
        assert isinstance(value, (int, float))
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """Return an attribute that is one whole number."""
        value = self._attributes.pop(name, default)
        require(isinstance(value, int), f"attribute {name!r} is {value!r}, wanted a whole number")
        assert isinstance(value, int)
        return value

    def wholes(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return an attribute that is a list of whole numbers."""
        value = self._attributes.pop(name, default)
        is_list = isinstance(value, (tuple, list)) and all(isinstance(each, int) for each in value)
        require(is_list, f"attribute {name!r} is {value!r}, wanted whole numbers")
        assert isinstance(value, (tuple, list))
        return tuple(value)

    def floats(self, name: str) -> tuple[float, ...]:
        """Return an attribute that is a list of numbers; none where it is absent."""
        value = self._attributes.pop(name, ())
        is_list = isinstance(value, tuple) and all(isinstance(each, float) for each in value)
        require(is_list, f"attribute {name!r} is {value!r:.80}, wanted numbers")
        assert isinstance(value, tuple)
        return value

    def texts(self, name: str) -> tuple[bytes, ...]:
        """Return an attribute that is a list of texts."""
        value = self._attributes.pop(name, None)
        is_list = isinstance(value, tuple) and all(isinstance(each, bytes) for each in value)
        require(is_list, f"attribute {name!r} is {value!r:.80}, wanted texts")
        assert isinstance(value, tuple)
        return value

    def one_of(self, name: str, allowed: Sequence[bytes]) -> bytes:
        """Return an attribute that is one of these texts, the first where it is absent."""
        value = self._attributes.pop(name, allowed[0])
        require(value in allowed, f"attribute {name!r} is {value!r}, wanted one of {list(allowed)}")
        assert isinstance(value, bytes)
        return value

    def tensor(self, name: str) -> OnnxConstant:
        """Return an attribute that is a tensor."""
        value = self._attributes.pop(name, None)
        require(isinstance(value, OnnxConstant), f"attribute {name!r} is no tensor")
        assert isinstance(value, OnnxConstant)
        return value

    def fixed(self, name: str, wanted: object) -> None:
        """Require an attribute to be absent or as wanted."""
        value = self._attributes.pop(name, wanted)
        require(value == wanted, f"attribute {name!r} is {value!r}, wanted {wanted!r}")

    def has_attribute(self, name: str) -> bool:
        """Whether it is written, and not yet taken."""
        return name in self._attributes

    def finish(self) -> bool:
        """Require that nothing is left. Returns whether every input was constant."""
        left = [self._node.inputs[i] for i in range(self.count) if i not in self._seen and self.has(i)]
        require(not left, f"it has an input that its row does not know: {left[:3]}")
        require(not self._attributes, f"it has an attribute that its row does not know: {list(self._attributes)[:3]}")
        return self._is_constant


@dataclass(frozen=True, slots=True)
class Followed:
    """The result of one operator: shape, type, and the multiplications or the like that a row of it takes.

    numbers: its elements where they are known.
    """

    shape: Shape
    datatype: int
    steps: int = 0
    numbers: tuple[float, ...] | None = None


Follow = Callable[[NodeUse], tuple[Followed, ...]]
"""Follows one use of an operator; returns its outputs. Raises NotInside."""
