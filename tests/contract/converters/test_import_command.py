"""`edge-runtime import`: each model whole or not at all, nothing replaced unasked, and hostile sources refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.cli.main import main
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import ConversionFailed
from edge_runtime.models.walk import scan
from edge_runtime_converters.importing import source_folder, writing
from edge_runtime_converters.importing.plan import settings_text
from edge_runtime_converters.importing.source_folder import SourceFolder
from edge_runtime_converters.output_files import work_folder

DIGITS = Path(__file__).parents[3] / "demo" / "models" / "digits" / "1" / "model.onnx"

Import = Callable[..., tuple[int, str, str]]

KILLED = """
import os, sys
from edge_runtime.cli.main import main
from edge_runtime_converters.importing import writing

step = getattr(writing, sys.argv[1])

def step_and_die(*given, **named):
    done = step(*given, **named)
    list(done) if sys.argv[1] == "_synced" else done
    os.kill(os.getpid(), 9)

setattr(writing, sys.argv[1], step_and_die)
main(["import", "repository", "--models", "models"])
"""
"""An import that is killed once it has carried out a step."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Run the verb beside a repository of one model, `repository/digits`; its exit status, stdout and stderr."""
    put(tmp_path / "repository")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["import", *words])
        return status, *capsys.readouterr()

    return call


