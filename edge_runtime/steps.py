"""Steps that `model.toml` declares: how a picture becomes the model's input, and how its outputs become an answer.

Values only. A host runs them beside the model (hosts/steps_instance.py); answers.py has what callers get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, convert, field, to_builtins
from msgspec.structs import replace

PictureSource = Literal["picture", "frames", "nv12", "yuyv", "gray"]
Fit = Literal["stretch", "crop", "letterbox"]
Color = Literal["rgb", "bgr", "gray"]
Filter = Literal["nearest", "linear", "bilinear", "bicubic", "lanczos"]
PixelRange = Literal["0..1", "-1..1", "0..255"]
AnswerKind = Literal["classes", "boxes", "mask", "embedding", "text"]
BoxLayout = Literal[
    "yolov5", "yolov8", "yolov10", "yolov11", "yolox", "yolonas", "ssd", "detr", "dfine", "rfdetr", "rtdetr",
]  # fmt: skip
InputKind = Literal["tensor", "picture", "frames"]
Preset = Literal["torchvision", "ultralytics", "keras", "mediapipe"]

FRAME_CHANNELS = (1, 3)
"""Of raw frames, where `from` names no other form: gray, RGB."""

DEFAULT_OVERLAP = 0.45
"""Of Ultralytics' and YOLOv5's `non_max_suppression`."""

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16"
]
TensorShape = tuple[Annotated[int, Meta(ge=-1, le=2**31)], ...]

Side = Annotated[int, Meta(ge=1, le=16_384)]
Share = Annotated[float, Meta(ge=0, le=1)]
Level = Annotated[float, Meta(ge=-1e6, le=1e6)]


class InputSteps(Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """What a caller may send in place of this input, and how it becomes the tensor. Keys of `[input.NAME]`."""

    source: PictureSource = "picture"
    """`"picture"`: JPEG, PNG, WebP, BMP or GIF (of several frames the first), upright as its EXIF says, or raw frames;
    `"frames"`: only uint8 `[rows, height, width, 3]`, RGB, or 1, gray; only frames of another form: `"gray"`, `[rows,
    height, width, 1]`; `"nv12"`, `[rows, height * 3 / 2, width]`; `"yuyv"`, `[rows, height, width, 2]` (BT.601, limited
    range)."""

    fit: Fit | None = None
    """How a picture of any size becomes one of the model's: `"stretch"`; `"crop"`, the middle of it; `"letterbox"`,
    whole with `fill` around it. When absent: as the preset has it, else `"stretch"`."""

    fill: tuple[Annotated[int, Meta(ge=0, le=255)], ...] = (114,)
    """Around a letterboxed picture: one level, or one a channel."""

    shorter_side: Side | None = None
    """With `fit = "crop"`: the shorter side after scaling, before the middle is cut out; torchvision has 256 for 224.
    When absent: the model's own side."""

    filter: Filter | None = None
    """How pixels are scaled, as Pillow has it: with antialiasing. `"linear"`: without, as OpenCV's INTER_LINEAR has it,
    and so Ultralytics. When absent: as the preset has it, else `"bilinear"`."""

    color: Color = "rgb"
    """Order of the channels that the model was trained with."""

    mean: tuple[Level, ...] = ()
    """`(pixel - mean) * scale`, with pixels of 0 to 255: one number, or one a channel."""

    scale: tuple[Level, ...] = ()
    """See `mean`."""

    range: PixelRange | None = None
    """In place of `mean` and `scale`: the range that pixels are brought into. When all three are absent: `"0..255"` for
    a UINT8 input, and an error for any other, since nobody can guess it."""

    size: tuple[Side, Side] | None = None
    """Height and width, where the model leaves them open."""

    shape: TensorShape | None = None
    """Of a TorchScript model, which does not say it: the tensor's whole shape, -1 where it is open. A table that says
    nothing but `shape` and `datatype` declares no picture."""

    datatype: Datatype | None = None
    """With `shape`: the tensor's datatype. When absent: `"FP32"`."""

    def __post_init__(self) -> None:
        if self.range is not None and (self.mean or self.scale):
            raise ValueError("got range beside mean or scale; say one of the two")
        for name in ("fill", "mean", "scale"):
            if len(getattr(self, name)) not in ((1, 3) if name == "fill" else (0, 1, 3)):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} numbers; wanted one, or one for each of 3 channels"
                )
        if self.shorter_side is not None and self.fit not in (None, "crop"):
            raise ValueError(f'shorter_side is for fit = "crop"; got fit = "{self.fit}"')


