"""Models written in Python: `model.py`, imported and called.

Owns: whether such models are allowed, and the contract below. Serving loads them in a host only, so such a model cannot
hold the daemon's GIL, and a crash of its libraries is one failed run.

The contract of `model.py`:

    INPUTS = [{"name": "image", "datatype": "FP32", "shape": [-1, 64]}]     # wire datatypes; -1 is open
    OUTPUTS = [{"name": "scores", "datatype": "FP32", "shape": [-1, 10]}]

    def load(folder):            # optional; folder: pathlib.Path of the version. Its result is `model` below.
    def infer(model, inputs):    # inputs: name -> numpy array, whole batches. Returns name -> array for every output.

`infer(inputs)`, with the inputs alone, is allowed too, and so is `infer(model, inputs, context)`: `context.infer` calls
another served model, and `context.sequence` is a dict that the request's sequence keeps. docs/python-models.md
describes it for users. BYTES are object arrays of bytes, BF16 is uint16. When axis 0 is -1 everywhere it is rows, and
`infer` must give each row the same answer in any batch. An exception in `infer` fails that run only. `print` and
logging go to the daemon's log. One run at a time, all on the main thread of the host.

A `model.py` with a class TritonPythonModel is one of Triton's python backend instead: triton/python_backend.py runs it.
"""

from __future__ import annotations

import inspect
import platform
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_runtime.backends.base import DECODE_PICTURE, CallOther, LoadOptions, Probe
from edge_runtime.backends.model_files import artifact_size
from edge_runtime.backends.python import BACKEND
from edge_runtime.backends.python.steps import (
    FunctionInstance,
    checked_output,
    error_words,
    import_source,
    load_functions,
)
from edge_runtime.errors import BackendUnavailable, EdgeRuntimeError, LoadFailed, Refused, RunFailed, Unsupported
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import Array, Tensors, as_tensors, datatype, datatype_name, values_to_bits
from edge_runtime.triton.python_backend import (
    TritonInstance,
    import_triton_model,
    is_triton_model,
    load_triton_model,
)

_Infer = Callable[[dict[str, Array]], Mapping[str, Any]]


class PythonBackend:
    """Runs `model.py`, if `allow` (`python_models` in the configuration) says so: it is code, not data."""

    declaration = BACKEND

    def __init__(self, *, allow: bool) -> None:
        self._allow = allow

    def probe(self) -> Probe:
        """Report Python's version; whether models may run is the configuration's choice."""
        return Probe(BACKEND.name, is_available=True, version=platform.python_version(), devices=("CPU",))

    def check(self, artifact: Path, options: LoadOptions) -> None:
        """Check what can be checked without the model's code. Raises LoadFailed, BackendUnavailable."""
        if not self._allow:
            raise LoadFailed(
                f"{artifact} is Python code, which is off by default; serve with --python-models, or set "
                "python_models = true in the configuration, to allow it for every model on this device"
            )
        if options.device.upper() not in ("", "CPU"):
            raise BackendUnavailable(f"a Python model chooses its device itself; got device {options.device!r}")
        artifact_size(artifact)

    def load(self, artifact: Path, options: LoadOptions) -> PythonInstance | TritonInstance:
        """Import the model into this process, and run its `load`, or `initialize`."""
        self.check(artifact, options)
        growth = watch_growth(0)
        try:
            if is_triton_model(artifact):
                instance = load_triton_model(import_triton_model(artifact), artifact, options)
                instance.memory_bytes = growth()
                return instance
            module = import_source("model", artifact)
            context, inputs, outputs = Context(), _specs(module, "INPUTS"), _specs(module, "OUTPUTS")
            infer, takes_context = _infer_of(module, artifact.parent, context)
            spec = ModelSpec(inputs, outputs, remembers=takes_context)
        except Exception as error:
            traceback.print_exc()
            raise LoadFailed(f"{artifact}: {error_words(error, artifact.parent)}") from error
        return PythonInstance(spec, infer, context, artifact.parent, options.precision or "f32", growth())

    def load_functions(self, file: Path, options: LoadOptions) -> list[FunctionInstance]:
        """Import the functions of a pipeline's Python steps. Raises LoadFailed, BackendUnavailable."""
        if any(each.name != DECODE_PICTURE for each in options.functions):
            self.check(file, options)
        return load_functions(file, options.functions)


