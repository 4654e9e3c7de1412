# ruff: noqa: E402  (what follows imports torch, and is left out where there is none)
"""What the PyTorch backend learns of a module, and what it refuses to load."""

from __future__ import annotations

import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test-converters has it")

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import BackendUnavailable, LoadFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from tests.converters.pytorch_models import Identity, save_program, save_script
from tests.converters.sources import network


def loaded(artifact: Path, *inputs: TensorSpec, **options: object) -> Instance:
    declared = ModelSpec(inputs, ()) if inputs else None
    return backend("pytorch").load(artifact, LoadOptions(declared=declared, **options))  # type: ignore[arg-type]


class TwoRows(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 4).sum(0)


class Optional(torch.nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 2.0) -> torch.Tensor:
        return (x if bias is None else x + bias) * scale


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return x, (x.sum(1), x.mean())


class Lengths(torch.nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, 3).to(torch.float32)


class Remembering(torch.nn.Module):
    """Answers with all that it was ever given: by an attribute, by a buffer and by a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.nn.Buffer(torch.zeros(2))
        self.rows = torch.nn.Buffer(torch.zeros(1, 2))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.total.add_(x.sum(0))
        self.rows[0].add_(1)
        return self.total + self.rows + x * self.runs


class Text(torch.nn.Module):
    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x


class Count(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        return x.shape[0]


def test_a_traced_module_remembers_its_shapes_and_takes_any_rows(tmp_path: Path) -> None:
    instance = loaded(save_script(network(torch), tmp_path, torch.zeros(3, 64)))
    assert instance.spec == ModelSpec(
        (TensorSpec("INPUT__0", "FP32", (-1, 64)),), (TensorSpec("OUTPUT__0", "FP32", (-1, 10)),)
    )


def test_rows_that_a_trace_fixed_stay_fixed(tmp_path: Path) -> None:
    instance = loaded(save_script(TwoRows(), tmp_path, torch.zeros(2, 4)))
    assert instance.spec == ModelSpec(
        (TensorSpec("INPUT__0", "FP32", (2, 4)),), (TensorSpec("OUTPUT__0", "FP32", (4,)),)
    )


def test_open_lengths_show_in_the_outputs_that_follow_them(tmp_path: Path) -> None:
    instance = loaded(save_script(Lengths(), tmp_path), TensorSpec("ids", "INT64", (-1, -1)))
    assert instance.spec.outputs == (TensorSpec("OUTPUT__0", "FP32", (-1, -1, 3)),)
    assert instance.run({"ids": np.array([[0, 2]])})[0].tolist() == [[[1, 0, 0], [0, 0, 1]]]


def test_an_argument_with_a_default_is_given_only_where_it_is_declared(tmp_path: Path) -> None:
    artifact, x = save_script(Optional(), tmp_path), np.ones((1, 2), np.float32)
    spec, bias = TensorSpec("x", "FP32", (-1, 2)), TensorSpec("INPUT__1", "FP32", (-1, 2))
    assert loaded(artifact, spec).run({"x": x})[0].tolist() == [[2, 2]]
    assert loaded(artifact, spec, bias).run({"x": x, "INPUT__1": x})[0].tolist() == [[4, 4]]


def test_tuples_are_flat_and_numbered_through(tmp_path: Path) -> None:
    instance = loaded(save_script(Nested(), tmp_path), TensorSpec("x", "FP32", (-1, 2)))
    assert [(each.name, each.shape) for each in instance.spec.outputs] == [
        ("OUTPUT__0", (-1, 2)), ("OUTPUT__1", (-1,)), ("OUTPUT__2", ()),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "reason"), [(Text(), "'name', which is str"), (Count(), "returned int; wanted tensors")]
)
def test_a_value_that_is_not_a_tensor_is_refused_by_name(tmp_path: Path, module: torch.nn.Module, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        loaded(save_script(module, tmp_path), TensorSpec("x", "FP32", (-1, 2)))


def test_the_fastest_form_gives_the_answers_of_the_saved_one(tmp_path: Path) -> None:
    artifact = save_script(network(torch), tmp_path, torch.zeros(2, 64))
    fastest, saved = loaded(artifact), loaded(artifact, extra={"layout": "as-saved"})
    for rows in (1, 5, 2):
        x = np.random.default_rng(rows).random((rows, 64), np.float32) * 16
        np.testing.assert_allclose(fastest.run({"INPUT__0": x})[0], saved.run({"INPUT__0": x})[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"device": "CUDA"}, BackendUnavailable, r"cannot use CUDA: it"),
        ({"device": "CUDA:x"}, BackendUnavailable, "no device 'CUDA:x'"),
        ({"precision": "int8"}, LoadFailed, "nothing is quantised at load"),
    ],
)
def test_an_option_that_this_pytorch_or_file_lacks_is_a_reason(
    tmp_path: Path, options: dict[str, str], error: type[Exception], reason: str
) -> None:
    if torch.cuda.is_available() and options.get("device") == "CUDA":
        pytest.skip("there is a GPU here")
    with pytest.raises(error, match=reason):
        loaded(save_script(Identity(), tmp_path), TensorSpec("x", "FP32", (-1, 2)), **options)


def fresh_answer(x: np.ndarray) -> np.ndarray:
    """What `Remembering` answers first."""
    return Remembering()(torch.from_numpy(x.copy())).numpy()  # type: ignore[no-any-return]


def test_each_run_of_a_script_that_keeps_state_begins_anew(tmp_path: Path) -> None:
    instance = loaded(save_script(Remembering().eval(), tmp_path), TensorSpec("x", "FP32", (-1, 2)))
    for turn in range(1, 5):
        x = np.full((turn, 2), turn, np.float32)
        np.testing.assert_array_equal(instance.run({"x": x})[0], fresh_answer(x))


@pytest.mark.parametrize("member", ["traced_inputs.pkl", "data.pkl", "constants.pkl"])
def test_a_whole_archive_with_a_broken_part_is_a_reason(tmp_path: Path, member: str) -> None:
    artifact = save_script(network(torch), tmp_path / "sound", torch.zeros(2, 64))
    changed = tmp_path / "model.pt"
    with zipfile.ZipFile(artifact) as archive, zipfile.ZipFile(changed, "w") as copied:
        for each in archive.infolist():
            is_it = each.filename.endswith(member)
            copied.writestr(each.filename, b"\x80\x02\xff" if is_it else archive.read(each))
    with pytest.raises(LoadFailed, match=r"cannot load model\.pt"):
        loaded(changed)


# ---- exported programs ----------------------------------------------------------------------------------------------


def exported(module: torch.nn.Module, folder: Path, *arguments: object, **words: object) -> Path:
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, arguments, **words), str(folder / "model.pt2"))
    return folder / "model.pt2"


def test_a_bound_of_rows_in_the_export_is_a_bound_of_batches(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=8)
    artifact = exported(network(torch), tmp_path, torch.zeros(2, 64), dynamic_shapes=({0: rows},))
    assert loaded(artifact).spec.max_rows == 8
    assert (
        loaded(save_program(network(torch), tmp_path, (TensorSpec("image", "FP32", (-1, 64)),))).spec.max_rows is None
    )


def test_several_outputs_are_called_as_a_conversion_calls_them(tmp_path: Path) -> None:
    instance = loaded(save_program(Nested(), tmp_path, (TensorSpec("x", "FP32", (-1, 2)),)))
    assert [each.name for each in instance.spec.outputs] == ["output_0", "output_1_0", "output_1_1"]
    x = np.ones((3, 2), np.float32)
    assert [each.tolist() for each in instance.run({"x": x}, ["output_1_0", "output_1_1"])] == [[2, 2, 2], 1]


def test_arguments_that_the_export_fixed_are_given_by_the_backend(tmp_path: Path) -> None:
    artifact = exported(Optional(), tmp_path, torch.ones(1, 2), None, 3.0)
    instance = loaded(artifact)
    assert [each.name for each in instance.spec.inputs] == ["x"]
    assert instance.run({"x": np.ones((1, 2), np.float32)})[0].tolist() == [[3, 3]]


def test_each_run_of_a_program_that_writes_its_buffers_begins_anew_whoever_runs_beside_it(tmp_path: Path) -> None:
    instance = loaded(save_program(Remembering().eval(), tmp_path, (TensorSpec("x", "FP32", (-1, 2)),)))
    given = [np.full((1 + turn % 3, 2), turn, np.float32) for turn in range(40)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda x: instance.run({"x": x})[0], given))
    for x, answer in zip(given, answers, strict=True):
        np.testing.assert_array_equal(answer, fresh_answer(x))


def test_another_precision_is_not_made_of_a_program(tmp_path: Path) -> None:
    artifact = save_program(network(torch), tmp_path, (TensorSpec("image", "FP32", (-1, 64)),))
    with pytest.raises(BackendUnavailable, match="program in f32, and was to run in bf16"):
        loaded(artifact, precision="bf16")


@pytest.mark.parametrize("member", ["data/sample_inputs/model.pt", "data/weights/weight_0"])
def test_a_pickle_in_a_program_runs_nothing(tmp_path: Path, member: str) -> None:
    """torch.export.load by itself would fall back to any pickle."""
    artifact = save_program(network(torch), tmp_path / "sound", (TensorSpec("image", "FP32", (-1, 64)),))
    canary = tmp_path / "canary"
    pickled = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    changed = tmp_path / "model.pt2"
    with zipfile.ZipFile(artifact) as archive, zipfile.ZipFile(changed, "w") as copied:
        for each in archive.infolist():
            content = archive.read(each)
            if each.filename.endswith(member):
                content = pickled
            elif each.filename.endswith("_config.json"):
                content = content.replace(b'"use_pickle": false', b'"use_pickle": true')
            copied.writestr(each.filename, content)
    with pytest.raises(LoadFailed, match=r"cannot load model\.pt2"):
        loaded(changed)
    assert not canary.exists()
