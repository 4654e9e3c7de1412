"""Pictures as a caller has them (files, bytes, PIL images, frames of a camera) as the tensor that is sent.

Owns: what counts as a picture, for every client and the runtime in process. Decodes and resizes nothing: the model's
host does, by the steps that the model declares. Thread: any.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import TensorMismatch
from edge_runtime.messages import UNNAMED, is_picture, is_sound
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from PIL import Image

    Picture: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | npt.NDArray[np.uint8]
    """A path, the bytes of a file, a PIL image, or a frame: UINT8 [height, width, 3], RGB."""

WANTED = (
    "wanted a path, the bytes of a JPEG, PNG, WebP, BMP or GIF, a PIL image, or a uint8 array [height, width, 3], RGB, "
    "or [height, width, 1], gray"
)


def with_pictures(
    inputs: Mapping[str, npt.ArrayLike] | None,
    picture: Picture | None,
    pictures: Sequence[Picture] | Array | None,
    name: str = UNNAMED,
) -> Mapping[str, npt.ArrayLike]:
    """The inputs with what was given as pictures. name: of the tensor that they become.

    BYTES [pictures] of paths and bytes; UINT8 [pictures, height, width, 3] of PIL images and frames (a single frame is
    not copied), or [pictures, height, width, 1] of gray ones; where the model declares other frames: [pictures,
    height * 3 / 2, width] of nv12, [pictures, height, width, 2] of yuyv. Raises TensorMismatch for what is not a
    picture, OSError for a file that cannot be read.
    """
    if picture is None and pictures is None:
        if inputs is None:
            raise TensorMismatch('there is nothing to ask; wanted inputs={"NAME": array}, picture= or pictures=[…]')
        return inputs
    if picture is not None and pictures is not None:
        raise TensorMismatch("got picture= and pictures=; wanted one of them")
    if isinstance(picture, np.ndarray) and picture.ndim > 3:
        raise TensorMismatch(f"picture= is an array {list(picture.shape)}; several frames go by pictures=")
    tensor = _tensor([picture] if pictures is None else pictures)
    if inputs is not None and name in inputs:
        raise TensorMismatch(f"input {name!r} takes the picture; got it among the inputs too")
    return {**(inputs or {}), name: tensor}


def with_raw(parameters: Mapping[str, Any] | None, raw: bool | None) -> Mapping[str, Any] | None:
    """The parameters with `raw`: True for bare outputs, False for answers; None: answers to pictures only."""
    return parameters if raw is None else {**(parameters or {}), "raw": bool(raw)}


def picture_files(folder: Path) -> list[Path]:
    """The pictures in a folder, by name, hidden ones left out. Raises TensorMismatch where there is none."""
    found = sorted(each for each in folder.iterdir() if each.suffix.lower() in SUFFIXES and each.name[0] != ".")
    if not found:
        raise TensorMismatch(f"{folder}: there is no picture in this folder; wanted {', '.join(SUFFIXES)}")
    return found


def read_picture(path: Path) -> bytes:
    """The bytes of a file. Raises TensorMismatch where they begin as no picture, OSError where they cannot be read."""
    if path.is_dir():
        raise TensorMismatch(f"{path} is a folder; wanted a picture, or pictures=[…] with its files")
    data = path.read_bytes()
    if not is_picture(data) and not is_sound(data):
        raise TensorMismatch(f"{path} is not a picture; wanted a JPEG, PNG, WebP, BMP or GIF")
    return data


def picture_url(picture: Picture) -> str:
    """Return the URL that holds a picture, for a part of a chat's message. Raises as `with_pictures`.

    A PIL image becomes a PNG. A frame has no file: encode it.
    """
    row = _row(picture)
    if isinstance(row, np.ndarray):
        pillow = sys.modules.get("PIL.Image")
        if pillow is None or not isinstance(picture, pillow.Image):
            raise TensorMismatch("a picture of a chat is a frame; wanted a path, the bytes of a file, or a PIL image")
        made = io.BytesIO()
        cast("Image.Image", picture).save(made, "PNG")
        row = made.getvalue()
    kind = next((kind for begin, kind in _BEGINS if row.startswith(begin)), "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(row).decode()}"


_BEGINS = ((b"\x89PNG", "png"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
"""Names of files that hosts can decode."""


# ---- private --------------------------------------------------------------------------------------------------------


def _tensor(pictures: Sequence[Any] | Array) -> Array:
    if isinstance(pictures, np.ndarray):
        is_one = pictures.ndim == 3 and pictures.shape[2] in (1, 2, 3)
        if pictures.dtype != np.uint8 or pictures.ndim not in (3, 4) or is_one:
            raise TensorMismatch(
                f"pictures= is an array of {pictures.dtype} {list(pictures.shape)}; wanted uint8 "
                "[pictures, height, width, 3]; one frame goes by picture="
            )
        return pictures
    if isinstance(pictures, str | bytes | bytearray | memoryview | os.PathLike):
        raise TensorMismatch("pictures= wants a list; one picture goes by picture=")
    rows = [_row(each) for each in pictures]
    if not rows:
        raise TensorMismatch("pictures= is empty; wanted one picture or more")
    frames = [row for row in rows if isinstance(row, np.ndarray)]
    if not frames:
        texts: Array = np.empty(len(rows), object)
        for place, row in enumerate(rows):
            texts[place] = row
        return texts
    shapes = sorted({row.shape for row in frames})
    if len(frames) < len(rows):
        raise TensorMismatch("pictures= has files or bytes beside frames or PIL images; wanted one kind in one call")
    if len(shapes) > 1:
        raise TensorMismatch(
            f"pictures= has frames of {' and '.join(str(list(shape)) for shape in shapes)}; those of one call have one "
            "size, unless they are sent encoded, as files or bytes"
        )
    return frames[0][None] if len(frames) == 1 else cast("Array", np.stack(frames))


def _row(picture: object) -> bytes | Array:
    if isinstance(picture, str | os.PathLike):
        return read_picture(Path(picture))
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    if isinstance(picture, np.ndarray):
        return _frame(picture)
    # Pillow is looked for only where the caller has imported it: another's object is not a PIL image.
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(picture, pillow.Image):
        image = cast("Image.Image", picture)
        pixels: Array = np.asarray(image if image.mode == "L" else image.convert("RGB"))
        return pixels[:, :, None] if pixels.ndim == 2 else pixels
    raise TensorMismatch(f"a picture is {type(picture).__name__}; {WANTED}")


def _frame(frame: Array) -> Array:
    if frame.dtype != np.uint8 or not (frame.ndim == 2 or (frame.ndim == 3 and frame.shape[2] in (1, 2, 3))):
        raise TensorMismatch(f"a picture is an array of {frame.dtype} {list(frame.shape)}; {WANTED}")
    return frame
