"""Folders of Hugging Face's: what their files say of a text model, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.errors import LoadFailed
from edge_runtime.text.hugging_face import TextFolder, read_folder, text_inputs

CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
FOUND = {"text": {"tokenizer": "tokenizer.json"}}


def folder_of(path: Path, **files: Any) -> Path:
    for name, content in files.items():
        file = path / (name.replace("__", "/") + ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_nothing_is_said_where_no_file_is(tmp_path: Path) -> None:
    assert read_folder([tmp_path]) == TextFolder()


def test_labels_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder_of(tmp_path, config={**CLASSIFIER, "id2label": {"2": "good", "0": "bad\nvery"}})
    found = read_folder([tmp_path])
    assert (found.task, found.labels) == ("SequenceClassification", ("bad very", "1", "good"))


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"config": {"model_type": "bert", "max_position_embeddings": 512}}, 512),
        ({"config": {"model_type": "roberta", "max_position_embeddings": 514}}, 512),
        ({"tokenizer_config": {"model_max_length": 1e30}}, None),
        ({"tokenizer_config": {"model_max_length": 1000000000000000019884624838656}}, None),
        ({"tokenizer_config": {"model_max_length": 256}, "config": {"max_position_embeddings": 512}}, 256),
        ({"tokenizer_config": {"model_max_length": 512}, "sentence_bert_config": {"max_seq_length": 128}}, 128),
        ({"sentence_bert_config": {"max_seq_length": None}, "tokenizer_config": {"model_max_length": 64}}, 64),
    ],
)
def test_the_length_is_the_least_that_files_say_and_that_of_sentences_first(
    tmp_path: Path, files: dict[str, Any], length: int | None
) -> None:
    assert read_folder([folder_of(tmp_path, **files)]).length == length


@pytest.mark.parametrize(
    ("modes", "pool"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True, "include_prompt": True}, "cls"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
    ],
)
def test_the_pooling_is_the_one_that_is_on(tmp_path: Path, modes: dict[str, bool], pool: str | None) -> None:
    assert read_folder([folder_of(tmp_path, **{"1_Pooling__config": modes})]).pool == pool


@pytest.mark.parametrize("token", ["[PAD]", {"content": "[PAD]", "lstrip": False}])
def test_the_padding_token_is_read_in_both_its_forms(tmp_path: Path, token: Any) -> None:
    assert read_folder([folder_of(tmp_path, tokenizer_config={"pad_token": token})]).pads_with == "[PAD]"


@pytest.mark.parametrize("content", ["{", "[]", '{"id2label": 5}', "\x00"])
def test_a_broken_file_fails_the_load_with_its_name(tmp_path: Path, content: str) -> None:
    folder_of(tmp_path, config=content)
    with pytest.raises(LoadFailed, match=r"config\.json: is not what it is called: "):
        read_folder([tmp_path])


def test_a_file_that_leads_out_of_the_models_folder_is_refused(tmp_path: Path) -> None:
    outside = folder_of(tmp_path / "out", config=CLASSIFIER)
    inside = tmp_path / "models"
    inside.mkdir()
    (inside / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(LoadFailed, match="leads outside the models folder"):
        read_folder([inside], (str(inside.resolve()),))


@pytest.mark.parametrize(
    ("files", "tables"),
    [
        ({"config": CLASSIFIER, "tokenizer": {}}, FOUND),
        ({"config": {"model_type": "bert", "architectures": ["BertForTokenClassification"]}, "tokenizer": {}}, FOUND),
        (
            {
                "config": {"model_type": "bert", "architectures": ["BertModel"]},
                "tokenizer": {},
                "1_Pooling__config": {},
            },
            FOUND,
        ),
        ({"config": {"model_type": "bert", "architectures": ["BertModel"]}, "tokenizer": {}}, {}),
        ({"config": {"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "tokenizer": {}}, {}),
        ({"config": {"any": "thing"}, "tokenizer": {}}, {}),
        ({"config": "[1]", "tokenizer": {}}, {}),
        ({"config": "{", "tokenizer": {}}, {}),
        ({"config": CLASSIFIER}, {}),
    ],
)
def test_a_config_stands_for_texts_where_its_task_is_known_and_a_tokenizer_is_there(
    tmp_path: Path, files: dict[str, Any], tables: dict[str, Any]
) -> None:
    assert text_inputs(folder_of(tmp_path, **files) / "config.json") == tables
