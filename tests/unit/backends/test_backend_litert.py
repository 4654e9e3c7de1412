"""LiteRT beyond the contract: signatures, rows of models of one row, precision, quantisation, options, delegates."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.declaration import why_not_inside
from edge_runtime.backends.registry import backend, declaration_of
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend
from tests.models import litert_models
from tests.models.onnx_models import mlp_weights


@contextmanager
def loaded(artifact: Path, **options: object) -> Iterator[Instance]:
    instance = backend("litert").load(artifact, LoadOptions(**options))  # type: ignore[arg-type]
    try:
        yield instance
    finally:
        instance.close()


def test_a_model_of_one_row_takes_several_where_each_answers_as_alone(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    first, second = mlp_weights()
    with loaded(litert_models.mlp(tmp_path, rows=1)) as instance:
        assert [spec.shape for spec in (*instance.spec.inputs, *instance.spec.outputs)] == [(-1, 16), (-1, 4)]
        np.testing.assert_allclose(instance.run({"x": x})[0], np.maximum(x @ first, 0) @ second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["running_sum", "reshaped", "shared_maximum"])
def test_a_model_of_one_row_keeps_it_where_rows_would_meet(tmp_path: Path, model: str) -> None:
    with loaded(getattr(litert_models, model)(tmp_path, rows=1)) as instance:
        (spec,) = instance.spec.inputs
        assert spec.shape == (1, 4)
        (y,) = instance.run({"x": np.ones((1, 4), np.float32)})
        assert y.shape == instance.spec.outputs[0].shape
        with pytest.raises(RunFailed, match=r"has shape \[2, 4\], wanted \[1, 4\]"):
            instance.run({"x": np.ones((2, 4), np.float32)})


def test_an_output_that_the_file_fixes_follows_open_rows(tmp_path: Path) -> None:
    with loaded(litert_models.mlp(tmp_path, output_shape=[1, 4])) as instance:
        assert instance.spec.outputs[0].shape == (-1, 4)
        assert instance.run({"x": np.zeros((3, 16), np.float32)})[0].shape == (3, 4)


def test_names_come_of_the_signature_and_without_one_of_the_tensors(tmp_path: Path) -> None:
    with loaded(litert_models.added(tmp_path / "with")) as instance:
        assert [spec.name for spec in (*instance.spec.inputs, *instance.spec.outputs)] == ["x", "y"]
    with loaded(litert_models.unsigned(tmp_path / "without")) as instance:
        assert [spec.name for spec in (*instance.spec.inputs, *instance.spec.outputs)] == ["input", "output"]
        (y,) = instance.run({"input": np.zeros((2, 2), np.float32)})
        np.testing.assert_array_equal(y, np.ones((2, 2)))


@pytest.mark.parametrize(("signature", "output", "wanted"), [("plus", "sum", 3.0), ("times", "product", 6.0)])
def test_an_option_chooses_the_signature(tmp_path: Path, signature: str, output: str, wanted: float) -> None:
    with loaded(litert_models.two_signatures(tmp_path), extra={"signature": signature}) as instance:
        assert [spec.name for spec in instance.spec.outputs] == [output]
        assert instance.run({"x": np.full((1, 2), 2, np.float32)})[0].tolist() == [[wanted, wanted]]


def test_a_signature_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"has no signature 'train'; it has plus, times"):
        backend("litert").load(litert_models.two_signatures(tmp_path), LoadOptions(extra={"signature": "train"}))


def test_a_quantised_model_is_served_in_integers_and_says_what_they_stand_for(tmp_path: Path) -> None:
    with loaded(litert_models.mlp_int8(tmp_path)) as instance:
        (x,), (y,) = instance.spec.inputs, instance.spec.outputs
        assert (instance.precision, x.datatype, y.datatype) == ("int8", "INT8", "INT8")
        assert x.quantisation == (pytest.approx(8 / 255), 0)
        assert y.quantisation == (1.0, 3)
        values = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
        (got,) = instance.run({"x": np.round(values / x.quantisation[0]).clip(-128, 127).astype(np.int8)})
        first, second = mlp_weights()
        wanted = np.maximum(values @ first, 0) @ second
        assert np.abs((got.astype(np.float32) - y.quantisation[1]) * y.quantisation[0] - wanted).max() < 2.5


@pytest.mark.parametrize(("precision", "error"), [("int8", LoadFailed), ("f16", BackendUnavailable)])
def test_a_precision_that_the_model_does_not_hold_is_refused(
    tmp_path: Path, precision: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"{precision}.*asked for|{precision}; convert it"):
        backend("litert").load(litert_models.mlp(tmp_path), LoadOptions(precision=precision))
    with loaded(litert_models.mlp_int8(tmp_path / "int8"), precision="int8") as instance:
        assert instance.precision == "int8"


def test_each_run_of_a_model_that_keeps_state_begins_anew(tmp_path: Path) -> None:
    x = np.ones((1, 3), np.float32)
    with loaded(litert_models.remembering(tmp_path)) as instance:
        (before,) = instance.run({"x": x})
        for _ in range(3):
            np.testing.assert_array_equal(instance.run({"x": x})[0], before)


def test_a_file_that_writes_variables_is_refused_for_what_callers_would_see_of_each_other(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"keeps values from run to run \(ASSIGN_VARIABLE\)"):
        backend("litert").load(litert_models.counting(tmp_path), LoadOptions())


def test_as_many_runs_at_a_time_as_are_asked_for(tmp_path: Path) -> None:
    with loaded(litert_models.mlp(tmp_path), concurrency=3, threads=2) as instance:
        assert instance.concurrency == 3


def test_an_operator_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"cannot prepare model\.tflite: .*MyOwnOperator"):
        backend("litert").load(litert_models.custom_operator(tmp_path), LoadOptions())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delegate": "/tmp/library.so"}, "names a library, which is code"),
        ({"delegate_options": "x"}, "names a library, which is code"),
        ({"num_threads": "4"}, "has no option 'num_threads'; known: signature"),
    ],
)
def test_options_of_a_model_choose_a_signature_and_never_a_library(
    tmp_path: Path, options: dict[str, str], words: str
) -> None:
    with pytest.raises(LoadFailed, match=words):
        backend("litert").load(litert_models.mlp(tmp_path), LoadOptions(extra=options))


def test_a_delegate_that_cannot_be_loaded_is_unavailable_with_its_path(tmp_path: Path) -> None:
    artifact = litert_models.mlp(tmp_path)
    with pytest.raises(BackendUnavailable, match=r"cannot load the delegate /nowhere/libnpu\.so: .*No such file"):
        backend("litert").load(artifact, LoadOptions(delegate="/nowhere/libnpu.so"))


@pytest.fixture(scope="module")
def delegate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A delegate's library, compiled here."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to make a delegate with")
    library = tmp_path_factory.mktemp("delegate") / "libownnpu.so.1"
    source = Path(__file__).parents[2] / "fakes" / "litert_delegate.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True, timeout=60)
    return str(library)


def test_a_delegate_that_took_the_graph_is_the_device_that_is_read_back(tmp_path: Path, delegate: str) -> None:
    """In a host, which sees the library beside its model's folder, and has one run at a time for one accelerator."""
    hosts = Hosts()
    options = LoadOptions(delegate=delegate, concurrency=4)
    instance = HostedBackend(backend("litert"), hosts).load(litert_models.added(tmp_path), options)
    try:
        assert (instance.device, instance.concurrency) == ("OWNNPU", 1)
        assert instance.run({"x": np.ones((2, 2), np.float32)})[0].shape == (2, 2)
    finally:
        instance.close()
        hosts.close()


def test_a_delegate_that_took_nothing_is_unavailable_so_that_the_next_backend_is_tried(
    tmp_path: Path, delegate: str
) -> None:
    options = LoadOptions(delegate=delegate, delegate_options={"take": "nothing"})
    with pytest.raises(BackendUnavailable, match=r"libownnpu\.so\.1 took no operator of this model"):
        backend("litert").load(litert_models.added(tmp_path), options)


def test_the_complaint_of_a_delegate_about_its_accelerator_is_the_reason(tmp_path: Path, delegate: str) -> None:
    options = LoadOptions(delegate=delegate, delegate_options={"device": "usb:1"})
    with pytest.raises(BackendUnavailable, match="there is no accelerator at this place"):
        backend("litert").load(litert_models.added(tmp_path), options)


def test_its_models_always_run_in_a_host(tmp_path: Path) -> None:
    why = why_not_inside(declaration_of("litert"), litert_models.mlp(tmp_path), LoadOptions())
    assert why == "models of litert always run in a host"
