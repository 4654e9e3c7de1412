"""TensorRT: runs ONNX models as engines that are built on this device."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="tensorrt",
    factory="edge_runtime.backends.tensorrt.backend:TensorRtBackend",
    artifacts=("model.onnx", "model.plan", "model.engine", "model.trt"),
    libraries=("tensorrt", "tensorrt_rtx"),
    extra="tensorrt",
    load_cost=4,
    builder="edge_runtime.backends.tensorrt.engine_builds:EngineBuilds",
    inside=(".onnx", ".plan"),
    prepare="edge_runtime.backends.tensorrt.backend",  # not TensorRT itself: CUDA, once it began, survives no fork
    sees="folder",
    starts_processes=True,  # CUDA makes its devices by a program
    reads_in_place=True,
)
