"""A release is tried in a process of its own: what is wrong with it ends there, in time, and is said in words."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import declaration_of, find_declaration
from edge_runtime.models.load_plans import LoadPlan
from edge_runtime.profiles.profile import BackendChoice
from edge_runtime.sandbox.ending import ChildResult, ShowProgress, judge_ending
from edge_runtime.tensors import Array
from edge_runtime.updates.manifest import TensorForm, Tolerance
from edge_runtime.updates.releases import Releases, StagedRelease
from edge_runtime.updates.store import ArtifactStore
from edge_runtime.updates.trial import Outcome, TrialLimits, TrialReport, TrialResult, TrialTask, judge, try_release
from tests.fakes.odd_trial import try_odd
from tests.fakes.releases import Made, make_release
from tests.models import onnx_models

X: Array = np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)
MIB = 1 << 20
LIMITS = TrialLimits(memory_bytes=256 * MIB, limit_s=60.0)
"""Of time: far more than any of these needs, so that a slow machine fails none."""


def described(columns: int) -> TensorForm:
    return TensorForm("y", "FP32", (-1, columns))


def staged(
    folder: Path, write: Callable[[Path], Path], y: Array | None = None, *, columns: int = 2, **others: object
) -> StagedRelease:
    """A release whose manifest says: x [-1, 2] -> y [-1, columns], for X the golden output `y` (X + 1)."""
    data = write(folder / "model").read_bytes()
    golden = X + 1 if y is None else y
    made = make_release(
        {"model.onnx": ("onnxruntime", data)},
        ({"x": X}, {"y": golden}),
        specs=([TensorForm("x", "FP32", (-1, 2))], [described(columns)]),
        **others,
    )
    return installed(folder, made)


def installed(folder: Path, made: Made) -> StagedRelease:
    store = ArtifactStore(folder / "artifacts")
    made.store(store)
    releases = Releases(folder / "releases", store)
    releases.lay_out(made.release, made.manifest_data, made.manifest.artifacts)
    return releases.open(made.release)


def candidates(release: StagedRelease, *backends: str) -> list[LoadPlan]:
    (version,) = release.folder.versions.values()
    options = LoadOptions(threads=1)
    return [
        LoadPlan(
            BackendChoice(name=name),
            version.files["model.onnx"],
            options,
            find_declaration(name) or replace(declaration_of("onnxruntime"), name=name),
        )
        for name in backends or ("onnxruntime",)
    ]


def attempt(release: StagedRelease, limits: TrialLimits = LIMITS, **others: object) -> TrialReport:
    return try_release(release, candidates(release), limits, **others)  # type: ignore[arg-type]


def attempt_with(release: StagedRelease, odd_backend: str) -> TrialReport:
    return try_release(release, candidates(release, odd_backend), LIMITS, child=try_odd)


@pytest.mark.smoke
def test_a_good_release_passes_and_says_how_it_ran(tmp_path: Path) -> None:
    report = attempt(staged(tmp_path, onnx_models.added))
    assert (report.outcome, report.reason) == (Outcome.PASSED, "")
    assert report.result is not None
    assert (report.result.backend, report.result.precision, report.result.note) == ("onnxruntime", "f32", "")
    assert report.result.run_s > 0
    assert report.result.peak_memory_bytes < 64 * MIB


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_tiny_release_passes_with_tiny_memory_whatever_the_library_takes(tmp_path: Path, name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    release = staged(tmp_path, onnx_models.added)
    report = try_release(release, candidates(release, name), TrialLimits(memory_bytes=1 * MIB, limit_s=60.0))
    assert (report.outcome, report.reason) == (Outcome.PASSED, "")


def test_a_release_with_its_weights_in_another_file_passes(tmp_path: Path) -> None:
    """The walk over a graph refuses data with a second name: a release's files must have one only."""
    weights = onnx_models.external_tensor("weights.data")
    model = onnx_models.add_weights(tmp_path / "model", weights).read_bytes()
    made = make_release(
        {"model.onnx": ("onnxruntime", model), "weights.data": ("onnxruntime", np.ones(2, np.float32).tobytes())},
        ({"x": X}, {"y": X + 1}),
        specs=([TensorForm("x", "FP32", (-1, 2))], [described(2)]),
    )
    assert attempt(installed(tmp_path, made)).outcome is Outcome.PASSED


