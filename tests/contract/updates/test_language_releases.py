"""Language models in signed releases: the folder's files go together, a device checks them by a golden prompt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge_runtime.config.settings import BackendSettings
from edge_runtime.errors import PublishError, UpdateError
from edge_runtime.language.asking import chat_request, text_request
from edge_runtime.request.request import Request
from edge_runtime.updates.release_checks import check_choice
from edge_runtime.updates.staging import choose_artifacts
from tests.contract.language.served_words import Parts
from tests.contract.updates.published_models import device, founded, publish
from tests.contract.updates.updated_device import UpdatedDevice
from tests.fakes.publishing import Publisher
from tests.models.language_models import tiny_model, tiny_vision_model
from tests.models.sent_pictures import RED, messages, png

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

FIRST, SECOND = "Küche!", "Stube?"
FILES = {
    "openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin",
    "openvino_detokenizer.xml", "openvino_detokenizer.bin",
    "config.json", "generation_config.json", "tokenizer_config.json",
}  # fmt: skip
TOML = "[language]\nmax_streams = 2\nkv_cache_mb = 8\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder "words" with version 1 that says FIRST, and beside it version 2, that says SECOND."""
    folder = tmp_path_factory.mktemp("made")
    for name, said in (("first", FIRST), ("second", SECOND)):
        tiny_model(folder / name, follows=said)
    (folder / "first" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def words(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "first", tmp_path / "words" / "1")
    (tmp_path / "words" / "model.toml").write_text(TOML)
    return tmp_path / "words"


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return founded(tmp_path)


def asked(fresh: UpdatedDevice, reply: Parts | None = None, **parameters: object) -> Parts:
    """Ask the device's model what comes behind a new line; returns at once."""
    core, reply = fresh.runtime.core, reply or Parts()
    servable = core.table.resolve("words", None)
    header, tensors = text_request(servable, b"\n", {"temperature": 0.0, **parameters}, None)
    reply.request = Request(header, tensors, 1, reply, reply.sender, core.clock.monotonic_s(), core.metrics)
    core.infer.submit(reply.request)
    return reply


@pytest.mark.smoke
def test_a_language_model_is_published_and_a_new_one_swaps_in_behind_the_answers_under_way(
    publisher: Publisher, made: Path, words: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("\n")
    prepared = publish(publisher, words, tmp_path / "prompt.txt")
    manifest = prepared.manifest

    assert {each.place: each.backend for each in manifest.artifacts} == dict.fromkeys(FILES, "openvino-genai")
    assert manifest.settings == {"language": {"max_streams": 2, "kv_cache_mb": 8}}
    assert [(each.name, each.datatype, each.shape) for each in manifest.golden.inputs] == [("text", "BYTES", (1,))]
    assert prepared.notes == ("not published, since no artifact names them: tokenizer.json",)
    with device(publisher, tmp_path / "device") as fresh:
        assert fresh.outcome("words")[0] == "installed"
        assert asked(fresh).wait().text == FIRST

        shutil.copytree(made / "second", words / "2")
        release = publish(publisher, words, tmp_path / "prompt.txt").manifest
        assert {each.sha256 for each in release.artifacts} & {each.sha256 for each in manifest.artifacts}
        long = asked(fresh, max_tokens=400, ignore_eos=True)
        assert fresh.outcome("words")[0] == "installed"
        assert long.wait().parts[-1].finish_reason == "length"
        assert asked(fresh).wait().text == SECOND

    with device(publisher, tmp_path / "device") as again:
        assert asked(again).wait().text == SECOND


def test_release_of_a_model_that_sees_pictures_carries_its_eyes(publisher: Publisher, tmp_path: Path) -> None:
    tiny_vision_model(tmp_path / "words" / "1", follows=FIRST)
    (tmp_path / "words" / "model.toml").write_text(TOML)
    (tmp_path / "prompt.txt").write_text("\n")
    prepared = publish(publisher, tmp_path / "words", tmp_path / "prompt.txt")
    places = {each.place for each in prepared.manifest.artifacts}
    assert {"openvino_language_model.xml", "openvino_vision_embeddings_model.bin", "preprocessor_config.json"} <= places
    assert prepared.notes == ()
    with device(publisher, tmp_path / "device") as fresh:
        assert fresh.outcome("words")[0] == "installed"
        core, reply = fresh.runtime.core, Parts()
        servable = core.table.resolve("words", None)
        header, tensors = chat_request(servable, {"messages": messages(png(RED))}, {"temperature": 0.0}, None)
        reply.request = Request(header, tensors, 1, reply, reply.sender, core.clock.monotonic_s(), core.metrics)
        core.infer.submit(reply.request)
        assert reply.wait().text == FIRST


@pytest.mark.parametrize("number", [3, 18])
def test_a_release_whose_text_is_another_where_a_cpu_computes_otherwise_is_installed(
    publisher: Publisher, tmp_path: Path, number: int
) -> None:
    """With random weights two tokens may be nearly as likely: in bf16, which a CPU may have, the text is another."""
    tiny_model(tmp_path / "words" / "1")
    (tmp_path / "prompt.txt").write_text(f"Once upon a time there was a river, number {number}, and ")
    manifest = publish(publisher, tmp_path / "words", tmp_path / "prompt.txt").manifest
    assert manifest.golden.tolerance["f32"].begins_alike == ("text",)
    exact = BackendSettings(name="openvino-genai", precision="f32")
    with device(publisher, tmp_path / "device", backends=(exact,)) as fresh:
        assert fresh.outcome("words")[0] == "installed"


def test_a_prompt_is_made_up_where_none_is_given_and_the_publisher_is_told(publisher: Publisher, words: Path) -> None:
    prepared = publish(publisher, words)
    assert prepared.notes[-1].startswith("the golden input is a sentence of ours; --golden FILE, its prompt,")


def test_a_device_that_asks_for_copies_first_has_a_patched_language_model_answer_at_once(
    publisher: Publisher, words: Path, tmp_path: Path
) -> None:
    publish(publisher, words)
    with device(publisher, tmp_path / "device", {"observe": "shadow"}) as fresh:
        assert fresh.outcome("words")[0] == "installed"
        shutil.copytree(words / "1", words / "2")
        weights = bytearray((words / "2" / "openvino_model.bin").read_bytes())
        weights[len(weights) // 2 & ~3] ^= 1  # the last bit of one weight
        (words / "2" / "openvino_model.bin").write_bytes(weights)
        manifest = publish(publisher, words).manifest
        (changed,) = [each for each in manifest.artifacts if each.place == "openvino_model.bin"]
        assert [(each.to_sha256, each.size < changed.length / 10) for each in manifest.delta] == [
            (changed.sha256, True)
        ]
        assert fresh.outcome("words")[0] == "installed"
        assert asked(fresh).wait().text == FIRST
        assert fresh.runtime.core.table.resolve("words", None).number == 2


def test_the_files_of_a_language_model_are_fetched_together_and_served_together(
    publisher: Publisher, words: Path, tmp_path: Path
) -> None:
    manifest = publish(publisher, words).manifest
    chosen = {each.place for each in choose_artifacts(manifest, (".xml", "openvino_model.xml"))}
    assert chosen == FILES
    check_choice(manifest, chosen, tmp_path)
    with pytest.raises(UpdateError, match=r"config\.json: is missing; the release cannot be loaded without it"):
        check_choice(manifest, chosen - {"config.json"}, tmp_path)
    assert not choose_artifacts(manifest, (".onnx", ".xml"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "openvino_tokenizer.bin").unlink(), "openvino_tokenizer.bin' is missing"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "cannot load openvino_model.xml"),
        (lambda folder: (folder / "openvino_model.bin").write_bytes(b""), "openvino_model"),
        (lambda folder: (folder / "model.py").write_text("print()"), "is code"),
    ],
)
def test_a_folder_that_is_not_a_whole_model_is_not_published(
    publisher: Publisher, words: Path, spoil: object, reason: str
) -> None:
    spoil(words / "1")
    with pytest.raises(PublishError) as raised:
        publish(publisher, words)
    assert reason in raised.value.message
