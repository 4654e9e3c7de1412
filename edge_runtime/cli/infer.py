"""Run a model once on a running daemon and show the answer; or once for each of some pictures.

  edge-runtime infer yolo photo.jpg --draw out/
  edge-runtime infer sentiment "great film"
  edge-runtime infer sentiment --text "great film" --text - < reviews.txt
  edge-runtime infer digits --input image=scan.npy
  edge-runtime infer qwen --prompt "Once upon a time" -p max_tokens=64
  edge-runtime infer digits --random --timing
  echo '{"image": [[0, 0.5, …]]}' | edge-runtime infer digits --input -

Inputs: .npy; .json and @JSON (nested lists; they take the model's datatype); .bin (raw little-endian bytes); pictures
where the model's model.toml declares what they mean, or --as says it once; text for a model with one input of BYTES.
With --prompt a language model goes on with the text, which is printed as it comes; edge-runtime chat talks to one. With
--image FILE beside it, a model that sees pictures answers the text as a message.
On stdin: JSON, or values as they are, a row a line. Outputs that declare answers are shown in words; --raw has numbers.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_runtime.cli import answers as pictures
from edge_runtime.cli.arguments import UsageError, add_connection, milliseconds, positive
from edge_runtime.cli.connection import connected
from edge_runtime.cli.inputs import (
    add_input_arguments,
    add_text_arguments,
    bytes_of,
    form_specs,
    input_options,
    specs_of,
    tensors,
    texts_of,
)
from edge_runtime.cli.screen import Screen, ms_text
from edge_runtime.cli.written import WrittenText, check_writes, parameters_of, write_parts
from edge_runtime.client.core import declared_steps, input_name, picture_input_name
from edge_runtime.client.pictures import read_picture
from edge_runtime.doors.zmq.load_generator import quantile
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.messages import TEXT, InferResult
from edge_runtime.model_spec import DYNAMIC
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from edge_runtime.client.blocking_client import BlockingClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infer`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "values",
        metavar="PICTURE|TEXT",
        nargs="*",
        default=[],
        help="a picture, or a folder of them: each is asked by itself; texts for a model that takes BYTES: one request",
    )
    add_text_arguments(parser)
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what a language model goes on with, printed as it comes; - reads stdin"
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="with --prompt: a picture for a model that sees them; may be given several times",
    )
    parser.add_argument(
        "-p",
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a parameter of the request: VALUE is JSON, else text",
    )
    parser.add_argument("--draw", metavar="DIR|FILE", type=Path, help="write copies of the pictures with their answers")
    parser.add_argument(
        "--as",
        dest="once",
        metavar="KEY=VALUE,…",
        help="how a picture becomes the tensor of a model that declares nothing: range=0..1,fit=stretch and the other "
        "keys of [input.NAME]; its bare outputs are shown",
    )
    parser.add_argument("--raw", action="store_true", help="the bare outputs, where others are answers in words")
    parser.add_argument("--version", metavar="N", type=positive, help="one version (default: the daemon's choice)")
    parser.add_argument("--outputs", metavar="NAME,…", help="these outputs, in this order (default: all)")
    parser.add_argument(
        "--output", metavar="DIR|FILE.npy", type=Path, help="save the outputs as .npy: of tensors, the bare ones"
    )
    parser.add_argument("--timeout-ms", metavar="MS", type=milliseconds, help="deadline of the request")
    parser.add_argument("--priority", metavar="N", type=int, default=0, choices=range(1, 10), help="1 (first) to 9")
    parser.add_argument("--timing", action="store_true", help="show where the time went")
    parser.add_argument("--repeat", metavar="N", type=positive, default=1, help="ask N times and show latencies")
    add_input_arguments(parser)
    add_connection(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Send the request, show the answer, save it."""
    if arguments.prompt is not None:
        return _write(arguments, screen)
    asked = input_options(arguments)
    _check_options(arguments)
    with connected(arguments) as client:
        metadata = client.metadata(arguments.model, arguments.version)
        asking = _Asking(client, arguments, metadata, screen)
        specs = list(specs_of(metadata))
        files: Sequence[Path] = ()
        said = texts_of(arguments, metadata, arguments.values)
        takes_text = bool(input_name(metadata, "text"))
        if said is not None:
            asking.inputs = said
            specs = [each for each in form_specs(metadata, next(iter(said))) if each.name not in said]
        elif arguments.values and asking.name:
            files = pictures.files_of([Path(each) for each in arguments.values], [each.name for each in specs])
            specs = [each for each in specs if each.name != asking.name]
        elif arguments.values:
            text = pictures.text_input(metadata, asked.texts, arguments.values)
            asking.inputs = {text.name: bytes_of(arguments.values, text, screen)}
            specs = [each for each in specs if each is not text and each.name != text.name]
        _check_files(arguments, files)
        asking.inputs = {**asking.inputs, **tensors(asked, specs, screen, asking.name, takes_text=takes_text)}
        if len(files) > 1:
            return _show_each(asking, files, screen)
        latencies_ms: list[float] = []
        for _ in range(arguments.repeat):
            began_s = time.perf_counter()
            result = asking.ask(files[0] if files else None)
            latencies_ms.append((time.perf_counter() - began_s) * 1e3)
    _show(asking, result, files[0] if files else None, latencies_ms, screen)
    return 0


