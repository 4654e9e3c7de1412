"""The watchdog is fed while models answer through the real endpoint, and no longer when one is silent there."""

from __future__ import annotations

import gc
import socket
from contextlib import closing

import pytest

from edge_runtime.request.infer_frontend import InferRoute
from edge_runtime.request.request import CHECK
from edge_runtime.wire.codec import pack_request
from tests.contract.running_daemon import RawClient, floats, header, put_model, running_daemon
from tests.models import onnx_models

FED_S = 2.0
"""A watchdog of 0.1 s is fed at each beat, 0.25 s apart; a silent model is noticed after 6 intervals."""


@pytest.fixture
def fed(tmp_path, monkeypatch):
    """A function that returns whether the watchdog is fed within FED_S."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(FED_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "100000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)

        def fed():
            try:
                while b"WATCHDOG=1" not in notified.recv(4096):
                    pass
            except TimeoutError:
                return False
            return True

        yield fed


class LostBurst(list):
    """Takes entries, and has none."""

    def append(self, entry):
        """Lose it."""


def own_routes():
    return [each for each in gc.get_objects() if isinstance(each, InferRoute) and each.plan.origin is CHECK]


@pytest.mark.parametrize("toml", ['mode = "inline"\n', 'mode = "workers"\n'], ids=["inline", "workers"])
def test_a_model_that_is_silent_for_a_known_header_is_noticed(tmp_path, fed, toml):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp, toml=toml)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        while not own_routes():
            assert fed()
        for _ in range(3):
            assert fed()
        assert client.result("stats")["metrics"]["models"]["mlp"]["requests"] == 0, "its own questions do not count"
        # As a burst that is lost would leave it: never answered.
        (route,) = own_routes()
        route.burst = LostBurst()
        while fed():
            pass
        assert client.ask(header(), b"1", floats(1, 16).tobytes())[1] == b"1"


def test_a_client_that_writes_what_the_daemon_asks_itself_is_a_client(tmp_path, fed):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        while not own_routes():
            assert fed()
        asked = pack_request(own_routes()[0].header)
        for _ in range(4):
            client.ask(asked, b"1", floats(1, 16).tobytes())
        assert client.result("stats")["metrics"]["models"]["mlp"]["requests"] == 4


def test_a_clients_request_never_passes_for_the_daemons_own(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        for guess in ("", "0" * 32, None, True):
            client.ask(header(parameters={"self_check": guess}), b"", floats(1, 16).tobytes())
        assert client.result("stats")["metrics"]["models"]["mlp"]["requests"] == 4
