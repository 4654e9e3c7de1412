"""A language model stepped in this process: what its host does with orders, without a daemon."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.language.messages import (
    EVENTS,
    ORDERS,
    TOO_LONG,
    Begin,
    Orders,
    StepEvents,
    TextEvent,
    encoded,
    events_of,
)
from edge_runtime.language.parameters import Parameters
from tests.models import language_models

pytest.importorskip("openvino_genai", reason="the extra llm is not installed")

from edge_runtime.backends.openvino_genai.backend import (
    LanguageInstance,
    OpenVinoGenaiBackend,
    import_genai,
)

GREEDY = Parameters(temperature=0.0)
SAID = "Küche 😀!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights."""
    return language_models.tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def saying_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers SAID."""
    return language_models.tiny_model(tmp_path_factory.mktemp("saying"), follows=SAID)


def load(folder: Path, **language: Any) -> LanguageInstance:
    return OpenVinoGenaiBackend().load(folder / "openvino_model.xml", LoadOptions(language=language))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[LanguageInstance]:
    instance = load(folder)
    yield instance
    instance.close()


@pytest.fixture(scope="module")
def saying(saying_folder: Path) -> Iterator[LanguageInstance]:
    instance = load(saying_folder)
    yield instance
    instance.close()


class Steps:
    """The daemon's side: what is live, and each generation's events so far."""

    def __init__(self, instance: LanguageInstance) -> None:
        self._form = instance.step_form
        self.live: list[int] = []
        self.events: dict[int, list[TextEvent]] = {}
        self.last = StepEvents()

    def step(self, *begins: Begin, cancels: Sequence[int] = ()) -> StepEvents:
        self.live = [each for each in self.live if each not in cancels]
        orders = encoded(Orders(begins, tuple(cancels), tuple(self.live)))
        self.last = events_of(self._form.run({ORDERS: np.array([orders], object)})[0][0])
        self.live += [each.id for each in begins]
        for event in self.last.events:
            assert event.id in self.live
            self.events.setdefault(event.id, []).append(event)
            if event.is_last:
                self.live.remove(event.id)
        return self.last

    def to_end(self, *begins: Begin) -> dict[int, TextEvent]:
        """The last event of each, with its whole text."""
        self.step(*begins)
        while self.live:
            self.step()
        return {number: self.whole(number) for number in (each.id for each in begins)}

    def whole(self, number: int) -> TextEvent:
        *_, last = events = self.events[number]
        scores = tuple(score for each in events for score in each.logprobs)
        return TextEvent(
            number, "".join(each.text for each in events), last.prompt_tokens, last.completion_tokens,
            last.cached_tokens, (), scores, last.finish_reason, last.code, last.message,
        )  # fmt: skip


def answer(instance: LanguageInstance, text: str | bytes, parameters: Parameters = GREEDY) -> TextEvent:
    data = text.encode() if isinstance(text, str) else text
    return Steps(instance).to_end(Begin(1, data, None, parameters))[1]


def test_a_greedy_answer_ends_where_the_model_ends_it(saying: LanguageInstance) -> None:
    found = answer(saying, "say\n")
    assert (found.text, found.finish_reason) == (SAID, "stop")
    assert (found.prompt_tokens, found.completion_tokens) == (4, len(SAID.encode()) + 1)


def test_no_event_has_a_part_of_a_character(saying: LanguageInstance) -> None:
    steps = Steps(saying)
    steps.to_end(Begin(1, b"\n", None, GREEDY))
    parts = [each.text for each in steps.events[1]]
    assert [each for each in parts if each] == list(SAID)


def test_events_joined_are_what_the_library_writes_alone(loaded: LanguageInstance, folder: Path) -> None:
    library = import_genai()
    scheduler = library.SchedulerConfig()
    scheduler.num_kv_blocks = 64
    pipeline = library.ContinuousBatchingPipeline(
        str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}
    )
    config = pipeline.get_config()
    config.max_new_tokens, config.apply_chat_template = 60, False
    for prompt in ("hello", "the and Küche", "{[(", "x" * 200):
        alone = pipeline.generate(prompt, config)[0].m_generation_ids[0]
        found = answer(loaded, prompt, Parameters(max_tokens=60, temperature=0.0))
        assert found.text == alone


def test_the_models_own_form_answers_greedily(saying: LanguageInstance) -> None:
    inputs = {"text": np.array([b"say\n"], object), "chat": np.array([b"{}"], object)}
    text, reason, usage, calls, scores = saying.run(inputs)
    assert (text[0].decode(), reason[0], calls[0], scores[0]) == (SAID, b"stop", b"[]", b"[]")
    assert usage.dtype == np.int32
    assert list(usage) == [4, len(SAID.encode()) + 1, 0]
    assert [each[0] for each in saying.run(inputs, ["finish_reason"])] == [b"stop"]


def test_the_models_own_form_answers_the_same_each_time_as_golden_outputs_need(loaded: LanguageInstance) -> None:
    inputs = {"text": np.array([b"the same beginning of all " * 15], object)}
    first, again = loaded.run(inputs), loaded.run(inputs)
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


def test_the_models_own_form_beside_answers_of_the_daemon_loses_none_of_their_text(saying: LanguageInstance) -> None:
    steps = Steps(saying)
    steps.step(Begin(1, b"\n", None, GREEDY))
    assert saying.run({"text": np.array([b"\n"], object)})[0][0].decode() == SAID
    while steps.live:
        steps.step()
    assert steps.whole(1).text == SAID


def test_the_token_that_ends_an_answer_is_not_told_though_the_tokenizer_takes_it_for_text(saying_folder: Path) -> None:
    """As where a fine-tuned model ends its messages with a token that its tokenizer does not call special."""
    instance = load(saying_folder)
    instance.step_form.writer.config_of = ended_by(instance.step_form.writer.config_of, ord("!"))  # type: ignore[method-assign]
    assert answer(instance, "\n").text == SAID.removesuffix("!")
    instance.close()


def ended_by(config_of: Any, token: int) -> Any:
    def changed(parameters: Parameters, prompt: int) -> Any:
        config = config_of(parameters, prompt)
        config.stop_token_ids = {token, config.eos_token_id}
        return config

    return changed


@pytest.mark.parametrize("most", [1, 2, 7])
def test_max_tokens_ends_an_answer_by_its_length(loaded: LanguageInstance, most: int) -> None:
    found = answer(loaded, "hello", Parameters(max_tokens=most, temperature=0.0, ignore_eos=True))
    assert (found.finish_reason, found.completion_tokens) == ("length", most)


def test_an_answer_ends_with_the_context_where_more_is_asked_for(loaded: LanguageInstance) -> None:
    found = answer(loaded, "x" * 500, Parameters(max_tokens=10_000, temperature=0.0, ignore_eos=True))
    assert (found.finish_reason, found.completion_tokens) == ("length", 12)


def test_an_answer_fills_the_cache_to_its_last_place(folder: Path) -> None:
    instance = load(folder, max_streams=1, kv_cache_mb=1)
    steps = Steps(instance)
    steps.step()
    context = steps.last.context
    assert context == 512
    found = answer(instance, "x" * (context - 1), Parameters(temperature=0.0, ignore_eos=True))
    assert (found.finish_reason, found.completion_tokens) == ("length", 1)
    instance.close()


def test_a_prompt_that_is_too_long_is_told_with_its_tokens_and_the_context(loaded: LanguageInstance) -> None:
    found = answer(loaded, "x" * 512)
    assert found.code == TOO_LONG
    assert "512 tokens; the context of the model holds 512" in found.message
    assert "over" in answer(loaded, "x" * 1_000_000).message


@pytest.mark.parametrize(("text", "code"), [(b"", "decode_failed"), (b"\xff\xfe", "tensor_mismatch")])
def test_a_prompt_without_text_is_refused(loaded: LanguageInstance, text: bytes, code: str) -> None:
    found = answer(loaded, text)
    assert (found.code, found.finish_reason) == (code, "")


def test_letters_that_are_special_elsewhere_are_read(loaded: LanguageInstance) -> None:
    assert answer(loaded, "a\x00b \U0010ffff", Parameters(max_tokens=2, temperature=0.0)).finish_reason == "length"


def test_a_stop_text_ends_an_answer_and_frees_it(saying: LanguageInstance) -> None:
    steps = Steps(saying)
    found = steps.to_end(Begin(1, b"\n", None, Parameters(temperature=0.0, stop=("he 😀", "none"))))[1]
    assert (found.text, found.finish_reason) == ("Küc", "stop")
    assert (steps.last.kv_used, steps.last.live) == (0, 0)


def test_scores_are_of_each_token_with_its_bytes(saying: LanguageInstance) -> None:
    found = answer(saying, "\n", Parameters(temperature=0.0, logprobs=1))
    assert bytes(number for each in found.logprobs for number in each.bytes).decode() == SAID
    assert len(found.logprobs) == found.completion_tokens
    assert all(-1 < each.logprob <= 0 and each.top_logprobs[0].logprob == each.logprob for each in found.logprobs)
    refused = answer(saying, "\n", Parameters(logprobs=5))
    assert (refused.code, "logprobs: got 5" in refused.message) == ("unsupported", True)


def test_a_seed_repeats_a_random_answer(loaded: LanguageInstance) -> None:
    def written(seed: int) -> str:
        return answer(loaded, "hello", Parameters(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)).text

    assert written(7) == written(7)
    assert written(7) != written(8)
    assert written(-1) == written(-1)


def test_answers_under_way_are_begun_and_cancelled_by_orders(loaded: LanguageInstance) -> None:
    steps = Steps(loaded)
    long = Parameters(max_tokens=200, temperature=0.0, ignore_eos=True)
    steps.step(Begin(1, b"xxx", None, long), Begin(2, b"yyy", None, long))
    assert (steps.last.live, steps.last.prefill_tokens, steps.last.decode_tokens) == (2, 6, 0)
    steps.step(Begin(3, b"zzzz", None, long), cancels=[1])
    assert (steps.last.live, steps.last.prefill_tokens, steps.last.decode_tokens) == (2, 4, 1)
    assert steps.last.kv_used > 0
    assert 1 not in [each.id for each in steps.last.events]
    steps.step(cancels=[2, 3])
    assert (steps.last.events, steps.last.live, steps.last.kv_used) == ((), 0, 0)


def test_a_generation_that_the_host_does_not_have_is_told_as_failed(loaded: LanguageInstance) -> None:
    steps = Steps(loaded)
    steps.live = [9]
    (event,) = steps.step().events
    assert (event.id, event.code, event.is_last) == (9, RunFailed.code, True)


def test_a_generation_that_ended_in_the_step_before_is_told_once(loaded: LanguageInstance) -> None:
    """The orders of a step may be made before what the one before it made is known."""
    steps = Steps(loaded)
    steps.step(Begin(1, b"xxx", None, Parameters(max_tokens=1, temperature=0.0, ignore_eos=True)))
    while not (told := steps.last.events):
        steps.step()
    assert [(each.id, each.finish_reason) for each in told] == [(1, "length")]
    steps.live = [1]
    assert steps.step().events == ()


def test_a_step_with_nothing_to_do_says_how_much_room_there_is(loaded: LanguageInstance) -> None:
    found = Steps(loaded).step()
    assert (found.events, found.step_s, found.live, found.kv_used, found.context) == ((), 0.0, 0, 0, 512)
    assert found.kv_total == 8 * 512


def test_a_long_prompt_is_read_beside_the_answers_under_way(folder: Path) -> None:
    instance = load(folder, prefill_tokens=64)
    steps = Steps(instance)
    long = Parameters(max_tokens=100, temperature=0.0, ignore_eos=True)
    steps.step(Begin(1, b"one", None, long))
    steps.step(Begin(2, b"x" * 300, None, long))
    left = [steps.last.waiting_prefill]
    while 2 not in steps.events:
        steps.step()
        left.append(steps.last.waiting_prefill)
        assert next(each.id for each in steps.last.events) == 1
    assert left == [237, 174, 111, 48, 0]
    instance.close()


def test_a_prompt_that_comes_again_is_read_from_the_cache(folder: Path) -> None:
    instance = load(folder, prefill_tokens=32)
    first, again = (answer(instance, "the same beginning of all " * 15, Parameters(max_tokens=3)) for _ in range(2))
    assert first.text == again.text
    assert first.cached_tokens == 0
    assert 0 < again.cached_tokens < again.prompt_tokens
    instance.close()
    instance = load(folder, prefill_tokens=32, prefix_caching=False)
    assert [answer(instance, "the same beginning of all " * 15).cached_tokens for _ in range(2)] == [0, 0]
    instance.close()


def test_more_answers_than_streams_wait_for_each_other(folder: Path) -> None:
    instance = load(folder, max_streams=2)
    begins = [Begin(number, b"hello", None, Parameters(max_tokens=5, ignore_eos=True)) for number in range(5)]
    found = Steps(instance).to_end(*begins)
    assert [each.completion_tokens for each in found.values()] == [5] * 5
    instance.close()


def test_answers_that_need_more_cache_than_there_is_end_whole(folder: Path) -> None:
    instance = load(folder, max_streams=8, kv_cache_mb=1)
    steps = Steps(instance)
    steps.step()
    long = Parameters(max_tokens=350, temperature=0.0, ignore_eos=True)
    count = 2 * steps.last.kv_total // 450
    found = steps.to_end(*(Begin(number, b"%d" % number * 50, None, long) for number in range(min(count, 24))))
    assert {each.completion_tokens for each in found.values()} == {350}
    assert (steps.last.kv_used, steps.last.live) == (0, 0)
    instance.close()


def test_begins_and_cancels_in_any_order_end_each_once_and_free_the_cache(loaded: LanguageInstance) -> None:
    steps, chance = Steps(loaded), random.Random(28)
    begun, cancelled = 0, 0
    while begun < 1000 or steps.live:
        begins = []
        for _ in range(chance.randint(0, 12) if begun < 1000 else 0):
            begun += 1
            kind = Parameters(max_tokens=chance.randint(1, 8), temperature=chance.choice([0.0, 1.0]), stop=("a", "<3"))
            text = bytes(chance.choices(range(32, 127), k=chance.choice([0, 1, 5, 60, 600])))
            begins.append(Begin(begun, text, None, kind))
        gone = chance.sample(steps.live, chance.randint(0, len(steps.live))) if chance.random() < 0.3 else []
        cancelled += len(gone)
        steps.step(*begins, cancels=gone)
    ended = sum(each[-1].is_last for each in steps.events.values())
    assert ended + cancelled == begun >= 1000
    assert (steps.last.kv_used, steps.last.live, steps.last.waiting_prefill) == (0, 0, 0)


def test_a_step_that_fails_ends_what_is_to_blame_and_the_others_go_on(
    saying: LanguageInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = import_genai()
    writer = saying.step_form.writer
    config_of = writer.config_of

    def broken(parameters: Parameters, prompt: int) -> Any:
        config = config_of(parameters, prompt)
        if parameters.seed == 5:
            schema = library.StructuredOutputConfig()
            schema.json_schema = '{"type": 5}'
            config.structured_output_config = schema
        return config

    monkeypatch.setattr(writer, "config_of", broken)
    steps = Steps(saying)
    steps.step(Begin(1, b"\n", None, GREEDY))
    steps.step()
    bad = Parameters(temperature=0.0, seed=5)
    begins = [Begin(2, b"\n", None, GREEDY), Begin(3, b"\n", None, bad), Begin(4, b"\n", None, GREEDY)]
    steps.to_end(*begins)
    assert [steps.whole(number).text for number in (1, 2, 4)] == [SAID] * 3
    assert [steps.whole(number).completion_tokens for number in (1, 2, 4)] == [len(SAID.encode()) + 1] * 3
    assert (steps.whole(3).code, "schema" in steps.whole(3).message) == (RunFailed.code, True)
    assert steps.last.kv_used == 0


def test_orders_that_cannot_be_read_fail_the_run(loaded: LanguageInstance) -> None:
    with pytest.raises(RunFailed, match=ORDERS):
        loaded.step_form.run({ORDERS: np.array([b"\xc1"], object)}, [EVENTS])


def test_the_cache_is_as_large_as_the_settings_say(folder: Path) -> None:
    instance = load(folder, kv_cache_mb=1)
    found = Steps(instance).step()
    assert 0 < found.kv_total * 176 <= 1 << 20
    instance.close()
    with pytest.raises(LoadFailed, match=r"the weights of openvino_model\.xml are f32"):
        OpenVinoGenaiBackend().load(folder / "openvino_model.xml", LoadOptions(precision="int8"))


def copied(folder: Path, target: Path, **files: str) -> Path:
    """The same model with other files, by their names without the ending."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        (target / f"{name}.json").write_text(content)
    return target


def test_a_models_own_configuration_decides_what_no_request_does(saying_folder: Path, tmp_path: Path) -> None:
    own = '{"eos_token_id": [200, 266], "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}'
    instance = load(copied(saying_folder, tmp_path, generation_config=own))
    assert answer(instance, "\n", Parameters()).text == SAID
    instance.close()


def test_a_models_own_configuration_that_cannot_be_used_is_told_at_load(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"generation_config\.json: .*top_p"):
        load(copied(folder, tmp_path, generation_config='{"do_sample": true, "top_p": -3.0}'))


@pytest.mark.parametrize("name", ["CONFIG_FILE", "draft_model", "adapters", "CACHE_DIR"])
def test_a_models_options_name_no_file(folder: Path, name: str) -> None:
    with pytest.raises(LoadFailed, match=f"property '{name}' names a file"):
        OpenVinoGenaiBackend().load(folder / "openvino_model.xml", LoadOptions(extra={name: "/etc/passwd"}))


def test_a_folder_that_lacks_a_file_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "openvino_model.bin":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(LoadFailed, match=r"openvino_model\.bin"):
        load(tmp_path)