def _write(arguments: argparse.Namespace, screen: Screen) -> int:
    """Have a language model go on with a text; print what it writes as it comes."""
    given = {"PICTURE|TEXT": arguments.values, "--text": arguments.text, "--input": arguments.input}
    given |= {"--draw": arguments.draw, "--output": arguments.output, "--as": arguments.once}
    if others := [name for name, value in given.items() if value]:
        raise UsageError(f"--prompt is the whole request; leave {others[0]} out")
    if arguments.repeat > 1:
        raise UsageError("--prompt is asked once; edge-runtime bench measures a model")
    parameters = parameters_of(arguments.parameter)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    written = WrittenText()
    with connected(arguments) as client:
        check_writes(client.metadata(arguments.model, arguments.version), TEXT, "--prompt")
        pictures = {"pictures": arguments.image} if arguments.image else {}
        parts = client.stream(
            arguments.model,
            text=prompt,
            version=arguments.version,
            outputs=arguments.outputs.split(",") if arguments.outputs else None,
            timeout_ms=arguments.timeout_ms,
            priority=arguments.priority,
            timing=arguments.timing,
            **pictures,
            **parameters,
        )
        try:
            with parts:
                write_parts(parts, written, screen)
        finally:
            if written.text and not screen.wants_json:
                screen.line()
    if screen.wants_json:
        timing = written.timing
        told = {} if timing is None else {"timing": {name: getattr(timing, name) for name in timing.__struct_fields__}}
        screen.json({**written.fields(), **told})
    elif arguments.timing:
        screen.note(written.summary())
    return 0


