"""The files of one folder as requests to one model, one at a time, oldest first.

Owns: which files are complete and new, which one runs, and the fate of each afterwards. Opens only plain files and
follows no link. Decides by instants that it is given: results.py's thread calls `step`, workers answer.
"""

from __future__ import annotations

import errno
import heapq
import io
import logging
import math
import os
import queue
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from edge_runtime.client.input_files import tensor_from_file
from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.publishing import DevicePublisher
from edge_runtime.errors import EdgeRuntimeError, ModelNotFound, NotReady, RunFailed, TensorMismatch
from edge_runtime.messages import RAW, UNNAMED, RequestHeader, TensorHeader
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.request.infer import Infer
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import CallbackReply, Request
from edge_runtime.site.publication import Publication
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.tensors import Array, as_tensors, datatype_name, values_to_bits
from edge_runtime.wire.json_codec import MAX_JSON_BYTES

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Time between two looks at a folder; a file is taken when two looks in a row find it unchanged."""

LOOK_SHARE = 0.05
"""Largest share of time spent on looks: a folder of many thousand files is looked at less often."""

RETRY_S = 1.0
"""Time between two tries of a file whose model cannot answer now (loading, full, stopping)."""

FILE_TIMEOUT_MS = 30_000.0
"""No caller waits for a file, so the model's default timeout does not count; older results are of no interest."""

MAX_FILE_BYTES = 64 << 20
"""As the largest frame of a client."""

IGNORED_SUFFIXES = (".part", ".tmp")
"""Names that careful writers give to a file before they rename it; as in the models folder."""

FAILED_FOLDER = ".failed"

TAKEN_AT_ONCE = 256
"""Most files that one look returns: the oldest."""

REMEMBERED_FILES = 16_384
"""Files that stay and are known to be done. When one is forgotten, all files as old as it count as done."""

TENSOR_SUFFIXES = (".npy", ".json")
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
"""Files that are sent as they are: the model's declared steps read them, in its host."""

FileMark = tuple[int, int, int]
"""One state of a file: time of change (ns), bytes, inode."""


