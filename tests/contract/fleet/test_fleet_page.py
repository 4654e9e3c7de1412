"""The page of a fleet over HTTP: figures as JSON, changes as they happen, and strangers are kept out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from edge_runtime.cli.main import main
from edge_runtime.doors.mqtt.broker import broker_access
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.errors import ConfigError
from edge_runtime.fleet import history as histories
from edge_runtime.fleet.fleet import FleetEvent
from edge_runtime.fleet.history import FleetHistory
from edge_runtime.fleet.listener import FleetListener
from edge_runtime.fleet.repository import FleetRepository
from edge_runtime.fleet.server import FleetServer, fleet_access
from tests.contract.fleet.test_fleet_verbs import say
from tests.contract.running_daemon import ANSWER_S
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.fakes.update_site import GROUP, UpdateSite, adder

pytestmark = needs_mosquitto

MARK = {"x-edge-page": "1"}


class Viewer:
    """A browser's requests, without a browser."""

    def __init__(self, server: FleetServer) -> None:
        address = urlsplit(server.endpoints[0])
        assert address.scheme == "http"
        self.host = address.netloc
        self.cookie = ""

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> tuple[int, Any, Mapping[str, str]]:
        connection = HTTPConnection(self.host, timeout=ANSWER_S)
        try:
            data = None if body is None else json.dumps(body).encode()
            told = {name.replace("_", "-"): value for name, value in headers.items()}
            if self.cookie:
                told["Cookie"] = self.cookie
            connection.request(method or ("GET" if body is None else "POST"), path, data, told)
            answer = connection.getresponse()
            text = answer.read()
            found = dict(answer.headers)
            if "Set-Cookie" in found:
                self.cookie = found["Set-Cookie"].partition(";")[0]
            is_json = found.get("Content-Type") == "application/json"
            return answer.status, json.loads(text) if is_json else text, found
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, found, _ = self.ask(path)
        assert status == 200, found
        return found

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, found, _ = self.ask(path, body, **MARK)
        return status, found


@contextmanager
def serving(
    broker: Broker, repository: str | None = None, tokens: Path | None = None
) -> Iterator[tuple[FleetServer, Viewer]]:
    server = FleetServer(
        FleetListener(broker_access(MqttSettings(url=broker.url)), "edge"),
        fleet_access("127.0.0.1:0", None, None, None if tokens is None else str(tokens)),
        FleetHistory(),
        None if repository is None else FleetRepository(repository),
    )
    try:
        server.start()
        server.listener.is_loaded.wait(ANSWER_S)
        yield server, Viewer(server)
    finally:
        server.close()


@pytest.fixture
def own_broker(tmp_path) -> Iterator[Broker]:
    with Broker(tmp_path / "broker") as broker:
        yield broker


