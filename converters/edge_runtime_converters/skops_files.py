"""A skops file, restored without running anything that it names.

Owns: the rule for what may be restored, and what is left out because no prediction needs it. skops trusts a *name*
wherever a file puts it, also where it calls the name with the file's own arguments. So each name is allowed for one way
of restoring only (`__loader__`), and never for the ways that make functions, methods, operators or partial calls.

A class is plain when restoring it sets attributes and does nothing else. numpy's `DataSource`, for example, is not: its
`__del__` removes the folder that its attributes name.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.libraries import failing_as, import_library

EXTRA = "convert-sklearn"

TREE = "sklearn.tree._tree.Tree"
TREE_PREDICTOR = "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"
"""skops trusts neither, because scikit-learn walks their indices unchecked; `check_trees` checks them."""

_BASES = (("sklearn.base", "BaseEstimator"), ("sklearn.gaussian_process.kernels", "Kernel"))
"""A plain class of scikit-learn, XGBoost or LightGBM that extends one of these is a part of a fitted model."""

_OTHER_CLASSES = frozenset((
    TREE_PREDICTOR,
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.compose._column_transformer.make_column_selector",
    # Their __setstate__ hands text or bytes to the library's own reader of model files.
    "xgboost.core.Booster",
    "lightgbm.basic.Booster",
))  # fmt: skip

_DICTIONARIES = frozenset(("collections.OrderedDict", "sklearn.utils._bunch.Bunch"))

_LIBRARIES = {"xgboost": "convert-xgboost", "lightgbm": "convert-lightgbm"}
"""Packages beside scikit-learn whose classes may be restored, and the extra that brings each."""

_SEARCHES = frozenset((
    "sklearn.neighbors._kd_tree.KDTree", "sklearn.neighbors._kd_tree.KDTree64", "sklearn.neighbors._kd_tree.KDTree32",
    "sklearn.neighbors._ball_tree.BallTree", "sklearn.neighbors._ball_tree.BallTree64",
    "sklearn.neighbors._ball_tree.BallTree32",
))  # fmt: skip
"""Indexes of training rows, walked unchecked. The rows are there beside them, so neighbors are found by brute force."""

_OF_TRAINING = frozenset(("_optimizer", "score_func", "scorer_", "scoring", "cv", "_checked_cv_orig"))
"""Attributes that only fitting and scoring read: an optimizer's state, a metric's function, folds."""

_MAX_SCHEMA_BYTES = 512 << 20
"""Of schema.json: some hundred times that of the largest forest that our tests make."""

_NOTHING = {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode", "content": "null", "is_json": True}


def load_skops(source: Path) -> Any:
    """Restore the model of a skops file, without what only training needs. Raises ConversionFailed: nothing ran."""
    skops = import_library("skops.io", EXTRA)
    import_library("sklearn", EXTRA)
    with failing_as(f"{source}: skops cannot read it"):
        content = _stripped(source)
        allowed = _allowed(content, source)
        strange = [name for name in skops.get_untrusted_types(data=content) if name not in allowed]
        if strange:
            raise ConversionFailed(_refusal(source, strange))
        model = skops.loads(content, trusted=sorted(allowed))
    for each in parts_of_model(model):
        if vars_of(each).get("_fit_method") in ("kd_tree", "ball_tree"):
            each._fit_method = "brute"  # noqa: SLF001
    check_trees(model, source)
    return model


def vars_of(value: Any) -> dict[str, Any]:
    """The attributes of an object; none where it keeps them otherwise."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def check_trees(model: Any, source: Path) -> None:
    """Raise ConversionFailed unless each tree's children follow their parent, and its features exist: walks end."""
    known = {}
    for each in parts_of_model(model):
        predictors = vars_of(each).get("_predictors")
        if isinstance(predictors, list):
            known.update({id(tree): int(each.n_features_in_) for part in predictors for tree in part})
    for each in parts_of_model(model):
        if type(each).__name__ == "Tree" and hasattr(each, "children_left"):
            is_leaf = each.children_left == _LEAF
            is_sound = bool((each.children_right[is_leaf] == _LEAF).all()) and _leads_down(
                each.children_left, each.children_right, each.feature, is_leaf, int(each.n_features)
            )
        elif type(each).__name__ == "TreePredictor":
            nodes = each.nodes
            if nodes["is_categorical"].any():
                raise ConversionFailed(
                    f"{source}: a tree splits by category, which skl2onnx cannot write; encode it before training"
                )
            is_leaf = nodes["is_leaf"].astype(bool)
            is_sound = _leads_down(nodes["left"], nodes["right"], nodes["feature_idx"], is_leaf, known.get(id(each), 0))
        else:
            continue
        if not is_sound:
            raise ConversionFailed(f"{source}: a tree in it leads out of itself; the file is damaged or hostile")


