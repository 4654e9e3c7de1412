"""`edge-runtime doctor` on a running daemon: the sentence, the events, the bundle."""

from __future__ import annotations

import io
import json
import logging
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edge_runtime.cli.main import main
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import QueueFull
from edge_runtime.pages import protocol
from tests.contract.pages.viewer import Viewer
from tests.contract.running_daemon import ANSWER_S, http_url, put_model, running_daemon
from tests.models import onnx_models


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "broken", lambda each: (each / "model.onnx").write_text("no model"))
    settings = HttpSettings(endpoint="127.0.0.1:0", control=True)
    with running_daemon(folder / "models", folder / "run", http=settings) as daemon:
        yield daemon


def doctor(daemon, capsys, *words: str) -> tuple[int, str]:
    status = main(["doctor", *words, "--connect", daemon.endpoints[1]])
    return status, capsys.readouterr().out


def test_doctor_tells_what_is_wrong_and_exits_with_1(daemon, capsys):
    status, out = doctor(daemon, capsys)
    assert status == 1
    assert out.startswith("bad  broken version 1 failed; 1 of 2 ")
    assert "See docs/models.md." in out


@pytest.mark.parametrize("action", ["overview", "history", "events"])
def test_doctor_shows_what_the_page_shows(daemon, capsys, action):
    status, out = doctor(daemon, capsys, action, "--json")
    assert status == 0
    assert json.loads(out)


def test_a_report_is_made_beside_the_thread_that_answers_requests(daemon, monkeypatch):
    is_asked, may_go_on = threading.Event(), threading.Event()
    make = protocol.report_files

    def held(*arguments):
        is_asked.set()
        assert may_go_on.wait(ANSWER_S)
        return make(*arguments)

    monkeypatch.setattr(protocol, "report_files", held)
    with Client(daemon.endpoints[1]) as client, ThreadPoolExecutor(1) as other:
        try:
            report = other.submit(client.doctor)
            assert is_asked.wait(ANSWER_S)
            assert client.infer("mlp", {"x": np.zeros((1, 16), np.float32)}).version == 1
            with pytest.raises(QueueFull, match="doctor is answered to another caller now"):
                client.doctor()
        finally:
            may_go_on.set()
        assert "about.json" in report.result(ANSWER_S)["files"]


def test_the_bundle_is_the_same_by_the_command_and_by_the_page_and_has_no_secret(daemon, capsys, tmp_path):
    logging.getLogger("edge_runtime.test").warning("lost rtsp://me:hunter2@camera/", extra={"password": "hunter2"})
    status, _ = doctor(daemon, capsys, "--bundle", str(tmp_path / "report.tar.gz"))
    assert status == 1
    assert (tmp_path / "report.tar.gz").stat().st_mode & 0o777 == 0o600
    with Viewer(http_url(daemon)) as viewer:
        answer = viewer.get("/page/doctor")
    assert answer.headers["content-disposition"] == 'attachment; filename="edge-runtime-report.tar.gz"'
    assert answer.headers["content-type"] == "application/gzip"
    found = [_files(answer.body), _files((tmp_path / "report.tar.gz").read_bytes())]
    assert found[0].keys() == found[1].keys() >= {"about.json", "configuration.json", "events.json", "stats.json"}
    for files in found:
        assert all("hunter2" not in text for text in files.values())
        assert json.loads(files["about.json"])["libraries"]["numpy"]
        assert all("not_told" not in json.loads(text) for text in files.values())


def _files(packed: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        return {each.name.split("/")[1]: archive.extractfile(each).read().decode() for each in archive}