class Context:
    """The third argument of a model's `infer`: its sequence, and the way to the other models that the daemon serves."""

    def __init__(self) -> None:
        self._call: CallOther | None = None
        self._sequence: dict[object, object] | None = None

    @property
    def sequence(self) -> dict[object, object]:
        """The values that the request's sequence keeps: empty at its start, and what the run before left.

        Changes by a run that fails, or whose answer comes too late, are as if they had not been. Raises Unsupported.
        """
        if self._sequence is None:
            raise Unsupported("this model has no sequences: add [sequence] to model.toml, without [[sequence.state]]")
        return self._sequence

    def remember(self, values: dict[object, object]) -> None:
        """Take the values of the next run's sequence."""
        self._sequence = values

    def attach(self, call: CallOther | None) -> None:
        """Ask other models by `call` from now on."""
        self._call = call

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        parameters: Mapping[str, str | int | float | bool] | None = None,
    ) -> dict[str, Array]:
        """Ask another served model, and wait for its outputs by name.

        inputs: arrays by name, whole shapes. timeout_ms: a deadline from now, else that model's default; that of the
        requests that run now holds in any case. parameters: as of a request, `{"raw": True}`. Raises what a client
        gets: RequestError, Refused, RunFailed; Unsupported where the call would wait for this model itself. Thread: of
        this run; another one's call waits until the first is answered.
        """
        if self._call is None:
            raise Unsupported(f"this model can call {model!r} only where a daemon, or Runtime, serves it")
        arrays = as_tensors(inputs)
        header = RequestHeader(
            model=model,
            version=version,
            inputs=tuple(TensorHeader(name, datatype_name(each.dtype), each.shape) for name, each in arrays.items()),
            outputs=None if outputs is None else tuple(outputs),
            timeout_ms=timeout_ms,
            parameters=dict(parameters or {}),
        )
        return self._call(header, [values_to_bits(each) for each in arrays.values()])


class PythonInstance:
    """A `model.py` that was imported. One run at a time."""

    backend = BACKEND.name
    device = "CPU"
    concurrency = 1

    def __init__(  # noqa: PLR0917 (what a model.py is made of)
        self, spec: ModelSpec, infer: _Infer, context: Context, folder: Path, precision: str, memory_bytes: int
    ) -> None:
        self.spec = spec
        self._folder = folder
        self.precision = precision
        self.memory_bytes = memory_bytes
        self._infer: _Infer | None = infer
        self._context = context

    def attach(self, call: CallOther | None) -> None:
        """Let `infer` ask other models by `call`."""
        self._context.attach(call)

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Call `infer` once. Raises RunFailed: it raised, or its results are not what OUTPUTS says.

        Refused, where another model refused what this one called, and `infer` let that pass.
        """
        if self._infer is None:
            raise RunFailed("the instance is closed")
        try:
            results = _checked(self._infer(dict(inputs)), self.spec.outputs)
        except Refused:
            raise
        except Exception as error:
            traceback.print_exc()
            raise RunFailed(f"the model failed: {error_words(error, self._folder)}") from error
        names = [spec.name for spec in self.spec.outputs] if outputs is None else outputs
        try:
            return [results[name] for name in names]
        except KeyError as error:
            raise RunFailed(f"the model has no output {error}") from error

    def remember(self, values: dict[object, object]) -> None:
        """Let the next `infer` have the values of its sequence."""
        self._context.remember(values)

    def bind(self, max_rows: int) -> None:
        """Return None: `infer` makes its own arrays."""

    def close(self) -> None:
        """Release the model."""
        self._infer = None


def _checked(results: Mapping[str, Any], outputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return the results by name. Raises RunFailed where they differ from OUTPUTS."""
    if not isinstance(results, Mapping):
        raise RunFailed(f"infer gave {type(results).__name__}; wanted a dict of arrays by name")
    return {spec.name: checked_output(spec, results, "infer", ", OUTPUTS says") for spec in outputs}


def _infer_of(module: ModuleType, folder: Path, context: Context) -> tuple[_Infer, bool]:
    """Run the model's `load`; return its `infer` as a function of the inputs alone, and whether it gets a context."""
    infer: Any = getattr(module, "infer", None)
    if not callable(infer):
        raise LoadFailed("model.py has no function infer(model, inputs)")
    taken = list(inspect.signature(infer).parameters.values())
    load = getattr(module, "load", None)
    model = load(folder) if callable(load) else None
    if len(taken) == 1:
        on_inputs: _Infer = infer
        return on_inputs, False
    if len(taken) > 2 and (taken[2].name == "context" or taken[2].default is inspect.Parameter.empty):
        return lambda inputs: infer(model, inputs, context), True
    return lambda inputs: infer(model, inputs), False


def _specs(module: ModuleType, constant: str) -> tuple[TensorSpec, ...]:
    """Read INPUTS or OUTPUTS. Raises LoadFailed with the wanted form."""
    try:
        specs = [
            TensorSpec(
                str(entry["name"]), datatype(entry["datatype"]).name, tuple(int(size) for size in entry["shape"])
            )
            for entry in getattr(module, constant)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, EdgeRuntimeError) as error:
        wanted = f'{constant} = [{{"name": "x", "datatype": "FP32", "shape": [-1, 4]}}]'
        raise LoadFailed(f"model.py must say {wanted}; got {type(error).__name__}: {error}") from error
    if not specs or len({spec.name for spec in specs}) != len(specs):
        raise LoadFailed(f"{constant} of model.py must hold at least one tensor, each name once")
    return tuple(specs)
