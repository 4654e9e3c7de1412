"""What the page shows of a device as it happens: overview, history, events, and the stream of them."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest

from edge_runtime import Client
from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.errors import Unsupported
from edge_runtime.pages.stream import MOST_VIEWERS
from tests.contract.pages.viewer import Stream, Viewer
from tests.contract.raw_http import json_infer
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.models import onnx_models

BODY = json_infer([0.0] * 16)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    put_model(folder, "mlp", onnx_models.mlp)
    return folder


@pytest.fixture(autouse=True)
def log_level(caplog):
    """The level that a daemon's log has by default."""
    caplog.set_level("INFO", "edge_runtime")


@pytest.fixture
def daemon(models, tmp_path):
    settings = HttpSettings(endpoint="127.0.0.1:0", control=True)
    with running_daemon(models, tmp_path, http=settings) as daemon:
        yield daemon


@pytest.fixture
def viewer(daemon):
    with Viewer(http_url(daemon)) as viewer:
        yield viewer


# ---- operations -----------------------------------------------------------------------------------------------------


def test_the_overview_tells_the_device_in_one_sentence_and_each_model(viewer):
    told = viewer.call("overview")
    assert (told["level"], told["sentence"]) == ("good", "Ready: 1 of 1 model versions answer.")
    assert told["ready"] is True
    assert told["machine"]["cores"] >= 1
    assert told["machine"]["models_memory_bytes"] > 0
    assert told["profile"]["reason"]
    (model,) = told["models"]
    assert (model["name"], model["version"], model["state"]) == ("mlp", 1, "ready")
    assert {"rate", "p50_ms", "p95_ms", "p99_ms", "refused", "queue_rows", "host"} <= set(model)
    assert model["why"].startswith("It is the first backend of the profile that loads model.onnx.")


def test_the_overview_says_first_what_failed(models, tmp_path):
    put_model(tmp_path / "models", "good", onnx_models.mlp)
    put_model(tmp_path / "models", "broken", lambda folder: (folder / "model.onnx").write_text("no model"))
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", http=settings) as daemon,
        Viewer(http_url(daemon)) as viewer,
    ):
        told = viewer.call("overview")
        assert told["level"] == "bad"
        assert told["sentence"] == "broken version 1 failed; 1 of 2 model versions answer."
        assert viewer.call("history", model="broken")["rate"] == []
        (event,) = [each for each in viewer.call("events") if each["level"] == "error"]
        assert event["model"] == "broken"
        assert event["advice"]
        assert event["docs"] == "docs/models.md"


def test_the_events_come_newest_first_and_as_many_as_are_asked(viewer):
    viewer.call("unload", model="mlp")
    viewer.call("load", model="mlp")
    told = viewer.call("events")
    assert [each["id"] for each in told] == sorted((each["id"] for each in told), reverse=True)
    said = [(each["what"], each["model"]) for each in told]
    assert ("loaded", "mlp") in said
    assert ("unloaded", "mlp") in said
    assert viewer.call("events", count=1) == told[:1]
    assert viewer.refused("/page/call/events", {"count": 0}) == (400, "decode_failed")


def test_the_history_is_of_all_or_of_one_model(viewer):
    told = viewer.call("history")
    assert told["period_s"] == 5
    assert set(told["machine"]) >= {"cpu_share", "temperature_celsius"}
    lengths = {len(told[name]) for name in ("time", "rate", "refused_rate", "p50_ms", "p95_ms", "p99_ms")}
    assert len(lengths) == 1
    phases = viewer.call("history", model="mlp")["phases"]
    assert len(phases["queue"]) == len(phases["run"]) == len(phases["total"]) == len(phases["bounds_ms"]) + 1
    assert viewer.refused("/page/call/history", {"model": "none"}) == (404, "model_not_found")


def test_the_operations_of_the_page_are_told_where_it_is_off(models, tmp_path):
    settings = HttpSettings(endpoint="127.0.0.1:0", page=False)
    with running_daemon(models, tmp_path, http=settings) as daemon, Client(daemon.endpoints[1]) as client:
        with pytest.raises(Unsupported, match="page = true"):
            client.overview()
        with pytest.raises(Unsupported, match="page = true"):
            client.events(count=3)


