"""Pictures on the command line, against a real daemon: asked, drawn, tried, shown, and read once by `--as`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from edge_runtime.cli.main import main
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.extras import install_advice
from tests.contract.running_daemon import online_daemon, put_model
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

IMAGE = '[input.image]\nrange = "0..1"\n'
TOMLS = {
    "colours": IMAGE + '[output.scores]\nlabels = "labels.txt"\ntop_k = 2\n',
    "pets": IMAGE + '[output.boxes]\nlayout = "yolov8"\nlabels = "labels.txt"\n',
    "areas": IMAGE + 'fit = "letterbox"\n[output.copy]\nanswer = "mask"\nlabels = "labels.txt"\n',
    "silent": "",
    "bare": IMAGE,
    "line": "",
    "export": "",
    "terms": '[output.y]\nlabels = ["a", "b", "c", "d"]\ntop_k = 2\n',
    "echo": "",
}
FOUND = '[[step]]\nname = "find"\nmodel = "pets"\ninputs = {image = "input.photo"}\n'
EACH = (
    '[[step]]\nname = "each"\nmodel = "colours"\ninputs = {image = "find.boxes"}\n'
    'crop = {picture = "input.photo", box = "find.boxes"}\n'
)
PIPELINES = {
    "seen": f'{FOUND}[output]\nthings = "find.boxes"\nsize = "find.picture_size"\n',
    "parts": f'{FOUND}{EACH}[output]\ncolours = "each.scores"\n',
    "both": f'{FOUND}{EACH}[output]\nthings = "find.boxes"\ncolours = "each.scores"\n',
}


def told_by_its_file(folder: Path) -> None:
    """A detector with the metadata of Ultralytics' exports."""
    path = onnx_models.detector(folder)
    model = onnx.load(path)
    told = {"stride": "32", "task": "detect", "imgsz": "[8, 8]", "names": "{0: 'cat', 1: 'dog'}"}
    onnx.helper.set_model_props(model, told)
    onnx.save(model, path)


MAKERS = {
    "export": told_by_its_file,
    "line": lambda folder: onnx_models.picture_copy(folder, ("rows", 64)),
    "pets": onnx_models.detector,
    "areas": onnx_models.picture_copy,
    "terms": onnx_models.mlp,
    "echo": onnx_models.text_copy,
}

Run = Callable[..., str]

pytestmark = needs_mosquitto


