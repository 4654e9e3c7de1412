"""A request, by whichever door, and an answer as callers see it. Values only; no wire, no threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import Struct, field

from edge_runtime.answers import Answer
from edge_runtime.tensors import Array

UNNAMED = ""
"""Name of a tensor in a request that stands for the input that takes files, whatever the model calls it."""


TEXT = "text"
"""Name of the input that takes texts, unless a model's `[input.NAME]` has another; and the key of them in JSON."""


RAW, TOP_K = "raw", "top_k"
"""Parameters of a request that declared steps read: bare outputs, or answers to the model's own tensors; and most
classes in the words of an answer."""


def is_picture(data: bytes) -> bool:
    """Whether bytes begin as a JPEG, PNG, WebP, BMP or GIF, which hosts decode; no JSON and no msgpack array does."""
    return data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF8")) or (
        data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    )


def is_sound(data: bytes) -> bool:
    """Whether bytes begin as a WAV or FLAC, which hosts decode; no JSON and no msgpack array does."""
    return data.startswith(b"fLaC") or (data[:4] == b"RIFF" and data[8:12] == b"WAVE")


_OTHER_PICTURES = (
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"<svg", "SVG"), (b"<?xml", "SVG or other XML"), (b"%PDF", "PDF"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"), (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"),
)  # fmt: skip


def other_picture(data: bytes) -> str:
    """The kind of a picture that hosts do not decode, by its first bytes; "" for what is none that is known.

    No JSON and no msgpack array begins so.
    """
    head = data[:64].lstrip()
    for start, name in _OTHER_PICTURES:
        if head.startswith(start) or data.startswith(start):
            return name
    if data[4:8] == b"ftyp":
        return f"{data[8:12].decode('ascii', 'replace').strip()} (HEIF)"
    return ""


class RegionPlace(NamedTuple):
    """Where a tensor lies in shared memory: a region of its sender, and the byte at which it begins.

    nbytes: of an output, the most that may be written there; None: up to the region's end.
    """

    region: int
    offset: int
    nbytes: int | None = None


class TensorHeader(Struct, frozen=True):
    """One tensor of a header; `shape` is the whole shape, batch axis included. place: None: in a frame."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    place: RegionPlace | None = None


class RequestHeader(Struct, frozen=True):
    """A decoded request header. `op` "infer" uses all fields; other ops use `model`, `version` and `parameters`.

    output_places: where each of `outputs` is written, None: to a frame; empty: all to frames. queue_timeout_ms:
    Triton's `timeout`, which bounds the wait in a queue with `[queue]`, and is a deadline elsewhere. priority: 0 for
    the model's default, 1 first. level: the level that it asks for in a queue with `[queue]`, 0 for the default; None:
    as its priority. sequence: None where it is not said here. has_extra: a further frame comes behind the tensors.
    stream: its answer is wanted in parts, each as it comes.
    """

    op: str = "infer"
    model: str = ""
    version: int | None = None
    inputs: tuple[TensorHeader, ...] = ()
    outputs: tuple[str, ...] | None = None
    timeout_ms: float | None = None
    priority: int = 0
    timing: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    output_places: tuple[RegionPlace | None, ...] = ()
    queue_timeout_ms: float | None = None
    level: int | None = None
    sequence: SequenceStep | None = None
    has_extra: bool = False
    stream: bool = False

    @property
    def asked_level(self) -> int:
        """The level that it asks for, see `level`."""
        return self.priority if self.level is None else self.level

    @property
    def has_places(self) -> bool:
        """Whether an input or an output lies in shared memory."""
        return bool(self.output_places) or any(tensor.place is not None for tensor in self.inputs)


MAX_SEQUENCE_ID = (1 << 64) - 1
"""Of one that is a number: UINT64, as Triton has it."""

SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END = "sequence_id", "sequence_start", "sequence_end"
"""Parameters of a request, as the Open Inference Protocol's extension has them."""


class SequenceStep(Struct, frozen=True):
    """The sequence that a request belongs to, and whether it is its first or its last. id: 0 or "": none."""

    id: int | str
    start: bool = False
    end: bool = False


class Timing(Struct, frozen=True):
    """Where the time of one request went, and how many rows its batch had."""

    queue_ms: float
    run_ms: float
    batch_rows: int


@dataclass(frozen=True, slots=True)  # a Struct cannot be a Mapping too
class InferResult(Mapping[str, Array]):
    """An answer: output arrays by name in the order asked for, and the version that gave it.

    It is a mapping of its outputs: `result["scores"]`, `for name in result`, `result.items()`. Shapes: axis 0 is rows
    for a model that batches. shared: the inputs that went by their place in shared memory. answers: one a row, where
    declared steps make answers. part: its number in an answer that comes in parts, from 0; final: it is the last.
    """

    model: str
    version: int
    outputs: dict[str, Array]
    timing: Timing | None = None
    shared: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    part: int = 0
    final: bool = True

    @property
    def answer(self) -> Answer:
        """The answer to the one picture that was sent. Raises ValueError where there is not exactly one."""
        if len(self.answers) == 1:
            return self.answers[0]
        if self.answers:
            raise ValueError(f"there are {len(self.answers)} answers, one a row; take them from `answers`")
        raise ValueError(
            f"model {self.model!r} gave tensors and no answer: it declares no [output.NAME] in model.toml, or it was "
            "asked with its own tensors (raw=False gives answers to them too) or with raw=True; see `outputs`"
        )

    def __getitem__(self, name: str) -> Array:
        """One output by name. Raises KeyError naming the outputs that are there."""
        try:
            return self.outputs[name]
        except KeyError:
            raise KeyError(f"no output {name!r}; got {', '.join(self.outputs)}") from None

    def __iter__(self) -> Iterator[str]:
        """The names of the outputs."""
        return iter(self.outputs)

    def __len__(self) -> int:
        """How many outputs there are."""
        return len(self.outputs)