def parts_of_model(root: Any) -> Iterator[Any]:
    """Every object that a model is made of."""
    waiting, seen = [root], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        elif isinstance(value, np.ndarray):
            waiting += list(value.flat) if value.dtype == object else []
        else:
            yield value
        waiting += vars_of(value).values()


# ---- private --------------------------------------------------------------------------------------------------------

_LEAF = -1


def _stripped(source: Path) -> bytes:
    """The file's content, without what only training needs; written anew, so that all readers see the same."""
    content = io.BytesIO()
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(content, "w") as copy:
        if archive.getinfo("schema.json").file_size > _MAX_SCHEMA_BYTES:
            raise ConversionFailed(f"{source}: its schema.json has more than {_MAX_SCHEMA_BYTES} bytes")
        schema = json.loads(archive.read("schema.json"))
        for node in list(_nodes(schema)):
            _strip(node)
        copy.writestr("schema.json", json.dumps(schema))
        for name in set(archive.namelist()) - {"schema.json"}:
            copy.writestr(name, archive.read(name))
    return content.getvalue()


def _strip(node: dict[str, Any]) -> None:
    if _name_of(node) in _SEARCHES:
        node.clear()
        node.update(_NOTHING)
        return
    attributes = node.get("content")
    values = attributes.get("content") if isinstance(attributes, dict) else None
    if node.get("__loader__") == "ObjectNode" and isinstance(values, dict):
        for name in _OF_TRAINING & values.keys():
            values[name] = dict(_NOTHING)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every node, at whatever place: also those that no loader would look at."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
            if "__loader__" in value:
                yield value
        elif isinstance(value, list):
            waiting += value


def _name_of(node: dict[str, Any]) -> str:
    return f"{node.get('__module__')}.{node.get('__class__')}"


def _allowed(content: bytes, source: Path) -> set[str]:
    """The names that the file restores in an allowed way, and in no other."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        nodes = list(_nodes(json.loads(archive.read("schema.json"))))
    packages = {str(node.get("__module__")).partition(".")[0] for node in nodes}
    for package in packages & _LIBRARIES.keys():
        try:
            import_library(package, _LIBRARIES[package])
        except ConversionFailed as error:
            raise ConversionFailed(f"{source}: holds a model of {package}; {error.message}") from error
    found: set[str] = set()
    otherwise: set[str] = set()
    for node in nodes:
        (found if _may_restore(node) else otherwise).add(_name_of(node))
        inner = node.get("content")
        if isinstance(inner, dict) and "function" in inner:  # how the first skops named a function
            otherwise.add(f"{inner.get('module_path')}.{inner['function']}")
    return found - otherwise


def _may_restore(node: dict[str, Any]) -> bool:
    loader, name = node["__loader__"], _name_of(node)
    if loader == "ObjectNode":
        return _is_part_of_a_model(str(node.get("__module__")), str(node.get("__class__")))
    if loader == "TypeNode":  # a datatype by which columns were chosen, or what fills LightGBM's scores
        kind = vars(np).get(str(node.get("__class__")))
        is_number = node.get("__module__") == "numpy" and isinstance(kind, type) and issubclass(kind, np.generic)
        return is_number or name == "collections.OrderedDict"
    ways = {"TreeNode": {TREE}, "DTypeNode": {"numpy.dtype"}, "DictNode": _DICTIONARIES}
    return name in ways.get(str(loader), ())


def _is_part_of_a_model(module: str, name: str) -> bool:
    package = module.partition(".")[0]
    # Invariant: nothing is imported because a file names it.
    kind: Any = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(kind, type) or (kind.__module__, kind.__name__) != (module, name):
        return False
    if f"{module}.{name}" in _OTHER_CLASSES:
        return True
    bases: tuple[Any, ...] = tuple(vars(sys.modules[where])[base] for where, base in _BASES if where in sys.modules)
    made_by: Any = kind.__new__
    restored_by = getattr(kind, "__setstate__", None)
    return (
        package in ("sklearn", *_LIBRARIES)
        and issubclass(kind, bases)
        and made_by is object.__new__
        and not hasattr(kind, "__del__")
        and restored_by in (None, *(getattr(base, "__setstate__", None) for base in bases))
    )


def _refusal(source: Path, strange: list[str]) -> str:
    return (
        f"{source}: holds {', '.join(strange)[:300]}, which could run code; nothing was loaded. Functions and classes "
        "of your own have no place in a served file: use scikit-learn's own steps in their place, or do their work "
        "before the request; else convert it in the program that has it: "
        "edge_runtime_converters.onnx_from_sklearn.convert_model(model, target), or serve it by a model.py "
        "(docs/python-models.md)"
    )


def _leads_down(left: Any, right: Any, feature: Any, is_leaf: Any, features: int) -> bool:
    places, inner = np.arange(len(is_leaf)), ~is_leaf
    return (
        len(places) > 0
        and all(bool(((child > places) & (child < len(places)))[inner].all()) for child in (left, right))
        and bool(((feature >= 0) & (feature < features))[inner].all())
    )
