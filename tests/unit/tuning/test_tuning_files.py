"""Files that a tune reads and writes: model.toml, inputs and labels, its journal, its picture."""

from __future__ import annotations

import contextlib
import io
import os
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError, TensorMismatch
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import ModelSteps
from edge_runtime.tuning.applying import with_choice
from edge_runtime.tuning.candidates import Candidate, Way
from edge_runtime.tuning.comparison import compare
from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.picture import draw, line_of
from edge_runtime.tuning.results import FullMeasurement, KeptResults, QuickLook, RateProbe
from edge_runtime.tuning.samples import MAX_INPUTS, make_samples, read_labels, read_samples
from edge_runtime.tuning.trial import read_arrays, write_arrays
from edge_runtime.typed_toml import build, parse_toml

CHOICE = {"backend": "openvino", "precision": "int8", "threads": 1, "max_batch_rows": None}

OWNERS = """\
# Our line 3 camera; ask Ada before changing.
priority = 2   # before the others
threads = 4    # from the old board
max_batch_rows = 8

[warmup]       # three runs
runs = 3
threads_note = "no key of ours"
"""


# ---- model.toml -----------------------------------------------------------------------------------------------------


def test_a_choice_is_added_and_the_owners_words_stay() -> None:
    text = with_choice(OWNERS, CHOICE, ["because it is quick"], "model.toml")
    assert text == (
        "# Our line 3 camera; ask Ada before changing.\n"
        "priority = 2   # before the others\n"
        "# before tune: threads = 4    # from the old board\n"
        "# before tune: max_batch_rows = 8\n"
        "\n"
        "# tune: because it is quick\n"
        'backend = "openvino"\n'
        'precision = "int8"\n'
        "threads = 1\n"
        "\n"
        "[warmup]       # three runs\n"
        "runs = 3\n"
        'threads_note = "no key of ours"\n'
    )


def test_a_second_tune_takes_the_place_of_the_first() -> None:
    once = with_choice(OWNERS, CHOICE, ["first"], "model.toml")
    twice = with_choice(once, {**CHOICE, "precision": "f32"}, ["second"], "model.toml")
    assert twice.count("# tune:") == 1
    assert twice.count("# before tune: threads = 4") == 1
    assert parse_toml(twice, "x")["precision"] == "f32"
    assert "Ask Ada".lower() in twice.lower()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[language]\n# tune: why\nprefill_tokens = 64\n"),
        ("threads = 1\n", "threads = 1\n\n[language]\n# tune: why\nprefill_tokens = 64\n"),
        (
            "[language]  # ours\nmax_streams = 4\nprefill_tokens = 512\n\n[limits]\nrun_limit_ms = 9\n",
            (
                "[language]  # ours\nmax_streams = 4\n# before tune: prefill_tokens = 512\n\n# tune: why\n"
                "prefill_tokens = 64\n\n[limits]\nrun_limit_ms = 9\n"
            ),
        ),
        (
            "[language]\n# tune: once\nprefill_tokens = 16\n",
            "[language]\n# tune: why\nprefill_tokens = 64\n",
        ),
    ],
)
def test_keys_of_a_table_are_written_into_that_table_and_all_else_stays(before: str, after: str) -> None:
    assert with_choice(before, {"prefill_tokens": 64}, ["why"], "model.toml", "language") == after


@pytest.mark.parametrize(
    "text", ["language = {max_streams = 4}\n", "[language.more]\na = 1\n[language]\nb = [\n1,\n]\n"]
)
def test_a_table_that_lines_cannot_show_is_left_as_it_is(text: str) -> None:
    with pytest.raises(ConfigError, match="write into it yourself: prefill_tokens = 64"):
        with_choice(
            text.replace("b = [\n1,\n]", "prefill_tokens = [\n1,\n]"), {"prefill_tokens": 64}, [], "x", "language"
        )


def test_settings_out_of_nothing_are_the_choice_alone() -> None:
    text = with_choice("", CHOICE, [], "model.toml")
    assert build(ModelSettings, parse_toml(text, "x"), "x") == ModelSettings(
        backend="openvino", precision="int8", threads=1
    )


