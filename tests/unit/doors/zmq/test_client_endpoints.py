"""Where daemon and client meet: the order of places, safe folders below /tmp, endpoints that ZeroMQ cannot take."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from edge_runtime.config import endpoints
from edge_runtime.doors.zmq.channel import probe
from edge_runtime.errors import ConfigError
from tests.fakes.rights import open_folder, ordinary_rights

VARIABLES = ("RUNTIME_DIRECTORY", "STATE_DIRECTORY", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "EDGE_RUNTIME_ENDPOINT")
PRIVATE = f"edge-runtime-{os.getuid()}"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", tmp_path / "no-run")
    monkeypatch.setattr(endpoints, "SYSTEM_STATE", tmp_path / "no-lib" / "below")
    monkeypatch.setattr(endpoints, "TEMPORARY", tmp_path)
    monkeypatch.setattr(endpoints, "UNIT_FOLDERS", (tmp_path / "units",))
    monkeypatch.setattr(endpoints, "CONFIGURATION", tmp_path / "etc" / "config.toml")


@contextmanager
def listening(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def test_the_service_managers_folder_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}/a:{tmp_path}/b")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert endpoints.runtime_folder() == tmp_path / "a"
    assert (tmp_path / "a").is_dir()
    assert endpoints.default_infer_endpoint() == f"ipc://{tmp_path}/a/infer.sock"
    assert endpoints.default_control_endpoint(["tcp://*:5600"]) == f"ipc://{tmp_path}/a/control.sock"


def test_the_system_folder_comes_before_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "user").mkdir()
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", tmp_path / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    assert endpoints.runtime_folder() == tmp_path / "run" / "edge-runtime"


def test_the_users_folder_comes_before_the_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert endpoints.runtime_folder() == tmp_path / "edge-runtime"
    assert (tmp_path / "edge-runtime").stat().st_mode & 0o777 == 0o700


def test_the_temporary_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    assert endpoints.runtime_folder() == tmp_path / PRIVATE
    assert (tmp_path / PRIVATE).stat().st_mode & 0o777 == 0o700
    assert endpoints.runtime_folder() == tmp_path / PRIVATE, "a second daemon finds the same one"


def test_a_temporary_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / PRIVATE).mkdir()
    (tmp_path / PRIVATE).chmod(0o755)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        endpoints.runtime_folder()


def test_a_link_in_place_of_the_temporary_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / PRIVATE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        endpoints.runtime_folder()


def test_a_client_finds_the_socket_of_a_daemon_that_chose_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", tmp_path / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    path = tmp_path / "user" / "edge-runtime" / "infer.sock"
    with listening(path):
        assert endpoints.client_endpoint() == f"ipc://{path}"
    path.unlink()


def test_a_client_finds_a_daemon_that_has_opened_its_control_socket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is longer than a socket's path may be
        user = Path(name) / "user"
        monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", Path(name) / "run")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(user))
        endpoint = f"ipc://{user}/edge-runtime/infer.sock"
        with listening(user / "edge-runtime" / "infer.sock.control"):
            assert endpoints.client_endpoint() == endpoint
            assert f"no daemon answers at {endpoint} yet: it is starting" in str(probe(endpoint))


def test_without_a_daemon_the_endpoint_is_the_one_that_a_daemon_of_this_user_would_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "user").mkdir()
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", tmp_path / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    said = endpoints.client_endpoint()
    assert said == endpoints.default_infer_endpoint()


def test_a_client_ignores_a_socket_in_a_strangers_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    with listening(tmp_path / "user" / "edge-runtime" / "infer.sock"):
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        if (tmp_path / "user").stat().st_uid == 0:
            os.chown(tmp_path / "user" / "edge-runtime", 4243, -1)
        assert endpoints.client_endpoint() == f"ipc://{tmp_path}/edge-runtime-4242/infer.sock"


def test_a_client_finds_the_service_whose_folder_belongs_to_a_user_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", tmp_path / "run")
    path = tmp_path / "run" / "edge-runtime" / "infer.sock"
    with listening(path):
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        assert endpoints.client_endpoint() == f"ipc://{path}"


def test_a_client_that_may_not_look_into_the_services_folder_connects_there_and_gets_that_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_folder() as run:
        (run / "edge-runtime").mkdir(mode=0o700)
        monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", run)
        if os.geteuid() != 0:
            (run / "edge-runtime").chmod(0)
        with ordinary_rights():
            # Root's real user is still root while it acts as nobody; access() asks for the real one.
            monkeypatch.setattr(os, "access", partial(os.access, effective_ids=True))
            assert endpoints.client_endpoint() == f"ipc://{run}/edge-runtime/infer.sock"


HERE, SERVICE, OURS = Path("/user"), Path("/run/edge-runtime"), Path("/tmp/edge-runtime-1000")


@pytest.mark.parametrize(
    ("folders", "serving", "is_a_service", "chosen"),
    [
        ((SERVICE, HERE, OURS), (), False, HERE),
        ((SERVICE, HERE, OURS), (), True, SERVICE),
        ((SERVICE, HERE, OURS), (OURS,), True, OURS),
        ((SERVICE, HERE, OURS), (SERVICE, OURS), True, SERVICE),
        ((HERE,), (), True, HERE),
    ],
    ids=["nothing", "stopped service", "one's own daemon", "both", "told where"],
)
def test_a_client_looks_where_a_daemon_serves_else_where_the_service_would(
    folders: tuple[Path, ...], serving: tuple[Path, ...], is_a_service: bool, chosen: Path
) -> None:
    assert endpoints.choose_folder(folders, serving, SERVICE, HERE, is_a_service=is_a_service) == chosen


@pytest.mark.parametrize("installed", ["units/edge-runtime.service", "etc/config.toml"])
def test_a_client_of_a_stopped_service_is_advised_to_ask_systemd(
    installed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", tmp_path / "run")
    (tmp_path / installed).parent.mkdir()
    (tmp_path / installed).write_text("")
    endpoint = endpoints.client_endpoint()
    assert endpoint == f"ipc://{tmp_path}/run/edge-runtime/infer.sock"
    for each in (endpoint, endpoints.control_endpoint_beside(endpoint)):
        told = str(probe(each))
        assert "`systemctl status edge-runtime` and `journalctl -u edge-runtime`" in told
        assert "edge-runtime serve" not in told
    assert "start one with `edge-runtime serve" in str(probe(f"ipc://{tmp_path}/mine.sock"))


def test_where_no_service_is_installed_a_client_is_advised_to_start_a_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME", tmp_path / "run")
    for endpoint in (endpoints.client_endpoint(), f"ipc://{tmp_path}/run/edge-runtime/infer.sock"):
        told = str(probe(endpoint))
        assert "start one with `edge-runtime serve" in told
        assert "systemctl" not in told


def test_looking_for_a_daemon_makes_no_folder(tmp_path: Path) -> None:
    assert endpoints.client_endpoint() == f"ipc://{tmp_path}/{PRIVATE}/infer.sock"
    assert not (tmp_path / PRIVATE).exists()


def test_the_endpoint_that_was_asked_for_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", "tcp://127.0.0.1:5600")
    assert endpoints.client_endpoint() == "tcp://127.0.0.1:5600"
    assert endpoints.client_endpoint("ipc:///x.sock") == "ipc:///x.sock"
    assert endpoints.client_endpoint("/x.sock") == "ipc:///x.sock"


def test_a_daemons_control_endpoint_lies_beside_its_first_ipc_one(tmp_path: Path) -> None:
    infer = ["tcp://*:5600", "ipc:///run/a.sock", "ipc:///run/b.sock"]
    assert endpoints.default_control_endpoint(infer) == "ipc:///run/a.sock.control"


def test_a_client_finds_the_control_socket_of_a_daemon_that_serves_over_tcp_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    user = tmp_path_factory.mktemp("u")  # a socket's path has at most 107 bytes
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(user))
    folder = user / "edge-runtime"
    with listening(folder / "control.sock"):
        assert endpoints.client_endpoint() == f"ipc://{folder}/infer.sock"
        assert endpoints.control_endpoint_beside(f"ipc://{folder}/infer.sock") == f"ipc://{folder}/control.sock"
        with listening(folder / "infer.sock.control"):
            assert (
                endpoints.control_endpoint_beside(f"ipc://{folder}/infer.sock") == f"ipc://{folder}/infer.sock.control"
            )
        with listening(tmp_path / PRIVATE / "infer.sock"):
            assert endpoints.client_endpoint() == f"ipc://{tmp_path}/{PRIVATE}/infer.sock", "one that answers all"


def test_the_control_endpoint_lies_beside_an_ipc_one() -> None:
    assert endpoints.control_endpoint_beside("ipc:///run/a.sock") == "ipc:///run/a.sock.control"
    with pytest.raises(ConfigError, match="ipc only"):
        endpoints.control_endpoint_beside("tcp://127.0.0.1:5600")


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        ("ipc:///" + "x" * 107, "108 bytes"),
        ("ipc:///" + "é" * 54, "109 bytes"),
        ("http://127.0.0.1:80", "not a ZeroMQ endpoint.*edge_runtime.OipClient asks there"),
        ("mqtt://broker/dev1", "not a ZeroMQ endpoint.*edge_runtime.MqttClient asks there"),
        ("ftp://127.0.0.1:80", r"wanted ipc:.* mqtt\[s\]:.* http\[s\]:.* grpc\[s\]:"),
        ("ipc://", "wanted ipc"),
        ("tcp://127.0.0.1", "no port"),
        ("tcp://127.0.0.1:abc", "no port"),
        ("tcp://127.0.0.1:²", "no port"),
        ("tcp://127.0.0.1:٣", "no port"),
        ("tcp://127.0.0.1:65536", "a port up to 65535"),
        ("ipc:///tmp/a\0b", "wanted ipc"),
        ("nonsense", "wanted ipc"),
    ],
)
def test_an_endpoint_that_zeromq_cannot_take_is_refused(endpoint: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        endpoints.check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["ipc:///" + "x" * 106, "tcp://127.0.0.1:5600", "tcp://[::1]:5600", "tcp://*:*"])
def test_an_endpoint_that_zeromq_can_take_is_left_as_it_is(endpoint: str) -> None:
    assert endpoints.check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://a..b:1"])
def test_an_address_that_no_client_can_connect_to_is_told_as_such(endpoint: str) -> None:
    error = probe(endpoint)
    assert error is not None
    assert "no client can connect to such an address" in str(error)


def test_the_state_folder_follows_its_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(endpoints, "SYSTEM_STATE", tmp_path / "lib")
    assert endpoints.state_folder(str(tmp_path / "asked")) == tmp_path / "asked"
    assert endpoints.state_folder() == tmp_path / "lib" / "edge-runtime"
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "given"))
    assert endpoints.state_folder() == tmp_path / "given"


def test_a_state_folder_that_cannot_be_made_is_an_error_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        endpoints.state_folder(str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=f"state: .* cannot be created: {tmp_path}/nosuch is not there; make it, or"):
        endpoints.state_folder(str(tmp_path / "nosuch" / "below"))
    assert not (tmp_path / "nosuch").exists()
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "file" / "below"))
    assert endpoints.state_folder() is None
