"""Debian's docker-registry as a process on 127.0.0.1: open, with logins by token, with its blobs at another server."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

from tests.fakes.http_server import Answer, HttpServer, Request

if TYPE_CHECKING:
    from typing_extensions import Self

PROGRAM = shutil.which("docker-registry") or shutil.which(
    "docker-registry", path=Path(__file__).parents[2] / "build/unpacked/usr/bin"
)
NEEDS_REGISTRY = pytest.mark.skipif(PROGRAM is None, reason="no docker-registry; do: make unpacked")

START_S = 60.0
SERVICE, ISSUER = "registry", "tests"
USER, PASSWORD = "device", "correct horse"


class DockerRegistry:
    """The registry; `address` is of one repository in it. Its blobs lie below `root`."""

    def __init__(self, folder: Path, *, tokens: TokenServer | None = None, leads_to: str | None = None) -> None:
        """tokens: who may do what; None: everybody all. leads_to: the server that it sends readers of blobs to."""
        folder.mkdir(parents=True, exist_ok=True)
        self.root = folder / "root"
        self._log = folder / "log"
        self.config = folder / "config.json"
        auth = {"auth": {"token": tokens.settings(folder)}} if tokens is not None else {}
        leads = (
            {"middleware": {"storage": [{"name": "redirect", "options": {"baseurl": leads_to}}]}} if leads_to else {}
        )
        self.config.write_text(
            json.dumps(
                {
                    "version": 0.1,
                    "log": {"level": "info", "accesslog": {"disabled": True}},
                    "storage": {"filesystem": {"rootdirectory": str(self.root)}},
                    "http": {"addr": "127.0.0.1:0", "secret": "of the tests"},
                    **auth,
                    **leads,
                }
            )
        )

    @property
    def address(self) -> str:
        """Where the repository `line/models` is."""
        return f"oci+http://127.0.0.1:{self.port}/line/models"

    def blob(self, sha256: str) -> Path:
        """The file of a blob."""
        return self.root / "docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"

    def collect_garbage(self) -> str:
        """Have it delete the blobs that no manifest names; returns what it said."""
        command = [str(PROGRAM), "garbage-collect", str(self.config)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S).stdout

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen([str(PROGRAM), "serve", str(self.config)], stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while (found := re.search(r"listening on 127\.0\.0\.1:(\d+)", self._log.read_text())) is None:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s, self._log.read_text()
            time.sleep(0.02)
        self.port = int(found[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


class TokenServer:
    """Gives tokens that a registry of `settings` takes, to who has the password. asked: the scopes, in order."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        now, name = datetime.now(timezone.utc), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ISSUER)])
        made = x509.CertificateBuilder(name, name, self._key.public_key(), 1, now - timedelta(1), now + timedelta(1))
        self._certificate = made.sign(self._key, hashes.SHA256())
        self._server = HttpServer(lambda _path: None)
        self._server.answer = self._answer
        self.asked: list[str] = []

    @property
    def host(self) -> str:
        """Its address, without the scheme."""
        return urlsplit(self._server.url).netloc

    def settings(self, folder: Path) -> dict[str, str]:
        """Of the registry that believes its tokens."""
        certificates = folder / "tokens.pem"
        certificates.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        realm = f"{self._server.url}token"
        return {"realm": realm, "service": SERVICE, "issuer": ISSUER, "rootcertbundle": str(certificates)}

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop()

    def _answer(self, request: Request) -> Answer:
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if request.headers.get("Authorization") != f"Basic {pair}":
            return Answer(401, b"", {"WWW-Authenticate": 'Basic realm="tokens"'})
        asked = parse_qs(urlsplit(f"/{request.path}").query)
        assert asked["service"] == [SERVICE]
        self.asked += asked["scope"]
        return Answer(200, json.dumps({"token": self._token(asked["scope"])}).encode())

    def _token(self, scopes: list[str]) -> str:
        now = int(time.time())
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        certificate = base64.b64encode(self._certificate.public_bytes(serialization.Encoding.DER)).decode()
        head = {"typ": "JWT", "alg": "ES256", "x5c": [certificate]}
        said = {
            "iss": ISSUER, "sub": USER, "aud": SERVICE, "exp": now + 300, "nbf": now - 60, "iat": now, "jti": "1",
            "access": access,
        }  # fmt: skip
        signed = f"{_web64(json.dumps(head).encode())}.{_web64(json.dumps(said).encode())}"
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_web64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def _web64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
