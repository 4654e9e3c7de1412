"""The tries to load a version are known without loading it: backends in the profile's order, with options.

And which of those that were passed over a healthy model's owner is told of.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edge_runtime.backends.base import Backend, LibraryBackend
from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.library_import import not_installed
from edge_runtime.backends.registry import Backends, backend, declaration_of
from edge_runtime.errors import LoadFailed
from edge_runtime.extras import install_advice
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.builds import BuildParts, Builds
from edge_runtime.models.context import ModelSources
from edge_runtime.models.executor import Executor
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.load_plans import LoadPlans, PassedOver, ServingLimits, worth_telling
from edge_runtime.models.loading import VersionLoader
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.walk import scan
from edge_runtime.profiles.profile import BackendChoice
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock
from tests.models.catboost_models import cbm_head
from tests.models.onnx_models import add_weights, external_tensor, mlp, mlp_int8, sequence_output

CHOICES = (BackendChoice(name="openvino", precision="bf16"), BackendChoice(name="onnxruntime", threads=2))


class SomeBackends(Backends):
    """Backends as `make` has them, none in hosts."""

    def __init__(self, make: Callable[[str], LibraryBackend]) -> None:
        super().__init__(Hosts())
        self._make = make

    def has(self, name: str) -> bool:
        return True  # `make` says which are not

    def installed(self, name: str) -> Declaration:
        return self._make(name).declaration

    def here(self, name: str) -> LibraryBackend:
        return self._make(name)

    def hosted(self, name: str) -> Backend:
        return self._make(name)


LIMITS = ServingLimits(cores=4, max_batch_rows=8, queue_rows=8, queue_bytes=1 << 20)


def plans(
    choices: Sequence[BackendChoice] = CHOICES, make_backend: Callable[[str], LibraryBackend] = backend
) -> LoadPlans:
    builds = Builds(BuildParts(ModelTable(Executor()), ModelSources(None), None, None, Hosts()))
    return LoadPlans(choices, SomeBackends(make_backend), builds, LIMITS)


def loader(
    choices: Sequence[BackendChoice] = CHOICES, make_backend: Callable[[str], LibraryBackend] = backend
) -> VersionLoader:
    clock = FakeClock()
    return VersionLoader(
        plans=plans(choices, make_backend),
        backends=SomeBackends(make_backend),
        isolation="auto",
        limits=LIMITS,
        dispatcher=Dispatcher(clock, 4, 0.05),
        clock=clock,
        metrics=Metrics(),
    )


def model(folder: Path, settings: str = "") -> ModelFolder:
    mlp(folder / "mlp" / "1")
    (folder / "mlp" / "model.toml").write_text(settings)
    return scan(folder).models["mlp"]


def test_candidates_are_in_the_profiles_order_with_its_options(tmp_path: Path) -> None:
    folder = model(tmp_path)
    found = plans().of(folder, folder.versions[1])
    assert [(each.backend, each.artifact) for each in found] == [
        (name, tmp_path / "mlp" / "1" / "model.onnx") for name in ("openvino", "onnxruntime")
    ]
    assert [(each.options.precision, each.options.threads, each.options.concurrency) for each in found] == [
        ("bf16", 1, 4),
        ("", 2, 2),
    ]


def test_a_models_own_settings_come_before_the_profiles(tmp_path: Path) -> None:
    folder = model(tmp_path, "backend = 'onnxruntime'\nthreads = 3\ninstances = 1\n")
    (only,) = plans().of(folder, folder.versions[1])
    assert (only.backend, only.options.threads, only.options.concurrency) == ("onnxruntime", 3, 1)


def test_a_backend_that_is_not_there_leaves_no_candidate_and_says_why(tmp_path: Path) -> None:
    folder = model(tmp_path, "backend = 'tensorflow'\n")
    with pytest.raises(LoadFailed, match="there is no backend 'tensorflow'"):
        plans().of(folder, folder.versions[1])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.ubj", b"{L\0\0\0\0\0\0\0\x07learner{",
         r"model\.ubj is an XGBoost model; .*\[convert-xgboost\]; .* --to onnx \(not installed: xgboost"),
        ("model.pkl", b"\x80\x04\x95", r"model\.pkl is a pickle .*, which holds code: .*skops\.io\.dump"),
        ("model.onnx", b"version https://git-lfs.github.com/spec/v1\noid", r"model\.onnx is a Git LFS pointer"),
        ("model.onnx", b"<!DOCTYPE html><html>", r"model\.onnx is a web page, not a model: .*download it again"),
        ("model.onnx", b"", r"model\.onnx is empty: .*copy it again"),
    ],
)  # fmt: skip
def test_a_file_that_no_backend_loads_is_named_with_what_it_lacks(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    file = tmp_path / "m" / "1" / name
    file.write_bytes(content)
    folder = scan(tmp_path).models["m"]
    with pytest.raises(LoadFailed, match=f"^{said.replace('{file}', str(file))}"):
        plans().of(folder, folder.versions[1])


def test_a_file_beside_the_artifact_is_not_blamed_alone(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "a.xml").write_bytes(b"<net>")
    (tmp_path / "m" / "1" / "scaler.pkl").write_bytes(b"\x80\x04\x95")
    folder = scan(tmp_path).models["m"]
    with pytest.raises(LoadFailed, match=r"1 holds a\.xml, scaler\.pkl; wanted .*; scaler\.pkl is a pickle"):
        plans().of(folder, folder.versions[1])


def test_torchscript_without_pytorch_names_both_ways_out(tmp_path: Path) -> None:
    """The command that converts it, and the library that serves it."""
    file = tmp_path / "m" / "1" / "model.pt"
    file.parent.mkdir(parents=True)
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("net/data.pkl", "net/constants.pkl", "net/code/__torch__.py", "net/version"):
            archive.writestr(name, b"")
    folder = scan(tmp_path).models["m"]

    def without_pytorch(name: str) -> LibraryBackend:
        if name == "pytorch":
            raise not_installed(declaration_of("pytorch"))
        return backend(name)

    choices = (*CHOICES, BackendChoice(name="pytorch"))
    with pytest.raises(
        LoadFailed, match=r"model\.pt is .*TorchScript.*convert .*; pytorch: torch is not installed; .*pip"
    ):
        plans(choices, without_pytorch).of(folder, folder.versions[1])


def test_catboosts_categories_without_catboost_are_reported_with_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "m" / "1" / "churn.cbm"
    file.parent.mkdir(parents=True)
    file.write_bytes(cbm_head(categories=2))
    folder = scan(tmp_path).models["m"]

    def without_catboost(name: str) -> LibraryBackend:
        if name == "catboost":
            raise not_installed(declaration_of("catboost"))
        return backend(name)

    choices = (*CHOICES, BackendChoice(name="catboost"))
    with pytest.raises(LoadFailed) as failure:
        plans(choices, without_catboost).of(folder, folder.versions[1])
    assert failure.value.message == (
        "churn.cbm is a CatBoost model with categories or text; to serve it as it is, install edge-runtime[catboost]; "
        f"catboost: catboost is not installed; {install_advice('catboost')}"
    )
    assert "catboost>=1.2" in install_advice("catboost") or "[catboost]" in install_advice("catboost")


def test_a_catboost_model_of_numbers_is_never_loaded_as_it_is(tmp_path: Path) -> None:
    class Anything:
        declaration = declaration_of("catboost")

    file = tmp_path / "m" / "1" / "model.cbm"
    file.parent.mkdir(parents=True)
    file.write_bytes(cbm_head())
    folder = scan(tmp_path).models["m"]
    with pytest.raises(LoadFailed, match=r"model\.cbm is a CatBoost model; to have it converted here, install"):
        plans((BackendChoice(name="catboost"),), lambda _: Anything()).of(folder, folder.versions[1])  # type: ignore[return-value,arg-type]
    file.write_bytes(cbm_head(texts=1))
    (plan,) = plans((BackendChoice(name="catboost"),), lambda _: Anything()).of(folder, folder.versions[1])  # type: ignore[return-value,arg-type]
    assert plan.artifact == file


def test_absent_pytorch_is_not_a_reason_of_a_model_that_it_never_reads(tmp_path: Path) -> None:
    folder = model(tmp_path)
    (tmp_path / "mlp" / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(LoadFailed) as failure:
        loader((*CHOICES, BackendChoice(name="tensorrt"), BackendChoice(name="pytorch"))).load(
            folder, folder.versions[1]
        )
    assert "pytorch" not in failure.value.message


def test_tensors_that_the_settings_describe_go_to_the_backend(tmp_path: Path) -> None:
    folder = model(
        tmp_path,
        '[input.x]\nshape = [-1, 3]\n[input.image]\nshape = [1, 2]\ndatatype = "INT64"\n'
        '[input.other]\nrange = "0..1"\n[output.y]\nshape = [-1, 4]\n',
    )
    declared = plans().of(folder, folder.versions[1])[0].options.declared
    assert declared == ModelSpec(
        (TensorSpec("x", "FP32", (-1, 3)), TensorSpec("image", "INT64", (1, 2))), (TensorSpec("y", "", (-1, 4)),)
    )
    plain = model(tmp_path)
    assert plans().of(plain, plain.versions[1])[0].options.declared is None


def test_a_folder_in_the_artifacts_place_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "m" / "1" / "model.onnx").mkdir(parents=True)
    folder = scan(tmp_path).models["m"]
    with pytest.raises(LoadFailed, match=r"^.*/1/model\.onnx: is a folder; wanted a file"):
        plans().of(folder, folder.versions[1])


# ---- what a healthy model's owner is told ---------------------------------------------------------------------------


def without_openvino(name: str) -> LibraryBackend:
    """The registry of a device without OpenVINO's library."""
    if name == "openvino":
        raise not_installed(declaration_of("openvino"))
    return backend(name)


