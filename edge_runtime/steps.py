"""Steps that `model.toml` declares: how what callers send becomes the model's inputs, and its outputs an answer.

Values only. A capability has a table of its own for inputs of its kind: pictures, texts. A host runs the steps beside
the model (hosts/steps_instance.py); answers.py has what callers get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Meta, Struct, convert, field, to_builtins
from msgspec.structs import force_setattr, replace

from edge_runtime import plugins

if TYPE_CHECKING:  # a verb's help reads settings, and no numbers
    import numpy as np

    from edge_runtime.model_spec import TensorSpec
    from edge_runtime.tensors import Array

BoxLayout = Literal[
    "yolov5", "yolov8", "yolov10", "yolov11", "yolox", "yolonas", "ssd", "detr", "dfine", "rfdetr", "rtdetr",
    "yolov8-obb",
]  # fmt: skip
Pool = Literal["mean", "cls"]
"""How vectors of tokens become one of the text: their mean where the attention mask is 1, or the first token's."""

InputKind = str
"""The form in which an input is sent: "tensor", the model's own; else as the reader of its capability says."""

Preset = Literal[
    "torchvision", "ultralytics", "keras", "mediapipe",
    "text-classification", "token-classification", "sentence-embedding", "reranking", "zero-shot",
]  # fmt: skip
"""Families of models, or tasks, that say what tables leave out. A `StepsDeclaration` names those that it fills."""

DEFAULT_OVERLAP = 0.45
"""Of Ultralytics' and YOLOv5's `non_max_suppression`."""

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16"
]
SAID_ONLY = ("invert", "sigmoid", "unit", "pool", "prototypes", "keypoints", "steady")
"""Keys that metadata has only where a table says them: they came later, and other replies stay as they were."""

TensorShape = tuple[Annotated[int, Meta(ge=-1, le=2**31)], ...]

Share = Annotated[float, Meta(ge=0, le=1)]


class InputSteps(Struct, frozen=True, rename={"source": "from"}):
    """What a caller may send in place of a model's inputs. A capability's own type has its keys of `[input.NAME]`.

    element: what one row is to clients: "picture", "text"; "" where they know nothing of it. is_file: whether a BYTES
    row is a file, of which JSON has base64. source: see `from` there.
    """

    element: ClassVar[str] = ""
    is_file: ClassVar[bool] = False

    source: str = ""

    def kept_bytes(self, outputs: Mapping[str, OutputSteps]) -> int:
        """Return most bytes that it keeps of what a request of a sequence sent, for the next one of it."""
        del outputs
        return 0

    def why_unreadable(self, kind: InputKind, shape: Sequence[int]) -> str:
        """Return why a tensor of this kind and shape cannot be read though it fits `sent_spec`; "" where it can."""
        del kind, shape
        return ""

    def is_sized(self, kind: InputKind) -> bool:
        """Return whether the shape of a tensor of this kind says how much there is to read; not of files."""
        del kind
        return False

    def wanted(self, datatype: str, *, is_pipeline: bool) -> str:
        """Return what to send in place of the input, where a tensor of `datatype` does not fit; "": its spec says all.

        is_pipeline: a pipeline was asked, whose first steps take it.
        """
        del datatype, is_pipeline
        return ""

    def title(self) -> str:
        """Return the words for what is sent in place of the tensor."""
        return self.source

    def words(self, spec: TensorSpec | None) -> dict[str, str]:
        """Say how it becomes the model's input, by what is said of it. spec: of the input of its name, if any."""
        del spec
        return {"from": self.source}

    def noise(self, shape: tuple[int, ...], level: float, random: np.random.Generator) -> Array:
        """Make up numbers that the tensor of its name may hold, as strong as `level`, 0 to 1."""
        return random.normal(size=shape) * level

    def made_up(self, sent: TensorSpec, kind: InputKind) -> Array:
        """Rows of what is sent, for a model's first runs, where the capability declares no `sample`."""
        raise NotImplementedError(f"{type(self).__name__}: {sent.name} as {kind}")


if TYPE_CHECKING:
    InputTables = Mapping[str, InputSteps]
else:
    # msgspec would leave out what a capability's own type has beside.
    InputTables = Mapping[str, Annotated[Any, Meta(extra={"declared": "steps"})]]


