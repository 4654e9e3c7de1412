"""A model tried in a child process, with limits of time and memory; what it said, as values.

Never loads anything in this process. Called by `releases`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime.errors import PublishError
from edge_runtime.publish import trial_child
from edge_runtime.publish.trial_child import Request, Result
from edge_runtime.serving.trial_process import run_child
from edge_runtime.telemetry.host import HostProbe

LIMIT_S = 300.0
"""A large model on a slow laptop loads in a minute."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a run of one artifact told, and the golden tensors as bytes. artifact: the file's name."""

    backend: str
    artifact: str
    result: Result
    golden: bytes


def try_artifact(
    backend: str,
    artifact: Path,
    settings: Mapping[str, Any],
    *,
    precision: str = "",
    golden: Path | None = None,
    limit_s: float = LIMIT_S,
) -> Trial:
    """Load an artifact and run it twice on its golden input.

    precision: of a variant, "" for the model itself. golden: an .npz with one array an input; None: made up.

    Raises PublishError: it cannot be loaded or run, crashes, takes too long, or answers what no device can be held to.
    """
    with tempfile.TemporaryDirectory(prefix="edge-runtime-trial-") as out:
        absolute = str(golden.resolve()) if golden is not None else ""
        free_bytes = HostProbe().memory_available_bytes() or 0
        request = Request(backend, str(artifact.resolve()), dict(settings), absolute, out, free_bytes, precision)
        ended = run_child(trial_child.__name__, msgspec.json.encode(request), limit_s=limit_s)
        if ended.is_late:
            raise PublishError(f"{artifact.name}: was not loaded and run within {limit_s:g} s; nothing was published")
        if ended.signal:
            raise PublishError(
                f"{artifact.name}: ended the process that tried it ({ended.signal}); nothing was published"
            )
        try:
            result = msgspec.json.decode((Path(out) / "result.json").read_bytes(), type=Result)
        except FileNotFoundError:
            raise PublishError(
                f"{artifact.name}: its trial ended without a result: {ended.said or 'it said nothing'}"
            ) from None
        if result.error:
            raise PublishError(f"{artifact.name}: {backend}: {result.error}; nothing was published")
        return Trial(backend, artifact.name, result, (Path(out) / "golden.bin").read_bytes())
