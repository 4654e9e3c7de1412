"""A repository in an OCI registry: how its files lie there, its login, and the two places that a device reads.

A file of `metadata/` is a tag of its own name, whose manifest has the file as its first layer; for a role that signs
targets, these are the layers after it, so that a registry's clean-up spares exactly what is signed. A file of
`targets/` is found without any manifest: its name begins with its SHA-256, which is the name of its blob. So a check
costs one request more than over HTTP, and reads nothing that grows with the repository.

The registry is trusted no more than any other place: signatures decide. Protocol: OCI Distribution 1.1 and Docker's
token authentication. Called by `source` and by the publisher's `push`; the bytes are `http_fetch`'s. Thread: one owner.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import msgspec
from msgspec import Struct

from edge_runtime.addresses import is_this_host
from edge_runtime.errors import ConfigError, DownloadError, NotPublished
from edge_runtime.updates.fetch import PIECE_BYTES, FetchedBody
from edge_runtime.updates.http_fetch import HttpFetcher, LoginAsked
from edge_runtime.updates.source import REGISTRY_SCHEMES

SECURE, PLAIN = REGISTRY_SCHEMES

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MAX_MANIFEST_BYTES = 4 << 20
"""What registries take of a manifest (OCI Distribution 1.1, "Pushing Manifests")."""

MAX_TOKEN_BYTES = 1 << 18
MAX_LOGINS_BYTES = 1 << 20

# OCI Distribution 1.1: names and tags ("Pulling manifests").
_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHALLENGE = re.compile(r"\s*(Bearer|Basic)\s+(.*)", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(r'(?<![A-Za-z])([A-Za-z]{1,32})="([^"]*)"')

MAX_CHALLENGE_CHARS = 4096
"""Of one challenge; registries write some 200. What searches one holds every other thread meanwhile."""


class OciAddress(Struct, frozen=True):
    """A repository's place in a registry. host: with its port. is_plain: over http."""

    host: str
    name: str
    is_plain: bool = False

    @property
    def api(self) -> str:
        """Return the address below which its blobs and manifests are."""
        return f"{'http' if self.is_plain else 'https'}://{self.host}/v2/{self.name}/"

    def __str__(self) -> str:
        return f"{PLAIN if self.is_plain else SECURE}{self.host}/{self.name}"


class _Layer(Struct, frozen=True):
    digest: str


class _TagManifest(Struct, frozen=True):
    layers: tuple[_Layer, ...] = ()


class _Token(Struct, frozen=True):
    token: str = ""
    access_token: str = ""


class _KeptLogin(Struct, frozen=True):
    auth: str = ""
    username: str = ""
    password: str = ""


class _KeptLogins(Struct, frozen=True):
    auths: Mapping[str, _KeptLogin] = {}


def parse_address(url: str) -> OciAddress:
    """Return the place that `oci://HOST/NAME` names. Raises ConfigError."""
    host, slash, name = url.removeprefix(SECURE).removeprefix(PLAIN).partition("/")
    if not url.startswith(REGISTRY_SCHEMES) or not host or not slash or not _NAME.fullmatch(name.rstrip("/")):
        raise ConfigError(
            f"{url!r}: wanted oci://HOST/NAME, or oci+http://HOST/NAME for a registry without TLS; a name is small "
            "letters and digits, with . _ - and / between them, and has no tag: tags are the files of metadata/"
        )
    return OciAddress(host, name.rstrip("/"), url.startswith(PLAIN))


