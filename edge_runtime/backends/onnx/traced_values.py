"""An ONNX model's values as rule.py follows them, with axis 0 as the one length that is open.

Owns: what a value is to the rule, what a row of its table is given of one node and must look at, the shape arithmetic
that operators share, and the bounds of a whole run. Knows no operator. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from edge_runtime.backends.onnx.graph import FLOAT, INT64, OnnxConstant, OnnxNode
from edge_runtime.model_spec import DYNAMIC

MAX_ROW_BYTES = 1 << 20
"""All values of one row together. A run of 256 rows, the most by default, holds 256 MiB at the very worst; a model
that is quick enough for the I/O thread (0.2 ms) has some ten thousand bytes a row."""

MAX_ROW_STEPS = 8_000_000
"""Multiplications, or the like, for one row: some milliseconds on one slow core."""

MAX_CONSTANT_BYTES = 64 << 20
MAX_CONSTANT_STEPS = 100_000_000
"""Of what a library works out at load, weights included: a tenth of a second, and 8 million weights."""

FLOATS = (FLOAT,)

Shape = tuple[int, ...]


class NotInside(Exception):
    """A reason why a model may not run inside the daemon, in words that follow the model's name."""


class TracedValue(Struct, frozen=True):
    """A tensor between two operators.

    shape: axis 0 may be DYNAMIC, for the rows of a run; every other length is 1 or more. datatype: in the words of the
    file's format. is_constant: no client has a part in it. numbers: its elements, where they were read.
    """

    shape: Shape
    datatype: object
    is_constant: bool = False
    numbers: tuple[float, ...] | None = None

    @property
    def row_elements(self) -> int:
        """Elements for one row; all of them where no axis is open."""
        return math.prod(size for size in self.shape if size != DYNAMIC)


def require(is_so: bool, reason: str) -> None:
    """Raise NotInside with the reason unless it is so."""
    if not is_so:
        raise NotInside(reason)


