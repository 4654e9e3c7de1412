"""What is asked of TensorRT for a model: precision by version, shapes, options, and the key of an engine. All pure."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.backends.model_files import ArtifactFiles
from edge_runtime.backends.tensorrt.library import FULL, RTX, traits_of
from edge_runtime.backends.tensorrt.plan import (
    ENGINE_ROWS,
    EnginePlan,
    Gpu,
    choose_typing,
    engine_key,
    parse_device,
    plan_engine,
    plan_shapes,
)
from edge_runtime.errors import BackendUnavailable, LoadFailed
from edge_runtime.model_spec import TensorSpec

EIGHT, TEN, ELEVEN = (traits_of(FULL, version) for version in ("8.6.1", "10.3.0", "11.4.0.106"))
RTX_ONE = traits_of(RTX, "1.7.1.116")

ORIN = Gpu(0, "Orin", "8.7", "CUDA 12060; R36 (release)", is_integrated=True)
IMAGE = TensorSpec("image", "FP32", (-1, 3, 224, 224))
TOKENS = TensorSpec("ids", "INT64", (-1, -1))


def files(precision: str, *, holds_int8: bool = False) -> ArtifactFiles:
    return ArtifactFiles((), 1, precision, holds_int8=holds_int8)


@pytest.mark.parametrize(
    ("asked", "exported", "version", "strong", "flags", "precision"),
    [
        ("", "f32", EIGHT, False, (), "f32"),
        ("", "f16", EIGHT, False, ("FP16",), "f16"),
        ("f16", "f32", EIGHT, False, ("FP16",), "f16"),
        ("", "f32", TEN, True, (), "f32"),
        ("f32", "f16", TEN, True, (), "f16"),
        ("f16", "f32", TEN, False, ("FP16",), "f16"),
        ("bf16", "f32", TEN, False, ("BF16",), "bf16"),
        ("f16", "f16", TEN, True, (), "f16"),
        ("f16", "f16", ELEVEN, True, (), "f16"),
        ("bf16", "bf16", ELEVEN, True, (), "bf16"),
        ("", "f32", RTX_ONE, True, (), "f32"),
        ("", "", RTX_ONE, True, (), "f32"),
    ],
)
def test_precision_is_the_models_own_unless_asked_for_and_as_the_version_can(
    asked, exported, version, strong, flags, precision
):
    typing = choose_typing(asked, files(exported), version, "TensorRT")
    assert (typing.is_strong, typing.flags, typing.precision) == (strong, flags, precision)


@pytest.mark.parametrize("version", [EIGHT, TEN, ELEVEN, RTX_ONE])
def test_a_model_that_holds_int8_runs_in_it_and_no_other_is_made_so(version):
    assert choose_typing("int8", files("int8", holds_int8=True), version, "TensorRT").precision == "int8"
    assert choose_typing("", files("int8", holds_int8=True), version, "TensorRT").precision == "int8"
    with pytest.raises(LoadFailed, match="int8 was asked for, and the model holds f32"):
        choose_typing("int8", files("f32"), version, "TensorRT")


def test_a_quantised_model_on_eight_is_allowed_int8_by_a_flag():
    assert choose_typing("", files("int8", holds_int8=True), EIGHT, "TensorRT").flags == ("INT8",)


@pytest.mark.parametrize("version", [ELEVEN, RTX_ONE])
@pytest.mark.parametrize("asked", ["f16", "bf16"])
def test_a_version_without_weak_typing_lowers_nothing(version, asked):
    with pytest.raises(BackendUnavailable, match=f"this one holds f32, and {asked} was asked for"):
        choose_typing(asked, files("f32"), version, "TensorRT")


@pytest.mark.parametrize(("asked", "exported"), [("bf16", "f32"), ("", "bf16")])
def test_eight_has_no_bf16(asked, exported):
    with pytest.raises(BackendUnavailable, match="has no bf16"):
        choose_typing(asked, files(exported), EIGHT, "TensorRT 8.6.1")


@pytest.mark.parametrize("version", ["8.5.2", "7.1", "9.0", "", "abc"])
def test_versions_that_are_not_supported_are_refused(version):
    with pytest.raises(BackendUnavailable):
        traits_of(FULL, version)


def test_rows_are_the_only_axis_that_needs_no_option():
    ranges = plan_shapes([IMAGE], None, {})
    image = ranges["image"]
    assert (image.least[0], image.tuned[0], image.most[0]) == (1, 8, ENGINE_ROWS)
    assert plan_shapes([IMAGE], 4, {})["image"].tuned == (4, 3, 224, 224)
    assert plan_shapes([TensorSpec("x", "FP32", (1, 3))], 4, {}) == {}


def test_another_open_axis_without_bounds_says_which_options_to_write():
    with pytest.raises(LoadFailed, match=r'"tensorrt.min_shapes" = "ids:1x1" and "tensorrt.max_shapes" = "ids:1x128"'):
        plan_shapes([TOKENS], None, {})


def test_bounds_in_the_options_make_the_profile():
    options = {"min_shapes": "ids:1x1", "max_shapes": "ids:4x128"}
    assert plan_shapes([TOKENS], None, options)["ids"].tuned == (4, 128)
    assert plan_shapes([TOKENS], None, {**options, "opt_shapes": "ids:1x32"})["ids"].tuned == (1, 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_shapes": "ids"}, "wanted NAME:1x3x224x224"),
        ({"min_shapes": "ids:1xa"}, "wanted NAME:1x3x224x224"),
        ({"min_shapes": "other:1x1"}, "the model has no input 'other'; it has ids"),
        ({"min_shapes": "ids:1x1x1"}, "does not fit input 'ids'"),
        ({"min_shapes": "ids:0x1"}, "does not fit input 'ids'"),
        ({"min_shapes": "ids:8x8", "max_shapes": "ids:4x4"}, "wanted min_shapes <= opt_shapes <= max_shapes"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_is_wanted(options, words):
    with pytest.raises(LoadFailed, match=words):
        plan_shapes([TOKENS], None, options)


@given(st.integers(1, 1 << 16), st.lists(st.one_of(st.just(-1), st.integers(1, 64)), min_size=1, max_size=4))
def test_a_profile_is_ordered_and_fits_the_model_whatever_its_shape(rows, shape):
    tensor = TensorSpec("x", "FP32", (shape[0], *(abs(size) for size in shape[1:])))
    for planned in plan_shapes([tensor], rows, {}).values():
        assert all(tensor.fits(each) for each in (planned.least, planned.tuned, planned.most))
        assert planned.least <= planned.tuned <= planned.most
        assert planned.most[0] == rows


def plan(options: dict[str, str] | None = None, precision: str = "") -> EnginePlan:
    return plan_engine(
        "/models/m/1/model.onnx", (FULL, "10.3.0"), precision, plan_shapes([IMAGE], None, {}), options or {}, gpu=ORIN
    )


def test_an_unknown_option_names_the_nearest_known_one():
    with pytest.raises(LoadFailed, match=r"no option 'tf23' \(did you mean tf32\?\)"):
        plan({"tf23": "1"})


@pytest.mark.parametrize(
    "options",
    [{"tf32": "yes"}, {"workspace_mb": "0"}, {"workspace_mb": "-1"}, {"optimization_level": "6"}, {"gpu_fallback": ""}],
)
def test_an_options_value_that_cannot_be_is_refused(options):
    with pytest.raises(LoadFailed, match=f"option {next(iter(options))}: got"):
        plan(options)


def test_options_are_taken():
    wanted = plan({"tf32": "1", "workspace_mb": "64", "optimization_level": "5", "gpu_fallback": "1"})
    assert (wanted.tf32, wanted.workspace_bytes, wanted.optimization_level, wanted.gpu_fallback) == (
        True, 64 << 20, 5, True
    )  # fmt: skip


def test_tf32_is_off_unless_it_is_asked_for():
    assert plan().tf32 is False


CHANGES = {
    "the model": lambda: engine_key(plan(), "other", ORIN),
    "the version": lambda: engine_key(msgspec.structs.replace(plan(), version="10.4.0"), "digest", ORIN),
    "the library": lambda: engine_key(msgspec.structs.replace(plan(), library=RTX), "digest", ORIN),
    "the GPU": lambda: engine_key(plan(), "digest", msgspec_gpu(name="Thor")),
    "its capability": lambda: engine_key(plan(), "digest", msgspec_gpu(capability="8.9")),
    "the driver": lambda: engine_key(plan(), "digest", msgspec_gpu(driver="CUDA 12080; R36")),
    "the precision": lambda: engine_key(plan(precision="f16"), "digest", ORIN),
    "an option": lambda: engine_key(plan({"tf32": "1"}), "digest", ORIN),
    "the profile": lambda: engine_key(msgspec.structs.replace(plan(), shapes={}), "digest", ORIN),
    "the DLA": lambda: engine_key(msgspec.structs.replace(plan(), dla_core=0), "digest", ORIN),
}


def msgspec_gpu(**changes: str) -> Gpu:
    return msgspec.structs.replace(ORIN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_anything_that_an_engine_depends_on_changes_its_key(what):
    assert CHANGES[what]() != engine_key(plan(), "digest", ORIN)


def test_where_the_model_lies_and_which_of_equal_gpus_it_is_do_not_change_the_key():
    elsewhere = msgspec.structs.replace(plan(), artifact="/other/model.onnx", device=1)
    assert engine_key(elsewhere, "digest", msgspec_gpu()) == engine_key(plan(), "digest", ORIN)


@pytest.mark.parametrize(
    ("device", "parsed"),
    [
        ("", (0, None)),
        ("GPU", (0, None)),
        ("gpu:1", (1, None)),
        ("DLA", (0, 0)),
        ("DLA:1", (0, 1)),
        ("CUDA", (0, None)),
    ],
)
def test_devices_are_gpus_and_dlas(device, parsed):
    assert parse_device(device) == parsed


@pytest.mark.parametrize("device", ["CPU", "NPU", "GPU:x", "GPU:-1", "DLA:9999"])
def test_other_devices_are_refused(device):
    with pytest.raises(BackendUnavailable, match="wanted GPU, GPU:1, DLA:0 or DLA:1"):
        parse_device(device)
