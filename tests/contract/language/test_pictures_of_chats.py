"""Pictures in chats, by every way in: unmodified clients of OpenAI and Ollama, our own, and the command line."""

from __future__ import annotations

import base64
import io
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
from PIL import Image

from edge_runtime.cli.main import main
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import Cancelled, DeadlineUnmeetable, DecodeFailed, RunFailed, Unsupported
from edge_runtime.language.pictures import MOST_PICTURES
from tests.contract.language.served_words import Parts, Whole, Words, until, words_served
from tests.contract.running_daemon import ANSWER_S, http_url
from tests.models.language_models import tiny_model
from tests.models.sent_pictures import BLUE, GREEN, RED, bomb, messages, png, url

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

TOKENS = 12
PICTURE_TOKENS = 16 + 1


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Words]:
    """The model "words", which sees, and "blind", which reads text alone."""
    folder = tmp_path_factory.mktemp("words")
    tiny_model(folder / "models" / "blind" / "1")
    with words_served(folder, sees=4) as words:
        with Client(words.daemon.endpoints[0]) as client:
            client.wait_ready(ANSWER_S)
        yield words


@pytest.fixture
def client(words: Words) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http_url(words.daemon)}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def other(words: Words) -> Iterator[ollama.Client]:
    with ollama.Client(http_url(words.daemon)) as other:
        yield other


def said(client: openai.OpenAI, *pictures: bytes | str, **more: Any) -> Any:
    chat: Any = messages(*pictures)
    return client.chat.completions.create(model="words", messages=chat, max_tokens=TOKENS, temperature=0, **more)


def text_of(words: Words, *pictures: bytes) -> str:
    """The answer that the daemon gives in process."""
    text: str = words.ask(chat={"messages": messages(*pictures)}, max_tokens=TOKENS).wait().text
    return text


def shown(text: str) -> str:
    """A text as a terminal is shown it."""
    return "".join(f"\\x{ord(each):02x}" if ord(each) < 32 else each for each in text)


@pytest.mark.smoke
def test_openais_client_sends_a_picture_and_the_answer_follows_from_it(client: openai.OpenAI) -> None:
    red, blue, again, none = (said(client, *each) for each in ((png(RED),), (png(BLUE),), (png(RED),), ()))
    texts = [each.choices[0].message.content for each in (red, blue, again, none)]
    assert texts[0] == texts[2]
    assert len(set(texts)) == 3
    assert red.usage.prompt_tokens == none.usage.prompt_tokens + PICTURE_TOKENS


def test_openais_client_streams_the_answer_to_a_picture(client: openai.OpenAI) -> None:
    whole = said(client, png(RED)).choices[0].message.content
    parts = said(client, png(RED), stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in parts if each.choices) == whole


@pytest.mark.parametrize("place", ["http://127.0.0.1:1/a.png", "https://example.org/a.png"])
def test_url_that_would_have_to_be_fetched_is_refused(client: openai.OpenAI, place: str) -> None:
    with pytest.raises(openai.BadRequestError, match="pictures are never fetched"):
        said(client, place)


def test_model_that_reads_text_alone_refuses_a_picture_by_name(client: openai.OpenAI, other: ollama.Client) -> None:
    refused = r"messages\[0\]\.content\[\d\] is of type 'image_url'; this model reads text only: leave the part out"
    chat: Any = messages(png(RED))
    with pytest.raises(openai.BadRequestError, match=refused):
        client.chat.completions.create(model="blind", messages=chat)
    with pytest.raises(ollama.ResponseError, match=refused):
        other.chat("blind", [{"role": "user", "content": "What?", "images": [png(RED)]}])