def check_shape(shape: Sequence[int]) -> Shape:
    """Return a shape that may be followed. Raises NotInside: an inner length is open or 0, or a row too large."""
    require(len(shape) <= 8, f"it has {len(shape)} axes, wanted at most 8")
    require(
        all(size >= 1 for size in shape[1:]) and all(size >= 1 or size == DYNAMIC for size in shape[:1]),
        f"its shape is {list(shape)}; wanted fixed lengths, 1 or more, but for axis 0",
    )
    require(math.prod(shape[1:]) <= MAX_ROW_BYTES, f"a row has more than {MAX_ROW_BYTES} elements")
    return tuple(shape)


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape of an operator that works element by element. Raises NotInside where rows would mix."""
    rank = max(len(shape) for shape in shapes)
    result: list[int] = []
    for axis in range(rank):
        sizes = {shape[axis - rank + len(shape)] for shape in shapes if axis >= rank - len(shape)} - {1}
        require(len(sizes) <= 1, f"shapes {', '.join(str(list(shape)) for shape in shapes)} do not fit each other")
        size = sizes.pop() if sizes else 1
        require(axis == 0 or size != DYNAMIC, "its rows would be on another axis than 0")
        result.append(size)
    return check_shape(result)


def inner_axis(axis: object, shape: Shape) -> int:
    """Return an axis as a number from 0. Raises NotInside for one that is not there, or that is the rows."""
    require(isinstance(axis, int) and -len(shape) <= axis < len(shape), f"it has no axis {axis}")
    assert isinstance(axis, int)
    number = axis % len(shape)
    require(shape[number] != DYNAMIC, "it works along the axis of the rows, whose number a client chooses")
    return number


def reshaped(shape: Shape, sizes: Sequence[float], *, copies_zero: bool) -> Shape:
    """Return the result of Reshape to `sizes`, where 0 may copy an axis and -1 stands for the rest."""
    wanted = [int(size) for size in sizes]
    require(sum(size == -1 for size in wanted) <= 1, "it leaves two lengths open")
    for axis, size in enumerate(wanted):
        require(size >= -1, f"it asks for a length of {size}")
        if size == 0:
            require(copies_zero and axis < len(shape), "it asks for a length of 0")
            wanted[axis] = shape[axis] if shape[axis] != DYNAMIC else 0  # 0 marks the rows from here on
    elements = math.prod(size for size in shape if size != DYNAMIC)
    if DYNAMIC in shape:
        require(bool(wanted) and wanted[0] in (0, -1) and 0 not in wanted[1:], "it moves the rows to another axis")
        if wanted[0] == -1:
            require(math.prod(wanted[1:]) == elements, "it would change how many rows there are")
            return check_shape((DYNAMIC, *wanted[1:]))
        rest = _filled(wanted[1:], elements)
        return check_shape((DYNAMIC, *rest))
    return check_shape(_filled(wanted, elements))


def _filled(wanted: list[int], elements: int) -> list[int]:
    known = math.prod(size for size in wanted if size != -1)
    require(elements % known == 0 and (-1 in wanted or known == elements), "it changes how many elements there are")
    return [elements // known if size == -1 else size for size in wanted]


def reduced(shape: Shape, axes: Sequence[object], *, keeps: bool) -> Shape:
    """Return the shape without some axes, or with 1 in their place."""
    gone = {inner_axis(axis, shape) for axis in axes}
    require(len(gone) == len(axes) and bool(gone), "it names an axis twice, or none")
    return check_shape([1 if axis in gone else size for axis, size in enumerate(shape) if keeps or axis not in gone])


def windows(
    sizes: Shape, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
) -> Shape:
    """Return how many places a window has along each axis. Raises NotInside for windows that do not fit inside.

    pads: at the begin of each axis, then at the end of each. Each is smaller than the window, so that every place holds
    an element at least.
    """
    count = len(sizes)
    require(
        (len(kernel), len(strides), len(pads), len(dilations)) == (count, count, 2 * count, count),
        "its kernel, strides, pads and dilations do not fit its input",
    )
    places: list[int] = []
    for axis, size in enumerate(sizes):
        require(1 <= kernel[axis] <= 1024 and 1 <= dilations[axis] <= 1024, "a kernel or dilation is not in 1..1024")
        require(1 <= strides[axis] <= 1024, "a stride is not in 1..1024")
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        before, after = pads[axis], pads[axis + count]
        require(0 <= before < reach and 0 <= after < reach, "a pad is negative, or as large as the window")
        require(reach <= size + before + after, "a window is larger than what it is laid on")
        places.append((size + before + after - reach) // strides[axis] + 1)
    return tuple(places)


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
        require(value.numbers is not None and len(value.shape) <= 1, f"input {index} is not a short list of constants")
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
        require(isinstance(value, OnnxConstant), f"attribute {name!r} is not a tensor")
        assert isinstance(value, OnnxConstant)
        return value

    def fixed(self, name: str, wanted: object) -> None:
        """Require an attribute to be absent or as wanted."""
        value = self._attributes.pop(name, wanted)
        require(value == wanted, f"attribute {name!r} is {value!r}, wanted {wanted!r}")

    def finish(self) -> bool:
        """Require that nothing is left. Returns whether every input was constant."""
        left = [self._node.inputs[i] for i in range(self.count) if i not in self._seen and self.has(i)]
        require(not left, f"it has an input that its row does not know: {left[:3]}")
        require(not self._attributes, f"it has an attribute that its row does not know: {list(self._attributes)[:3]}")
        return self._is_constant


class Followed(Struct, frozen=True):
    """The result of one operator: shape, type, and the multiplications or the like that a row of it takes.

    numbers: its elements where they are known.
    """

    shape: Shape
    datatype: int
    steps: int = 0
    numbers: tuple[float, ...] | None = None


Follow = Callable[[NodeUse], tuple[Followed, ...]]
"""Follows one use of an operator; returns its outputs. Raises NotInside."""


class RunCost(Struct):
    """The cost of loading and of one row of a run: summed over a model's values."""

    row_bytes: int = 0
    row_steps: int = 0
    constant_bytes: int = 0
    constant_steps: int = 0

    def add(self, value: TracedValue, steps: int) -> None:
        """Count a value and the steps to it. Raises NotInside when a sum is over its bound."""
        nbytes = 8 * value.row_elements
        if value.is_constant:
            self.constant_bytes += nbytes
            self.constant_steps += steps
        else:
            self.row_bytes += nbytes
            self.row_steps += steps
        for got, most, words in (
            (self.row_bytes, MAX_ROW_BYTES, "bytes of values for one row"),
            (self.row_steps, MAX_ROW_STEPS, "multiplications for one row"),
            (self.constant_bytes, MAX_CONSTANT_BYTES, "bytes of constants"),
            (self.constant_steps, MAX_CONSTANT_STEPS, "multiplications of constants"),
        ):
            require(got <= most, f"it takes {got} {words} or more, wanted at most {most}")
