"""A device with a TUF client, driven as TUF's conformance suite drives one: in this process, or as a child.

Says what is in its folders afterwards: which roles it trusts, in which version, and which artifacts it has.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote

from tuf.api.metadata import Metadata

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.updates import tuf_cli
from edge_runtime.updates.http_fetch import HttpFetcher
from edge_runtime.updates.store import MetadataStore
from edge_runtime.updates.tuf_client import TufClient
from tests.fakes.http_server import HttpServer
from tests.fakes.tuf_repository import TufRepository, serve

CHILD_LIMIT_S = 300.0


class Device:
    """Commands return the exit status. `as_child`: each is a process of its own, as an outsider would run it."""

    def __init__(self, folder: Path, server: HttpServer, *, as_child: bool = False) -> None:
        self.metadata_dir = folder / "metadata"
        self.target_dir = folder / "targets"
        self.metadata_dir.mkdir()
        self.target_dir.mkdir()
        self._root_file = folder / "root-to-trust.json"
        self._server = server
        self._as_child = as_child

    def init(self, root: bytes) -> int:
        """Trust a root file."""
        self._root_file.write_bytes(root)
        return self._run("--metadata-dir", str(self.metadata_dir), "init", str(self._root_file))

    def refresh(self, *, now_utc: datetime | None = None) -> int:
        """Bring metadata up to date; `now_utc` moves the device's clock, in this process only."""
        if now_utc is not None:
            return self._refresh_at(now_utc)
        return self._run("--metadata-url", self._metadata_url, "--metadata-dir", str(self.metadata_dir), "refresh")

    def download(self, *names: str) -> int:
        """Fetch artifacts."""
        return self._run(
            "--metadata-url", self._metadata_url,
            "--metadata-dir", str(self.metadata_dir),
            *(word for name in names for word in ("--target-name", name)),
            "--target-dir", str(self.target_dir),
            "--target-base-url", f"{self._server.url}targets/",
            "download",
        )  # fmt: skip

    @property
    def trusted(self) -> dict[str, int]:
        """Each role that has a file here, and its version."""
        files = sorted(file for file in self.metadata_dir.iterdir() if file.name.endswith(".json"))
        return {
            unquote(file.name.removesuffix(".json")): Metadata.from_bytes(file.read_bytes()).signed.version
            for file in files
        }

    @property
    def artifacts(self) -> list[bytes]:
        """The content of every file in the folder of artifacts, hidden ones too."""
        return [file.read_bytes() for file in sorted(self.target_dir.rglob("*")) if file.is_file()]

    @property
    def _metadata_url(self) -> str:
        return f"{self._server.url}metadata/"

    def _refresh_at(self, now_utc: datetime) -> int:
        client = TufClient(HttpFetcher(self._metadata_url), MetadataStore(self.metadata_dir), now_utc=now_utc)
        try:
            client.refresh()
        except EdgeRuntimeError:
            return 1
        return 0

    def _run(self, *words: str) -> int:
        if self._as_child:
            command = [sys.executable, "-W", "error", "-m", "edge_runtime.updates.tuf_cli", *words]
            return subprocess.run(command, timeout=CHILD_LIMIT_S, check=False, capture_output=True).returncode
        return tuf_cli.main(words)


@dataclass(frozen=True)
class Site:
    """A repository, its server, and a device that trusts its first root and has fetched nothing yet."""

    repository: TufRepository
    server: HttpServer
    device: Device

    def asked(self) -> list[str]:
        """What was asked for since the last time, without the folders: `2.root.json`, `timestamp.json`, ..."""
        paths = [path.partition("/")[2] for path in self.server.paths]
        self.server.requests.clear()
        return paths


@contextmanager
def new_site(folder: Path) -> Iterator[Site]:
    """All three, for one test."""
    repository = TufRepository()
    with serve(repository) as server:
        yield Site(repository, server, new_device(folder, server, repository))


def new_device(folder: Path, server: HttpServer, repository: TufRepository, *, as_child: bool = False) -> Device:
    """A device that trusts the repository's first root."""
    device = Device(folder, server, as_child=as_child)
    assert device.init(repository.published["root"][0]) == 0
    return device
