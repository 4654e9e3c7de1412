"""Where a repository is: an HTTP server, a bucket, or a folder. None of them is trusted.

Owns: the two places below a repository's own, `metadata/` and `targets/`, as the publisher and `repo bundle` lay them
out.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import ConfigError
from edge_runtime.update.fetch import Fetcher
from edge_runtime.update.folder_fetch import FolderFetcher
from edge_runtime.update.http_fetch import HttpFetcher

METADATA, TARGETS = "metadata", "targets"


@dataclass(frozen=True, slots=True)
class Source:
    """A repository's two places, and what it is called in messages."""

    name: str
    metadata: Fetcher
    targets: Fetcher


def configured_source(settings: UpdateSettings, clock: Clock) -> Source | None:
    """The repository of `[update]`; None: none is named, and updates come by `update import` only.

    Raises ConfigError: an address that cannot be, certificates that cannot be read.
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
    places = [
        HttpFetcher(f"{base}/{place}/", clock=clock, tls=tls, allow_plain=settings.allow_http)
        for place in (METADATA, TARGETS)
    ]
    return Source(base, *places)


def folder_source(folder: Path, clock: Clock) -> Source:
    """A folder that has a repository's layout: a mirror, or what `repo bundle` wrote on a stick."""
    return Source(
        str(folder), FolderFetcher(folder / METADATA, clock=clock), FolderFetcher(folder / TARGETS, clock=clock)
    )
