"""The files of the page: read from this package at the first request, and sent as they are or compressed.

Owns: which paths there are, so that no other file is ever opened, their types, their tags. Thread: the door's.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

STATIC = Path(__file__).with_name("static")

INDEX = "index.html"

TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
"""Content types by the end of a name; a file of any other end is not served."""

COMPRESSED = ("text/", "image/svg", "application/")
"""Beginnings of the types that shrink."""

DEFLATE_LEVEL = 6
"""A file is compressed once in a daemon's life, on the thread of the door: 100 KB take some 3 ms."""


class PageFile(Struct):
    """One file. tag: for `ETag`. packed: its bytes as gzip has them, None until they are asked for."""

    kind: str
    body: bytes
    tag: str
    packed: bytes | None = None

    @property
    def shrinks(self) -> bool:
        """Whether it is worth compressing."""
        return self.kind.startswith(COMPRESSED)

    def compressed(self) -> bytes:
        """Return its bytes as gzip has them."""
        if self.packed is None:
            deflater = zlib.compressobj(DEFLATE_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
            self.packed = deflater.compress(self.body) + deflater.flush()
        return self.packed


class PageFiles:
    """The files of a folder, by their path below it."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._paths: dict[str, Path] | None = None
        self._files: dict[str, PageFile] = {}

    def find(self, name: str) -> PageFile | None:
        """Return a file; None where the folder has none of this path, or of another kind than pages are made of."""
        file = self._files.get(name)
        if file is not None:
            return file
        path = self._listed().get(name)
        if path is None:
            return None
        body = path.read_bytes()
        file = self._files[name] = PageFile(TYPES[path.suffix], body, f'"{sha256(body).hexdigest()[:32]}"')
        return file

    def _listed(self) -> dict[str, Path]:
        """The paths of all files. A request's path is looked up here, and never joined to the folder's."""
        if self._paths is None:
            found = (each for each in self._folder.rglob("*") if each.suffix in TYPES and each.is_file())
            self._paths = {each.relative_to(self._folder).as_posix(): each for each in found}
        return self._paths
