"""The state of a sequence outside its host: signed text, which a client keeps, and gives back to begin from it.

Owns: the form of that text, what makes one refused, and the daemon's key. The key itself stays in the daemon: a host
gets one made of it for its model and version, so what a host signs is of use to that version alone. Thread: any.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from edge_runtime.backends.base import LibraryInstance
from edge_runtime.durable import read_kept, write_atomically
from edge_runtime.errors import LoadFailed, StorageFailed, UnreadableSnapshot
from edge_runtime.kept_state import SEQUENCE_STATE, STATE_FORM, KeptStates, SequenceOptions
from edge_runtime.model_spec import DYNAMIC, ROW_INPUT, ModelSpec, TensorSpec
from edge_runtime.sequences.states import StatefulInstance, rows_of
from edge_runtime.tensors import DATATYPES, Array, Tensors, element_count

KEY_FILE = "sequences.key"
"""In the state folder: 32 random bytes. Daemons that have the same file take each other's snapshots."""

KEY_BYTES = 32

FORMAT = 1

_key_lock = threading.Lock()


def key_of(state: Path | None, model: str, version: int) -> bytes:
    """Return the key of one version's snapshots; makes the daemon's at its first use. Raises LoadFailed. Thread: any.

    state: the daemon's state folder.
    """
    if state is None:
        raise LoadFailed("snapshot = true needs a folder for its key that survives a restart; name one by `state`")
    path = state / KEY_FILE
    try:
        with _key_lock:
            if not path.exists():
                write_atomically(path, secrets.token_bytes(KEY_BYTES), mode=0o600)
            key = read_kept(path, KEY_BYTES)
    except StorageFailed as error:
        raise LoadFailed(f"snapshot = true: {error.message}") from error
    except OSError as error:
        raise LoadFailed(f"snapshot = true: {path}: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise LoadFailed(f"{path} has {len(key)} bytes, wanted {KEY_BYTES}; copy it again, or remove it for a new one")
    return hmac.digest(key, f"{model}\0{version}".encode(), "sha256")


class SignedState(Struct, frozen=True, array_like=True):
    """One state. name: of the input that takes it. data: little-endian, in C order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class SignedStates(Struct, frozen=True, array_like=True):
    """The content of a snapshot. format: FORMAT."""

    format: int
    model: str
    version: int
    states: tuple[SignedState, ...]


def state_form(instance: LibraryInstance, options: SequenceOptions, rests: KeptStates | None) -> StateForm:
    """Return the form in which a model is asked for states. Raises LoadFailed: it can hand none out, and should.

    rests: what its declared inputs keep of a sequence; None: nothing. A model with such inputs has no other states.
    """
    states = instance if isinstance(instance, StatefulInstance) else None
    if options.settings.snapshot and (states is None or states.keeps_values):
        raise LoadFailed("snapshot = true: a model of code keeps its state itself, so nobody else can hand it out")
    return StateForm(instance.spec, rests or states, options)


class StateForm:
    """The form in which a model is asked about the state of a sequence, as SEQUENCE_STATE says. It does not run.

    A step as any other: it keeps its place among the sequence's requests, and may be the last.
    """

    form = STATE_FORM

    def __init__(self, spec: ModelSpec, states: KeptStates | None, options: SequenceOptions) -> None:
        """states: None where the model keeps them itself."""
        self._states = states
        self._options = options
        tensor = (TensorSpec(SEQUENCE_STATE, "BYTES", (DYNAMIC,)),)
        self.spec = ModelSpec(tensor, tensor, sequences=spec.sequences)

    def run(self, inputs: Tensors) -> list[Array]:
        """Give and take states. Raises UnreadableSnapshot, SequenceLost: no state was taken."""
        sent, rows = inputs[SEQUENCE_STATE], rows_of(inputs[ROW_INPUT])
        if len(sent) != len(rows) or not rows["serial"].all():
            raise UnreadableSnapshot(f"{SEQUENCE_STATE}: wanted one element, and the sequence whose state it is")
        if not self._options.settings.snapshot and any(sent):
            raise UnreadableSnapshot(f"{SEQUENCE_STATE}: this model takes none: set snapshot = true in its [sequence]")
        texts = [b""] * len(rows)
        if self._states is not None:
            each_row = [rows[index : index + 1] for index in range(len(rows))]
            found = [
                self._read(text, self._states.state_specs) if text else self._states.states_of(row)
                for text, row in zip(sent, each_row, strict=True)
            ]
            if self._options.settings.snapshot:
                texts = [self._written(states, self._states.state_specs) for states in found]
            for row, states in zip(each_row, found, strict=True):
                self._states.keep(row, states)
        return [np.array(texts, object)]

    def _written(self, states: Sequence[Array], specs: Sequence[TensorSpec]) -> bytes:
        kept = tuple(
            SignedState(spec.name, spec.datatype, state.shape, np.ascontiguousarray(state).tobytes())
            for spec, state in zip(specs, states, strict=True)
        )
        options = self._options
        data = msgspec.msgpack.encode(SignedStates(FORMAT, options.model, options.version, kept))
        return base64.b64encode(hmac.digest(options.key, data, "sha256") + data)

    def _read(self, text: bytes | str, wanted: Sequence[TensorSpec]) -> list[Array]:
        """Return the states of a snapshot. Raises UnreadableSnapshot with what is wrong with it."""
        options, size = self._options, hashlib.sha256().digest_size
        try:
            signed = base64.b64decode(text, validate=True)
            data = signed[size:]
            snapshot = msgspec.msgpack.decode(data, type=SignedStates)
        except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
            raise UnreadableSnapshot(
                f"{SEQUENCE_STATE}: {len(text)} bytes that are not a snapshot of a sequence, or only a part of one"
            ) from None
        if (snapshot.format, snapshot.model, snapshot.version) != (FORMAT, options.model, options.version):
            raise UnreadableSnapshot(
                f"{SEQUENCE_STATE}: a snapshot of model '{snapshot.model[:100]}' version {snapshot.version}; this is "
                f"'{options.model}' version {options.version}"
                + (f", and reads format {FORMAT}, not {snapshot.format}" if snapshot.format != FORMAT else "")
            )
        if not hmac.compare_digest(hmac.digest(options.key, data, "sha256"), signed[:size]):
            raise UnreadableSnapshot(
                f"{SEQUENCE_STATE}: its signature is not this daemon's: it was changed, or made by a daemon with "
                f"another {KEY_FILE} in its state folder"
            )
        if len(snapshot.states) != len(wanted) or not all(map(_is_of, snapshot.states, wanted)):
            raise UnreadableSnapshot(
                f"{SEQUENCE_STATE}: its states are {_listed(snapshot.states)}; this model keeps {_listed(wanted)}"
            )
        return [
            np.frombuffer(each.data, DATATYPES[each.datatype].dtype).reshape(each.shape) for each in snapshot.states
        ]


def _is_of(state: SignedState, spec: TensorSpec) -> bool:
    is_alike = (state.name, state.datatype) == (spec.name, spec.datatype) and spec.fits(state.shape)
    return is_alike and len(state.data) == element_count(state.shape) * DATATYPES[state.datatype].itemsize


def _listed(tensors: Sequence[SignedState | TensorSpec]) -> str:
    return ", ".join(f"'{each.name[:100]}' {each.datatype} {list(each.shape)}" for each in tensors) or "none"
