"""Pictures on the command line: which ones are asked, how one becomes a tensor by `--as`, and how answers look.

Owns: the meaning of PICTURE, `--as` and `--draw`, and answers as text and JSON. client/pictures.py makes the tensors of
what the model's declared steps read, the capability of pictures the drawn copies.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime import plugins
from edge_runtime.answers import BESIDE, Answer, answer_fields, kind_of, layout_of
from edge_runtime.cli.arguments import UsageError, nearest
from edge_runtime.cli.screen import Screen, ms_text, shape_text
from edge_runtime.client.core import declared_steps, picture_input_name
from edge_runtime.client.pictures import SUFFIXES, picture_files, read_picture
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, TensorMismatch
from edge_runtime.hosts.steps_instance import steps_declaration, why_undeclared
from edge_runtime.messages import InferResult
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.steps import InputSteps, ModelSteps, OutputSteps
from edge_runtime.tensors import Array, datatype_name

AT_ONCE = 4
"""Pictures of a folder on their way at the same time: a batch for a small device."""

PROGRESS_AFTER_S = 1.0
SHOWN_LABELS = 5
SHOWN_ROWS = 20
"""Answers of one request that are shown to a person: what fits a screen or two."""


WHOLE_ELEMENTS = 64
"""Arrays up to this size are shown whole: about eight lines."""

MAX_SCORE_ROWS = 4
BEST = 5
MIN_SCORES = 6
"""Fewer classes are read at a glance."""

Ask = Callable[[Path], InferResult]


def files_of(paths: Sequence[Path], inputs: Sequence[str] = ()) -> list[Path]:
    """The files that were named, and those of named folders. inputs: of the model, which are named by an option.

    Raises UsageError, and TensorMismatch for no picture.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            name, _, file = str(path).partition("=")
            if name in inputs:
                raise UsageError(f"{path}: wanted {file} alone, or --input {name}={file}")
            raise UsageError(f"{path}: there is no such file or folder; wanted a picture, or a folder of them")
        found += picture_files(path) if path.is_dir() else [path]
    return found


def spec_of(metadata: Mapping[str, Any]) -> ModelSpec:
    """Return a model's inputs and outputs."""
    inputs, outputs = (
        tuple(
            TensorSpec(str(each["name"]), str(each["datatype"]), tuple(each["shape"])) for each in metadata.get(key, ())
        )
        for key in ("inputs", "outputs")
    )
    return ModelSpec(inputs, outputs)


def why_none(metadata: Mapping[str, Any]) -> str:
    """Why a model takes no picture, with the lines to write."""
    name, is_pipeline = str(metadata.get("name", "")), "pipeline" in metadata
    return why_undeclared(name, spec_of(metadata), metadata.get("preset"), is_pipeline=is_pipeline)


def text_input(metadata: Mapping[str, Any], named: Mapping[str, str], values: Sequence[str]) -> TensorSpec:
    """The only input of BYTES that is not given otherwise, for texts. named: inputs that are.

    Raises UsageError where there is none, or several; TensorMismatch for pictures that the model does not take.
    """
    model, inputs = metadata.get("name"), spec_of(metadata).inputs
    able = [each for each in inputs if each.datatype == "BYTES" and each.name not in named]
    if len(able) == 1:
        return able[0]
    if able:
        wanted = " ".join(f"--input '{each.name}=@TEXT'" for each in able)
        raise UsageError(f"{values[0]}: model {model!r} has {len(able)} inputs for text, say which: {wanted}")
    name, has_name, file = values[0].partition("=")
    if has_name and any(each.name == name for each in inputs):
        raise UsageError(f"{values[0]}: an input by its name is an option: --input {name}={file}")
    path = Path(values[0])
    if path.is_dir() or path.suffix.lower() in SUFFIXES:
        once = "\nFor once, say it with --as: edge-runtime infer MODEL PICTURE --as range=0..1,fit=stretch"
        raise TensorMismatch(why_none(metadata) + ("" if "pipeline" in metadata else once))
    there = ", ".join(f"{each.name} {each.datatype} {shape_text(each.shape)}" for each in inputs)
    name = inputs[0].name if inputs else "NAME"
    raise UsageError(
        f"{values[0]}: model {model!r} takes neither pictures nor text; it has the inputs {there}: "
        f"--input {name}=FILE, --input {name}=@JSON, or --random"
    )


# ---- --as -----------------------------------------------------------------------------------------------------------


