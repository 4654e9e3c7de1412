"""Marks of loads under way, so that a version that ends the daemon while it loads does not end it at every start.

A mark is a file below the state folder, written before a version is loaded and warmed up and removed when that has
ended in any way that leaves the process alive. A mark found at the next start is a death of the daemon during that
load. A version with a mark is a suspect: it is loaded after all others, and nothing waits for it. After DEATHS deaths
in a row it is left out until its files, its `model.toml` or the daemon's version change, or until `models load` asks
for it. Of loads side by side, a crash is the death of the one whose thread it was.

Releases that updates let serve have the journal's own counters, and no marks here. Thread: the loader's; `loading` and
`close` any.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from edge_runtime import __version__
from edge_runtime.durable import read_kept, remove_parts, write_atomically
from edge_runtime.errors import StorageFailed
from edge_runtime.models.folder import Fingerprint, ModelFolder, VersionFolder

log = logging.getLogger(__name__)

DEATHS = 2
"""One may be bad luck, two in a row are not: a fatal signal on the thread that loads, or a process that was killed
meanwhile (for want of memory, most likely)."""

MAX_MARK_BYTES = 1 << 18
"""A mark holds one line, which names each file of a version, and the stacks of a crash: some kilobytes."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_CRASHED_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+)", re.MULTILINE)


class Death(msgspec.Struct, frozen=True):
    """One end of the daemon during a load."""

    at_utc: str
    how: str


class UnderWay(msgspec.Struct, frozen=True):
    """A load that began, or a calibration. thread: of `threading.get_ident`. boot: the kernel's id of its run.

    process: tells a daemon's marks from those of others, "" where an earlier release wrote it.
    """

    at_utc: str
    thread: int
    boot: str
    is_calibration: bool = False
    process: str = ""


class Mark(msgspec.Struct, frozen=True):
    """The first line of a mark's file; the words of a crash follow it. deaths: those of earlier starts."""

    model: str
    version: int
    identity: str
    deaths: tuple[Death, ...]
    under_way: UnderWay


_MARKS = msgspec.json.Decoder(Mark)  # made by the thread that imports this, as hosts/messages.py says


class Suspicion(msgspec.Struct, frozen=True):
    """The mark of an earlier start on a version: its files then, and how the daemon ended while it loaded them."""

    identity: str
    deaths: tuple[Death, ...]

    @property
    def is_proven(self) -> bool:
        """Whether the version is left out."""
        return len(self.deaths) >= DEATHS


