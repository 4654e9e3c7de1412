"""The type of an importer, and those that we ship: one for each system or package that models come from."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from msgspec import Struct


class Importer(Struct, frozen=True):
    """A reader of models of one source system. summary: what it reads, with its article.

    module: the dotted name of a module with `read(source: SourceFolder) -> ImportPlan | None`, None where the source is
    of another system. It is imported in a child process that sees nothing but the source.
    """

    name: str
    summary: str
    module: str

    @property
    def callables(self) -> tuple[str, ...]:
        """The functions that it names."""
        return (f"{self.module}:read",)

    def load(self) -> Any:
        """Import the module."""
        return import_module(self.module)


TORCHSERVE = Importer(
    "torchserve",
    "a TorchServe model archive (.mar), a workflow (.war), or a model store of them",
    "edge_runtime_converters.importing.torchserve",
)
MLFLOW_MODELS = Importer(
    "mlflow_models", "an MLflow model's folder (with MLmodel)", "edge_runtime_converters.importing.mlflow_models"
)
BENTOS = Importer(
    "bentos",
    "a BentoML model, bento, model store, or archive of one (.bentomodel, .bento)",
    "edge_runtime_converters.importing.bentos",
)
MODEL_SERVER = Importer(
    "model_server",
    "OpenVINO Model Server's config.json, or the folder that holds it",
    "edge_runtime_converters.importing.model_server",
)
OPTIMUM_EXPORTS = Importer(
    "optimum_exports",
    "an export of Hugging Face Optimum or sentence-transformers (config.json with model.onnx or openvino_model.xml)",
    "edge_runtime_converters.importing.optimum_exports",
)
TRITON = Importer(
    "triton",
    "a Triton model repository (NAME/1/model.onnx, with config.pbtxt)",
    "edge_runtime_converters.importing.triton",
)