@pytest.fixture(scope="module")
def daemon(broker, tmp_path_factory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    for name, toml in TOMLS.items():
        put_model(models, name, MAKERS.get(name, onnx_models.colours), toml=toml)
        (models / name / "labels.txt").write_text("cat\ndog\n" if name == "pets" else "red\ngreen\nblue\n")
    for name, text in PIPELINES.items():
        (models / name).mkdir()
        (models / name / "pipeline.toml").write_text(text)
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with online_daemon(models, tmp_path_factory.mktemp("run"), f"{broker.url}/dev1", **doors) as daemon:
        yield daemon


@pytest.fixture
def run(daemon, monkeypatch, capsys) -> Run:
    """Run a command line; what it printed, or complained of where it is to end so."""
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", daemon.endpoints[1])

    def run(*words: object, status: int = 0, error: bool = False) -> str:
        ended = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert ended == status, err
        assert "Traceback" not in err
        return err if error else out

    return run


@pytest.fixture
def photo(tmp_path) -> Path:
    return save(tmp_path / "photo.png", "red")


def save(path: Path, colour: str, size: tuple[int, int] = (64, 48)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


# ---- infer ----------------------------------------------------------------------------------------------------------


def test_a_picture_is_answered_with_labels_and_scores(run, photo):
    shown = run("infer", "colours", photo)
    assert "64 x 48, stretch, rgb" in shown
    assert "  red    1.0000\n  green  0.0000\n" in shown
    assert "picture_size" not in shown


def test_boxes_are_reported_in_the_pixels_of_the_picture(run, photo):
    shown = run("infer", "pets", photo)
    assert "  cat  0.9000  [16.0, 12.0, 48.0, 36.0]\n  dog  0.5000  [8.0, 6.0, 24.0, 18.0]\n" in shown
    told = json.loads(run("infer", "pets", photo, "--json"))
    assert told["picture"] == {"width": 64, "height": 48, "fit": "stretch", "color": "rgb"}
    assert told["boxes"][0] == {"label": "cat", "index": 0, "score": 0.9, "box": [16.0, 12.0, 48.0, 36.0]}
    assert "outputs" not in told
    assert told["latency_ms"]["p50"] > 0


@pytest.mark.parametrize("words", [["PHOTO"], ["--input", "photo=PHOTO"], ["--input", "PHOTO"]])
def test_a_pipeline_takes_a_picture_as_a_model_does_and_answers_with_labels(run, photo, words):
    shown = run("infer", "seen", *[word.replace("PHOTO", str(photo)) for word in words])
    assert "  cat  0.9000  [16.0, 12.0, 48.0, 36.0]\n  dog  0.5000  [8.0, 6.0, 24.0, 18.0]\n" in shown
    assert "size  INT64 [1, 2]" in shown


@pytest.mark.parametrize("door", ["zmq", "http", "grpc", "mqtt"])
def test_a_pipelines_answer_is_reported_alike_by_every_door(run, daemon, broker, photo, door):
    here = {"zmq": daemon.endpoints[1], "mqtt": f"{broker.url}/dev1"}
    url = here.get(door) or daemon.doors[door].endpoints[0]
    told = json.loads(run("infer", "seen", photo, "--json", "--connect", url))
    assert [each["label"] for each in told["boxes"]] == ["cat", "dog"]
    assert [each["name"] for each in told["outputs"]] == ["size"]
    parts = json.loads(run("infer", "parts", photo, "--json", "--connect", url))
    assert [each["classes"][0]["label"] for each in parts["answers"]] == ["red", "red"]
    both = json.loads(run("infer", "both", photo, "--json", "--connect", url))
    assert [each["label"] for each in both["boxes"]] == ["cat", "dog"]
    assert [(each["name"], each["shape"]) for each in both["outputs"]] == [("colours", [2, 2, 2])]
    assert "picture" in run("models", "show", "seen", "--connect", url)


def test_each_item_of_each_of_several_pictures_is_listed(run, tmp_path):
    for name, colour in (("a.png", "red"), ("b.png", "lime")):
        save(tmp_path / name, colour)
    lines = run("infer", "parts", tmp_path).splitlines()
    assert [line.split("  ")[1] for line in lines[:2]] == ["red 1.00; red 1.00", "green 1.00; green 1.00"]


def test_a_picture_is_never_made_up_for_a_pipeline(run):
    for verb in ("infer", "bench"):
        said = run(verb, "seen", *(["--random"] if verb == "infer" else []), status=2, error=True)
        assert "input 'photo' takes a picture, which is not made up; wanted --input photo=FILE" in said


def test_a_pipelines_boxes_are_drawn_and_items_that_lie_nowhere_are_not(run, photo, tmp_path):
    run("infer", "seen", photo, "--draw", tmp_path / "out.png")
    assert (pixels(tmp_path / "out.png") != pixels(photo)).any()
    said = run("infer", "parts", photo, "--draw", tmp_path / "no.png", status=1, error=True)
    assert "add the boxes that they were cut out by to its [output]" in said
    assert "cat  0.9000" in run("models", "try", "seen", photo)


def test_a_model_of_tensors_that_declares_labels_answers_with_them(run, tmp_path):
    shown = run("infer", "terms", "--zeros")
    assert shown.startswith("terms version 1\n  a  0.2500\n  b  0.2500\ntook ")
    assert "row 2\n  a  0.2500" in run("infer", "terms", "--zeros", "--rows", 2)
    many = run("infer", "terms", "--zeros", "--rows", 30)
    assert "row 20\n" in many
    assert "row 21\n" not in many
    assert "and 10 rows more; --json has them all" in many
    assert "y  FP32 [1, 4]" in run("infer", "terms", "--zeros", "--raw")
    assert "y  FP32 [1, 4]" in run("infer", "terms", "--zeros", "--output", tmp_path / "y.npy")
    assert np.load(tmp_path / "y.npy").shape == (1, 4)


def test_a_bare_argument_is_text_for_a_model_that_takes_it(run, tmp_path, photo):
    assert "['great film']" in run("infer", "echo", "great film")
    assert "['good', 'bad']" in run("infer", "echo", "good", "bad")
    assert "['great film']" in run("infer", "echo", "--input", "x=@great film")
    (tmp_path / "note.txt").write_text("inside")
    assert "is sent as text" in run("infer", "echo", tmp_path / "note.txt", error=True)
    # A picture goes as its bytes, which are not UTF-8.
    assert "UTF-8" in run("infer", "echo", photo, status=1, error=True)


@pytest.mark.parametrize(
    ("model", "text", "shown"),
    [
        ("echo", '["a", "b"]', "['a', 'b']"),
        ("echo", '"a b"', "['a b']"),
        ("echo", "good film\n\nbad film\n", "['good film', 'bad film']"),
        ("terms", "[" + "0," * 15 + "0]", "a  0.2500"),
        ("terms", "0 0 0 0 0 0 0 0\n0,0,0,0 0,0 0 0\n".replace("\n", " ") + "\n", "a  0.2500"),
        ("terms", ("0 " * 16 + "\n") * 2, "row 2"),
        ("terms", ("[" + "0," * 15 + "0]\n") * 2, "row 2"),
        ("terms", '{"x": [[' + "0," * 15 + "0]]}", "a  0.2500"),
    ],
)
def test_stdin_may_have_bare_values(run, monkeypatch, model, text, shown):
    for name in ("-", "x=-"):
        if name == "-" or not text.startswith("{"):
            monkeypatch.setattr(sys, "stdin", io.StringIO(text))
            assert shown in run("infer", model, "--input", name)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "stdin is empty"), (" \n", "stdin is empty"), ("good film", "wanted JSON, or numbers, a row a line")],
)
def test_input_from_stdin_that_cannot_be_read_is_reported(run, monkeypatch, text, said):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert said in run("infer", "terms", "--input", "-", status=2, error=True)