class OutputSteps(Struct, frozen=True, forbid_unknown_fields=True):
    """How an output becomes an answer that a person understands. Keys of `[output.NAME]`."""

    answer: AnswerKind | None = None
    """`"classes"`: labels with scores, best first; `"boxes"`: with labels, in the picture's pixels; `"mask"`: a class
    for each pixel; `"embedding"`: the vector, of length 1; `"text"`. When absent: boxes with `layout`, else classes."""

    labels: str | tuple[str, ...] | None = None
    """A file beside `model.toml` or in the version's folder, one label a line; or a list of the labels themselves, as a
    release has them. When absent: names in the model's own metadata, else numbers."""

    softmax: bool | None = None
    """Whether scores are made of logits. When absent: where a first run gives what is not a probability."""

    top_k: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Most classes of an answer."""

    layout: BoxLayout | None = None
    """What an output of boxes means, by the family that writes it so."""

    scores: str | None = None
    """Beside an output of boxes: the one with their scores (DETR's logits). When absent: the only one that fits."""

    classes: str | None = None
    """With `layout = "ssd"`: the output with the boxes' classes. When absent: the one named so."""

    count: str | None = None
    """With `layout = "ssd"`: the output with the number of boxes. When absent: the one named so, if any."""

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
    """A capability that makes a model's input of what callers send. All but names are "module:function".

    sources: the values of `from` that it reads. read: at load, (settings, folder of the model, of the version,
    artifact) -> ModelSteps, whole, or None where the tables declare nothing that it knows; raises LoadFailed. reader:
    in the host, (ModelSpec, ModelSteps, threads of a run, runs at once) -> `InputReader` or None; raises LoadFailed.
    offer: (artifact) -> the preset that its metadata tells, or None. advice: (model, ModelSpec, preset that is offered)
    -> why a model takes nothing of this kind, with the lines to write. drawing: a module with `check_pillow(option)`,
    `SAVED` and `draw(picture, answer, labels, path)`.
    """

    name: str
    sources: tuple[PictureSource, ...]
    read: str
    reader: str
    offer: str
    advice: str
    drawing: str


def says_steps(table: InputSteps | OutputSteps) -> bool:
    """Return whether a table declares steps, and does not describe its tensor alone."""
    is_plain = table.shape is None and table.datatype is None
    return is_plain or replace(table, shape=None, datatype=None) != type(table)()


class Form(NamedTuple):
    """The inputs and outputs of a model with declared steps.

    kind: "tensor", its own; "picture", encoded, BYTES [rows]; "frames", UINT8 [rows, height, width, 1 or 3], or as
    `from` says. answers: whether answers come out, in place of its own tensors.
    """

    kind: InputKind
    answers: bool


class ModelSteps(Struct, frozen=True):
    """All declared steps of one version, as a host gets them. labels: by output, empty where there are none.

    preset: the family that filled what the tables leave out. has_items: rows are of what a pipeline found, however
    many, and not of the request; so answers are always a list.
    """

    inputs: Mapping[str, InputSteps] = field(default_factory=dict)
    outputs: Mapping[str, OutputSteps] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    preset: Preset | None = None
    has_items: bool = False


def steps_of_host(steps: ModelSteps) -> ModelSteps:
    """Return the steps as a host needs them, in short: the wanted labels, and all where they become text.

    The others are empty: it only counts them.
    """
    needed = {
        name: labels
        if steps.outputs[name].answer == "text"
        else tuple(label if label in steps.outputs[name].wanted else "" for label in labels)
        for name, labels in steps.labels.items()
    }
    return replace(steps, labels=needed)


def steps_fields(steps: ModelSteps) -> dict[str, Any]:
    """Steps as metadata has them: `inputs` and `outputs` with the keys of `model.toml`, and `labels` by output."""
    fields: dict[str, Any] = to_builtins(steps)
    return fields


def steps_from_fields(fields: Mapping[str, Any]) -> ModelSteps:
    """Steps out of metadata. Keys that a newer daemon has beside these are left out. Raises ValueError for no steps."""
    known = {"inputs": _keys(InputSteps), "outputs": _keys(OutputSteps)}
    kept = {
        table: {
            name: {key: value for key, value in each.items() if key in keys} for name, each in fields[table].items()
        }
        for table, keys in known.items()
        if table in fields
    }
    more = {"labels": fields.get("labels", {}), "preset": fields.get("preset")}
    return convert({**kept, **more, "has_items": fields.get("has_items", False)}, ModelSteps)


def _keys(kind: type[InputSteps | OutputSteps]) -> tuple[str, ...]:
    return kind.__struct_encode_fields__
