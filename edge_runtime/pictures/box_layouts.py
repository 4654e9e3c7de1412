"""The boxes in a detector's outputs, by the family that writes them: where they lie, what they are, how sure it is.

Owns: one reader a layout, and suppression. Pure numpy. A box is left, top, right, bottom in the pixels of the model's
own own picture. What stands behind a box's classes comes with it: coefficients of its mask, its points. A turned box is
middle, sides and angle. Called by answer_makers.py, in hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import DEFAULT_OVERLAP, BoxLayout, OutputSteps

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]
Results = Mapping[str, Floats]
Size = tuple[int, int]
"""Width and height of the model's picture."""

MOST_CANDIDATES = 30_000
"""Of one row, best first; as Ultralytics' `max_nms`. A model of 640 x 640 pixels has 8400 or 25 200."""

_CHUNK = 1000
"""Candidates that are looked at together; a picture's answer is nearly always among the first of them."""

_FINISHED_ROWS = 1000
"""[rows, n, 6] with n up to this is a list of finished boxes, often 300; heads of detectors have thousands."""

_STRIDES = ((8, 16, 32), (8, 16, 32, 64))
"""Pixels between the cells of YOLOX's grids, without and with a fourth (YOLOX `yolox/models/yolo_head.py`)."""

_BY_SHARES = frozenset(("ssd", "detr", "dfine", "rfdetr", "rtdetr"))
"""Layouts whose boxes are shares of the picture."""

_PARTNERS: dict[BoxLayout, tuple[str, ...]] = {
    "yolonas": ("scores",),
    "ssd": ("scores", "classes", "count"),
    **dict.fromkeys(("detr", "dfine", "rfdetr", "rtdetr"), ("scores",)),
}
_NAMED = {"scores": ("score", "logit", "conf"), "classes": ("class", "label"), "count": ("num", "count")}
"""Exporters' names for the partners of SSD's boxes."""

_LISTS: dict[BoxLayout, tuple[int, ...]] = {"yolonas": (1, 2, 3, 4, 5, 6), "ssd": (3, 4, 5, 6, 2, 1)}
"""Layouts that also come as one list of sevens, and where left, top, right, bottom, score and class stand in it."""


TURNED: frozenset[BoxLayout] = frozenset(("yolov8-obb",))
"""Layouts whose boxes are turned: middle, sides, and the angle as the one number behind the classes."""


class Candidates(Struct, frozen=True):
    """Boxes above the threshold. boxes: FP32 [n, 4]; scores: FP32 [n]; classes: [n]. No order, all numbers finite.

    extras: FP32 [n, k], the numbers behind the classes.
    """

    boxes: Floats
    scores: Floats
    classes: Indices
    extras: Floats


Read = Callable[[Results, int, Size, float], Candidates]
"""The candidates of one row, of arrays by role: each output of all rows, row, size, threshold."""