def test_ollamas_client_sends_pictures_in_chats_and_with_a_prompt(other: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": TOKENS}

    def chatted(*pictures: bytes) -> str | None:
        message = {"role": "user", "content": "What is it?", "images": [*pictures]}
        return other.chat("words", [message], options=options).message.content

    def generated(*pictures: bytes) -> str | None:
        return other.generate("words", "What is it?", images=[*pictures], options=options).response

    for asked in (chatted, generated):
        assert asked(png(RED)) == asked(png(RED))
        assert len({asked(png(RED)), asked(png(BLUE)), asked()}) == 3
    assert chatted(png(GREEN)) == generated(png(GREEN))


def test_ollamas_show_says_which_model_sees(other: ollama.Client) -> None:
    assert other.show("words").capabilities == ["completion", "tools", "vision"]
    assert other.show("blind").capabilities == ["completion", "tools"]


def test_ollamas_client_is_told_what_is_wrong_with_a_picture(other: ollama.Client) -> None:
    for bad, told in ((png(RED)[:50], "no picture can be read"), (base64.b64encode(b"words"), "no picture can be")):
        with pytest.raises(ollama.ResponseError, match=told) as caught:
            other.generate("words", "What?", images=[bad])
        assert caught.value.status_code == 400


def test_clients_stream_takes_pictures_beside_a_text_or_a_chat(words: Words, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png(RED))
    greedy: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with Client(words.daemon.endpoints[0]) as client:

        def written(**asked: Any) -> str:
            return "".join(part["text"][0].decode() for part in client.stream("words", **asked, **greedy))

        by_text = written(text="What is it?", pictures=[tmp_path / "red.png"])
        by_chat = written(chat=[{"role": "user", "content": "What is it?"}], pictures=[png(RED)])
        by_image = written(text="What is it?", pictures=[Image.new("RGB", (64, 48), RED)])
        assert by_text == by_chat == by_image == text_of(words, png(RED))
        assert client.metadata("words")["language"]["pictures"] == MOST_PICTURES
        assert client.metadata("blind")["language"]["pictures"] == 0


def test_infer_takes_images_beside_a_prompt(words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "red.png").write_bytes(png(RED))
    asked = ["-p", f"max_tokens={TOKENS}", "-p", "temperature=0", "-p", "ignore_eos=true"]
    connect = ["--connect", words.daemon.endpoints[0]]
    image = ["--image", str(tmp_path / "red.png")]
    assert main(["infer", "words", "--prompt", "What is it?", *image, *asked, *connect]) == 0
    assert capsys.readouterr().out.rstrip("\n") == shown(text_of(words, png(RED)))
    assert main(["infer", "words", *image, *connect]) == 2
    assert "--image is for a language model, beside --prompt" in capsys.readouterr().err


def test_chat_shows_a_picture_with_the_next_line(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "red.png").write_bytes(png(RED))
    asked = ["-p", f"max_tokens={TOKENS}", "-p", "temperature=0", "-p", "ignore_eos=true"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {tmp_path / 'red.png'}\nWhat is it?\n"))
    assert main(["chat", "words", *asked, "--connect", words.daemon.endpoints[0]]) == 0
    assert capsys.readouterr().out.rstrip("\n") == shown(text_of(words, png(RED)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {tmp_path / 'none.png'}\nWhat is it?\n"))
    assert main(["chat", "words", "--connect", words.daemon.endpoints[0]]) == 1


def test_hostile_pictures_among_good_ones_end_each_once_and_harm_none(words: Words) -> None:
    expected = {colour: text_of(words, png(colour)) for colour in (RED, GREEN, BLUE)}
    hostile: list[tuple[bytes | str, ...]] = [
        (png(RED)[:60],), (bomb(),), (bomb(6000),), ("data:image/png;base64,?",), (png(RED),) * 1000,
        ("http://127.0.0.1:1/",), (url(b"x" * 1_000_000),),
    ]  # fmt: skip
    order = random.Random(3)
    asked: list[tuple[Whole, tuple[int, int, int] | None]] = []
    for _ in range(3):
        for bad in hostile:
            colour = order.choice((RED, GREEN, BLUE))
            for reply, pictures, kind in ((Parts(), bad, None), (Whole(), (png(colour),), colour)):
                words.ask(reply, chat={"messages": messages(*pictures)}, max_tokens=TOKENS)
                asked.append((reply, kind))
        for reply, _ in asked:
            reply.wait()
    words.wait_until_idle()
    for reply, kind in asked:
        assert reply.ends == 1
        if kind is None:
            assert isinstance(reply.error, DecodeFailed), reply.error
        else:
            assert reply.text == expected[kind], reply.error


def test_caller_that_leaves_while_its_picture_is_opened_leaves_nothing(words: Words) -> None:
    reply = words.ask(chat={"messages": messages(png(RED, (4000, 4000)))}, max_tokens=TOKENS)
    words.servable.cancel(reply.request)
    assert isinstance(reply.wait().error, Cancelled)
    words.wait_until_idle()
    assert reply.ends == 1


def test_host_that_dies_ends_answers_to_pictures_once_and_the_next_is_answered(words: Words) -> None:
    expected = text_of(words, png(BLUE))
    replies = [words.ask(chat={"messages": messages(png(RED))}, max_tokens=3000) for _ in range(3)]
    for each in replies:
        each.wait_for_part()
    os.kill(words.host, signal.SIGKILL)
    for each in replies:
        assert isinstance(each.wait().error, RunFailed)
        assert each.ends == 1
    until(lambda: text_of(words, png(BLUE)) == expected)
    words.wait_until_idle()


def test_pictures_count_in_the_forecast_and_their_bytes_do_not(words: Words) -> None:
    for _ in range(12):
        text_of(words, png(RED))
    noise = random.Random(1).randbytes(300_000)
    image = Image.frombytes("RGB", (400, 250), noise)
    made = io.BytesIO()
    image.save(made, "PNG")
    chat = {"messages": messages(made.getvalue())}
    large = words.ask(chat=chat, max_tokens=TOKENS, first_token_ms=20_000.0, timeout_ms=30_000.0).wait()
    assert large.error is None  # 400 kB of base64 would be 130 000 tokens
    late = words.ask(chat=chat, max_tokens=TOKENS, first_token_ms=0.001).wait()
    assert isinstance(late.error, DeadlineUnmeetable)


def test_part_of_an_unknown_kind_is_named(words: Words) -> None:
    chat = {"messages": [{"role": "user", "content": [{"type": "file"}]}]}
    error = words.ask(chat=chat).wait().error
    assert isinstance(error, Unsupported)
    assert "'file'; this model reads text and pictures only" in error.message
