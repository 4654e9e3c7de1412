"""The place of a repository: an HTTP server, a bucket, a registry, or a folder, as on a stick. None of them is trusted.

Owns: the layout of `metadata/` beside `targets/`, as the publisher and `repo bundle` write it, and the search for it
near a folder that a person named. A stick may be a stranger's: only plain folders are read, a bounded number of them,
and a name is quoted before it is shown. Never verifies content. Thread: any.
"""

from __future__ import annotations

import os
import shlex
import ssl
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from edge_runtime.addresses import Proxy
from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import ConfigError, UpdateError
from edge_runtime.updates.fetch import Fetcher, FolderFetcher
from edge_runtime.updates.http_fetch import HttpFetcher

METADATA, TARGETS = "metadata", "targets"

REGISTRY_SCHEMES = ("oci://", "oci+http://")
"""How the addresses of registries begin; the second is http."""

LOOKED_AT = 1_000
"""How many entries of a folder are looked at: a person's stick has fewer, a stranger's may have any number."""

NAMED = 3
"""How many repositories a message names at most; usually there is one."""


@dataclass(frozen=True, slots=True)
class Source:
    """The two places of a repository. name: for messages."""

    name: str
    metadata: Fetcher
    targets: Fetcher


def configured_source(
    settings: UpdateSettings, clock: Clock, stop: threading.Event | None = None, proxy: Proxy | None = None
) -> Source | None:
    """Return the repository of `[update]`; None: it names none, and updates come by `update import` only.

    stop: set when the daemon stops, which ends a transfer. proxy: by which the repository is reached.
    Raises ConfigError: the address is invalid, or the certificates cannot be read.
    """
    if settings.folder is not None:
        return folder_source(Path(settings.folder), clock)
    if settings.url is None:
        return None
    base = settings.url.rstrip("/")
    tls = None
    if settings.ca_file is not None:
        try:
            tls = ssl.create_default_context(cafile=settings.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"update.ca_file: {settings.ca_file}: {error}; wanted certificates in PEM") from None
    http = partial(
        HttpFetcher,
        clock=clock,
        tls=tls,
        allow_plain=settings.allow_http,
        redirect_hosts=settings.redirect_hosts,
        proxy=proxy,
        stop=stop,
    )
    if base.startswith(REGISTRY_SCHEMES):
        from edge_runtime.updates import oci

        address = oci.parse_address(base)
        login = oci.RegistryLogin(address, settings.auth_file, "update.auth_file")
        registry = oci.Registry(http(address.api), address, login)
        return Source(base, oci.OciMetadata(registry), oci.OciTargets(registry))
    if settings.auth_file is not None:
        raise ConfigError(f"update.auth_file: is for registries, and {base!r} is not one; wanted a url of oci://…")
    return Source(base, http(f"{base}/{METADATA}/"), http(f"{base}/{TARGETS}/"))


def folder_source(folder: Path, clock: Clock) -> Source:
    """Return a folder with a repository's layout as a source: a mirror, or a stick that `repo bundle` wrote."""
    return Source(
        str(folder), FolderFetcher(folder / METADATA, clock=clock), FolderFetcher(folder / TARGETS, clock=clock)
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A folder that a person named, and repositories near it. above, below: where it is none itself."""

    folder: Path
    is_repository: bool
    above: Path | None = None
    below: tuple[Path, ...] = ()


def find_repository(folder: str) -> Path:
    """Return the folder, if it is a repository. Raises UpdateError, naming one near it where there is one."""
    path = Path(folder)
    try:
        surroundings = _look(path)
    except FileNotFoundError:
        raise UpdateError(
            f"{folder}: the daemon sees no such folder; wanted what `edge-runtime repo bundle` wrote. A service "
            "sees neither /home nor this /tmp: copy or mount it elsewhere, for example below /mnt"
        ) from None
    except OSError as error:
        raise UpdateError(
            f"{folder}: the daemon cannot look there: {error.strerror}; it runs as a user of its own, so copy or "
            "mount it where everybody may read, for example below /mnt"
        ) from None
    reason = why_not(surroundings)
    if reason is not None:
        raise UpdateError(reason)
    return path


def why_not(surroundings: Surroundings) -> str | None:
    """Return why a folder is not imported, with the one that may be meant; None: it is a repository. Pure."""
    if surroundings.is_repository:
        return None
    near: Sequence[Path] = (surroundings.above,) if surroundings.above is not None else surroundings.below
    what = f"{surroundings.folder}: is not a repository: it has no {METADATA}/ with {TARGETS}/ beside it"
    if not near:
        return f"{what}; wanted the folder that `edge-runtime repo bundle` wrote"
    place = "the folder above it is one" if surroundings.above is not None else "one level down there is one"
    commands = " or ".join(f"edge-runtime update import {_quoted(each)}" for each in near[:NAMED])
    return f"{what}, but {place}: {commands}"


def _look(folder: Path) -> Surroundings:
    """Look at a folder and near it. Raises FileNotFoundError: it is not a folder; OSError: no permission."""
    if not _is_folder(folder):
        raise FileNotFoundError
    if _is_repository(folder):
        return Surroundings(folder, is_repository=True)
    if folder.name in (METADATA, TARGETS) and _is_repository(folder.parent):
        return Surroundings(folder, is_repository=False, above=folder.parent)
    with os.scandir(folder) as entries:
        folders = [each.name for each in islice(entries, LOOKED_AT) if each.is_dir(follow_symlinks=False)]
    below = (folder / name for name in sorted(folders))
    return Surroundings(folder, is_repository=False, below=tuple(each for each in below if _may_be_repository(each)))


def _is_repository(folder: Path) -> bool:
    """Return whether a folder has the layout; missing files show when they are read. Raises OSError: no permission."""
    return _is_folder(folder / METADATA) and _is_folder(folder / TARGETS)


def _may_be_repository(folder: Path) -> bool:
    try:
        return _is_repository(folder)
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _quoted(path: Path) -> str:
    """Quote a path for a shell; escape what is not printable, so that a name cannot control a terminal."""
    text = str(path)
    return shlex.quote(text) if text.isprintable() else ascii(text)
