"""TorchServe for its users: archives, handlers, its requests."""

from edge_runtime.models.folder_files import FolderFile

HANDLER = FolderFile("torchserve.json", counts_requests=True)
"""Beside the `model.py` of an archive: what its handler was served with, whose batchSize is `max_batch_rows`."""