def test_a_fault_that_two_libraries_find_in_one_file_is_reported_once_and_the_second_ones_noise_not_at_all(
    tmp_path: Path,
) -> None:
    folder = model(tmp_path)
    artifact = tmp_path / "mlp" / "1" / "model.onnx"
    artifact.write_bytes(artifact.read_bytes()[:-40])
    with pytest.raises(LoadFailed) as raised:
        loader().load(folder, folder.versions[1])
    assert re.fullmatch(
        r"onnxruntime: model\.onnx is cut short, or no ONNX file: at its end, byte \d+, at least \d+ bytes are "
        "missing; copy it again",
        raised.value.message,
    )
    sequence_output(artifact.parent)
    folder = scan(tmp_path).models["mlp"]
    with pytest.raises(LoadFailed, match=r"^onnxruntime: model\.onnx: 'y' is seq\(tensor\(float\)\)") as raised:
        loader().load(folder, folder.versions[1])
    assert "openvino" not in raised.value.message


def test_a_lone_variant_is_served_and_its_status_says_so(tmp_path: Path) -> None:
    mlp_int8(tmp_path / "mlp" / "1")
    folder = scan(tmp_path).models["mlp"]
    loaded = loader([BackendChoice(name="onnxruntime")]).load(folder, folder.versions[1])
    assert loaded.note == "model.int8.onnx is served, since no other model lies beside it"
    assert loaded.servable.precision == "int8"


