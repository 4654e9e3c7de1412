"""A device that reaches its repository by an HTTP proxy only."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge_runtime.addresses import read_proxy
from edge_runtime.clock import SystemClock
from edge_runtime.enrolment.certificates import Issuer, key_pem, new_authority, new_key, pem
from edge_runtime.errors import ConfigError, DownloadError
from edge_runtime.updates.http_fetch import HttpFetcher
from tests.fakes.http_server import HttpServer
from tests.fakes.proxy import WAIT_S, Proxy


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """The folder of `ca.crt` and of a certificate for repository.test."""
    now, key, server_key = datetime.now(timezone.utc), new_key(), new_key()
    authority = new_authority(key, now)
    (tmp_path / "ca.crt").write_bytes(pem(authority))
    certificate = Issuer(authority, key).for_server(["repository.test"], server_key, now, timedelta(days=1))
    (tmp_path / "server.pem").write_bytes(pem(certificate) + key_pem(server_key))
    return tmp_path


@pytest.fixture
def server(certificates: Path) -> Iterator[HttpServer]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "server.pem")
    with HttpServer({"f": b"bytes"}.get, tls=tls) as server:
        yield server


def proxy_to(server: HttpServer) -> Proxy:
    host, _, port = server.url.rpartition("//")[2].rstrip("/").partition(":")
    return Proxy((host, int(port)))


def read(fetcher: HttpFetcher, path: str = "f") -> bytes:
    with fetcher.open(path, deadline_s=SystemClock().monotonic_s() + WAIT_S) as body:
        return body.read(100)


def test_https_goes_through_a_tunnel_that_sees_no_content(server: HttpServer, certificates: Path) -> None:
    proxy = proxy_to(server)
    tls = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    try:
        assert read(HttpFetcher("https://repository.test/", proxy=read_proxy(proxy.url), tls=tls)) == b"bytes"
    finally:
        proxy.close()
    (head,) = proxy.heads
    assert head.startswith(b"CONNECT repository.test:443 HTTP/1.1\r\nHost: repository.test:443\r\n")
    assert b"/f" not in head


def test_http_is_asked_of_the_proxy_by_the_whole_address() -> None:
    with HttpServer({"f": b"bytes"}.get) as server:
        proxy = proxy_to(server)
        try:
            assert (
                read(HttpFetcher("http://repository.test/", proxy=read_proxy(proxy.url), allow_plain=True)) == b"bytes"
            )
        finally:
            proxy.close()
    assert proxy.heads[0].startswith(b"GET http://repository.test/f HTTP/1.1\r\n")


def test_this_host_is_asked_without_the_proxy() -> None:
    with HttpServer({"f": b"bytes"}.get) as server:
        assert read(HttpFetcher(server.url, proxy=read_proxy("http://127.0.0.1:9"))) == b"bytes"


REFUSALS = [b"HTTP/1.1 403 Forbidden\r\n\r\n", b"HTTP/1.1 407 Who\r\nX: y\r\n\r\n", b"", b"x" * 20_000]


@pytest.mark.parametrize("says", REFUSALS)
def test_a_proxy_that_does_not_lead_there_is_told_as_the_reason(
    server: HttpServer, certificates: Path, says: bytes
) -> None:
    proxy = proxy_to(server)
    proxy.says = says
    tls = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    try:
        with pytest.raises(DownloadError, match=r"the proxy|reset"):
            read(HttpFetcher("https://repository.test/", proxy=read_proxy(proxy.url), tls=tls))
    finally:
        proxy.close()


ADDRESSES = ["proxy.site", "https://proxy.site", "http://u:p@proxy.site", "http://proxy.site/x", "http://["]


@pytest.mark.parametrize("proxy", ADDRESSES)
def test_a_proxy_that_is_none_is_refused_and_its_password_is_not_told(proxy: str) -> None:
    with pytest.raises(ConfigError, match=r"update\.proxy") as error:
        read_proxy(proxy, key="update.proxy")
    assert "u:p" not in str(error.value)


def test_a_host_of_no_proxy_is_asked_without_it() -> None:
    with HttpServer({"f": b"bytes"}.get) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        proxy = read_proxy("http://127.0.0.1:9", ["localhost.localdomain", f"127.1:{port}"])
        assert read(HttpFetcher(f"http://127.1:{port}/", proxy=proxy, allow_plain=True)) == b"bytes"
