"""Which of ONNX's operators of classic machine learning may run inside the daemon.

Owns: the conditions of what scikit-learn, LightGBM and XGBoost are converted to. A library walks a forest by the
numbers of the file, so the rule walks it before: each tree must be one, and its columns and classes must be there.
Called by onnx_rule.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from edge_runtime.backends.onnx_graph import DOUBLE, FLOAT, INT32, INT64
from edge_runtime.backends.onnx_use import Followed, NodeUse
from edge_runtime.backends.traced_values import TracedValue, check_shape, require

NUMBERS = (FLOAT, DOUBLE, INT32, INT64)

_TRANSFORMS = (b"NONE", b"SOFTMAX", b"LOGISTIC", b"SOFTMAX_ZERO")
_BRANCHES = frozenset((b"BRANCH_LEQ", b"BRANCH_LT", b"BRANCH_GTE", b"BRANCH_GT", b"BRANCH_EQ", b"BRANCH_NEQ"))
_LEAF = b"LEAF"

_MOST_DEPTH = 1000
"""Of a tree; boosted ones have some ten levels, forests some thirty."""


def scaler(use: NodeUse) -> tuple[Followed, ...]:
    """(x - offset) * scale, one for all columns or one for each."""
    value, columns = _table(use, NUMBERS)
    lengths = {len(use.floats(name)) for name in ("offset", "scale")}
    require(lengths in ({1}, {columns}), f"its offset and scale do not fit {columns} columns")
    return (Followed(value.shape, FLOAT, columns),)


def normalizer(use: NodeUse) -> tuple[Followed, ...]:
    """Each row divided by its norm."""
    value, columns = _table(use, NUMBERS)
    use.one_of("norm", (b"MAX", b"L1", b"L2"))
    return (Followed(value.shape, FLOAT, columns * 2),)


def linear_regressor(use: NodeUse) -> tuple[Followed, ...]:
    """Times a matrix that the file holds."""
    value, columns = _table(use)
    targets = use.whole("targets", 1)
    require(1 <= targets <= 1024 and len(use.floats("coefficients")) == targets * columns, "its matrix does not fit")
    require(len(use.floats("intercepts")) in (0, targets), "its intercepts do not fit its targets")
    use.one_of("post_transform", (b"NONE",))
    return (Followed(check_shape((value.shape[0], targets)), FLOAT, columns * targets),)


def linear_classifier(use: NodeUse) -> tuple[Followed, ...]:
    """Times a matrix that the file holds; the label of the best, and all scores."""
    value, columns = _table(use)
    classes = len(use.wholes("classlabels_ints"))
    require(2 <= classes <= 1024, f"it has {classes} classes, wanted 2 to 1024 with numbers as labels")
    require(len(use.floats("coefficients")) == classes * columns, "its matrix does not fit its classes")
    require(len(use.floats("intercepts")) == classes, "its intercepts do not fit its classes")
    require(use.whole("multi_class", 0) in (0, 1), "multi_class is neither 0 nor 1")
    use.one_of("post_transform", _TRANSFORMS)
    return _label_and_scores(value, classes, columns * classes)


def tree_classifier(use: NodeUse) -> tuple[Followed, ...]:
    """A forest whose leaves weigh classes."""
    value, columns = _table(use)
    classes = len(use.wholes("classlabels_int64s"))
    require(2 <= classes <= 1024, f"it has {classes} classes, wanted 2 to 1024 with numbers as labels")
    steps = _forest(use, columns, "class", classes)
    use.one_of("post_transform", _TRANSFORMS)
    return _label_and_scores(value, classes, steps)


def tree_regressor(use: NodeUse) -> tuple[Followed, ...]:
    """A forest whose leaves weigh targets."""
    value, columns = _table(use)
    targets = use.whole("n_targets", 1)
    require(1 <= targets <= 1024, f"it has {targets} targets, wanted 1 to 1024")
    steps = _forest(use, columns, "target", targets)
    use.one_of("aggregate_function", (b"SUM", b"AVERAGE", b"MIN", b"MAX"))
    use.one_of("post_transform", (b"NONE", b"LOGISTIC"))
    return (Followed(check_shape((value.shape[0], targets)), FLOAT, steps),)


# ---- private --------------------------------------------------------------------------------------------------------


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
    require(set(weighed) == leaves, "a leaf weighs nothing, or what weighs is no leaf")
    require(
        len({(*leaf, each) for leaf, each in zip(weighed, ids, strict=True)}) == len(ids), "a leaf weighs one twice"
    )
    require(len(use.floats("base_values")) in (0, results), "its base_values do not fit")