@pytest.mark.parametrize(
    "text",
    [
        'note = """\nthreads = 4\n"""\n',
        "preferred_batch_rows = [\n  1,\n]\nthreads = 4\n" + 'note = """\nbackend = "x"\n"""',
        "threads = [\n 1,\n]\n",
    ],
)
def test_a_text_that_a_line_cannot_hold_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be changed without losing something; .*backend = \"openvino\""):
        with_choice(text, CHOICE, [], "model.toml")


def test_a_text_that_is_not_toml_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.toml:1"):
        with_choice("threads = ", CHOICE, [], "model.toml")


KEYS = st.sampled_from(["threads", "backend", "priority", "pinned", "instances"])
LINES = st.lists(
    st.one_of(
        st.sampled_from(["", "# a comment", "  # indented", "#threads = 3"]),
        st.tuples(KEYS, st.integers(1, 9)).map(lambda pair: f"{pair[0]} = {pair[1]}  # why"),
    )
)


@given(LINES, st.sampled_from(["", "[warmup]\nruns = 2  # two\n", '[options]\nthreads = "7"\n']))
def test_every_line_of_the_owner_stays_but_for_the_keys_that_are_chosen(lines: list[str], table: str) -> None:
    keys = [line.split(" = ")[0] for line in lines if " = " in line and not line.startswith("#")]
    if len(set(keys)) != len(keys):
        return
    text = "\n".join([*lines, table])
    changed = with_choice(text, CHOICE, ["why"], "model.toml")
    before, after = parse_toml(text, "x"), parse_toml(changed, "x")
    assert {key: value for key, value in before.items() if key not in CHOICE}.items() <= after.items()
    assert (after["backend"], after["threads"]) == ("openvino", 1)
    assert changed.count("# a comment") == text.count("# a comment")
    assert with_choice(changed, CHOICE, ["why"], "model.toml").count("# tune:") == 1


# ---- inputs ---------------------------------------------------------------------------------------------------------

ONE = ModelSpec((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 2)),))
TWO = ModelSpec((TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "INT64", (-1,))), ())


def read(path: Path, spec: ModelSpec = ONE, labels: Path | None = None) -> list[dict[str, np.ndarray]]:
    return [dict(sample) for sample in read_samples(path, spec, labels, lambda _: None).inputs]


def test_rows_of_files_are_inputs_in_the_order_of_their_names(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.full((2, 4), 2, np.float32))
    np.save(tmp_path / "a.npy", np.full(4, 1, np.uint8))
    (tmp_path / "c.json").write_text("[[3, 3, 3, 3]]")
    (tmp_path / "notes.txt").write_text("not an input")
    found = read(tmp_path)
    assert [sample["x"][0, 0] for sample in found] == [1, 2, 2, 3]
    assert all(sample["x"].shape == (1, 4) and sample["x"].dtype == np.float32 for sample in found)


def test_a_model_of_several_inputs_is_given_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.ones((3, 2), np.float32), b=np.arange(3))
    (tmp_path / "b.json").write_text('{"a": [[5, 5]], "b": [7]}')
    found = read(tmp_path, TWO)
    assert [(sample["a"].shape, int(sample["b"][0])) for sample in found] == [((1, 2), b) for b in (0, 1, 2, 7)]


def test_an_archive_that_is_damaged_in_its_stream_is_refused(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(400, dtype=np.float32).reshape(100, 4))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", array.getvalue())
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[60:80] = bytes(20)
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(TensorMismatch, match=r"x\.npz is not a \.npz"):
        read(tmp_path)


def test_text_where_the_model_wants_numbers_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((2, 4), b"1"))
    with pytest.raises(TensorMismatch, match=r"x\.npy: is \|S1; input 'x' wants FP32"):
        read(tmp_path)


def test_a_sample_that_calibrates_does_not_judge() -> None:
    samples = make_samples(ONE, 1, {}, batches=True)
    judging, calibrating = samples.judging.inputs, samples.calibrating
    assert len(judging) + len(calibrating) == len(samples.inputs)
    taken = {sample["x"].tobytes() for sample in calibrating}
    assert not any(sample["x"].tobytes() in taken for sample in judging)


