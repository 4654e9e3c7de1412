"""ONNX Runtime: runs ONNX models."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="onnxruntime",
    factory="edge_runtime.backends.onnxruntime.backend:OnnxRuntimeBackend",
    artifacts=("model.onnx",),
    libraries=("onnxruntime",),
    extra="onnxruntime",
    takes_delegate=True,
    serves_meanwhile=True,
    inside=(".onnx",),
    rule="edge_runtime.backends.onnx.rule:why_not_inside",
    plain_options=("arena", "optimization"),
    prepare="edge_runtime.backends.onnxruntime.backend:prepare_onnxruntime",
    sees="folder",
    shares=(".onnx",),
    begins_early=True,
    yields_to=("tensorrt", "tensorrt_rtx"),
    runs_ahead=True,
    reads_in_place=True,
    interrupts=True,
)
