"""The page in a real Chromium: each view and each action, by the keyboard and on a phone, and a daemon that restarts.

Skipped where there is no Chromium (Debian's package `chromium`). The pictures in docs/images are made here where they
are missing, and anew with RENEW_PICTURES=1.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.site.settings import PublishRule
from tests.contract.browsing import DESK, PHONE, Visit, chromium, visiting, wcag_violations
from tests.contract.pages.viewer import Stream
from tests.contract.running_daemon import ANSWER_S, http_url, online_daemon, put_model, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.updates import STATUS, STEP, FakeUpdates, checked, offered
from tests.models import bert_models, onnx_models
from tests.pictures import encoded, photo

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "docs" / "images"
VIEWS = {
    "overview": "#/", "model": "#/model/finder", "pipeline": "#/model/both", "try": "#/try/finder",
    "updates": "#/updates", "live": "#/live", "log": "#/log",
}  # fmt: skip
HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
FINDER = f"""# tune: chosen for its rate
[input.image]
range = "0..255"
fit = "stretch"
[output.boxes]
layout = "yolov8"
labels = ["{HOSTILE}", "house", "person"]
threshold = 0.1
"""
TUNED = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><style>.a{fill:red}</style><rect class="a"/></svg>'
)
BOTH = """
[[step]]
name = "first"
model = "one"
inputs = {x = "input.x"}
[[step]]
name = "second"
model = "two"
inputs = {x = "first.y"}
[output]
y = "second.y"
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def updates() -> FakeUpdates:
    return FakeUpdates()


def put_models(models: Path, *, has_broken: bool = True) -> None:
    """A detector, a classifier of texts, a pipeline of two, digits, and a file that is no model."""
    shutil.copytree(ROOT / "demo" / "models" / "digits", models / "digits")
    put_model(models, "finder", onnx_models.finder, toml=FINDER, label=1)
    (models / "finder" / "tune.svg").write_text(TUNED)
    bert_models.classifier(models / "sentiment")
    put_model(models, "one", onnx_models.added, constant=1.0)
    put_model(models, "two", onnx_models.added, constant=2.0)
    put_model(models, "spare", onnx_models.added)
    (models / "both").mkdir()
    (models / "both" / "pipeline.toml").write_text(BOTH)
    if has_broken:
        (models / "broken" / "1").mkdir(parents=True)
        (models / "broken" / "1" / "model.onnx").write_bytes(b"not a model")


@contextmanager
def serving(models: Path, folder: Path, endpoint: str = "127.0.0.1:0", **settings: Any) -> Iterator[Daemon]:
    """A daemon with a page. settings: of `[http]`, and `updates`."""
    updates = settings.pop("updates", None)
    http = HttpSettings(endpoint=endpoint, page=True, **settings)
    with running_daemon(models, folder, http=http, updates=updates, calibrate=False) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    put_models(models)
    return models


@pytest.fixture(scope="module")
def daemon(models: Path, updates: FakeUpdates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(models, tmp_path_factory.mktemp("run"), control=True, updates=updates) as daemon:
        yield daemon


@pytest.fixture
def visits(browser: Any) -> Iterator[Callable[..., Visit]]:
    with visiting(browser) as visit:
        yield visit


@pytest.fixture
def visit(visits: Callable[..., Visit], daemon: Daemon) -> Visit:
    return visits(http_url(daemon))


@contextmanager
def control_of(daemon: Daemon) -> Iterator[Client]:
    """Who changes the device beside the page."""
    with Client(daemon.endpoints[1]) as client:
        yield client


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def row_of(page: Any, name: str) -> Any:
    """The row of a table whose first cell names this."""
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True)).first


def ask_with_picture(page: Any) -> None:
    """Choose a picture, and wait for what is said of it. The finder's box is as sure as the picture is light."""
    pixels = np.clip(photo(320, 240).astype(np.int16) + 90, 0, 255).astype(np.uint8)
    chosen = {"name": "yard.jpg", "mimeType": "image/jpeg", "buffer": encoded(pixels, "JPEG")}
    page.locator("input[type=file]").first.set_input_files(chosen)
    page.locator(".timing").wait_for()


# ---- what is shown --------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_overview_says_how_the_device_is(visit):
    page = visit.open()
    expect(page.locator(".health h1")).to_contain_text("broken")
    for tile in ("Cores", "Memory", "Models", "Temperature", "Disk"):
        expect(page.locator(".tile-name").get_by_text(tile, exact=True)).to_be_visible()
    expect(row_of(page, "digits")).to_contain_text("ready")
    expect(row_of(page, "digits")).to_contain_text("onnxruntime")
    expect(row_of(page, "broken")).to_contain_text("failed")
    expect(page.locator(".curve canvas")).to_have_count(3)
    page.get_by_text("As a table").click()
    expect(page.get_by_role("columnheader", name="Requests")).to_be_visible()


