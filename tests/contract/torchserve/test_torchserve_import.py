"""TorchServe's archives and model stores, imported, served, and asked as TorchServe's clients ask."""

from __future__ import annotations

import ast
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.cli.main import main
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.typed_toml import parse_toml
from tests.contract.doors.http.test_http import expected
from tests.contract.pictures.test_pictures import picture
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import floats, http_url, running_daemon
from tests.models import onnx_models
from tests.models.torchserve_archives import manifest, put_archive, put_folder, put_tar, put_workflow

NAMES = json.dumps({"0": ["n01", "red"], "1": "green", "2": ["n03", "blue"]})

BASE = """
import numpy as np
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException, list_classes_from_module, map_class_to_label
from ts.handler_utils.timer import timed


class Scorer(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        self.factor = context.model_yaml_config["handler"]["factor"]
        self.bonus = float(open("bonus.txt").read())
        assert list_classes_from_module(__import__("model")) != []

    @timed
    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        if any(row == "refuse" for row in rows):
            raise PredictionException("not that", 418)
        return np.array(rows, np.float32)

    def postprocess(self, data):
        for index in range(len(data)):
            self.context.set_response_header(index, "x-batch", str(len(data)))
        tag = self.context.get_request_header(0, "X-Tag")
        return [{"scores": row, "tag": tag} for row in data * self.factor + self.bonus]
"""

MODULE = """
state = {}

def handle(data, context):
    if data is None:
        state["folder"] = context.system_properties.get("model_dir")
        state["batch"] = context.system_properties["batch_size"]
        return None
    return [f"{state['batch']}:{len(data)}:{sorted(row)}" for row in data]
"""

STANDALONE = """
import json
import os

class Before:
    pass

class Handler(object):
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        folder = context.system_properties.get("model_dir")
        self.words = json.load(open(os.path.join(folder, context.manifest["model"]["serializedFile"])))
        self.initialized = True

    def preprocess(self, data):
        return [bytes(row.get("data") or row.get("body")).decode() for row in data]

    def inference(self, rows):
        return [self.words.get(row, 0) for row in rows]

    def handle(self, data, context):
        if not self.initialized:
            raise RuntimeError("asked before it was initialised")
        return self.inference(self.preprocess(data))
"""


def artifact(tmp_path: Path, maker, **options) -> bytes:
    folder = tmp_path / f"made-{maker.__name__}"
    folder.mkdir(exist_ok=True)
    maker(folder, **options)
    return (folder / "model.onnx").read_bytes()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., dict]:
    """Import into `models`; the report, whose models are by name."""

    def call(source: Path, *words: str, status: int = 0) -> dict:
        capsys.readouterr()
        found = main(["import", str(source), "--models", str(tmp_path / "models"), "--json", *words])
        out, err = capsys.readouterr()
        assert found == status, err
        report = json.loads(out)
        return {**report, "models": {each["name"]: each for each in report["models"]}, "stderr": err}

    return call


def settings_of(tmp_path: Path, name: str) -> dict:
    return parse_toml((tmp_path / "models" / name / "model.toml").read_text(), name)


def served(tmp_path: Path):
    settings = HttpSettings(endpoint="127.0.0.1:0", torchserve=True)
    return running_daemon(tmp_path / "models", tmp_path / "run", http=settings, python_models=True, start_limit_s=60)


# ---- what is taken, and how it answers ------------------------------------------------------------------------------


