"""Served models put together as one."""

from edge_runtime.models.folder_files import FolderFile

STEPS_FILE = "steps.py"
"""The functions of Python steps."""

PIPELINE = FolderFile("pipeline.toml", beside=(STEPS_FILE,), loader="edge_runtime.pipelines.loading:PipelineLoader")
"""In a model's folder, or in a version's."""
