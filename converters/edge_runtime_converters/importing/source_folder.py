"""A source as its readers see it: files below one folder, each read within a bound, and archives unpacked within one.

Owns: what of a source may be read (plain files inside it; links only where they stay inside), how much, and where an
archive's members may lie. A source is hostile until the contrary is shown: every error is ConversionFailed, with what
to do. Runs in the child that reads a source, which sees nothing else of the disk.
"""

from __future__ import annotations

import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.libraries import import_library, reason_of

MAX_TEXT_BYTES = 8 << 20
"""Of a file that is parsed: labels of 21 000 classes are half a megabyte."""

MAX_ENTRIES = 10_000
"""Of one folder, and of one archive: a model store has some hundred models."""

MAX_YAML_DEPTH = 100
"""Of lists and maps in one another; configurations of model servers have under ten."""

MAX_UNPACKED_BYTES = 64 << 30
MAX_RATIO = 200
"""Bytes that an archive may unpack to for each of its own, beside 64 MiB: a bomb unpacks to thousands."""

_FREE_BYTES = 64 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """The folder of a source. file: the one file in it that was named as the source, None where the folder was.

    work: where archives are unpacked; it lasts until the import is over. shapes: of inputs, as the caller says them.
    """

    root: Path
    work: Path
    file: Path | None = None
    shapes: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: Path, work: Path, shapes: tuple[str, ...] = ()) -> SourceFolder:
        """Open the named place. Raises ConversionFailed: there is no such file or folder."""
        try:
            real = source.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            said = error.strerror if isinstance(error, OSError) else "its links lead in a circle"
            raise ConversionFailed(f"{source}: {said}; wanted a folder or an archive to import") from error
        if real.is_dir():
            return cls(real, work, shapes=shapes)
        if not real.is_file():
            raise ConversionFailed(f"{source}: is neither a folder nor a plain file")
        return cls(real.parent, work, real, shapes)

    def entries(self, folder: Path | None = None) -> list[Path]:
        """Return what a folder holds, sorted, hidden files left out; empty where it is not a folder.

        Raises ConversionFailed: more than `MAX_ENTRIES`, or it cannot be listed.
        """
        place = self.root if folder is None else folder
        found: list[Path] = []
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if len(found) >= MAX_ENTRIES:
                        raise ConversionFailed(f"{place}: more than {MAX_ENTRIES} files; is it the right folder?")
                    if not entry.name.startswith("."):
                        found.append(Path(entry.path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ConversionFailed(f"{place}: cannot be listed: {error.strerror}") from error
        return sorted(found)

    def folders(self, folder: Path | None = None) -> list[Path]:
        """Return the folders within a folder, sorted, those that links lead out of the source to left out."""
        return [path for path in self.entries(folder) if path.is_dir() and self.holds(path)]

    def files(self, folder: Path | None = None) -> list[Path]:
        """Return the plain files within a folder, sorted, those that links lead out of the source to left out."""
        return [path for path in self.entries(folder) if path.is_file() and self.holds(path)]

    def holds(self, path: Path) -> bool:
        """Whether a path lies inside the source, or in what was unpacked of it, all links followed."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return False
        return real.is_relative_to(self.root) or real.is_relative_to(self.work.resolve())

    def inside(self, words: str, base: Path | None = None) -> Path:
        """Return the path of a file or folder that a source names, relative to `base` (else to the source).

        Raises ConversionFailed: it is not there, or it is not inside the source.
        """
        place = base or self.root
        if "\0" in words or not words:
            raise ConversionFailed(f"{place}: names {words[:80]!r}, which is not a path")
        path = place / words
        if not os.path.lexists(path):
            raise ConversionFailed(f"{words[:200]}: named in {place}, and not there; copy it there")
        if not self.holds(path):
            raise ConversionFailed(
                f"{words[:200]}: leads out of {self.root}; copy the files themselves into it (cp -rL follows links)"
            )
        return path

    def bytes(self, path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
        """Read a plain file of the source. Raises ConversionFailed: too large, outside, or it cannot be read."""
        if not self.holds(path):
            advice = "copy the files themselves into it (cp -rL follows links)"
            raise ConversionFailed(f"{path}: not there, or it leads out of {self.root}; {advice}")
        try:
            # O_NONBLOCK: opening a fifo would otherwise wait for its other end.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ConversionFailed(f"{path}: is not a plain file")
                found = file.read(most + 1)
        except OSError as error:
            raise ConversionFailed(f"{path}: cannot be read: {error.strerror}") from error
        if len(found) > most:
            raise ConversionFailed(f"{path}: has more than the {most} bytes that such a file may have")
        return found

    def text(self, path: Path, most: int = MAX_TEXT_BYTES) -> str:
        """Read a text in UTF-8. Raises ConversionFailed."""
        try:
            return self.bytes(path, most).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConversionFailed(f"{path}: is not text in UTF-8") from error

    def json(self, path: Path) -> Any:
        """Read JSON. Raises ConversionFailed."""
        return self.json_as(path, Any)

    def json_as(self, path: Path, wanted: Any) -> Any:
        """Read JSON as a type that msgspec knows. Raises ConversionFailed: it is something else."""
        try:
            return msgspec.json.decode(self.bytes(path).removeprefix(b"\xef\xbb\xbf"), type=wanted)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ConversionFailed(f"{path}: {reason_of(error)}") from error

    def yaml_as(self, path: Path, wanted: Any) -> Any:
        """Read YAML, as data only, as a type that msgspec knows. Raises ConversionFailed."""
        yaml = import_library("yaml", "import")
        text = self.text(path, MAX_TEXT_BYTES // 8)
        try:
            depth = 0
            for token in yaml.scan(text, Loader=yaml.SafeLoader):
                if isinstance(token, yaml.AliasToken):
                    raise ConversionFailed(f"{path}: has an alias (*NAME), by which a short file can be without end")
                # Each level costs the scanner as much as all before it.
                depth += type(token).__name__.endswith(("SequenceStartToken", "MappingStartToken"))
                depth -= type(token).__name__.endswith(("SequenceEndToken", "MappingEndToken", "BlockEndToken"))
                if depth > MAX_YAML_DEPTH:
                    raise ConversionFailed(f"{path}: is nested more than {MAX_YAML_DEPTH} levels deep")
            return msgspec.convert(yaml.safe_load(text), type=wanted)
        except (yaml.YAMLError, msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ConversionFailed(f"{path}: {reason_of(error)}") from error

    def unpack(self, archive: Path) -> SourceFolder:
        """Unpack a zip or tar of the source into a folder of its own. Raises ConversionFailed: among others, a bomb."""
        if not self.holds(archive):
            raise ConversionFailed(f"{archive}: leads out of {self.root}; copy the file itself into it")
        folder = self.work / f"unpacked-{len(list(self.work.iterdir()))}"
        folder.mkdir()
        most = min(MAX_RATIO * archive.stat().st_size + _FREE_BYTES, MAX_UNPACKED_BYTES)
        try:
            if zipfile.is_zipfile(archive):
                _unpack_zip(archive, folder, most)
            else:
                _unpack_tar(archive, folder, most)
        except (
            zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError, tarfile.TarError,
            EOFError, RuntimeError, ValueError, OSError, NotImplementedError, OverflowError,
        ) as error:  # fmt: skip
            raise ConversionFailed(f"{archive}: cannot be unpacked: {reason_of(error)}; copy it again") from error
        return SourceFolder(folder.resolve(), self.work, shapes=self.shapes)


# ---- private --------------------------------------------------------------------------------------------------------


def _unpack_zip(archive: Path, folder: Path, most: int) -> None:
    with zipfile.ZipFile(archive) as opened:
        members = opened.infolist()
        if len(members) > MAX_ENTRIES:
            raise ConversionFailed(f"{archive}: holds {len(members)} files; wanted at most {MAX_ENTRIES}")
        left = most
        for member in members:
            kind = stat.S_IFMT(member.external_attr >> 16)
            if member.is_dir():
                continue
            if kind not in (0, stat.S_IFREG):
                raise ConversionFailed(f"{archive}: {member.filename[:80]!r} is a link or a device, not a file")
            target = _member_path(archive, folder, member.filename)
            with opened.open(member) as content:
                left = _write(archive, content, target, left)


def _unpack_tar(archive: Path, folder: Path, most: int) -> None:
    left = most
    with tarfile.open(archive, "r|*") as opened:
        for count, member in enumerate(opened):
            if count >= MAX_ENTRIES:
                raise ConversionFailed(f"{archive}: holds more than {MAX_ENTRIES} files")
            if member.isdir():
                continue
            if not member.isreg():
                raise ConversionFailed(f"{archive}: {member.name[:80]!r} is a link or a device, not a file")
            target = _member_path(archive, folder, member.name)
            content = opened.extractfile(member)
            if content is not None:
                left = _write(archive, content, target, left)


def _member_path(archive: Path, folder: Path, name: str) -> Path:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or "\0" in name or not parts.parts:
        raise ConversionFailed(f"{archive}: holds {name[:80]!r}, a path that leads out of it; nothing of it was taken")
    return folder.joinpath(*parts.parts)


def _write(archive: Path, content: IO[bytes], target: Path, left: int) -> int:
    """Write a member; returns how many bytes are left for others. Raises ConversionFailed: its place is taken.

    Of two members of one name, what was checked might not be what is run.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = target.open("xb")
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise ConversionFailed(
            f"{archive}: holds {target.name[:80]!r} twice, or as a file and as a folder; make the archive anew"
        ) from None
    with file:
        for chunk in _chunks(content):
            left -= len(chunk)
            if left < 0:
                raise ConversionFailed(
                    f"{archive}: unpacks to more than {MAX_RATIO} bytes for each of its own, as no model does"
                )
            file.write(chunk)
    return left


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    while chunk := content.read(_CHUNK):
        yield chunk