def put(repository: Path, name: str = "digits") -> Path:
    """A model as Triton has it."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copyfile(DIGITS, version / "model.onnx")
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "onnxruntime"\n')
    return repository / name


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.smoke
def test_a_repository_is_taken_served_and_asked(run: Import, tmp_path: Path) -> None:
    status, out, err = run("repository", "--models", "models")
    assert status == 0, err
    assert "a Triton model repository" in out
    assert tree(tmp_path / "models") == ["digits", "digits/1", "digits/1/model.onnx", "digits/config.pbtxt"]
    config = Config(state=str(tmp_path / "state"), watch=False, calibrate=False)
    with Runtime(tmp_path / "models", config=config) as runtime:
        reply = runtime.infer("digits", {"image": np.zeros((1, 64), np.float32)})
        assert reply.outputs["scores"].shape == (1, 10)


def test_json_reports_each_model(run: Import, tmp_path: Path) -> None:
    status, out, _ = run("repository", "--models", "models", "--json")
    report = json.loads(out)
    (model,) = report["models"]
    assert status == 0
    assert report["system"] == "a Triton model repository"
    assert (model["name"], model["state"], model["was"]) == ("digits", "taken", "an ONNX model")
    assert model["files"] == ["config.pbtxt", "1/model.onnx"]
    assert model["folder"] == str(tmp_path / "models" / "digits")


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(run: Import, tmp_path: Path) -> None:
    status, out, err = run("repository", "--models", "models", "--dry-run")
    assert status == 0, err
    assert "planned" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repository"]


def test_a_model_that_is_there_stays_unless_it_may_be_replaced(run: Import, tmp_path: Path) -> None:
    mine = tmp_path / "models" / "digits" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    status, _, err = run("repository", "--models", "models")
    assert status == 1
    assert "--replace" in err
    assert tree(tmp_path / "models") == ["digits", "digits/mine.txt"]
    assert run("repository", "--models", "models", "--replace")[0] == 0
    assert tree(tmp_path / "models") == ["digits", "digits/1", "digits/1/model.onnx", "digits/config.pbtxt"]


def test_a_loose_file_of_that_name_is_not_hidden_even_where_folders_may_be_replaced(
    run: Import, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    shutil.copyfile(DIGITS, tmp_path / "models" / "digits.onnx")
    status, _, err = run("repository", "--models", "models", "--replace")
    assert status == 1
    assert "move it away" in err
    assert tree(tmp_path / "models") == ["digits.onnx"]


def test_one_that_cannot_be_taken_leaves_nothing_and_the_others_are_taken(run: Import, tmp_path: Path) -> None:
    broken = put(tmp_path / "repository", "broken") / "1"
    (broken / "model.onnx").unlink()
    (broken / "model.onnx").symlink_to("/etc/hostname")
    status, out, err = run("repository", "--models", "models")
    assert status == 1
    assert "broken was not taken" in err
    assert "leads out of" in err
    assert "taken" in out
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["digits"]


def test_a_pipe_in_a_source_is_refused_and_waited_for_by_nobody(run: Import, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "repository" / "digits" / "1" / "notes.txt")
    status, _, err = run("repository", "--models", "models")
    assert status == 1
    assert "is not a plain file" in err
    assert tree(tmp_path / "models") == []


def test_a_folder_that_is_the_wrong_one_is_not_copied_to_its_end(run: Import, tmp_path: Path) -> None:
    deep = tmp_path / "repository" / "digits" / "1" / "a" / "b" / "c" / "d" / "e" / "f"
    deep.mkdir(parents=True)
    (deep / "file.txt").write_text("x")
    status, _, err = run("repository", "--models", "models")
    assert status == 1
    assert "folders in one another" in err
    assert tree(tmp_path / "models") == []


@pytest.mark.parametrize("step", ["read_source", "_synced"])
def test_an_import_that_is_killed_leaves_nothing_that_is_served_and_goes_with_the_next(
    run: Import, tmp_path: Path, step: str
) -> None:
    put(tmp_path / "repository", "other")
    subprocess.run([sys.executable, "-c", KILLED, step], check=False, stderr=subprocess.DEVNULL)
    models = tmp_path / "models"
    (left,) = models.iterdir()
    assert left.name.startswith(".import.")
    assert scan(models).models == {}
    assert run("repository", "--models", "models", "--only", "other")[0] == 0
    assert [path.name for path in models.iterdir()] == ["other"]


def test_an_import_leaves_what_another_is_at_work_on(run: Import, tmp_path: Path) -> None:
    with work_folder(tmp_path / "models" / "import") as theirs:
        assert run("repository", "--models", "models")[0] == 0
        assert theirs.is_dir()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["digits"]


def test_a_disk_that_fails_in_the_middle_leaves_nothing(
    run: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, os.strerror(28), str(target))

    monkeypatch.setattr(writing, "_copy_file", full)
    status, _, err = run("repository", "--models", "models")
    assert status == 1
    assert "free some space" in err
    assert tree(tmp_path / "models") == []


def test_the_name_is_chosen_where_there_is_one_model(run: Import, tmp_path: Path) -> None:
    config = put(tmp_path / "repository", "second") / "config.pbtxt"
    assert "--only" in run("repository", "--models", "models", "--name", "mine")[2]
    status, _, err = run("repository", "--models", "models", "--only", "second", "--name", "mine")
    assert status == 1  # a config says its model's name
    assert "second" in err
    config.write_text('backend: "onnxruntime"')
    assert run("repository", "--models", "models", "--only", "second", "--name", "mine")[0] == 0
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mine"]
    assert "holds no model third" in run("repository", "--models", "models", "--only", "third")[2]


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", ""])
def test_a_name_that_is_not_a_models_name_is_refused(run: Import, tmp_path: Path, name: str) -> None:
    status, _, _ = run("repository", "--models", "models", f"--name={name}", "--only", "digits")
    assert status == (0 if not name else 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "repository"]


def test_a_source_of_no_known_system_says_what_could_be(run: Import, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    status, _, err = run("other", "--models", "models")
    assert status == 1
    assert "none of what can be imported" in err
    assert "config.pbtxt" in err


def test_a_source_that_is_not_there_says_so(run: Import) -> None:
    status, _, err = run("gone", "--models", "models")
    assert status == 1
    assert "gone: No such file" in err


def test_a_models_folder_within_the_source_is_refused(run: Import) -> None:
    status, _, err = run("repository", "--models", "repository/models")
    assert status == 1
    assert "lies in the source" in err


# ---- hostile archives and texts --------------------------------------------------------------------------------------


def zip_of(path: Path, name: str, content: bytes = b"x", mode: int = stat.S_IFREG | 0o644) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        member = zipfile.ZipInfo(name)
        member.compress_type = zipfile.ZIP_DEFLATED
        member.external_attr = mode << 16
        archive.writestr(member, content)


def tar_of(path: Path, name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        member.size = 1 if kind == tarfile.REGTYPE else 0
        archive.addfile(member, io.BytesIO(b"x") if member.size else None)


@pytest.fixture
def source(tmp_path: Path) -> SourceFolder:
    for name in ("source", "work"):
        (tmp_path / name).mkdir()
    return SourceFolder.of(tmp_path / "source", tmp_path / "work")


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/etc/out", "..\\out", "C:/../../out"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_member_that_leads_out_of_its_archive_is_refused(
    source: SourceFolder, tmp_path: Path, name: str, kind: str
) -> None:
    (zip_of if kind == "zip" else tar_of)(source.root / "a", name)
    with pytest.raises(ConversionFailed, match="leads out of it"):
        source.unpack(source.root / "a")
    assert [path for path in tmp_path.rglob("*") if path.name == "out"] == []


def test_a_link_in_an_archive_is_refused(source: SourceFolder) -> None:
    zip_of(source.root / "a.zip", "etc", b"/etc/passwd", stat.S_IFLNK | 0o777)
    tar_of(source.root / "a.tar", "etc", tarfile.SYMTYPE, "/etc/passwd")
    for name in ("a.zip", "a.tar"):
        with pytest.raises(ConversionFailed, match="is a link"):
            source.unpack(source.root / name)


def test_a_bomb_is_ended_at_its_bound(source: SourceFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_folder, "_FREE_BYTES", 1 << 10)
    zip_of(source.root / "a.zip", "bomb", bytes(4 << 20))
    with pytest.raises(ConversionFailed, match="unpacks to more than"):
        source.unpack(source.root / "a.zip")
    written = sum(path.stat().st_size for path in source.work.rglob("*") if path.is_file())
    assert written <= 200 * (source.root / "a.zip").stat().st_size + (1 << 10)


def test_a_damaged_archive_is_one_sentence(source: SourceFolder) -> None:
    zip_of(source.root / "a.zip", "model", os.urandom(4096))
    whole = (source.root / "a.zip").read_bytes()
    (source.root / "a.zip").write_bytes(whole[:200] + bytes(200) + whole[400:])
    (source.root / "b.tar").write_bytes(b"no tar")
    for name in ("a.zip", "b.tar"):
        with pytest.raises(ConversionFailed, match="cannot be unpacked"):
            source.unpack(source.root / name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b" " * (9 << 20), "bytes that such a file may have"),
        (b"[" * 100_000, "recursion|depth"),
        (b'{"a": \xff}', "invalid|UTF-8"),
    ],
    ids=["huge", "deep", "no text"],
)
def test_json_that_is_huge_deep_or_none_is_refused(source: SourceFolder, text: bytes, said: str) -> None:
    (source.root / "a.json").write_bytes(text)
    with pytest.raises(ConversionFailed, match=said):
        source.json(source.root / "a.json")


@pytest.mark.parametrize(
    "text",
    ["a: &x [1, 2]\nb: [*x, *x]", "!!python/object/apply:os.system ['true']", "a: [", "[" * 100_000, "- " * 100_000],
    ids=["grows", "runs", "does not end", "is deep", "is as deep without brackets"],
)
def test_yaml_that_grows_runs_or_does_not_end_is_refused(source: SourceFolder, text: str) -> None:
    pytest.importorskip("yaml")
    (source.root / "a.yaml").write_text(text)
    with pytest.raises(ConversionFailed):
        source.yaml_as(source.root / "a.yaml", dict)


def test_links_are_followed_inside_the_source_alone(source: SourceFolder, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("secret")
    (source.root / "real.txt").write_text("mine")
    (source.root / "in.txt").symlink_to("real.txt")
    (source.root / "out.txt").symlink_to("../outside.txt")
    (source.root / "loop").symlink_to("loop")
    assert source.text(source.inside("in.txt")) == "mine"
    assert [path.name for path in source.files()] == ["in.txt", "real.txt"]
    for name in ("out.txt", "../outside.txt", str(tmp_path / "outside.txt"), "loop"):
        with pytest.raises(ConversionFailed, match="leads out of"):
            source.inside(name)
    with pytest.raises(ConversionFailed, match="leads out of"):
        source.bytes(source.root / "out.txt")


def test_settings_are_written_as_toml_that_reads_back() -> None:
    tomllib = pytest.importorskip("tomllib")
    settings = {
        "preset": "torchvision", "batch": True, "max_queue_delay_ms": 0.5, "preferred_batch_rows": [4, 8],
        "input": {"a b": {"size": [224, 224], "color": "bgr"}, 'q"\x7f\n': {"fit": "crop"}},
        "warmup": {"runs": 2, "shapes": {"text": [128]}}, "options": {"tensorrt.tf32": "1"},
    }  # fmt: skip
    assert tomllib.loads(settings_text(settings, "One.\nTwo.")) == settings


# ---- Triton's repositories, without a conversion ---------------------------------------------------------------------

PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "image" data_type: TYPE_FP32 dims: 64 }
output { name: "scores" data_type: TYPE_FP32 dims: 10 }
ensemble_scheduling { step {
  model_name: "digits" model_version: -1
  input_map { key: "image" value: "image" } output_map { key: "scores" value: "scores" }
} }
"""


