"""A device that follows a repository over HTTP: what it asks for, and links that break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.contract.updates.updated_device import Fleet
from tests.fakes.http_server import Answer, HttpServer, Request
from tests.fakes.update_site import onnx_release
from tests.models import onnx_models


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def server(fleet: Fleet) -> Iterator[HttpServer]:
    with HttpServer(fleet.site.find) as server:
        yield server


@pytest.mark.smoke
def test_a_check_with_nothing_new_asks_for_the_next_root_and_the_timestamp_and_nothing_else(
    fleet: Fleet, server: HttpServer
) -> None:
    fleet.release(1)
    with fleet.device(folder=None, url=server.url) as device:
        device.outcome()
        server.requests.clear()
        assert device.outcome() == ("runs", "")
        assert server.paths == ["metadata/2.root.json", "metadata/timestamp.json"]


def test_a_bucket_that_nobody_may_list_replies_403_for_what_is_not_there_and_updates_go_on(
    fleet: Fleet, server: HttpServer
) -> None:
    server.answer = lambda request: None if fleet.site.find(request.path) is not None else Answer(403)
    fleet.release(1)
    with fleet.device(folder=None, url=server.url) as device:
        assert device.outcome()[0] == "installed"
        assert device.outcome() == ("runs", "")
        server.answer = lambda _request: Answer(403)
        told = device.apply()
        assert not told["is_ok"]
        assert "timestamp.json: 403" in told["reason"]
        assert device.adds() == 1.0


def test_after_a_restart_a_check_asks_for_no_more(fleet: Fleet, server: HttpServer) -> None:
    fleet.release(1)
    with fleet.device(folder=None, url=server.url) as device:
        device.outcome()
    server.requests.clear()
    with fleet.device(folder=None, url=server.url) as device:
        assert device.outcome() == ("runs", "")
        assert server.paths == ["metadata/2.root.json", "metadata/timestamp.json"]


@pytest.mark.parametrize(("most", "breaks"), [(100_000, 3), (4_000, 100)])
def test_a_link_that_breaks_puts_a_release_off_and_the_next_check_goes_on_with_what_came(
    fleet: Fleet, server: HttpServer, most: int, breaks: int
) -> None:
    """At random bytes; of the model, all in all, hardly more comes than it has."""
    chance = Random(most)
    model = onnx_models.wide(fleet.folder / "wide", 256).read_bytes()
    session_output = np.zeros((1, 256), np.float32)
    made = onnx_release(model, {"x": np.zeros((1, 256), np.float32)}, {"y": session_output}, model="wide")
    fleet.site.release(made)
    sent = 0

    def break_off(request: Request) -> Answer | None:
        nonlocal sent
        if not request.path.endswith(".model.onnx"):
            return None
        rest = fleet.site.find(request.path)[request.start :]
        came = rest[: chance.randint(1, most)]
        sent += len(came)
        headers = {"Content-Length": str(len(rest))}
        if request.start:
            headers["Content-Range"] = (
                f"bytes {request.start}-{request.start + len(rest) - 1}/{request.start + len(rest)}"
            )
        return Answer(206 if request.start else 200, came, headers)

    server.answer = break_off
    with fleet.device(folder=None, url=server.url) as device:
        outcomes = [device.outcome("wide")[0]]
        while outcomes[-1] == "put off":
            outcomes.append(device.outcome("wide")[0])
        assert outcomes[-1] == "installed"
        assert len(outcomes) > breaks
        assert sent <= 1.05 * len(model)
