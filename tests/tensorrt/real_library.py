"""The real TensorRT for RTX, which builds engines for a GPU that is not there; what needs it is skipped without it."""

from __future__ import annotations

import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.tensorrt.cuda import find_gpus
from edge_runtime.backends.tensorrt.library import RTX, installed_library
from edge_runtime.backends.tensorrt.plan import Gpu
from edge_runtime.errors import BackendUnavailable

TARGET = Gpu(0, "GPU of the tests", "8.9", "CUDA 13000; driver of the tests", target="SM89")
"""Ada, which RTX builds for without one: an engine for it is as real as any, and cannot be run here."""


def gpus_there() -> tuple[Gpu, ...]:
    """The GPUs of this machine, none where CUDA or its bindings are missing."""
    try:
        return find_gpus()
    except BackendUnavailable:
        return ()


def why_no_gpu() -> str:
    """Why engines cannot be run here, "" where they can."""
    if installed_library() is None:
        return "neither tensorrt nor tensorrt_rtx is installed: make test-tensorrt, or TensorRT on the machine"
    return why_no_cuda()


def why_no_cuda() -> str:
    """Why nothing can be run on a GPU here, "" where it can."""
    try:
        return "" if find_gpus() else "no GPU"
    except BackendUnavailable as error:
        return f"no CUDA GPU: {error.message}"


needs_rtx = pytest.mark.skipif(
    installed_library() != RTX, reason="TensorRT for RTX is not installed: make test-tensorrt sets it up"
)

OPTIONS = LoadOptions()
