"""A loaded model seen as its `config.pbtxt` describes it: other names, other shapes, fewer outputs.

Owns: whether a config fits its model, in Triton's words, and the reshaping. Arrays are never copied for it. Used where
the instance lives: in its host, or in the daemon. Thread: any that runs the instance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from edge_runtime.backends.base import (
    Bound,
    CallOther,
    Instance,
    LibraryBackend,
    LibraryInstance,
    LoadOptions,
    Probe,
    RequestsRun,
)
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ROW_INPUT, DeclaredTensor, Interface, ModelSpec, TensorSpec
from edge_runtime.tensors import Array, Tensors

_PLACE = re.compile(r".+__(\d{1,4})")
"""Triton's names of tensors that a model does not name, as PyTorch's: `INPUT__0`."""


def as_declared(instance: LibraryInstance, interface: Interface) -> LibraryInstance:
    """Return the instance as its callers see it; itself where it has no other. Raises LoadFailed: it does not fit."""
    spec = instance.spec
    inputs = _matched("input", interface, interface.inputs, spec.inputs)
    outputs = _matched("output", interface, interface.outputs, spec.outputs)
    seen = tuple(each.outer for each in inputs), tuple(each.outer for each in outputs)
    if seen == (spec.inputs, spec.outputs):
        return instance
    return DeclaredInstance(instance, inputs, outputs)


class DeclaringBackend:
    """A backend whose instances are seen as their options declare them."""

    def __init__(self, backend: LibraryBackend) -> None:
        self._backend = backend
        self.declaration = backend.declaration

    def probe(self) -> Probe:
        """Find the library."""
        return self._backend.probe()

    def load(self, artifact: Path, options: LoadOptions) -> Instance:
        """Load one artifact. Raises as the backend, and LoadFailed: it is not as declared."""
        instance = self._backend.load(artifact, options)
        try:
            return as_declared(instance, options.interface) if options.interface is not None else instance
        except LoadFailed:
            instance.close()
            raise


class _SeenTensor(NamedTuple):
    """A tensor of callers, and the model's in its place. shape, inner_shape: as declared: they differ by `reshape`."""

    outer: TensorSpec
    inner: str
    shape: tuple[int, ...]
    inner_shape: tuple[int, ...]

    def into_model(self, array: Array) -> Array:
        """Return a view in the model's shape."""
        return _reshaped(array, self.shape, self.inner_shape)

    def out_of_model(self, array: Array) -> Array:
        """Return a view in the callers' shape."""
        return _reshaped(array, self.inner_shape, self.shape)


