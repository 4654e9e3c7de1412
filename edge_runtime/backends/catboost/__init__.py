"""CatBoost: runs the models of that library that take categories or text."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="catboost",
    factory="edge_runtime.backends.catboost.backend:CatBoostBackend",
    artifacts=("model.cbm",),
    libraries=("catboost",),
    extra="catboost",
    load_cost=3,
    prepare="edge_runtime.backends.catboost.backend:import_catboost",
)
