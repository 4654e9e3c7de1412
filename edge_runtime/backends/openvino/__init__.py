"""OpenVINO: runs its IR, ONNX, and what its other frontends read."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="openvino",
    factory="edge_runtime.backends.openvino.backend:OpenVinoBackend",
    artifacts=("model.xml", "model.onnx", "saved_model.pb", "model.tflite", "model.pdmodel"),
    libraries=("openvino",),
    extra="openvino",
    load_cost=1,
    less_clear_than=("onnxruntime",),
    serves_meanwhile=True,
    inside=(".onnx", ".xml"),
    rule="edge_runtime.backends.onnx.rule:why_not_inside",
    prepare="edge_runtime.backends.openvino.backend:prepare_openvino",
    sees="folder",
    cache_option="CACHE_DIR",
    runs_ahead=True,
    reads_in_place=True,
)
