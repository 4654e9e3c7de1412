"""A repository copied into an OCI registry, in an order in which every reader finds one whole state.

Owns: uploads over HTTP, the manifests of tags, and their order: the blobs of a role before the tag that has them, the
timestamp after all that it names, roots last. How files lie in a registry is `updates/oci`'s. What is there already is
not sent again. Never signs and never deletes: a registry's own rules do.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

from tuf.api.metadata import Targets

from edge_runtime import __version__
from edge_runtime.errors import PublishError
from edge_runtime.publish.repository import Repository
from edge_runtime.updates.oci import (
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    OciAddress,
    RegistryLogin,
    read_challenges,
    read_layers,
    read_token,
)

WAIT_S = 60.0
"""For each read and write: a registry checks the hash of a large blob before it replies."""

ARTIFACT_TYPE = "application/vnd.edge-runtime.repository.v1"
FILE_TYPE = "application/octet-stream"

_EMPTY = b"{}"
"""The configuration of an artifact that has none (OCI Image 1.1, "Guidance for an Empty Descriptor")."""

_TITLE = "org.opencontainers.image.title"
_CREATED, _THERE = (201, 204), range(200, 400)
"""A registry with a store of its own leads to it by a redirect, also for HEAD: the blob is there."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pushed:
    """tags: of the repository's state. sent: the files that the registry did not have. nbytes: theirs."""

    tags: int
    sent: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _NamedFile:
    """A file of the repository: its path below it, SHA-256 and length."""

    path: str
    sha256: str
    length: int

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}"

    def layer(self) -> dict[str, Any]:
        # With its path, so that a registry's own tools bring it as a file of a mirror.
        return {
            "mediaType": FILE_TYPE, "digest": self.digest, "size": self.length, "annotations": {_TITLE: self.path},
        }  # fmt: skip


def push(
    repository: Repository, address: OciAddress, login: RegistryLogin, tls: ssl.SSLContext | None, say: Say
) -> Pushed:
    """Copy all that the newest state names to a registry. say: hears of each tag.

    Raises PublishError: a file is not the signed one, or the registry refuses; what was there before stays whole.
    """
    registry = _RegistryWriter(address, login, tls)
    tags = sent = nbytes = 0
    for tag in _tags(repository):
        say(tag.name)
        came = _push_tag(registry, repository.folder.path, tag)
        tags, sent, nbytes = tags + 1, sent + len(came), nbytes + sum(file.length for file in came)
    return Pushed(tags, sent, nbytes)


@dataclass(frozen=True, slots=True)
class _Tag:
    """One file of metadata and the targets that it signs. before: the tag of the version before, which has most."""

    name: str
    files: list[_NamedFile]
    before: str


def _tags(repository: Repository) -> Iterator[_Tag]:
    """Yield each tag with its files, in the order in which readers may see them."""
    catalog, folder = repository.catalog, repository.folder
    named: list[tuple[str, list[_NamedFile], str]] = []
    for role in (*sorted(catalog.delegated), "targets", "snapshot"):
        signed = catalog.signed(role)
        targets = signed.targets.values() if isinstance(signed, Targets) else ()
        files = [
            _NamedFile(f"targets/{target.get_prefixed_paths()[0]}", target.hashes["sha256"], target.length)
            for target in targets
        ]
        named.append((f"{signed.version}.{role}.json", files, f"{signed.version - 1}.{role}.json"))
    named.append(("timestamp.json", [], ""))
    # Last: a device takes a new root only with what its keys signed; what the old ones signed too is there by now.
    named += [(f"{version}.root.json", [], "") for version in range(1, catalog.root.version + 1)]
    for name, files, before in named:
        data = folder.read(name)
        if data is None:
            raise PublishError(f"{folder.metadata / name}: is not there; bring it back from a copy")
        signed_file = _NamedFile(f"metadata/{name}", hashlib.sha256(data).hexdigest(), len(data))
        yield _Tag(name, [signed_file, *files], before)


def _push_tag(registry: _RegistryWriter, folder: Path, tag: _Tag) -> list[_NamedFile]:
    """Bring a tag and its files; return the files that were sent."""
    empty = _NamedFile("", hashlib.sha256(_EMPTY).hexdigest(), len(_EMPTY))
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": empty.digest, "size": empty.length},
        "layers": [file.layer() for file in tag.files],
    }
    data = json.dumps(manifest, separators=(",", ":")).encode()
    if len(data) > MAX_MANIFEST_BYTES:
        raise PublishError(
            f"{tag.name}: its {len(tag.files) - 1} targets make a manifest of {len(data)} bytes, and registries take "
            f"{MAX_MANIFEST_BYTES}; take old releases out with `repo clean --keep N`"
        )
    if registry.has_manifest(tag.name, data):
        return []
    there = registry.layers(tag.before) if len(tag.files) > 1 else frozenset()
    sent = [
        file
        for file in tag.files
        if file.digest not in there and registry.bring(file.digest, file.length, folder / file.path)
    ]
    registry.bring(empty.digest, empty.length, _EMPTY)
    registry.put_manifest(tag.name, data)
    return sent