class RegistryLogin:
    """The login for one registry, out of the file that `docker login` and `podman login --authfile` write.

    The file is read each time that a login is asked for, so that a new password needs no restart.
    """

    def __init__(self, address: OciAddress, file: str | None, key: str) -> None:
        """file: None, the registry asks for none. key: the setting that names it.

        Raises ConfigError: it cannot be read, has no login for this registry, or would send it to every listener.
        """
        self._host = address.host
        self._file = file
        self._key = key
        self.basic()
        if file is not None and address.is_plain and not is_this_host(urlsplit(address.api).hostname or ""):
            raise ConfigError(f"{key}: {address} is http, which tells every listener the password; wanted oci://")

    def basic(self) -> str | None:
        """Return the value of an `Authorization` header with the user and the password; None: there is no login."""
        if self._file is None:
            return None
        wanted = 'wanted {"auths": {"HOST": {"auth": …}}}, as `podman login --authfile FILE HOST` writes it'
        try:
            with Path(self._file).open("rb") as file:
                logins = msgspec.json.decode(file.read(MAX_LOGINS_BYTES), type=_KeptLogins).auths
        except OSError as error:
            raise ConfigError(f"{self._key}: {self._file}: {error.strerror}; {wanted}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self._key}: {self._file}: {error}; {wanted}") from None
        for place, login in logins.items():
            if place.partition("://")[2].partition("/")[0] == self._host or place.partition("/")[0] == self._host:
                pair = f"{login.username}:{login.password}".encode()
                return f"Basic {login.auth or base64.b64encode(pair).decode()}"
        raise ConfigError(
            f"{self._key}: {self._file} has no login for {self._host}, only for {', '.join(logins) or 'none'}"
        )

    def __bool__(self) -> bool:
        return self._file is not None


class Challenge(Struct, frozen=True):
    """The login that a registry wants. realm: where its tokens come from; "": a user and a password themselves."""

    realm: str = ""
    service: str = ""
    scope: str = ""

    def token_url(self, name: str, actions: str) -> str:
        """Return the address of a token for a repository. actions: "pull", or "pull,push"."""
        asked = {"service": self.service} if self.service else {}
        asked["scope"] = self.scope or f"repository:{name}:{actions}"
        return f"{self.realm}{'&' if '?' in self.realm else '?'}{urlencode(asked)}"


def read_challenges(values: Sequence[str]) -> Challenge | None:
    """Return what `WWW-Authenticate` headers want, a token first; None: nothing that is known here. Pure."""
    found: Challenge | None = None
    for value in values:
        match = _CHALLENGE.fullmatch(value) if len(value) <= MAX_CHALLENGE_CHARS else None
        if match is None:
            continue
        if match[1].lower() == "basic":
            found = found or Challenge()
            continue
        said = {name.lower(): text for name, text in _PARAMETER.findall(match[2])}
        if said.get("realm"):
            return Challenge(said["realm"], said.get("service", ""), said.get("scope", ""))
    return found


def read_token(data: bytes) -> str:
    """Return the value of an `Authorization` header from a token server's reply. Raises ValueError: it has no token."""
    try:
        reply = msgspec.json.decode(data, type=_Token)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    token = reply.token or reply.access_token
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ValueError("got no token")
    return f"Bearer {token}"


def read_layers(data: bytes) -> list[str]:
    """Return the digests of a manifest's layers, as `sha256:…`. Raises ValueError: it is not a manifest of ours."""
    try:
        digests = [layer.digest for layer in msgspec.json.decode(data, type=_TagManifest).layers]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    for digest in digests:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"got the layer {digest[:200]!r}, wanted sha256: and 64 hex digits")
    return digests


