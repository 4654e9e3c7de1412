"""One conversion from beginning to end: decide, convert in a process of its own, compare, give the artifact its name.

Owns: that process with its limits, and that nothing is written unless the result is near its source (or is to be kept
all the same).
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path

import msgspec

from edge_runtime.errors import ConversionFailed
from edge_runtime.serving.trial_process import Ended, run_child
from edge_runtime_converters.conversion_child import Request, Result
from edge_runtime_converters.matrix import artifact_name, default_output, route, suffix_of
from edge_runtime_converters.output_files import check_free, place, work_folder
from edge_runtime_converters.report import Report
from edge_runtime_converters.source_format import SourceFormat, format_of
from edge_runtime_converters.wish import Wish, absolute, parse_shapes

_CHILD = "edge_runtime_converters.conversion_child"
_LOOK_S = 0.1
_FULL_BYTES = 1 << 16
"""Free space below which a disk counts as full: nothing that a conversion writes in one piece is smaller."""

Show = Callable[[str, float | None], None]
"""What is done now, and its share of 0 to 1 where one is known."""


def convert(wish: Wish, show: Show = lambda _label, _share: None) -> Report:
    """Convert, and write the artifact where the wish says.

    The report has faults, and no files, where the result is too far from its source and is not to be kept. Raises
    ConversionFailed: nothing was written. Thread: any; a child process does the work.
    """
    source = Path(wish.source)
    source_format = format_of(source)
    route(source_format, wish.target, wish.precision)
    parse_shapes(wish.shapes)
    if wish.gpu and wish.target != "tensorrt":
        raise ConversionFailed(f"--gpu {wish.gpu} says what an engine is built for; --to {wish.target} fits any device")
    if wish.is_for_tensorrt and (wish.target, wish.precision) != ("onnx", "int8"):
        raise ConversionFailed(
            "--for-tensorrt says what numbers an int8 ONNX model holds; it goes with --to onnx --precision int8"
        )
    output = _output(wish, source)
    with work_folder(output.absolute()) as work:
        (work / "out").mkdir()
        report = _reported(absolute(wish, output), source_format, work, show)
        if report.is_near_enough or wish.keep:
            placed = place(work / "out", output, may_replace=wish.overwrite)
            report = msgspec.structs.replace(report, files=tuple(map(str, placed)))
        return msgspec.structs.replace(report, source=wish.source)


def _output(wish: Wish, source: Path) -> Path:
    output = Path(wish.output) if wish.output else default_output(source, wish.target, wish.precision)
    suffix = suffix_of(wish.target)
    if wish.output.endswith(os.sep) or (output.is_dir() and output.suffix != suffix):
        output /= artifact_name("model", wish.target, wish.precision)  # as a version folder has it
    if output.suffix != suffix:
        raise ConversionFailed(f"{output}: wanted a name that ends in {suffix} for {wish.target}")
    for path in (output, output.with_suffix(".bin")) if suffix == ".xml" else (output,):
        if path.is_dir():
            raise ConversionFailed(f"{path} is a folder; name a file with --output")
        check_free(path, may_replace=wish.overwrite)
    return output


def _reported(wish: Wish, source_format: SourceFormat, work: Path, show: Show) -> Report:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    request = Request(wish, source_format.name, str(work), memory)
    stop = threading.Event()
    with ThreadPoolExecutor(1, "conversion") as pool:
        running = pool.submit(run_child, _CHILD, msgspec.json.encode(request), limit_s=wish.timeout_s, stop=stop)
        try:
            _watch(running, work / "stage", show)
        finally:
            stop.set()  # at Ctrl-C; otherwise it has ended
    try:
        return _result(running.result(), wish)
    except ConversionFailed as error:
        if shutil.disk_usage(work).free < _FULL_BYTES:  # what libraries say of a full disk does not tell
            raise ConversionFailed(f"{error.message}. The disk of {wish.output} is full; free some space") from error
        raise


def _watch(running: Future[Ended], stage: Path, show: Show) -> None:
    while wait_for([running], _LOOK_S).not_done:
        with suppress(OSError, ValueError):
            label, _, share = stage.read_text(encoding="utf-8").partition("\t")
            show(label, float(share) if share else None)


def _result(ended: Ended, wish: Wish) -> Report:
    if ended.is_late:
        raise ConversionFailed(
            f"{wish.source}: not done after {wish.timeout_s:g} s, so it was ended; give it more with --timeout"
        )
    if ended.signal:
        raise ConversionFailed(
            f"{wish.source}: the library that converts it crashed ({ended.signal}); the file may be damaged, or the "
            f"machine out of memory. It said: {ended.said or 'nothing'}"
        )
    try:
        result = msgspec.json.decode(ended.answer, type=Result)
    except msgspec.MsgspecError as error:
        raise ConversionFailed(
            f"{wish.source}: the conversion ended without a result: {ended.said or 'nothing'}"
        ) from error
    if result.report is None:
        raise ConversionFailed(result.error)
    return result.report