@pytest.mark.parametrize("stands_in", ["weights.bin", "weights/w.bin"])
def test_weights_that_are_a_git_lfs_pointer_are_named_first(tmp_path: Path, stands_in: str) -> None:
    version = tmp_path / "net" / "1"
    (version / stands_in).parent.mkdir(parents=True)
    add_weights(version, external_tensor(stands_in, shape=(1000,)))
    (version / stands_in).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    folder = scan(tmp_path).models["net"]
    with pytest.raises(LoadFailed, match=f"^{stands_in} is a Git LFS pointer, not the file itself: "):
        loader().load(folder, folder.versions[1])


ON_GPU = BackendChoice(name="tensorrt", device="GPU")
ON_CPU = BackendChoice(name="openvino", device="CPU")


@pytest.mark.parametrize(
    ("passed", "runs_on", "told"),
    [
        (PassedOver(ON_CPU, "is not installed", is_absent=True), "CPU", []),
        (PassedOver(ON_GPU, "is not installed", is_absent=True), "CUDA:0", []),
        (PassedOver(ON_GPU, "is not installed", is_absent=True), "CPU", ["tensorrt: is not installed"]),
        (PassedOver(ON_CPU, "cannot read it"), "CPU", ["openvino: cannot read it"]),
    ],
    ids=["as it was set up", "another library on the GPU", "the CPU in place of the GPU", "it tried and failed"],
)
def test_a_library_that_is_not_there_is_reported_only_where_slower_hardware_stands_in_for_it(
    passed: PassedOver, runs_on: str, told: list[str]
) -> None:
    assert worth_telling([passed], runs_on) == told


