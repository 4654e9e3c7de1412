"""A model tried in a child process, with limits of time and memory; what it said, as values.

Never loads anything in this process. Called by `releases`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import edge_runtime
from edge_runtime.errors import PublishError
from edge_runtime.publish.trial_child import Request, Result

LIMIT_S = 300.0
"""A large model on a slow laptop loads in a minute."""

_SHOWN_CHARACTERS = 600

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Trial:
    """What a run of one artifact told, and the golden tensors as bytes."""

    backend: str
    result: Result
    golden: bytes


def try_artifact(
    backend: str,
    artifact: Path,
    settings: Mapping[str, Any],
    *,
    golden: Path | None = None,
    limit_s: float = LIMIT_S,
) -> Trial:
    """Load an artifact and run it twice on its golden input. golden: an .npz with one array an input; None: made up.

    Raises PublishError: it cannot be loaded or run, crashes, takes too long, or answers what no device can be held to.
    """
    with tempfile.TemporaryDirectory(prefix="edge-runtime-trial-") as out:
        absolute = str(golden.resolve()) if golden is not None else ""
        request = Request(backend, str(artifact.resolve()), dict(settings), absolute, out, _free_memory_bytes())
        said = _run(request, artifact.name, limit_s)
        try:
            result = msgspec.json.decode((Path(out) / "result.json").read_bytes(), type=Result)
        except FileNotFoundError:
            raise PublishError(
                f"{artifact.name}: its trial ended without a result: {said or 'it said nothing'}"
            ) from None
        if result.error:
            raise PublishError(f"{artifact.name}: {backend}: {result.error}; nothing was published")
        return Trial(backend, result, (Path(out) / "golden.bin").read_bytes())


def _run(request: Request, name: str, limit_s: float) -> str:
    """Run the child to its end. Returns the end of what it printed."""
    package = str(Path(edge_runtime.__file__).resolve().parents[1])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        child = subprocess.run(
            [sys.executable, "-m", "edge_runtime.publish.trial_child"],
            input=msgspec.json.encode(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",  # `-m` puts the working folder on the path; a publisher's could hold anything
            env={**_environment(), "PYTHONPATH": os.pathsep.join(paths)},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PublishError(f"{name}: was not loaded and run within {limit_s:g} s; nothing was published") from None
    if child.returncode < 0:
        ended = signal.Signals(-child.returncode).name
        raise PublishError(f"{name}: ended the process that tried it ({ended}); nothing was published")
    return child.stdout.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]


def _environment() -> dict[str, str]:
    """What libraries need of the environment; keys and passphrases may be in it too, and a model may be hostile."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _free_memory_bytes() -> int:
    """What the kernel could give without swapping; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0
