"""CUDA for engines: the GPUs, memory that both sides reach, streams, graphs.

Owns: every call of the CUDA runtime, through NVIDIA's cuda-python, which is imported at the first use.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.backends.library_import import import_library
from edge_runtime.backends.tensorrt import BACKEND
from edge_runtime.backends.tensorrt.plan import Gpu
from edge_runtime.errors import BackendUnavailable, RunFailed

Bytes = npt.NDArray[np.uint8]

_DRIVER_VERSIONS = (Path("/proc/driver/nvidia/version"), Path("/etc/nv_tegra_release"))
"""Files that name the kernel's driver: of discrete GPUs, of Jetsons (the release of Linux for Tegra)."""

_MAX_NAME = 200


def import_cuda() -> ModuleType:
    """The CUDA runtime's bindings: `cuda.bindings.runtime`, before 12.6 `cuda.cudart`. Raises BackendUnavailable."""
    try:
        return import_library("cuda.bindings.runtime", BACKEND)
    except BackendUnavailable as newer:
        try:
            return import_library("cuda.cudart", BACKEND)
        except BackendUnavailable:
            raise BackendUnavailable(f"cuda-python is not installed or does not fit ({newer.message})") from newer


def find_gpus() -> tuple[Gpu, ...]:
    """Every GPU that CUDA finds. Raises BackendUnavailable: none, no driver, no cuda-python."""
    cuda = import_cuda()
    count = _checked(cuda, cuda.cudaGetDeviceCount(), BackendUnavailable, "find a GPU")
    if not count:
        raise BackendUnavailable("CUDA finds no GPU; check the driver (nvidia-smi; on a Jetson, JetPack)")
    version = _checked(cuda, cuda.cudaDriverGetVersion(), BackendUnavailable, "read the driver's version")
    return tuple(_describe(cuda, index, f"CUDA {version}; {_driver()}") for index in range(count))


def _describe(cuda: ModuleType, index: int, driver: str) -> Gpu:
    found = _checked(cuda, cuda.cudaGetDeviceProperties(index), BackendUnavailable, f"look at GPU {index}")
    name = found.name.decode(errors="replace") if isinstance(found.name, bytes) else str(found.name)
    return Gpu(index, name.strip("\0 "), f"{found.major}.{found.minor}", driver, is_integrated=bool(found.integrated))


def _driver() -> str:
    for path in _DRIVER_VERSIONS:
        try:
            return path.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()[:_MAX_NAME]
        except (OSError, IndexError):
            continue
    return "unknown driver"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one tensor. host: pinned bytes. device: its address on the GPU, the same memory where it is shared.

    The memory lives as long as `host` or a view of it.
    """

    host: Bytes
    device: int
    is_shared: bool


class Cuda:
    """One GPU. Every method raises RunFailed with CUDA's reason. Thread: any, after `use` on that thread."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._cuda = import_cuda()
        kinds = self._cuda.cudaMemcpyKind
        self._to_device, self._to_host = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost

    def use(self) -> None:
        """Select this GPU for the calling thread; a thread begins with the first one."""
        if self.gpu.index:
            self._do(self._cuda.cudaSetDevice(self.gpu.index), "select the GPU")

    def new_stream(self) -> int:
        """Make a stream and return its handle; `end_stream` ends it."""
        stream = self._do(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking), "make a stream")
        return int(stream)

    def end_stream(self, stream: int) -> None:
        """End a stream. Raises nothing: at the end of a process CUDA may be gone already."""
        self._cuda.cudaStreamDestroy(stream)

    def new_buffer(self, nbytes: int) -> Buffer:
        """Allocate pinned memory with its counterpart on the GPU; a Jetson shares one memory, which is never copied."""
        cuda, nbytes = self._cuda, max(nbytes, 1)
        is_shared = self.gpu.is_integrated
        flags = cuda.cudaHostAllocMapped if is_shared else cuda.cudaHostAllocDefault
        pinned = int(self._do(cuda.cudaHostAlloc(nbytes, flags), f"pin {nbytes} bytes of memory"))
        try:
            if is_shared:
                device = int(self._do(cuda.cudaHostGetDevicePointer(pinned, 0), "map pinned memory"))
            else:
                device = int(self._do(cuda.cudaMalloc(nbytes), f"take {nbytes} bytes of the GPU's memory"))
        except RunFailed:
            cuda.cudaFreeHost(pinned)
            raise
        memory = (ctypes.c_uint8 * nbytes).from_address(pinned)
        weakref.finalize(memory, _free, cuda, pinned, None if is_shared else device)
        return Buffer(np.ctypeslib.as_array(memory), device, is_shared)

    def copy_in(self, buffer: Buffer, nbytes: int, stream: int) -> None:
        """Enqueue a copy of the first bytes to the GPU; does nothing where memory is shared."""
        if not buffer.is_shared and nbytes:
            error = self._cuda.cudaMemcpyAsync(buffer.device, buffer.host.ctypes.data, nbytes, self._to_device, stream)
            self._do(error, "copy an input to the GPU")

    def copy_out(self, buffer: Buffer, nbytes: int, stream: int) -> None:
        """Enqueue a copy of the first bytes from the GPU; does nothing where memory is shared."""
        if not buffer.is_shared and nbytes:
            error = self._cuda.cudaMemcpyAsync(buffer.host.ctypes.data, buffer.device, nbytes, self._to_host, stream)
            self._do(error, "copy an output from the GPU")

    def wait(self, stream: int) -> None:
        """Wait until the stream is done; errors of kernels show here."""
        self._do(self._cuda.cudaStreamSynchronize(stream), "run on the GPU")

    def record(self, stream: int, enqueue: Callable[[], None]) -> Any:
        """Record what `enqueue` puts on the stream as a graph to `launch`. Raises RunFailed: it cannot be recorded."""
        cuda = self._cuda
        # Only this thread's calls are recorded, because other models' threads use CUDA meanwhile.
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._do(cuda.cudaStreamBeginCapture(stream, mode), "record a graph")
        try:
            enqueue()
        except BaseException:
            cuda.cudaStreamEndCapture(stream)
            cuda.cudaGetLastError()
            raise
        graph = self._do(cuda.cudaStreamEndCapture(stream), "record a graph")
        try:
            return self._do(cuda.cudaGraphInstantiate(graph, 0), "make a graph")
        finally:
            cuda.cudaGraphDestroy(graph)

    def launch(self, graph: Any, stream: int) -> None:
        """Enqueue a graph."""
        self._do(self._cuda.cudaGraphLaunch(graph, stream), "launch a graph")

    def end_graph(self, graph: Any) -> None:
        """Free a graph. Raises nothing."""
        self._cuda.cudaGraphExecDestroy(graph)

    def _do(self, answer: tuple[Any, ...], doing: str) -> Any:
        return _checked(self._cuda, answer, RunFailed, doing)


def _checked(cuda: ModuleType, answer: tuple[Any, ...], error: type[RunFailed | BackendUnavailable], doing: str) -> Any:
    """Return the value of a CUDA call. Raises `error` with CUDA's message where it failed."""
    status = answer[0]
    if status == cuda.cudaError_t.cudaSuccess:
        return answer[1] if len(answer) > 1 else None
    _, words = cuda.cudaGetErrorString(status)
    cuda.cudaGetLastError()  # else the next library that looks, after a kernel of its own, takes it for its own
    text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
    raise error(f"CUDA cannot {doing}: {text} ({int(status)})")


def _free(cuda: ModuleType, pinned: int, device: int | None) -> None:
    cuda.cudaFreeHost(pinned)
    if device is not None:
        cuda.cudaFree(device)