def test_labels_stay_with_their_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.float32).reshape(10, 4))
    (tmp_path / "labels.txt").write_text("".join(f"file{n},{n}\n" for n in range(10)))
    samples = read_samples(tmp_path, ONE, tmp_path / "labels.txt", lambda _: None).judging
    assert samples.labels is not None
    assert [int(sample["x"][0, 0]) // 4 for sample in samples.inputs] == list(samples.labels)


def test_more_inputs_than_are_used_are_cut_and_said(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((MAX_INPUTS + 5, 4), np.float32))
    np.save(tmp_path / "labels.npy", np.zeros(MAX_INPUTS + 5, np.int64))
    notes: list[str] = []
    samples = read_samples(tmp_path / "x.npy", ONE, tmp_path / "labels.npy", notes.append)
    assert (len(samples.inputs), len(samples.labels or ())) == (MAX_INPUTS, MAX_INPUTS)
    assert notes == [f"{tmp_path / 'x.npy'}: the first {MAX_INPUTS} inputs are used"]


def npy(header: str, data: bytes = b"") -> bytes:
    """An .npy file by hand."""
    return b"\x93NUMPY\x01\x00\x76\x00" + header.encode().ljust(117) + b"\n" + data


PICKLE = b"cos\nsystem\n(S'touch /tmp/was-here'\ntR."
"""Runs a command when it is unpickled."""


HOSTILE = {
    "truncated.npy": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'"),
    "pickle.npy": lambda path: path.write_bytes(
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", PICKLE)
    ),
    "huge.npy": lambda path: path.write_bytes(
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 4), }")
    ),
    "shape.npy": lambda path: np.save(path, np.zeros((3, 5), np.float32)),
    "text.npy": lambda path: path.write_text("hello"),
    "nothing.npy": lambda path: path.write_bytes(b""),
    "deep.json": lambda path: path.write_text("[" * 100_000),
    "broken.json": lambda path: path.write_text('{"x": '),
    "words.json": lambda path: path.write_text('["a", "b", "c", "d"]'),
    "notzip.npz": lambda path: path.write_bytes(b"PK\x03\x04 nothing"),
    "other.npz": lambda path: np.savez(path, z=np.zeros(4, np.float32)),
    "folder.npy": lambda path: path.mkdir(),
    "pipe.npy": os.mkfifo,
    "dangling.npy": lambda path: path.symlink_to("/nowhere/at/all"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_broken_input_is_named_and_nothing_runs(tmp_path: Path, name: str) -> None:
    HOSTILE[name](tmp_path / name)
    with pytest.raises(TensorMismatch, match=name.partition(".")[0]):
        read(tmp_path)


@pytest.mark.long
def test_an_archive_that_unpacks_to_more_than_a_gigabyte_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(1100):
            member.write(bytes(1 << 20))
    with pytest.raises(TensorMismatch, match="unpacks to more than"):
        read(tmp_path)


@pytest.mark.parametrize("content", ["1\ntwo\n", "\x00", "1.5\n"])
def test_labels_that_are_not_whole_numbers_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.txt").write_text(content)
    with pytest.raises(TensorMismatch, match=r"labels\.txt: is not a list of labels"):
        read_labels(tmp_path / "labels.txt")


def test_another_number_of_labels_than_inputs_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4), np.float32))
    (tmp_path / "labels.txt").write_text("1\n2\n")
    with pytest.raises(TensorMismatch, match="has 2 labels for 3 inputs"):
        read(tmp_path / "x.npy", labels=tmp_path / "labels.txt")


def test_a_file_that_is_not_there_is_distinguished_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TensorMismatch, match=r"gone\.npy: is not there"):
        read_samples(tmp_path / "gone.npy", ONE, None, lambda _: None)


def test_a_user_who_judges_by_pictures_learns_how_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.pgm").write_bytes(b"P5 2 2 255\n\x00\x01\x02\xff")
    notes: list[str] = []
    spec = ModelSpec((TensorSpec("image", "FP32", (-1, 1, 2, 2)),), ())
    with contextlib.suppress(TensorMismatch):  # that Pillow is not installed
        read_samples(tmp_path, spec, None, notes.append)
    assert any("pixels / 255" in note for note in notes)


