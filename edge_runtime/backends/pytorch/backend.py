"""PyTorch: TorchScript, `model.pt`, and exported programs, `model.pt2`, where the user brought torch.

Owns: which files are loaded, what their tensors are called, and the fastest form of a module, by measurement. Both
kinds may hold code, so they run in a host that sees their one file of the disk (hosts/parent.py), and pickles are never
loaded: weights alone go into the module of a `model.py` (docs/python-models.md). Only `probe` and `load` import torch.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.model_files import artifact_size
from edge_runtime.backends.pytorch import BACKEND
from edge_runtime.errors import BackendUnavailable, EdgeRuntimeError, LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import Array, Tensors

MODULE = "torch"

_ANY_CALLERS = 64
"""Runs share one copy of the weights; the scheduler's cores are the real bound. On a GPU one stream takes one run."""

_OLDEST_PROGRAMS = (2, 9)
"""The first PyTorch with this form of .pt2 (torch/export/pt2_archive)."""

TRIAL_S = 4.0
"""The longest search at a load for a faster form of a module: 30 runs of a ResNet-18 on one core."""

_GAIN = 0.97
"""Another form is taken when it needs less than this part of the time."""

_GUESSED_LENGTHS = ((32, 40), (224, 256), (8, 12), (1, 2))
"""Pairs of lengths for open inner axes, tried until a module runs with both: they show which axes of outputs follow."""

_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "bfloat16": "BF16",
}  # fmt: skip
_DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()}
_PRECISIONS = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int8": "int8"}

_PLACE = re.compile(r".*__(\d{1,4})")
"""How Triton names tensors of TorchScript, which has no names for outputs: INPUT__0, OUTPUT__0."""


class PyTorchBackend:
    """Runs `model.pt` and `model.pt2`.

    options.device: CPU (default), CUDA, CUDA:1. options.precision: as the model holds it; "bf16" and "f16" turn a
    TorchScript module into that. options.declared: names, datatypes and shapes, which TorchScript does not say.
    options.extra: `layout` "as-saved" keeps a module as it is, in place of the fastest form.
    """

    declaration = BACKEND

    def probe(self) -> Probe:
        """Find the library, and the GPUs that it can use."""

        def find() -> tuple[str, tuple[str, ...]]:
            torch = _library()
            gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
            return torch.__version__, ("CPU", *(f"CUDA:{index}" for index in gpus))

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> PyTorchInstance:
        """Load a module, and run it to learn what it does not say: its outputs, and its fastest form."""
        size = artifact_size(artifact)
        is_script = check_archive(artifact)
        _check_options(options)
        torch = _library()
        device = _find_device(torch, options.device)
        growth = watch_growth(size)
        threads = _Threads(torch, options.threads)
        threads.bound()
        with _quiet(), _failing(f"PyTorch {torch.__version__} cannot load {artifact.name}"):
            loader = _load_script if is_script else _load_program
            found = loader(torch, artifact, options, device)
        if not found.spec.outputs:
            raise LoadFailed(f"{artifact.name} returns no tensor, so there is nothing to serve")
        return PyTorchInstance(torch, found, threads, device=device, memory_bytes=growth())


class RunnableModule(Struct, frozen=True):
    """A module ready to run. call: takes tensors in the order of the inputs, and returns the outputs, flat.

    within: the dtype that floats become before it runs, None where they stay.
    """

    call: Callable[..., Sequence[Any]]
    spec: ModelSpec
    precision: str
    within: Any = None


