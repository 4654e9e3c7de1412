"""A talk with a language model on the page, in a real browser: its answer as it is written, stopped, refused, kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from tests.contract.browsing import DESK, PHONE, Visit, chromium, visiting, wcag_violations
from tests.contract.running_daemon import ANSWER_S, http_url, running_daemon
from tests.models.language_models import tiny_model

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

SAID = "<b>Küche 😀!"


@pytest.fixture(scope="module")
def tokens() -> tuple[TokenFile, dict[str, str]]:
    """The file of tokens, and each by its name."""
    file, found = TokenFile(), {}
    for name in ("first", "second"):
        file, found[name] = file.with_token(name, ("infer",))
    return file, found


@pytest.fixture(scope="module")
def daemon(tokens, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Serves "speaker", which says one thing, and "writer", which has one slot and goes on and on; it wants a token."""
    folder = tmp_path_factory.mktemp("chat")
    tiny_model(folder / "models" / "speaker" / "1", follows=SAID)
    tiny_model(folder / "models" / "writer" / "1", context=8192)
    (folder / "models" / "writer" / "model.toml").write_text("[language]\nmax_streams = 1\nkv_cache_mb = 16\n")
    (folder / "tokens.toml").write_text(tokens[0].text())
    http = HttpSettings(endpoint="127.0.0.1:0", page=True, tokens_file=str(folder / "tokens.toml"))
    with running_daemon(folder / "models", folder / "run", http=http, calibrate=False) as daemon:
        with Client(daemon.endpoints[0]) as client:
            client.wait_ready(ANSWER_S)
        yield daemon


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visits(browser: Any, daemon: Daemon, tokens) -> Iterator[Callable[..., Visit]]:
    """Makes visits of who has logged in."""
    with visiting(browser) as visit:

        def logged_in(**options: Any) -> Visit:
            made = visit(http_url(daemon), **options)
            log_in(made.open(), tokens[1]["first"])
            return made

        yield logged_in


def log_in(page: Any, token: str) -> None:
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_label("Token", exact=True).press("Enter")
    button(page, "Log out").wait_for()


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def say(page: Any, message: str, **settings: str) -> None:
    """Send a message by the keyboard. settings: by the words of their labels."""
    for words, value in settings.items():
        page.get_by_label(words.replace("_", " ")).fill(value)
    field = page.get_by_label("Message", exact=True)
    field.fill(message)
    field.press("Enter")


def status(page: Any, words: str) -> Any:
    return page.get_by_role("status").filter(has_text=words)


@pytest.mark.smoke
def test_chat_shows_what_was_said_with_its_figures_and_keeps_it(visits):
    page = visits().open("#/try/speaker")
    say(page, "Hello <i>you</i>", Temperature="0")
    expect(status(page, "The answer is whole.")).to_be_visible()
    answer = page.locator(".answered").first
    expect(answer.locator("p").first).to_have_text(SAID)
    expect(answer).to_contain_text("tokens/s")
    expect(answer).to_contain_text("the first after")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    say(page, "And more")
    expect(page.locator(".answered")).to_have_count(2)
    expect(status(page, "The answer is whole.")).to_be_visible()
    code = page.locator(".code code").last.inner_text()
    assert "/v2/models/speaker/generate_stream" in code
    for part in ("Hello <i>you</i>", SAID, "And more", '"temperature":0'):
        assert part in code
    page.get_by_text("Python", exact=True).click()
    assert 'client.stream("speaker", chat=messages, temperature=0)' in page.locator(".code code").last.inner_text()
    page.goto(f"{page.url.partition('#')[0]}#/model/speaker")
    expect(page.get_by_role("heading", name="Writing")).to_be_visible()
    expect(page.locator("section", has=page.get_by_role("heading", name="Writing"))).to_contain_text("0 of 8")
    page.goto(f"{page.url.partition('#')[0]}#/try/speaker")
    expect(page.locator(".answered")).to_have_count(2)
    button(page, "Begin anew").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_chat_that_is_stopped_or_left_frees_its_slot(visits):
    page = visits().open("#/try/writer")
    say(page, "Hello", Temperature="0")
    button(page, "Stop").click()
    expect(status(page, "Stopped")).to_be_visible()
    expect(page.locator(".answered").last).to_contain_text("stopped")
    say(page, "Again")
    expect(button(page, "Stop")).to_be_visible()
    home = page.url.partition("#")[0]
    page.goto(f"{home}#/")
    expect(page.locator(".health")).to_be_visible()
    page.goto(f"{home}#/try/writer")
    say(page, "Once more", At_most="3")
    expect(status(page, "The answer is whole.")).to_be_visible()
    expect(page.locator(".answered").last).to_contain_text("3 tokens")
    expect(page.locator(".answered").last).to_contain_text("cut at the most tokens")


def test_chat_says_in_words_what_is_refused_and_keeps_the_message(visits):
    visit = visits()
    visit.may_fail = ("/v2/models/speaker/generate_stream",)
    page = visit.open("#/try/speaker")
    long = "word " * 400
    say(page, long)
    expect(page.get_by_role("alert")).to_contain_text("speaker did not answer.")
    expect(page.get_by_role("alert")).to_contain_text("tokens")
    expect(page.get_by_label("Message", exact=True)).to_have_value(long)
    say(page, "Hello", Temperature="0")
    expect(status(page, "The answer is whole.")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_chat_is_forgotten_with_its_viewer(visits, tokens):
    page = visits().open("#/try/speaker")
    say(page, "A secret", Temperature="0")
    expect(status(page, "The answer is whole.")).to_be_visible()
    button(page, "Log out").click()
    log_in(page, tokens[1]["second"])
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)
    assert "A secret" not in page.content()


def test_text_is_gone_on_with_and_the_json_of_a_chat_is_answered_whole(visits):
    page = visits().open("#/try/speaker")
    page.get_by_text("A text to go on with", exact=True).first.click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Text", exact=True).fill("Tell me: <")
    button(page, "Send").click()
    expect(page.locator(".answered p").first).to_have_text(SAID[1:])
    assert "text=prompt" not in page.locator(".code code").last.inner_text()
    page.get_by_text("Python", exact=True).click()
    assert "text=prompt" in page.locator(".code code").last.inner_text()
    page.get_by_text("JSON", exact=True).click()
    button(page, "Send").click()
    expect(page.locator(".answer")).to_contain_text("finish_reason")


def test_chat_keeps_to_wcag_and_to_a_phones_width(visits):
    page = visits(reduced_motion="reduce").open("#/try/speaker")
    say(page, "Hello", Temperature="0")
    expect(status(page, "The answer is whole.")).to_be_visible()
    page.get_by_text("What it is told first").first.click()
    for scheme, size in (("light", DESK), ("dark", PHONE)):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size(size)
        assert not wcag_violations(page), scheme
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, scheme
