"""Every cell of the conversion matrix is tested or empty, and docs/convert.md shows the same table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.formats import PRECISIONS, TARGETS, SourceFormat, artifact_name, route, why_empty
from edge_runtime_converters.options import ConversionOptions
from tests.converters.prepared import EXTRAS, PreparedConversions, prepared_conversions
from tests.converters.sources import INPUT, ROOT, images, present, source_of, write_samples

CELLS = [(source, target, precision) for source in SourceFormat for target in TARGETS for precision in PRECISIONS]
FULL = [cell for cell in CELLS if not why_empty(*cell)]
RUN_HERE = [cell for cell in FULL if cell[1] != "tensorrt"]
"""Engines are built by tests/tensorrt/test_engine_conversion.py, where their library is."""
AS_A_PERSON = {source: next(cell for cell in RUN_HERE if cell[0] is source) for source in SourceFormat}
"""The cell of each source that is converted in a process of its own, as `edge-runtime convert` does; others of PyTorch
and Keras by ones that find their libraries imported, as a daemon's do."""
OPEN_ROWS = 5


@pytest.fixture(scope="module")
def prepared() -> Iterator[PreparedConversions]:
    with prepared_conversions() as prepared:
        yield prepared


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.filterwarnings("ignore")  # PyTorch's about TorchScript, while the model is made
@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "precision"),
    RUN_HERE,
    ids=lambda value: value.name if isinstance(value, SourceFormat) else value,
)
def test_every_full_cell_converts_within_its_tolerance(
    source: SourceFormat, target: str, precision: str, models: Path, tmp_path: Path, prepared: PreparedConversions
) -> None:
    if target == "openvino" and precision == "int8":
        present("nncf")
    name = INPUT.get(source, "image")
    options = ConversionOptions(
        source=str(source_of(source, models)),
        target=target,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        output=str(tmp_path / artifact_name("model", target, precision)),
        calibration=str(write_samples(tmp_path, name)),
        shapes=("image=-1,64",) if source is SourceFormat.TORCHSCRIPT else (),
    )
    is_prepared = source in EXTRAS and (source, target, precision) != AS_A_PERSON[source]
    report = prepared.convert(options, source) if is_prepared else convert(options)
    assert report.is_near_enough, report.faults
    assert report.rows == 64
    made = Path(report.files[0])
    assert made.is_file()
    assert not list(tmp_path.glob(".*"))
    if target != "ort":
        _check_it_is_served_with_an_open_batch(made, target)


def _check_it_is_served_with_an_open_batch(made: Path, target: str) -> None:
    instance = backend("openvino" if target == "openvino" else "onnxruntime").load(made, LoadOptions(threads=1))
    try:
        assert instance.spec.may_batch
        outputs = instance.run({instance.spec.inputs[0].name: images(OPEN_ROWS)})
        assert all(len(output) == OPEN_ROWS for output in outputs)
        assert all(np.isfinite(output).all() for output in outputs if output.dtype.kind == "f")
    finally:
        instance.close()


@pytest.mark.parametrize(("source", "target", "precision"), [cell for cell in CELLS if why_empty(*cell)])
def test_every_empty_cell_says_why_before_anything_is_read(source: SourceFormat, target: str, precision: str) -> None:
    with pytest.raises(ConversionFailed) as refused:
        route(source, target, precision)
    assert why_empty(source, target, precision) in refused.value.message


def test_the_convert_page_shows_the_same_matrix() -> None:
    lines = (ROOT / "docs" / "convert.md").read_text().splitlines()
    for source in SourceFormat:
        cells = [_cell(source, target) for target in TARGETS]
        assert f"| {' | '.join([source.value, *cells])} |" in lines


def _cell(source: SourceFormat, target: str) -> str:
    return ", ".join(precision for precision in PRECISIONS if (source, target, precision) in FULL) or "-"