class PyTorchInstance:
    """A loaded module. Any number of threads may call `run` on a CPU, one on a GPU."""

    backend = BACKEND.name

    def __init__(
        self, torch: ModuleType, loaded: RunnableModule, threads: _Threads, *, device: str, memory_bytes: int
    ) -> None:
        self.spec = loaded.spec
        self.device = device.upper()
        self.precision = loaded.precision
        self.concurrency = _ANY_CALLERS if device == "cpu" else 1
        self.memory_bytes = memory_bytes
        self._torch = torch
        self._call: Callable[..., Sequence[Any]] | None = loaded.call
        self._within = loaded.within
        self._threads = threads
        self._where = device
        self._places = {tensor.name: place for place, tensor in enumerate(loaded.spec.outputs)}

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once. A module gets copies: it may change its inputs in place."""
        call = self._call
        if call is None:
            raise RunFailed("the instance is closed")
        self._threads.bound()
        torch = self._torch
        try:
            with torch.inference_mode():
                given = [self._tensor(inputs[spec.name], spec.datatype) for spec in self.spec.inputs]
                results = call(*given)
                if len(results) != len(self.spec.outputs):
                    raise RunFailed(f"the module returned {len(results)} tensors; it has {len(self.spec.outputs)}")
                places = self._places.values() if outputs is None else [self._places[name] for name in outputs]
                return [self._array(results[place], self.spec.outputs[place].datatype) for place in places]
        except RunFailed:
            raise
        except MemoryError:
            raise
        except Exception as error:
            raise RunFailed(f"PyTorch: {last_words(error)}") from error

    def bind(self, max_rows: int) -> None:
        """Return None: PyTorch allocates what it returns."""

    def close(self) -> None:
        """Release the module."""
        self._call = None

    def _tensor(self, array: Array, datatype: str) -> Any:
        """Copy an array into a tensor on the device."""
        array = np.array(array, order="C")
        torch = self._torch
        if datatype == "BF16":
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        if self._within is not None and tensor.is_floating_point():
            return tensor.to(self._where, self._within)
        return tensor.to(self._where)

    def _array(self, tensor: Any, datatype: str) -> Array:
        """Copy a tensor into an array that nothing else views."""
        torch = self._torch
        tensor = tensor.to("cpu", getattr(torch, _DTYPES[datatype]), copy=True).contiguous()
        array: Array = (tensor.view(torch.int16) if datatype == "BF16" else tensor).numpy()
        return array.view(np.uint16) if datatype == "BF16" else array


class _Threads:
    """Bounds the threads of runs: PyTorch, OpenMP and oneDNN keep a number of their own for each thread that calls."""

    def __init__(self, torch: ModuleType, count: int) -> None:
        self._set = torch.set_num_threads
        self._count = count
        self._here = threading.local()
        with suppress(RuntimeError):  # once in a process, before its first parallel work
            torch.set_num_interop_threads(1)

    def bound(self) -> None:
        """Bound the calling thread's, once."""
        if getattr(self._here, "is_bound", False):
            return
        self._set(self._count)
        self._here.is_bound = True


# ---- what may be loaded ---------------------------------------------------------------------------------------------


