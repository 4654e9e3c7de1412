"""The kind of a file, told by its bytes: each kind, each fault, and bytes that only look like one."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from pathlib import Path

import pytest

from edge_runtime.models import kinds
from edge_runtime.models.kinds import FileKind, kind_of, what_it_lacks
from tests.models.catboost_models import cbm_head

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def archive(*names: str) -> bytes:
    """A zip with empty members."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        for name in names:
            made.writestr(zipfile.ZipInfo(name), b"")  # no time of day: the bytes are a test's name
    return content.getvalue()


SAMPLES: list[tuple[str, bytes, FileKind | None]] = [
    ("m.onnx", b"\x08\x08\x12\x07pytorch", kinds.ONNX),
    ("m.xml", b'<?xml version="1.0"?>\n<net name="m" version="11">', kinds.IR),
    ("m.plan", b"ftrt", kinds.TENSORRT),
    ("m.ort", b"\x1c\0\0\0ORTM", kinds.ORT),
    ("m.tflite", b"\x1c\0\0\0TFL3", kinds.LITERT),
    ("saved_model.pb", b"\x08\x01\x12", kinds.SAVED_MODEL),
    ("graph.pb", b"\n\x12", kinds.FROZEN_GRAPH),
    ("m.pdmodel", b"\n\x80", kinds.PADDLE),
    ("m.json", b'{"base_code":{"magic":"pir","version":1}}', kinds.PADDLE_PIR),
    ("m.pt", archive("m/data.pkl", "m/code/__torch__.py"), kinds.TORCHSCRIPT),
    ("m.pt2", archive("m/archive_format", "m/models/model.json"), kinds.PYTORCH_PROGRAM),
    ("m.pt", archive("m/data.pkl", "m/data/0"), kinds.PYTORCH_WEIGHTS),
    ("m.pth", b"\x80\x02\x8a\nl\xfc", kinds.PYTORCH_WEIGHTS),
    ("m.safetensors", struct.pack("<Q", 64) + b'{"weight":{"dtype":"F32"', kinds.SAFETENSORS),
    ("m.json", json.dumps({"learner": {"x": 1}, "version": [3, 0, 0]}).encode(), kinds.XGBOOST),
    ("m.json", json.dumps({"version": [1, 7, 6], "learner": {}}, indent=2).encode(), kinds.XGBOOST),
    ("m.ubj", b"{L\0\0\0\0\0\0\0\x07learner{", kinds.XGBOOST),
    ("m.model", b"binf\0\0", kinds.XGBOOST_BINARY),
    ("m.bst", b"{L\0\0\0\0\0\0\0\x07learner{", kinds.XGBOOST),
    ("m.bst", b"binf\0\0", kinds.XGBOOST_BINARY),
    ("m.bst", b"tree\nversion=v4\nnum_class=1\n", kinds.LIGHTGBM),
    ("m.bst", b"notes", None),
    ("m.txt", b"tree\nversion=v4\nnum_class=1\n", kinds.LIGHTGBM),
    ("m.txt", b"tree\r\nversion=v3\r\n", kinds.LIGHTGBM),
    ("m.cbm", b"CBM1\x10", kinds.CATBOOST),
    ("m.cbm", cbm_head(), kinds.CATBOOST),
    ("m.cbm", cbm_head(categories=1), kinds.CATBOOST_WORDS),
    ("m.cbm", cbm_head(texts=2), kinds.CATBOOST_WORDS),
    ("m.cbm", cbm_head(vectors=1), kinds.CATBOOST_WORDS),
    ("m.cbm", cbm_head(categories=1)[:-12], kinds.CATBOOST),
    ("m.cbm", b"CBM1" + b"\xff" * 60, kinds.CATBOOST),
    ("m.skops", archive("schema.json", "1.npy"), kinds.SKOPS),
    ("m.keras", archive("config.json", "metadata.json", "model.weights.h5"), kinds.KERAS),
    ("m.h5", b"\x89HDF\r\n\x1a\n\0", kinds.KERAS),
    ("m.pkl", b"\x80\x04\x95", kinds.PICKLE),
    ("m.pkl", b"(lp0\nI1\na.", kinds.PICKLE),
    ("m.joblib", b"\x78\x9c\0", kinds.PICKLE),
    ("m.mar", archive("MAR-INF/MANIFEST.json", "handler.py"), kinds.MAR),
    ("m.gguf", b"GGUF\3\0\0\0", kinds.GGUF),
    ("m.zip", archive("a", "b"), kinds.OTHER_ZIP),
    ("m.json", b'[\n  { "nodeid": 0, "depth": 0, "split": "f36",', kinds.TREE_DUMP),
    ("m.txt", b"booster[0]:\n0:[f36<0.5] yes=1,no=2,missing=2\n", kinds.TREE_DUMP),
    ("m.json", b'{"name": "tree", "version": "v4", "num_class": 10,', kinds.TREE_DUMP),
    ("m.json", b'{\n  "features_info":\n    {', kinds.CATBOOST),
    ("m.json", b'{\n  "features_info":\n {"cat_features_hash": [ {"hash":1', kinds.CATBOOST_WORDS),
    ("m.json", b'{"features_info":{"categorical_features":[{"feature_id":"city"', kinds.CATBOOST_WORDS),
    ("m.json", b'{"ctr_data":{"', kinds.CATBOOST_WORDS),
    ("m.rknn", b"RKNN\0\0", kinds.FOREIGN),
    ("m.tar.gz", b"\x1f\x8b\x08\0", kinds.COMPRESSED),
    ("m.onnx", b"\x1f\x8b\x08\0", kinds.COMPRESSED),
    ("m.onnx", b"model.onnx" + bytes(247) + b"ustar\0", kinds.COMPRESSED),
    ("m.pkl.gz", b"\x1f\x8b\x08\0", kinds.PICKLE),
    ("m.onnx", LFS, kinds.LFS_POINTER),
    ("weights.data", LFS, kinds.LFS_POINTER),
    ("m.onnx", b"<?xml version='1.0'?>\n<!-- x --><!DOCTYPE html>", kinds.WEB_PAGE),
    ("m.onnx", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>', kinds.ERROR_TEXT),
    ("m.tflite", b'{"error": "Repository not found"}', kinds.ERROR_TEXT),
    ("m.pt", b"Entry not found", kinds.ERROR_TEXT),
    ("m.onnx", b"\n <!DOCTYPE html>\n<html>", kinds.WEB_PAGE),
    ("m.tflite", b"<html lang=en>", kinds.WEB_PAGE),
    ("m.onnx", b"", kinds.EMPTY),
    ("m.pt", archive("m/data.pkl", "m/code/x.py")[:40], kinds.CUT),
    ("m.tflite", b"any other bytes", kinds.NOT_AS_NAMED),
    ("labels.txt", b"tree\nhouse\n", None),
    ("labels.txt", b"", None),
    ("labels.txt", b"not found\nerror\n", None),
    ("log.gz", b"text", None),
    ("index_to_name.json", b'{"0": ["n01", "tench"]}', None),
    ("config.json", b'{"learner": "adam", "steps": 3}', None),
    ("notes.json", b'{"about": "learner"}', None),
    ("weights.bin", bytes(64), None),
    ("README", b"text", None),
]


@pytest.mark.parametrize(("name", "content", "kind"), SAMPLES)
def test_a_files_kind_is_recognised_by_its_bytes(
    tmp_path: Path, name: str, content: bytes, kind: FileKind | None
) -> None:
    (tmp_path / name).write_bytes(content)
    found = kind_of(tmp_path / name)
    assert found is kind, found


def test_each_kind_has_a_sample_here() -> None:
    assert {kind for _, _, kind in SAMPLES if kind is not None} == set(kinds.KINDS) - {kinds.COREML}


def test_a_folder_with_a_saved_model_is_one(tmp_path: Path) -> None:
    assert kind_of(tmp_path) is None
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")
    assert kind_of(tmp_path) is kinds.SAVED_MODEL


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "m.tflite"
    file.write_bytes(b"<html>" + bytes(20))
    assert kind_of(file) is kinds.WEB_PAGE
    file.write_bytes(b"\x1c\0\0\0TFL3")
    assert kind_of(file) is kinds.LITERT


def test_a_path_that_is_not_a_plain_file_or_not_there_is_of_no_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    assert kind_of(tmp_path / "m.onnx") is None
    assert kind_of(tmp_path / "gone.onnx") is None
    assert what_it_lacks(str(tmp_path / "gone.pkl")) is None


@pytest.mark.parametrize("kind", [kind for kind in kinds.KINDS if kind not in (kinds.ONNX, kinds.IR)])
def test_each_kind_says_what_it_is_and_what_to_do(kind: FileKind) -> None:
    said = kind.sentence("/models/my model.x")
    assert said.startswith(f"is {kind.name}")
    assert len(said) > len(f"is {kind.name}; "), "nothing on what to do"


def test_a_saved_models_sentence_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")
    said = what_it_lacks(str(tmp_path / "saved_model.pb"))
    assert said is not None
    assert said.endswith(f"edge-runtime convert {tmp_path} --to openvino")


def test_a_list_of_names_without_an_end_costs_no_memory(tmp_path: Path) -> None:
    content = archive("a")
    end = content.rindex(b"PK\x05\x06")
    size = kinds.MAX_NAMES_BYTES * 4
    huge = content[:end] + bytes(size) + content[end : end + 12] + struct.pack("<LL", size, end) + content[end + 20 :]
    (tmp_path / "m.pt").write_bytes(huge)
    assert kind_of(tmp_path / "m.pt") is kinds.CUT


def test_no_bytes_make_it_raise(tmp_path: Path) -> None:
    chance = random.Random(7)
    for number in range(2000):
        name, content, _ = SAMPLES[number % len(SAMPLES)]
        changed = bytearray(content)
        for _ in range(chance.randint(1, 8)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        file = tmp_path / f"{number}-{name}"
        file.write_bytes(changed[: chance.randint(0, len(changed))] if chance.random() < 0.3 else changed)
        found = kind_of(file)
        assert found is None or found in kinds.KINDS
        file.unlink()


# ---- docs/models.md -------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("kind", [kind for kind in kinds.KINDS if kind.suffixes])
def test_the_page_of_what_can_be_dropped_in_has_a_row_for_each_kind(kind: FileKind) -> None:
    fitting = [row for row in ROWS if all(f"`{suffix}`" in row.split(" | ")[0] for suffix in kind.suffixes)]
    needs = [each for each in (kind.served_with.split(" or ") if kind.is_model else []) if each]
    needs += [f"edge-runtime[{kind.extra}]"] if kind.extra else []
    assert any(all(f"`{each}`" in row for each in needs) for row in fitting), f"{kind.name}: {needs} in {fitting}"
    is_served = [row in PAGE.partition("## What is not served")[0] for row in fitting]
    assert kind.is_model in is_served, "it stands in the other table"