def steps_once(text: str) -> InputSteps:
    """Read `range=0..1,fit=stretch,mean=123.7,116.3,103.5`: keys of `[input.NAME]`. Raises UsageError."""
    import msgspec

    values: dict[str, str] = {}
    key = ""
    for part in text.split(","):
        name, is_key, value = part.partition("=")
        if is_key:
            key = name.strip()
            if key in values:
                raise UsageError(f"--as: {key} is given twice")
            values[key] = value.strip()
        elif key:
            values[key] += f",{part.strip()}"
        else:
            raise UsageError(f"--as: got {text!r}, wanted KEY=VALUE,…, for example range=0..1,fit=stretch")
    kind: type[InputSteps] = plugins.named(steps_declaration("picture").table)
    known = [each for each in kind.__struct_encode_fields__ if each not in ("from", "shape", "datatype")]
    for name in values:
        if name not in known:
            raise UsageError(f"--as: there is no {name!r}{nearest(name, known)}; wanted {', '.join(known)}")
    lists = ("mean", "scale", "fill", "size")
    fields = {name: value.split(",") if name in lists else value for name, value in values.items()}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--as {text}: {error}") from None


def picture_name(spec: ModelSpec) -> str:
    """The only input that a picture may become. Raises UsageError where several may."""
    able = [each for each in spec.inputs if len(each.shape) == 4] if len(spec.inputs) > 1 else list(spec.inputs)
    if len(able) != 1:
        there = ", ".join(f"{each.name} {list(each.shape)}" for each in spec.inputs)
        raise UsageError(f"--as: wanted a model with one input of [rows, 3, height, width]; it has {there}")
    return able[0].name


def tensor_once(data: bytes, steps: InputSteps, spec: ModelSpec) -> tuple[Array, str]:
    """One picture as the tensor of `picture_name`, and how it was read.

    Raises UsageError where the steps do not fit the model, UnreadablePicture for what is not a picture.
    """
    name = picture_name(spec)
    try:
        tensor = plugins.named(steps_declaration(steps.source).reader)(spec, ModelSteps({name: steps}), 1, 1)
    except LoadFailed as error:
        raise UsageError(f"--as: {error.message.removeprefix(f'[input.{name}]: ')}") from None
    assert tensor is not None
    sent: Array = np.empty(1, object)
    sent[0] = data
    rows, (placed,) = tensor.rows("picture", sent)
    only = next(each for each in spec.inputs if each.name == name)
    words = ", ".join(steps.words(only).values())
    return rows, f"{placed.source_width} x {placed.source_height}, {words}"


# ---- asking ---------------------------------------------------------------------------------------------------------


def ask_each(
    files: Sequence[Path], ask: Ask, screen: Screen
) -> Iterator[tuple[Path, InferResult | EdgeRuntimeError | OSError]]:
    """Ask with each file, some at the same time; yields in their order what came of each.

    Progress is shown after a second, unless the answers themselves go by on a terminal.
    """
    label = f"asking with {len(files):,} pictures"
    is_quiet = screen.wants_json or not screen.is_terminal
    began_s = time.monotonic()
    waiting: deque[tuple[Path, Future[InferResult]]] = deque()
    left = iter(files)
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="edge-pictures")
    with ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        progress = None
        for done in range(len(files)):
            waiting.extend((file, pool.submit(ask, file)) for file in islice(left, AT_ONCE - len(waiting)))
            file, future = waiting.popleft()
            yield file, _result(future)
            if is_quiet and progress is None and time.monotonic() - began_s > PROGRESS_AFTER_S:
                progress = stack.enter_context(screen.progress(label))
            if progress is not None:
                progress.show(label, f"{done + 1:,}", (done + 1) / len(files))


def error_json(error: EdgeRuntimeError | OSError) -> dict[str, Any]:
    """Return the error of an unanswered file, as `--json` has errors."""
    if isinstance(error, EdgeRuntimeError):
        return {"code": error.code, "message": error.message, "retryable": error.retryable}
    return {"code": "unavailable", "message": str(error), "retryable": False}


def _result(future: Future[InferResult]) -> InferResult | EdgeRuntimeError | OSError:
    try:
        return future.result()
    except (EdgeRuntimeError, OSError) as error:
        return error


# ---- drawing --------------------------------------------------------------------------------------------------------


def check_pillow(option: str) -> None:
    """Raise ConfigError where Pillow is missing."""
    _drawing().check_pillow(option)


def _drawing() -> Any:
    """Import the module that draws answers into pictures."""
    return plugins.named(steps_declaration("picture").drawing)


