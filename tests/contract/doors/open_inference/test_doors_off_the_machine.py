"""HTTP and gRPC where other machines reach them: TLS, and tokens that say who may do what, through Triton's clients."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.errors import Forbidden
from tests.contract.running_daemon import ANSWER_S, floats, grpc_url, http_url, put_model, running_daemon
from tests.fakes import http2_peer as peer
from tests.fakes.certificates import Certificates
from tests.models import onnx_models


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Certificates, tokens by name, and a daemon whose doors use both."""
    folder = tmp_path_factory.mktemp("site")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    certificates = Certificates(folder)
    known, tokens = TokenFile(), {"stranger": "ert_unknown"}
    for name, may in (("camera", ("infer",)), ("boss", ("infer", "control"))):
        known, tokens[name] = known.with_token(name, may)
    (folder / "tokens.toml").write_text(known.text())
    said = {
        "endpoint": "0.0.0.0:0",
        "cert_file": str(certificates.server),
        "key_file": str(certificates.server_key),
        "tokens_file": str(folder / "tokens.toml"),
    }
    doors = {"http": HttpSettings(**said), "grpc": GrpcSettings(**said)}
    with running_daemon(folder / "models", folder / "run", **doors) as daemon:
        yield certificates, tokens, daemon


def status(site, path, name=None, method="GET"):
    certificates, tokens, daemon = site
    url = http_url(daemon).replace("0.0.0.0", "localhost") + path
    headers = {} if name is None else {"Authorization": f"Bearer {tokens[name]}"}
    context = ssl.create_default_context(cafile=str(certificates.ca))
    try:
        with urllib.request.urlopen(urllib.request.Request(url, None, headers, method=method), context=context) as told:
            return told.status, None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["code"]


def test_a_client_without_a_token_learns_over_http_that_the_daemon_lives_and_nothing_else(site):
    assert status(site, "/v2/health/live") == (200, None)
    assert status(site, "/v2/health/ready") == (200, None)
    assert status(site, "/v2") == (401, "unauthenticated")
    assert status(site, "/v2", "stranger") == (401, "unauthenticated")


def test_a_tokens_rights_hold_over_http(site):
    load = "/v2/repository/models/mlp/load"
    assert status(site, "/v2", "camera") == (200, None)
    assert status(site, load, "camera", "POST") == (403, "forbidden")
    assert status(site, load, "boss", "POST") == (200, None)


@pytest.fixture
def client(site):
    certificates, _, daemon = site
    address = grpc_url(daemon).removeprefix("grpcs://").replace("0.0.0.0", "localhost")
    with triton.InferenceServerClient(address, ssl=True, root_certificates=str(certificates.ca)) as client:
        yield client


def bearer(site, name):
    return {"authorization": f"Bearer {site[1][name]}"}


def test_a_client_without_a_token_learns_over_grpc_that_the_daemon_lives_and_nothing_else(site, client):
    assert client.is_server_live()
    assert client.is_server_ready()
    for headers in (None, bearer(site, "stranger")):
        with pytest.raises(InferenceServerException) as caught:
            client.get_model_metadata("mlp", headers=headers)
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"


def test_a_tokens_rights_hold_over_grpc(site, client):
    assert client.get_model_metadata("mlp", headers=bearer(site, "camera")).name == "mlp"
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("mlp", headers=bearer(site, "camera"))
    assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
    client.load_model("mlp", headers=bearer(site, "boss"))


def test_a_message_of_several_records_is_read_over_tls(site, client):
    x = triton.InferInput("x", [256, 16], "FP32")
    x.set_data_from_numpy(floats(256, 16))
    for _ in range(4):
        y = client.infer("mlp", [x], headers=bearer(site, "camera")).as_numpy("y")
        first, second = onnx_models.mlp_weights()
        np.testing.assert_allclose(y, np.maximum(floats(256, 16) @ first, 0) @ second, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("offered", [[], ["http/1.1"]])
def test_a_peer_over_tls_that_speaks_no_http2_is_closed(site, offered):
    certificates, _, daemon = site
    _, _, port = grpc_url(daemon).rpartition("/")[2].rpartition(":")
    context = ssl.create_default_context(cafile=str(certificates.ca))
    if offered:
        context.set_alpn_protocols(offered)
    with (
        socket.create_connection(("127.0.0.1", int(port)), timeout=ANSWER_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
        contextlib.suppress(OSError),  # reset, where it had said something
    ):
        connection.sendall(peer.BEGIN)
        assert connection.recv(1) == b""


@pytest.mark.smoke
@pytest.mark.parametrize("door", ["http", "grpc"])
def test_our_own_client_comes_by_tls_with_its_token_and_trusts_nobody_else(site, tmp_path, door):
    certificates, tokens, daemon = site
    url = daemon.doors[door].endpoints[0].replace("0.0.0.0", "localhost")
    (tmp_path / "token").write_text(tokens["camera"])
    with OipClient(url, token_file=str(tmp_path / "token"), ca_file=str(certificates.ca)) as client:
        assert client.infer("mlp", {"x": floats(2, 16)})["y"].shape == (2, 4)
        with pytest.raises(Forbidden):
            client.unload("mlp")
    with OipClient(url, token_file=str(tmp_path / "token")) as trusting_others, pytest.raises(ConnectionError):
        trusting_others.infer("mlp", {"x": floats(2, 16)}, timeout_ms=2_000)


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_renewed_certificate_is_shown_after_a_reload_and_no_connection_is_lost(tmp_path, door):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    old, new = (tmp_path / name for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    shown, renewed = Certificates(old), Certificates(new)
    trusted_before = tmp_path / "before.pem"
    trusted_before.write_bytes(shown.ca.read_bytes())
    said = {
        "endpoint": "127.0.0.1:0",
        "cert_file": str(shown.server),
        "key_file": str(shown.server_key),
        "client_ca_file": str(shown.ca),
        "insecure": True,
    }
    settings = {"http": HttpSettings, "grpc": GrpcSettings}[door](**said)
    with running_daemon(tmp_path / "models", tmp_path / "run", **{door: settings}) as daemon:
        served = daemon.doors[door]
        url, rows = served.endpoints[0], {"x": floats(2, 16)}

        def connected(ca, made):
            return OipClient(url, ca_file=str(ca), cert_file=str(made.client), key_file=str(made.client_key))

        with connected(trusted_before, shown) as early:
            assert early.infer("mlp", rows)["y"].shape == (2, 4)
            shown.server_key.write_bytes(b"broken")
            served.reload()
            with connected(trusted_before, shown) as beside:
                assert beside.infer("mlp", rows)["y"].shape == (2, 4)
            for name in ("server", "server_key", "ca"):
                getattr(shown, name).write_bytes(getattr(renewed, name).read_bytes())
            served.reload()
            assert early.infer("mlp", rows)["y"].shape == (2, 4)
            with connected(renewed.ca, renewed) as late:
                assert late.infer("mlp", rows)["y"].shape == (2, 4)
            with connected(trusted_before, shown) as stranger, pytest.raises(ConnectionError):
                stranger.infer("mlp", rows, timeout_ms=2_000)