def events_of(viewer: Viewer, **headers: str) -> Iterator[dict[str, Any]]:
    """The data of a stream's events, as they come."""
    connection = HTTPConnection(viewer.host, timeout=ANSWER_S)
    try:
        connection.request("GET", "/fleet/stream", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


# ---- figures --------------------------------------------------------------------------------------------------------


def test_devices_are_listed_searched_and_shown_one_by_one(own_broker):
    with Peer(own_broker.url) as peer, serving(own_broker) as (_, viewer):
        models = {"digits": {"version": 3, "p95_ms": 7.0, "rate_per_s": 2.0, "versions": []}}
        for index in range(150):
            say(peer, f"cam-{index:03}", models=models)
        say(peer, "gate", "offline", groups=["line-2"])
        events = events_of(viewer)
        while next(events)["overview"]["devices"] < 151:
            pass
        found = viewer.get("/fleet/devices")
        assert (found["count"], len(found["devices"])) == (151, 100)
        assert len(viewer.get("/fleet/devices?offset=100")["devices"]) == 51
        assert viewer.get("/fleet/devices?search=gat&condition=silent&group=line-2")["count"] == 1
        device = viewer.get("/fleet/device/cam-007")
        assert device["models"][0]["name"] == "digits"
        assert viewer.get("/fleet/slow")[0]["devices"] == 150
        assert viewer.get("/fleet/overview")["conditions"] == {"ok": 150, "offline": 1}
        assert viewer.ask("/fleet/device/nobody")[0] == 404


def test_releases_are_counted_by_the_repository_and_it_may_be_away(own_broker, tmp_path):
    site = UpdateSite()
    site.release(adder(tmp_path, 2), percent=100.0)
    folder = site.write(tmp_path / "repository")
    with Peer(own_broker.url) as peer:
        update = {"state": "idle", "group": GROUP, "models": {"adder": {"release": 2}}}
        say(peer, "cam", models={"adder": {"version": 2}}, update=update)
        say(peer, "gate", update={"state": "idle", "group": GROUP})
        with serving(own_broker, str(folder)) as (_, viewer):
            while (found := viewer.get("/fleet/releases"))["releases"][0]["version"] is None:
                pass
            (release,) = found["releases"]
            assert (release["version"], release["installed"], release["waiting"]) == (2, 1, 1)
        with serving(own_broker, str(tmp_path / "nowhere")) as (_, viewer):
            while not (found := viewer.get("/fleet/releases"))["reason"]:
                pass
            assert "is not a repository" in found["reason"]
            assert found["releases"][0]["installed"] == 1  # as devices tell of it


def test_a_stream_tells_of_changes_as_they_happen_and_of_its_end(own_broker):
    with Peer(own_broker.url) as peer:
        say(peer, "cam")
        with serving(own_broker) as (server, viewer):
            events = events_of(viewer)
            while next(events)["overview"]["devices"] < 1:
                pass
            say(peer, "cam", health="degraded", reasons=["<b>why</b>"])
            while "cam" not in (next(events)["devices"] or ()):
                pass
            history = viewer.get("/fleet/history?device=cam")
            assert [each["what"] for each in history] == ["went from ok to degraded: <b>why</b>"]
            server.close()
            assert {} in list(events)


def test_a_stream_on_a_connection_that_ends_with_it_tells_of_changes_too(own_broker):
    with Peer(own_broker.url) as peer:
        say(peer, "cam")
        with serving(own_broker) as (server, viewer):
            events = events_of(viewer, Connection="close")
            while next(events)["overview"]["devices"] < 1:
                pass
            say(peer, "cam", health="degraded", reasons=["why"])
            while "cam" not in (next(events)["devices"] or ()):
                pass
            server.close()
            assert {} in list(events)


def test_a_broker_that_is_away_is_told_and_figures_stay(own_broker):
    with Peer(own_broker.url) as peer:
        say(peer, "cam")
    with serving(own_broker) as (_, viewer):
        events = events_of(viewer)
        assert viewer.get("/fleet/devices")["count"] == 1
        own_broker.stop()
        while (overview := next(events)["overview"])["broker"]:
            pass
        assert overview["broker_reason"]
        assert viewer.get("/fleet/devices")["count"] == 1
        status, found, headers = viewer.ask("/fleet/wake", {"group": "line-1"}, **MARK)
        assert (status, found["error"]["retryable"]) == (503, True)
        assert int(headers["Retry-After"]) >= 1
        assert int(headers["retry-after-ms"]) >= 0


def test_a_wake_reaches_the_group(own_broker):
    with Peer(own_broker.url) as peer, serving(own_broker) as (_, viewer):
        peer.subscribe("fleet/+/wake", 1)
        assert viewer.post("/fleet/wake", {"group": "line-1"}) == (200, {"group": "line-1"})
        assert peer.next().topic == "fleet/line-1/wake"
        for group in ("#", "a/b", "", None, 3, "x" * 65):
            assert viewer.post("/fleet/wake", {"group": group})[0] == 400


def test_the_page_and_its_files_come_with_the_policy_of_pages(own_broker):
    with serving(own_broker) as (_, viewer):
        for path in ("/", "/fleet/page/fleet.js", "/fleet/page/fleet.css", "/page/html.js", "/page/vendor/preact.js"):
            status, body, headers = viewer.ask(path)
            assert (status, bool(body)) == (200, True)
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert headers["X-Frame-Options"] == "DENY"
            assert viewer.ask(path, if_none_match=headers["ETag"])[0] == 304


# ---- strangers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/fleet/page/../fleet.py",
        "/fleet/page/%2e%2e/fleet.py",
        "/page/../files.py",
        "/page//etc/passwd",
        "/fleet/page/fleet.html%00.js",
        "/v2/health/live",
        "/fleet/",
        "/fleet/keys",
        "/index.html",
    ],
)
def test_a_path_that_is_no_part_of_the_page_is_not_found(own_broker, path):
    with serving(own_broker) as (_, viewer):
        assert viewer.ask(path)[0] == 404