class FolderSource:
    """The folder of one rule. wake: set to have `step` called soon. Files wait while there is no connection."""

    def __init__(
        self,
        publication: Publication,
        folder: InputFolder,
        publisher: DevicePublisher,
        *,
        table: ModelTable,
        infer: Infer,
        clock: Clock,
        metrics: Metrics,
        wake: threading.Event,
    ) -> None:
        self._publication = publication
        self._rule = publication.rule
        self._folder = folder
        self._publisher = publisher
        self._table = table
        self._infer = infer
        self._clock = clock
        self._metrics = metrics
        self._wake = wake
        self._waiting: deque[InputFile] = deque()
        self._running: InputFile | None = None
        self._ended: queue.SimpleQueue[Request | EdgeRuntimeError] = queue.SimpleQueue()
        self._answered: list[InputFile] = []
        self._look_due_s = 0.0
        self._retry_due_s = 0.0
        self._logged = ""
        self._failed = ""

    def status(self) -> dict[str, Any]:
        """Its status for `stats`, as JSON values. reason: why files wait, or why the last one failed; else empty."""
        reason = self._logged or self._failed
        return {"model": self._rule.model, "source": "folder", "from": str(self._folder.path), "reason": reason}

    def step(self, now_s: float) -> float:
        """Take the end of a run, look, run the next file. Return the instant of the next call, at the latest."""
        if self._running is not None and not self._ended.empty():
            file, self._running = self._running, None
            self._conclude(file, self._ended.get(), now_s)
            return now_s  # a look before `tidy` would find the file once more
        if self._running is not None:
            return math.inf
        if not self._publisher.is_online:
            return now_s + LOOK_S
        if not self._waiting and now_s >= self._look_due_s:
            self._look(now_s)
        if self._waiting and now_s >= self._retry_due_s:
            self._run(self._waiting.popleft(), now_s)
            return now_s
        return self._retry_due_s if self._waiting else self._look_due_s

    def tidy(self) -> None:
        """Finish the files of answers that the publication has handed out by now."""
        files, self._answered = self._answered, []
        for file in files:
            self._finish(file, self._folder.remove)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        began_s = self._clock.monotonic_s()
        try:
            self._waiting.extend(self._folder.look())
        except OSError as error:
            self._log(f"{self._folder.path}: {error.strerror}")
        took_s = self._clock.monotonic_s() - began_s
        self._look_due_s = now_s + max(LOOK_S, took_s / LOOK_SHARE)

    def _run(self, file: InputFile, now_s: float) -> None:
        """Read a file and submit it; any error ends it."""
        try:
            servable = self._table.resolve(self._rule.model, None)
            spec = servable.spec.inputs[0]
            content = self._folder.read(file)
            if content is None:
                return  # it was written again; a later look finds it
            suffix = Path(file.name).suffix.lower()
            if suffix in PICTURE_SUFFIXES:
                request = self._request(UNNAMED, np.array([content], object), len(content))
            elif suffix in TENSOR_SUFFIXES:
                array = tensor_from_file(io.BytesIO(content), file.name, spec)
                request = self._request(spec.name, array, array.nbytes, _words_of(servable))
            else:
                wanted = ", ".join((*TENSOR_SUFFIXES, *PICTURE_SUFFIXES))
                raise TensorMismatch(f"{name_as_text(file.name)} is none of {wanted}")
            self._running = file
            self._infer.submit(request, RequestPlan(servable, request.header))
        except FileNotFoundError:
            self._running = None
        except EdgeRuntimeError as error:
            self._running = None
            self._conclude(file, error, now_s)
        except Exception as error:  # noqa: BLE001 (anyone may write the file, and other libraries read it)
            self._running = None
            self._conclude(file, RunFailed(f"{file.name}: {type(error).__name__}: {error}"), now_s)

    def _conclude(self, file: InputFile, ended: Request | EdgeRuntimeError, now_s: float) -> None:
        if isinstance(ended, Request):
            self._metrics.count("publish_files")
            self._logged = self._failed = ""
            plan: RequestPlan = ended.plan
            more = {**self._publication.names(), "file": name_as_text(file.name)}
            self._publication.offer(plan, (plan.select(ended.outputs),), time.time(), ended, more=more)
            self._answered.append(file)
        elif ended.retryable or isinstance(ended, ModelNotFound):
            self._waiting.appendleft(file)
            self._retry_due_s = now_s + RETRY_S
            if isinstance(ended, ModelNotFound | NotReady):
                self._log(ended.message)
        else:
            self._fail(file, ended)

    def _fail(self, file: InputFile, error: EdgeRuntimeError) -> None:
        """Finish a file that a second try would not help."""
        self._metrics.count("publish_files_failed")
        where = {"folder": str(self._folder.path), "file": name_as_text(file.name)}
        self._failed = f"{where['file']}: {error.message}"
        log.warning("a file could not be used", extra={**where, "reason": error.message})
        self._finish(file, self._folder.set_aside)

    def _finish(self, file: InputFile, clear: Callable[[InputFile], None]) -> None:
        """Clear a file away if the rule says so; a file that stays is remembered as done."""
        if self._rule.remove:
            try:
                clear(file)
            except OSError as error:
                self._log(f"{self._folder.path}: a file cannot be removed or moved to {FAILED_FOLDER}: {error}")
            else:
                return
        self._folder.remember(file)

    def _log(self, reason: str) -> None:
        """Log why files wait, when the reason changes."""
        if reason != self._logged:
            self._logged = reason
            log.warning("files wait to be published", extra={"folder": str(self._folder.path), "reason": reason})

    def _hear(self, ended: Request | EdgeRuntimeError) -> None:
        """Take how the running file's request ended. Thread: any."""
        self._ended.put(ended)
        self._wake.set()

    def _request(
        self, name: str, array: Array, nbytes: int, parameters: Mapping[str, Any] = MappingProxyType({})
    ) -> Request:
        """A file as a request. Raises TensorMismatch and Unsupported for an array that is not a tensor."""
        tensor = values_to_bits(as_tensors({name: array})[name])
        inputs = (TensorHeader(name, datatype_name(array.dtype), tensor.shape),)
        header = RequestHeader(model=self._rule.model, inputs=inputs, timeout_ms=FILE_TIMEOUT_MS, parameters=parameters)
        return Request(
            header,
            [tensor],
            nbytes,
            CallbackReply(self._hear),
            self._rule.folder,
            self._clock.monotonic_s(),
            self._metrics,
        )