def test_pictures_are_read_as_the_model_declares_them(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (9, 5), (255, 0, 51)).save(tmp_path / "a.webp")
    notes: list[str] = []
    spec = ModelSpec((TensorSpec("image", "FP32", (-1, 3, 2, 2)),), ())
    steps = ModelSteps({"image": PictureSteps(range="-1..1", color="bgr")})
    (sample,) = read_samples(tmp_path, spec, None, notes.append, steps).inputs
    assert [round(float(value), 1) for value in sample["image"][0, :, 0, 0]] == [-0.6, -1.0, 1.0]
    assert notes == []


def test_a_declared_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "a.png").write_bytes(b"no picture")
    spec = ModelSpec((TensorSpec("image", "FP32", (-1, 3, 2, 2)),), ())
    with pytest.raises(TensorMismatch, match=r"a\.png: no picture can be read"):
        read_samples(tmp_path, spec, None, lambda _: None, ModelSteps({"image": PictureSteps(range="0..1")}))


def test_an_empty_folder_holds_no_data(tmp_path: Path) -> None:
    with pytest.raises(TensorMismatch, match="holds no inputs"):
        read(tmp_path)


def test_runs_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    runs = [{"x": np.arange(3.0), "t": np.array([b"ab", b"c"], dtype=object)}, {"x": np.zeros((0, 2))}]
    assert write_arrays(tmp_path / "runs.npz", runs) == 2
    back = read_arrays(tmp_path / "runs.npz")
    assert [{name: array.tolist() for name, array in run.items()} for run in back] == [
        {name: array.tolist() for name, array in run.items()} for run in runs
    ]


# ---- comparison -----------------------------------------------------------------------------------------------------

SCORES = {"scores": "FP32"}


def runs(*rows: list[float]) -> list[dict[str, np.ndarray]]:
    return [{"scores": np.array([row], np.float32)} for row in rows]


def test_agreement_and_labels_are_counted_by_the_highest_score() -> None:
    reference, got = runs([0, 1], [1, 0], [0, 1], [1, 0]), runs([0, 1], [1, 0], [0, 1], [0, 1])
    found = compare(SCORES, reference, got, labels=[1, 0, 1, 1])
    assert (found.inputs, found.agreement, found.correct, found.reference_correct) == (4, 0.75, 1.0, 0.75)
    assert (found.max_error, found.drop) == (1.0, 0.0)


def test_errors_are_relative_to_the_largest_value_of_the_output() -> None:
    found = compare({"y": "FP32"}, [{"y": np.array([10.0, 0.0])}], [{"y": np.array([9.0, 0.5])}])
    assert (found.max_error, found.mean_error, found.agreement) == (pytest.approx(0.1), pytest.approx(0.075), None)
    assert found.drop == pytest.approx(0.075)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_answer_that_is_not_a_number_never_agrees(bad: float) -> None:
    found = compare(SCORES, runs([0, 1]), runs([bad, 1]))
    assert (found.agreement, found.drop) == (0.0, 1.0)


def test_an_answer_of_another_shape_or_none_at_all_never_agrees() -> None:
    assert compare(SCORES, runs([0, 1]), [{}]).drop == 1.0
    assert compare(SCORES, runs([0, 1]), [{"scores": np.zeros((2, 2), np.float32)}]).drop == 1.0


def test_labels_want_an_output_that_says_a_class() -> None:
    with pytest.raises(ConfigError, match="none of the outputs y says a class"):
        compare({"y": "FP32"}, [{"y": np.zeros(3)}], [{"y": np.zeros(3)}], labels=[1])
    with pytest.raises(ConfigError, match="--scores: the model has no output 'z'; it has scores"):
        compare(SCORES, runs([0, 1]), runs([0, 1]), scores="z")


def test_bf16_is_compared_by_its_values() -> None:
    bits = {"y": np.array([[0x3F80, 0x4000]], np.uint16)}  # 1.0 and 2.0
    assert compare({"y": "BF16"}, [bits], [bits]).agreement == 1.0


