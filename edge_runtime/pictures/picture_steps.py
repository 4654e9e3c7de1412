"""The table `[input.NAME]` of pictures: how one becomes a model's tensor. Values only; input.py does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.steps import Datatype, InputKind, InputSteps, TensorShape
from edge_runtime.tensors import Array

PictureSource = Literal["picture", "frames", "nv12", "yuyv", "gray"]
FRAME_CHANNELS = (1, 3)
"""Of raw frames, where `from` names no other form: gray, RGB."""

RGB_OR_GRAY = "[rows,height,width,3], RGB, or [rows,height,width,1], gray"
"""Their shapes, in words."""

OTHER_FRAMES = {
    "nv12": "[rows,height * 3 / 2,width]",
    "yuyv": "[rows,height,width,2]",
    "gray": "[rows,height,width,1]",
}
"""Shapes of frames of other forms, by the value of `from`."""

TITLES = {"picture": "a picture or frames", "frames": "RGB frames"}
"""By the value of `from`; of others it stands in the title."""

Fit = Literal["stretch", "crop", "letterbox"]
Color = Literal["rgb", "bgr", "gray"]
Filter = Literal["nearest", "linear", "bilinear", "bicubic", "lanczos"]
PixelRange = Literal["0..1", "-1..1", "0..255"]
Side = Annotated[int, Meta(ge=1, le=16_384)]
Level = Annotated[float, Meta(ge=-1e6, le=1e6)]


class PictureSteps(InputSteps, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """What a caller may send in place of this input, and how it becomes the tensor. Keys of `[input.NAME]`."""

    element: ClassVar[str] = "picture"
    is_file: ClassVar[bool] = True

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

    invert: bool = False
    """Whether each pixel becomes 255 less itself before that: a model of white digits on black reads ink on paper."""

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

    def why_unreadable(self, kind: InputKind, shape: Sequence[int]) -> str:
        """Return why frames have channels that nothing reads; other forms of frames have theirs in their spec."""
        if kind != "frames" or self.source in OTHER_FRAMES or shape[-1] in FRAME_CHANNELS:
            return ""
        return f"frames are [{','.join(map(str, shape))}]; wanted {RGB_OR_GRAY}"

    def is_sized(self, kind: InputKind) -> bool:
        """Return whether it is of pixels."""
        return kind == "frames"

    def wanted(self, datatype: str, *, is_pipeline: bool) -> str:
        """Return the pictures that it takes, where bytes or pixels came."""
        if datatype not in {"BYTES", "UINT8"}:
            return ""
        if is_pipeline:
            return "this pipeline takes an encoded picture: a JPEG, PNG, WebP, BMP or GIF"
        frames = f"UINT8 {OTHER_FRAMES.get(self.source, RGB_OR_GRAY)}"
        if self.source == "picture":
            return f"frames are {frames}"
        return f'with from = "{self.source}" it takes raw frames only, {frames}'

    def title(self) -> str:
        """Return the words for pictures, or for frames of one form."""
        return TITLES.get(self.source, f"{self.source} frames")

    def words(self, spec: TensorSpec | None) -> dict[str, str]:
        """How a picture becomes the tensor, by what is said of it."""
        size = self.size
        if spec is not None and len(spec.shape) == 4:
            first = 2 if spec.shape[1] in FRAME_CHANNELS else 1
            sides = spec.shape[first : first + 2]
            size = size if DYNAMIC in sides else (sides[0], sides[1])
        fit: str = self.fit or "stretch"
        if size is not None:
            fit += f" into {size[1]} x {size[0]}"
        if fit.startswith("letterbox"):
            fit += f", {_numbers(self.fill)} around it"
        if self.shorter_side is not None:
            fit += f", shorter side {self.shorter_side}"
        if self.range is not None:
            numbers = f"range {self.range}"
        elif self.mean or self.scale:
            numbers = f"(pixel - {_numbers(self.mean or (0.0,))}) * {_numbers(self.scale or (1.0,))}"
        else:
            numbers = "pixels as they are"
        if self.invert:
            numbers += ", light as dark"
        return {"fit": fit, "scaling": self.filter or "bilinear", "colours": self.color, "numbers": numbers}

    def noise(self, shape: tuple[int, ...], level: float, random: np.random.Generator) -> Array:
        """Pixels of 0 to 255 * `level`, as the numbers that the model gets; channels as their average."""
        pixels = random.uniform(0, 255 * level, shape)
        match self.range:
            case "0..1":
                return pixels / 255
            case "-1..1":
                return pixels / 127.5 - 1
            case _:
                return (pixels - float(np.mean(self.mean or 0))) * float(np.mean(self.scale or 1))


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in values) if len(values) == 1 else f"[{', '.join(f'{v:g}' for v in values)}]"
