"""Which file of a version each engine loads, and the int8 ones that are made where they are missing.

Owns: where a variant came from: the version, or a conversion kept beside the journal. Thread: one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_runtime.backends.registry import backend
from edge_runtime.errors import BackendError, LoadFailed
from edge_runtime.profiles.profile import BackendChoice
from edge_runtime.repository.artifacts import Want, choose_artifacts
from edge_runtime.repository.digest import sha256_of_file
from edge_runtime.repository.folder import VersionFolder
from edge_runtime.repository.names import VARIANTS, suffix_of, variant_of, weights_name
from edge_runtime.tuning.candidates import PLAIN, Engine, Offer
from edge_runtime.tuning.conversion import INT8, convert, digest_of, recipe_for


@dataclass(frozen=True, slots=True)
class Artifact:
    """The graph that an engine loads. made: files that were converted for it, none where the version has it."""

    graph: Path
    made: tuple[Path, ...] = ()


class EngineArtifacts:
    """Looks up a version's files.

    made_in: the folder of conversions of this version with these inputs. calibration: a file of samples.
    """

    def __init__(self, version: VersionFolder, made_in: Path, calibration: Path) -> None:
        self._version = version
        self._made_in = made_in
        self._calibration = calibration

    def of(self, engine: Engine) -> Artifact:
        """The engine's artifact, made now if need be. Raises LoadFailed, ConversionFailed, StorageFailed."""
        own = own_graph(self._version, engine)
        if own is not None:
            return Artifact(own)
        recipe, source = recipe_for(engine.backend), plain_onnx(self._version)
        if engine.precision != INT8 or recipe is None or source is None:
            raise LoadFailed(f"version {self._version.number} has no {engine.precision or 'plain'} file for it")
        made = convert(recipe, source, self._calibration, self._made_in)
        return Artifact(made[0], made)


def own_graph(version: VersionFolder, engine: Engine) -> Path | None:
    """The file of the version that an engine loads; None where there is none and one would have to be made."""
    found = _find(version, engine.backend, engine.precision)
    is_it = found is not None and (engine.precision != INT8 or variant_of(found.name) == INT8)
    return found if is_it else None


def plain_onnx(version: VersionFolder) -> Path | None:
    """The ONNX model itself, which int8 ones are made of; None where the version has none."""
    try:
        (found,) = choose_artifacts(version, [Want("onnxruntime", ("model.onnx",))])
    except LoadFailed:
        return None
    return found


def offers_of(version: VersionFolder, choices: Sequence[BackendChoice]) -> tuple[dict[str, Offer], list[str]]:
    """What each of the profile's backends can run of a version, and sentences on what cannot be tried."""
    offers: dict[str, Offer] = {}
    notes: list[str] = []
    for name in dict.fromkeys(choice.name for choice in choices):
        try:
            backend(name)
        except BackendError as error:
            notes.append(f"{name} was not tried: {error.message}")
            continue
        variants = frozenset(each for each in VARIANTS if _has_variant(version, name, each))
        offer = Offer(_find(version, name, PLAIN) is not None, variants)
        if INT8 not in variants and offer.has_plain:
            if plain_onnx(version) is not None and recipe_for(name) is not None:
                offer = replace(offer, variants=variants | {INT8})
            else:
                notes.append(f"int8 on {name} was not tried: {_why_no_int8(version, name)}")
        offers[name] = offer
    return offers, notes


def files_of(graph: Path) -> tuple[Path, ...]:
    """A graph and the weights beside it."""
    return (graph, graph.with_name(weights_name(graph.name))) if suffix_of(graph.name) == ".xml" else (graph,)


def settings_precision(engine: Engine, runs_in: str) -> str | None:
    """What `model.toml` says for an engine: f32 is said, so that a profile's lower one does not count."""
    return engine.precision or ("f32" if runs_in == "f32" else None)


def digest_of_version(version: VersionFolder) -> str:
    """Of the model's own files: what is a variant, or was placed by an earlier tune, is another engine's."""
    return digest_of(
        [
            f"{name} {sha256_of_file(path)}"
            for name, path in sorted(version.files.items())
            if not variant_of(_graph(name))
        ]
    )


# ---- private --------------------------------------------------------------------------------------------------------


def _find(version: VersionFolder, name: str, precision: str) -> Path | None:
    try:
        (found,) = choose_artifacts(version, [Want(name, backend(name).artifacts, precision)])
    except BackendError:
        return None
    return found


def _has_variant(version: VersionFolder, name: str, precision: str) -> bool:
    found = _find(version, name, precision)
    return found is not None and variant_of(found.name) == precision


def _why_no_int8(version: VersionFolder, name: str) -> str:
    if plain_onnx(version) is None:
        return "it is made of model.onnx, which the version does not have"
    if name not in ("onnxruntime", "openvino"):
        return f"none is made for {name}; put model.int8.onnx into the version"
    return "the converters are not installed: pip install 'edge-runtime[convert]', or put model.int8.onnx there"


def backend_versions(names: Iterable[str]) -> tuple[str, ...]:
    """Versions of the libraries behind backends, as their packages say them; "" for what is none."""
    from importlib.metadata import PackageNotFoundError, version

    found: list[str] = []
    for name in sorted(names):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(name)
    return tuple(found)


def _graph(name: str) -> str:
    return name.removesuffix(".bin") + ".xml" if name.endswith(".bin") else name
