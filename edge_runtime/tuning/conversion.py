"""int8 models made on the spot, where the converters are installed; kept, so that a tune that goes on needs no second.

Owns: for which backend what is made, and where it is kept. The libraries run in a child process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from edge_runtime.errors import ConversionFailed
from edge_runtime.repository.durable import make_folder
from edge_runtime.repository.names import variant_name, weights_name
from edge_runtime.serving.trial_process import run_child
from edge_runtime.tuning import conversion_child
from edge_runtime.tuning.conversion_child import Finding, Request
from edge_runtime.tuning.engine_trial import why_ended

LIMIT_S = 900.0
"""NNCF takes ten seconds for ResNet-18 on two cores of a server; a Raspberry Pi is thirty times slower."""

INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is made for a backend: the plain file's name that the variant is of, and the packages that it takes."""

    plain: str
    packages: tuple[str, ...]


_RECIPES = {
    "onnxruntime": (Recipe("model.onnx", ("edge_runtime_converters", "onnx", "onnxruntime")),),
    "openvino": (
        Recipe("model.xml", ("edge_runtime_converters", "nncf", "openvino")),
        Recipe("model.onnx", ("edge_runtime_converters", "onnx", "onnxruntime")),
    ),
}
"""Best first. TensorRT is left out: it takes no uint8 activations, which CPUs are quickest with."""

MAKERS = ("nncf", "onnxruntime", "openvino")
"""Packages that decide what is made: with another version of one, an int8 model is made again."""


def recipe_for(backend: str) -> Recipe | None:
    """How an int8 model for a backend can be made here; None where it cannot."""
    for recipe in _RECIPES.get(backend, ()):
        if all(find_spec(package) is not None for package in recipe.packages):
            return recipe
    return None


def convert(recipe: Recipe, source: Path, calibration: Path, folder: Path) -> tuple[Path, ...]:
    """The files of the int8 model: made in `folder`, or there already. The graph comes first.

    source: the plain ONNX model. calibration: a file of inputs. folder: one for this source and these inputs. Raises
    ConversionFailed, StorageFailed.
    """
    target = folder / variant_name(recipe.plain, INT8)
    files = (target, target.with_name(weights_name(target.name))) if target.suffix == ".xml" else (target,)
    if all(file.is_file() for file in files):
        return files
    make_folder(folder)
    request = Request(str(source.absolute()), str(target.absolute()), str(calibration.absolute()))
    ended = run_child(conversion_child.__name__, msgspec.json.encode(request), limit_s=LIMIT_S)
    try:
        fault = msgspec.json.decode(ended.answer, type=Finding).fault
    except msgspec.DecodeError:
        fault = why_ended(ended, LIMIT_S)
    if fault:
        raise ConversionFailed(f"no int8 model was made: {fault}")
    return files


def digest_of(parts: Sequence[str]) -> str:
    """One name for several facts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
