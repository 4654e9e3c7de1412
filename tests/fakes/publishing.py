"""A publisher for tests, whose key files are cheap to open, and a device that is only python-tuf's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tuf.api.exceptions import DownloadHTTPError
from tuf.ngclient import Updater
from tuf.ngclient.fetcher import FetcherInterface

from edge_runtime.durable import SYSTEM_DISK, Disk
from edge_runtime.publish.change import Change
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.publish.repository import Days, Founding, Repository, found_repository, open_repository

PASSPHRASE = "correct horse battery"
CHEAP_N = 2

Make = Callable[[Repository], Change]


def passphrases(*given: str) -> Passphrases:
    """What a person would type; without words, the right one."""
    return Passphrases(given or (PASSPHRASE,), scrypt_n=CHEAP_N)


def founding(root: tuple[int, int] = (1, 1), targets: tuple[int, int] = (1, 1)) -> Founding:
    """Keys of a new repository: how many root and targets keys, and how many must sign."""
    keys = {
        "root": NewKeys(root[0]),
        "targets": NewKeys(targets[0]),
        "snapshot": NewKeys(is_online=True),
        "timestamp": NewKeys(is_online=True),
    }
    return Founding(keys, {"root": root[1], "targets": targets[1]}, Days())


class Publisher:
    """One repository and who works on it. `disk` and `now_utc` may be replaced between changes."""

    def __init__(self, path: Path, plan: Founding | None = None, *, disk: Disk = SYSTEM_DISK) -> None:
        self.path = path
        self.disk = disk
        self.now_utc: datetime | None = None
        self._plan = plan or founding()

    def found(self) -> Publisher:
        """Make the repository."""
        with found_repository(self.path, self._plan, passphrases(), disk=self.disk, now_utc=self.now_utc) as change:
            change.commit()
        return self

    @contextmanager
    def opened(self, *given: str) -> Iterator[Repository]:
        """The repository, opened with these passphrases."""
        with open_repository(self.path, passphrases(*given), disk=self.disk, now_utc=self.now_utc) as repository:
            yield repository

    def carry_out(self, make: Make) -> Change:
        """Make a change and commit it."""
        with self.opened() as repository:
            change = make(repository)
            change.commit()
        return change

    @property
    def root_1(self) -> bytes:
        """What devices are shipped with."""
        return (self.path / "metadata" / "1.root.json").read_bytes()


class TufDevice:
    """python-tuf's client over a folder that has `metadata/` and `targets/`. `home`: where it keeps what it saw."""

    def __init__(self, folder: Path, home: Path, root: bytes) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self._home = home
        self._root = root

    def check(self) -> Updater:
        """One whole refresh, as a device that remembers earlier ones. Raises what python-tuf raises."""
        for name in ("metadata", "targets"):
            (self._home / name).mkdir(parents=True, exist_ok=True)
        updater = Updater(
            str(self._home / "metadata"),
            f"file://{self.folder}/metadata/",
            str(self._home / "targets"),
            f"file://{self.folder}/targets/",
            _FolderFetcher(self.fetched),
            bootstrap=self._root,
        )
        updater.refresh()
        return updater

    def fetch(self, path: str) -> bytes | None:
        """A target's bytes as the device gets them; None: nobody who may sign it does."""
        updater = self.check()
        target = updater.get_targetinfo(path)
        if target is None:
            return None
        return Path(updater.download_target(target, str(self._home / "targets" / "one"))).read_bytes()


class _FolderFetcher(FetcherInterface):
    def __init__(self, fetched: list[str]) -> None:
        self._fetched = fetched

    def _fetch(self, url: str) -> Iterator[bytes]:
        path = Path(unquote(urlsplit(url).path))
        self._fetched.append(path.name)
        if not path.is_file():
            raise DownloadHTTPError(f"{path} is not there", 404)
        return iter((path.read_bytes(),))