class _RegistryWriter:
    """One repository of a registry, to be written. A request has a connection of its own."""

    def __init__(self, address: OciAddress, login: RegistryLogin, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._login = login
        self._tls = tls
        self._authorization: str | None = None

    def has_manifest(self, tag: str, data: bytes) -> bool:
        """Whether a tag has this very manifest."""
        status, headers, _ = self._ask("HEAD", f"manifests/{tag}", {"Accept": MANIFEST_TYPE})
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        return status in _THERE and headers.get("Docker-Content-Digest") == digest

    def layers(self, tag: str) -> frozenset[str]:
        """Return the digests that a tag names, which the registry has; none where there is no such tag."""
        status, _, data = self._ask("GET", f"manifests/{tag}", {"Accept": MANIFEST_TYPE})
        if status != 200:
            return frozenset()
        try:
            return frozenset(read_layers(data))
        except ValueError:
            return frozenset()

    def put_manifest(self, tag: str, data: bytes) -> None:
        """Make a tag name a manifest, whose blobs are there."""
        headers = {"Content-Type": MANIFEST_TYPE, "Content-Length": str(len(data))}
        self._demand("PUT", f"manifests/{tag}", headers, data)

    def bring(self, digest: str, length: int, content: Path | bytes) -> bool:
        """Bring a blob; False: it is there already."""
        if self._ask("HEAD", f"blobs/{digest}", {})[0] in _THERE:
            return False
        if isinstance(content, Path) and _sha256(content) != digest:
            raise PublishError(f"{content}: was changed after it was signed; bring it back from a copy")
        headers = self._demand("POST", "blobs/uploads/", {"Content-Length": "0"}, b"", wanted=(202,))
        place = headers.get("Location", "")
        place += f"{'&' if '?' in place else '?'}digest={digest.replace(':', '%3A')}"
        told = {"Content-Type": FILE_TYPE, "Content-Length": str(length)}
        self._demand("PUT", urljoin(self._address.api, place), told, content)
        return True

    # ---- private ----------------------------------------------------------------------------------------------------

    def _demand(
        self, method: str, path: str, headers: dict[str, str], content: Path | bytes, wanted: tuple[int, ...] = _CREATED
    ) -> Message:
        status, told, body = self._ask(method, path, headers, content)
        if status not in wanted:
            reason = body[:500].decode(errors="replace").strip()
            raise PublishError(f"{self._address}: {method} {path.partition('?')[0]}: {status} {reason}")
        return told

    def _ask(
        self, method: str, path: str, headers: dict[str, str], content: Path | bytes = b""
    ) -> tuple[int, Message, bytes]:
        """Ask once, and again with what the registry wants of who asks. Raises PublishError."""
        url = urljoin(self._address.api, path)
        is_known = url.startswith(urljoin(self._address.api, "/"))  # a login is for it alone, and never over http
        login = {"Authorization": self._authorization} if self._authorization is not None and is_known else {}
        status, told, body = _request(self._tls, method, url, {**headers, **login}, content)
        if status == 401 and is_known:
            self._authorization = self._authorize(told)
            login = {"Authorization": self._authorization}
            status, told, body = _request(self._tls, method, url, {**headers, **login}, content)
        if status in (401, 403):
            raise PublishError(f"{self._address}: {status} for {method} {path.partition('?')[0]}; look at the login")
        return status, told, body

    def _authorize(self, told: Message) -> str:
        challenge = read_challenges(told.get_all("WWW-Authenticate") or ())
        basic = self._login.basic()
        if challenge is None or (not challenge.realm and basic is None):
            raise PublishError(
                f"{self._address}: the registry wants a login: `podman login --authfile FILE {self._address.host}`, "
                "then --auth-file FILE"
            )
        if not challenge.realm:
            assert basic is not None
            return basic
        url = challenge.token_url(self._address.name, "pull,push")
        secure = urlsplit(self._address.api).scheme
        if urlsplit(url).scheme != secure:
            raise PublishError(f"{self._address}: leads to {url} for a token; wanted an address of {secure}")
        status, _, body = _request(self._tls, "GET", url, {} if basic is None else {"Authorization": basic}, b"")
        if status != 200:
            raise PublishError(f"{url}: {status}; the registry's login refuses; look at --auth-file")
        try:
            return read_token(body)
        except ValueError as error:
            raise PublishError(f"{url}: gives no token: {error}") from None


def _request(
    tls: ssl.SSLContext | None, method: str, url: str, headers: dict[str, str], content: Path | bytes
) -> tuple[int, Message, bytes]:
    """Send one request, and return its status, headers and the beginning of its body. Raises PublishError."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection = (
            HTTPSConnection(parts.netloc, timeout=WAIT_S, context=tls or ssl.create_default_context())
            if parts.scheme == "https"
            else HTTPConnection(parts.netloc, timeout=WAIT_S)
        )
        with closing(connection):
            told = {"User-Agent": f"edge-runtime/{__version__}", "Connection": "close", **headers}
            if isinstance(content, Path):
                with content.open("rb") as file:
                    _send(connection, method, target, file, told)
            else:
                _send(connection, method, target, content, told)
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read(MAX_MANIFEST_BYTES)
    except (OSError, HTTPException, ValueError) as error:
        raise PublishError(f"{url.partition('?')[0]}: {error or type(error).__name__}; look at the link") from error


def _send(
    connection: HTTPConnection, method: str, target: str, body: BinaryIO | bytes, headers: dict[str, str]
) -> None:
    # A registry that refuses replies, and closes, before it has read a large body: its reply says why.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, target, body or None, headers)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            hashed = hashlib.sha256()
            while piece := file.read(1 << 20):
                hashed.update(piece)
    except OSError as error:
        raise PublishError(f"{path}: {error.strerror}; bring it back from a copy") from error
    return f"sha256:{hashed.hexdigest()}"
