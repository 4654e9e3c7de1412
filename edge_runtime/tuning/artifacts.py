"""The file that each way loads: the version's own, or an int8 model that the converters make where it is missing.

Owns: which file a way loads, how int8 models are made and kept for the next tune, and the copies that candidates are
served from. The converters' libraries run in a child process. Thread: one owner.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from edge_runtime.backends.registry import installed
from edge_runtime.durable import make_folder
from edge_runtime.errors import BackendError, ConversionFailed, LoadFailed
from edge_runtime.extras import install_advice
from edge_runtime.models.artifacts import Want, choose_artifacts
from edge_runtime.models.digest import sha256_of_file
from edge_runtime.models.folder import VersionFolder
from edge_runtime.models.names import VARIANTS, suffix_of, variant_name, variant_of, weights_name
from edge_runtime.profiles.profile import BackendChoice
from edge_runtime.sandbox.child import named_files, run_child
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.tuning.candidates import PLAIN, Offer, Way
from edge_runtime.tuning.folders import ModelCopy
from edge_runtime.tuning.results import digest_of
from edge_runtime.tuning.trial import read_arrays

INT8 = "int8"

MAKERS = ("nncf", "onnxruntime", "openvino")
"""Packages that decide an int8 model's content: with another version of one, it is made again."""

CONVERSION_LIMIT_S = 900.0
"""NNCF takes ten seconds for ResNet-18 on two cores of a server; a Raspberry Pi is thirty times slower."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to make an int8 model. plain: its file without the variant. maker: the converter. needs: packages."""

    plain: str
    maker: str
    needs: tuple[str, ...]


# Named, not imported: the converters import this package, never the other way.
_BY_ONNXRUNTIME = Recipe("model.onnx", "edge_runtime_converters.int8_from_onnx", ("onnx", "onnxruntime"))
_BY_NNCF = Recipe("model.xml", "edge_runtime_converters.openvino_from_onnx", ("nncf", "openvino"))

_RECIPES = {"onnxruntime": (_BY_ONNXRUNTIME,), "openvino": (_BY_NNCF, _BY_ONNXRUNTIME)}
"""Best first. TensorRT has none: it takes no uint8 activations, which CPUs are quickest with."""


class WayFiles:
    """Finds the graph of each way, makes it where it is missing, and copies it to where candidates are served from.

    made_in: the folder for int8 models of this version and these inputs. calibration: a file of samples.
    """

    def __init__(self, version: VersionFolder, copy: ModelCopy, made_in: Path, calibration: Path) -> None:
        self._version = version
        self._copy = copy
        self._made_in = made_in
        self._calibration = calibration
        self._copied: dict[Way, tuple[Path, tuple[Path, ...]]] = {}
        self._digests: dict[Path, str] = {}

    def graph_of(self, way: Way) -> Path:
        """The copied graph of a way. Raises LoadFailed, ConversionFailed, StorageFailed: it has none."""
        return self._files_of(way)[0]

    def made_for(self, way: Way) -> tuple[Path, ...]:
        """The files that were made for a way, the graph first; none where the version has them. Raises: as graph_of."""
        return self._files_of(way)[1]

    def digest_of(self, way: Way) -> str:
        """The digest of a variant's graph; "" for the plain model, whose digest is in every result's name.

        Raises: as graph_of.
        """
        graph = self.graph_of(way)
        if variant_of(graph.name) and graph not in self._digests:
            self._digests[graph] = sha256_of_file(graph)
        return self._digests.get(graph, "")

    def _files_of(self, way: Way) -> tuple[Path, tuple[Path, ...]]:
        if way not in self._copied:
            made: tuple[Path, ...] = ()
            graph = own_graph(self._version, way)
            if graph is None:
                graph, *_ = made = self._make(way)
                self._copy.add(made)
            self._copied[way] = self._copy.folder / graph.name, made
        return self._copied[way]

    def _make(self, way: Way) -> tuple[Path, ...]:
        recipe, source = recipe_for(way.backend), plain_onnx(self._version)
        if way.precision != INT8 or recipe is None or source is None:
            raise LoadFailed(f"version {self._version.number} has no {way.precision or 'plain'} file for it")
        return make_int8(recipe, source, self._calibration, self._made_in)


def own_graph(version: VersionFolder, way: Way) -> Path | None:
    """The file of the version that a way loads; None where the version has none."""
    found = _find(version, way.backend, way.precision)
    is_it = found is not None and (way.precision != INT8 or variant_of(found.name) == INT8)
    return found if is_it else None