def test_python_models_labels_and_ensembles_are_copied_as_they_are(run: Import, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "digits" / "labels.txt").write_text("zero\n")
    python = repository / "python" / "1"
    (python / "assets").mkdir(parents=True)
    (python / "model.py").write_text(PYTHON)
    (python / "assets" / "vocabulary.txt").write_text("a\n")
    (python.parent / "config.pbtxt").write_text('backend: "python"')
    (repository / "both" / "1").mkdir(parents=True)
    (repository / "both" / "config.pbtxt").write_text(ENSEMBLE)
    status, out, err = run("repository", "--models", "models")
    assert status == 0, err
    assert "an ensemble" in out
    assert tree(tmp_path / "models" / "both") == ["1", "config.pbtxt"]
    assert tree(tmp_path / "models" / "python") == [
        "1", "1/assets", "1/assets/vocabulary.txt", "1/model.py", "config.pbtxt",
    ]  # fmt: skip
    assert (tmp_path / "models" / "digits" / "labels.txt").read_text() == "zero\n"


def test_an_ensemble_whose_step_was_not_taken_is_not_taken_either(run: Import, tmp_path: Path) -> None:
    (tmp_path / "repository" / "digits" / "1" / "model.onnx").write_bytes(b"")
    (tmp_path / "repository" / "both").mkdir()
    (tmp_path / "repository" / "both" / "config.pbtxt").write_text(ENSEMBLE)
    status, _, err = run("repository", "--models", "models")
    assert status == 1
    assert "both was not taken: both: calls digits, which was not imported" in err
    assert tree(tmp_path / "models") == []


