"""Which ONNX operators may run inside the daemon, and under which conditions.

Owns: OPERATORS, the table of them, each with its conditions and the reason that it is safe. An operator that is not in
the table, an attribute that its row does not read, and a type that it does not name keep a model in a host.
tests/unit/backends/test_inside_rule.py and `python -m bench.single_operators` run models of every row, with edge values
as files and as client data, through each library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from msgspec import Struct

from edge_runtime.backends.onnx.graph import (
    BOOL,
    DOUBLE,
    FLOAT,
    INT8,
    INT32,
    INT64,
    UINT8,
    NotPlain,
    OnnxGraph,
    OnnxNode,
    read_graph,
)
from edge_runtime.backends.onnx.traced_values import (
    FLOATS,
    Follow,
    Followed,
    NodeUse,
    NotInside,
    RunCost,
    Shape,
    TracedValue,
    broadcast,
    check_shape,
    inner_axis,
    reduced,
    require,
    reshaped,
    windows,
)
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC

OLDEST_OPSET, NEWEST_OPSET = 9, 26
"""Versions of ONNX's operators whose meaning the rows follow; the newest is what ONNX Runtime 1.31 knows."""

NUMBERS = (FLOAT, DOUBLE, INT32, INT64)
PLAIN = (FLOAT, DOUBLE, INT32, INT64, INT8, UINT8, BOOL)
BYTES = (INT8, UINT8)
INPUTS = (FLOAT, DOUBLE, INT32, INT64, INT8, UINT8)

_TRANSFORMS = (b"NONE", b"SOFTMAX", b"LOGISTIC", b"SOFTMAX_ZERO")
_BRANCHES = frozenset((b"BRANCH_LEQ", b"BRANCH_LT", b"BRANCH_GTE", b"BRANCH_GT", b"BRANCH_EQ", b"BRANCH_NEQ"))
_LEAF = b"LEAF"

_MOST_DEPTH = 1000
"""Of a tree; boosted ones have some ten levels, forests some thirty."""


def why_not_inside(artifact: Path) -> str | None:
    """Return why an artifact must run in a host, in words; None where it may run inside the daemon.

    When each of its operators is in the table and used as its row says, when only axis 0 of its inputs is open, and
    when one row takes little memory and work. All that the rule does not know runs in a host. Raises nothing.
    """
    if artifact.suffix != ".onnx":
        return f"the rule reads ONNX alone, and this is {artifact.name}"
    try:
        check_onnx(artifact)
    except (NotInside, NotPlain, LoadFailed) as error:
        return str(error)
    return None


def check_onnx(artifact: Path) -> None:
    """Follow one ONNX file. Raises NotInside, NotPlain, and LoadFailed for what is not an ONNX model."""
    graph = read_graph(artifact)
    opset = graph.opsets.get("", 0)
    require(
        OLDEST_OPSET <= opset <= NEWEST_OPSET,
        f"its operators are of opset {opset}, wanted {OLDEST_OPSET} to {NEWEST_OPSET}",
    )
    cost = RunCost()
    values: dict[str, TracedValue] = {}
    for name, constant in graph.constants.items():
        values[name] = TracedValue(constant.shape, constant.datatype, is_constant=True, numbers=constant.numbers)
        _check_declared(name, values[name], graph)
        cost.add(values[name], 0)
    for name in graph.inputs:
        values[name] = _input(name, graph)
        cost.add(values[name], 0)
    for node in graph.nodes:
        use = NodeUse(node, opset, values)
        for name, value in zip(node.outputs, _follow(node, use, cost), strict=True):
            require(name != "" and name not in values, f"{node.operator} writes the value {name!r}, which is there")
            _check_declared(name, value, graph)
            values[name] = value
    for name in graph.outputs:
        is_written = name in values and name not in graph.inputs and not values[name].is_constant
        require(is_written, f"nothing writes its output {name!r}, or it is constant")


# ---- operators, by family -------------------------------------------------------------------------------------------