def test_the_first_backend_that_loads_is_tried_and_the_others_are_noted(tmp_path: Path) -> None:
    release = staged(tmp_path, onnx_models.added)
    (plan,) = candidates(release)
    lacking = replace(plan, declaration=replace(plan.declaration, name="lacking", libraries=("no_library",)))
    report = try_release(release, [lacking, plan], LIMITS)
    assert report.outcome is Outcome.PASSED
    assert report.result is not None
    assert report.result.note.startswith("lacking: no_library is not installed")


def test_a_release_that_is_not_a_model_fails_with_the_librarys_reason(tmp_path: Path) -> None:
    def nonsense(folder: Path) -> Path:
        folder.mkdir()
        (folder / "model.onnx").write_bytes(b"nonsense")
        return folder / "model.onnx"

    report = attempt(staged(tmp_path, nonsense))
    assert report.outcome is Outcome.FAILED
    assert report.reason.startswith("no backend here can load it: onnxruntime: ")


def test_a_golden_output_that_differs_fails(tmp_path: Path) -> None:
    report = attempt(staged(tmp_path, lambda folder: onnx_models.added(folder, 1.01)))
    assert report.outcome is Outcome.FAILED
    assert report.reason.startswith("its golden output is wrong at precision f32: y: 4 of 4 values are too far")


def test_the_tolerance_of_the_manifest_is_the_one_that_counts(tmp_path: Path) -> None:
    release = staged(tmp_path, lambda folder: onnx_models.added(folder, 1.01))
    golden = release.manifest.golden
    golden.tolerance["f32"] = Tolerance(0.1, 0.1, exact=True)
    assert attempt(release).outcome is Outcome.PASSED


def test_an_output_that_is_not_a_number_fails(tmp_path: Path) -> None:
    report = attempt(staged(tmp_path, onnx_models.no_number))
    assert report.outcome is Outcome.FAILED
    assert report.reason == "its output 'y' has NaN or infinite values for its golden input"


@pytest.mark.parametrize("said", [2, 4])
def test_shapes_other_than_the_manifest_says_fail(tmp_path: Path, said: int) -> None:
    report = attempt(staged(tmp_path, lambda folder: onnx_models.added(folder, columns=3), columns=said))
    assert report.outcome is Outcome.FAILED
    assert report.reason == f"its output 'y' is FP32 [-1, 3]; its manifest says FP32 [-1, {said}]"


def test_tensors_of_other_names_fail(tmp_path: Path) -> None:
    report = attempt(staged(tmp_path, onnx_models.mlp))
    assert report.outcome is Outcome.FAILED
    assert report.reason == "its input 'x' is FP32 [-1, 16]; its manifest says FP32 [-1, 2]"
    report = attempt(staged(tmp_path / "other", onnx_models.two_in_two_out))
    assert report.reason == "its inputs are a, b; its manifest says x"


def test_an_endless_run_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    report = attempt(staged(tmp_path, onnx_models.endless), TrialLimits(256 * MIB, limit_s=3.0))
    assert report.outcome is Outcome.FAILED
    assert report.reason == "it was not done within 3 s"


def test_a_release_that_needs_more_memory_than_it_may_have_fails(tmp_path: Path) -> None:
    def hungry(folder: Path) -> Path:
        return onnx_models.hungry(folder, 4096 * MIB)

    report = attempt(staged(tmp_path, hungry))
    assert report.outcome is Outcome.FAILED
    assert "llocat" in report.reason or "memory" in report.reason, report.reason


def test_a_release_that_fits_its_memory_passes(tmp_path: Path) -> None:
    golden = X + X.max()
    release = staged(tmp_path, lambda folder: onnx_models.hungry(folder, 64 * MIB), golden)
    report = attempt(release)
    assert report.outcome is Outcome.PASSED, report.reason
    assert report.result is not None
    assert report.result.peak_memory_bytes >= 64 * MIB


# ---- crashes and hindrances: the child is a module of the tests, or runs code of theirs at its start -----------------


@pytest.fixture
def at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Code that a child runs when it begins."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda code: (tmp_path / "sitecustomize.py").write_text(code) and None