def test_archives_of_a_store_answer_as_their_handlers_did(run, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    mlp, colours = artifact(tmp_path, onnx_models.mlp), artifact(tmp_path, onnx_models.colours)
    put_archive(store, "colours", {"net.onnx": colours, "index_to_name.json": NAMES}, serializedFile="net.onnx")
    put_archive(
        store, "scorer",
        {"mlp.onnx": mlp, "scorer.py": BASE, "model.py": "class Extra: pass\n", "bonus.txt": "0.5",
         "model-config.yaml": "batchSize: 4\nmaxBatchDelay: 20\nresponseTimeout: 60\nhandler:\n  factor: 2.0\n"},
        serializedFile="mlp.onnx", handler="scorer.py", configFile="model-config.yaml",
    )  # fmt: skip
    put_archive(store, "segments", {"net.onnx": artifact(tmp_path, onnx_models.picture_copy)},
                handler="image_segmenter", serializedFile="net.onnx")  # fmt: skip
    names = json.dumps({"object_type_names": ["ground", "bird"]})
    put_archive(store, "birds", {"net.onnx": artifact(tmp_path, onnx_models.detections), "index_to_name.json": names},
                handler="object_detector", serializedFile="net.onnx")  # fmt: skip
    put_archive(store, "echo", {"entry.py": MODULE}, handler="entry.py:handle", version="2.0")
    put_archive(store, "words", {"words.py": STANDALONE, "words.json": '{"a": 7}'}, handler="words",
                serializedFile="words.json")  # fmt: skip

    report = run(store)

    assert report["system"] == "a TorchServe model store"
    models = ["birds", "birds.network", "colours", "echo", "scorer", "scorer.network", "segments", "words"]
    assert sorted(report["models"]) == models
    assert {each["state"] for each in report["models"].values()} == {"taken"}
    told = dict(report["models"]["scorer"]["told"])
    assert "the served model scorer.network" in told["initialize"]
    assert "runs as it is" in told["preprocess"]
    assert "inherited" in told["inference"]
    assert settings_of(tmp_path, "scorer")["max_batch_rows"] == 4
    assert settings_of(tmp_path, "scorer")["max_queue_delay_ms"] == 20
    assert settings_of(tmp_path, "scorer")["default_timeout_ms"] == 60_000
    with served(tmp_path) as daemon, RawHttp(http_url(daemon)) as http:
        assert http.ask("GET", "/ping").fields == {"status": "Healthy"}
        red = http.ask("PUT", "/predictions/colours", picture("red")).fields
        assert max(red, key=red.get) == "red"
        assert sum(red.values()) == pytest.approx(1.0, abs=1e-5)
        x = floats(1, 16)
        body = json.dumps(x[0].tolist()).encode()
        answer = http.ask("POST", "/predictions/scorer", body, content_type="application/json", x_tag="t")
        np.testing.assert_allclose(answer.fields["scores"], expected(x)[0] * 2 + 0.5, rtol=1e-4, atol=1e-4)
        assert answer.fields["tag"] == "t"
        assert answer.headers["x-batch"] == "1"
        three = floats(3, 16)
        answer = http.ask("POST", "/v1/models/scorer:predict", json.dumps({"instances": three.tolist()}).encode())
        scores = [each["scores"] for each in answer.fields["predictions"]]
        np.testing.assert_allclose(scores, expected(three) * 2 + 0.5, rtol=1e-4, atol=1e-4)
        refused = http.ask("POST", "/predictions/scorer", b"refuse", content_type="text/plain")
        assert (refused.status, refused.fields["message"]) == (418, "not that")
        failed = http.ask("POST", "/predictions/scorer", b'"text"', content_type="application/json")
        assert (failed.status, failed.fields["type"]) == (503, "InternalServerException")
        mask = np.array(http.ask("PUT", "/predictions/segments", picture("lime")).fields)
        assert mask.shape == (8, 8, 2)
        birds = http.ask("PUT", "/predictions/birds", picture("white")).fields
        assert birds == [{"bird": [1.0, 2.0, 3.0, 4.0], "score": 1.0}]
        assert http.ask("POST", "/predictions/echo/2.0", b"x").body == b"1:1:['body']"
        assert http.ask("POST", "/predictions/words", b"a", content_type="application/octet-stream").fields == 7
        for name in ("scorer", "scorer.network"):
            assert http.ask("GET", f"/models/{name}").fields[0]["workers"][0]["status"] == "READY"


def test_each_way_to_pack_an_archive_is_read(run, tmp_path):
    files = {"entry.py": MODULE}
    for count, put in enumerate((put_archive, put_tar, put_folder)):
        folder = tmp_path / put.__name__
        folder.mkdir()
        report = run(put(folder, f"echo{count}", files, handler="entry.py"))
        assert report["models"][f"echo{count}"]["state"] == "taken"
        assert (tmp_path / "models" / f"echo{count}" / "1" / "archive" / "MAR-INF" / "MANIFEST.json").is_file()


@pytest.mark.smoke
def test_two_archives_of_one_model_are_its_versions(run, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for version in ("1.0", "2.0"):
        put_archive(store, "echo", {"entry.py": MODULE}, version, handler="entry.py", archive=f"echo_{version}.mar")
    assert run(store)["models"]["echo"]["state"] == "taken"
    assert sorted(path.name for path in (tmp_path / "models" / "echo").iterdir()) == ["1", "2", "model.toml"]
    assert settings_of(tmp_path, "echo")["versions"] == {"all": True}


def test_a_version_that_is_not_a_whole_number_is_reported(run, tmp_path):
    report = run(put_archive(tmp_path, "echo", {"entry.py": MODULE}, "1.3", handler="entry.py"))
    assert any("version 1.3 is version 1 here" in note for note in report["models"]["echo"]["notes"])


def test_a_model_with_a_network_takes_another_name(run, tmp_path):
    archive = put_archive(tmp_path, "scorer", {"mlp.onnx": artifact(tmp_path, onnx_models.mlp)},
                          handler="base_handler", serializedFile="mlp.onnx")  # fmt: skip
    assert sorted(run(archive, "--name", "other")["models"]) == ["other", "scorer.network"]
    with served(tmp_path) as daemon, RawHttp(http_url(daemon)) as http:
        x = floats(1, 16)
        answer = http.ask("POST", "/v1/models/other:predict", json.dumps({"instances": x.tolist()}).encode())
        assert answer.status == 503  # TorchServe's base_handler takes lists, which no request is
        assert http.ask("POST", "/predictions/scorer.network", x.tobytes()).status == 200


PROPERTIES = """# comment
inference_address=http://0.0.0.0:8080
number_of_netty_threads=32
job_queue_size=1000
load_models=a.mar, second=b.mar
model_store=/home/model-server/model-store
models={\\
  "a": {\\
    "1.0": {"defaultVersion": true, "marName": "a.mar", "minWorkers": 2, "maxWorkers": 4, "batchSize": 8,\\
            "maxBatchDelay": 50, "responseTimeout": 120}\\
  }\\
}
"""


def test_config_properties_say_which_archives_how_and_under_which_name(run, tmp_path):
    place = tmp_path / "server"
    store = place / "model-store"
    store.mkdir(parents=True)
    (place / "config").mkdir()
    (place / "config" / "config.properties").write_text(PROPERTIES)
    for name in ("a", "b", "c"):
        put_archive(store, name, {"entry.py": MODULE}, handler="entry.py")
    report = run(place)
    assert sorted(report["models"]) == ["a", "second"]
    settings = settings_of(tmp_path, "a")
    assert (settings["max_batch_rows"], settings["max_queue_delay_ms"]) == (8, 50)
    assert (settings["default_timeout_ms"], settings["max_queue_rows"]) == (120_000, 1000)
    assert settings_of(tmp_path, "second")["max_batch_rows"] == 1
    notes = "\n".join(report["notes"])
    assert "c.mar" in notes
    assert "--torchserve" in notes
    assert "number_of_netty_threads has no meaning here" in notes
    assert any("minWorkers 2" in note for note in report["models"]["a"]["notes"])


def test_the_packages_that_a_handler_imports_and_requires_are_reported(run, tmp_path):
    text = "import transformers\nimport helper\nfrom ts.context import Context\nimport json\n" + MODULE
    archive = put_archive(
        tmp_path, "echo", {"entry.py": text, "helper.py": "", "requirements.txt": "transformers==4\n"},
        handler="entry.py", requirementsFile="requirements.txt",
    )  # fmt: skip
    model = run(archive)["models"]["echo"]
    assert any("imports transformers: install" in note for note in model["notes"])
    assert "pip install -r" in dict(model["told"])["requirements.txt"]


def test_an_explanation_is_reported_as_left_out(run, tmp_path):
    text = BASE + "\n    def get_insights(self, *args):\n        return []\n"
    files = {"scorer.py": text, "mlp.onnx": artifact(tmp_path, onnx_models.mlp)}
    archive = put_archive(tmp_path, "scorer", files, handler="scorer.py", serializedFile="mlp.onnx")
    assert "never called" in dict(run(archive)["models"]["scorer"]["told"])["get_insights"]


# ---- workflows ------------------------------------------------------------------------------------------------------

UPPER = """
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return None
    texts = [row.get("data") or row.get("body") for row in data]
    texts = [each if isinstance(each, str) else each.decode() for each in texts]
    if "refuse" in texts:
        raise PredictionException("refused", 507)
    return [f"{text.upper()}{context.model_name[-1]}" for text in texts]
"""

CHAIN = "models:\n  max-workers: 4\n  a:\n    url: upper1.mar\n  b:\n    url: upper2.mar\ndag:\n  a: [b]\n"


def test_a_workflow_that_is_a_chain_of_models_is_a_pipeline(run, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for name in ("upper1", "upper2"):
        put_archive(store, name, {"entry.py": UPPER}, handler="entry.py")
    report = run(put_workflow(store, "both", CHAIN))
    assert [each["state"] for each in report["models"].values()] == ["taken"] * 3
    with served(tmp_path) as daemon, RawHttp(http_url(daemon)) as http:
        kind = {"content_type": "text/plain"}
        assert http.ask("POST", "/wfpredict/both", b"word", **kind).body == b"WORD12"
        assert http.ask("POST", "/predictions/both", b"word", **kind).body == b"WORD12"
        refused = http.ask("POST", "/wfpredict/both", b"refuse", **kind)
        assert (refused.status, refused.fields["message"]) == (507, "refused")
        many = http.ask("POST", "/v1/models/both:predict", b'{"instances": [{"data": "a"}, {"data": "b"}]}')
        assert many.fields == {"predictions": ["A12", "B12"]}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (CHAIN.replace("a: [b]", "prepare: [a]\n  a: [b]"), "prepare is a function of the workflow's own handler"),
        (CHAIN.replace("a: [b]", "a: [b, b]"), "leads to 2 nodes"),
        (CHAIN.replace("a: [b]", "a: [b]\n  b: [a]"), "not a chain"),
        (CHAIN.replace("a: [b]", "a: [a]"), "not a chain"),
        (CHAIN.replace("upper2.mar", "https://example.com/upper2.mar"), "nothing is fetched"),
        (CHAIN.replace("upper2.mar", "../upper2.mar"), "is not beside the workflow"),
        (CHAIN.replace("upper2.mar", "absent.mar"), "is not there"),
        (CHAIN.replace("upper2.mar", "picture.mar"), "is served without its handler"),
        ("models: 3\ndag: {}\n", "wanted the tables models and dag"),
        ("[]", "workflow.yaml"),
        ("a: &a [*a]", "alias"),
    ],
)
def test_a_workflow_that_is_not_a_chain_of_models_says_why(run, tmp_path, spec, reason):
    store = tmp_path / "store"
    store.mkdir()
    put_archive(store, "upper1", {"entry.py": UPPER}, handler="entry.py")
    put_archive(store, "upper2", {"entry.py": UPPER}, handler="entry.py")
    put_archive(store, "picture", {"net.onnx": artifact(tmp_path, onnx_models.colours)}, serializedFile="net.onnx")
    put_workflow(store, "both", spec)
    models = run(store, status=1)["models"]
    assert models["both"]["state"] == "refused"
    assert reason in models["both"]["reason"]
    assert models["upper1"]["state"] == "taken"


# ---- hostile archives -----------------------------------------------------------------------------------------------


def bad(tmp_path: Path, make: Callable[[zipfile.ZipFile], None], text: str | None = None) -> Path:
    path = tmp_path / "bad.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        make(opened)
        opened.writestr("MAR-INF/MANIFEST.json", manifest("bad", handler="entry.py") if text is None else text)
    return path


def twice(opened: zipfile.ZipFile, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of zipfile, about this
        for text in ("first", "second"):
            opened.writestr(name, text)


def linked(opened: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("entry.py")
    info.external_attr = 0o120777 << 16
    opened.writestr(info, "/etc/passwd")


@pytest.mark.parametrize(
    ("make", "text", "reason"),
    [
        (lambda mar: mar.writestr("../../outside.py", "x"), None, "leads out"),
        (lambda mar: mar.writestr("/tmp/outside.py", "x"), None, "leads out"),
        (lambda mar: mar.writestr("..\\outside.py", "x"), None, "leads out"),
        (lambda mar: mar.writestr("a/../../outside.py", "x"), None, "leads out"),
        (linked, None, "link or a device"),
        (lambda mar: twice(mar, "entry.py"), None, "'entry.py' twice"),
        (lambda mar: twice(mar, "MAR-INF/OTHER.json"), None, "'OTHER.json' twice"),
        (lambda mar: (mar.writestr("a", "x"), mar.writestr("a/b", "x")), None, "as a file and as a folder"),
        (lambda mar: (mar.writestr("a/b", "x"), mar.writestr("a", "x")), None, "as a file and as a folder"),
        (lambda mar: mar.writestr("/".join(["d"] * 3_000), "x"), None, "cannot be unpacked"),
        (lambda mar: [mar.writestr(f"f{each}", "") for each in range(10_001)], None, "wanted at most 10000"),
        (lambda mar: mar.writestr("bomb", b"\0" * (100 << 20)), None, "unpacks to more"),
        (lambda mar: None, " " * (2 << 20) + "{}", "more than the"),
        (lambda mar: None, "{" * 100_000, "MANIFEST.json"),
        (lambda mar: None, "[]", "MANIFEST.json"),
        (lambda mar: None, None, "is not in the archive"),
        (lambda mar: mar.writestr("entry.py", "(" * 50_000), None, "is not Python 3"),
        (lambda mar: mar.writestr("entry.py", "print 'two'"), None, "is not Python 3"),
        (lambda mar: None, manifest("../up", handler="entry.py"), ""),
        (lambda mar: mar.writestr("entry.py", MODULE), manifest("bad", handler="entry.py", configFile="../x"), ""),
        (lambda mar: mar.writestr("a.onnx", b"no"), manifest("bad", serializedFile="a.onnx"), ""),
        (lambda mar: None, manifest("bad", serializedFile="/etc/passwd"), "leads out"),
    ],
)  # fmt: skip
def test_a_hostile_archive_is_refused_and_leaves_nothing(run, tmp_path, make, text, reason):
    report = run(bad(tmp_path, make, text), status=1)
    (model,) = report["models"].values()
    assert model["state"] == "refused"
    assert reason in model["reason"]
    assert not any((tmp_path / "models").rglob("*"))
    assert not (tmp_path / "outside.py").exists()


@pytest.mark.parametrize("target", [".", "..", "inner", "/etc/passwd", "nowhere", "entry.py"])
def test_links_of_a_folder_stay_inside_and_lead_in_no_circle(run, tmp_path, target):
    """Three links to their own folder are three to the power of forty paths, were they followed."""
    folder = put_folder(tmp_path / "store", "linked", {"entry.py": MODULE, "inner/words.txt": "x"}, handler="entry.py")
    for name in ("a", "b", "c"):
        (folder / name).symlink_to(target)
    model = next(iter(run(folder, status=0 if target in {"inner", "entry.py"} else 1)["models"].values()))
    if model["state"] == "taken":
        assert not [path for path in (tmp_path / "models").rglob("*") if path.is_symlink()]
    else:
        assert "in a circle" in model["reason"] or "leads out" in model["reason"]
        assert not any((tmp_path / "models").rglob("*"))


def test_a_class_with_a_number_beyond_all_classes_is_refused(run, tmp_path):
    files = {
        "net.onnx": artifact(tmp_path, onnx_models.colours),
        "index_to_name.json": '{"000000000999999999999": "x"}',
    }
    model = run(put_archive(tmp_path, "bad", files, serializedFile="net.onnx"), status=1)["models"]["bad"]
    assert "wanted a number below" in model["reason"]


def test_no_name_of_an_archive_becomes_code(run, tmp_path):
    name = """a\"\"\"; open('ran', 'w'); b = \"\"\".mar"""
    archive = put_archive(tmp_path, "echo", {"entry.py": MODULE}, handler="entry.py", archive=name)
    assert run(archive)["models"]["echo"]["state"] == "taken"
    text = (tmp_path / "models" / "echo" / "1" / "model.py").read_text()
    assert [type(node).__name__ for node in ast.parse(text).body] == ["Expr", "ImportFrom", "Assign"]


def test_no_name_of_an_archive_commands_the_terminal(tmp_path, capsys):
    name = "w\x1b]0;title\x07\x9b2J\r.pt"
    files = {"entry.py": BASE, name: b"x"}
    archive = put_archive(tmp_path, "echo", files, handler="entry.py", serializedFile=name)
    assert main(["import", str(archive), "--models", str(tmp_path / "models")]) == 0
    printed = "".join(capsys.readouterr())
    assert "\\x1b]0;title\\x07\\x9b2J\\x0d.pt" in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b", "\r"}


def test_a_damaged_archive_is_refused(run, tmp_path):
    archive = put_archive(tmp_path, "echo", {"entry.py": MODULE * 20}, handler="entry.py")
    data = bytearray(archive.read_bytes())
    data[60:90] = bytes(30)
    archive.write_bytes(data)
    assert "cannot be unpacked" in run(archive, status=1)["models"]["echo"]["reason"]


def test_a_pickle_is_never_opened(run, tmp_path):
    files = {"entry.py": BASE, "weights.pt": b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."}
    archive = put_archive(tmp_path, "bad", files, handler="entry.py", serializedFile="weights.pt")
    model = run(archive)["models"]["bad"]
    assert "needs torch beside the daemon" in dict(model["told"])["weights.pt"]
    assert not (tmp_path / "ran").exists()
