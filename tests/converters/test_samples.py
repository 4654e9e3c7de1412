"""Files of real inputs become runs, whatever their layout; what does not fit is named; made-up inputs stay the same."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime_converters import samples
from edge_runtime_converters.samples import (
    check_finite,
    check_shapes,
    holds_pictures,
    made_up_runs,
    read_labels,
    read_runs,
    rows_of,
    spread,
)

OPEN = ModelSpec((TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "FP32", (-1, 2)),))
FIXED = ModelSpec((TensorSpec("x", "FP32", (2, 3)),), (TensorSpec("y", "FP32", (2, 2)),))
TWO = ModelSpec((TensorSpec("x", "FP32", (-1, 3)), TensorSpec("n", "INT64", (-1,))), OPEN.outputs)
VALUES = np.arange(21, dtype=np.float32).reshape(7, 3)


def joined(runs: list[samples.Run]) -> np.ndarray:
    return np.concatenate([run["x"] for run in runs])


def test_an_npz_is_cut_into_runs_and_no_row_is_lost(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=VALUES)
    runs = read_runs(tmp_path / "data.npz", OPEN, run_rows=3)
    assert [rows_of(run) for run in runs] == [3, 3, 1]
    assert np.array_equal(joined(runs), VALUES)


def test_a_folder_of_samples_without_a_batch_axis_is_the_same_data(tmp_path: Path) -> None:
    for place, row in enumerate(VALUES):
        np.save(tmp_path / f"{place}.npy", row)
    assert np.array_equal(joined(read_runs(tmp_path, OPEN, run_rows=4)), VALUES)


def test_whole_numbers_become_the_models_floats_and_floats_never_whole_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=VALUES.astype(np.uint8), n=np.arange(7))
    (run,) = read_runs(tmp_path / "data.npz", TWO, run_rows=16)
    assert run["x"].dtype == np.float32
    np.savez(tmp_path / "bad.npz", x=VALUES, n=np.arange(7) + 0.5)
    with pytest.raises(ConversionFailed, match="'n' is float64; wanted INT64"):
        read_runs(tmp_path / "bad.npz", TWO, run_rows=16)


def test_a_model_of_fixed_rows_gets_so_many_at_a_time(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=VALUES[:6])
    assert [rows_of(run) for run in read_runs(tmp_path / "data.npz", FIXED, run_rows=16)] == [2, 2, 2]
    np.savez(tmp_path / "odd.npz", x=VALUES)
    with pytest.raises(ConversionFailed, match="7 samples; the model takes 2 at a time"):
        read_runs(tmp_path / "odd.npz", FIXED, run_rows=16)


def test_files_that_do_not_fit_say_what_is_there_and_what_is_wanted(tmp_path: Path) -> None:
    np.savez(tmp_path / "names.npz", a=VALUES, b=VALUES)
    with pytest.raises(ConversionFailed, match="holds a, b; wanted x"):
        read_runs(tmp_path / "names.npz", OPEN, 1)
    np.savez(tmp_path / "shape.npz", x=VALUES[:, :2])
    with pytest.raises(ConversionFailed, match=r"'x' is \[7, 2\]; wanted \[-1, 3\]"):
        read_runs(tmp_path / "shape.npz", OPEN, 1)
    np.savez(tmp_path / "counts.npz", x=VALUES, n=np.arange(5))
    with pytest.raises(ConversionFailed, match="arrays of \\[5, 7\\] samples"):
        read_runs(tmp_path / "counts.npz", TWO, 1)
    np.save(tmp_path / "one.npy", VALUES)
    with pytest.raises(ConversionFailed, match="the model has 2 inputs"):
        read_runs(tmp_path / "one.npy", TWO, 1)


def test_an_empty_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match="holds no sample"):
        read_runs(tmp_path, OPEN, 1)
    with pytest.raises(ConversionFailed, match="No such file"):
        read_runs(tmp_path / "gone.npz", OPEN, 1)


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path(tmp_path / "canary").touch, ()

    array = np.array([Payload()], object)
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array(member, array)
    with (tmp_path / "data.npy").open("wb") as file:
        np.lib.format.write_array(file, array)
    for name in ("data.npz", "data.npy"):
        with pytest.raises(ConversionFailed, match="of numbers"):
            read_runs(tmp_path / name, OPEN, 1)
    assert not (tmp_path / "canary").exists()


def test_an_archive_that_unpacks_to_more_than_allowed_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "data.npz", x=np.zeros((100_000, 3), np.float32))
    monkeypatch.setattr(samples, "MAX_BYTES", 100_000)
    with pytest.raises(ConversionFailed, match="unpacks to"):
        read_runs(tmp_path / "data.npz", OPEN, 1)


def test_a_header_that_declares_more_than_there_is_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", VALUES)
    content = (tmp_path / "data.npy").read_bytes()
    (tmp_path / "data.npy").write_bytes(content.replace(b"(7, 3)", b"(7,30000000000)", 1))
    with pytest.raises(ConversionFailed, match="of numbers"):
        read_runs(tmp_path / "data.npy", OPEN, 1)


def test_labels_are_one_whole_number_a_row(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.arange(7).reshape(7, 1))
    assert read_labels(tmp_path / "labels.npy", 7).tolist() == list(range(7))
    with pytest.raises(ConversionFailed, match="wanted 8 whole numbers"):
        read_labels(tmp_path / "labels.npy", 8)
    np.save(tmp_path / "floats.npy", np.zeros(7))
    with pytest.raises(ConversionFailed, match="got float64"):
        read_labels(tmp_path / "floats.npy", 7)


def test_calibration_is_spread_over_data_that_is_sorted() -> None:
    runs = [{"x": VALUES[place : place + 1]} for place in range(7)]
    assert [int(run["x"][0, 0]) for run in spread(runs, 3)] == [0, 6, 12]
    assert len(list(spread(runs, 100))) == 7


def test_made_up_inputs_are_the_same_each_time_and_no_two_rows_are_alike() -> None:
    first, second = (made_up_runs(OPEN, {}, is_tabular=False) for _ in range(2))
    assert np.array_equal(joined(first), joined(second))
    assert len(np.unique(joined(first), axis=0)) == samples.MADE_UP_ROWS


def test_an_open_inner_dimension_is_asked_for() -> None:
    text = ModelSpec((TensorSpec("ids", "INT64", (-1, -1)),), OPEN.outputs)
    with pytest.raises(ConversionFailed, match=r"open inside: ids .*--shapes ids=-1,128"):
        made_up_runs(text, {}, is_tabular=False)
    said = {"ids": TensorSpec("ids", "INT64", (-1, 9))}
    assert made_up_runs(text, said, is_tabular=False)[0]["ids"].shape == (16, 9)


def test_all_inputs_that_are_open_inside_are_asked_for_at_once() -> None:
    text = ModelSpec(tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("ids", "mask", "types")), OPEN.outputs)
    said = {"types": TensorSpec("types", "INT64", (-1, 9))}
    with pytest.raises(ConversionFailed, match=r"--shapes ids=-1,128 --shapes mask=-1,128$"):
        made_up_runs(text, said, is_tabular=False)


def test_json_is_read_for_a_model_of_one_input_as_tune_reads_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[[1, 2, 3], [4, 5, 6]]")
    np.save(tmp_path / "b.npy", VALUES)
    assert joined(read_runs(tmp_path, OPEN, 16)).shape == (9, 3)
    (tmp_path / "a.json").write_text("[1, ")
    with pytest.raises(ConversionFailed, match=r"a\.json: not JSON"):
        read_runs(tmp_path, OPEN, 16)


def write_picture(path: Path, grey: int) -> None:
    path.write_bytes(b"P5 2 2 255\n" + bytes([grey] * 4))


PICTURES = ModelSpec((TensorSpec("image", "FP32", (-1, 1, 2, 2)),), OPEN.outputs)


def test_pictures_are_samples_in_the_order_of_their_names(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="pictures are read with Pillow, which is not installed")
    for place in range(8):
        write_picture(tmp_path / f"{place}.PGM", place * 10)
    runs = read_runs(tmp_path, PICTURES, 1)
    assert [round(float(run["image"][0, 0, 0, 0]) * 255) for run in runs] == [place * 10 for place in range(8)]
    some = read_runs(tmp_path, PICTURES, 1, most_pictures=4)
    assert [round(float(run["image"][0, 0, 0, 0]) * 255) for run in some] == [0, 20, 40, 60]


def test_a_picture_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert holds_pictures(tmp_path)
    with pytest.raises(ConversionFailed, match=r"a\.png.*(pip install pillow|not a picture that Pillow)"):
        read_runs(tmp_path, PICTURES, 1)


def test_labels_are_read_from_text_as_tune_reads_them(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("a.png,3\nb.png,1\n\n")
    assert read_labels(tmp_path / "labels.csv", 2).tolist() == [3, 1]
    (tmp_path / "labels.csv").write_text("file,label\na.png,3\n")
    with pytest.raises(ConversionFailed, match=r"labels\.csv: no list of labels"):
        read_labels(tmp_path / "labels.csv", 1)


def write_zip(path: Path, content: bytes, kind: int = zipfile.ZIP_STORED) -> bytearray:
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("x.npy", content)
    return bytearray(path.read_bytes())


def npy_of(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_refused_however_it_is_packed(tmp_path: Path, kind: int) -> None:
    whole = write_zip(tmp_path / "data.npz", npy_of(VALUES), kind)
    refused = 0
    for place in range(50, whole.index(b"PK\x01\x02")):
        damaged = whole.copy()
        damaged[place] ^= 0xA5
        (tmp_path / "data.npz").write_bytes(damaged)
        try:
            assert np.array_equal(joined(read_runs(tmp_path / "data.npz", OPEN, 1)), VALUES)  # a byte that says nothing
        except ConversionFailed as error:
            assert "no .npz of numbers" in error.message  # noqa: PT017  what else is raised fails the test
            refused += 1
    assert refused > 50


def test_an_archive_of_something_else_or_encrypted_is_refused(tmp_path: Path) -> None:
    whole = write_zip(tmp_path / "data.npz", b"\0" * 1000)
    with pytest.raises(ConversionFailed, match=r"no \.npz of numbers"):
        read_runs(tmp_path / "data.npz", OPEN, 1)
    whole[6] |= 1
    whole[whole.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "data.npz").write_bytes(whole)
    with pytest.raises(ConversionFailed, match="encrypted"):
        read_runs(tmp_path / "data.npz", OPEN, 1)


@pytest.mark.parametrize("name", ["data.npy", "data.npz"])
def test_a_pipe_and_a_device_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConversionFailed, match="wanted a regular file"):
        read_runs(tmp_path / name, OPEN, 1)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/urandom")
    with pytest.raises(ConversionFailed, match="wanted a regular file"):
        read_runs(tmp_path / name, OPEN, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_no_range_holds_do_not_calibrate(value: float) -> None:
    runs = [{"x": VALUES[:1]}, {"x": np.full((1, 3), value, np.float32)}]
    with pytest.raises(ConversionFailed, match=r"data\.npy: 'x' holds values that are infinite or no number"):
        check_finite(runs, Path("data.npy"))
    check_finite(runs[:1], Path("data.npy"))


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (TensorSpec("y", "FP32", (-1, 3)), "says 'y'; the model takes x"),
        (TensorSpec("x", "FP32", (-1, 4)), r"says x is \[-1, 4\]; the model wants \[-1, 3\]"),
        (TensorSpec("x", "FP32", (3,)), r"says x is \[3\]; the model wants \[-1, 3\]"),
    ],
)
def test_a_shape_that_is_not_the_models_is_refused(said: TensorSpec, match: str) -> None:
    with pytest.raises(ConversionFailed, match=match):
        check_shapes({said.name: said}, OPEN)


@pytest.mark.parametrize("shape", [(8, 3), (-1, 3), (-1, -1)])
def test_a_shape_that_says_more_or_less_than_the_model_is_taken(shape: tuple[int, ...]) -> None:
    check_shapes({"x": TensorSpec("x", "FP32", shape)}, OPEN)