class OutputSteps(Struct, frozen=True, forbid_unknown_fields=True):
    """How an output becomes an answer that a person understands. Keys of `[output.NAME]`."""

    answer: str | None = None
    """`"classes"`: labels with scores, best first; `"number"`, with its `unit`; `"text"`; `"embedding"`: the vector, of
    length 1; `"tags"`: a label for each token, joined to spans; of pictures `"boxes"`: with labels, in the picture's
    pixels; `"mask"`: a class for each pixel; `"masks"`: boxes and their pixels; `"keypoints"`: boxes and their points.
    When absent: boxes with `layout`, else classes."""

    labels: str | tuple[str, ...] | None = None
    """A file beside `model.toml` or in the version's folder, one label a line; or a list of the labels themselves, as a
    release has them. When absent: names in the model's own metadata, else numbers."""

    softmax: bool | None = None
    """Whether scores are made of logits. When absent: where a first run gives what is not a probability."""

    sigmoid: bool | None = None
    """Whether each score is made of a logit by itself: of classes that may count together, of a number of 0 to 1."""

    top_k: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Most classes of an answer."""

    unit: Annotated[str, Meta(max_length=32)] | None = None
    """Of a number: `"°C"`, `"%"`; an empty one, or none, is a number alone."""

    pool: Pool | None = None
    """Of an embedding with a vector for each token, `[rows, tokens, n]`: their `"mean"`, by the model's input
    `attention_mask` where it has one; or the first, `"cls"`."""

    layout: BoxLayout | None = None
    """What an output of boxes means, by the family that writes it so."""

    scores: str | None = None
    """Beside an output of boxes: the one with their scores (DETR's logits). When absent: the only one that fits."""

    classes: str | None = None
    """With `layout = "ssd"`: the output with the boxes' classes. When absent: the one named so."""

    count: str | None = None
    """With `layout = "ssd"`: the output with the number of boxes. When absent: the one named so, if any."""

    prototypes: str | None = None
    """Beside an output of masks: the one with their prototypes. When absent: the only one that fits."""

    keypoints: tuple[Annotated[int, Meta(ge=1, le=1000)], Annotated[int, Meta(ge=2, le=3)]] | None = None
    """Of an output of keypoints: points of one thing, and numbers of a point, which are x, y, and with 3 a score. When
    absent: as `kpt_shape` of the model's own metadata says."""

    threshold: Share = 0.25
    """A box is told if its score is above; classes below it are left out only if it is set above 0.25."""

    overlap: Share | None = None
    """Boxes of one class that overlap more are one (intersection over union). When absent: 0.45; 0.7 with the preset
    `"ultralytics"`."""

    wanted: tuple[str, ...] = ()
    """Labels that are told. When empty: all."""

    most: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Most boxes of an answer."""

    shape: TensorShape | None = None
    """Of a TorchScript model: the tensor's whole shape, -1 where it is open. When absent: as two runs at load tell. A
    table that says nothing but `shape` and `datatype` declares no answer."""

    datatype: Datatype | None = None
    """With `shape`: the datatype that it must have."""


class StepsDeclaration(Struct, frozen=True):
    """A capability that makes a model's inputs of what callers send. All but names are "module:function".

    sources: the values of `from` that it reads. table: "module:class" of its `[input.NAME]`, an `InputSteps`. mark: a
    key that only its tables have, by which they need no `from`. presets: those of its models. read: at load, (settings,
    folder of the model, of the version, artifact) -> ModelSteps, whole, or None where the tables declare nothing that
    it knows; raises LoadFailed. reader: in the host, (ModelSpec, ModelSteps, threads of a run, runs at once) ->
    `InputReader` or None; raises LoadFailed. sample: (TensorSpec of what is sent, its kind) -> rows of that, made up;
    "": the table's `made_up` does. offer: (artifact) -> the preset that its metadata tells, or None; "": none does.
    advice: (model, ModelSpec, preset that is offered) -> why a model takes nothing of this kind, with the lines to
    write. drawing: a module with `check_pillow(option)`, `SAVED` and `draw(picture, answer, labels, path)`; "": nothing
    is drawn.
    """

    name: str
    sources: tuple[str, ...]
    table: str
    read: str
    reader: str
    sample: str = ""
    mark: str = ""
    presets: tuple[str, ...] = ()
    offer: str = ""
    advice: str = ""
    drawing: str = ""

    @property
    def callables(self) -> tuple[str, ...]:
        """The class and the functions that it names."""
        return tuple(filter(None, (self.table, self.read, self.reader, self.sample, self.offer, self.advice)))


def table_kind(keys: Mapping[str, Any]) -> type[InputSteps]:
    """The type of the `[input.NAME]` with these keys: by `from`, else by a mark, else that of what comes first.

    Raises ValueError: nothing reads such a source.
    """
    declared = [plugins.declared("steps", name) for name in plugins.names("steps")]
    known = [source for each in declared for source in each.sources]
    said = keys.get("from")
    if said is not None and said not in known:
        raise ValueError(f"from: got {said!r}, wanted one of {', '.join(map(repr, known))}")
    found = next((each for each in declared if (said in each.sources if said else each.mark in keys)), declared[0])
    kind: type[InputSteps] = plugins.named(found.table)
    return kind


def why_not_steady(least: int, of: int) -> str:
    """Return why two numbers cannot be a `steady` (steady.py); "" where they can."""
    if of < 2 * least <= 2 * of:
        return ""
    return f"steady = [{least}, {of}]; wanted more than half, and at most all, of the last"


def says_steps(table: InputSteps | OutputSteps) -> bool:
    """Return whether a table declares steps, and does not describe its tensor alone."""
    described = {key: None for key in ("shape", "datatype") if getattr(table, key, None) is not None}
    return not described or replace(table, **described) != type(table)()


class Form(NamedTuple):
    """The inputs and outputs of a model with declared steps.

    kind: "tensor", its own; "picture", encoded, BYTES [rows]; "frames", UINT8 [rows, height, width, 1 or 3], or as
    `from` says; "text", BYTES [rows]. answers: whether answers come out, in place of its own tensors.
    """

    kind: InputKind
    answers: bool


class ModelSteps(Struct, frozen=True):
    """All declared steps of one version, as a host gets them. labels: by output, empty where there are none.

    inputs: tables as mappings become those of their capabilities, keys that these have not left out. preset: the family
    that filled what the tables leave out. has_items: rows are of what a pipeline found, however many, and not of the
    request; so answers are always a list. files: by name, those that the reader opens in the host; not in metadata.
    """

    inputs: InputTables = field(default_factory=dict)
    outputs: Mapping[str, OutputSteps] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    preset: Preset | None = None
    has_items: bool = False
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(not isinstance(each, InputSteps) for each in self.inputs.values()):
            tables = {name: _table(each) for name, each in self.inputs.items()}
            force_setattr(self, "inputs", tables)


def steps_fields(steps: ModelSteps) -> dict[str, Any]:
    """Steps as metadata has them: `inputs` and `outputs` with the keys of `model.toml`, and `labels` by output."""
    fields: dict[str, Any] = to_builtins(steps)
    del fields["files"]
    for table in (*fields["inputs"].values(), *fields["outputs"].values()):
        for key in [key for key in SAID_ONLY if not table.get(key, True)]:
            del table[key]
    return fields


def steps_from_fields(fields: Mapping[str, Any]) -> ModelSteps:
    """Steps out of metadata. Keys that a newer daemon has beside these are left out. Raises ValueError for no steps."""
    kept = {
        name: {key: value for key, value in each.items() if key in OutputSteps.__struct_encode_fields__}
        for name, each in fields.get("outputs", {}).items()
    }
    more = {"labels": fields.get("labels", {}), "preset": fields.get("preset")}
    tables = {"inputs": fields.get("inputs", {}), "outputs": kept}
    return convert({**tables, **more, "has_items": fields.get("has_items", False)}, ModelSteps)


def _table(keys: InputSteps | Mapping[str, Any]) -> InputSteps:
    """A table, of what may come from a newer daemon. Raises ValueError: what is known of it is wrong."""
    if isinstance(keys, InputSteps):
        return keys
    try:
        kind = table_kind(keys)
    except ValueError:
        return InputSteps(str(keys.get("from")))
    return convert({key: value for key, value in keys.items() if key in kind.__struct_encode_fields__}, kind)