@pytest.mark.parametrize(
    "query", ["offset=-1", "limit=x", "limit=99999999999", "offset=1e3", "search=%ff", "a=1&" * 50]
)
def test_a_query_that_makes_no_sense_is_refused_or_ignored_and_ends_nothing(own_broker, query):
    with serving(own_broker) as (_, viewer):
        assert viewer.ask(f"/fleet/devices?{query}")[0] == 400
        assert viewer.get("/fleet/devices")["count"] == 0


def test_pages_of_others_and_names_that_dns_turned_here_are_refused(own_broker):
    with serving(own_broker) as (_, viewer):
        assert viewer.ask("/fleet/devices", Host="evil.example")[0] == 403
        assert viewer.ask("/", Host="evil.example")[0] == 403
        assert viewer.ask("/fleet/devices", Origin="https://evil.example")[0] == 403
        assert viewer.ask("/fleet/devices", Sec_Fetch_Site="cross-site")[0] == 403
        assert viewer.ask("/fleet/wake", {"group": "line-1"})[0] == 403  # no mark of the page
        assert viewer.ask("/fleet/wake", method="GET")[0] == 405
        assert viewer.ask("/fleet/wake", {"group": "x" * 100_000}, **MARK)[0] == 413
        assert viewer.ask("/fleet/devices", method="DELETE", **MARK)[0] == 405


def test_readers_and_controllers_have_tokens_and_a_cookie_stands_for_one(own_broker, tmp_path, capsys):
    tokens = tmp_path / "tokens.toml"
    made = {}
    for name, rights in (("reader", "infer"), ("chief", "infer,control")):
        assert main(["token", "add", name, "--may", rights, "--file", str(tokens), "--json"]) == 0
        made[name] = json.loads(capsys.readouterr().out)["token"]
    with serving(own_broker, tokens=tokens) as (_, viewer):
        assert viewer.ask("/")[0] == 200
        assert viewer.get("/page/session")["needs_token"]
        assert viewer.ask("/fleet/devices")[0] == 401
        assert viewer.ask("/fleet/stream")[0] == 401
        assert viewer.ask("/fleet/devices", Authorization=f"Bearer {made['reader']}")[0] == 200
        assert viewer.post("/page/login", {"token": "wrong"})[0] == 401
        assert viewer.post("/page/login", {"token": 3})[0] == 401
        status, session = viewer.post("/page/login", {"token": made["reader"]})
        assert (status, session["name"], session["may"]) == (200, "reader", ["infer"])
        assert viewer.get("/fleet/devices")["count"] == 0
        assert viewer.post("/fleet/wake", {"group": "line-1"})[0] == 403
        assert viewer.post("/page/logout", {})[1]["needs_token"]
        assert viewer.ask("/fleet/devices")[0] == 401
        assert viewer.post("/page/login", {"token": made["chief"]})[1]["may"] == ["control", "infer"]
        assert viewer.post("/fleet/wake", {"group": "line-1"})[0] == 200


def test_an_address_off_the_machine_wants_tls_and_tokens():
    with pytest.raises(ConfigError, match="--http-cert, --http-key, --tokens"):
        fleet_access("0.0.0.0:8090", None, None, None)


# ---- history --------------------------------------------------------------------------------------------------------


def test_history_is_bounded_and_survives_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(histories, "MAX_ROWS", 50)
    path = str(tmp_path / "history.sqlite")
    history = FleetHistory(path)
    history.add([FleetEvent(float(index), f"d{index % 2}", "'; DROP TABLE events; --") for index in range(200)])
    history.close()
    history = FleetHistory(path)
    assert [each["time"] for each in history.last(3)] == [199.0, 198.0, 197.0]
    assert len(history.last(10_000)) == 50
    assert {each["device"] for each in history.last(100, "d1")} == {"d1"}
    history.close()


def test_a_file_that_is_no_history_is_refused_with_its_name(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"not a database " * 100)
    with pytest.raises(ConfigError, match=r"--history: .*file"):
        FleetHistory(str(path))
