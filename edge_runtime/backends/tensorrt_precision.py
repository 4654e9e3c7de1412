"""In what precision an engine is built: what was asked for, what the model holds, and what the version allows.

Owns: that table, as pure functions. Precision is never lowered without being asked for, and never silently kept
higher: what cannot be had is an error with what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.backends.onnx_files import ArtifactFiles
from edge_runtime.backends.tensorrt_library import Traits
from edge_runtime.errors import BackendUnavailable, LoadFailed

_KEPT = ("", "f32")
"""Asked for: as the model was exported, with f32 as f32 (TF32 is off unless an option turns it on)."""

_LOWERING = {"f16": "FP16", "bf16": "BF16"}
"""Precision -> the builder flag that lets a weakly typed network run in it."""


@dataclass(frozen=True, slots=True)
class Typing:
    """How a network is typed. is_strong: by the model's own types. flags: builder flags that allow lower ones.

    precision: what that amounts to, for the report, until the engine itself can be asked.
    """

    is_strong: bool
    flags: tuple[str, ...]
    precision: str


def choose_typing(asked: str, files: ArtifactFiles, traits: Traits, title: str) -> Typing:
    """How to type the network of a model. Pure.

    asked: "", "f32", "f16", "bf16" or "int8". title: the library, for messages. Raises LoadFailed: int8 that the model
    does not hold. BackendUnavailable: this version cannot run the model so.
    """
    exported = files.precision or "f32"
    if "bf16" in (asked, exported) and not traits.bf16:
        raise BackendUnavailable(f"{title} has no bf16; export the model in f32 or f16, or install TensorRT 10")
    if asked == "int8" and not files.holds_int8:
        raise LoadFailed(
            f"precision int8 was asked for, and the model holds {exported}: an engine runs in int8 where the model has "
            "quantise and dequantise nodes. `edge-runtime convert --to onnx --precision int8 --for-tensorrt` makes it; "
            "or leave precision out"
        )
    if asked in (*_KEPT, exported, "int8"):
        return _kept(files, exported, traits)
    if not traits.weak_typing:
        raise BackendUnavailable(
            f"{title} runs a model in the precision it was exported in: this one holds {exported}, and {asked} was "
            f"asked for. Put a model in {asked} beside it (`edge-runtime convert --precision {_long(asked)}`), or "
            "leave precision out"
        )
    flags = (_LOWERING[asked], *(("INT8",) if files.holds_int8 else ()))
    return Typing(is_strong=False, flags=flags, precision="mixed" if files.holds_int8 else asked)


def _kept(files: ArtifactFiles, exported: str, traits: Traits) -> Typing:
    """The model's own types. A version that cannot be told so is allowed those that the model holds."""
    precision = "int8" if files.holds_int8 and exported == "mixed" else exported
    if traits.always_strong or traits.strong_flag:
        return Typing(is_strong=True, flags=(), precision=precision)
    flags = (
        *(("INT8",) if files.holds_int8 else ()),
        *(("FP16",) if exported == "f16" or (exported == "mixed" and not files.holds_int8) else ()),
    )
    return Typing(is_strong=False, flags=flags, precision=precision)


def _long(precision: str) -> str:
    return precision.replace("f", "fp", 1) if precision.startswith("f") else precision