class DeclaredInstance:
    """An instance under another interface."""

    def __init__(
        self, instance: LibraryInstance, inputs: Sequence[_SeenTensor], outputs: Sequence[_SeenTensor]
    ) -> None:
        self._instance = instance
        self._inputs = {each.outer.name: each for each in inputs}
        self._outputs = {each.outer.name: each for each in outputs}
        self.spec = replace(
            instance.spec,
            inputs=tuple(each.outer for each in inputs),
            outputs=tuple(each.outer for each in outputs),
            by_request=None,
        )
        self.backend, self.device, self.precision = instance.backend, instance.device, instance.precision

    @property
    def concurrency(self) -> int:
        """Threads that may call `run` at the same time."""
        return self._instance.concurrency

    @property
    def memory_bytes(self) -> int:
        """Memory that loading added."""
        return self._instance.memory_bytes

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once on whole arrays. Raises RunFailed."""
        wanted = [self._outputs[name] for name in (outputs if outputs is not None else self._outputs)]
        given = {each.inner: each.into_model(inputs[name]) for name, each in self._inputs.items()}
        if ROW_INPUT in inputs:
            given[ROW_INPUT] = inputs[ROW_INPUT]
        found = self._instance.run(given, [each.inner for each in wanted])
        return [each.out_of_model(array) for array, each in zip(found, wanted, strict=True)]

    def bind(self, max_rows: int) -> Bound | None:
        """Prepare runs on fixed buffers, seen in the shapes of callers; None as of any instance."""
        bound = self._instance.bind(max_rows)
        if bound is None:
            return None
        return _DeclaredBound(bound, self._instance.spec, (*self._inputs.values(),), (*self._outputs.values(),))

    def close(self) -> None:
        """Free its memory."""
        self._instance.close()

    def attach(self, call: CallOther | None) -> None:
        """Prepare the runs of this thread."""
        self._instance.attach(call)

    def interrupt(self, thread: int) -> None:
        """End the run of a thread soon."""
        self._instance.interrupt(thread)

    def remember(self, values: dict[object, object]) -> None:
        """Let the next run have the values of its sequence."""
        self._instance.remember(values)

    def run_requests(self, inputs: Mapping[str, Array], run: RequestsRun) -> list[Array] | None:
        """Raise RunFailed: under another interface requests are not told apart, as its spec says."""
        del inputs, run
        raise RunFailed("requests are not told apart under another interface")


# ---- private --------------------------------------------------------------------------------------------------------


class _DeclaredBound:
    """Views of another's buffers, in the callers' order and shapes."""

    def __init__(
        self, bound: Bound, spec: ModelSpec, inputs: Sequence[_SeenTensor], outputs: Sequence[_SeenTensor]
    ) -> None:
        self._bound = bound
        self.max_rows = bound.max_rows
        self.inputs: Sequence[Array] = _views(bound.inputs, spec.inputs, inputs)
        self.outputs: Sequence[Array] = _views(bound.outputs, spec.outputs, outputs)

    def run(self, rows: int) -> None:
        """Run the first rows of the buffers. Raises RunFailed."""
        self._bound.run(rows)


def _views(arrays: Sequence[Array], specs: Sequence[TensorSpec], seen: Sequence[_SeenTensor]) -> list[Array]:
    by_name = {spec.name: array for spec, array in zip(specs, arrays, strict=True)}
    return [each.out_of_model(by_name[each.inner]) for each in seen]


def _reshaped(array: Array, given: Sequence[int], wanted: Sequence[int]) -> Array:
    """Turn an array of one shape into the other; open dimensions keep their order, and the elements between them."""
    if given == wanted:
        return array
    lengths = iter([length for length, dim in zip(array.shape, given, strict=True) if dim == DYNAMIC])
    return array.reshape([next(lengths) if dim == DYNAMIC else dim for dim in wanted])


def _matched(
    kind: str, interface: Interface, declared: Sequence[DeclaredTensor], specs: Sequence[TensorSpec]
) -> list[_SeenTensor]:
    """Return the tensors that callers see beside the model's own, in the config's order. Raises LoadFailed."""
    model = interface.model
    if not declared:
        if interface.max_batch_size and not all(_may_be_rows(spec, interface) for spec in specs):
            shapes = ", ".join(f"{spec.name} {_shape(spec.shape)}" for spec in specs)
            raise LoadFailed(
                f"autofill failed for model '{model}': model does not support batching while non-zero max_batch_size "
                f"is specified: its {kind}s are {shapes}; say max_batch_size: 0, or export it with an open "
                "first dimension"
            )
        return [_SeenTensor(spec, spec.name, spec.shape, spec.shape) for spec in specs]
    if kind == "input" and len(declared) != len(specs):
        raise LoadFailed(
            f"unable to load model '{model}', configuration expects {len(declared)} inputs, model provides {len(specs)}"
        )
    by_name = {spec.name: spec for spec in specs}
    seen: list[_SeenTensor] = []
    for index, each in enumerate(declared):
        inner = by_name.get(each.name) or _by_place(each.name, index, interface, specs)
        if inner is None:
            names = ", ".join(sorted(by_name))
            raise LoadFailed(f"unexpected inference {kind} '{each.name}', allowed {kind}s are: {names}")
        if each.datatype != inner.datatype:
            raise LoadFailed(
                f"unable to load model '{model}', configuration expects datatype {_type(each.datatype)} for {kind} "
                f"'{each.name}', model provides {_type(inner.datatype)}"
            )
        _check_shape(interface, each, inner)
        seen.append(_SeenTensor(_outer(each, inner), inner.name, each.shape, each.inner_shape))
    return seen


def _by_place(name: str, index: int, interface: Interface, specs: Sequence[TensorSpec]) -> TensorSpec | None:
    found = _PLACE.fullmatch(name)
    place = int(found[1]) if found else index if interface.by_place else len(specs)
    return specs[place] if place < len(specs) else None


def _outer(each: DeclaredTensor, inner: TensorSpec) -> TensorSpec:
    """Return the spec that callers see: as declared, else, for an open dimension, as the model has it."""
    shape = each.shape
    if each.shape == each.inner_shape:
        pairs = zip(each.shape, inner.shape, strict=True)
        shape = tuple(theirs if ours == DYNAMIC else ours for ours, theirs in pairs)
    return replace(inner, name=each.name, shape=shape)


def _may_be_rows(spec: TensorSpec, interface: Interface) -> bool:
    """Return whether axis 0 may be the rows of a config that has some."""
    return bool(spec.shape) and spec.shape[0] in (DYNAMIC, *((1,) if interface.max_batch_size == 1 else ()))


def _check_shape(interface: Interface, each: DeclaredTensor, inner: TensorSpec) -> None:
    """Raise LoadFailed where a tensor of the model has no such shape."""
    which = f"model '{interface.model}', tensor '{each.name}': "
    rows = interface.max_batch_size
    if rows and not _may_be_rows(inner, interface):
        raise LoadFailed(
            f"{which}for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {_shape(inner.shape)}"
        )
    if len(each.inner_shape) == len(inner.shape) and all(
        DYNAMIC in pair or pair[0] == pair[1] for pair in zip(each.inner_shape, inner.shape, strict=True)
    ):
        return
    config = f"{len(each.inner_shape)} dimensions (shape {_shape(each.inner_shape)})"
    if rows:
        config = (
            f"{len(each.inner_shape)} dimensions (an initial batch dimension because max_batch_size > 0 followed by "
            f"the explicit tensor shape, making complete shape {_shape(each.inner_shape)})"
        )
    raise LoadFailed(
        f"{which}the model expects {len(inner.shape)} dimensions (shape {_shape(inner.shape)}) but the model "
        f"configuration specifies {config}"
    )


def _type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