class LoadMarks:
    """The marks in one folder. folder None, or before `open`: nothing is marked or suspected."""

    def __init__(self, folder: Path | None, boot: str | None = None) -> None:
        """boot: the name of this run of the kernel; None: as the kernel says."""
        self._folder = folder
        self._boot = boot if boot is not None else _boot_id()
        self._process = os.urandom(8).hex()
        self._is_open = False
        self._suspicions: dict[tuple[str, int], Suspicion] = {}
        self._calibrated_suspicions: dict[tuple[str, int], Suspicion] = {}  # of loaded versions, until calibrated
        self._identities: dict[tuple[str, int], str] = {}
        self._under_way: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._hears_crashes = False

    def open(self) -> None:
        """Read the marks of earlier starts. Only for the one daemon that owns the state folder, before it loads."""
        if self._folder is None:
            return
        self._is_open = True
        # Where it is switched on already (PYTHONFAULTHANDLER), it keeps its file: a crash leaves no word here then.
        self._hears_crashes = not faulthandler.is_enabled()
        found: list[tuple[Mark, str]] = []
        remove_parts(self._folder)  # of loads beside the one that crashed
        for path in sorted(self._folder.glob("*.json")):
            mark, said = _read(path)
            if mark is None:
                _remove(path)
            else:
                found.append((mark, said))
        # A crash writes below one mark of all that its process had.
        crashes = {mark.under_way.process: said for mark, said in found if mark.under_way.process and said}
        for mark, own in found:
            said = crashes.get(mark.under_way.process, own)
            suspicion = Suspicion(mark.identity, (*mark.deaths, *_death(mark.under_way, said, self._boot)))
            self._suspicions[mark.model, mark.version] = suspicion
            log.warning(
                "the daemon ended while a version was loaded",
                extra={
                    "model": mark.model,
                    "version": mark.version,
                    "deaths": len(suspicion.deaths),
                    "last": suspicion.deaths[-1].how
                    if suspicion.deaths
                    else "the machine stopped, or another thread crashed",
                },
            )

    def close(self) -> None:
        """Remove the marks of loads under way: the daemon stops, and may be killed for being slow. Thread: any."""
        with self._lock:
            self._is_open = False
            for path in self._under_way:
                _remove(path)

    def is_suspect(self, folder: ModelFolder) -> bool:
        """Whether an unchanged version of a model was being loaded when the daemon ended, and is not left out."""
        found = [self._suspicion(folder, version) for version in folder.versions.values()]
        return any(suspicion is not None and not suspicion.is_proven for suspicion in found)

    def why_left_out(self, folder: ModelFolder, version: VersionFolder) -> str | None:
        """Why a version is not to be loaded; None where it may be."""
        suspicion = self._suspicion(folder, version)
        if suspicion is None or not suspicion.is_proven:
            return None
        last = suspicion.deaths[-1]
        return (
            f"left out: the daemon ended {len(suspicion.deaths)} times in a row while it was loaded or measured, last "
            f"at {last.at_utc} ({last.how}); it is tried again when its files or the daemon's version change, or by: "
            f"edge-runtime models load {version.model} --version {version.number}"
        )

    @contextlib.contextmanager
    def loading(self, folder: ModelFolder, version: VersionFolder) -> Iterator[None]:
        """Mark a load, durably, while it lasts."""
        key = (version.model, version.number)
        self._identities[key] = _identity(folder, version)
        try:
            with self._marked(key, is_calibration=False):
                yield
        finally:
            if (suspicion := self._suspicions.pop(key, None)) is not None:
                self._calibrated_suspicions[key] = suspicion

    @contextlib.contextmanager
    def calibrating(self, model: str, number: int) -> Iterator[None]:
        """Mark runs that measure a loaded version. Only a crash counts: they follow each start, and so does a kill.

        Not synced to the disk: they are interrupted and begun again many times, and a file that was written survives
        the process.
        """
        try:
            with self._marked((model, number), is_calibration=True):
                yield
        finally:
            self._calibrated_suspicions.pop((model, number), None)

    def forget(self, model: str, number: int) -> None:
        """A version is gone from its folder."""
        self._suspicions.pop((model, number), None)
        self._calibrated_suspicions.pop((model, number), None)
        self._identities.pop((model, number), None)
        if self._is_open:
            _remove(self._path((model, number)))

    # ---- private ----------------------------------------------------------------------------------------------------

    def _suspicion(self, folder: ModelFolder, version: VersionFolder) -> Suspicion | None:
        suspicion = self._suspicions.get((version.model, version.number))
        if suspicion is None or suspicion.identity != _identity(folder, version):
            return None
        return suspicion

    @contextlib.contextmanager
    def _marked(self, key: tuple[str, int], *, is_calibration: bool) -> Iterator[None]:
        path = self._begin(key, is_calibration=is_calibration)
        try:
            yield
        finally:
            if path is not None:
                self._end(path)

    def _begin(self, key: tuple[str, int], *, is_calibration: bool) -> Path | None:
        """Write the mark, and have a crash write below it. None: it cannot be written, and the load goes on without."""
        identity = self._identities.get(key)
        with self._lock:
            if not self._is_open or identity is None:
                return None
            suspicion = (self._calibrated_suspicions if is_calibration else self._suspicions).get(key)
            deaths = suspicion.deaths if suspicion is not None and suspicion.identity == identity else ()
            under_way = UnderWay(_now_text(), threading.get_ident(), self._boot, is_calibration, self._process)
            mark = Mark(*key, identity, deaths, under_way)
            path = self._path(key)
            try:
                line = msgspec.json.encode(mark) + b"\n"
                if is_calibration:
                    path.write_bytes(line)
                else:
                    write_atomically(path, line)
                self._under_way[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            except (OSError, StorageFailed) as error:
                level = logging.DEBUG if is_calibration else logging.WARNING
                log.log(level, "a load is not marked: %s", error, extra={"model": key[0], "version": key[1]})
                return None
            self._report_crashes_to_newest()
            return path

    def _end(self, path: Path) -> None:
        with self._lock:
            fd = self._under_way.pop(path)
            self._report_crashes_to_newest()
            os.close(fd)
            _remove(path)

    def _report_crashes_to_newest(self) -> None:
        """Have a fatal signal write the stacks to the newest mark."""
        if not self._hears_crashes:
            return
        if self._under_way:
            faulthandler.enable(list(self._under_way.values())[-1])
        else:
            faulthandler.disable()

    def _path(self, key: tuple[str, int]) -> Path:
        assert self._folder is not None
        return self._folder / f"{key[0]}-{key[1]}.json"


def _death(under_way: UnderWay, said: str, boot: str) -> tuple[Death, ...]:
    """Return how a load was ended that has no end; nothing where the machine stopped meanwhile. Pure.

    A crash on another thread is some other model's; it leaves the one that was being loaded a suspect.
    """
    fatal = _FATAL.search(said)
    if fatal is None:
        is_other = boot != under_way.boot or under_way.is_calibration
        return () if is_other else (Death(under_way.at_utc, "it was killed, by hand or for want of memory"),)
    thread = _CRASHED_THREAD.search(said)
    if thread is not None and int(thread[1], 16) != under_way.thread:
        return ()
    return (Death(under_way.at_utc, fatal[1]),)


def _read(path: Path) -> tuple[Mark | None, str]:
    """A mark, and the words that a crash wrote below it; None where a power cut left no whole one."""
    try:
        line, _, said = read_kept(path, MAX_MARK_BYTES).partition(b"\n")
        return _MARKS.decode(line), said.decode(errors="replace")
    except (OSError, msgspec.DecodeError) as error:
        log.warning("a mark of a load is not readable, and is removed: %s", error)
        return None, ""


def _remove(path: Path) -> None:
    """Remove a mark. On a disk that takes no change it stays, and costs a good version its place in the queue."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _identity(folder: ModelFolder, version: VersionFolder) -> str:
    """Return the text that has to change for a version to be tried again.

    Inodes are left out: those of files in an image may change at each start of its container.
    """
    return repr((__version__, str(version.path), _stamps(version.fingerprint), _stamps(folder.settings_fingerprint)))


def _stamps(fingerprint: Fingerprint) -> list[tuple[str, int, int]]:
    return [(name, size, mtime_ns) for name, size, mtime_ns, _, _ in fingerprint]


def _boot_id() -> str:
    """Return the id of this run of the kernel; "" where it cannot be read."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