def test_raw_shows_the_bare_outputs(run, photo):
    told = json.loads(run("infer", "colours", photo, "--raw", "--json"))
    assert [(each["name"], each["data"]) for each in told["outputs"]] == [("scores", [1.0, 0.0, 0.0])]
    assert "classes" not in told


def test_outputs_that_are_not_an_answer_are_shown_beside_how_the_picture_was_read(run, photo):
    shown = run("infer", "bare", photo)
    assert "64 x 48, stretch, rgb" in shown
    assert "scores  FP32 [1, 3]" in shown


def test_options_may_stand_before_and_between_pictures(run, photo):
    assert run("infer", "pets", "--raw", photo) != run("infer", "pets", photo)
    assert "2 pictures" in run("infer", "--timeout-ms", 9000, "pets", photo, "--priority", 1, photo)


def test_a_folder_is_answered_a_line_a_picture(run, tmp_path):
    for name, colour in (("b.jpg", "lime"), ("a.png", "red"), ("c.webp", "blue")):
        save(tmp_path / name, colour)
    (tmp_path / "notes.txt").write_text("no picture")
    lines = run("infer", "colours", tmp_path).splitlines()
    assert [line.split("  ")[1].split()[0] for line in lines[:3]] == ["red", "green", "blue"]
    assert [Path(line.split("  ")[0]).name for line in lines[:3]] == ["a.png", "b.jpg", "c.webp"]
    assert lines[3].startswith("3 pictures, ")


def test_a_bad_file_among_others_is_reported_and_the_others_are_answered(run, tmp_path):
    save(tmp_path / "a.png", "red")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "c.png").write_text("no picture")
    told = json.loads(run("infer", "colours", tmp_path, "--json", status=1))
    assert told["failed"] == 2
    assert told["answers"][0]["classes"][0]["label"] == "red"
    assert [each["error"]["code"] for each in told["answers"][1:]] == ["decode_failed", "tensor_mismatch"]
    assert "c.png is not a picture" in told["answers"][2]["error"]["message"]


def test_progress_is_shown_where_answers_take_long(run, tmp_path, monkeypatch):
    for name in "abc":
        save(tmp_path / f"{name}.png", "red")
    monkeypatch.setattr("edge_runtime.cli.answers.PROGRESS_AFTER_S", -1)
    assert "asking with 3 pictures …" in run("infer", "colours", tmp_path, "--json", error=True)