class _Asking:
    """A request to one model. name: of the input that takes pictures. inputs: the others."""

    def __init__(
        self, client: BlockingClient, arguments: argparse.Namespace, metadata: Mapping[str, Any], screen: Screen
    ) -> None:
        """Raises UsageError for --as where the model declares how it reads pictures."""
        self.inputs: Mapping[str, Array] = {}
        self.steps = declared_steps(metadata)
        self.name = picture_input_name(metadata)
        self.draws_to: Path | None = arguments.draw
        self.saves_to: Path | None = arguments.output
        self._client = client
        self._model: str = arguments.model
        self._screen = screen
        self._spec = pictures.spec_of(metadata)
        both = [*metadata["inputs"], *metadata["outputs"]]
        has_rows = all(tensor["shape"] and tensor["shape"][0] == DYNAMIC for tensor in both)
        self._most_rows = int(metadata.get("max_batch_rows", 0)) if has_rows else 0
        self._has_told_pieces = False
        self._once = None if arguments.once is None else pictures.steps_once(arguments.once)
        self._options: dict[str, Any] = {
            "version": arguments.version,
            "outputs": arguments.outputs.split(",") if arguments.outputs else None,
            "timeout_ms": arguments.timeout_ms,
            "priority": arguments.priority,
            "timing": arguments.timing,
            "raw": True if arguments.raw else None,
            "parameters": parameters_of(arguments.parameter) or None,
        }
        # What is saved are numbers, and outputs that declare no answer have none.
        names = set(self._options["outputs"] or self.steps.outputs)
        self._tells_words = bool(names) and names <= self.steps.outputs.keys() and arguments.output is None
        if self._once is not None:
            if self.name:
                raise UsageError(
                    f"--as: model {self._model!r} declares how it reads pictures (edge-runtime models show "
                    f"{self._model}); leave it out"
                )
            self.name = pictures.picture_name(self._spec)

    def ask(self, file: Path | None, *, retry: bool = False) -> InferResult:
        """Ask once, with a picture where there is one. Thread: any."""
        if file is None:
            return self._ask_in_pieces()
        if self._once is None:
            return self._client.infer(self._model, self.inputs, picture=file, retry=retry, **self._options)
        tensor, read = pictures.tensor_once(read_picture(file), self._once, self._spec)
        self._screen.note(f"{file}: read {read}")
        inputs = {**self.inputs, self.name: tensor}
        return self._infer(inputs, retry=retry)

    def _infer(self, inputs: Mapping[str, Array], *, retry: bool = False) -> InferResult:
        """Ask with tensors, for answers in words where the outputs declare them."""
        options = self._options
        if options["raw"] is None and self._tells_words:
            options = {**options, "raw": False}
        return self._client.infer(self._model, inputs, retry=retry, **options)

    def _ask_in_pieces(self) -> InferResult:
        """Ask with the tensors: once, or with as many rows at a time as one request may have."""
        rows = {array.shape[0] if array.ndim else 0 for array in self.inputs.values()}
        most = self._most_rows
        if len(rows) != 1 or not 0 < most < max(rows):
            return self._infer(self.inputs)
        results = []
        for start in range(0, max(rows), most):
            piece = {name: array[start : start + most] for name, array in self.inputs.items()}
            results.append(self._infer(piece, retry=True))
        if not self._has_told_pieces:
            self._has_told_pieces = True
            self._screen.note(f"{max(rows):,} rows in {len(results):,} requests: one takes {most:,}")
        joined = {name: np.concatenate([each[name] for each in results]) for name in results[0]}
        answers = tuple(answer for each in results for answer in each.answers)
        return replace(results[0], outputs=joined, answers=answers)

    def ask_patiently(self, file: Path) -> InferResult:
        """As `ask`, again while the daemon refuses."""
        return self.ask(file, retry=True)

    def draw(self, file: Path, result: InferResult, *, is_alone: bool) -> Path | None:
        """Write the drawn copy of a picture where it is wanted; return its path."""
        if self.draws_to is None:
            return None
        return pictures.draw_answer(file, result, self.steps, self.draws_to, is_alone=is_alone)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together, ConfigError where Pillow is missing."""
    if arguments.image:
        raise UsageError("--image is for a language model, beside --prompt; a model of pictures takes MODEL PICTURE")
    if not arguments.values and (arguments.draw is not None or arguments.once is not None):
        raise UsageError(f"{'--draw' if arguments.draw is not None else '--as'} is for pictures; wanted MODEL PICTURE")
    if arguments.once is not None:
        pictures.check_pillow("--as")
    if arguments.draw is not None and (arguments.raw or arguments.once is not None):
        raise UsageError("--draw draws answers, which --raw and --as do not give; leave one of them out")


def _check_files(arguments: argparse.Namespace, files: Sequence[Path]) -> None:
    """Raise UsageError for options that do not go with these pictures, ConfigError where Pillow is missing."""
    if arguments.draw is not None:
        if not files:
            raise UsageError(f"--draw is for pictures, and model {arguments.model!r} takes none; leave it out")
        pictures.check_draw("--draw", arguments.draw, is_alone=len(files) == 1)
    if len(files) > 1:
        for option, is_said in (("--repeat", arguments.repeat > 1), ("--output", arguments.output is not None)):
            if is_said:
                raise UsageError(f"{option} is for one picture; there are {len(files)}")


def _show(
    asking: _Asking, result: InferResult, file: Path | None, latencies_ms: Sequence[float], screen: Screen
) -> None:
    """Print one answer and what was saved of it."""
    saved = save(result.outputs, asking.saves_to) if asking.saves_to is not None else []
    drawn = asking.draw(file, result, is_alone=True) if file is not None else None
    if drawn is not None:
        saved = [*saved, drawn]
    summary = {name: quantile(latencies_ms, q) for name, q in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}
    if screen.wants_json:
        screen.json(
            {
                **pictures.answer_json(result, asking.steps),
                "latency_ms": summary,
                "saved": [str(path) for path in saved],
            }
        )
        return
    pictures.print_answer(result, screen, asking.steps)
    times = ", ".join(f"{name} {ms_text(value)} ms" for name, value in summary.items())
    repeated = len(latencies_ms)
    screen.line(f"{repeated:,} times: {times}" if repeated > 1 else f"took {ms_text(summary['max'])} ms")
    for path in saved:
        screen.line(f"saved {path}")


def _show_each(asking: _Asking, files: Sequence[Path], screen: Screen) -> int:
    """Ask with each picture and print a line for it; 1 where one failed."""
    began_s = time.monotonic()
    told: list[dict[str, Any]] = []
    failed = 0
    for file, result in pictures.ask_each(files, asking.ask_patiently, screen):
        drawn = None
        if isinstance(result, InferResult):
            try:
                drawn = asking.draw(file, result, is_alone=False)
            except (EdgeRuntimeError, OSError) as error:
                result = error  # noqa: PLW2901 (what became of this file)
        if not isinstance(result, InferResult):
            failed += 1
            told.append({"file": str(file), "error": pictures.error_json(result)})
            screen.note(f"{file}: {result}")
            continue
        told.append({"file": str(file), **pictures.answer_json(result, asking.steps)})
        if drawn is not None:
            told[-1]["saved"] = str(drawn)
        if screen.wants_json:
            continue
        if result.answers or asking.steps.has_items:
            words = "; ".join(map(pictures.short_answer, result.answers)) or "nothing found"
            screen.line(f"{screen.painted(str(file), 'bold')}  {words}")
        else:
            screen.line(screen.painted(str(file), "bold"))
            pictures.print_answer(result, screen, asking.steps)
    took_s = time.monotonic() - began_s
    if screen.wants_json:
        screen.json({"answers": told, "failed": failed, "seconds": round(took_s, 3)})
    else:
        wrong = f", {failed} failed" if failed else ""
        screen.line(f"{len(files):,} pictures{wrong}, {took_s:.1f} s")
        if asking.draws_to is not None:
            screen.line(f"drawn into {asking.draws_to}")
    return 1 if failed else 0


def save(outputs: Mapping[str, Array], where: Path) -> list[Path]:
    """Write outputs as .npy: one file for a model's only output, else a file each in a folder. Returns the files."""
    if where.suffix == ".npy":
        if len(outputs) != 1:
            raise UsageError(f"--output {where}: the model has {len(outputs)} outputs; name a folder, or one --outputs")
        files = {where: next(iter(outputs.values()))}
    else:
        where.mkdir(parents=True, exist_ok=True)
        files = {where / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.npy": array for name, array in outputs.items()}
    for path, array in files.items():
        np.save(path, array.astype("S") if array.dtype.kind == "O" else array, allow_pickle=False)
    return list(files)
