"""NVIDIA Triton for its users: config.pbtxt, models of its python backend, its words for a model, its metrics."""

from edge_runtime.models.folder_files import FolderFile
from edge_runtime.telemetry.metrics import MetricsDeclaration

CONFIG = FolderFile(
    "config.pbtxt",
    reader="edge_runtime.triton.config:read_config_file",
    loader="edge_runtime.pipelines.loading:PipelineLoader",
)
"""Settings of a model, beside its version folders; those of an ensemble are a pipeline."""

CONFIG_OPTION = "triton.config"
"""The option of a load in which a `model.py` gets them, as JSON."""

METRICS = MetricsDeclaration("triton_names", families="edge_runtime.triton.metrics:families")
"""For dashboards that exist."""
