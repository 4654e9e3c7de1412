"""CatBoost, by its own library: models with categories or text, which ONNX cannot hold.

Owns: which inputs a file's features become, and what a loss makes of the trees' sums, which the converter of models of
numbers (converters/edge_runtime_converters/onnx_from_catboost.py) makes of them too. Only `probe` and `load` import the
library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.catboost import BACKEND
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.model_files import artifact_size
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import Array, Tensors

Ending = Literal["none", "sigmoid", "exp", "binary", "softmax", "each by itself"]
"""How the sums end: the last three make a label and probabilities, the others an estimate."""

ENDINGS: Mapping[str, Ending] = {
    "Logloss": "binary", "CrossEntropy": "binary", "MultiClass": "softmax", "MultiClassOneVsAll": "each by itself",
    "MultiLogloss": "sigmoid", "MultiCrossEntropy": "sigmoid", "Poisson": "exp", "Tweedie": "exp",
    **dict.fromkeys(
        ("RMSE", "MAE", "MAPE", "Quantile", "MultiQuantile", "Huber", "Expectile", "Lq", "LogLinQuantile", "LogCosh",
         "MultiRMSE", "MultiRMSEWithMissingValues", "QueryRMSE", "QuerySoftMax", "QueryCrossEntropy", "GroupQuantile",
         "PairLogit", "PairLogitPairwise", "YetiRank", "YetiRankPairwise", "LambdaMart", "StochasticRank",
         "StochasticFilter"), "none",
    ),
}  # fmt: skip
"""The ending of each loss, as CatBoostClassifier and CatBoostRegressor predict. Source: catboost/core.py of 1.2."""

_LABELLED = ("binary", "softmax", "each by itself")


class CatBoostBackend:
    """Runs `model.cbm`, or the library's JSON under any name, on the CPU, always in a host. It has no options."""

    declaration = BACKEND

    def probe(self) -> Probe:
        """Find the library."""

        def find() -> tuple[str, tuple[str, ...]]:
            return str(import_catboost().__version__), ("CPU",)

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> CatBoostInstance:
        """Read the file, and run one made-up row: the outputs' columns show there."""
        size = artifact_size(artifact)
        _check_options(options)
        catboost = import_catboost()
        growth = watch_growth(size)
        model = catboost.CatBoost()
        try:
            model.load_model(str(artifact), format="json" if artifact.suffix == ".json" else "cbm")
            table = _table_of(model)
            answers = answers_of(model)
            found = answers.of(catboost, model, table.made_up(), 1)
        except (LoadFailed, MemoryError):
            raise
        except Exception as error:
            raise LoadFailed(
                f"CatBoost {catboost.__version__} cannot read {artifact.name}: {_reason(error)}"
            ) from error
        spec = ModelSpec(table.inputs(answers.names), answers.outputs(found[-1].shape[1]))
        return CatBoostInstance(catboost, model, table, answers, spec, options, memory_bytes=growth())


