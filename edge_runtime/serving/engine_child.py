"""The child process in which an engine is built: minutes of work that may crash, hang or eat memory.

Started by `engine_store` as `python -m edge_runtime.serving.engine_child PARENT`, a request as JSON on standard input.
Tells how far it is, one JSON object a line on standard output; the last one says how it ended. The engine goes into the
cache's folder, and never through the pipe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from edge_runtime.backends.tensorrt_build import build_engine
from edge_runtime.backends.tensorrt_order import EngineOrder
from edge_runtime.errors import EdgeRuntimeError, StorageFailed
from edge_runtime.serving.confinement import confine
from edge_runtime.serving.engine_cache import EngineCache

NICENESS = 10
"""Beside 0, the daemon's: a tenth of a core where all are busy."""

MAX_FAULT_CHARACTERS = 600


class BuildRequest(Struct, frozen=True):
    """What to build, and where to keep it. device: what kernel timings are kept for. limit_bytes: of the folder."""

    order: EngineOrder
    key: str
    folder: str
    device: str
    limit_bytes: int


class BuildNews(Struct, frozen=True, omit_defaults=True):
    """One line. share: from 0 to 1. is_done: the engine is in the folder. fault: why it is not.

    may_pass: the fault is of the disk, not of the model.
    """

    share: float = 0.0
    phase: str = ""
    is_done: bool = False
    fault: str = ""
    may_pass: bool = False


def main(arguments: Sequence[str]) -> int:
    """Build what standard input asks for, for the process of that id. Exit status 0 when there is a last line."""
    with confine(int(arguments[0]), NICENESS) as answer:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=BuildRequest)
        try:
            _build(request, answer)
            news = BuildNews(share=1.0, is_done=True)
        except StorageFailed as error:
            news = BuildNews(fault=error.message[:MAX_FAULT_CHARACTERS], may_pass=True)
        except EdgeRuntimeError as error:
            news = BuildNews(fault=error.message[:MAX_FAULT_CHARACTERS])
        except Exception as error:  # noqa: BLE001  what a library raises unexpectedly is a failed build too
            news = BuildNews(fault=f"{type(error).__name__}: {error}"[:MAX_FAULT_CHARACTERS])
        _tell(answer, news)
    return 0


def _build(request: BuildRequest, answer: BinaryIO) -> None:
    cache = EngineCache(Path(request.folder), request.limit_bytes)
    built = build_engine(
        request.order,
        lambda share, phase: _tell(answer, BuildNews(share=round(share, 4), phase=phase)),
        cache.timings(request.device),
    )
    if built.timings:
        cache.keep_timings(request.device, built.timings)
    cache.write(request.key, built.engine)


def _tell(answer: BinaryIO, news: BuildNews) -> None:
    answer.write(msgspec.json.encode(news) + b"\n")
    answer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
