"""A model that sees pictures, stepped in this process: answers follow from the picture; hostile ones harm no other."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.language.messages import TOO_LONG, Begin, TextEvent
from edge_runtime.language.parameters import Parameters
from edge_runtime.language.pictures import MOST_PICTURES
from tests.models.language_models import tiny_vision_model
from tests.models.sent_pictures import BLUE, RED, bomb, messages, png

pytest.importorskip("openvino_genai", reason="the extra llm is not installed")

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.openvino_genai.backend import LanguageInstance, OpenVinoGenaiBackend, import_genai
from tests.unit.backends.test_openvino_genai import Steps

WRITES = Parameters(max_tokens=16, temperature=0.0, ignore_eos=True)
PICTURE_TOKENS = 16 + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("seeing"))


def load(folder: Path, **language: Any) -> LanguageInstance:
    return OpenVinoGenaiBackend().load(folder / "openvino_language_model.xml", LoadOptions(language=language))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[LanguageInstance]:
    instance = load(folder)
    yield instance
    instance.close()


def chat(*pictures: bytes | str, text: str = "What is it?") -> bytes:
    return json.dumps({"messages": messages(*pictures, text=text)}).encode()


def ask(instance: LanguageInstance, data: bytes, parameters: Parameters = WRITES) -> TextEvent:
    return Steps(instance).to_end(Begin(1, None, data, parameters))[1]


def test_answer_follows_from_the_picture_and_is_the_same_for_the_same(loaded: LanguageInstance) -> None:
    red, blue, again, none = (ask(loaded, chat(*each)) for each in ((png(RED),), (png(BLUE),), (png(RED),), ()))
    assert red.finish_reason == blue.finish_reason == none.finish_reason == "length", red.message
    assert red.text == again.text
    assert len({red.text, blue.text, none.text}) == 3
    assert red.prompt_tokens == none.prompt_tokens + PICTURE_TOKENS


def test_base64_in_lines_is_read_as_in_one(loaded: LanguageInstance) -> None:
    in_lines = "data:image/png;base64," + base64.encodebytes(png(RED)).decode().replace("\n", "\r\n")
    assert ask(loaded, chat(in_lines)).text == ask(loaded, chat(png(RED))).text


def test_order_of_two_pictures_counts(loaded: LanguageInstance) -> None:
    one, other = ask(loaded, chat(png(RED), png(BLUE))), ask(loaded, chat(png(BLUE), png(RED)))
    assert one.text != other.text
    assert one.prompt_tokens == other.prompt_tokens == ask(loaded, chat()).prompt_tokens + 2 * PICTURE_TOKENS


def test_answers_side_by_side_see_each_their_own_picture(loaded: LanguageInstance) -> None:
    colours = [(r, g, b) for r in (0, 255) for g in (0, 255) for b in (0, 255)]
    alone = [ask(loaded, chat(png(each))).text for each in colours]
    together = Steps(loaded).to_end(*(Begin(n, None, chat(png(each)), WRITES) for n, each in enumerate(colours)))
    assert [together[n].text for n in range(len(colours))] == alone
    assert len(set(alone)) == len(colours)


def test_prefix_cache_gives_no_picture_the_answer_of_another(loaded: LanguageInstance, folder: Path) -> None:
    asked = [
        chat(png(each), text="and then " * 12) for each in ((9, 99, 199), (199, 99, 9), (99, 199, 9), (9, 99, 198))
    ]
    uncached = load(folder, prefix_caching=False)
    try:
        expected = [ask(uncached, each).text for each in asked]
    finally:
        uncached.close()
    assert [ask(loaded, each).text for each in (*asked, *asked)] == [*expected, *expected]
    assert len(set(expected[:3])) == 3


def test_text_alone_is_answered(loaded: LanguageInstance) -> None:
    found = Steps(loaded).to_end(Begin(1, b"Hello", None, WRITES))[1]
    assert (found.finish_reason, found.prompt_tokens, found.completion_tokens) == ("length", 5, 16)


def test_tools_and_pictures_go_together(loaded: LanguageInstance) -> None:
    asked = json.loads(chat(png(RED)))
    asked |= {
        "tools": [{"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
    }
    steps = Steps(loaded)
    steps.to_end(Begin(1, None, json.dumps(asked).encode(), Parameters(max_tokens=200, temperature=0.0)))
    assert not steps.events[1][-1].code, steps.events[1][-1].message


HOSTILE: list[tuple[str, tuple[bytes | str, ...], str, str]] = [
    ("cut", (png(RED)[:60],), "", "no picture can be read"),
    ("bomb", (bomb(),), "", "pixels"),
    ("not base64", ("data:image/png;base64,%%%",), "", "is not base64"),
    ("empty", ("data:image/png;base64,",), "", "is empty"),
    ("text", (b"GET / HTTP/1.1",), "", "no picture can be read"),
    ("svg", (b"<svg xmlns='http://www.w3.org/2000/svg'/>",), "", ""),
    ("http", ("http://127.0.0.1:1/a.png",), "", "never fetched"),
    ("https", ("https://example.org/a.png",), "", "never fetched"),
    ("file", ("file:///etc/passwd",), "", "never fetched"),
    ("no base64 said", ("data:image/png,abc",), "", "wanted"),
    ("html", ("data:text/html;base64,AAAA",), "", "wanted"),
    ("many", (png(RED),) * 1000, "", f"{MOST_PICTURES} of one chat"),
    ("mark", (png(RED),), "<ov_genai_image_0>", "2 times"),
    ("other mark", (png(RED),), "<ov_genai_image_7>", "marks pictures"),
    ("long mark", (), "<ov_genai_image_" + "9" * 300 + ">", "marks pictures"),
    ("own mark", (), "<image>", "<image>"),
    ("phi's mark", (), "<|image_1|>", "<|image_1|>"),
    ("many marks", (), "".join(f"<image{n}>" for n in range(40)), "mark pictures"),
]


@pytest.mark.parametrize(
    ("pictures", "text", "told"), [each[1:] for each in HOSTILE], ids=[each[0] for each in HOSTILE]
)
def test_hostile_picture_is_its_callers_fault_and_harms_no_other(
    loaded: LanguageInstance, pictures: tuple[bytes | str, ...], text: str, told: str
) -> None:
    expected = ask(loaded, chat(png(BLUE))).text
    steps = Steps(loaded)
    steps.to_end(Begin(1, None, chat(png(BLUE)), WRITES), Begin(2, None, chat(*pictures, text=text), WRITES))
    assert steps.events[2][-1].code == "decode_failed"
    assert told in steps.events[2][-1].message
    assert steps.whole(1).text == expected


def test_damaged_pictures_are_seen_or_refused_and_harm_no_other(loaded: LanguageInstance) -> None:
    order = random.Random(5)
    good, expected = chat(png(BLUE)), ask(loaded, chat(png(BLUE))).text
    made = io.BytesIO()
    Image.frombytes("RGB", (40, 30), order.randbytes(3600)).save(made, "JPEG")
    files = (png(RED), made.getvalue())
    steps = Steps(loaded)
    for number in range(60):
        damaged = bytearray(files[number % 2])
        for _ in range(order.randint(1, 8)):
            damaged[order.randrange(len(damaged))] = order.randrange(256)
        steps.step(Begin(number, None, chat(bytes(damaged[: order.randint(20, len(damaged))])), WRITES))
    steps.to_end(Begin(100, None, good, WRITES))
    ends = [steps.events[number][-1] for number in range(60)]
    assert {each.code for each in ends} <= {"", "decode_failed"}
    assert all(sum(event.is_last for event in steps.events[number]) == 1 for number in range(60))
    assert steps.whole(100).text == expected
    assert not steps.last.live


def test_words_that_look_like_a_mark_and_are_text_to_the_model_may_be_said(loaded: LanguageInstance) -> None:
    assert ask(loaded, chat(text="How does <video> differ from <img>?")).finish_reason == "length"


def test_part_of_another_kind_is_refused_by_name(loaded: LanguageInstance) -> None:
    data = json.dumps({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}).encode()
    found = ask(loaded, data)
    assert found.code == "unsupported"
    assert "'input_audio'; this model reads text and pictures only" in found.message


def test_pictures_that_the_context_does_not_hold_are_refused_as_too_long(folder: Path) -> None:
    instance = load(tiny_vision_model(folder.parent / "short", context=96))
    try:
        found = ask(instance, chat(*[png(RED)] * 5))
    finally:
        instance.close()
    assert found.code == TOO_LONG
    assert "of its pictures" in found.message


def test_answer_cancelled_while_its_picture_is_opened_leaves_nothing(loaded: LanguageInstance) -> None:
    steps = Steps(loaded)
    steps.step(Begin(1, None, chat(png(RED, (3000, 3000))), WRITES))
    told = steps.step(cancels=[1])
    assert (told.live, told.kv_used) == (0, 0)
    assert ask(loaded, chat(png(RED))).finish_reason == "length"


def test_step_that_fails_ends_what_is_under_way_and_those_without_a_token_begin_again(
    loaded: LanguageInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = import_genai()
    writer = loaded.step_form.writer
    config_of = writer.config_of

    def broken(parameters: Parameters, prompt: int) -> Any:
        config = config_of(parameters, prompt)
        if parameters.seed == 5:
            schema = library.StructuredOutputConfig()
            schema.json_schema = '{"type": 5}'
            config.structured_output_config = schema
        return config

    expected = {2: ask(loaded, chat(png(BLUE))).text, 4: ask(loaded, chat(text="What else?")).text}
    monkeypatch.setattr(writer, "config_of", broken)
    steps = Steps(loaded)
    steps.step(Begin(1, None, chat(png(RED)), WRITES))
    while 1 not in steps.events:
        steps.step()
    bad = Parameters(max_tokens=16, temperature=0.0, seed=5)
    steps.to_end(
        Begin(2, None, chat(png(BLUE)), WRITES),
        Begin(3, b"Hello", None, bad),
        Begin(4, None, chat(text="What else?"), WRITES),
    )
    ends = {number: steps.whole(number) for number in (1, 2, 3, 4)}
    assert [ends[number].code for number in (1, 3)] == [RunFailed.code] * 2
    assert "schema" in ends[3].message
    assert {number: ends[number].text for number in expected} == expected
    assert [ends[number].completion_tokens for number in expected] == [16, 16]
    assert all(sum(event.is_last for event in steps.events[number]) == 1 for number in ends)
    assert (steps.last.kv_used, steps.last.live) == (0, 0)
    assert ask(loaded, chat(png(BLUE))).text == expected[2]


def test_step_that_fails_for_no_ones_fault_ends_answers_and_the_next_are_seen(
    loaded: LanguageInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own step raises, once: nobody is to blame, and what was written cannot be given to it again."""
    expected = ask(loaded, chat(png(BLUE))).text
    steps = Steps(loaded)
    steps.step(Begin(1, None, chat(png(RED)), WRITES))
    while 1 not in steps.events:
        steps.step()
    pipelines = import_genai().ContinuousBatchingPipeline
    step = pipelines.step

    def fail(_: Any) -> None:
        monkeypatch.setattr(pipelines, "step", step)
        raise RuntimeError("no memory")

    monkeypatch.setattr(pipelines, "step", fail)
    steps.to_end(Begin(2, None, chat(text="What else?"), WRITES))
    assert (steps.whole(1).code, "no memory" in steps.whole(1).message) == (RunFailed.code, True)
    assert (steps.whole(2).finish_reason, steps.whole(2).completion_tokens) == ("length", 16)
    assert ask(loaded, chat(png(BLUE))).text == expected


def test_step_tells_what_a_picture_takes(loaded: LanguageInstance) -> None:
    steps = Steps(loaded)
    steps.to_end(Begin(1, None, chat(png(RED)), WRITES))
    assert steps.last.picture_tokens == PICTURE_TOKENS
    assert steps.last.picture_s > 0


def test_model_whose_eyes_are_missing_says_which_file(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if "vision" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(LoadFailed, match=r"openvino_vision_embeddings_model\.xml"):
        load(tmp_path)