def test_the_operations_of_the_page_are_every_client_s(daemon):
    with Client(daemon.endpoints[1]) as client:
        assert client.overview()["ready"] is True
        assert client.history()["period_s"] == 5
        assert client.events(count=2)


# ---- the stream -----------------------------------------------------------------------------------------------------


def test_a_stream_begins_with_the_device_and_tells_what_happens(daemon, viewer):
    with Stream(http_url(daemon)) as stream:
        assert b"200 OK" in stream.head
        assert b"text/event-stream" in stream.head
        name, hello = stream.event()
        assert name == "hello"
        assert hello["started"] > 0
        name, overview = stream.event()
        assert (name, overview["ready"]) == ("overview", True)
        viewer.call("unload", model="mlp")
        assert stream.until("event")["what"] == "unloaded"
        viewer.call("load", model="mlp")
        while stream.until("event")["what"] != "loaded":
            pass
        assert [each["state"] for each in stream.until("overview")["models"]] == ["ready"]


def test_a_stream_to_who_cannot_read_parts_is_refused(daemon):
    with Viewer(http_url(daemon)) as viewer:
        viewer.send(b"GET /page/stream HTTP/1.0\r\nhost: localhost\r\n\r\n")
        assert viewer.response().status == 505


def test_a_stream_may_be_the_last_of_its_connection(daemon, viewer):
    with Stream(http_url(daemon), Connection="close") as stream:
        assert b"Connection: close" in stream.head
        assert stream.event()[0] == "hello"
        viewer.call("unload", model="mlp")
        assert stream.until("event")["what"] == "unloaded"
        viewer.call("load", model="mlp")
        while stream.until("event")["what"] != "loaded":
            pass


def test_a_stream_ends_with_the_daemon_and_says_so(models, tmp_path):
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with ExitStack() as kept:
        with running_daemon(models, tmp_path, http=settings) as daemon:
            streams = [kept.enter_context(Stream(http_url(daemon))) for _ in range(3)]
        for stream in streams:
            assert stream.until("bye") == {}
            assert stream.event() == ("end", {})
            assert stream.has_ended()


def test_a_stream_of_a_login_ends_with_it(models, tmp_path):
    path = tmp_path / "tokens.toml"
    file, token = TokenFile().with_token("reader", ("infer",))
    path.write_text(file.text())
    settings = HttpSettings(endpoint="127.0.0.1:0", tokens_file=str(path))
    with running_daemon(models, tmp_path / "run", http=settings) as daemon, Viewer(http_url(daemon)) as viewer:
        assert viewer.get("/page/stream").status == 401
        cookie = viewer.login(token)
        with Stream(http_url(daemon), cookie=cookie) as stream:
            stream.until("overview")
            viewer.post("/page/logout", cookie=cookie)
            while stream.event()[0] != "end":
                pass


def test_more_viewers_than_may_look_are_refused_until_one_leaves(daemon, viewer):
    url = http_url(daemon)
    with ExitStack() as kept:
        streams = [kept.enter_context(Stream(url)) for _ in range(MOST_VIEWERS)]
        for stream in streams:
            stream.until("overview")
        answer = viewer.get("/page/stream")
        assert (answer.status, answer.fields["error"]["code"]) == (503, "queue_full")
        assert viewer.call("models")
        streams[0].socket.close()
        streams[1].until("overview")  # a beat later
        with Stream(url) as another:
            assert another.event()[0] == "hello"


def test_a_text_of_the_log_stays_one_event_whatever_it_says(daemon, viewer):
    marked = "<script>alert(1)</script>\n\nevent: overview\ndata: {}\n\n\u2028\0"
    with Stream(http_url(daemon)) as stream:
        stream.until("overview")
        logging.getLogger("edge_runtime.test").warning("found %s", marked, extra={"model": marked, "label": marked})
        told = stream.until("event")
        assert told["what"] == f"found {marked}"
        assert told["model"] == told["fields"]["label"] == marked
    (event, *_) = viewer.call("events")
    assert event["what"] == f"found {marked}"
    answer = viewer.post("/page/call/events", {})
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("application/json", "nosniff")