class CatBoostInstance:
    """One model, which any number of threads may run: they read it alone, and the library lets go of Python."""

    backend = BACKEND.name
    device = "CPU"
    precision = "f32"

    def __init__(  # noqa: PLR0917 (what a loaded file is made of)
        self, catboost: ModuleType, model: Any, table: _Table, answers: CatBoostAnswers, spec: ModelSpec,
        options: LoadOptions, *, memory_bytes: int,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.concurrency = max(options.concurrency, 1)
        self.memory_bytes = memory_bytes
        self._catboost = catboost
        self._model: Any = model  # None once closed
        self._table = table
        self._answers = answers
        self._threads = options.threads
        self._positions = {tensor.name: index for index, tensor in enumerate(spec.outputs)}

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once. Categories and text are bytes as they were in training: UTF-8 of what Python had there."""
        model = self._model
        if model is None:
            raise RunFailed("the instance is closed")
        arrays = [inputs[tensor.name] for tensor in self.spec.inputs]
        for tensor, array in zip(self.spec.inputs, arrays, strict=True):
            if not tensor.fits(array.shape) or len(array) != len(arrays[0]):  # the library would take more columns
                raise RunFailed(f"input {tensor.name!r} has shape {list(array.shape)}, wanted {list(tensor.shape)}")
        try:
            results = self._answers.of(
                self._catboost, model, np.concatenate(arrays, axis=1, dtype=object), self._threads
            )
        except Exception as error:
            raise RunFailed(f"CatBoost: {_reason(error)}") from error
        return results if outputs is None else [results[self._positions[name]] for name in outputs]

    def bind(self, max_rows: int) -> None:
        """Return None: buffers are for models inside the daemon, and these run in hosts."""
        del max_rows

    def close(self) -> None:
        """Drop the model."""
        self._model = None


def import_catboost() -> ModuleType:
    """Import the library. Raises BackendUnavailable."""
    return import_library("catboost", BACKEND)


@dataclass(frozen=True, slots=True)
class CatBoostAnswers:
    """A model's outputs. loss: of its training, one of `ENDINGS`.

    classes: a classifier's labels in order, text or whole numbers; () of an estimate. threshold: the probability above
    which the second of two classes is the label.
    """

    loss: str
    classes: tuple[str | int, ...] = ()
    threshold: float = 0.5

    @property
    def ending(self) -> Ending:
        """Return how the trees' sums end."""
        return ENDINGS[self.loss]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return ("label", "probabilities") if self.classes else ("variable",)

    def outputs(self, columns: int) -> tuple[TensorSpec, ...]:
        """The outputs' specs. columns: of the last one."""
        *label, values = self.names
        kind = "INT64" if self._labels().dtype == np.int64 else "BYTES"
        return (
            *(TensorSpec(name, kind, (DYNAMIC,)) for name in label),
            TensorSpec(values, "FP32", (DYNAMIC, columns)),
        )

    def of(self, catboost: ModuleType, model: Any, rows: Array, threads: int) -> list[Array]:
        """Run a model on a table [rows, features]. Raises the library's errors.

        A classifier answers its label, INT64 or BYTES [rows], and FP32 probabilities [rows, classes]; any other model
        FP32 [rows, outputs].
        """
        kind = {"none": "RawFormulaVal", "exp": "Exponent"}.get(self.ending, "Probability")
        predict = catboost.CatBoost.predict  # a wrapper's own answers in other shapes
        found = np.asarray(predict(model, rows, prediction_type=kind, thread_count=threads))
        values = found.reshape(len(rows), -1).astype(np.float32)
        if not self.classes:
            return [values]
        places = (found[:, 1] > self.threshold).astype(np.int64) if self.ending == "binary" else found.argmax(axis=1)
        return [self._labels()[places], values]

    def _labels(self) -> Array:
        """The labels, as edge-runtime holds them."""
        if all(isinstance(each, int) for each in self.classes):
            return np.array(self.classes, np.int64)
        named = np.empty(len(self.classes), object)
        named[:] = [str(each).encode() for each in self.classes]
        return named


def answers_of(model: Any) -> CatBoostAnswers:
    """Return the outputs that a model's loss makes of its trees' sums. Raises LoadFailed: it is unknown."""
    told = dict(model.get_metadata())
    try:
        loss = str(json.loads(told["params"])["loss_function"]["type"])
        named = json.loads(told.get("class_params") or "{}").get("class_names")
        threshold = float(told.get("binclass_probability_threshold", 0.5))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise LoadFailed("it does not say how it was trained: is it whole, and as CatBoost saved it?") from error
    if loss not in ENDINGS:
        raise LoadFailed(
            f"what the loss {loss!r} makes of its trees' sums is not known; known: {', '.join(sorted(ENDINGS))}"
        )
    if ENDINGS[loss] not in _LABELLED:
        return CatBoostAnswers(loss)
    named = named or range(max(int(np.size(model.get_scale_and_bias()[1])), 2))
    is_whole = all(isinstance(each, int) or (isinstance(each, float) and each.is_integer()) for each in named)
    classes = tuple(int(each) if is_whole else str(each) for each in named)
    return CatBoostAnswers(loss, classes, threshold)


# ---- private --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """The columns that a model takes, in their order. names: as in training. are_words: categories and text."""

    names: tuple[str, ...]
    are_words: tuple[bool, ...]

    def inputs(self, outputs: Sequence[str]) -> tuple[TensorSpec, ...]:
        """One input a column, FP32 or BYTES [rows, 1]; words alone that have no names are one input of all columns.

        outputs: their names; a column that is called so (`label`) is `label_column`. As scikit-learn's columns are
        named when they are converted.
        """
        has_names = any(name != str(place) for place, name in enumerate(self.names))
        if not has_names and all(self.are_words):
            return (TensorSpec("features", "BYTES", (DYNAMIC, len(self.names))),)
        names = self.names if has_names else [f"x{place}" for place in range(len(self.names))]
        return tuple(
            TensorSpec(f"{name}_column" if name in outputs else name, "BYTES" if is_word else "FP32", (DYNAMIC, 1))
            for name, is_word in zip(names, self.are_words, strict=True)
        )

    def made_up(self) -> Array:
        """One row of zeros and empty words."""
        row = np.empty((1, len(self.names)), object)
        row[0, :] = [b"" if is_word else 0.0 for is_word in self.are_words]
        return row


def _table_of(model: Any) -> _Table:
    """The columns of a model. Raises LoadFailed: some are vectors, of a length that the file does not say."""
    names = tuple(map(str, model.feature_names_))
    if vectors := [names[place] for place in model.get_embedding_feature_indices()]:
        raise LoadFailed(
            f"its features {', '.join(vectors)} are embeddings, whose length its file does not say; serve it by a "
            "model.py (docs/python-models.md, Embeddings of CatBoost)"
        )
    if len(set(names)) != len(names):
        raise LoadFailed("several of its features have one name, so that no request could tell them apart")
    words = {*model.get_cat_feature_indices(), *model.get_text_feature_indices()}
    return _Table(names, tuple(place in words for place in range(len(names))))


def _check_options(options: LoadOptions) -> None:
    """Raise LoadFailed for any option, BackendUnavailable for a device or precision that the library does not have."""
    if options.extra:
        raise LoadFailed(f"CatBoost has no option {next(iter(options.extra))!r}, and no other")
    if options.device.upper() not in ("", "CPU"):
        raise BackendUnavailable(f"CatBoost's models run on the CPU here, not on {options.device!r}; leave device out")
    if options.precision == "int8":
        raise LoadFailed("precision int8 was asked for, and CatBoost's trees have none; leave it out")
    if options.precision not in ("", "f32"):
        raise BackendUnavailable(f"CatBoost runs in f32, not in {options.precision}; leave precision out")


def _reason(error: BaseException) -> str:
    """The library's message on one line, cut to 600 characters."""
    return " ".join(str(error).split())[:600] or type(error).__name__