def _unary(datatypes: Sequence[int] = FLOATS, **attributes: float) -> Follow:
    """One value in, one of the same shape out; each attribute is any number."""

    def follow(use: NodeUse) -> tuple[Followed, ...]:
        value = use.value(0, datatypes)
        for name, default in attributes.items():
            use.number(name, default)
        return _same(value)

    return follow


def _elementwise(datatypes: Sequence[int], result: int | None = None, least: int = 2, most: int = 2) -> Follow:
    """Values of one type, broadcast to each other."""

    def follow(use: NodeUse) -> tuple[Followed, ...]:
        require(least <= use.count <= most, f"it has {use.count} inputs")
        values = [use.value(index, datatypes) for index in range(use.count)]
        require(len({value.datatype for value in values}) == 1, "its inputs are of different types")
        shape = broadcast(*(value.shape for value in values))
        return (Followed(shape, _type(values[0]) if result is None else result, _elements(shape) * use.count),)

    return follow


def _where(use: NodeUse) -> tuple[Followed, ...]:
    values = [use.value(0, (BOOL,)), use.value(1), use.value(2)]
    shape = broadcast(*(value.shape for value in values))
    return (Followed(shape, FLOAT, _elements(shape) * 3),)


def _prelu(use: NodeUse) -> tuple[Followed, ...]:
    value, slope = use.value(0), use.constant(1)
    require(broadcast(value.shape, slope.shape) == value.shape, "its slopes are more than its input")
    return _same(value)


