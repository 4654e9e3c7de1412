"""The models folder on a real file system: what is a model, what is refused and why; nothing outside is read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.config.settings import ModelSettings
from edge_runtime.models.folder import Scan
from edge_runtime.models.walk import MAX_DEPTH, MAX_VERSION_FILES, scan
from tests.fakes.audit import files_touched
from tests.fakes.rights import open_folder, ordinary_rights
from tests.unit.models.test_names import hostile_names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def put(root: Path, *names: str, data: bytes = b"model") -> None:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def shape(found: Scan) -> dict[str, dict[int, list[str]]]:
    """Models, their versions and their files, as names."""
    return {
        name: {number: sorted(version.files) for number, version in model.versions.items()}
        for name, model in found.models.items()
    }


def problems(found: Scan, root: Path) -> dict[str, str]:
    return {str(problem.path.relative_to(root)): problem.reason for problem in found.problems}


# ---- layouts


@pytest.mark.parametrize(
    ("files", "models"),
    [
        ([], {}),
        (["digits/1/model.onnx"], {"digits": {1: ["model.onnx"]}}),
        (["digits/1/model.onnx", "digits/10/model.onnx", "digits/2/model.xml", "digits/2/model.bin"],
         {"digits": {1: ["model.onnx"], 2: ["model.bin", "model.xml"], 10: ["model.onnx"]}}),
        (["digits/1/net.onnx", "digits/1/labels.txt"], {"digits": {1: ["labels.txt", "net.onnx"]}}),
        (["digits.onnx"], {"digits": {1: ["digits.onnx"]}}),
        (["digits.xml", "digits.bin"], {"digits": {1: ["digits.bin", "digits.xml"]}}),
        (["digits.onnx", "digits.onnx.data", "README.md"], {"digits": {1: ["digits.onnx", "digits.onnx.data"]}}),
        (["digits.onnx", "digits.int8.onnx"], {"digits": {1: ["digits.int8.onnx", "digits.onnx"]}}),
        (["digits.int8.xml", "digits.int8.bin"], {"digits": {1: ["digits.int8.bin", "digits.int8.xml"]}}),
        (["digits.onnx", "digits.v2.onnx", "digits.v2.data"],
         {"digits": {1: ["digits.onnx"]}, "digits.v2": {1: ["digits.v2.data", "digits.v2.onnx"]}}),
        (["digits/anything.onnx", "digits/model.toml"], {"digits": {1: ["anything.onnx"]}}),
        (["digits/net.xml", "digits/net.bin"], {"digits": {1: ["net.bin", "net.xml"]}}),
        (["digits/model.py"], {"digits": {1: ["model.py"]}}),
        (["digits/model.onnx", "digits/weights/w0"], {"digits": {1: ["model.onnx"]}}),
        ([".hidden/1/model.onnx", "a.part/1/model.onnx", "b.tmp/1/model.onnx", ".x.onnx", "y.onnx.part"], {}),
        (["net.tflite"], {"net": {1: ["net.tflite"]}}),
        (["net/any.tflite", "net/labels.txt"], {"net": {1: ["any.tflite", "labels.txt"]}}),
        (["net.pt", "net2.pt2", "a.skops", "b.ubj", "c.cbm", "d.keras", "e.h5"],
         {"a": {1: ["a.skops"]}, "b": {1: ["b.ubj"]}, "c": {1: ["c.cbm"]}, "d": {1: ["d.keras"]}, "e": {1: ["e.h5"]},
          "net": {1: ["net.pt"]}, "net2": {1: ["net2.pt2"]}}),
        (["net.pdmodel", "net.pdiparams"], {"net": {1: ["net.pdiparams", "net.pdmodel"]}}),
        (["sm/saved_model.pb", "sm/variables/x"], {"sm": {1: ["saved_model.pb"]}}),
        (["sm/1/saved_model.pb", "sm/1/variables/x"], {"sm": {1: ["saved_model.pb"]}}),
        (["sm/1/model.savedmodel/saved_model.pb"], {"sm": {1: ["saved_model.pb"]}}),
        (["sm/model.savedmodel/saved_model.pb"], {"sm": {1: ["saved_model.pb"]}}),
        (["weights/best.onnx", "weights/best.pt", "weights/last.pt"],
         {"weights": {1: ["best.onnx", "best.pt", "last.pt"]}}),
        (["digits/1/model.onnx", "digits/.2/model.onnx", "digits/3.part/model.onnx", "digits/1/x.tmp"],
         {"digits": {1: ["model.onnx"]}}),
    ],
)  # fmt: skip
def test_a_layout_is_read_as(root: Path, files: list[str], models: dict[str, dict[int, list[str]]]) -> None:
    put(root, *files, data=b"")
    found = scan(root)
    assert shape(found) == models
    assert problems(found, root) == {}


def test_a_version_names_its_files_and_where_they_are(root: Path) -> None:
    put(root, "digits/3/model.onnx", "digits/3/data/weights.bin")
    model = scan(root).models["digits"]
    version = model.versions[3]
    assert (model.name, model.path) == ("digits", root / "digits")
    assert (version.model, version.number, version.path) == ("digits", 3, root / "digits" / "3")
    assert version.files == {"model.onnx": root / "digits" / "3" / "model.onnx"}
    assert [stamp[:2] for stamp in version.fingerprint] == [("data/weights.bin", 5), ("model.onnx", 5)]


def test_artifacts_that_one_backend_loads_together_are_one_model(root: Path) -> None:
    parts = ("openvino_model", "openvino_tokenizer", "openvino_detokenizer")

    put(root, *(f"words/1/{name}{suffix}" for name in parts for suffix in (".xml", ".bin")))

    assert scan(root).problems == ()


@pytest.mark.parametrize(
    ("files", "at", "reason"),
    [
        (["digits/v1/model.onnx"], "digits/v1", "wanted a positive integer without leading zeros: rename it to 1"),
        (["digits/01/model.onnx"], "digits/01", "rename it to 1"),
        (["all/digits/model.onnx"], "all/digits", "where it is a model of its own, move it to {root}/digits"),
        (["all/digits/1/model.onnx"], "all/digits", "where it is a model of its own, move it to {root}/digits"),
        (
            ["detect/train/weights/best.onnx"],
            "detect/train/weights/best.onnx",
            "is where Ultralytics left it, which is not a version: copy it to {root}/detect/1/model.onnx",
        ),
        (["digits/0/model.onnx"], "digits/0", "is not a version; wanted a positive integer without leading zeros"),
        (["digits/labels.txt"], "digits", "holds no version; wanted 1/model.onnx"),
        (["digits/1/model.onnx", "digits/new.onnx"], "digits/new.onnx", "ignored: the model has version folders"),
        (["digits/1/model.onnx", "digits/latest/model.onnx"], "digits/latest", "is not a version"),
        (["digits/1/a.onnx", "digits/1/b.onnx"], "digits/1", "holds a.onnx and b.onnx; which one is the artifact?"),
        (["digits/a.onnx", "digits/b.onnx"], "digits", "holds a.onnx and b.onnx; which one"),
        (["digits/1/model.onnx", "digits.onnx"], "digits.onnx", "ignored: the folder digits/ is that model"),
        (["my model/1/model.onnx"], "my model", "the folder's name is not a model name"),
        (["my model.onnx"], "my model.onnx", "'my model' is not a model name"),
        (["net.xml"], "net.xml", "needs its weights, net.bin, beside it"),
        (["my m.tflite"], "my m.tflite", "'my m' is not a model name"),
        (["m.pkl"], "m.pkl", "is a pickle (of scikit-learn?), which holds code"),
        (["m/model.joblib", "m/notes.txt"], "m/model.joblib", "is a pickle"),
        (["digits/1/model.onnx", "digits/old.pkl"], "digits/old.pkl", "is a pickle"),
        (["digits/1/model.onnx", "digits/new.tflite"], "digits/new.tflite", "ignored: the model has version folders"),
        (["saved_model.pb"], "saved_model.pb", "put its whole folder here, as NAME/saved_model.pb"),
        (
            ["train/args.yaml", "train/weights/best.onnx"],
            "train/weights/best.onnx",
            "is where Ultralytics left it, which is not a version: copy it to {root}/train/1/model.onnx",
        ),
        (["train/weights/last.pt"], "train/weights", "is not a version"),
        (
            ["minilm/config.json", "minilm/model.safetensors", "minilm/modules.json", "minilm/onnx/model.onnx"],
            "minilm/onnx",
            "have it imported, its texts and variants included: edge-runtime import minilm --models {root}",
        ),
        (["digits/onnx/model.onnx"], "digits/onnx", "where it is a model of its own, move it to {root}/onnx"),
        (["digits/1/model.onnx/graph"], "digits/1/model.onnx", "is a folder; wanted a file of that name"),
        (["digits/model.onnx/graph"], "digits/model.onnx", "is a folder; wanted a file of that name"),
        (["digits.onnx", "digits.toml"], "digits.toml", "settings belong in digits/model.toml"),
    ],
)
def test_a_path_that_is_not_served_is_a_problem_that_says_why(
    root: Path, files: list[str], at: str, reason: str
) -> None:
    put(root, *files)
    found = problems(scan(root), root)
    assert reason.replace("{root}", str(root)) in found[at]
    assert list(found) == [at], "one reason is enough"


def test_a_folder_beside_the_artifact_may_have_any_name(root: Path) -> None:
    put(root, "digits/1/model.onnx", "digits/1/weights.onnx/w0", "digits/1/model.pt")
    assert problems(scan(root), root) == {}


def test_a_model_folder_without_versions_is_known_but_has_none(root: Path) -> None:
    put(root, "digits/labels.txt")
    assert scan(root).models["digits"].versions == {}


def test_one_bad_model_leaves_its_neighbours_alone(root: Path) -> None:
    put(root, "bad/v1/model.onnx", "worse name/1/model.onnx", "good/1/model.onnx")
    assert scan(root).models["good"].versions.keys() == {1}


@pytest.mark.parametrize("kind", ["absent", "file"])
def test_a_root_that_cannot_be_listed_is_a_problem_not_an_error(root: Path, kind: str) -> None:
    bad = root / "bad"
    if kind == "file":
        bad.write_bytes(b"")
    found = scan(bad)
    assert found.models == {}
    assert found.unreadable == {bad}
    assert ("no such folder; create it" in str(found.problems[0])) is (kind == "absent")


def test_a_folder_without_permission_is_unreadable_and_leaves_its_neighbours_alone() -> None:
    with open_folder() as root:
        put(root, "digits/1/model.onnx", "digits/2/model.onnx", "other/1/model.onnx")
        put(root, "digits/model.toml", data=b"pinned = true")
        closed = (root / "digits" / "2", root / "other", root / "digits" / "model.toml")
        for path in closed:
            path.chmod(0)
        with ordinary_rights():
            found = scan(root)
        for path in closed:
            path.chmod(0o755)
        assert shape(found) == {"digits": {1: ["model.onnx"]}}
        assert found.unreadable == {root / "digits" / "2", root / "other"}
        assert problems(found, root)["other"] == "cannot be listed: Permission denied"
        assert "Permission denied" in str(found.models["digits"].settings_error)


def test_a_pipe_or_socket_is_never_opened(root: Path) -> None:
    put(root, "digits/1/labels.txt")
    os.mkfifo(root / "digits" / "1" / "model.onnx")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "digits" / "1" / "s"))
        found = scan(root)
    assert shape(found) == {"digits": {1: ["labels.txt"]}}
    assert problems(found, root)["digits/1/model.onnx"] == "is not a plain file; ignored"


# ---- settings


def test_settings_are_read_from_model_toml(root: Path) -> None:
    put(root, "digits/1/model.onnx")
    put(root, "digits/model.toml", data=b"max_batch_rows = 8\n")
    model = scan(root).models["digits"]
    assert model.settings == ModelSettings(max_batch_rows=8)
    assert model.settings_error is None


@pytest.mark.parametrize("text", [b"max_batch_rows = ", b"max_batch_row = 8\n", b"max_batch_rows = 'x'\n", b"\xff\xfe"])
def test_broken_settings_are_the_models_own_error(root: Path, text: bytes) -> None:
    put(root, "digits/1/model.onnx", "other/1/model.onnx")
    put(root, "digits/model.toml", data=text)
    found = scan(root)
    model = found.models["digits"]
    assert model.settings_error
    assert "model.toml" in model.settings_error
    assert model.settings == ModelSettings()
    assert model.versions.keys() == {1}
    assert problems(found, root)["digits/model.toml"] == model.settings_error
    assert [str(problem) for problem in found.problems] == [model.settings_error]  # which names the file once
    assert found.models["other"].settings_error is None


def test_a_folder_in_place_of_model_toml_is_the_models_own_error(root: Path) -> None:
    put(root, "digits/1/model.onnx", "digits/model.toml/x")
    model = scan(root).models["digits"]
    assert model.settings_error is not None
    assert model.versions.keys() == {1}


# ---- what is told by bytes, since any file may have the name

XGBOOST = b'{"learner":{"attributes":{},"feature_names":[]},"version":[3,0,2]}'
LIGHTGBM = b"tree\nversion=v4\nnum_class=1\n"


@pytest.mark.parametrize(
    ("name", "data", "models"),
    [
        ("churn.json", XGBOOST, {"churn": {1: ["churn.json"]}}),
        ("churn.txt", LIGHTGBM, {"churn": {1: ["churn.txt"]}}),
        ("churn/model.json", XGBOOST, {"churn": {1: ["model.json"]}}),
        ("churn/any.txt", LIGHTGBM, {"churn": {1: ["any.txt"]}}),
        ("notes.txt", b"tree\nhouse\n", {}),
        ("index_to_name.json", b'{"0": ["n01440764", "tench"]}', {}),
        ("config.json", b'{"learner": "adam"}', {}),
        ("empty.json", b"", {}),
    ],
)
def test_text_and_json_are_models_by_their_content_never_by_their_names(
    root: Path, name: str, data: bytes, models: dict[str, dict[int, list[str]]]
) -> None:
    put(root, name, data=data)
    found = scan(root)
    assert shape(found) == models
    assert problems(found, root) == {}


def test_labels_and_notes_beside_a_model_stay_silent(root: Path) -> None:
    put(root, "m/1/model.onnx", "n.onnx", "README.md", "requirements.txt", data=b"text")
    put(root, "m/labels.txt", "m/1/labels.txt", "n.labels.txt", data=b"tree\nhouse\n")
    put(root, "m/index_to_name.json", "config.json", data=b'{"0": "tench"}')
    assert problems(scan(root), root) == {}


def test_an_xgboost_model_beside_version_folders_is_named(root: Path) -> None:
    put(root, "m/1/model.onnx")
    put(root, "m/new.json", data=XGBOOST)
    assert "has version folders; move it into one" in problems(scan(root), root)["m/new.json"]


def test_a_link_out_of_the_folder_is_never_read_to_find_its_kind(tmp_path: Path, root: Path) -> None:
    put(tmp_path, "outside/churn.json", data=XGBOOST)
    (root / "churn.json").symlink_to(tmp_path / "outside" / "churn.json")
    (root / "m").mkdir()
    (root / "m" / "churn.json").symlink_to(tmp_path / "outside" / "churn.json")
    with files_touched() as touched:
        assert shape(scan(root)) == {"m": {}}
    assert [path for path in touched if "outside" in path or path.endswith("churn.json")] == []


def test_a_triton_saved_model_is_found_in_its_own_folder(root: Path) -> None:
    put(root, "sm/1/model.savedmodel/saved_model.pb", "sm/1/model.savedmodel/variables/x")
    version = scan(root).models["sm"].versions[1]
    assert version.files["saved_model.pb"] == root / "sm/1/model.savedmodel/saved_model.pb"


# ---- symbolic links and hostile names


@pytest.mark.parametrize(
    ("link", "target", "reason"),
    [
        ("models/digits", "outside/digits", "leads outside the models folder"),
        ("models/good/2", "outside/digits/1", "leads outside the models folder"),
        ("models/good/1/model.xml", "outside/digits/1/model.onnx", "leads outside the models folder"),
        ("models/good/model.toml", "outside/model.toml", "leads outside the models folder"),
        ("models/flat.onnx", "outside/digits/1/model.onnx", "leads outside the models folder"),
        ("models/digits", "nowhere", "cannot be followed"),
        ("models/good/2", "models/good/2", "cannot be followed"),
        ("models/digits", "models", "is a symbolic link to a folder that it lies in"),
        ("models/good/2", "models/good", "is a symbolic link to a folder that it lies in"),
        ("models/good/2", "/", "leads outside the models folder"),
    ],
)
def test_a_link_that_leads_astray_is_refused_and_reported(
    tmp_path: Path, root: Path, link: str, target: str, reason: str
) -> None:
    put(root, "good/1/model.onnx")
    put(tmp_path, "outside/digits/1/model.onnx")
    put(tmp_path, "outside/model.toml", data=b"max_batch_rows = 8\n")
    (tmp_path / link).symlink_to(tmp_path / target)
    found = scan(root)
    assert shape(found) == {"good": {1: ["model.onnx"]}}
    assert found.models["good"].settings == ModelSettings()
    assert any(reason in text for text in problems(found, root).values()), problems(found, root)


def test_links_inside_the_models_folder_are_followed(root: Path) -> None:
    put(root, ".store/abc/model.onnx")
    put(root, "digits/1/model.onnx")
    (root / "digits" / "2").symlink_to(root / ".store" / "abc")
    (root / "alias").symlink_to("digits")
    (root / "digits" / "1" / "model.xml").symlink_to("model.onnx")
    found = scan(root)
    both = {1: ["model.onnx", "model.xml"], 2: ["model.onnx"]}
    assert shape(found) == {"alias": both, "digits": both}
    assert problems(found, root) == {}


def test_a_models_folder_that_is_itself_a_link_is_read(tmp_path: Path, root: Path) -> None:
    put(root, "digits/1/model.onnx")
    (root / "digits" / "2").symlink_to(root / "digits" / "1")
    (tmp_path / "link").symlink_to(root)
    assert scan(tmp_path / "link").models["digits"].versions.keys() == {1, 2}


def test_folders_and_files_with_hostile_names_never_become_models_nor_lead_out(tmp_path: Path, root: Path) -> None:
    put(tmp_path, "outside/1/model.onnx", "outside/model.toml")
    put(root, "good/1/model.onnx")
    made = 0
    for number, name in enumerate(hostile_names()):
        encoded = name.encode("utf-8", "replace")
        if b"/" in encoded or b"\0" in encoded or name in ("", ".", "..") or len(encoded) > 200:
            continue  # no file system can hold it
        path = os.fsencode(root) + b"/" + encoded
        if os.path.lexists(path):
            continue
        made += 1
        if number % 3 == 0:
            Path(os.fsdecode(path)).mkdir()
        elif number % 3 == 1:
            Path(os.fsdecode(path)).symlink_to(tmp_path / "outside")
        else:
            os.close(os.open(path + b".onnx", os.O_CREAT | os.O_WRONLY))
    assert made > 500
    with files_touched() as touched:
        found = scan(root)
    assert list(found.models) == ["good"]
    assert touched, "the audit sees what the scan does"
    assert [path for path in touched if not path.startswith(str(root))] == []
    assert [path for path in touched if "outside" in path] == []


# ---- fingerprints and what is known already


@pytest.mark.parametrize("change", ["bytes", "size", "replaced", "added", "removed", "renamed", "below", "mode"])
def test_any_change_of_a_versions_files_changes_its_fingerprint(root: Path, change: str) -> None:
    put(root, "digits/1/model.onnx", "digits/1/labels.txt", "digits/1/data/w")
    folder, file = root / "digits" / "1", root / "digits" / "1" / "model.onnx"
    os.utime(file, ns=(1, 1))
    before = scan(root).models["digits"].versions[1].fingerprint
    assert scan(root).models["digits"].versions[1].fingerprint == before
    if change == "bytes":
        file.write_bytes(b"lemod")
    elif change == "size":
        file.write_bytes(b"model2")
        os.utime(file, ns=(1, 1))
    elif change == "replaced":
        (folder / "new").write_bytes(b"model")
        os.utime(folder / "new", ns=(1, 1))
        (folder / "new").replace(file)
    elif change == "mode":
        file.chmod(0o400)
    elif change == "added":
        put(folder, "model.xml")
    elif change == "removed":
        (folder / "labels.txt").unlink()
    elif change == "renamed":
        (folder / "labels.txt").rename(folder / "names.txt")
    else:
        put(folder, "data/w", data=b"other")
    assert scan(root).models["digits"].versions[1].fingerprint != before


def test_a_file_still_being_written_under_another_name_changes_nothing(root: Path) -> None:
    put(root, "digits/1/model.onnx")
    before = scan(root)
    put(root, "digits/1/model.xml.part", "digits/2.part/model.onnx", "digits/1/.nfs0001")
    assert scan(root) == before


def test_a_model_that_is_known_and_unchanged_is_not_read_again(root: Path) -> None:
    put(root, "digits/1/model.onnx")
    put(root, "digits/model.toml", data=b"max_batch_rows = 8\n")
    before = scan(root)
    with files_touched() as touched:
        after = scan(root, before)
    assert after == before == scan(root)
    assert after.models["digits"].versions[1] is before.models["digits"].versions[1]
    assert not any(path.endswith("model.toml") for path in touched)


def test_changed_settings_are_read_again(root: Path) -> None:
    put(root, "digits/1/model.onnx")
    put(root, "digits/model.toml", data=b"max_batch_rows = ")
    before = scan(root)
    put(root, "digits/model.toml", data=b"max_batch_rows = 16\n")
    assert scan(root, before).models["digits"].settings == ModelSettings(max_batch_rows=16)
    (root / "digits" / "model.toml").unlink()
    assert scan(root, before).models["digits"].settings == ModelSettings()


def test_broken_settings_are_tried_again_even_when_the_file_is_the_same() -> None:
    with open_folder() as root:
        put(root, "digits/1/model.onnx")
        put(root, "digits/model.toml", data=b"pinned = true")
        root.joinpath("digits", "model.toml").chmod(0)
        with ordinary_rights():
            before = scan(root)
        assert before.models["digits"].settings_error is not None
        assert scan(root, before).models["digits"].settings == ModelSettings(pinned=True)


def test_a_version_folder_is_walked_within_bounds(root: Path) -> None:
    put(root, "digits/1/model.onnx", "digits/1/" + "d/" * (MAX_DEPTH + 3) + "deep")
    found = scan(root)
    assert [name for name, *_ in found.models["digits"].versions[1].fingerprint] == ["model.onnx"]
    assert any("folders deep; not watched" in reason for reason in problems(found, root).values())


def test_a_version_with_absurdly_many_files_is_reported(root: Path) -> None:
    put(root, "digits/1/model.onnx", *(f"digits/1/data/{number}" for number in range(MAX_VERSION_FILES + 5)), data=b"")
    found = scan(root)
    assert len(found.models["digits"].versions[1].fingerprint) <= MAX_VERSION_FILES
    assert any("more than 4096 files" in reason for reason in problems(found, root).values())


NAMES = st.sampled_from(
    ["a", "digits", "b.onnx", "b.xml", "b.bin", "1", "2", "01", ".x", "y.part", "m y", "model.toml"]
)
TREES = st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), max_size=12)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(first=TREES, second=TREES)
def test_a_scan_that_knows_an_earlier_one_finds_the_same(
    tmp_path_factory: pytest.TempPathFactory, first: list[str], second: list[str]
) -> None:
    root = tmp_path_factory.mktemp("models")
    plant(root, first)
    known = scan(root)
    plant(root, second)
    found = scan(root)
    assert scan(root, known) == found
    for name, model in found.models.items():
        for number, version in model.versions.items():
            assert (version.model, version.number) == (name, number)
            assert all(file.is_file() and file.is_relative_to(root) for file in version.files.values())


def plant(root: Path, tree: list[str]) -> None:
    """Make the files that can be made; a file where another needs a folder stays as it is."""
    for name in tree:
        try:
            put(root, name, data=b"")
        except OSError:
            continue


# ---- models that the configuration names ----------------------------------------------------------------------------


def _one(place: Path) -> Scan:
    return scan(None, named={"net": place})


@pytest.mark.parametrize(
    ("files", "place", "versions"),
    [
        (["1/model.onnx", "2/model.onnx"], "", {1: ["model.onnx"], 2: ["model.onnx"]}),
        (["x.onnx", "model.toml"], "", {1: ["x.onnx"]}),
        (["model.py"], "", {1: ["model.py"]}),
        (["x.onnx", "x.onnx.data", "y.onnx", "README"], "x.onnx", {1: ["x.onnx", "x.onnx.data"]}),
        (["x.onnx", "x.int8.onnx"], "x.onnx", {1: ["x.int8.onnx", "x.onnx"]}),
        (["x.xml", "x.bin", "y.onnx"], "x.xml", {1: ["x.bin", "x.xml"]}),
    ],
)
def test_a_place_is_read_as_one_model(root: Path, files: list[str], place: str, versions: dict[int, list[str]]) -> None:
    put(root, *files, data=b"")
    found = _one(root / place)
    assert shape(found) == {"net": versions}
    assert found.problems == ()
    assert scan(None, found, {"net": root / place}) == found


@pytest.mark.parametrize(
    ("files", "place", "reason"),
    [
        (["x.txt"], "x.txt", "is not a model; wanted a file .onnx"),
        (["x.xml"], "x.xml", "is empty: the copy or download did not happen"),
        (["x.pkl"], "x.pkl", "is empty"),
        ([], "", "holds no version"),
        ([], "gone", "no such folder"),
    ],
)
def test_a_place_that_is_not_a_model_is_reported(root: Path, files: list[str], place: str, reason: str) -> None:
    put(root, *files, data=b"")
    (problem,) = _one(root / place).problems
    assert reason in str(problem)


def test_a_place_hides_the_folders_model_of_its_name(root: Path) -> None:
    put(root, "models/net/2/model.onnx", "models/b/1/model.onnx", "x.onnx")
    found = scan(root / "models", named={"net": root / "x.onnx"})
    assert shape(found) == {"b": {1: ["model.onnx"]}, "net": {1: ["x.onnx"]}}
    assert "ignored: the configuration serves" in str(found.problems[0])


def test_a_link_out_of_a_place_is_refused(root: Path) -> None:
    put(root, "elsewhere/model.onnx")
    (root / "place").mkdir()
    (root / "place" / "model.onnx").symlink_to(root / "elsewhere" / "model.onnx")
    found = _one(root / "place")
    assert any("leads outside" in str(problem) for problem in found.problems)
    assert not found.models["net"].versions