@pytest.mark.parametrize("door", ["http", "grpc", "mqtt"])
def test_pictures_are_answered_alike_by_every_door(run, daemon, broker, photo, door):
    url = f"{broker.url}/dev1" if door == "mqtt" else daemon.doors[door].endpoints[0]
    told = json.loads(run("infer", "pets", photo, "--json", "--connect", url))
    here = json.loads(run("infer", "pets", photo, "--json"))
    assert told["boxes"] == here["boxes"]
    assert "letterbox" in run("models", "show", "areas", "--connect", url)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["silent", "PHOTO"], 1, '[input.image]\nrange = "0..1"'),
        (["silent", "PHOTO"], 1, "--as range=0..1,fit=stretch"),
        (["silent", "--input", "image=PHOTO"], 1, "say it once: infer MODEL"),
        (["colours", "FOLDER"], 1, "there is no picture in this folder; wanted .jpg, .jpeg, .png"),
        (["colours", "away.jpg"], 2, "away.jpg: there is no such file or folder"),
        (["colours", "NOTES"], 1, "notes.txt is not a picture; wanted a JPEG"),
        (["colours", "PHOTO", "--as", "range=0..1"], 2, "declares how it reads pictures"),
        (["colours", "PHOTO", "PHOTO", "--repeat", "2"], 2, "--repeat is for one picture; there are 2"),
        (["colours", "PHOTO", "PHOTO", "--draw", "out.png"], 2, "wanted a folder for several pictures"),
        (["colours", "PHOTO", "--draw", "out.tiff"], 2, "ends in one of .jpg"),
        (["colours", "PHOTO", "--draw", "FOLDER/.."], 2, "is the picture itself"),
        (["bare", "PHOTO", "--raw", "--draw", "out"], 2, "which --raw and --as do not give"),
        (["colours", "--draw", "out"], 2, "--draw is for pictures"),
        (["echo", "a", "--draw", "out"], 2, "--draw is for pictures"),
        (["colours", "image=PHOTO"], 2, "or --input image="),
        (["terms", "x=PHOTO"], 2, "--input x="),
        (["terms", "great film"], 2, "takes neither pictures nor text; it has the inputs x FP32 [?, 16]"),
        (["echo"], 2, "the model wants a TEXT, or --input x=FILE"),
        (["echo", "--input", "great film"], 2, "a value itself is written @TEXT or @JSON"),
        ([], 2, "the following arguments are required: MODEL\n"),
        (["terms", "--zeros", "--timeout-ms", "soon"], 2, "argument --timeout-ms: got 'soon', wanted a number"),
        (
            ["terms", "--zeros", "--timeout-ms", "-1"],
            2,
            "argument --timeout-ms: got -1, wanted milliseconds, 0 or more",
        ),
        (["terms", "--zeros", "--version", "9"], 1, "'terms' version 9 is not found; there are: 1\n"),
        (["terms", "--input", '@["a"]'], 1, "text values, the model wants FP32"),
        (["silent", "PHOTO", "--as", "rnge=0..1"], 2, "did you mean 'range'?"),
        (["silent", "PHOTO", "--as", "0..1"], 2, "wanted KEY=VALUE"),
        (["silent", "PHOTO", "--as", "fit=round"], 2, "round"),
        (["silent", "PHOTO", "--as", "fit=crop"], 2, "say what its FP32 numbers mean"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_what_to_do(run, photo, tmp_path, words, status, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no picture")
    places = {"PHOTO": str(photo), "FOLDER": str(tmp_path / "empty"), "NOTES": str(tmp_path / "notes.txt")}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert said in run("infer", *words, status=status, error=True)


def test_load_is_made_of_a_picture(run, photo):
    words = ["--input", f"image={photo}", "--seconds", "0.2", "--in-flight", "2", "--warmup", "0"]
    told = json.loads(run("bench", "pets", *words, "--json"))["runs"][0]
    assert told["answered"] > 0
    assert not told["refused"]


# ---- --as -----------------------------------------------------------------------------------------------------------


def test_steps_said_once_are_the_declared_ones(run, photo):
    declared = json.loads(run("infer", "colours", photo, "--raw", "--json"))
    once = json.loads(run("infer", "silent", photo, "--as", "range=0..1,fit=stretch", "--json"))
    assert once["outputs"] == declared["outputs"]
    told = run("infer", "silent", photo, "--as", "mean=127.5,0,0,scale=0.01", error=True)
    assert "64 x 48, stretch into 8 x 8" in told
    assert "(pixel - [127.5, 0, 0]) * 0.01" in told


def test_gray_pixels_in_one_line_are_read_once_too(run, photo):
    told = json.loads(run("infer", "line", photo, "--as", "range=0..1,color=gray,size=8,8", "--json"))
    assert told["outputs"][0]["shape"] == [1, 64]
    assert {round(value, 2) for value in told["outputs"][0]["data"]} == {0.3}


# ---- drawn ----------------------------------------------------------------------------------------------------------


def test_a_drawn_copy_has_the_boxes_where_they_are(run, tmp_path):
    photo = save(tmp_path / "photo.png", "white", (640, 480))
    shown = run("infer", "pets", photo, "--draw", tmp_path / "out")
    assert f"saved {tmp_path / 'out' / 'photo.png'}" in shown
    drawn = pixels(tmp_path / "out" / "photo.png")
    assert drawn.shape == (480, 640, 3)
    assert (drawn[240, 160] != 255).any()  # the left side of the cat
    assert (drawn[240, 320] == 255).all()  # its middle
    assert (drawn[400, 600] == 255).all()
    assert (pixels(photo) == 255).all()


def test_copies_of_a_folder_keep_their_names(run, tmp_path):
    for name in ("a.jpg", "b.gif"):
        save(tmp_path / name, "red")
    run("infer", "colours", tmp_path, "--draw", tmp_path / "out")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["a.jpg", "b.gif.png"]


def test_a_mask_tints_the_part_of_the_picture_that_it_means(run, tmp_path):
    """Wider than high, so that the model sees it letterboxed: the mask's rows of fill are not in the picture."""
    picture = Image.new("RGB", (80, 40), "blue")
    picture.paste("red", (0, 0, 40, 40))
    picture.save(tmp_path / "photo.png")
    shown = run("infer", "areas", tmp_path / "photo.png", "--draw", tmp_path / "drawn.png")
    assert "blue  25.0% of 8 x 8" in shown
    drawn = pixels(tmp_path / "drawn.png")
    assert (drawn[35, 10] == (255, 0, 0)).all()  # class 0 is what is left alone
    assert (drawn[35, 70] != (0, 0, 255)).any()


def test_a_picture_that_lies_on_its_side_is_drawn_upright(run, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (64, 48), "white").save(tmp_path / "photo.jpg", exif=exif)
    told = json.loads(run("infer", "pets", tmp_path / "photo.jpg", "--draw", tmp_path / "out.png", "--json"))
    assert (told["picture"]["width"], told["picture"]["height"]) == (48, 64)
    assert pixels(tmp_path / "out.png").shape == (64, 48, 3)


def test_drawing_without_pillow_says_what_to_install(run, photo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    said = run("infer", "colours", photo, "--draw", tmp_path / "out", status=1, error=True)
    assert f"--draw needs Pillow, which is not here; {install_advice('pictures')}" in said
    said = run("infer", "silent", photo, "--as", "range=0..1", status=1, error=True)
    assert f"--as needs Pillow, which is not here; {install_advice('pictures')}" in said


# ---- models show, models try ----------------------------------------------------------------------------------------


def test_show_reports_how_a_picture_becomes_the_tensor_and_what_outputs_answer(run):
    shown = " ".join(run("models", "show", "pets").split())
    assert "image: a picture or frames in place of the tensor" in shown
    assert "fit stretch into 8 x 8" in shown
    assert "numbers range 0..1" in shown
    assert "boxes: answers boxes layout yolov8" in shown
    assert "threshold 0.25 overlap 0.45 labels 2: cat, dog" in shown
    assert json.loads(run("models", "show", "pets", "--json"))["steps"]["outputs"]["boxes"]["layout"] == "yolov8"
    assert "answers" not in run("models", "show", "silent")


@pytest.mark.parametrize("door", ["zmq", "http", "grpc"])
def test_a_preset_that_the_models_file_names_is_offered(run, daemon, photo, door):
    url = daemon.endpoints[1] if door == "zmq" else daemon.doors[door].endpoints[0]
    assert 'once its model.toml says: preset = "ultralytics"' in run("models", "show", "export", "--connect", url)
    told = run("infer", "export", photo, "--connect", url, status=1, error=True)
    assert '\npreset = "ultralytics"\n' in told


def test_try_asks_with_a_picture_and_draws_the_answer(run, tmp_path):
    photo = save(tmp_path / "photo.png", "white", (640, 480))
    shown = run("models", "try", "pets", photo, "--save", tmp_path / "out.jpg")
    assert "cat  0.9000" in shown
    assert f"saved {tmp_path / 'out.jpg'}" in shown
    assert Image.open(io.BytesIO((tmp_path / "out.jpg").read_bytes())).size == (640, 480)
    told = json.loads(run("models", "try", "pets", photo, "--json"))
    assert (told["boxes"][0]["label"], told["saved"]) == ("cat", [])
    assert '[input.image]\nrange = "0..1"' in run("models", "try", "silent", photo, status=1, error=True)