class BoxReader:
    """Reads the boxes of one model. needs: the outputs they are made of, the declared one first."""

    def __init__(  # noqa: PLR0917
        self,
        name: str,
        output: OutputSteps,
        spec: ModelSpec,
        labels: Sequence[str],
        size: Size | None,
        extras: int = 0,
    ) -> None:
        """size: None where the model takes no picture. extras: numbers behind the classes of a box.

        Raises LoadFailed: the layout does not fit the outputs.
        """
        if output.layout is None:
            raise LoadFailed(f'[output.{name}]: say which family writes the boxes, as in layout = "yolov8"')
        if size is None and (output.layout in _BY_SHARES or output.layout == "yolox"):
            raise LoadFailed(
                f'[output.{name}]: layout = "{output.layout}" needs the size of the picture, and no input of the model '
                f"is one; wanted [rows, 3, height, width] or [rows, height, width, 3]"
            )
        by_name = {each.name: each for each in spec.outputs}
        self._roles = {"boxes": name, **_find_partners(name, output, by_name)}
        self._read, classes, self._suppresses = _choose(
            output.layout, {role: by_name[each] for role, each in self._roles.items()}, len(labels), extras
        )
        self._is_turned = output.layout in TURNED
        if labels and classes not in (None, len(labels)):
            raise LoadFailed(f"[output.{name}]: there are {len(labels)} labels, and the model has {classes} classes")
        unknown = set(output.wanted) - set(labels)
        if unknown:
            raise LoadFailed(f"[output.{name}]: wanted has {min(unknown)!r}, which is none of its {len(labels)} labels")
        self._wanted = [index for index, label in enumerate(labels) if label in output.wanted]
        self._threshold, self._most = output.threshold, output.most
        self._overlap = DEFAULT_OVERLAP if output.overlap is None else output.overlap
        self.needs = tuple(self._roles.values())
        self._has_rows = not _is_list_of_seven(by_name[name])

    def read(self, results: Results, row: int, rows: int, size: Size) -> Floats:
        """The boxes of one row, best first: FP32 [n, 6 + k], n at most `most`: class, score, left, top, right, bottom.

        Then extras; of turned boxes: class, score, middle, sides, angle. results: FP32, by output, of all rows. A box
        whose score or place is not a number is none. Raises RunFailed: an output has another shape than its layout.
        """
        by_role = {role: results[name] for role, name in self._roles.items()}
        for role, array in by_role.items():
            if self._has_rows and role != "count" and len(array) != rows:
                raise RunFailed(f"output {self._roles[role]} has {len(array)} rows, and the input has {rows}")
        with np.errstate(all="ignore"):
            found = self._read(by_role, row, size, self._threshold)
            if self._wanted:
                found = _pick(found, np.isin(found.classes, self._wanted))
            best = _best_first(found)[:MOST_CANDIDATES]
            if self._suppresses:
                boxes, classes = found.boxes[best], found.classes[best]
                if self._is_turned:
                    turned = np.concatenate([boxes, found.extras[best]], axis=1)
                    best = best[suppress_turned(turned, classes, self._overlap, self._most)]
                else:
                    best = best[suppress(boxes, classes, self._overlap, self._most)]
        best = best[: self._most]
        classes, scores = found.classes[best, None].astype(np.float32), found.scores[best, None]
        return np.concatenate([classes, scores, found.boxes[best], found.extras[best]], axis=1)


def suppress(boxes: Floats, classes: Indices, overlap: float, most: int) -> Indices:
    """Which boxes to keep, of boxes in order of preference: none overlaps a kept one of its class by more.

    Greedy, as torchvision's `nms` for each class, until there are `most`. overlap: intersection over union, computed
    with 64 bits.
    """
    left, top, right, bottom = boxes.astype(np.float64).T
    areas = (right - left) * (bottom - top)

    def without_same(index: int, rest: Indices) -> Indices:
        """Those of `rest` that are not the same thing as the box at `index`."""
        width = np.minimum(right[rest], right[index]) - np.maximum(left[rest], left[index])
        height = np.minimum(bottom[rest], bottom[index]) - np.maximum(top[rest], top[index])
        shared = np.maximum(width, 0) * np.maximum(height, 0)
        is_same = shared / (areas[rest] + areas[index] - shared) > overlap
        different: Indices = rest[~(is_same & (classes[rest] == classes[index]))]
        return different

    kept: list[int] = []
    for start in range(0, len(boxes), _CHUNK):
        rest: Indices = np.arange(start, min(start + _CHUNK, len(boxes)))
        for index in kept:
            rest = without_same(index, rest)
        while len(rest) and len(kept) < most:
            kept.append(int(rest[0]))
            rest = without_same(kept[-1], rest[1:])
        if len(kept) >= most:
            break
    return np.array(kept, np.intp)


def suppress_turned(boxes: Floats, classes: Indices, overlap: float, most: int) -> Indices:
    """Which turned boxes to keep, of [n, 5] in order of preference: no better one of its class overlaps it so much.

    As Ultralytics has it (`fast_nms` with `batch_probiou`): a box that is dropped itself drops others, too.
    """
    terms = _covariances(boxes.astype(np.float64))

    def is_alike(index: int, others: Indices) -> npt.NDArray[np.bool_]:
        """Which of `others` are of the class of the box at `index`, and overlap it so much."""
        same: npt.NDArray[np.bool_] = classes[others] == classes[index]
        same[same] = _turned_overlaps(terms[:, others[same]], terms[:, index : index + 1]) >= overlap
        return same

    kept: list[int] = []
    for start in range(0, len(boxes), _CHUNK):
        rest: Indices = np.arange(start, min(start + _CHUNK, len(boxes)))
        for index in kept:  # most are dropped by one of these: only the others are compared with all better ones
            rest = rest[~is_alike(index, rest)]
        while len(rest) and len(kept) < most:
            first, rest = int(rest[0]), rest[1:]
            if not is_alike(first, np.arange(first)).any():
                kept.append(first)
                rest = rest[~is_alike(first, rest)]
        if len(kept) >= most:
            break
    return np.array(kept, np.intp)


