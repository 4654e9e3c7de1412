"""LiteRT, formerly TensorFlow Lite."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="litert",
    factory="edge_runtime.backends.litert.backend:LiteRtBackend",
    artifacts=("model.tflite",),
    libraries=("ai_edge_litert",),
    extra="litert",
    load_cost=2,
    takes_delegate=True,
    prepare="edge_runtime.backends.litert.backend:import_litert",
    sees="folder",
)