@pytest.mark.parametrize(
    ("name", "content", "config", "said"),
    [
        ("model.plan", b"plan", 'platform: "tensorrt_plan"', "the daemon builds its own"),
        ("checkpoint.tl", b"tl", 'backend: "fil"', "Treelite"),
        ("xgboost.model", b"binf", 'backend: "fil"', "save_model('model.json')"),
        ("xgboost.model", b"\x00\x00", 'backend: "fil"', "save_model('model.json')"),
        ("model.pt", b"\x80\x02}.", 'platform: "pytorch_libtorch"', "torch.export"),
        ("model.onnx", b"version https://git-lfs.github.com/spec/v1\n", "", "git lfs pull"),
        ("model.onnx", b"x", "max_batch_size: -1 name: 3", "config.pbtxt"),
        ("model.onnx", b"x", 'backend: "dali"', "dali"),
        ("model.onnx", b"x", " " * (9 << 20), "bytes that such a file may have"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name_with_what_to_do(
    run: Import, tmp_path: Path, name: str, content: bytes, config: str, said: str
) -> None:
    version = tmp_path / "repository" / "other" / "1"
    version.mkdir(parents=True)
    (version / name).write_bytes(content)
    (version.parent / "config.pbtxt").write_text(config)
    status, _, err = run("repository", "--models", "models")
    assert status == 1
    assert "other was not taken" in err
    assert said in err
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["digits"]


def test_an_engine_beside_an_onnx_model_is_left_out_and_reported(run: Import, tmp_path: Path) -> None:
    (tmp_path / "repository" / "digits" / "1" / "model.plan").write_bytes(b"plan")
    status, _, err = run("repository", "--models", "models")
    assert status == 0
    assert "left out" in err
    assert tree(tmp_path / "models" / "digits") == ["1", "1/model.onnx", "config.pbtxt"]