def _covariances(boxes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Middle and covariance of the Gaussian of each turned box: [5, n] of [n, 5] (Llerena et al., 2021, ProbIoU)."""
    x, y, width, height, angle = boxes.T
    wide, high = width**2 / 12, height**2 / 12
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([x, y, wide * cos**2 + high * sin**2, wide * sin**2 + high * cos**2, (wide - high) * cos * sin])


def _turned_overlaps(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How much turned boxes overlap: 1 less their Hellinger distance (Ultralytics `batch_probiou`)."""
    tiny = 1e-7
    (x1, y1, a1, b1, c1), (x2, y2, a2, b2, c2) = one, other
    a, b, c = a1 + a2, b1 + b2, c1 + c2
    area = a * b - c**2
    near = (a * (y1 - y2) ** 2 + b * (x1 - x2) ** 2) / (area + tiny) / 4
    slanted = c * (x2 - x1) * (y1 - y2) / (area + tiny) / 2
    each = np.sqrt(np.maximum(a1 * b1 - c1**2, 0) * np.maximum(a2 * b2 - c2**2, 0))
    alike = np.log(area / (4 * each + tiny) + tiny) / 2
    distance = np.clip(near + slanted + alike, tiny, 100)
    overlaps: npt.NDArray[np.float64] = 1 - np.sqrt(1 - np.exp(-distance) + tiny)
    return overlaps


def _best_first(found: Candidates) -> Indices:
    """By score; among equal ones by class and place, so that no order of the model's own is left."""
    left, top, right, bottom = found.boxes.T
    return np.lexsort((bottom, right, top, left, found.classes, -found.scores))


def _pick(found: Candidates, which: npt.NDArray[np.bool_]) -> Candidates:
    return Candidates(found.boxes[which], found.scores[which], found.classes[which], found.extras[which])


def is_finished(spec: TensorSpec, extras: int = 0) -> bool:
    """Whether an output of a YOLO is a list of boxes that the model itself has chosen."""
    return len(spec.shape) == 3 and spec.shape[2] == 6 + extras and spec.shape[1] <= _FINISHED_ROWS


# ---- which output is what -------------------------------------------------------------------------------------------


def _find_partners(name: str, output: OutputSteps, by_name: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The outputs beside the boxes, by role: as declared, else the only one that can be it. Raises LoadFailed."""
    roles = _PARTNERS.get(output.layout, ()) if output.layout is not None else ()
    spec = by_name[name]
    said = {role: getattr(output, role) for role in ("scores", "classes", "count") if getattr(output, role) is not None}
    for role, partner in said.items():
        if role not in roles:
            raise LoadFailed(f'[output.{name}]: {role} is not of layout = "{output.layout}"; leave it out')
        if partner not in by_name:
            there = ", ".join(by_name)
            raise LoadFailed(f"[output.{name}]: {role} = {partner!r}: the model has no such output; it has {there}")
    if not said and (_is_list_of_seven(spec) or _has_scores(output.layout, spec)):
        return {}
    found = dict(said)
    for role in roles:
        if role in found:
            continue
        able = [
            each.name
            for each in by_name.values()
            if each.name not in (name, *found.values()) and _may_be(role, output.layout, each, spec)
        ]
        if len(able) == 1:
            found[role] = able[0]
        elif role != "count":
            there = ", ".join(each for each in by_name if each != name) or "no other output"
            raise LoadFailed(
                f'[output.{name}]: layout = "{output.layout}" has {role} in an output of its own; say '
                f'{role} = "…": the model has {there}'
            )
    return found


def _may_be(role: str, layout: BoxLayout | None, spec: TensorSpec, boxes: TensorSpec) -> bool:
    if layout != "ssd":
        return len(spec.shape) == len(boxes.shape) == 3 and spec.shape[1] in (DYNAMIC, boxes.shape[1])
    return len(spec.shape) <= 2 and any(word in spec.name.lower() for word in _NAMED[role])


def _is_list_of_seven(spec: TensorSpec) -> bool:
    """[n, 7] or [1, 1, n, 7]: finished boxes of all rows, each with the number of its row."""
    return len(spec.shape) in (2, 4) and spec.shape[-1] == 7


def _has_scores(layout: BoxLayout | None, spec: TensorSpec) -> bool:
    """RT-DETR as Ultralytics exports it: [rows, n, 4 + classes], boxes and scores side by side."""
    return layout == "rtdetr" and len(spec.shape) == 3 and spec.shape[2] > 4


def _choose(  # noqa: PLR0911 (one line a layout)
    layout: BoxLayout, specs: Mapping[str, TensorSpec], labels: int, extras: int
) -> tuple[Read, int | None, bool]:
    """How to read it, the number of classes where the shapes show it, and whether boxes are to be suppressed."""
    spec = specs["boxes"]
    if layout in _LISTS and _is_list_of_seven(spec):
        return functools.partial(_read_list, order=_LISTS[layout], by_shares=layout in _BY_SHARES), None, False
    match layout:
        case "yolov8" | "yolov11":
            return _choose_head(spec, labels, extras)
        case "yolov8-obb":
            return _choose_head(spec, labels, 1, is_turned=True)
        case "yolov10":
            _check(spec, 3, "[rows, n, 6]", exactly=6)
            return _read_finished, None, False
        case "rtdetr" if _has_scores(layout, spec):
            return _read_scored_queries, spec.shape[2] - 4, False
        case "yolov5" | "yolox":
            _check(spec, 3, "[rows, n, 5 + classes]", least=6)
            read = functools.partial(_read_objects, is_grid=layout == "yolox")
            return read, spec.shape[2] - 5, True
        case "yolonas":
            _check(spec, 3, "[rows, n, 4]", exactly=4)
            _check(specs["scores"], 3, "[rows, n, classes]", least=1)
            return _read_boxes_and_scores, specs["scores"].shape[2], True
        case "ssd":
            _check(spec, 3, "[rows, n, 4] or [1, 1, n, 7]", exactly=4)
            return _read_ssd, None, False
        case _:
            _check(spec, 3, "[rows, n, 4]", exactly=4)
            scores = specs["scores"]
            none = 1 if layout == "detr" else 0
            _check(scores, 3, "[rows, n, classes and none]" if none else "[rows, n, classes]", least=1 + none)
            return (_read_detr if none else _read_queries), scores.shape[2] - none, False


def _choose_head(
    spec: TensorSpec, labels: int, extras: int, *, is_turned: bool = False
) -> tuple[Read, int | None, bool]:
    """YOLO's head: [rows, 4 + classes + extras, n], the other way round, or finished [rows, n, 6 + extras]."""
    more = f" + {extras}" if extras else ""
    wanted = f"[rows, 4 + classes{more}, n], [rows, n, 4 + classes{more}] or [rows, n, {6 + extras}]"
    _check(spec, 3, wanted)
    first, last = spec.shape[1:]
    if labels and first != DYNAMIC and first == 4 + labels + extras:
        is_first = True
    elif is_finished(spec, extras):
        return _read_finished, None, False
    elif labels and last == 4 + labels + extras:
        is_first = False
    elif DYNAMIC in (first, last):
        if first == last:
            raise LoadFailed(
                f"[output.{spec.name}]: its shape is {list(spec.shape)}, which leaves the number of classes open; "
                f"wanted {wanted}"
            )
        is_first = last == DYNAMIC
    else:
        is_first = first <= last
    channels = first if is_first else last
    if channels < 5 + extras:
        raise LoadFailed(f"[output.{spec.name}]: its shape is {list(spec.shape)}; wanted {wanted}")
    classes = channels - 4 - extras
    read = functools.partial(_read_head, is_first=is_first, classes=classes, is_turned=is_turned)
    return read, classes, True


def _check(spec: TensorSpec, rank: int, wanted: str, *, least: int = 0, exactly: int | None = None) -> None:
    """Raise LoadFailed unless the last axis has a known length that fits."""
    shape = spec.shape
    is_right = len(shape) == rank and (exactly is None or shape[-1] == exactly) and (not least or shape[-1] >= least)
    if not is_right:
        raise LoadFailed(f"[output.{spec.name}]: its shape is {list(shape)}; wanted {wanted}, with a known last length")


# ---- one reader a layout --------------------------------------------------------------------------------------------


def _read_head(
    results: Results, row: int, size: Size, threshold: float, *, is_first: bool, classes: int, is_turned: bool
) -> Candidates:
    """YOLOv8 and v11: middles and sides, in pixels, then a score a class (Ultralytics `non_max_suppression`)."""
    del size
    head = results["boxes"][row]
    head = head if is_first else head.T
    by_class = head[4 : 4 + classes]
    index = np.flatnonzero(by_class.max(axis=0) > threshold)
    head, by_class = head[:, index], by_class[:, index]
    best = by_class.argmax(axis=0)
    scores = np.take_along_axis(by_class, best[None], 0)[0]
    middles = head[:4].T
    return _finite(middles if is_turned else _from_middles(middles), scores, best, head[4 + classes :].T)


def _read_finished(results: Results, row: int, size: Size, threshold: float) -> Candidates:
    """Boxes that the model itself has chosen: corners, score, class, extras (YOLOv10, YOLO26, exports with `nms=True`).

    Of turned ones middles and sides stand in place of corners, and the angle is the last.
    """
    del size
    found = results["boxes"][row]
    found = found[found[:, 4] > threshold]
    return _finite(found[:, :4], found[:, 4], found[:, 5], found[:, 6:])


def _read_objects(results: Results, row: int, size: Size, threshold: float, *, is_grid: bool) -> Candidates:
    """YOLOv5 and YOLOX: middle and sides, whether there is anything, a score a class; the product of both is the score.

    YOLOX's are relative to the cell of a grid (its `demo_postprocess`); one that was exported with its decoder writes
    what YOLOv5 writes.
    """
    head = results["boxes"][row]
    index = np.flatnonzero(head[:, 4] > threshold)
    found = head[index]
    by_class = found[:, 5:] * found[:, 4:5]
    classes = by_class.argmax(axis=1)
    scores = np.take_along_axis(by_class, classes[:, None], 1)[:, 0]
    middles = found[:, :4]
    if is_grid:
        cells, strides = _grid(size, len(head))
        strides = strides[index, None]
        middles = np.concatenate([(middles[:, :2] + cells[index]) * strides, np.exp(middles[:, 2:]) * strides], axis=1)
    is_told = scores > threshold
    return _finite(_from_middles(middles[is_told]), scores[is_told], classes[is_told])


def _read_boxes_and_scores(results: Results, row: int, size: Size, threshold: float) -> Candidates:
    """YOLO-NAS: corners in pixels, and a score a class beside."""
    del size
    by_class = results["scores"][row]
    index = np.flatnonzero(by_class.max(axis=1) > threshold)
    by_class = by_class[index]
    classes = by_class.argmax(axis=1)
    return _finite(results["boxes"][row][index], np.take_along_axis(by_class, classes[:, None], 1)[:, 0], classes)


def _read_list(
    results: Results, row: int, size: Size, threshold: float, *, order: Sequence[int], by_shares: bool
) -> Candidates:
    """Finished boxes of all rows in one list, until one of row -1: OpenVINO's DetectionOutput, YOLO-NAS' flat export.

    order: where left, top, right, bottom, score and class stand.
    """
    found = results["boxes"].reshape(-1, 7)
    ends = np.flatnonzero(found[:, 0] < 0)
    found = found[: ends[0]] if len(ends) else found
    found = found[(found[:, 0] == row) & (found[:, order[4]] > threshold)][:, order]
    boxes = found[:, :4] * _scale(size) if by_shares else found[:, :4]
    return _finite(boxes, found[:, 4], found[:, 5])


def _read_ssd(results: Results, row: int, size: Size, threshold: float) -> Candidates:
    """TensorFlow's detectors: top, left, bottom, right as shares; class and score beside, and how many count."""
    boxes, scores, classes = results["boxes"][row], results["scores"][row], results["classes"][row]
    if not len(boxes) == len(scores) == len(classes):
        raise RunFailed(f"the model gave {len(boxes)} boxes, {len(scores)} scores and {len(classes)} classes")
    is_told = scores > threshold
    if "count" in results:
        counts = results["count"].reshape(-1)
        is_told &= np.arange(len(scores)) < counts[min(row, len(counts) - 1)]
    return _finite(boxes[is_told][:, [1, 0, 3, 2]] * _scale(size), scores[is_told], classes[is_told])


def _read_detr(results: Results, row: int, size: Size, threshold: float) -> Candidates:
    """DETR: logits with "nothing" as the last, one class a query (`PostProcess` of facebookresearch/detr)."""
    logits = results["scores"][row]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = (shares / shares.sum(axis=1, keepdims=True))[:, :-1]
    classes = shares.argmax(axis=1)
    scores = np.take_along_axis(shares, classes[:, None], 1)[:, 0]
    is_told = scores > threshold
    boxes = _from_middles(results["boxes"][row][is_told]) * _scale(size)
    return _finite(boxes, scores[is_told], classes[is_told])


def _read_queries(results: Results, row: int, size: Size, threshold: float) -> Candidates:
    """RF-DETR, RT-DETR and D-FINE: logits by query and class, of which a query may be several (their `PostProcess`)."""
    scores = 1 / (1 + np.exp(-results["scores"][row]))
    queries, classes = np.nonzero(scores > threshold)
    boxes = _from_middles(results["boxes"][row][queries]) * _scale(size)
    return _finite(boxes, scores[queries, classes], classes)


def _read_scored_queries(results: Results, row: int, size: Size, threshold: float) -> Candidates:
    """RT-DETR by Ultralytics: middles and sides as shares, then a score a class (`RTDETRPredictor`)."""
    found = results["boxes"][row]
    found = found[found[:, 4:].max(axis=1) > threshold]
    classes = found[:, 4:].argmax(axis=1)
    scores = np.take_along_axis(found[:, 4:], classes[:, None], 1)[:, 0]
    return _finite(_from_middles(found[:, :4]) * _scale(size), scores, classes)


def _finite(
    boxes: Floats, scores: Floats, classes: npt.NDArray[np.generic], extras: Floats | None = None
) -> Candidates:
    """Candidates without those whose place or class is not a number. A score that is none is above no threshold."""
    extras = np.empty((len(boxes), 0), np.float32) if extras is None else extras
    is_sound = np.isfinite(boxes).all(axis=1) & np.isfinite(scores) & np.isfinite(extras).all(axis=1)
    if classes.dtype.kind == "f":
        is_sound &= np.isfinite(classes) & (np.abs(classes) < 1e6)
    return Candidates(boxes[is_sound], scores[is_sound], classes[is_sound].astype(np.intp), extras[is_sound])


def _from_middles(middles: Floats) -> Floats:
    """Corners of [n, 4] middles and sides."""
    half = middles[:, 2:] / 2
    return np.concatenate([middles[:, :2] - half, middles[:, :2] + half], axis=1)


def _scale(size: Size) -> Floats:
    return np.array((*size, *size), np.float32)


@functools.lru_cache(maxsize=8)
def _grid(size: Size, count: int) -> tuple[Floats, Floats]:
    """The cells of YOLOX's grids, [count, 2], and the stride of each, [count]. Raises RunFailed: they do not fit."""
    width, height = size
    for strides in _STRIDES:
        shapes = [(height // stride, width // stride) for stride in strides]
        if sum(rows * columns for rows, columns in shapes) != count:
            continue
        cells = [
            np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), 2).reshape(-1, 2) for rows, columns in shapes
        ]
        steps = [np.full(rows * columns, stride) for stride, (rows, columns) in zip(strides, shapes, strict=True)]
        return np.concatenate(cells).astype(np.float32), np.concatenate(steps).astype(np.float32)
    raise RunFailed(
        f"{count} cells are none of YOLOX's for {width} x {height} pixels (strides 8, 16, 32, and 64 in larger ones)"
    )
