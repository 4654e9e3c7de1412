"""What a visitor tries in a real browser: camera, sound, masks, points, kept inputs, and a model loaded when asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.series.sound_files import wav_of
from tests.contract.browsing import Visit, chromium, visiting
from tests.contract.pictures.test_picture_things import SENT, put_things
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.contract.series.test_series_doors import LISTENS
from tests.models import onnx_models, series_models
from tests.models.series_models import HIGH_HZ, RATE, tone

FAKE_CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
"""Chromium's own moving test picture, in place of a device, and leave to use it without asking."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    for task in ("segment", "pose"):
        put_model(models, task, lambda folder, task=task: put_things(folder, task), toml='preset = "ultralytics"\n')
    put_model(models, "listener", series_models.listener, toml=LISTENS)
    put_model(models, "warm", onnx_models.mlp, toml='[warmup]\ninputs = "sample.json"\n')
    (models / "warm" / "sample.json").write_text(json.dumps({"x": [[0.5] * 16]}))
    put_model(models, "late", onnx_models.added, toml="on_demand = true\n")
    http = HttpSettings(endpoint="127.0.0.1:0", page=True, control=True)
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=http, calibrate=False) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(*FAKE_CAMERA) as browser:
        yield browser


@pytest.fixture
def visits(browser: Any, daemon: Daemon) -> Iterator[Callable[..., Visit]]:
    with visiting(browser) as visit:
        yield lambda **options: visit(http_url(daemon), **options)


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def send(page: Any, name: str, kind: str, data: bytes) -> None:
    """Choose a file, and wait for what is said of it."""
    page.locator("input[type=file]").first.set_input_files({"name": name, "mimeType": kind, "buffer": data})
    page.locator(".timing").wait_for()


def drawn(page: Any) -> np.ndarray:
    """The drawn picture, [lines, columns, 3]."""
    found = page.evaluate(
        """() => {
            const canvas = document.querySelector('.drawn');
            const found = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return [found.height, found.width, [...found.data]];
        }"""
    )
    return np.array(found[2]).reshape(*found[:2], 4)[:, :, :3]


def await_camera(page: Any) -> None:
    """Wait until the camera's first picture is there."""
    page.get_by_label("What the camera sees").evaluate(
        "(video) => new Promise((done) => (video.videoWidth ? done() : video.addEventListener('loadeddata', done)))"
    )


def test_picture_of_the_visitors_camera_is_taken_and_answered(visits):
    page = visits(permissions=["camera"]).open("#/try/pose")
    button(page, "Take a picture").click()
    seen = page.get_by_label("What the camera sees")
    await_camera(page)
    wide = seen.evaluate("(video) => video.videoWidth")
    button(page, "Take it").click()
    page.locator(".timing").wait_for()
    expect(page.get_by_role("img", name="The picture, with 1 thing marked: person")).to_be_visible()
    assert page.locator("canvas.drawn").evaluate("(canvas) => canvas.width") <= wide
    expect(seen).to_have_count(0)


def test_camera_is_left_without_a_picture(visits):
    visit = visits(permissions=["camera"])
    page = visit.open("#/try/pose")
    button(page, "Take a picture").click()
    await_camera(page)
    button(page, "Leave it").click()
    expect(page.locator("video")).to_have_count(0)
    assert not any(each.endswith("/infer") for each in visit.asked)


def test_sound_is_answered_by_its_windows(visits):
    page = visits().open("#/try/listener")
    expect(page.locator("main")).to_contain_text(f"A WAV file of {RATE} samples a second")
    send(page, "clip.wav", "audio/wav", wav_of(tone(HIGH_HZ, 1.5), RATE))
    expect(page.locator("main")).to_contain_text("high")


def test_mask_of_a_thing_is_drawn_where_it_is(visits):
    page = visits().open("#/try/segment")
    send(page, "white.png", "image/png", SENT)
    expect(page.get_by_role("img", name="The picture, with 1 thing marked: cat")).to_be_visible()
    picture = drawn(page)
    assert (picture[26, 22] < 255).any()  # its left half
    assert (picture[26, 40] == 255).all()


def test_points_of_a_thing_are_drawn_where_they_are(visits):
    page = visits().open("#/try/pose")
    send(page, "white.png", "image/png", SENT)
    expect(page.get_by_role("img", name="The picture, with 1 thing marked: person")).to_be_visible()
    picture = drawn(page)
    assert (picture[20, 24] < 255).any()  # a sure point
    assert (picture[28, 34] == 255).all()  # inside the box, where there is none


def test_input_that_the_device_has_for_a_model_stands_there_to_be_sent(visits):
    page = visits().open("#/try/warm")
    expect(page.locator("main")).to_contain_text("It begins with the input of its warm-up.")
    field = page.get_by_label("JSON of the request")
    kept = json.loads(field.input_value())
    assert kept["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]
    del kept["inputs"][0]["data"]
    field.fill(json.dumps(kept))
    button(page, "Send").click()
    expect(page.locator(".answer")).to_contain_text("FP32 [1, 4]")
    assert "0.5,0.5" in page.locator(".code code").last.inner_text()


def test_model_on_demand_is_warmed_up_from_the_page(visits):
    page = visits().open("#/model/late")
    expect(button(page, "Unload")).to_have_count(0)
    button(page, "Warm up").click()
    expect(button(page, "Unload").first).to_be_visible()
    expect(button(page, "Warm up")).to_have_count(0)
