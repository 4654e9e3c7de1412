"""A backend for `model.dense`: dense layers with a ReLU between them. It imports nothing heavy here."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="dense",
    factory="edge_runtime_dense.backend:DenseBackend",
    artifacts=("model.dense",),
    libraries=("numpy",),
    advice="pip install numpy",
    prepare="edge_runtime_dense.backend",
)