def check_draw(option: str, to: Path, *, is_alone: bool) -> None:
    """Raise ConfigError where Pillow is missing, UsageError for a file of a kind that is not written."""
    check_pillow(option)
    if to.suffix and not to.is_dir():
        if not is_alone:
            raise UsageError(f"{option} {to}: wanted a folder for several pictures")
        if to.suffix.lower() not in _drawing().SAVED:
            raise UsageError(
                f"{option} {to}: wanted a folder, or a name that ends in one of {', '.join(_drawing().SAVED)}"
            )


def draw_answer(file: Path, result: InferResult, steps: ModelSteps, to: Path, *, is_alone: bool) -> Path:
    """Write a copy of a picture with its answer. to: a folder, or where it is alone a file. Returns the copy's path.

    Raises UsageError where the copy would replace the picture, TensorMismatch where there is no answer.
    """
    if not result.answers and not steps.has_items:
        raise TensorMismatch(
            f"model {result.model!r} gives no answer that could be drawn; it declares no [output.NAME]"
        )
    if steps.has_items:
        raise TensorMismatch(
            f"pipeline {result.model!r} answers of items in the picture, and not where they are; add the boxes that "
            "they were cut out by to its [output]"
        )
    if not (is_alone and to.suffix and not to.is_dir()):
        to.mkdir(parents=True, exist_ok=True)
        to /= file.name if file.suffix.lower() in _drawing().SAVED else f"{file.name}.png"
    if to.exists() and to.samefile(file):
        raise UsageError(f"--draw: {to} is the picture itself; name another folder")
    _drawing().draw(read_picture(file), result.answers[0], mask_labels(steps), to)
    return to


def mask_labels(steps: ModelSteps) -> Sequence[str]:
    """The labels of a mask's classes; none where no output is a mask."""
    return next((steps.labels.get(name, ()) for name, each in steps.outputs.items() if each.answer == "mask"), ())


# ---- answers as text ------------------------------------------------------------------------------------------------


def answer_lines(answer: Answer, labels: Sequence[str] = ()) -> list[str]:
    """An answer, a line for each class, box or part. labels: of a mask's classes."""
    return [line for kind, value in answer.values().items() for line in layout_of(kind).lines(value, labels)]


def short_answer(answer: Answer) -> str:
    """An answer in one line, for one picture among others."""
    return ", ".join(word for kind, value in answer.values().items() for word in layout_of(kind).short(value))


def read_text(answer: Answer) -> str:
    """How a picture was read: its size, the fit, the colours."""
    read = answer.picture
    return "" if read is None else f"{read.width} x {read.height}, {read.fit}, {read.color}"


def bare_outputs(result: InferResult, steps: ModelSteps) -> dict[str, Array]:
    """The outputs that no answer was made of."""
    if not result.answers:
        return dict(result.outputs)
    return {name: each for name, each in result.outputs.items() if name not in {*steps.outputs, *BESIDE}}


def print_answer(result: InferResult, screen: Screen, steps: ModelSteps) -> None:
    """Print what was seen, and every output that is not an answer with its datatype and shape."""
    screen.heading(f"{result.model} version {result.version}")
    for row, answer in enumerate(result.answers[:SHOWN_ROWS], 1):
        if len(result.answers) > 1:
            screen.line(screen.painted(f"{'item' if steps.has_items else 'row'} {row}", "dim"))
        if answer.picture is not None:
            screen.line(screen.painted(read_text(answer), "dim"))
        for line in answer_lines(answer, mask_labels(steps)):
            screen.line(f"  {line}")
    if len(result.answers) > SHOWN_ROWS:
        screen.line(f"and {len(result.answers) - SHOWN_ROWS:,} rows more; --json has them all")
    for name, array in bare_outputs(result, steps).items():
        screen.line(f"{screen.painted(name, 'bold')}  {datatype_name(array.dtype)} {shape_text(array.shape)}")
        for line in _lines(array):
            screen.line(f"  {line}")
    if result.timing is not None:
        timing = result.timing
        screen.line(
            f"waited {ms_text(timing.queue_ms)} ms, ran {ms_text(timing.run_ms)} ms in a batch of {timing.batch_rows}"
        )


def answer_json(result: InferResult, steps: ModelSteps) -> dict[str, Any]:
    """Return the answer as the Open Inference Protocol writes it: flat data, NaN and infinities as text.

    What was seen in a picture is in the words of every door, in place of the outputs that it was made of.
    """
    answer: dict[str, Any] = {"model_name": result.model, "model_version": str(result.version)}
    if result.answers:
        answer |= answer_fields(result.answers, as_list=steps.has_items)
    bare = bare_outputs(result, steps)
    if bare or not result.answers:
        answer["outputs"] = [
            {
                "name": name,
                "datatype": datatype_name(array.dtype),
                "shape": list(array.shape),
                "data": [_json_value(value) for value in array.reshape(-1).tolist()],
            }
            for name, array in bare.items()
        ]
    if result.timing is not None:
        timing = result.timing
        answer["timing"] = {"queue_ms": timing.queue_ms, "run_ms": timing.run_ms, "batch_rows": timing.batch_rows}
    return answer