def test_a_model_that_the_next_backend_serves_well_has_no_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model(tmp_path)
    with caplog.at_level("DEBUG", "edge_runtime.models.loading"):
        loaded = loader(make_backend=without_openvino).load(folder, folder.versions[1])
    assert loaded.note == ""
    assert "openvino is not installed" in caplog.records[-1].__dict__["passed_over"]


def test_a_model_whose_first_backend_is_there_and_cannot_load_it_says_so(tmp_path: Path) -> None:
    folder = model(tmp_path)
    broken = BackendChoice(name="onnxruntime", extra={"no such option": "1"}, device="no such device")
    choices = (broken, BackendChoice(name="onnxruntime"))
    note = loader(choices).load(folder, folder.versions[1]).note
    assert note.startswith("onnxruntime: ")
    assert "no such device" in note.lower()


def test_a_failed_load_reports_the_library_that_tried_and_none_that_is_not_there(tmp_path: Path) -> None:
    folder = model(tmp_path)
    (tmp_path / "mlp" / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(LoadFailed, match=r"^onnxruntime: model\.onnx is not a sound ONNX file") as failed:
        loader(make_backend=without_openvino).load(folder, folder.versions[1])
    assert "not installed" not in failed.value.message


def test_a_backend_that_a_model_asks_for_by_name_and_that_is_not_there_fails_it(tmp_path: Path) -> None:
    folder = model(tmp_path, "backend = 'openvino'\n")
    with pytest.raises(LoadFailed, match="openvino is not installed; install it with"):
        loader(make_backend=without_openvino).load(folder, folder.versions[1])


INT8_THEN_PLAIN = (BackendChoice(name="openvino", precision="int8"), BackendChoice(name="openvino"))


def test_a_profile_that_asks_for_int8_gets_the_variant_and_the_plain_model_after_it(tmp_path: Path) -> None:
    folder = model(tmp_path)
    mlp_int8(tmp_path / "mlp" / "1")
    folder = scan(tmp_path).models["mlp"]
    found = plans(INT8_THEN_PLAIN).of(folder, folder.versions[1])
    assert [(each.artifact.name, each.options.precision) for each in found] == [
        ("model.int8.onnx", "int8"),
        ("model.onnx", ""),
    ]
    assert [each.artifact.name for each in plans().of(folder, folder.versions[1])] == ["model.onnx"] * 2


def test_a_version_that_was_loaded_for_int8_runs_in_int8_and_says_so(tmp_path: Path) -> None:
    model(tmp_path)
    mlp_int8(tmp_path / "mlp" / "1")
    folder = scan(tmp_path).models["mlp"]
    loaded = loader(INT8_THEN_PLAIN).load(folder, folder.versions[1])
    assert (loaded.servable.layouts.narrow.precision, loaded.artifact.name) == ("int8", "model.int8.onnx")
    loaded.servable.close(0.0)


def test_a_version_without_an_int8_file_goes_to_the_next_choice_and_says_why(tmp_path: Path) -> None:
    folder = model(tmp_path)
    loaded = loader(INT8_THEN_PLAIN).load(folder, folder.versions[1])
    assert loaded.servable.layouts.narrow.precision == "f32"
    assert "precision int8 was asked for" in loaded.note
    loaded.servable.close(0.0)


def test_an_owner_who_asks_for_int8_gets_nothing_else(tmp_path: Path) -> None:
    folder = model(tmp_path, "precision = 'int8'\nbackend = 'onnxruntime'\n")
    with pytest.raises(LoadFailed, match=r"the model holds f32: .*Put model\.int8\.onnx beside it"):
        loader().load(folder, folder.versions[1])