def test_overview_changes_while_somebody_looks(visit, daemon):
    page = visit.open()
    expect(row_of(page, "spare")).to_contain_text("ready")
    with control_of(daemon) as client:
        client.unload("spare")
        expect(row_of(page, "spare")).to_contain_text("unloaded")
        client.load("spare")
        expect(row_of(page, "spare")).to_contain_text("ready")


def test_model_says_what_it_takes_and_why_it_fails(visit):
    page = visit.open("#/model/finder")
    expect(row_of(page, "image")).to_contain_text("[any, 3, 32, 32]")
    expect(page.get_by_role("heading", name="How it runs")).to_be_visible()
    expect(page.get_by_text("chosen for its rate")).to_be_visible()
    expect(page.get_by_role("img", name="as tune measured them")).to_be_visible()
    page.get_by_text("3 labels of boxes").click()
    expect(page.locator(".labels")).to_contain_text("house")
    page = visit.open("#/model/broken")
    expect(page.locator("main")).to_contain_text("failed")
    expect(page.locator("main")).to_contain_text("model.onnx")


def test_pipeline_is_drawn_as_a_graph(visit):
    page = visit.open("#/model/both")
    graph = page.get_by_role("img", name="From input, then first, then second, then output")
    expect(graph).to_be_visible()
    assert graph.locator("path.edge").count() == 3
    expect(row_of(page, "second")).to_contain_text("two")


def test_model_of_no_such_name_is_said_to_be_none(visit):
    page = visit.open("#/model/nothing")
    expect(page.locator("main")).to_contain_text("no model of this name")


# ---- what is done ---------------------------------------------------------------------------------------------------


def test_model_is_unloaded_and_loaded_from_the_page(visit, daemon):
    page = visit.open("#/model/spare")
    button(page, "Unload").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Unload spare version 1?")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    button(page, "Unload").click()
    dialog.get_by_role("button", name="Unload").click()
    expect(page.get_by_role("status").filter(has_text="It is unloaded.")).to_be_visible()
    expect(row_of(page, "Version 1")).to_contain_text("unloaded")
    button(page, "Load").click()
    expect(row_of(page, "Version 1")).to_contain_text("ready")
    with control_of(daemon) as client:
        assert client.is_ready("spare")


def test_picture_is_answered_with_boxes_drawn_into_it(visit):
    page = visit.open("#/try/finder")
    ask_with_picture(page)
    expect(page.get_by_role("img", name="The picture, with 1 thing marked: house")).to_be_visible()
    expect(row_of(page, "house")).to_contain_text("160")
    expect(page.locator(".timing")).to_contain_text("Running")
    edge = page.evaluate("[...document.querySelector('.drawn').getContext('2d').getImageData(80, 120, 1, 1).data]")
    assert edge[:3] == [29, 120, 220]  # the colour of class 1, on the left side of its box
    assert "-F picture=@yard.jpg" in page.locator(".code code").last.inner_text()
    page.get_by_text("Python", exact=True).click()
    assert 'client.infer("finder", picture="yard.jpg")' in page.locator(".code code").last.inner_text()
    page.get_by_text("mosquitto_rr", exact=True).click()
    assert "mosquitto_rr -V 5" in page.locator(".code code").last.inner_text()
    expect(page.locator("main")).to_contain_text("MQTT is off")


def test_example_picture_is_sent_where_none_is_at_hand(visit):
    page = visit.open("#/try/finder")
    button(page, "Use an example").click()
    page.locator(".timing").wait_for()
    expect(page.locator("canvas.drawn")).to_be_visible()


def test_dropped_picture_is_sent(visit):
    page = visit.open("#/try/finder")
    page.locator(".drop").wait_for()
    page.evaluate(
        """async () => {
            const canvas = new OffscreenCanvas(64, 48);
            canvas.getContext("2d").fillRect(0, 0, 64, 48);
            const moved = new DataTransfer();
            moved.items.add(new File([await canvas.convertToBlob()], "dropped.png", { type: "image/png" }));
            const drop = new DragEvent("drop", { dataTransfer: moved, bubbles: true });
            document.querySelector(".drop").dispatchEvent(drop);
        }"""
    )
    page.locator(".timing").wait_for()
    assert "dropped.png" in page.locator(".code code").last.inner_text()


def test_text_is_answered_with_labels(visit):
    page = visit.open("#/try/sentiment")
    page.get_by_label("Text", exact=True).fill("it's a good film")
    button(page, "Send").click()
    expect(page.locator(".classes li").first).to_contain_text("%")
    code = page.locator(".code code").last.inner_text()
    assert """{"text":"it'\\''s a good film"}""" in code