def check_archive(artifact: Path) -> bool:
    """Return whether a file is TorchScript, else it is an exported program. Raises LoadFailed: it is neither."""
    try:
        with zipfile.ZipFile(artifact) as archive:
            names = {name.partition("/")[2] or name for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        with artifact.open("rb") as file:
            head = file.read(2)
        if head[:1] == b"\x80":  # PROTO of pickle
            raise LoadFailed(_pickled(artifact)) from error
        reason = f"no whole archive ({error or type(error).__name__})"
        raise LoadFailed(
            f"{artifact.name} is {reason}; wanted TorchScript or an exported program, so copy it again"
        ) from error
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return True
    if any(name.startswith("data/aotinductor/") or name.endswith((".so", ".cubin")) for name in names):
        raise LoadFailed(
            f"{artifact.name} holds libraries compiled for one machine, which are not loaded; save the program itself, "
            "by torch.export.save"
        )
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return False
    if "data.pkl" in names:
        raise LoadFailed(_pickled(artifact))
    raise LoadFailed(f"{artifact.name} is a zip, and neither TorchScript nor an exported program; save the model again")


def _pickled(artifact: Path) -> str:
    return (
        f"{artifact.name} is a pickle (torch.save), which can run code and is never loaded. Save the model by "
        "torch.export.save as model.pt2 or torch.jit.save as model.pt, or its weights as safetensors for the module of "
        "a model.py (docs/python-models.md)"
    )


def _check_options(options: LoadOptions) -> None:
    for key, value in options.extra.items():
        if (key, value) not in (("layout", "as-saved"), ("layout", "fastest")):
            raise LoadFailed(f'PyTorch has no option {key} = {value!r}; wanted layout = "fastest" or "as-saved"')


# ---- TorchScript ----------------------------------------------------------------------------------------------------


class _Argument(Struct, frozen=True):
    """One that callers give. place: among all of forward's. is_guessed: its rows are those of the trace."""

    place: int
    own_name: str
    spec: TensorSpec
    is_guessed: bool = False


def _load_script(torch: ModuleType, artifact: Path, options: LoadOptions, device: str) -> RunnableModule:
    def fresh(**more: Any) -> Any:
        with _failing(f"PyTorch {torch.__version__} cannot load {artifact.name}"):
            return torch.jit.load(str(artifact), map_location=device, **more).eval()

    module = fresh()
    declared = options.declared or ModelSpec((), ())
    with _failing(f"{artifact.name} has no forward, so there is nothing to call"):
        schema = module._c._get_method("forward").schema  # noqa: SLF001  no other way tells what it takes
    arguments = _arguments(schema.arguments[1:], declared.inputs, lambda: _traced_inputs(fresh(_restore_shapes=True)))
    held = _held_precision([*module.parameters(), *module.buffers()])
    if "quantized::" in str(module.inlined_graph):
        held = "int8"
    within = _wanted_dtype(torch, options.precision, held, artifact)
    arguments, examples = _runnable(torch, _caller(module, arguments), arguments, device, artifact)
    with torch.inference_mode():
        first, second = (_caller(module, arguments)(*(one.clone() for one in each)) for each in examples)
    try:
        leaves = [*_leaves(first, "OUTPUT")], [*_leaves(second, "OUTPUT")]
    except RunFailed as error:
        raise LoadFailed(f"{artifact.name} cannot be served: {error.message}") from error
    spec = ModelSpec(tuple(each.spec for each in arguments), _outputs(*leaves, declared.outputs, artifact))
    if within is not None:
        module = module.to(within)
        held = options.precision
        examples = [[_cast(each, within) for each in example] for example in examples]
        with _failing(f"{artifact.name} cannot run in {held}"), torch.inference_mode():
            _caller(module, arguments)(*examples[0])
    elif options.extra.get("layout") != "as-saved" and device == "cpu":
        module = _fastest(torch, fresh, arguments, examples)
    call = _caller(module, arguments)
    if _keeps_state(torch, call, examples):
        saved = fresh() if within is None else fresh().to(within)

        def call(*tensors: Any) -> Any:
            """Run a copy of the module as it was saved: each request is for itself, whatever ran before."""
            return _caller(copy.deepcopy(saved), arguments)(*tensors)

    return RunnableModule(lambda *tensors: [tensor for _, tensor in _leaves(call(*tensors), "")], spec, held, within)


def _arguments(
    arguments: Sequence[Any],
    declared: Sequence[TensorSpec],
    traced_inputs: Callable[[], Mapping[int, TensorSpec]],
) -> list[_Argument]:
    """Return the arguments that callers give: as declared, else as the module was traced. Raises LoadFailed."""
    known = {each.name: each for each in declared}
    own_names = {each.name for each in arguments}
    by_place = {int(found[1]): name for name in known if name not in own_names and (found := _PLACE.fullmatch(name))}
    names = [each.name if each.name in known else by_place.get(at, f"INPUT__{at}") for at, each in enumerate(arguments)]
    if strange := sorted(set(known) - set(names)):
        there = ", ".join(f"INPUT__{place} or {each.name}" for place, each in enumerate(arguments))
        raise LoadFailed(f"model.toml has [input.{strange[0]}]; the module takes {there or 'nothing'}")
    traced: Mapping[int, TensorSpec] | None = None
    taken: list[_Argument] = []
    for place, (name, argument) in enumerate(zip(names, arguments, strict=True)):
        spec = known.get(name)
        if spec is None and argument.has_default_value():
            continue
        if str(argument.type) not in ("Tensor", "Optional[Tensor]"):
            raise LoadFailed(
                f"forward takes {argument.name!r}, which is {argument.type}; wanted tensors alone. Wrap the module in "
                "one that takes and returns tensors"
            )
        if spec is None:
            traced = traced_inputs() if traced is None else traced
            if place not in traced:
                raise LoadFailed(
                    f"TorchScript does not say the shape of {argument.name!r}, and this module was not traced; write "
                    f"into model.toml:\n[input.INPUT__{place}]\nshape = [-1, 3, 224, 224]  # -1 is open\n"
                    'datatype = "FP32"'
                )
            spec = TensorSpec(name, traced[place].datatype, traced[place].shape)
            taken.append(_Argument(place, argument.name, spec, is_guessed=True))
        else:
            taken.append(_Argument(place, argument.name, spec))
    return taken


def _traced_inputs(module: Any) -> dict[int, TensorSpec]:
    """Return the inputs that a traced module was saved with, by place: shapes without data. A scripted one has none."""
    found: dict[int, TensorSpec] = {}
    for place, value in enumerate(list(module.graph.inputs())[1:]):
        with suppress(RuntimeError):  # an argument that is not a tensor
            sizes, datatype = value.type().sizes(), _datatype_of(value.type().dtype())
            if sizes is not None and datatype:
                found[place] = TensorSpec(value.debugName(), datatype, tuple(sizes))
    return found


def _caller(module: Any, arguments: Sequence[_Argument]) -> Callable[..., Any]:
    """Return the module as a function of the given arguments, in their order."""
    if [each.place for each in arguments] == list(range(len(arguments))):
        return module  # type: ignore[no-any-return]
    names = [each.own_name for each in arguments]
    return lambda *tensors: module(**dict(zip(names, tensors, strict=True)))


def _runnable(
    torch: ModuleType, call: Callable[..., Any], arguments: list[_Argument], device: str, artifact: Path
) -> tuple[list[_Argument], list[list[Any]]]:
    """Return the arguments with rows open where two sizes run, and examples of both. Raises LoadFailed: none runs."""
    shapes_of: list[list[_Argument]] = []
    if any(each.is_guessed and each.spec.shape for each in arguments):
        shapes_of.append([_with_open_rows(each) for each in arguments])
    shapes_of.append(arguments)
    reason = ""
    for each in shapes_of:
        inner_are_open = any(not one.spec.has_fixed_inner_shape for one in each)
        for lengths in _GUESSED_LENGTHS if inner_are_open else _GUESSED_LENGTHS[:1]:
            examples = [
                [_example(torch, one.spec, rows, length, device) for one in each]
                for rows, length in zip((1, 2), lengths, strict=True)
            ]
            try:
                with torch.inference_mode():
                    for example in examples:
                        call(*(tensor.clone() for tensor in example))
            except Exception as error:  # noqa: BLE001  PyTorch has no error class of its own for all of them
                reason = reason or last_words(error)
            else:
                return list(each), examples
    said = ", ".join(f"{each.spec.name} {each.spec.datatype} {list(each.spec.shape)}" for each in arguments)
    raise LoadFailed(
        f"{artifact.name} does not run on {said or 'no inputs'}: {reason}. Say shape and datatype of what it takes, "
        "in [input.INPUT__0] of model.toml"
    )


def _with_open_rows(argument: _Argument) -> _Argument:
    spec = argument.spec
    if not argument.is_guessed or not spec.shape:
        return argument
    return replace(argument, spec=replace(spec, shape=(DYNAMIC, *spec.shape[1:])))


def _example(torch: ModuleType, spec: TensorSpec, rows: int, length: int, device: str) -> Any:
    """Return a made-up tensor: zeros for one row, for more numbers in [-1, 1), or 0 and 1, so that data shows."""
    shape = [size if size != DYNAMIC else (length if axis else rows) for axis, size in enumerate(spec.shape)]
    dtype = getattr(torch, _DTYPES[spec.datatype])
    if rows == 1:
        return torch.zeros(shape, dtype=dtype, device=device)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return (noise if dtype.is_floating_point else noise > 0).to(device, dtype)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a result with their names: the keys of dictionaries, else places. Raises RunFailed."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, str(key))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each, name)
    elif hasattr(value, "is_floating_point"):
        yield name, value
    else:
        raise RunFailed(
            f"the module returned {type(value).__name__}; wanted tensors, or tuples or dictionaries of them"
        )


def _outputs(
    first: Sequence[tuple[str, Any]], second: Sequence[tuple[str, Any]], declared: Sequence[TensorSpec], artifact: Path
) -> tuple[TensorSpec, ...]:
    """Describe outputs by two runs of other sizes: an axis that differs, or is empty, is open. Raises LoadFailed."""
    if len(first) != len(second):
        raise LoadFailed(f"{artifact.name} returned {len(first)} tensors, then {len(second)}; wanted always as many")
    known = {each.name: each for each in declared}
    by_place = {int(found[1]): name for name in known if (found := _PLACE.fullmatch(name))}
    outputs: list[TensorSpec] = []
    for place, ((key, one), (_, other)) in enumerate(zip(first, second, strict=True)):
        name = by_place.get(place, f"OUTPUT__{place}") if key == "OUTPUT" else key
        datatype = _datatype_of(other.dtype)
        if not datatype or one.ndim != other.ndim:
            raise LoadFailed(
                f"{artifact.name} returns {name} as {other.dtype} of {one.ndim} and {other.ndim} axes; "
                "wanted a tensor that can be sent, of as many axes each time"
            )
        pairs = zip(one.shape, other.shape, strict=True)
        shape = tuple(int(size) if size == than and size else DYNAMIC for size, than in pairs)
        wanted = known.pop(name, None)
        if wanted is not None and (wanted.datatype or datatype, len(wanted.shape or shape)) != (datatype, len(shape)):
            raise LoadFailed(
                f"model.toml has [output.{name}] as {wanted.datatype} {list(wanted.shape)}; it is {datatype} "
                f"{list(shape)}"
            )
        outputs.append(TensorSpec(name, datatype, (wanted.shape or shape) if wanted is not None else shape))
    if known:
        raise LoadFailed(
            f"model.toml has [output.{min(known)}]; the module returns {', '.join(each.name for each in outputs)}"
        )
    return tuple(outputs)


def _keeps_state(torch: ModuleType, call: Callable[..., Any], examples: Sequence[Sequence[Any]]) -> bool:
    """Whether a run of a module changes the next one's answer: it writes a buffer or an attribute, or is random."""
    rounds = []
    with torch.inference_mode():
        for _ in range(2):
            answers = [[leaf for _, leaf in _leaves(call(*(one.clone() for one in each)), "")] for each in examples]
            rounds.append([leaf.clone() for leaves in answers for leaf in leaves])
    return not all(_is_same(torch, one, other) for one, other in zip(*rounds, strict=True))


def _fastest(
    torch: ModuleType, fresh: Callable[[], Any], arguments: Sequence[_Argument], examples: Sequence[Sequence[Any]]
) -> Any:
    """Return the fastest form of a module that gives its answers: as saved, frozen, or with channels last too.

    Weights alone are laid out anew: inputs stay as they come, and PyTorch keeps their order from the first convolution
    on. ResNet-18, 4 rows, a Xeon: 115 ms as saved, 75 ms so.
    """

    def frozen() -> Any:
        return torch.jit.freeze(fresh())

    def channels_last() -> Any:
        module = fresh()
        if any(weights.ndim == 4 for weights in module.parameters()):
            module = module.to(memory_format=torch.channels_last)
        return torch.jit.optimize_for_inference(torch.jit.freeze(module))

    began_s = time.monotonic()
    best = fresh()
    wanted, best_s = _timed(torch, best, arguments, examples)
    for make in (frozen, channels_last):
        if time.monotonic() - began_s > TRIAL_S or best_s > TRIAL_S / 10:
            break
        try:
            candidate = make()
            results, run_s = _timed(torch, candidate, arguments, examples)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
            continue  # not every module can be frozen
        if run_s < _GAIN * best_s and all(
            _is_same(torch, one, other) for one, other in zip(wanted, results, strict=True)
        ):
            best, best_s = candidate, run_s
    return best


def _timed(
    torch: ModuleType, module: Any, arguments: Sequence[_Argument], examples: Sequence[Sequence[Any]]
) -> tuple[list[Any], float]:
    """Return all results of the examples, and the seconds of the quickest run on the last."""
    call = _caller(module, arguments)
    with torch.inference_mode():
        results = [tensor for each in examples for _, tensor in _leaves(call(*(one.clone() for one in each)), "")]
        times = []
        for _ in range(4):  # the first two compile
            given = [one.clone() for one in examples[-1]]
            began_s = time.perf_counter()
            call(*given)
            times.append(time.perf_counter() - began_s)
    return results, min(times)


def _is_same(torch: ModuleType, one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    scale = float(one.abs().max()) if one.numel() else 1.0
    return bool(torch.allclose(one, other, rtol=1e-3, atol=1e-4 * max(scale, 1e-6), equal_nan=True))


# ---- exported programs ----------------------------------------------------------------------------------------------


def _load_program(torch: ModuleType, artifact: Path, options: LoadOptions, device: str) -> RunnableModule:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST_PROGRAMS:
        wanted = ".".join(map(str, _OLDEST_PROGRAMS))
        raise BackendUnavailable(f"PyTorch {torch.__version__} reads no {artifact.name}; wanted {wanted} or newer")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # a host writes nowhere; torch.export asks for folders at import, and leaves them empty
        tempfile.tempdir = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(artifact.parent)
    import_library("torch.export", BACKEND)
    with _failing(f"PyTorch {torch.__version__} cannot load {artifact.name}"):
        program = torch.export.load(str(artifact))
        if device != "cpu":
            program = import_library("torch.export.passes", BACKEND).move_to_device_pass(program, device)
        module = program.module()
    weights = [each for each in (*program.state_dict.values(), *program.constants.values()) if hasattr(each, "dtype")]
    held = _held_precision(weights)
    if options.precision not in ("", held):
        raise BackendUnavailable(
            f"{artifact.name} is a program in {held}, and was to run in {options.precision}: no program is changed. "
            "Export it in that precision, or leave precision out"
        )
    with _failing(f"{artifact.name} takes or returns what cannot be sent"):
        inputs, given = _program_inputs(torch, program)
        outputs, kept = _program_outputs(torch, program)
    tree = torch.utils._pytree  # noqa: SLF001  torch.export's own documentation uses it
    in_spec = program.call_spec.in_spec

    def call(*tensors: Any) -> list[Any]:
        left = iter(tensors)
        positional, named = tree.tree_unflatten([next(left) if each is _GIVEN else each for each in given], in_spec)
        leaves, _ = tree.tree_flatten(module(*positional, **named))
        return [leaves[place] for place in kept]

    names = _written_names(program)
    kept_tensors = (*module.named_buffers(), *module.named_parameters())
    written = [(tensor, tensor.clone()) for name, tensor in kept_tensors if name in names]
    lock = threading.Lock()

    def call_anew(*tensors: Any) -> list[Any]:
        """Run with what the program writes as it was saved: each request is for itself, whatever ran before."""
        with lock:
            for tensor, saved in written:
                tensor.copy_(saved)
            return [leaf.clone() for leaf in call(*tensors)]

    return RunnableModule(call_anew if written else call, ModelSpec(inputs, outputs, _most_rows(program, inputs)), held)


def _written_names(program: Any) -> set[str]:
    """Return the names of the buffers and weights that a run of a program writes, itself or a view of them."""
    signature = program.graph_signature
    held = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    held |= signature.inputs_to_lifted_tensor_constants
    written = set(signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        seen = [given for given, is_written in _aliased(node) if is_written]
        for each in seen:
            if each.op == "placeholder" and each.name in held:
                written.add(held[each.name])
            seen += [given for given, _ in _aliased(each) if given not in seen]
    return written


def _aliased(node: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the nodes that an operation's result may share memory with, each with whether the operation writes it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # one of the results of another, or no operation
        yield from ((given, False) for given in node.all_input_nodes)
        return
    for place, argument in enumerate(schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else [given]:
            if argument.alias_info is not None and hasattr(each, "all_input_nodes"):
                yield each, argument.alias_info.is_write


_GIVEN = object()
"""In the place of what callers give, among arguments that the export fixed."""


def _program_inputs(torch: ModuleType, program: Any) -> tuple[tuple[TensorSpec, ...], list[Any]]:
    """Return the inputs, and all arguments: _GIVEN for one that callers give, else the value that was exported."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    kinds = torch.export.graph_signature
    inputs: list[TensorSpec] = []
    given: list[Any] = []
    for each in program.graph_signature.input_specs:
        if each.kind != kinds.InputKind.USER_INPUT:
            continue
        if isinstance(each.arg, kinds.ConstantArgument):
            given.append(each.arg.value)
        else:
            inputs.append(_described(each.arg.name, values[each.arg.name]))
            given.append(_GIVEN)
    return tuple(inputs), given


def _program_outputs(torch: ModuleType, program: Any) -> tuple[tuple[TensorSpec, ...], list[int]]:
    """Return the outputs, and their places among all that the program returns.

    Their names are those that a conversion to ONNX gives them: `output`, `output_0`, or the keys of a dictionary;
    PyTorch's own come from the last operation, and change with each change of a model.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    kinds = torch.export.graph_signature
    tree, spec = torch.utils._pytree, program.call_spec.out_spec  # noqa: SLF001  as above
    paths, _ = tree.tree_flatten_with_path(tree.tree_unflatten(list(range(spec.num_leaves)), spec))
    returned = [each for each in program.graph_signature.output_specs if each.kind == kinds.OutputKind.USER_OUTPUT]
    outputs: list[TensorSpec] = []
    kept: list[int] = []
    for place, ((path, _), each) in enumerate(zip(paths, returned, strict=True)):
        if isinstance(each.arg, kinds.ConstantArgument):
            continue
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
        begins_with_name = bool(keys) and not keys[0].isdigit()
        name = re.sub(r"[^\w.-]", "_", "_".join(keys if begins_with_name else ["output", *keys]))
        outputs.append(_described(name, values[each.arg.name]))
        kept.append(place)
    return tuple(outputs), kept


def _described(name: str, value: Any) -> TensorSpec:
    """Describe a tensor of a program. Raises LoadFailed: it is none, or of a dtype that cannot be sent."""
    datatype = _datatype_of(getattr(value, "dtype", None))
    if not datatype:
        raise LoadFailed(
            f"{name!r} is {getattr(value, 'dtype', type(value).__name__)}; wanted a tensor of a known datatype"
        )
    return TensorSpec(name, datatype, tuple(size if isinstance(size, int) else DYNAMIC for size in value.shape))


def _most_rows(program: Any, inputs: Sequence[TensorSpec]) -> int | None:
    """Return the most rows that the export allows, None where it sets no bound."""
    names = {each.name for each in inputs if each.has_dynamic_axis_0}
    bounds: list[int] = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            symbol = node.meta["val"].shape[0].node.expr
            with suppress(KeyError, OverflowError, TypeError, ValueError, AttributeError):
                bounds.append(int(program.range_constraints[symbol].upper))
    return min((bound for bound in bounds if bound < _NO_BOUND), default=None)


_NO_BOUND = 1 << 31
"""PyTorch writes an open range as one up to the largest integer."""


# ---- both -----------------------------------------------------------------------------------------------------------


def prepare_pytorch() -> None:
    """Import the library, for hosts that are forked from this process: it starts no threads, nor CUDA."""
    _library()


def _library() -> ModuleType:
    """Import PyTorch so that whatever it loads unpickles weights alone. Raises BackendUnavailable."""
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch.export.load would fall back to any pickle
    return import_library(MODULE, BACKEND)


def _find_device(torch: ModuleType, device: str) -> str:
    """Return PyTorch's name of a device: "cpu", "cuda:0". Raises BackendUnavailable."""
    kind, _, index = device.upper().partition(":")
    if kind in ("", "CPU"):
        return "cpu"
    if kind != "CUDA" or not (index.isdigit() or not index):
        raise BackendUnavailable(f"PyTorch has no device {device!r} here; known: CPU, CUDA, CUDA:1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        why = f"it finds {count}" if torch.version.cuda else "it was built without CUDA"
        raise BackendUnavailable(f"PyTorch {torch.__version__} cannot use {device.upper()}: {why}")
    # FP32 is multiplied as it is. NVIDIA's libraries round it to 10 bits of mantissa unless told not to, and a traced
    # module says for each convolution that they may: so they are told, before their first use.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return f"cuda:{int(index or 0)}"


def _held_precision(weights: Sequence[Any]) -> str:
    """Return the precision of most of the weights, in bytes."""
    sizes: dict[str, int] = {}
    for each in weights:
        precision = _PRECISIONS.get(str(each.dtype).removeprefix("torch."))
        if precision is not None:
            sizes[precision] = sizes.get(precision, 0) + each.numel() * each.element_size()
    return max(sizes, key=lambda precision: sizes[precision], default="f32")


def _wanted_dtype(torch: ModuleType, precision: str, held: str, artifact: Path) -> Any:
    """Return the type that a module's floats become, None for as they are. Raises LoadFailed."""
    if precision in ("", held):
        return None
    if "int8" in (precision, held):
        raise LoadFailed(
            f"precision {precision} was asked for, and {artifact.name} holds {held}: nothing is quantised at load. "
            "Save it in that precision, or leave precision out"
        )
    return getattr(torch, next(dtype for dtype, name in _PRECISIONS.items() if name == precision))


def _cast(tensor: Any, dtype: Any) -> Any:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _datatype_of(dtype: Any) -> str:
    """Return the wire name of PyTorch's dtype, "" where it has none."""
    return _DATATYPES.get(str(dtype).removeprefix("torch."), "")


def last_words(error: Exception) -> str:
    """Return the reason in an error: the last line of a TorchScript one, whose other lines quote the program."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_quoted = any("Traceback of TorchScript" in line for line in lines)
    text = (lines[-1] if is_quoted else " ".join(lines[:4])) if lines else type(error).__name__
    return text[:500]


@contextmanager
def _failing(text: str) -> Iterator[None]:
    """Turn any exception of the library into LoadFailed."""
    try:
        yield
    except EdgeRuntimeError:
        raise
    except MemoryError as error:
        raise LoadFailed(f"{text}: it asks for more memory than it may have") from error
    except Exception as error:
        raise LoadFailed(f"{text}: {last_words(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide PyTorch's warnings of coming changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
