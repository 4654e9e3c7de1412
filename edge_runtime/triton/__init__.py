"""NVIDIA Triton for its users: config.pbtxt, models of its python backend, its words for a model."""

from edge_runtime.models.folder_files import FolderFile

CONFIG = FolderFile(
    "config.pbtxt",
    reader="edge_runtime.triton.config:read_config_file",
    loader="edge_runtime.pipelines.loading:PipelineLoader",
)
"""Settings of a model, beside its version folders; those of an ensemble are a pipeline."""

CONFIG_OPTION = "triton.config"
"""The option of a load in which a `model.py` gets them, as JSON."""
