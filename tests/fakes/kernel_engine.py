"""An engine whose runs are kernels on a real GPU: what tests/fakes/paper_gpu.py has on paper, with CUDA itself below.

So that our memory, copies, streams and graphs are tried on any NVIDIA GPU, also on one that no TensorRT at hand knows.
Needs cuda-bindings with NVRTC, CUDA's compiler at run time.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.fakes.paper_gpu import PaperContext, PaperEngine
from tests.models.onnx_models import mlp_weights

SOURCE = rb"""
extern "C" __global__ void mlp(const float* x, float* y, const float* first, const float* second, int rows)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * 4) return;
    float sum = 0.0f;
    for (int hidden = 0; hidden < 32; ++hidden) {
        float inner = 0.0f;
        for (int k = 0; k < 16; ++k) inner += x[at / 4 * 16 + k] * first[k * 32 + hidden];
        sum += fmaxf(inner, 0.0f) * second[hidden * 4 + at % 4];
    }
    y[at] = sum;
}
"""
THREADS = 128
"""Of a block."""


def why_no_compiler() -> str:
    """Why kernels cannot be made here, "" where they can."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"no NVRTC: {error}"
    return ""


class KernelEngine(PaperEngine):
    """x FP32 [1..most, 16] -> y FP32 [rows, 4], the tests' mlp. kernels: how many a run starts; the last one counts."""

    def __init__(self, most: int, kernels: int = 1) -> None:
        from cuda.bindings import driver, nvrtc, runtime

        super().__init__(None, most)  # type: ignore[arg-type]  # no CUDA of paper
        self.driver, self.kernels = driver, kernels
        done(runtime.cudaFree(0))  # makes the context of the device current
        major, minor = (done(runtime.cudaDeviceGetAttribute(each, 0)) for each in (
            runtime.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor,
            runtime.cudaDeviceAttr.cudaDevAttrComputeCapabilityMinor,
        ))  # fmt: skip
        program = done(nvrtc.nvrtcCreateProgram(SOURCE, b"mlp.cu", 0, [], []))
        done(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
        binary = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
        done(nvrtc.nvrtcGetCUBIN(program, binary))
        self._module = done(driver.cuModuleLoadData(np.frombuffer(binary, np.uint8).ctypes.data))
        self.function = done(driver.cuModuleGetFunction(self._module, b"mlp"))
        self.weights: list[int] = []
        for each in mlp_weights():
            pointer = int(done(runtime.cudaMalloc(each.nbytes)))
            kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            done(runtime.cudaMemcpy(pointer, each.ctypes.data, each.nbytes, kind))
            self.weights.append(pointer)

    def create_execution_context(self) -> KernelContext:
        self.contexts += 1
        return KernelContext(self)

    def close(self) -> None:
        """Give the kernel and its weights back."""
        from cuda.bindings import runtime

        for pointer in self.weights:
            done(runtime.cudaFree(pointer))
        done(self.driver.cuModuleUnload(self._module))


class KernelContext(PaperContext):
    """One context: its runs are started on the stream that they are given."""

    _engine: KernelEngine

    def execute_async_v3(self, stream: int) -> bool:
        engine = self._engine
        values = (self._addresses["x"], self._addresses["y"], *engine.weights, self._rows)
        kinds = (*(ctypes.c_void_p,) * 4, ctypes.c_int)
        blocks = (self._rows * 4 + THREADS - 1) // THREADS
        for _ in range(engine.kernels):
            done(
                engine.driver.cuLaunchKernel(
                    engine.function, blocks, 1, 1, THREADS, 1, 1, 0, stream, (values, kinds), 0
                )
            )
        return True


def done(answer: tuple[Any, ...]) -> Any:
    """The value of a call of CUDA. Raises RuntimeError with its status where it failed."""
    if int(answer[0]):
        raise RuntimeError(str(answer[0]))
    return answer[1] if len(answer) > 1 else None
