"""Which backend may load which file of a version. Pure: looks at names only; the profile gives order and precision.

Owns: when a variant (`model.int8.onnx`) is taken. Never unless its precision is asked for: less exact is never silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import LoadFailed
from edge_runtime.repository.conversion_advice import conversion_advice
from edge_runtime.repository.folder import VersionFolder
from edge_runtime.repository.names import (
    LOOSE_SUFFIXES,
    VARIANTS,
    artifact_candidates,
    suffix_of,
    variant_name,
    variant_of,
)


@dataclass(frozen=True, slots=True)
class Want:
    """One backend that may load a version. artifacts: file names that it loads, best first.

    precision: what is asked of it, "" for its own.
    """

    backend: str
    artifacts: tuple[str, ...]
    precision: str = ""

    def names(self) -> Iterator[str]:
        """File names that would do, best first: variants of the precision asked for, then the model itself.

        With int8 too: it may hold int8 already, which shows after load; a backend refuses one that does not.
        """
        if self.precision in VARIANTS:
            for name in self.artifacts:
                if suffix_of(name) in LOOSE_SUFFIXES:
                    yield variant_name(name, self.precision)
        yield from self.artifacts


def choose_artifacts(version: VersionFolder, wants: Sequence[Want]) -> list[Path | None]:
    """For each want, the first of its artifacts that the version holds; None where it holds none.

    A file of the right kind under another name stands for the canonical one when it is the only one. At least one is
    found: raises LoadFailed naming what is there and what is wanted.
    """
    chosen = [_choose(version, want) for want in wants]
    if not any(chosen):
        raise LoadFailed(f"model {version.model} version {version.number}: {_why_none(version, wants)}")
    return chosen


def _choose(version: VersionFolder, want: Want) -> Path | None:
    for name in want.names():
        found = artifact_candidates(version.files, name)
        if len(found) == 1:
            return version.files[found[0]]
    return None


def _why_none(version: VersionFolder, wants: Sequence[Want]) -> str:
    wanted = list(dict.fromkeys(name for want in wants for name in want.names()))
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
    backends = ", ".join(dict.fromkeys(want.backend for want in wants))
    reason = f"{version.path} holds {there}; wanted {' or '.join(wanted)} for {backends}"
    variants = sorted({variant_of(name) for name in version.files if suffix_of(name) in LOOSE_SUFFIXES} - {""})
    if variants:
        said = " or ".join(map(repr, variants))
        reason += f"; a variant is loaded only when it is asked for, with precision = {said}"
    return reason