def test_json_is_answered_with_tensors_and_its_mistakes_are_explained(visit):
    page = visit.open("#/try/digits")
    button(page, "Send").click()
    expect(page.locator(".answer")).to_contain_text("scores")
    page.get_by_label("JSON of the request").fill('{"inputs": [')
    button(page, "Send").click()
    expect(page.get_by_role("alert")).to_contain_text("not JSON")
    visit.may_fail = ("/v2/models/digits/infer",)
    page.get_by_label("JSON of the request").fill(
        '{"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}'
    )
    button(page, "Send").click()
    expect(page.get_by_role("alert")).to_contain_text("64")


def test_code_is_copied(visits, daemon):
    visit = visits(http_url(daemon), permissions=["clipboard-read", "clipboard-write"])
    page = visit.open("#/try/digits")
    button(page, "Send").click()
    page.get_by_role("button", name="Copy: The same request by curl").click()
    expect(page.get_by_role("button", name="Copy: The same request by curl")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("curl -s http://127.0.0.1:")


def test_updates_are_looked_for_installed_and_rolled_back(visit, updates):
    page = visit.open("#/updates")
    expect(row_of(page, "digits")).to_contain_text("serves")
    expect(page.locator("main")).to_contain_text("is not what its golden output says")
    button(page, "Look for updates").click()
    updates.orders.get(timeout=ANSWER_S).done(checked(offered("available")))
    expect(page.get_by_role("status").filter(has_text="The repository answered.")).to_be_visible()
    button(page, "Install what is meant for this device").click()
    page.get_by_role("dialog").get_by_role("button", name="Install").click()
    order = updates.orders.get(timeout=ANSWER_S)
    updates.told = {**STATUS, "state": "staging", "under_way": STEP}
    expect(page.get_by_role("progressbar", name="Fetched")).to_be_visible()
    expect(page.locator(".steps .now")).to_have_text("files are fetched")
    updates.told = STATUS
    order.done(checked(reason="the repository is away"))
    expect(page.get_by_role("alert")).to_contain_text("the repository is away")
    button(page, "Roll back").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    order = updates.orders.get(timeout=ANSWER_S)
    assert order.words == ("roll back", "digits")
    order.done({"model": "digits", "release": 1})
    expect(page.get_by_role("status").filter(has_text="The release before serves again.")).to_be_visible()


def test_log_says_what_to_do(visit):
    page = visit.open("#/log")
    expect(page.locator(".log > li").filter(has_text="broken").first).to_be_visible()


def test_bundle_for_a_bug_report_is_downloaded(visit):
    page = visit.open("#/log")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the bundle").click()
    assert Path(download.value.path()).stat().st_size > 0
    button(page, "Look at it here").click()
    expect(page.get_by_role("region", name="What the doctor found")).to_be_visible()


@needs_mosquitto
def test_live_results_are_shown_with_their_pictures(visits, tmp_path):
    put_model(tmp_path / "models", "finder", onnx_models.finder, toml=FINDER, label=1)
    settings = {"http": HttpSettings(endpoint="127.0.0.1:0"), "publish": (PublishRule("finder", picture=True),)}
    with (
        Broker(tmp_path) as broker,
        online_daemon(tmp_path / "models", tmp_path / "run", f"{broker.url}/dev1", **settings) as daemon,
        control_of(daemon) as client,
    ):
        visit = visits(http_url(daemon))
        visit.may_fail = ("/page/picture/",)  # until the first one is drawn
        page = visit.open("#/live")
        expect(page.get_by_text("No result yet.")).to_be_visible()
        client.infer("finder", picture=encoded(np.full((120, 160, 3), 200, np.uint8), "JPEG"))
        expect(row_of(page, "house")).to_be_visible()
        expect(page.get_by_role("img", name="The last picture of finder, with what was seen")).to_be_visible()
        button(page, "Hold still").click()
        expect(button(page, "Move")).to_be_visible()
        assert not wcag_violations(page)
        page.goto("about:blank")


# ---- who may, and what goes wrong -----------------------------------------------------------------------------------


def test_viewer_without_control_may_only_look(visits, models, tmp_path):
    file, asker = TokenFile().with_token("asker", ("infer",))
    file, owner = file.with_token("owner", ("infer", "control"))
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(file.text())
    with serving(models, tmp_path / "run", tokens_file=str(tokens)) as daemon:
        visit = visits(http_url(daemon))
        visit.may_fail = ("/page/login",)
        page = visit.open()
        token = page.get_by_label("Token", exact=True)
        token.fill("ert_wrong")
        button(page, "Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("This token was not taken.")
        token.fill(asker)
        button(page, "Log in").click()
        row_of(page, "digits").wait_for()
        page.get_by_role("link", name="digits", exact=True).click()
        expect(page.locator("main")).to_contain_text("You may look, and change nothing.")
        expect(button(page, "Unload")).to_have_count(0)
        button(page, "Log out").click()
        token.fill(owner)
        token.press("Enter")
        expect(button(page, "Unload")).to_be_visible()
        assert page.evaluate("document.cookie") == ""
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0


def test_page_survives_a_restart_of_the_daemon_and_says_so(visits, tmp_path):
    models = tmp_path / "models"
    put_model(models, "one", onnx_models.added)
    with serving(models, tmp_path / "run") as daemon:
        url = http_url(daemon)
        visit = visits(url)
        visit.may_fail = (url,)  # while it is away every request fails
        page = visit.open()
        expect(row_of(page, "one")).to_contain_text("ready")
    expect(page.get_by_role("status").filter(has_text="No answer since")).to_be_visible()
    put_model(models, "two", onnx_models.added)
    with serving(models, tmp_path / "run", url.removeprefix("http://")):
        expect(page.get_by_role("status").filter(has_text="The daemon was restarted")).to_be_visible()
        expect(row_of(page, "two")).to_contain_text("ready")
        button(page, "Close").click()
        expect(page.locator(".bar")).to_have_count(0)


def test_stored_markup_is_shown_as_text(visit):
    page = visit.open("#/model/finder")
    page.get_by_text("3 labels of boxes").click()
    expect(page.locator(".labels")).to_contain_text(HOSTILE)
    page = visit.open("#/model/%3Cimg%20src%3Dx%20onerror%3Dwindow.hit%3D1%3E")
    expect(page.locator("h1")).to_contain_text("<img")
    assert page.evaluate("window.hit") is None


# ---- for everybody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_view_keeps_to_wcag_and_to_a_phones_width(view, visit):
    page = visit.open(VIEWS[view])
    if view == "try":
        ask_with_picture(page)
    page.wait_for_load_state("load")
    for scheme, size in (("light", DESK), ("dark", PHONE)):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size(size)
        assert not wcag_violations(page), (view, scheme)
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, (
            view,
            scheme,
        )


def test_page_is_gone_through_by_the_keyboard(visit):
    page = visit.open()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("link", name="Try it", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("Try it")
    expect(page.locator("main")).to_be_focused()
    assert page.title().startswith("Try it")


def test_live_holds_still_for_who_wants_no_motion(visits, daemon):
    page = visits(http_url(daemon), reduced_motion="reduce").open("#/")
    assert page.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches")
    moving = page.evaluate("[...document.querySelectorAll('*')].filter((each) => each.getAnimations().length).length")
    assert moving == 0


# ---- pictures for the documents -------------------------------------------------------------------------------------


def test_pictures_of_each_view_are_in_the_documents(visits, tmp_path):
    paths = {name: IMAGES / f"page-{name}.webp" for name in (*VIEWS, "phone")}
    busy_s = float(os.environ.get("RENEW_PICTURES", "0"))
    if busy_s or not all(path.exists() for path in paths.values()):
        put_models(tmp_path / "models", has_broken=False)
        updates = FakeUpdates()
        with serving(tmp_path / "models", tmp_path / "run", control=True, updates=updates) as daemon:
            with control_of(daemon) as client:
                keep_busy(client, http_url(daemon), busy_s)
            updates.told = {**STATUS, "state": "staging", "under_way": STEP}
            for name, path in paths.items():
                take_picture(visits, http_url(daemon), name, path)
    for path in paths.values():
        with Image.open(path) as picture:
            assert picture.width in {DESK["width"], PHONE["width"]}


def keep_busy(client: Client, url: str, seconds: float) -> None:
    """Ask, more and less, so that there are curves: after each look that the page is given."""
    begin_s = time.monotonic()
    with Stream(url) as looks:
        while (passed_s := time.monotonic() - begin_s) < seconds:
            for _ in range(int(60 + 50 * math.sin(passed_s / 45))):
                client.infer("digits", {"image": np.zeros((1, 64), np.float32)})
            client.infer("both", {"x": np.zeros((1, 2), np.float32)})
            looks.until("overview")


def take_picture(visits: Callable[..., Visit], url: str, name: str, path: Path) -> None:
    is_phone = name == "phone"
    place = "#/model/digits" if name == "model" else VIEWS.get(name, "#/")
    page = visits(url, PHONE if is_phone else DESK, "dark" if is_phone else "light").open(place)
    page.locator("main .card").first.wait_for()
    if name == "try":
        button(page, "Use an example").click()
        page.locator(".timing").wait_for()
    shown = page.locator("#pipeline" if name == "pipeline" else "header")
    shown.evaluate("each => each.scrollIntoView()")
    path.parent.mkdir(exist_ok=True)
    Image.open(io.BytesIO(page.screenshot(full_page=name == "try"))).save(path, quality=80, method=6)
