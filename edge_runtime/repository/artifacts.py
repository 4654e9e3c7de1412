"""Which backend may load which file of a version. Pure: looks at names only; the profile gives the order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_runtime.errors import LoadFailed
from edge_runtime.repository.conversion_advice import conversion_advice
from edge_runtime.repository.folder import VersionFolder
from edge_runtime.repository.names import artifact_candidates


def choose_artifacts(version: VersionFolder, backends: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, Path]]:
    """Pair each backend with the first of its artifacts that the version holds, in the profile's order.

    backends: (name, file names that it can load, best first). A file of the right kind under another name stands for
    the canonical one when it is the only one. Never empty: raises LoadFailed naming what is there and what is wanted.
    """
    chosen: list[tuple[str, Path]] = []
    for backend, wanted in backends:
        for name in wanted:
            found = artifact_candidates(version.files, name)
            if len(found) == 1:
                chosen.append((backend, version.files[found[0]]))
                break
    if not chosen:
        raise LoadFailed(f"model {version.model} version {version.number}: {_why_none(version, backends)}")
    return chosen


def _why_none(version: VersionFolder, backends: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    wanted = list(dict.fromkeys(name for _, names in backends for name in names))
    if not wanted:
        return "no backend is available to load it; install one (edge-runtime[onnxruntime]) or look at the profile"
    for name in wanted:
        found = artifact_candidates(version.files, name)
        if len(found) > 1:
            return f"{version.path} holds {' and '.join(found)}; which one is the artifact? Name it {name}"
    for name in sorted(version.files):
        advice = conversion_advice(str(version.files[name]))
        if advice is not None:
            files = ", ".join(sorted(version.files))
            return f"{version.path} holds {files}; wanted {' or '.join(wanted)}; {name} {advice}"
    if not version.files and version.problems:
        return "; ".join(map(str, version.problems))
    there = ", ".join(sorted(version.files)) or "nothing"
    return f"{version.path} holds {there}; wanted {' or '.join(wanted)} for {', '.join(name for name, _ in backends)}"
