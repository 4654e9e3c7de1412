"""Archives of TorchServe that a caller names by URL: fetched from listed servers, and taken into the models folder.

Owns: which addresses are taken, how large and slow an archive may be, and the thread that fetches one at a time. The
importer reads what an archive holds, in a process of its own. Made and closed by `HttpDoor`.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from edge_runtime.addresses import read_proxy
from edge_runtime.clock import Clock
from edge_runtime.daemon.core import Core
from edge_runtime.errors import (
    ConfigError,
    DecodeFailed,
    DownloadError,
    Draining,
    EdgeRuntimeError,
    Forbidden,
    LoadFailed,
    NotReady,
    StorageFailed,
    Unsupported,
)
from edge_runtime.request.operation_handlers import Done
from edge_runtime.sandbox.child import run_child
from edge_runtime.sandbox.ending import Cause, ShowProgress

if TYPE_CHECKING:  # the fetcher of updates is imported for the first archive
    from edge_runtime.updates.http_fetch import HttpFetcher

log = logging.getLogger(__name__)

HOSTS_KEY = "http.torchserve_hosts"

MAX_ARCHIVE_BYTES = 4 << 30
"""The largest archive of TorchServe's own model zoo has 1.3 GB."""

FETCH_S, IMPORT_S = 600.0, 900.0
"""As long as a client waits for a load; and what a conversion may take, with room for the rest."""

IMPORTING = "edge_runtime_converters.importing.writing"
"""Converters know this package, which knows them by name only."""


class ImportTask(Struct, frozen=True):
    """An archive for the child. name: of the model, "" for the archive's own."""

    archive: str
    models: str
    name: str


def import_in_child(task: ImportTask, progress: ShowProgress) -> list[str]:
    """Import an archive; returns the names of its models, the one that it is of first. Raises EdgeRuntimeError."""
    writing = importlib.import_module(IMPORTING)
    options = writing.ImportOptions(source=task.archive, models=task.models, name=task.name)
    report = writing.import_source(options, progress)
    for model in report.models:
        if model.reason:
            raise DecodeFailed(f"{model.name}: {model.reason}")
    return sorted((model.name for model in report.models), key=len)  # NAME.network is beside NAME


class TorchServeArchives:
    """Takes archives by URL, one at a time. hosts: the servers, `host` or `host:port`."""

    def __init__(self, hosts: Sequence[str], core: Core, clock: Clock) -> None:
        self._hosts = hosts
        self._core = core
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_fetching = False

    def take(self, url: str, name: str, done: Done) -> None:
        """Fetch an archive into the models folder; `done` gets the names of its models, the one asked for first.

        name: what the model is to be called, "" for what its archive says. Thread: the door's; `done` is called on
        another one. Raises EdgeRuntimeError: it is not to be fetched, or another one is under way.
        """
        fetcher, file = self._fetcher(url)
        if self._stop.is_set():
            raise Draining("this daemon is stopping")
        if self._is_fetching:
            raise NotReady("another archive is being fetched; send it again when that is done")
        models = self._core.config.models
        assert models is not None

        def fetch() -> None:
            try:
                found: Any = self._taken(fetcher, file, Path(models), name)
            except DownloadError as error:
                found = DecodeFailed(f"url: {error.message}")
            except EdgeRuntimeError as error:
                log.warning("archive not taken: %s", error.message, extra={"code": error.code})
                found = error
            except OSError as error:
                found = StorageFailed(f"the archive cannot be kept: {error.strerror}")
            except Exception:
                log.exception("a bug ended the import of an archive")
                found = LoadFailed("a bug ended the import; the daemon's log has it")
            self._is_fetching = False  # before its caller hears of it, who may ask for the next at once
            done(found)

        if self._thread is not None:
            self._thread.join()  # it has fetched, and only tells so
        self._is_fetching = True
        self._thread = threading.Thread(target=fetch, name="edge-archive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End what is under way. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _fetcher(self, url: str) -> tuple[HttpFetcher, str]:
        """Where an archive is, and its file there."""
        if not self._hosts:
            raise Unsupported(
                f"no archive is fetched here: name its server in {HOSTS_KEY}, or run: "
                "edge-runtime import FILE.mar --models DIR"
            )
        from edge_runtime.updates.http_fetch import HttpFetcher, is_listed

        config = self._core.config
        if config.models is None or config.requires_signed:
            raise Forbidden("no archive is taken: no models folder is served here, or only signed releases are")
        base, _, file = url.rpartition("/")
        if not file.endswith(".mar") or set(url) & set("?#") or {".", ".."} & set(base.split("/")):
            raise DecodeFailed("url: wanted the address of an archive, as https://HOST/PATH/NAME.mar")
        try:
            fetcher = HttpFetcher(
                base,
                clock=self._clock,
                allow_plain=True,
                redirect_hosts=self._hosts,
                hosts_key=HOSTS_KEY,
                proxy=read_proxy(config.proxy, config.no_proxy),
                stop=self._stop,
            )
            is_known = is_listed(urlsplit(url), self._hosts)
        except (ConfigError, ValueError) as error:
            raise DecodeFailed(f"url: {error}") from None
        if not is_known:
            raise Forbidden(f"no archive is fetched from that server; {HOSTS_KEY} names those that are")
        return fetcher, file

    def _taken(self, fetcher: HttpFetcher, file: str, models: Path, name: str) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="archive-", dir=self._core.state) as folder:
            archive = Path(folder) / "model.mar"
            self._fetch(fetcher, file, archive)
            ending = run_child(
                import_in_child,
                ImportTask(str(archive), str(models), name),
                limit_s=IMPORT_S,
                reads=[Path(folder)],
                writes=[models],
                has_children=True,
                stop=self._stop,
            )
        if ending.cause is Cause.RETURNED and ending.result:
            return ending.result
        failure = DecodeFailed if ending.cause is Cause.RAISED else LoadFailed
        raise failure(f"{unquote(file)[:80]} was not taken: {ending.reason.replace(str(archive), 'the archive')}")

    def _fetch(self, fetcher: HttpFetcher, file: str, archive: Path) -> None:
        """Raises DownloadError (NotPublished too), DecodeFailed (too large), OSError."""
        from edge_runtime.updates.fetch import PIECE_BYTES

        size = 0
        with (
            fetcher.open(file, deadline_s=self._clock.monotonic_s() + FETCH_S) as body,
            archive.open("xb") as opened,
        ):
            while piece := body.read(PIECE_BYTES):
                size += len(piece)
                if size > MAX_ARCHIVE_BYTES:
                    raise DecodeFailed(f"{file[:80]}: has more than the {MAX_ARCHIVE_BYTES} bytes of an archive")
                opened.write(piece)