def plain_onnx(version: VersionFolder) -> Path | None:
    """The unchanged ONNX model, which int8 models are made from; None where the version has none."""
    try:
        (found,) = choose_artifacts(version, [Want("onnxruntime", ("model.onnx",))])
    except LoadFailed:
        return None
    return found if found is not None and not variant_of(found.name) else None


def offers_of(version: VersionFolder, choices: Sequence[BackendChoice]) -> tuple[dict[str, Offer], list[str]]:
    """List the artifacts that each of the profile's backends can run, and a sentence on each one left out."""
    offers: dict[str, Offer] = {}
    notes: list[str] = []
    for name in dict.fromkeys(choice.name for choice in choices):
        try:
            installed(name)
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


def settings_precision(way: Way, runs_in: str) -> str | None:
    """The precision for `model.toml`: f32 is written out, so that a profile's lower one does not apply."""
    return way.precision or ("f32" if runs_in == "f32" else None)


def digest_of_version(version: VersionFolder) -> str:
    """The digest of the model's own files, without variants, which belong to other ways."""
    return digest_of(
        [
            f"{name} {sha256_of_file(path)}"
            for name, path in sorted(version.files.items())
            if not variant_of(f"{name.removesuffix('.bin')}.xml" if name.endswith(".bin") else name)
        ]
    )


def package_versions(names: Iterable[str]) -> tuple[str, ...]:
    """Names of packages with their versions; the name alone where it is not an installed package."""
    from importlib.metadata import PackageNotFoundError, version

    found: list[str] = []
    for name in sorted(names):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(name)
    return tuple(found)


# ---- int8 models ----------------------------------------------------------------------------------------------------


class Int8Task(Struct, frozen=True):
    """An ONNX model, the .onnx or .xml to make, the file of inputs to calibrate with, and the converter's module.

    work: a folder for temporary files.
    """

    source: str
    destination: str
    calibration: str
    maker: str
    work: str


def recipe_for(backend_name: str) -> Recipe | None:
    """Find a way to make an int8 model for a backend here; None where there is none."""
    for recipe in _RECIPES.get(backend_name, ()):
        if all(find_spec(package) is not None for package in (recipe.maker.partition(".")[0], *recipe.needs)):
            return recipe
    return None


def make_int8(recipe: Recipe, source: Path, calibration: Path, folder: Path) -> tuple[Path, ...]:
    """Make an int8 model in `folder`, unless it is there; returns its files, the graph first.

    source: the plain ONNX model. calibration: a file of inputs. folder: one for this source and these inputs. Raises
    ConversionFailed, StorageFailed.
    """
    destination = folder / variant_name(recipe.plain, INT8)
    files = (
        (destination, destination.with_name(weights_name(destination.name)))
        if suffix_of(destination.name) == ".xml"
        else (destination,)
    )
    if all(file.is_file() for file in files):
        return files
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-int8-") as work:
        task = Int8Task(
            str(source.absolute()), str(destination.absolute()), str(calibration.absolute()), recipe.maker, work
        )
        ending = run_child(
            convert_to_int8,
            task,
            limit_s=CONVERSION_LIMIT_S,
            reads=[source.parent, *named_files(source), calibration],
            writes=[folder, Path(work)],
        )
    if ending.result is None:
        raise ConversionFailed(f"no int8 model was made: {ending.reason}")
    return files


def convert_to_int8(task: Int8Task, _progress: ShowProgress) -> str:
    """Convert, in the child, and return the destination: the libraries take hundreds of MB. Raises: as they do."""
    tempfile.tempdir = os.environ["TMPDIR"] = task.work
    calibration = read_arrays(Path(task.calibration))
    import_module(task.maker).quantise(Path(task.source), Path(task.destination), calibration)
    return task.destination


# ---- private --------------------------------------------------------------------------------------------------------


def _find(version: VersionFolder, name: str, precision: str) -> Path | None:
    try:
        (found,) = choose_artifacts(version, [Want(name, installed(name).artifacts, precision)])
    except BackendError:
        return None
    is_unasked = found is not None and variant_of(found.name) not in ("", precision)  # a lone variant
    return None if is_unasked else found


def _has_variant(version: VersionFolder, name: str, precision: str) -> bool:
    found = _find(version, name, precision)
    return found is not None and variant_of(found.name) == precision


def _why_no_int8(version: VersionFolder, name: str) -> str:
    if plain_onnx(version) is None:
        return "it is made from model.onnx, which the version does not have"
    if name not in _RECIPES:
        return f"none is made for {name}; put model.int8.onnx into the version"
    return f"the converters are not installed; {install_advice('convert-onnx')}; or put model.int8.onnx there"
