"""Which backend may load which file of a version, and what a version lacks that no backend loads.

Owns: when a variant (`model.int8.onnx`) is taken: only where the profile or the settings ask for its precision, so that
a loss of precision is never silent; or where it is all that its owner put there, which the model's status says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime import plugins
from edge_runtime.errors import LoadFailed
from edge_runtime.models.folder import VersionFolder
from edge_runtime.models.kinds import LFS_POINTER, WEB_PAGE, kind_of, may_be_model, what_it_lacks
from edge_runtime.models.names import (
    VARIANTS,
    artifact_candidates,
    loose_suffixes,
    plugged_artifacts,
    suffix_of,
    variant_name,
    variant_of,
)


class Want(Struct, frozen=True):
    """A backend that may load a version. artifacts: names of files that it loads, best first.

    precision: asked of the backend, "" for its own. beside: files without which it loads none; with them an artifact
    has its own name.
    """

    backend: str
    artifacts: tuple[str, ...]
    precision: str = ""
    beside: tuple[str, ...] = ()

    def names(self) -> Iterator[str]:
        """Yield the file names that fit, best first: variants of the asked precision, then the model itself.

        With int8 too: the model itself may hold int8, which shows after its load; a backend refuses one that does not.
        """
        if self.precision in VARIANTS:
            for name in self.artifacts:
                if suffix_of(name) in loose_suffixes():
                    yield variant_name(name, self.precision)
        yield from self.artifacts

    def find(self, version: VersionFolder) -> Path | None:
        """Return the first of its artifacts that the version has; None where it has none, or several and no name."""
        if self.beside:
            has_all = all(name in version.files for name in self.beside)
            return next((version.files[name] for name in self.artifacts if has_all and name in version.files), None)
        for name in self.names():
            found = artifact_candidates(version.files, name) or _of_kind(version, name)
            path = version.files[found[0]] if len(found) == 1 else None
            if path is not None and _may_be_loaded(path):
                return path
        return None


def choose_artifacts(version: VersionFolder, wants: Sequence[Want]) -> list[Path | None]:
    """Return for each want the first of its artifacts that the version has; None where it has none.

    A file of the right kind under another name stands for the canonical one when it is the only one, and so does a
    variant where there is no other model. Raises LoadFailed, naming the files there and those wanted, where none is
    found at all.
    """
    chosen = [want.find(version) for want in wants]
    if not any(chosen) and (lone := _lone_precision(version)):
        chosen = [replace(want, precision=lone).find(version) for want in wants]
    if not any(chosen):
        raise LoadFailed(_why_none(version, wants))
    return chosen


def _lone_precision(version: VersionFolder) -> str:
    """Return the precision of a version's models where all are variants of that one; else ""."""
    found = {variant_of(name) for name in version.files if suffix_of(name) in loose_suffixes()}
    return found.pop() if len(found) == 1 else ""


def _of_kind(version: VersionFolder, wanted: str) -> tuple[str, ...]:
    """Return the files whose bytes say that they are of the kind of `wanted`, where it usually has another suffix.

    `best.torchscript` stands for `model.pt`.
    """
    found = []
    for name, path in version.files.items():
        kind = kind_of(path) if may_be_model(name) and suffix_of(name) not in loose_suffixes() else None
        if kind is not None and kind.is_model and f"model{kind.suffixes[0]}" == wanted:
            found.append(name)
    return tuple(sorted(found))


def _may_be_loaded(path: Path) -> bool:
    """Return whether a backend may take a file, whatever its name says: no Git LFS pointer, web page, empty file.

    And none of a kind that is only ever converted. A file with the suffix of a plug-in's artifacts is that plug-in's,
    whatever its bytes look like.
    """
    kind = kind_of(path)
    if kind is None or kind.served_with or kind.is_refused_by_backend:
        return True
    return kind not in (LFS_POINTER, WEB_PAGE) and suffix_of(path.name) in map(suffix_of, plugged_artifacts())


def _is_of_model(path: Path) -> bool:
    kind = kind_of(path) if may_be_model(path.name) else None
    return kind is not None and kind.is_model


def _why_none(version: VersionFolder, wants: Sequence[Want]) -> str:
    wanted = list(dict.fromkeys(name for want in wants for name in want.names()))
    if not wanted:
        extra = plugins.declared("backends", plugins.names("backends")[0]).extra
        return f"no backend is available to load it; install one (edge-runtime[{extra}]) or look at the profile"
    for name in wanted:
        found = artifact_candidates(version.files, name)
        if len(found) > 1:
            return f"{version.path} holds {' and '.join(found)}; which one is the artifact? Name it {name}"
    # A model that lacks only its library comes before a file that nothing serves.
    names = sorted(version.files, key=lambda name: (not _is_of_model(version.files[name]), name))
    lacks = {name: what_it_lacks(str(version.files[name])) for name in names}
    is_all_said = all(lacks[name] is not None for name in lacks if suffix_of(name) in loose_suffixes())
    if said := "; ".join(f"{name} {lack}" for name, lack in lacks.items() if lack is not None):
        return said if is_all_said else f"{version.path} holds {', '.join(lacks)}; wanted {' or '.join(wanted)}; {said}"
    if not version.files and version.problems:
        return "; ".join(map(str, version.problems))
    there = ", ".join(sorted(version.files)) or "nothing"
    below = sorted(name for name, *_ in version.fingerprint if may_be_model(name.rpartition("/")[2]))
    if not version.files and below:
        return f"{version.path} holds {below[0]}, a folder too deep; move what is in that folder to {version.path}"
    backends = ", ".join(dict.fromkeys(want.backend for want in wants))
    reason = f"{version.path} holds {there}; wanted {' or '.join(wanted)} for {backends}"
    variants = sorted({variant_of(name) for name in version.files if suffix_of(name) in loose_suffixes()} - {""})
    if variants:
        said = " or ".join(map(repr, variants))
        reason += f"; a variant is loaded only when it is asked for, with precision = {said}"
    return reason