def test_one_answer_to_all_inputs_shows_nothing_of_agreement() -> None:
    noise = np.random.default_rng(0).standard_normal((50, 1, 3)) * 0.01
    reference = [{"scores": np.array([[5.0, 1.0, 1.0]]) + each} for each in noise]
    constant = [{"scores": np.array([[5.0, 1.0, 1.0]])} for _ in noise]
    found = compare(SCORES, reference, constant)
    assert (found.agreement, found.distinct, found.constant_drop) == (1.0, 1, 0.0)
    assert found.mean_error < 0.005
    assert found.spread_error == pytest.approx(1, rel=0.05)
    assert not found.is_within(0.005)


def test_labels_that_one_answer_would_find_show_nothing() -> None:
    said = runs(*([0, 1] for _ in range(99)), [1, 0])
    labels = [1] * 100
    one_answer = runs(*([0, 1] for _ in range(100)))
    found = compare(SCORES, said, one_answer, labels=labels)
    assert (found.drop, found.constant_drop, found.is_within(0.005)) == (0.0, 0.0, False)
    other = compare(SCORES, said, one_answer, labels=[1] * 50 + [0] * 50)
    assert other.constant_drop == pytest.approx(0.01)  # the model itself finds 51 of them


def test_values_without_classes_are_judged_by_the_variance_that_is_lost() -> None:
    wanted = [{"y": np.array([300.0 + place])} for place in range(20)]
    near = [{"y": each["y"] + 0.1 * (-1) ** place} for place, each in enumerate(wanted)]
    constant = [{"y": np.array([309.5])} for _ in wanted]
    assert compare({"y": "FP32"}, wanted, near).is_within(0.005)
    found = compare({"y": "FP32"}, wanted, constant)
    assert found.mean_error < 0.02
    assert found.drop == pytest.approx(1)
    one = compare({"y": "FP32"}, constant, constant)
    assert (one.spread_error, one.drop, one.is_within(0.005)) == (None, 0.0, False)


# ---- the journal ----------------------------------------------------------------------------------------------------

LOOK = QuickLook(Candidate(Way("openvino", "CPU", "int8")), alone_s=0.002, first_rate=250.0)


def test_a_kept_result_is_found_under_the_same_facts_only(tmp_path: Path) -> None:
    journal = KeptResults(tmp_path / "results", ("digest", "p99=20ms"))
    assert journal.read(QuickLook, "a") is None
    journal.write(LOOK, "a")
    assert KeptResults(tmp_path / "results", ("digest", "p99=20ms")).read(QuickLook, "a") == LOOK
    assert journal.read(QuickLook, "b") is None
    assert journal.read(FullMeasurement, "a") is None
    assert KeptResults(tmp_path / "results", ("digest", "p99=10ms")).read(QuickLook, "a") is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"candidate": 1}'])
def test_a_damaged_result_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    journal = KeptResults(tmp_path, ())
    journal.write(LOOK, "a")
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert journal.read(QuickLook, "a") is None
    journal.write(LOOK, "a")
    assert journal.read(QuickLook, "a") == LOOK


def test_a_changed_bit_anywhere_in_a_result_counts_as_none(tmp_path: Path) -> None:
    journal = KeptResults(tmp_path, ())
    journal.write(LOOK, "a")
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        assert journal.read(QuickLook, "a") is None


def test_without_a_folder_nothing_is_kept() -> None:
    journal = KeptResults(None, ())
    journal.write(LOOK, "a")
    assert journal.read(QuickLook, "a") is None


# ---- the picture ----------------------------------------------------------------------------------------------------

RATES, TIMES = st.floats(0.01, 1e6), st.floats(1e-6, 100.0)
PROBES = st.lists(st.builds(RateProbe, RATES, TIMES, TIMES, st.booleans()), max_size=8).map(tuple)


@given(st.lists(PROBES, max_size=8), st.floats(1e-4, 60.0))
def test_a_picture_is_whole_and_keeps_its_lines_inside(all_probes: list[tuple[RateProbe, ...]], limit_s: float) -> None:
    fulls = [
        FullMeasurement(LOOK.candidate, "", max((p.rate for p in probes), default=0.0), 0.1, 0.1, 0, probes)
        for probes in all_probes
    ]
    curves = [line_of(full, "openvino <int8> & more", is_chosen=not place) for place, full in enumerate(fulls)]
    root = ET.fromstring(draw('a "model" <1>', Objective(0.99, limit_s), curves))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