def test_a_native_abort_ends_the_child_alone_and_its_signal_is_said(
    tmp_path: Path, at_start: Callable[[str], None]
) -> None:
    release = staged(tmp_path, onnx_models.added)
    at_start("import os, sys\nprint('double free', file=sys.stderr, flush=True)\nos.abort()\n")
    report = attempt(release)
    assert report.outcome is Outcome.FAILED
    assert report.reason == "its process was ended by SIGABRT: double free"


def test_a_crash_inside_a_backend_is_the_releases_fault(tmp_path: Path) -> None:
    report = attempt_with(staged(tmp_path, onnx_models.added), "crashing")
    assert report.outcome is Outcome.FAILED
    assert report.reason.startswith("its process was ended by SIGSEGV")


def test_an_unexpected_error_of_a_library_is_the_releases_fault(tmp_path: Path) -> None:
    report = attempt_with(staged(tmp_path, onnx_models.added), "surprising")
    assert (report.outcome, report.reason) == (Outcome.FAILED, "KeyError: 'unknown operator'")


def test_whose_fault_a_child_is_that_the_kernel_kills_is_unclear(
    tmp_path: Path, at_start: Callable[[str], None]
) -> None:
    release = staged(tmp_path, onnx_models.added)
    at_start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    report = attempt(release)
    assert report.outcome is Outcome.UNCLEAR
    assert "is the device out of memory?" in report.reason


def test_a_process_that_a_child_leaves_running_ends_with_it(tmp_path: Path, at_start: Callable[[str], None]) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # The one that is left behind holds the pipe open as long as it lives.
    waits = f"    os.open({str(fifo)!r}, os.O_WRONLY)\n    signal.pause()\n"
    at_start(f"import os, signal\nif not os.fork():\n{waits}")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(fifo.read_bytes)
        assert attempt(staged(tmp_path, onnx_models.added)).outcome is Outcome.PASSED
        assert ended.result(60) == b""


def test_whose_fault_a_child_is_that_cannot_even_begin_is_unclear(
    tmp_path: Path, at_start: Callable[[str], None]
) -> None:
    release = staged(tmp_path, onnx_models.added)
    at_start("import sys\nsys.exit('half an installation')\n")
    report = attempt(release)
    assert report.outcome is Outcome.UNCLEAR
    assert report.reason.endswith("half an installation")


def test_words_without_end_cost_no_memory_and_no_time(tmp_path: Path, at_start: Callable[[str], None]) -> None:
    release = staged(tmp_path, onnx_models.added)
    at_start("import sys\nfor _ in range(300):\n    sys.stderr.write('x' * 65536)\nsys.exit('the end')\n")
    report = attempt(release)
    assert report.reason.endswith("SystemExit: the end")
    assert len(report.reason) < 1000


def test_a_stop_ends_a_trial_early(tmp_path: Path) -> None:
    stop = threading.Event()
    release = staged(tmp_path, onnx_models.endless)
    stop.set()
    report = attempt(release, stop=stop)
    assert (report.outcome, report.reason) == (Outcome.HINDERED, "the daemon stopped during the trial")


def never_called(task: TrialTask, progress: ShowProgress) -> TrialResult:
    raise AssertionError


def test_a_device_short_of_memory_does_not_even_begin(tmp_path: Path) -> None:
    release = staged(tmp_path, onnx_models.added, peak_memory_bytes=100 * MIB)
    report = attempt(release, free_bytes=99 * MIB, child=never_called)
    assert report.outcome is Outcome.HINDERED
    assert f"it needs {100 * MIB} bytes of memory to be tried" in report.reason


def test_a_child_knows_no_secret_runs_behind_the_daemon_and_leaves_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    report = attempt_with(staged(tmp_path, onnx_models.added), "telling")
    assert report.reason.endswith(f"MY_KEY=None parent={os.getpid()} niceness={os.nice(0) + 10} core=(0, 0)")


def test_the_output_of_a_library_is_not_taken_for_the_answer(tmp_path: Path) -> None:
    report = attempt_with(staged(tmp_path, onnx_models.added), "printing")
    assert report.outcome is Outcome.PASSED


def test_a_result_that_is_half_there_is_none() -> None:
    ending = judge_ending(0, report=ChildResult(msgspec.Raw(b'{"backend":')), result_type=TrialResult)
    assert judge(ending).outcome is Outcome.UNCLEAR