def _words_of(servable: Servable) -> dict[str, Any]:
    """The parameters by which a model that sees no picture says in words what it declares."""
    steps = servable.steps
    return {RAW: False} if steps is not None and steps.outputs and not steps.inputs else {}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One state of one file."""

    mark: FileMark
    name: str


class InputFolder:
    """A folder that others put files into. Every method raises OSError where the file system does."""

    def __init__(self, path: Path, remembered: int = REMEMBERED_FILES) -> None:
        self.path = path
        self._remembered = remembered
        self._seen: dict[str, FileMark] = {}
        self._done: dict[str, FileMark] = {}
        self._done_until_ns = -1

    def look(self) -> list[InputFile]:
        """Files that are unchanged since the last look and not done; the oldest first."""
        found = self._scan()
        for name in self._done.keys() - found.keys():
            del self._done[name]
        new = {name: mark for name, mark in found.items() if not self._is_done(name, mark)}
        unchanged = [InputFile(mark, name) for name, mark in new.items() if self._seen.get(name) == mark]
        self._seen = new
        return heapq.nsmallest(TAKEN_AT_ONCE, unchanged, key=lambda file: (file.mark[0], file.name))

    def read(self, file: InputFile) -> bytes | None:
        """A file's content; None when it has changed since.

        Raises TensorMismatch for anything but a plain file, and for a file that is too large.
        """
        path = self.path / file.name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TensorMismatch(f"{file.name} is not a plain file; links are not followed")
        limit = MAX_JSON_BYTES if path.suffix.lower() == ".json" else MAX_FILE_BYTES
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if _mark(os.fstat(descriptor)) != file.mark:
                return None
            if file.mark[1] > limit:
                raise TensorMismatch(f"{file.name} has {file.mark[1]} bytes; at most {limit} are read")
            return opened.read(limit)

    def remember(self, file: InputFile) -> None:
        """Mark a file as done; it stays."""
        self._done.pop(file.name, None)
        self._done[file.name] = file.mark
        if len(self._done) > self._remembered:
            oldest = next(iter(self._done))
            self._done_until_ns = max(self._done_until_ns, self._done.pop(oldest)[0])

    def remove(self, file: InputFile) -> None:
        """Remove a file, unless it was written again."""
        if self._is_unchanged(file):
            (self.path / file.name).unlink()

    def set_aside(self, file: InputFile) -> None:
        """Move a file into FAILED_FOLDER, over an older one of its name, unless it was written again."""
        aside = self.path / FAILED_FOLDER
        aside.mkdir(exist_ok=True)
        if aside.is_symlink():
            raise OSError(errno.ELOOP, "a link is not followed", str(aside))
        if self._is_unchanged(file):
            (self.path / file.name).replace(aside / file.name)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, FileMark]:
        found: dict[str, FileMark] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.endswith(IGNORED_SUFFIXES):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    found[entry.name] = _mark(status)
        return found

    def _is_done(self, name: str, mark: FileMark) -> bool:
        known = self._done.get(name)
        return known == mark if known is not None else mark[0] <= self._done_until_ns

    def _is_unchanged(self, file: InputFile) -> bool:
        try:
            return _mark((self.path / file.name).lstat()) == file.mark
        except FileNotFoundError:
            return False


def _mark(status: os.stat_result) -> FileMark:
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def name_as_text(name: str) -> str:
    """A file's name as text that any log or JSON can hold."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
