"""The last results of `[[publish]]` as the page shows them, and the pictures of cameras to who may see them."""

from __future__ import annotations

import io
import time
from contextlib import contextmanager

import pytest
from PIL import Image

from edge_runtime import Client
from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.site.settings import PublishRule
from tests.contract.pages.viewer import Viewer
from tests.contract.running_daemon import ANSWER_S, http_url, online_daemon, put_model
from tests.fakes.broker import Broker, needs_mosquitto
from tests.models import onnx_models

pytestmark = needs_mosquitto

COLOURS = '[input.image]\nrange = "0..1"\n[output.scores]\nlabels = "labels.txt"\ntop_k = 1\n'


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    return models


@contextmanager
def live(models, folder, **http):
    """A daemon that publishes the pictures of a model, and the address of its page."""
    rule = PublishRule("colours", picture=True)
    settings = HttpSettings(endpoint="127.0.0.1:0", **http)
    with (
        Broker(folder) as broker,
        online_daemon(models, folder / "run", f"{broker.url}/dev1", publish=(rule,), http=settings) as daemon,
    ):
        yield daemon


def shown(viewer: Viewer, path: str, **headers):
    """The picture, once it is drawn."""
    end_s = time.monotonic() + ANSWER_S
    while (answer := viewer.get(path, **headers)).status == 404:
        assert time.monotonic() < end_s, "no picture was drawn"
    return answer


def test_the_last_result_and_its_picture_are_shown(models, tmp_path):
    with live(models, tmp_path) as daemon, Viewer(http_url(daemon)) as viewer, Client(daemon.endpoints[1]) as client:
        (before,) = viewer.call("results")
        assert (before["answer"], before["has_picture"]) == (None, False)
        path = f"/page/picture/{before['topic']}"
        assert viewer.get(path).status == 404
        picture = io.BytesIO()
        Image.new("RGB", (30, 20), "blue").save(picture, "JPEG")
        client.infer("colours", {"image": [picture.getvalue()]})
        drawn = shown(viewer, path)
        assert drawn.headers["content-type"] == "image/jpeg"
        assert Image.open(io.BytesIO(drawn.body)).size == (30, 20)
        (told,) = client.results()
        assert told["answer"]["classes"][0]["label"] == "blue"
        assert told["has_picture"] is True


def test_a_picture_is_shown_to_who_has_the_right_view_alone(models, tmp_path):
    file, reader = TokenFile().with_token("reader", ("infer", "control"))
    file, guard = file.with_token("guard", ("view",))
    (tmp_path / "tokens.toml").write_text(file.text())
    tokens = str(tmp_path / "tokens.toml")
    with live(models, tmp_path, tokens_file=tokens) as daemon, Viewer(http_url(daemon)) as viewer:
        path = "/page/picture/edge/dev1/result/colours"
        assert viewer.get(path).status == 401
        answer = viewer.get(path, authorization=f"Bearer {reader}")
        assert (answer.status, answer.fields["error"]["code"]) == (403, "forbidden")
        assert viewer.get(path, authorization=f"Bearer {guard}").status == 404
        assert viewer.post("/page/call/models", {}, authorization=f"Bearer {guard}").status == 403