def _clip(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    if use.opset < 11:
        use.number("min", 0.0)
        use.number("max", 0.0)
    for index in (1, 2):
        if use.has(index):
            require(use.constant(index).shape == (), "a bound is not a single number")
    return _same(value)


def _dropout(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    use.number("ratio", 0.5)
    use.number("seed", 0)
    if use.has(1):
        require(use.constant(1).shape == (), "its ratio is not a single number")
    require(not use.has(2), "it may be in training")
    return _same(value)


def _cast(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, PLAIN)
    to = use.whole("to")
    require(to in (FLOAT, DOUBLE, INT32, INT64), f"it casts to the type {to}")
    return (Followed(value.shape, to, _elements(value.shape)),)


def _constant_node(use: NodeUse) -> tuple[Followed, ...]:
    constant = use.tensor("value")
    return (Followed(constant.shape, constant.datatype, numbers=constant.numbers),)


def _matmul(use: NodeUse) -> tuple[Followed, ...]:
    left, right = use.value(0), use.constant(1)
    require(len(right.shape) == 2 and len(left.shape) >= 2, "wanted two axes or more, times a constant matrix")
    require(left.shape[-1] == right.shape[0], f"{list(left.shape)} and {list(right.shape)} do not fit each other")
    shape = check_shape((*left.shape[:-1], right.shape[1]))
    return (Followed(shape, FLOAT, _elements(shape) * right.shape[0]),)


def _gemm(use: NodeUse) -> tuple[Followed, ...]:
    left, right = use.value(0), use.constant(1)
    use.number("alpha", 1.0)
    use.number("beta", 1.0)
    use.fixed("transA", 0)
    is_transposed = use.whole("transB", 0)
    require(is_transposed in (0, 1), "transB is neither 0 nor 1")
    require(len(left.shape) == len(right.shape) == 2, "wanted matrices")
    inner, columns = right.shape[::-1] if is_transposed else right.shape
    require(left.shape[1] == inner, f"{list(left.shape)} and {list(right.shape)} do not fit each other")
    if use.has(2):
        bias = use.constant(2).shape
        require(bias in ((), (1,), (columns,), (1, 1), (1, columns)), f"its third input has the shape {list(bias)}")
    return (Followed(check_shape((left.shape[0], columns)), FLOAT, inner * columns * _rows(left.shape)),)


def _conv(use: NodeUse) -> tuple[Followed, ...]:
    value, weights = use.value(0), use.constant(1)
    axes = len(value.shape) - 2
    require(1 <= axes <= 2 and len(weights.shape) == axes + 2, "wanted 1 or 2 axes of space")
    group = use.whole("group", 1)
    require(use.wholes("kernel_shape", weights.shape[2:]) == weights.shape[2:], "its kernel_shape is not its weights'")
    channels, filters = value.shape[1], weights.shape[0]
    require(1 <= group <= channels and channels % group == 0 and filters % group == 0, f"group is {group}")
    require(weights.shape[1] == channels // group, "its weights have other channels than its input")
    if use.has(2):
        require(use.constant(2).shape == (filters,), "its bias does not fit its filters")
    places = _windows(use, value.shape[2:], weights.shape[2:])
    shape = check_shape((value.shape[0], filters, *places))
    return (Followed(shape, FLOAT, _elements(shape) * math.prod(weights.shape[1:])),)


def _pool(**attributes: tuple[int, ...]) -> Follow:
    """A window that slides; each attribute is one of these."""

    def follow(use: NodeUse) -> tuple[Followed, ...]:
        value = use.value(0)
        axes = len(value.shape) - 2
        require(1 <= axes <= 2, "wanted 1 or 2 axes of space")
        kernel = use.wholes("kernel_shape")
        use.fixed("dilations", (1,) * axes)  # a window with gaps could lie on pads alone
        for name, allowed in attributes.items():
            require(use.whole(name, 0) in allowed, f"attribute {name!r} is not one of {list(allowed)}")
        shape = check_shape((*value.shape[:2], *_windows(use, value.shape[2:], kernel)))
        return (Followed(shape, FLOAT, _elements(shape) * math.prod(kernel)),)

    return follow


def _global_pool(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    require(3 <= len(value.shape) <= 4, "wanted 1 or 2 axes of space")
    return (Followed((*value.shape[:2], *(1 for _ in value.shape[2:])), FLOAT, _elements(value.shape)),)


def _batch_normalization(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    require(2 <= len(value.shape) <= 4, "wanted 2 to 4 axes")
    for index in range(1, 5):
        require(use.constant(index).shape == (value.shape[1],), "its scales do not fit its channels")
    use.number("epsilon", 1e-5)
    use.number("momentum", 0.9)
    use.fixed("training_mode", 0)
    return _same(value)


def _layer_normalization(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    axis = inner_axis(use.whole("axis", -1), value.shape)
    require(axis >= 1, "wanted an axis after the first")
    require(math.prod(value.shape[axis:]) > 1, "one element alone has no spread")
    for index in (1, 2):
        if index == 1 or use.has(index):
            require(use.constant(index).shape == value.shape[axis:], "its scales do not fit its input")
    use.number("epsilon", 1e-5)
    use.fixed("stash_type", 1)
    return _same(value, 4)


def _softmax(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    require(len(value.shape) >= 1, "wanted an axis")
    inner_axis(use.whole("axis", -1 if use.opset >= 13 else 1), value.shape)
    return _same(value, 4)


def _reshape(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, PLAIN)
    use.fixed("allowzero", 0)
    return (Followed(reshaped(value.shape, use.numbers(1), copies_zero=True), _type(value)),)


def _flatten(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, PLAIN)
    require(use.whole("axis", 1) == 1 and len(value.shape) >= 1, "wanted axis 1")
    return (Followed(check_shape((value.shape[0], math.prod(value.shape[1:]))), _type(value)),)


def _squeeze(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, PLAIN)
    axes = {inner_axis(axis, value.shape) for axis in _axes(use, since=13)}
    require(all(value.shape[axis] == 1 for axis in axes) and bool(axes), "it squeezes an axis that is not of length 1")
    return (Followed(check_shape([s for axis, s in enumerate(value.shape) if axis not in axes]), _type(value)),)


def _unsqueeze(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, PLAIN)
    wanted = _axes(use, since=13)
    rank = len(value.shape) + len(wanted)
    require(all(-rank <= axis < rank for axis in wanted), "it has no such axis")
    axes = {axis % rank for axis in wanted}
    require(len(axes) == len(wanted), "it names an axis twice")
    left = list(value.shape)
    return (Followed(check_shape([1 if axis in axes else left.pop(0) for axis in range(rank)]), _type(value)),)


def _transpose(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, PLAIN)
    order = use.wholes("perm")
    require(sorted(order) == list(range(len(value.shape))), "perm does not name each axis once")
    return (Followed(check_shape([value.shape[axis] for axis in order]), _type(value), _elements(value.shape)),)


def _concat(use: NodeUse) -> tuple[Followed, ...]:
    values = [use.value(index, PLAIN) for index in range(use.count)]
    require(bool(values) and len({value.datatype for value in values}) == 1, "its inputs are of different types")
    first = values[0].shape
    axis = inner_axis(use.whole("axis"), first)
    others = {(*value.shape[:axis], *value.shape[axis + 1 :]) for value in values}
    require(len(others) == 1 and len({len(value.shape) for value in values}) == 1, "its inputs do not fit each other")
    length = sum(value.shape[axis] for value in values)
    shape = check_shape((*first[:axis], length, *first[axis + 1 :]))
    return (Followed(shape, _type(values[0]), _elements(shape)),)


def _slice(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, PLAIN)
    starts, ends, axes = use.numbers(1), use.numbers(2), use.numbers(3)
    require(not use.has(4) or set(use.numbers(4)) == {1}, "wanted steps of 1")
    require(len(starts) == len(ends) == len(axes) and len(set(axes)) == len(axes), "its lists do not fit each other")
    shape = list(value.shape)
    for start, end, axis in zip(starts, ends, axes, strict=True):
        number = inner_axis(axis, value.shape)
        shape[number] = len(range(value.shape[number])[int(start) : int(end)])
    return (Followed(check_shape(shape), _type(value), _elements(tuple(shape))),)


def _gather(use: NodeUse) -> tuple[Followed, ...]:
    value, places = use.value(0, PLAIN), use.numbers(1)
    axis = inner_axis(use.whole("axis", 0), value.shape)
    length = value.shape[axis]
    require(all(-length <= place < length for place in places), "it looks up a place that is not there")
    chosen = use.constant(1, (INT64,)).shape
    shape = check_shape((*value.shape[:axis], *chosen, *value.shape[axis + 1 :]))
    return (Followed(shape, _type(value), _elements(shape)),)


def _reduce(since: int) -> Follow:
    """Sums and the like along fixed axes, which became an input in opset `since`."""

    def follow(use: NodeUse) -> tuple[Followed, ...]:
        value = use.value(0)
        axes = _axes(use, since)
        use.fixed("noop_with_empty_axes", 0)
        return (Followed(reduced(value.shape, axes, keeps=_keeps(use)), FLOAT, _elements(value.shape)),)

    return follow


def _arg_max(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    require(use.whole("select_last_index", 0) in (0, 1), "select_last_index is neither 0 nor 1")
    shape = reduced(value.shape, [use.whole("axis", 0)], keeps=_keeps(use))
    return (Followed(shape, INT64, _elements(value.shape)),)


def _quantize(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0)
    _quantization(use, value, BYTES)
    use.fixed("saturate", 1)
    result = _type(use.constant(2, BYTES)) if use.has(2) else UINT8
    return (Followed(value.shape, result, _elements(value.shape)),)


def _dequantize(use: NodeUse) -> tuple[Followed, ...]:
    value = use.value(0, (*BYTES, INT32))
    require(value.is_constant or value.datatype in BYTES, "wanted int8 or uint8")
    _quantization(use, value, (_type(value),))
    return (Followed(value.shape, FLOAT, _elements(value.shape)),)


# ---- parts of operators ---------------------------------------------------------------------------------------------


# ---- operators of classic machine learning --------------------------------------------------------------------------
# A library walks a forest by the numbers of the file, so the rule walks it before: each tree must be one, and its
# columns and classes must be there.


def _scaler(use: NodeUse) -> tuple[Followed, ...]:
    """(x - offset) * scale, one for all columns or one for each."""
    value, columns = _table(use, NUMBERS)
    lengths = {len(use.floats(name)) for name in ("offset", "scale")}
    require(lengths in ({1}, {columns}), f"its offset and scale do not fit {columns} columns")
    return (Followed(value.shape, FLOAT, columns),)


def _normalizer(use: NodeUse) -> tuple[Followed, ...]:
    """Each row divided by its norm."""
    value, columns = _table(use, NUMBERS)
    use.one_of("norm", (b"MAX", b"L1", b"L2"))
    return (Followed(value.shape, FLOAT, columns * 2),)


def _linear_regressor(use: NodeUse) -> tuple[Followed, ...]:
    """Times a matrix that the file holds."""
    value, columns = _table(use)
    targets = use.whole("targets", 1)
    require(1 <= targets <= 1024 and len(use.floats("coefficients")) == targets * columns, "its matrix does not fit")
    require(len(use.floats("intercepts")) in (0, targets), "its intercepts do not fit its targets")
    use.one_of("post_transform", (b"NONE",))
    return (Followed(check_shape((value.shape[0], targets)), FLOAT, columns * targets),)


def _linear_classifier(use: NodeUse) -> tuple[Followed, ...]:
    """Times a matrix that the file holds; the label of the best, and all scores."""
    value, columns = _table(use)
    classes = len(use.wholes("classlabels_ints"))
    require(2 <= classes <= 1024, f"it has {classes} classes, wanted 2 to 1024 with numbers as labels")
    require(len(use.floats("coefficients")) == classes * columns, "its matrix does not fit its classes")
    require(len(use.floats("intercepts")) == classes, "its intercepts do not fit its classes")
    require(use.whole("multi_class", 0) in (0, 1), "multi_class is neither 0 nor 1")
    use.one_of("post_transform", _TRANSFORMS)
    return _label_and_scores(value, classes, columns * classes)


def _tree_classifier(use: NodeUse) -> tuple[Followed, ...]:
    """A forest whose leaves weigh classes."""
    value, columns = _table(use)
    classes = len(use.wholes("classlabels_int64s"))
    require(2 <= classes <= 1024, f"it has {classes} classes, wanted 2 to 1024 with numbers as labels")
    steps = _forest(use, columns, "class", classes)
    use.one_of("post_transform", _TRANSFORMS)
    return _label_and_scores(value, classes, steps)


def _tree_regressor(use: NodeUse) -> tuple[Followed, ...]:
    """A forest whose leaves weigh targets."""
    value, columns = _table(use)
    targets = use.whole("n_targets", 1)
    require(1 <= targets <= 1024, f"it has {targets} targets, wanted 1 to 1024")
    steps = _forest(use, columns, "target", targets)
    use.one_of("aggregate_function", (b"SUM", b"AVERAGE", b"MIN", b"MAX"))
    use.one_of("post_transform", (b"NONE", b"LOGISTIC"))
    return (Followed(check_shape((value.shape[0], targets)), FLOAT, steps),)


def _table(use: NodeUse, datatypes: Sequence[int] = (FLOAT,)) -> tuple[TracedValue, int]:
    """Return the one input, and its number of columns."""
    value = use.value(0, datatypes)
    require(not value.is_constant and len(value.shape) == 2, "wanted rows of columns")
    return value, value.shape[1]


def _label_and_scores(value: TracedValue, classes: int, steps: int) -> tuple[Followed, ...]:
    rows = value.shape[0]
    return Followed((rows,), INT64), Followed(check_shape((rows, classes)), FLOAT, steps + classes)


def _forest(use: NodeUse, columns: int, kind: str, results: int) -> int:
    """Check a forest, and return the most steps that a row takes through it."""
    trees, nodes = use.wholes("nodes_treeids"), use.wholes("nodes_nodeids")
    features, modes = use.wholes("nodes_featureids"), use.texts("nodes_modes")
    yes, no = use.wholes("nodes_truenodeids"), use.wholes("nodes_falsenodeids")
    count = len(trees)
    lengths = {len(each) for each in (nodes, features, modes, yes, no, use.floats("nodes_values"))}
    require(lengths == {count} and count > 0, "the lists of its nodes are of different lengths")
    require(len(use.floats("nodes_hitrates")) in (0, count), "its hit rates do not fit its nodes")
    tracks = use.wholes("nodes_missing_value_tracks_true", ())
    require(len(tracks) in (0, count) and set(tracks) <= {0, 1}, "its missing_value_tracks_true do not fit its nodes")
    require(all(0 <= feature < columns for feature in features), f"a node looks at a column outside of {columns}")
    require(set(modes) <= {*_BRANCHES, _LEAF}, "a node is of a mode that is not known")
    places = {key: index for index, key in enumerate(zip(trees, nodes, strict=True))}
    require(len(places) == count, "two of its nodes have one number")
    steps = 0
    leaves: set[tuple[int, int]] = set()
    groups = [(tree, list(group)) for tree, group in groupby(range(count), key=lambda index: trees[index])]
    require(len({tree for tree, _ in groups}) == len(groups), "the nodes of a tree do not lie together")
    for tree, group in groups:
        seen: set[int] = set()
        below = [(group[0], 1)]
        depth = 0
        while below:
            index, level = below.pop()
            require(index not in seen, "a node has two parents, or is its own")
            seen.add(index)
            depth = max(depth, level)
            if modes[index] == _LEAF:
                leaves.add((tree, nodes[index]))
                continue
            for child in (yes[index], no[index]):
                require((tree, child) in places, "a node names a child that is not there")
                below.append((places[tree, child], level + 1))
        require(len(seen) == len(group), "a tree has a node that nothing leads to")
        require(depth <= _MOST_DEPTH, f"a tree is deeper than {_MOST_DEPTH}")
        steps += depth
    _check_leaves(use, kind, results, leaves)
    return steps + results


def _check_leaves(use: NodeUse, kind: str, results: int, leaves: set[tuple[int, int]]) -> None:
    """Require that each leaf weighs something that is there, once."""
    ids = use.wholes(f"{kind}_ids")
    weighed = list(zip(use.wholes(f"{kind}_treeids"), use.wholes(f"{kind}_nodeids"), strict=False))
    require(len(ids) == len(weighed) == len(use.floats(f"{kind}_weights")), "the lists of its leaves do not fit")
    require(all(0 <= each < results for each in ids), f"a leaf names a {kind} outside of {results}")
    require(set(weighed) == leaves, "a leaf weighs nothing, or what weighs is not a leaf")
    require(
        len({(*leaf, each) for leaf, each in zip(weighed, ids, strict=True)}) == len(ids), "a leaf weighs one twice"
    )
    require(len(use.floats("base_values")) in (0, results), "its base_values do not fit")


def _same(value: TracedValue, steps: int = 1) -> tuple[Followed, ...]:
    return (Followed(value.shape, _type(value), _elements(value.shape) * steps),)


def _type(value: TracedValue) -> int:
    assert isinstance(value.datatype, int)
    return value.datatype


def _rows(shape: Shape) -> int:
    return 1 if shape[0] == DYNAMIC else shape[0]


def _elements(shape: Shape) -> int:
    return math.prod(size for size in shape if size != DYNAMIC)


def _keeps(use: NodeUse) -> bool:
    keeps = use.whole("keepdims", 1)
    require(keeps in (0, 1), "keepdims is neither 0 nor 1")
    return keeps == 1


def _axes(use: NodeUse, since: int) -> list[int]:
    """Return the axes, which are an attribute before opset `since` and an input from then on."""
    if use.opset < since:
        return list(use.wholes("axes"))
    return [int(axis) for axis in use.numbers(1)]


def _windows(use: NodeUse, sizes: Shape, kernel: Shape) -> Shape:
    use.fixed("auto_pad", b"NOTSET")
    axes = len(sizes)
    strides = use.wholes("strides", (1,) * axes)
    pads = use.wholes("pads", (0,) * 2 * axes)
    return windows(sizes, kernel, strides, pads, use.wholes("dilations", (1,) * axes))


def _quantization(use: NodeUse, value: TracedValue, zero_types: Sequence[int]) -> None:
    """Require scales that are positive numbers, one for all or one for each place of an inner axis; zeros to match."""
    scale = use.constant(1)
    axis = use.whole("axis", 1)
    use.fixed("block_size", 0)
    require(
        scale.shape in ((), (1,)) or scale.shape == (value.shape[inner_axis(axis, value.shape)],),
        "its scales do not fit its input",
    )
    require(
        scale.numbers is not None and all(0 < number < math.inf for number in scale.numbers),
        "its scales are not all positive numbers",
    )
    if use.has(2):
        require(use.constant(2, zero_types).shape == scale.shape, "its zero points do not fit its scales")


# ---- the table ------------------------------------------------------------------------------------------------------


class Operator(Struct, frozen=True):
    """One row: how its shapes follow, under which conditions, and why no data can do harm in it."""

    follow: Follow
    why: str
    outputs: int = 1


_EACH = "each element by itself, in floating point, which never traps"
_WRAPS = "each element by itself: floats never trap, and integers wrap round"
_BOUNDED = "the result is as large as the constant says; no index and no size comes from data"
_MATRIX = "times a matrix that the file holds, as large as its input wants"
_TREES = "each tree is one: every child, column and class is there, and no way leads round"
_SHAPE = "moves nothing out of place: sizes are constants, rows stay on axis 0"
_WINDOW = "windows lie inside the input and its pads, as the constants say"
_ALONG = "goes along an inner axis of fixed length"

OPERATORS: Mapping[str, Operator] = {
    # One value, element by element. Not Log of integers, not BitShift: only floats.
    **{
        name: Operator(_unary(), _EACH)
        for name in (
            "Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Floor", "Ceil", "Erf", "Relu", "Sigmoid", "Tanh",
            "Softplus", "Softsign", "HardSwish",
        )
    },
    "LeakyRelu": Operator(_unary(alpha=0.01), _EACH),
    "Elu": Operator(_unary(alpha=1.0), _EACH),
    "Selu": Operator(_unary(alpha=1.67326319217681884765625, gamma=1.05070102214813232421875), _EACH),
    "HardSigmoid": Operator(_unary(alpha=0.2, beta=0.5), _EACH),
    "Clip": Operator(_clip, "bounds are constants; " + _EACH),
    "PRelu": Operator(_prelu, "slopes are constants; " + _EACH),
    "Identity": Operator(_unary(PLAIN), "copies"),
    "Dropout": Operator(_dropout, "copies, since it is not in training"),
    "Cast": Operator(_cast, "to floats and to int32 and int64: x86-64 and arm64 never trap on that"),
    "Not": Operator(_unary((BOOL,)), "each element by itself"),
    # Several values, element by element. Integers only where they wrap round: Div, Mod and Pow of integers trap.
    **{name: Operator(_elementwise(NUMBERS), _WRAPS) for name in ("Add", "Sub", "Mul")},
    "Div": Operator(_elementwise(FLOATS), "floats only: integers by 0, or the least one by -1, end the process"),
    "Pow": Operator(_elementwise(FLOATS), _EACH),
    **{name: Operator(_elementwise(FLOATS, None, 1, 8), _EACH) for name in ("Min", "Max", "Sum")},
    **{
        name: Operator(_elementwise(FLOATS, BOOL), _EACH)
        for name in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal")
    },
    **{name: Operator(_elementwise((BOOL,), BOOL), "each element by itself") for name in ("And", "Or", "Xor")},
    "Where": Operator(_where, "chooses element by element"),
    # Products, windows, normalisation.
    "MatMul": Operator(_matmul, "times a constant matrix; " + _BOUNDED),
    "Gemm": Operator(_gemm, "times a constant matrix; " + _BOUNDED),
    "Conv": Operator(_conv, _WINDOW),
    "MaxPool": Operator(_pool(ceil_mode=(0,), storage_order=(0,)), _WINDOW),
    "AveragePool": Operator(_pool(ceil_mode=(0,), count_include_pad=(0, 1)), _WINDOW),
    "GlobalAveragePool": Operator(_global_pool, _ALONG),
    "GlobalMaxPool": Operator(_global_pool, _ALONG),
    "BatchNormalization": Operator(_batch_normalization, "one constant scale for each channel"),
    "LayerNormalization": Operator(_layer_normalization, _ALONG),
    "Softmax": Operator(_softmax, _ALONG),
    "LogSoftmax": Operator(_softmax, _ALONG),
    # Shapes.
    "Constant": Operator(_constant_node, "is written in the file"),
    "Reshape": Operator(_reshape, _SHAPE),
    "Flatten": Operator(_flatten, _SHAPE),
    "Squeeze": Operator(_squeeze, _SHAPE),
    "Unsqueeze": Operator(_unsqueeze, _SHAPE),
    "Transpose": Operator(_transpose, _SHAPE),
    "Concat": Operator(_concat, _SHAPE),
    "Slice": Operator(_slice, _SHAPE),
    "Gather": Operator(_gather, "its places are constants and lie inside"),
    # Along an axis.
    **{name: Operator(_reduce(18), _ALONG) for name in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2")},
    "ReduceSum": Operator(_reduce(13), _ALONG),
    "ArgMax": Operator(_arg_max, _ALONG),
    "ArgMin": Operator(_arg_max, _ALONG),
    # int8 as quantisers write it.
    "QuantizeLinear": Operator(_quantize, "scales are positive constants; " + _EACH),
    "DequantizeLinear": Operator(_dequantize, "scales are positive constants; " + _EACH),
    # Classic machine learning. Its trees are walked by numbers of the file, so the rule walks each of them before.
    "ai.onnx.ml.Scaler": Operator(_scaler, _EACH),
    "ai.onnx.ml.Normalizer": Operator(_normalizer, _ALONG),
    "ai.onnx.ml.LinearRegressor": Operator(_linear_regressor, _MATRIX),
    "ai.onnx.ml.LinearClassifier": Operator(_linear_classifier, _MATRIX, outputs=2),
    "ai.onnx.ml.TreeEnsembleRegressor": Operator(_tree_regressor, _TREES),
    "ai.onnx.ml.TreeEnsembleClassifier": Operator(_tree_classifier, _TREES, outputs=2),
}  # fmt: skip


def _follow(node: OnnxNode, use: NodeUse, cost: RunCost) -> list[TracedValue]:
    """Return the values that a node writes, in order, and count them."""
    name = f"{node.domain}.{node.operator}" if node.domain else node.operator
    row = OPERATORS.get(name)
    require(row is not None, f"its operator {name} is not one that may")
    assert row is not None
    require(len(node.outputs) == row.outputs, f"its operator {name} has {len(node.outputs)} outputs")
    try:
        followed = row.follow(use)
        is_constant = use.finish()
    except NotInside as error:
        raise NotInside(f"its operator {name} is not used as it may be: {error}") from error
    values = [TracedValue(each.shape, each.datatype, is_constant, each.numbers) for each in followed]
    for value, each in zip(values, followed, strict=True):
        cost.add(value, each.steps)
    return values


def _input(name: str, graph: OnnxGraph) -> TracedValue:
    datatype, shape = graph.declared.get(name, (0, None))
    require(datatype in INPUTS, f"its input {name!r} is of the type {datatype}")
    require(shape is not None and len(shape) >= 1, f"its input {name!r} has no axes, or none that are said")
    assert shape is not None
    try:
        return TracedValue(check_shape(shape), datatype)
    except NotInside as error:
        raise NotInside(f"its input {name!r}: {error}") from error


def _check_declared(name: str, value: TracedValue, graph: OnnxGraph) -> None:
    """Require that a declared shape is right: a library may lay out memory by it."""
    datatype, shape = graph.declared.get(name, (value.datatype, None))
    is_right = datatype == value.datatype and (
        shape is None
        or (len(shape) == len(value.shape) and all(a in (DYNAMIC, b) for a, b in zip(shape, value.shape, strict=True)))
    )
    require(is_right, f"{name!r} is declared as {datatype} {shape}, and is {value.datatype} {list(value.shape)}")