def _lines(array: Array) -> list[str]:
    if array.size == 0:
        return ["empty"]
    if array.dtype.kind == "O":
        array = array.copy()
        array.flat[:] = [_json_value(each) for each in array.flat]
    if _are_scores(array):
        rows = array.reshape(-1, array.shape[-1])
        return [line for row in rows for line in _best(row)]
    if array.size <= WHOLE_ELEMENTS:
        shown = np.array2string(array, precision=4, suppress_small=True, max_line_width=100, separator=", ")
        return shown.splitlines()
    lines = [np.array2string(array, precision=4, suppress_small=True, max_line_width=100, threshold=8, edgeitems=2)]
    if array.dtype.kind in "iuf":
        numbers = array.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        if finite.size:
            lines.append(
                f"min {finite.min():.4g}, mean {finite.mean():.4g}, max {finite.max():.4g}, std {finite.std():.4g}"
            )
        if finite.size < numbers.size:
            lines.append(f"{numbers.size - finite.size:,} values are NaN or infinite")
    return [line for text in lines for line in text.splitlines()]


def _are_scores(array: Array) -> bool:
    """Return whether an array is a few rows with one float for each class."""
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or array.shape[-1] < MIN_SCORES:
        return False
    return array.size // array.shape[-1] <= MAX_SCORE_ROWS and bool(np.isfinite(array).all())


def _best(row: Array) -> list[str]:
    scores = row.astype(np.float64)
    best = np.argsort(-scores, kind="stable")[:BEST]
    is_share = bool((scores >= 0).all()) and abs(float(scores.sum()) - 1) < 0.01
    width = len(str(int(best.max())))
    values = (f"{scores[index]:.2%}" if is_share else f"{scores[index]:.4f}" for index in best)
    return [
        f"{rank}. [{str(index).rjust(width)}]  {value}"
        for rank, (index, value) in enumerate(zip(best, values, strict=True), 1)
    ]


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# ---- steps as text --------------------------------------------------------------------------------------------------


def print_steps(metadata: Mapping[str, Any], screen: Screen) -> None:
    """Print how a picture becomes the tensor, and what each output answers."""
    steps, spec = declared_steps(metadata), spec_of(metadata)
    if "preset" in metadata:
        screen.line()
        screen.line(f'it takes pictures once its model.toml says: preset = "{metadata["preset"]}"')
    tensors = {each.name: each for each in spec.inputs}
    if name := "pipeline" in metadata and picture_input_name(metadata):
        screen.line()
        screen.heading(f"{name}: a picture")
    for name, each in steps.inputs.items() if "pipeline" not in metadata else ():
        screen.line()
        screen.heading(f"{name}: {each.title()} in place of the tensor")
        tensor = tensors.get(name)
        words = each.words(tensor)
        if tensor is not None:
            words["tensor"] = f"{tensor.datatype} {shape_text(tensor.shape)}"
        screen.fields(words)
    for name, output in steps.outputs.items():
        screen.line()
        screen.heading(f"{name}: answers {kind_of(output)}")
        screen.fields(output_words(output, steps.labels.get(name, ())))


def output_words(output: OutputSteps, labels: Sequence[str]) -> dict[str, str]:
    """How an output becomes an answer, by what is said of it; empty where something is not of this kind of answer."""
    kind = kind_of(output)
    softmax = {None: "where scores are not probabilities", True: "yes", False: "no"}[output.softmax]
    has_boxes = kind in ("boxes", "masks", "keypoints")
    is_bound = has_boxes or (kind in ("classes", "tags") and output.threshold > OutputSteps().threshold)
    more = ", …" if len(labels) > SHOWN_LABELS else ""
    return {
        "unit": output.unit or "",
        "tokens": output.pool or "",
        "layout": output.layout or "",
        "softmax": softmax if kind in ("classes", "tags") else "",
        "most": str(output.top_k if kind == "classes" else output.most if has_boxes else ""),
        "threshold": f"{output.threshold:g}" if is_bound else "",
        "overlap": f"{output.overlap:g}" if has_boxes and output.overlap is not None else "",
        "wanted": ", ".join(output.wanted),
        "labels": f"{len(labels):,}: {', '.join(labels[:SHOWN_LABELS])}{more}" if labels else "",
    }


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in values) if len(values) == 1 else f"[{', '.join(f'{v:g}' for v in values)}]"
