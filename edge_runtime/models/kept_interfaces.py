"""The tensors that clients of a model rely on, compared with those of a version that is to answer them.

Owns: what clients bear (another order, more outputs, optional inputs, wider shapes) and what they do not; and the files
below the state folder that remember, over restarts, what `[versions] hold_interface` holds. Thread: the loader's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from edge_runtime.durable import read_kept, write_atomically
from edge_runtime.errors import LoadFailed, StorageFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.models.folder import is_owned_name

if TYPE_CHECKING:
    from edge_runtime.models.servable import Servable

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 1 << 20
"""A tensor takes some 100 bytes, and a model has at most some hundred."""


class KeptTensor(Struct, frozen=True):
    """One input or output. lengths: -1 is open."""

    name: str
    datatype: str
    lengths: tuple[int, ...]


class KeptInterface(Struct, frozen=True):
    """The tensors of the version that clients used last."""

    version: int
    inputs: tuple[KeptTensor, ...]
    outputs: tuple[KeptTensor, ...]

    def spec(self) -> ModelSpec:
        """Return them as a model has them."""
        inputs, outputs = (
            tuple(TensorSpec(each.name, each.datatype, each.lengths) for each in side)
            for side in (self.inputs, self.outputs)
        )
        return ModelSpec(inputs, outputs)


_KEPT = msgspec.json.Decoder(KeptInterface)  # made by the thread that imports this, as hosts/messages.py says


class KeptInterfaces:
    """The interfaces that are held, one file a model. folder None: they are not remembered over a restart."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, model: str) -> KeptInterface | None:
        """Return the interface that is held of a model; None where none is."""
        if self._folder is None:
            return None
        try:
            return _KEPT.decode(read_kept(self._folder / f"{model}.json", MAX_KEPT_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("what clients of a model use is not readable: %s", error, extra={"model": model})
            return None

    def keep(self, model: str, version: int, spec: ModelSpec) -> None:
        """Remember the interface of a version that answers clients from now on."""
        kept = KeptInterface(version, *map(_kept, (spec.inputs, spec.outputs)))
        if self._folder is None or self.find(model) == kept:
            return
        try:
            write_atomically(self._folder / f"{model}.json", msgspec.json.encode(kept))
        except StorageFailed as error:
            log.warning("an interface is held until the next restart only: %s", error, extra={"model": model})

    def keep_published(self, servable: Servable, live: Sequence[Servable]) -> None:
        """Remember the interface that clients use from now on, where a published version holds that of its model.

        live: of its model.
        """
        if not servable.settings.versions.hold_interface:
            self.forget(servable.model)
        elif servable.number == max(each.number for each in live):
            self.keep(servable.model, servable.number, servable.spec)

    def check(self, candidate: Servable, live: Sequence[Servable]) -> str:
        """Return why clients of the model could not go on with a version that is to answer them, "" where they could.

        live: of its model. Raises LoadFailed where the model holds its interface.
        """
        fault = self._why_clients_fail(candidate, live)
        if fault and candidate.settings.versions.hold_interface:
            raise LoadFailed(
                f"clients of the model could not use it: {fault}. [versions] hold_interface = true holds what they "
                "use: give it another model's name, or set that to false in model.toml"
            )
        return fault

    def _why_clients_fail(self, candidate: Servable, live: Sequence[Servable]) -> str:
        """As `why_clients_fail`, by what answers now, else by what was held; "" of a version that is older."""
        if is_owned_name(candidate.model):
            return ""  # only its pipeline asks it, which comes with it
        current = max(live, key=lambda each: each.number, default=None)
        if current is not None:
            return why_clients_fail(current.spec, candidate.spec) if candidate.number >= current.number else ""
        held = self.find(candidate.model) if candidate.settings.versions.hold_interface else None
        return why_clients_fail(held.spec(), candidate.spec) if held and candidate.number >= held.version else ""

    def forget(self, model: str) -> None:
        """Hold nothing of a model any more."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / f"{model}.json").unlink(missing_ok=True)


def why_clients_fail(before: ModelSpec, now: ModelSpec) -> str:
    """Return why clients of one interface could not go on with another; "" where they can."""
    return "; ".join((*_input_faults(before, now), *_output_faults(before, now)))


# ---- private --------------------------------------------------------------------------------------------------------


def _kept(tensors: tuple[TensorSpec, ...]) -> tuple[KeptTensor, ...]:
    return tuple(KeptTensor(each.name, each.datatype, each.shape) for each in tensors)


def _input_faults(before: ModelSpec, now: ModelSpec) -> Iterator[str]:
    """Compare inputs: the new version must take each old one, in each shape that was right, and need no more."""
    known = {each.name: each for each in before.inputs}
    for each in now.inputs:
        if each.name not in known and not each.is_optional:
            yield f"input {each.name!r} is new"
    yield from _faults("input", known, {each.name: each for each in now.inputs})


def _output_faults(before: ModelSpec, now: ModelSpec) -> Iterator[str]:
    """Compare outputs: the new version must return each old one, of no shape that it could not have before."""
    yield from _faults("output", *({each.name: each for each in spec.outputs} for spec in (before, now)))


def _faults(kind: str, before: Mapping[str, TensorSpec], now: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name, was in before.items():
        new = now.get(name)
        if new is None:
            yield f"{kind} {name!r} is gone (there are {', '.join(now) or 'none'})"
        elif new.datatype != was.datatype or not _bears(kind, was.shape, new.shape):
            words = [f"{each.datatype} {list(each.shape)}" for each in (was, new)]
            yield f"{kind} {name!r} was {words[0]}, and is {words[1]}"


def _bears(kind: str, was: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether shapes that were right for an input still are, or those of an output are such as came before."""
    narrow, wide = (was, new) if kind == "input" else (new, was)
    return len(was) == len(new) and all(most in {DYNAMIC, length} for length, most in zip(narrow, wide, strict=True))
