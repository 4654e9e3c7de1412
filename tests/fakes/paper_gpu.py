"""A GPU on paper: CUDA's runtime and an engine with the calls that we make, their work done by numpy on real memory.

So that the order of our calls is tried where no GPU is: what is copied when, which shapes are set, when graphs are
recorded, what is given back. It follows CUDA's documentation, not its speed; tests/tensorrt tries the same on a GPU.
"""

# ruff: noqa: N802, N815  (the names are CUDA's)

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from edge_runtime.backends.tensorrt.library import Library, traits_of
from tests.models.onnx_models import mlp_weights

OK, NO_MEMORY = 0, 2


class PaperCuda:
    """The runtime's functions: each returns its status first. limit_bytes: what one allocation may take."""

    cudaError_t = SimpleNamespace(cudaSuccess=OK)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaHostAllocDefault, cudaHostAllocMapped, cudaStreamNonBlocking = 0, 2, 1

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.streams: set[int] = set()
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.recorded: list[Callable[[], None]] | None = None
        self.launched = 0
        self.ordered = 0
        self.copies = 0
        self.limit_bytes = 1 << 30
        self._number = 1000

    def do(self, action: Callable[[], None]) -> None:
        """Work ordered on a stream: done at once, or kept while it is recorded."""
        if self.recorded is not None:
            self.recorded.append(action)
        else:
            action()

    def _new(self) -> int:
        self._number += 1
        return self._number

    def _allocate(self, nbytes: int) -> tuple[int, int | None]:
        if nbytes > self.limit_bytes:
            return NO_MEMORY, None
        block = (ctypes.c_uint8 * nbytes)()
        self.memory[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cudaHostAlloc(self, nbytes: int, flags: int) -> tuple[int, int | None]:
        return self._allocate(nbytes)

    def cudaMalloc(self, nbytes: int) -> tuple[int, int | None]:
        return self._allocate(nbytes)

    def cudaHostGetDevicePointer(self, pointer: int, flags: int) -> tuple[int, int]:
        return OK, pointer

    def cudaFreeHost(self, pointer: int) -> tuple[int]:
        del self.memory[pointer]
        return (OK,)

    def cudaFree(self, pointer: int) -> tuple[int]:
        del self.memory[pointer]
        return (OK,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        self.streams.add(self._new())
        return OK, self._number

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams.remove(stream)
        return (OK,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        assert stream in self.streams
        return (OK,)

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> tuple[int]:
        def copy() -> None:
            self.copies += 1
            ctypes.memmove(target, source, nbytes)

        self.do(copy)
        return (OK,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.recorded = []
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, list[Callable[[], None]]]:
        recorded, self.recorded = self.recorded or [], None
        return OK, recorded

    def cudaGraphInstantiate(self, graph: list[Callable[[], None]], flags: int) -> tuple[int, int]:
        self.graphs[self._new()] = graph
        return OK, self._number

    def cudaGraphDestroy(self, graph: object) -> tuple[int]:
        return (OK,)

    def cudaGraphLaunch(self, graph: int, stream: int) -> tuple[int]:
        self.launched += 1
        for action in self.graphs[graph]:
            action()
        return (OK,)

    def cudaGraphExecDestroy(self, graph: int) -> tuple[int]:
        del self.graphs[graph]
        return (OK,)

    def cudaGetLastError(self) -> tuple[int]:
        return (OK,)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return OK, b"out of memory" if status == NO_MEMORY else b"unknown"


class PaperEngine:
    """x FP32 [1..most, 16] -> y FP32 [rows, 4], the tests' mlp. waits: seconds that ordering a run takes."""

    def __init__(self, cuda: PaperCuda, most: int, spend: Callable[[], None] = lambda: None) -> None:
        self.cuda, self.most, self.spend = cuda, most, spend
        self.contexts = 0

    num_io_tensors = 2
    device_memory_size_v2 = 4096

    def create_execution_context(self) -> PaperContext:
        self.contexts += 1
        return PaperContext(self)

    def get_tensor_name(self, index: int) -> str:
        return ("y", "x")[index]  # in no particular order, as an engine's are

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name == "x" else "output"

    def get_tensor_location(self, name: str) -> str:
        return "device"

    def get_tensor_dtype(self, name: str) -> str:
        return "float"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 16 if name == "x" else 4)

    def create_engine_inspector(self) -> Any:
        layer = {"LayerType": "gemm", "Inputs": [{"Datatype": "Float"}]}
        return SimpleNamespace(get_engine_information=lambda _: json.dumps({"Layers": [layer]}))


def paper_tensorrt(engine: PaperEngine | None) -> Library:
    """A library whose runtime makes that engine of any bytes; None: it refuses them, with a reason."""

    class Logger:
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    class Runtime:
        num_DLA_cores = 0

        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> PaperEngine | None:
            if engine is None:
                self._logger.log(Logger.ERROR, "the paper is torn")
            return engine

    module = SimpleNamespace(
        ILogger=Logger,
        Runtime=Runtime,
        TensorIOMode=SimpleNamespace(INPUT="input"),
        TensorLocation=SimpleNamespace(DEVICE="device"),
        DataType=SimpleNamespace(FLOAT="float", HALF="half"),
        LayerInformationFormat=SimpleNamespace(JSON="json"),
        init_libnvinfer_plugins=lambda logger, namespace: True,
    )
    return Library(module, "tensorrt", "10.3.0", traits_of("tensorrt", "10.3.0"))  # type: ignore[arg-type]


class PaperContext:
    """One context: addresses and shapes that are set, and runs of them."""

    def __init__(self, engine: PaperEngine) -> None:
        self._engine = engine
        self._addresses: dict[str, int] = {}
        self._rows = 0

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        fits = name == "x" and len(shape) == 2 and shape[1] == 16 and 1 <= shape[0] <= self._engine.most
        self._rows = shape[0] if fits else self._rows
        return fits

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self._rows, 16 if name == "x" else 4)

    def execute_async_v3(self, stream: int) -> bool:
        rows, cuda = self._rows, self._engine.cuda
        cuda.ordered += 1
        self._engine.spend()

        def run() -> None:
            first, second = mlp_weights()
            x = np.ctypeslib.as_array((ctypes.c_float * (rows * 16)).from_address(self._addresses["x"]))
            y = np.ctypeslib.as_array((ctypes.c_float * (rows * 4)).from_address(self._addresses["y"]))
            y[:] = (np.maximum(x.reshape(rows, 16) @ first, 0) @ second).reshape(-1)

        cuda.do(run)
        return True