class Registry:
    """One repository in a registry: what is fetched from it, with a login where it asks for one. Thread: one owner."""

    def __init__(self, http: HttpFetcher, address: OciAddress, login: RegistryLogin) -> None:
        """http: below `address.api`."""
        self._http = http
        self._address = address
        self._login = login
        self._authorization: str | None = None

    @contextmanager
    def open(self, path: str, *, start_bytes: int = 0, deadline_s: float, accept: str = "*/*") -> Iterator[FetchedBody]:
        """Start to fetch a blob or a manifest. Raises as the Fetcher protocol says."""
        with ExitStack() as opened:
            try:
                body = opened.enter_context(self._open(path, start_bytes, deadline_s, accept))
            except LoginAsked as asked:
                self._authorization = self._authorize(asked, deadline_s)
                body = opened.enter_context(self._open(path, start_bytes, deadline_s, accept))
            yield body

    def read(self, path: str, max_bytes: int, *, deadline_s: float, accept: str = "*/*") -> bytes:
        """Fetch a small file. Raises as `open`, and DownloadError: it is longer."""
        with self.open(path, deadline_s=deadline_s, accept=accept) as body:
            return _read_whole(body, max_bytes, path)

    # ---- private ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self, path: str, start_bytes: int, deadline_s: float, accept: str) -> Iterator[FetchedBody]:
        headers = {"Accept": accept}
        if self._authorization is not None:
            headers["Authorization"] = self._authorization
        with self._http.open(path, start_bytes=start_bytes, deadline_s=deadline_s, headers=headers) as body:
            yield body

    def _authorize(self, asked: LoginAsked, deadline_s: float) -> str:
        """Return the header that the registry asks for. Raises DownloadError: it wants another login, or gives none."""
        challenge = read_challenges(asked.challenges)
        try:
            basic = self._login.basic()
        except ConfigError as error:
            raise DownloadError(error.message) from None
        if challenge is None or (not challenge.realm and basic is None):
            raise DownloadError(
                f"{self._address}: the registry wants a login; name the file that `podman login --authfile` wrote in "
                "update.auth_file"
            ) from asked
        if not challenge.realm:
            assert basic is not None
            return basic
        url = challenge.token_url(self._address.name, "pull")
        headers = {} if basic is None else {"Authorization": basic}
        try:
            with self._http.open_named(url, deadline_s=deadline_s, headers=headers) as body:
                return read_token(_read_whole(body, MAX_TOKEN_BYTES, url))
        except LoginAsked as refused:
            raise DownloadError(f"{refused.message}; look at update.auth_file") from None
        except ValueError as error:
            raise DownloadError(f"{url}: gives no token: {error}") from None


class OciMetadata:
    """The files of `metadata/`, each a tag of its name. `open` as the Fetcher protocol says."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @contextmanager
    def open(self, path: str, *, start_bytes: int = 0, deadline_s: float) -> Iterator[FetchedBody]:
        """Start to fetch the first layer of a tag's manifest. Raises as the Fetcher protocol says."""
        if not _TAG.fullmatch(path):
            raise NotPublished(f"{path!r} cannot be a tag of a registry")
        where = f"manifests/{path}"
        data = self._registry.read(where, MAX_MANIFEST_BYTES, deadline_s=deadline_s, accept=MANIFEST_TYPE)
        try:
            digest, *_ = read_layers(data)
        except ValueError as error:
            raise DownloadError(f"{where}: is not what `repo push` writes: {error}") from None
        with self._registry.open(f"blobs/{digest}", start_bytes=start_bytes, deadline_s=deadline_s) as body:
            yield body


class OciTargets:
    """The files of `targets/`, each a blob by the SHA-256 in its name. `open` as the Fetcher protocol says."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @contextmanager
    def open(self, path: str, *, start_bytes: int = 0, deadline_s: float) -> Iterator[FetchedBody]:
        """Start to fetch a blob. Raises as the Fetcher protocol says."""
        sha256 = path.rpartition("/")[2].partition(".")[0]
        if not _SHA256.fullmatch(sha256):
            raise NotPublished(f"{path!r}: wanted a name that begins with its SHA-256; a registry has no others")
        with self._registry.open(f"blobs/sha256:{sha256}", start_bytes=start_bytes, deadline_s=deadline_s) as body:
            yield body


def _read_whole(body: FetchedBody, max_bytes: int, name: str) -> bytes:
    got = bytearray()
    while piece := body.read(min(PIECE_BYTES, max_bytes + 1 - len(got))):
        got += piece
        if len(got) > max_bytes:
            raise DownloadError(f"{name}: more than the {max_bytes} bytes that it may have; the rest was not read")
    return bytes(got)
