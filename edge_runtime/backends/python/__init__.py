"""Models written in Python: a `model.py`, or one of Triton's python backend."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="python",
    factory="edge_runtime.backends.python.backend:PythonBackend",
    artifacts=("model.py",),
    load_cost=6,
    is_code=True,
    loads_functions=True,
    why_one_run="a Python model has one process, with one run at a time",
    prepare="edge_runtime.backends.python.backend",
    sees="folder",
    starts_processes=True,
    ends_softly=True,
    calls_models=True,
)
