"""Our client and python-tuf's, against the same repository in every state a publisher or a thief can bring it to.

Both must agree on what succeeds, on each byte that is kept, and on what was asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tuf.api.exceptions import DownloadError, DownloadHTTPError, RepositoryError
from tuf.ngclient import Updater
from tuf.ngclient.fetcher import FetcherInterface

from tests.fakes.http_server import HttpServer
from tests.fakes.tuf_device import new_device
from tests.fakes.tuf_repository import NOW, TufRepository, role_file

PATHS = ["file", "a/x", "a/y", "b/x", "b/c/x", "nowhere"]
TOP = ("timestamp", "snapshot", "targets")


class Direct(FetcherInterface):
    """python-tuf's way to the repository, noted down as the server notes ours."""

    def __init__(self, repository: TufRepository) -> None:
        self._repository = repository
        self.asked: list[str] = []

    def _fetch(self, url: str) -> Iterator[bytes]:
        path = url.removeprefix("http://repository/")
        self.asked.append(path)
        data = self._repository.find(path)
        if data is None:
            raise DownloadHTTPError("not here", 404)
        return iter([data])


class Reference:
    """A device with python-tuf's own client."""

    def __init__(self, folder: Path, repository: TufRepository) -> None:
        self.metadata_dir = folder / "metadata"
        self.target_dir = folder / "targets"
        self.metadata_dir.mkdir(parents=True)
        self.target_dir.mkdir()
        self.fetcher = Direct(repository)
        (self.metadata_dir / "root.json").write_bytes(repository.published["root"][0])

    def run(self, *names: str) -> int:
        """Refresh and download, as the conformance suite's own client does."""
        try:
            updater = Updater(
                str(self.metadata_dir), "http://repository/metadata/", str(self.target_dir),
                "http://repository/targets/", self.fetcher, bootstrap=None,
            )  # fmt: skip
            updater.refresh()
            for name in names:
                target = updater.get_targetinfo(name)
                if target is None:
                    return 1
                if updater.find_cached_target(target) is None:
                    updater.download_target(target)
        except (RepositoryError, DownloadError, ValueError):
            return 1
        return 0


def _change(repository: TufRepository, chance: random.Random) -> None:
    """One thing that happens to a repository, good or bad."""
    delegated = [role for role in repository.signed if role not in ("root", *TOP)]
    speaker = chance.choice(["targets", *delegated])
    role = chance.choice([*TOP, *delegated])
    steps: list[Callable[[], object]] = [
        repository.publish_all,
        repository.publish_all,
        lambda: repository.publish(chance.choice(["root", *TOP])),
        lambda: repository.publish("root"),
        lambda: _change_keys(repository, chance),
        lambda: repository.start_again(role, max(1, repository.signed[role].version - 1)),
        lambda: _damage(repository, role, chance),
        lambda: _expire(repository, role, chance),
        lambda: setattr(repository, "has_hashes", chance.random() < 0.5),
        lambda: setattr(repository.root, "consistent_snapshot", chance.random() < 0.7),
        lambda: repository.add_target(chance.choice(PATHS[:-1]), chance.randbytes(20), speaker),
        lambda: _delegate(repository, chance),
    ]
    chance.choice(steps)()
    if chance.random() < 0.7:
        repository.publish_all()


def _change_keys(repository: TufRepository, chance: random.Random) -> None:
    role = chance.choice(["root", *TOP])
    old = list(repository.signers[role])
    repository.rotate(role)
    if role == "root" and chance.random() < 0.8:
        repository.signers["root"] += old
    if chance.random() < 0.2:
        repository.root.roles[role].threshold = 2
    repository.publish("root")
    if role == "root":
        repository.signers["root"] = repository.signers["root"][:1]


def _damage(repository: TufRepository, role: str, chance: random.Random) -> None:
    data = bytearray(repository.published[role][-1] or b"{}")
    place = chance.randrange(len(data))
    data[place] ^= 1 << chance.randrange(8)
    repository.published[role][-1] = bytes(data)


def _expire(repository: TufRepository, role: str, chance: random.Random) -> None:
    repository.signed[role].expires = NOW + timedelta(days=chance.choice([-5, 30, 30]))


def _delegate(repository: TufRepository, chance: random.Random) -> None:
    delegator, role, paths = chance.choice(
        [
            ("targets", "A", ["a/*"]),
            ("targets", "B", ["b/*", "b/*/*"]),
            ("A", "C", ["*/*"]),
            ("B", "C", ["*/*", "*/*/*"]),
        ]
    )
    if delegator in repository.signed:
        repository.delegate(delegator, role, paths, terminating=chance.random() < 0.2)


@pytest.mark.parametrize("seed", range(40))
def test_both_clients_agree_after_every_change(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    repository = TufRepository()
    repository.delegate("targets", "A", ["a/*"])
    # All artifacts have one length: one that ends early is a part to go on with for us, and only a failure for them.
    repository.add_target("a/x", chance.randbytes(20), "A")
    repository.publish_all()
    with HttpServer(repository.find) as server:
        ours = new_device(tmp_path, server, repository)
        theirs = Reference(tmp_path / "theirs", repository)
        for _ in range(12):
            _change(repository, chance)
            names = chance.sample(PATHS, chance.choice([0, 1, 2]))
            server.requests.clear()
            theirs.fetcher.asked.clear()
            status = ours.download(*names) if names else ours.refresh()
            assert status == theirs.run(*names)
            assert server.paths == theirs.fetcher.asked
            _assert_same_files(repository, ours.metadata_dir, theirs.metadata_dir)
            assert {file.name: file.read_bytes() for file in ours.target_dir.iterdir()} == {
                file.name: file.read_bytes() for file in theirs.target_dir.iterdir()
            }


def _assert_same_files(repository: TufRepository, ours: Path, theirs: Path) -> None:
    for role in repository.signed:
        files = [folder / role_file(role) for folder in (ours, theirs)]
        contents = [file.read_bytes() if file.exists() else None for file in files]
        assert contents[0] == contents[1], role
