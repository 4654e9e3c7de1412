"""A `model.py` in its host: crashes, hangs, noise, and nothing left behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.python.backend import PythonBackend
from edge_runtime.errors import BackendUnavailable, HostEnded, LoadFailed, RunFailed, RunTooLong
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend, HostInstance
from edge_runtime.sandbox.landlock import landlock_version
from edge_runtime.telemetry.logs import TRACEBACK
from tests.fakes.marked_processes import marked, wait_for_marked
from tests.models import onnx_models, python_models

Load = Callable[..., HostInstance]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


@pytest.fixture
def load(hosts: Hosts) -> Iterator[Load]:
    """Load an artifact in a host; closed when the test ends."""
    made: list[HostInstance] = []
    backend = HostedBackend(PythonBackend(allow=True), hosts, allows_code=True)

    def load_one(artifact: Path, **extra: str) -> HostInstance:
        made.append(backend.load(artifact, LoadOptions(extra=extra)))
        made[-1].finish_warm_up()
        return made[-1]

    yield load_one
    for instance in made:
        instance.close()


def value(number: float) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {"x": np.array([[number]], np.float32)}


def hosted(instance: HostInstance) -> psutil.Process:
    """The process that a model runs in."""
    instance.restore()
    return psutil.Process(instance.host.pid)


CRASH = "if value == 13: os.kill(os.getpid(), signal.SIGSEGV)"


def test_a_crash_fails_that_run_only_and_the_next_one_gets_a_new_host(tmp_path: Path, load: Load) -> None:
    instance = load(python_models.on_first_value(tmp_path, CRASH))
    before = hosted(instance)
    with pytest.raises(HostEnded, match="SIGSEGV") as failed:
        instance.run(value(13))
    assert (failed.value.signal_name, failed.value.is_outside, failed.value.was_alone) == ("SIGSEGV", False, True)
    assert instance.run(value(2))[0].tolist() == [[2.0]]
    assert hosted(instance) != before
    assert instance.host.restarts == 1


def test_a_failure_names_the_line_of_the_models_own_code(tmp_path: Path, load: Load) -> None:
    (tmp_path / "helper.py").write_text("import numpy as np\n\n\ndef stack(x):\n    return np.stack([x, x[:0]])\n")
    instance = load(
        python_models.on_first_value(tmp_path, "if value == 13: helper.stack(inputs['x'])", "import helper")
    )
    with pytest.raises(RunFailed, match=r"^the model failed: ValueError: all input .* \(helper.py:5\)$"):
        instance.run(value(13))
    (tmp_path / "model.py").write_text("x = 1\ny = x['a']\n")
    with pytest.raises(LoadFailed, match=r"TypeError: 'int' object .* \(model.py:2\)$"):
        load(tmp_path / "model.py")


def test_how_a_host_ended_is_in_the_log(tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    instance = load(python_models.on_first_value(tmp_path, f"{CRASH}\nif value == 14: os._exit(3)"))
    for crash in (13, 14):
        with pytest.raises(HostEnded, match="see the log"):
            instance.run(value(crash))
    told = [(record.getMessage(), vars(record)["reason"]) for record in caplog.records if "reason" in vars(record)]
    assert told == [
        ("a host ended", "its process was ended by SIGSEGV"),
        ("a host ended", "its process ended with exit status 3 and no result"),
    ]  # fmt: skip
    assert instance.host.last_end == "its process ended with exit status 3 and no result"


def test_a_model_that_cannot_be_loaded_again_is_given_up_with_the_reason(
    tmp_path: Path, load: Load, hosts: Hosts
) -> None:
    artifact = python_models.on_first_value(tmp_path, CRASH)
    instance = load(artifact)
    artifact.write_text("raise RuntimeError('half written')", encoding="utf-8")
    with pytest.raises(HostEnded):
        instance.run(value(13))
    with pytest.raises(RunFailed, match="half written"):
        instance.run(value(1))
    ((failed, reason),) = hosts.take_failures()
    assert failed is instance
    assert "cannot be started again" in reason


def test_an_exception_in_infer_fails_that_run_with_its_words_and_keeps_the_child(tmp_path: Path, load: Load) -> None:
    instance = load(python_models.on_first_value(tmp_path, "if value == 13: raise ValueError('thirteen is unlucky')"))
    before = hosted(instance)
    with pytest.raises(RunFailed, match="ValueError: thirteen is unlucky"):
        instance.run(value(13))
    assert instance.run(value(1))[0].tolist() == [[1.0]]
    assert hosted(instance) == before


def test_a_hung_run_fails_in_time_and_its_host_is_replaced(tmp_path: Path, load: Load) -> None:
    instance = load(python_models.on_first_value(tmp_path, "if value == 13: signal.pause()"), run_timeout_s="0.2")
    before = hosted(instance)
    for _ in range(2):
        with pytest.raises(RunTooLong, match=r"longer than its limit, 0.2 s"):
            instance.run(value(13))
    assert instance.run(value(1))[0].tolist() == [[1.0]]
    assert hosted(instance) != before


def test_a_model_that_loads_for_ever_is_given_up(tmp_path: Path, load: Load) -> None:
    artifact = python_models.on_first_value(tmp_path, "", preamble="signal.pause()")
    with pytest.raises(LoadFailed, match=r"not loaded within 0.3 s"):
        load(artifact, load_timeout_s="0.3")


def test_closing_ends_what_the_model_started_too(tmp_path: Path, load: Load) -> None:
    body = "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    instance = load(python_models.on_first_value(tmp_path, body))
    instance.run(value(1))
    host = hosted(instance)
    found = [host, *host.children()]
    assert len(found) == 2
    instance.close()
    psutil.wait_procs(found, timeout=60)
    assert [child for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


LEAVING = """
import subprocess, sys
MARK = {mark!r}
SLEEP = [sys.executable, "-c", "import signal; signal.pause()", MARK]
LEAVE = "import os, subprocess, sys, signal\\n" + (
    "for leave in (os.setsid, lambda: os.setpgid(0, 0)):\\n try: leave()\\n except OSError: pass\\n"
    "if os.fork(): os._exit(0)\\n"
    "signal.pause()"
)
def start():
    subprocess.run([sys.executable, "-c", LEAVE, MARK])  # its parent ends at once: an orphan
    subprocess.Popen(SLEEP)
"""
"""Starts two processes that do not end: one has lost its parent and tried to leave its session and group."""


def leaving(folder: Path) -> tuple[Path, str]:
    """A model that starts them at each run, and the mark that they carry."""
    mark = f"mark-{uuid.uuid4()}"
    return python_models.on_first_value(folder, f"start()\n{CRASH}", preamble=LEAVING.format(mark=mark)), mark


@pytest.mark.parametrize("end", ["closed", "crashed", "killed"])
def test_nothing_that_a_model_started_outlives_its_host(tmp_path: Path, load: Load, end: str) -> None:
    artifact, mark = leaving(tmp_path)
    instance = load(artifact)
    instance.run(value(1))
    assert len(wait_for_marked(mark, 2)) == 2
    before = hosted(instance)
    match end:
        case "closed":
            instance.close()
        case "crashed":
            with pytest.raises(HostEnded):
                instance.run(value(13))
        case "killed":
            before.kill()
            before.wait(60)
            while instance.host.restarts == 0:
                instance.restore()
    assert marked(mark) == [], "they are gone when the host's end is told"


def test_processes_that_one_model_started_live_on_when_the_host_of_another_ends(tmp_path: Path, load: Load) -> None:
    artifact, mark = leaving(tmp_path / "one")
    other, other_mark = leaving(tmp_path / "other")
    instance, ending = load(artifact), load(other)
    assert hosted(instance).ppid() == hosted(ending).ppid()
    for each in (instance, ending):
        each.run(value(1))
    assert (len(wait_for_marked(mark, 2)), len(wait_for_marked(other_mark, 2))) == (2, 2)
    ending.close()
    assert (len(marked(mark)), marked(other_mark)) == (2, [])


def test_nothing_that_a_model_started_outlives_the_process_that_prepares_hosts(tmp_path: Path, load: Load) -> None:
    artifact, mark = leaving(tmp_path)
    instance = load(artifact)
    instance.run(value(1))
    assert len(wait_for_marked(mark, 2)) == 2
    host = hosted(instance)
    psutil.Process(host.ppid()).kill()
    host.wait(60)
    while instance.host.restarts == 0:
        instance.restore()
    assert marked(mark) == []


def test_a_model_that_forks_without_end_is_ended_with_all_of_them(tmp_path: Path, load: Load) -> None:
    mark = f"mark-{uuid.uuid4()}"
    bomb = "import os, time\nfor _ in range(8):\n os.fork()\ntime.sleep(600)"
    body = f"subprocess.Popen([sys.executable, '-c', {bomb!r}, {mark!r}])"
    instance = load(python_models.on_first_value(tmp_path, body))
    instance.run(value(1))
    while instance.host.restarts == 0:
        instance.restore()
    assert "more than 64 processes" in instance.host.last_end
    assert marked(mark) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_hosts_and_what_they_started_die_when_the_daemon_is_killed(tmp_path: Path, stopped: bool) -> None:
    artifact, mark = leaving(tmp_path / "m" / "1")
    program = """
import signal, sys
from pathlib import Path
import numpy as np
from edge_runtime.backends.base import LoadOptions
from edge_runtime.hosts.instance import HostedBackend
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.backends.python.backend import PythonBackend
backend = HostedBackend(PythonBackend(allow=True), Hosts(), allows_code=True)
instance = backend.load(Path(sys.argv[1]), LoadOptions())
instance.run({"x": np.zeros((1, 1), np.float32)})
print(instance.host.pid, flush=True)
signal.pause()
"""
    folder = tmp_path / "tmp"
    left = folder / "edge-runtime-hosts-left" / "1"  # of a daemon that was killed with all its processes
    left.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(artifact)], stdout=subprocess.PIPE, env=environment
    ) as daemon:
        assert daemon.stdout is not None
        host = psutil.Process(int(daemon.stdout.readline()))
        found = [host, psutil.Process(host.ppid())]
        assert len(wait_for_marked(mark, 2)) == 2
        assert len(list(folder.glob("*/*"))) == 1, "the host's temporary folder"
        assert not left.exists()
        if stopped:
            for each in found:
                each.suspend()
        daemon.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(found, timeout=60)
    assert (len(gone), alive) == (2, [])
    assert wait_for_marked(mark, 0) == []
    assert list(folder.glob("*/*")) == []


def test_text_that_the_model_prints_goes_to_the_log(
    tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    instance = load(python_models.on_first_value(tmp_path, "print('hello'); print('oh no', file=sys.stderr)"))
    instance.run(value(1))
    instance.close()
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.endswith("hello")]
    assert [line for line in told if line.endswith("oh no")]


def test_a_traceback_is_one_warning_of_the_log(tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    instance = load(python_models.on_first_value(tmp_path, "raise ValueError('thirteen is unlucky')"))
    with pytest.raises(RunFailed):
        instance.run(value(1))
    instance.close()
    (told,) = [record for record in caplog.records if "unlucky" in record.getMessage()]
    assert told.levelname == "WARNING"
    assert told.getMessage().endswith(": ValueError: thirteen is unlucky")
    assert str(told.stack_info).startswith("Traceback (most recent call last):\n  File ")
    assert not [record for record in caplog.records if record.getMessage().endswith(TRACEBACK)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 5", "wanted a dict"),
        ("return {}", "gave no 'y'"),
        ("return {'y': inputs['x'].astype(np.float64)}", "as FP64, OUTPUTS says FP32"),
        ("return {'y': np.zeros((1, 2), np.float32)}", "of shape \\[1, 2\\], OUTPUTS says \\[-1, 1\\]"),
    ],
)
def test_an_answer_that_is_not_what_outputs_says_fails_the_run(
    tmp_path: Path, load: Load, body: str, reason: str
) -> None:
    instance = load(python_models.on_first_value(tmp_path, body))
    with pytest.raises(RunFailed, match=reason):
        instance.run(value(1))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "must say INPUTS"),
        (
            "INPUTS = [{'name': 'x', 'datatype': 'FLOAT', 'shape': [1]}]\nOUTPUTS = INPUTS",
            "datatype 'FLOAT' is unknown",
        ),
        ("INPUTS = OUTPUTS = [{'name': 'x', 'datatype': 'FP32', 'shape': [1]}]", "no function infer"),
        ("INPUTS = OUTPUTS = [{'name': 'x', 'datatype': 'FP32', 'shape': [1]}] * 2", "each name once"),
        ("def infer(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "ended its process"),
        ("import os; os._exit(0)", "ended its process"),
    ],
)
def test_a_model_that_breaks_the_contract_fails_to_load(tmp_path: Path, load: Load, source: str, reason: str) -> None:
    artifact = tmp_path / "model.py"
    artifact.write_text(source, encoding="utf-8")
    with pytest.raises(LoadFailed, match=reason):
        load(artifact)


def test_load_gets_the_version_folder_and_may_import_what_lies_beside(tmp_path: Path, load: Load) -> None:
    (tmp_path / "beside.py").write_text("ADD = 40\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text("2", encoding="utf-8")
    body = """
import beside
def load(folder):
    return beside.ADD + int((folder / "two.txt").read_text())
def infer(model, inputs):
    return {"y": inputs["x"] + model}
"""
    tensors = [("x", "INT64", [-1])], [("y", "INT64", [-1])]
    instance = load(python_models.write(tmp_path, *tensors, body))
    assert instance.run({"x": np.array([1, 2])})[0].tolist() == [43, 44]


@pytest.mark.skipif(landlock_version() < 6, reason="the kernel's Landlock does not keep signals in")
def test_a_hostile_model_reaches_nothing_but_its_own_folder(tmp_path: Path, load: Load) -> None:
    own, other = tmp_path / "own" / "1", tmp_path / "other" / "1"
    other.mkdir(parents=True)
    (other / "secret").write_text("weights")
    body = f"""
import ctypes, os, socket
def tried(step):
    try:
        step()
    except OSError:
        return 0
    return 1
def connect():
    with socket.socket(socket.AF_UNIX) as door:
        door.connect({str(tmp_path / "door")!r})
STEPS = [
    lambda: open({str(other / "secret")!r}).close(),
    lambda: open({str(other / "new")!r}, "w").close(),
    lambda: open({str(own / "new")!r}, "w").close(),
    lambda: os.unlink({str(own / "model.py")!r}),
    lambda: socket.create_connection(("127.0.0.1", 9)),
    connect,
    lambda: os.kill({os.getpid()}, 9),
    lambda: open("/proc/{os.getpid()}/mem", "rb").close(),
    lambda: open("/proc/{os.getpid()}/environ", "rb").read(),
]
def infer(inputs):
    return {{"y": np.array([[tried(step) for step in STEPS]])}}
import numpy as np
"""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        instance = load(python_models.write(own, [("x", "INT64", [-1])], [("y", "INT64", [-1, 9])], body))
        assert instance.run({"x": np.array([1])})[0].tolist() == [[0] * 9]
    assert (other / "secret").exists()


def test_a_model_starts_other_libraries_and_copies_files_and_has_a_temporary_folder(
    tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("onnxruntime") is None:
        pytest.skip("no onnxruntime")
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("EDGE_PASSPHRASE", "secret")
    monkeypatch.setenv("MODEL_COLOUR", "green")
    onnx_models.mlp(tmp_path)
    body = """
import os, shutil, tempfile
import onnxruntime
def load(folder):
    assert (os.environ.get("EDGE_PASSPHRASE"), os.environ.get("MODEL_COLOUR")) == (None, "green")
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
    copy = shutil.copytree(folder, os.path.join(tempfile.mkdtemp(), "copy"))
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    return onnxruntime.InferenceSession(os.path.join(copy, "model.onnx"))
def infer(model, inputs):
    return {"y": model.run(None, inputs)[0]}
"""
    instance = load(python_models.write(tmp_path, [("x", "FP32", [-1, 16])], [("y", "FP32", [-1, 4])], body))
    assert instance.run({"x": np.ones((3, 16), np.float32)})[0].shape == (3, 4)
    instance.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("edge_runtime.backends")] == []


def test_a_temporary_folder_that_grows_ends_its_host_and_goes_with_it(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
place = pathlib.Path(tempfile.gettempdir())
(place / str(value)).mkdir(mode=0)
if value == 13:
    for name in "abc":
        with (place / name).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 100 << 20)
    signal.pause()
if value == 14:
    os.posix_fallocate(os.open(place / "large", os.O_CREAT | os.O_WRONLY), 0, 300 << 20)
"""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    instance = load(python_models.on_first_value(tmp_path / "m", body, preamble="import pathlib, tempfile"))
    with pytest.raises(RunFailed, match="File too large"):
        instance.run(value(14))
    with pytest.raises(HostEnded, match="its temporary folder held more than 268435456 bytes"):
        instance.run(value(13))
    instance.run(value(1))
    assert [entry.name for entry in next(folder.iterdir()).glob("*/*")] == ["1"]
    instance.close()
    assert list(folder.glob("*/*")) == []


def test_a_device_is_the_models_own_business(tmp_path: Path) -> None:
    artifact = python_models.mlp(tmp_path)
    with pytest.raises(BackendUnavailable, match="GPU"):
        PythonBackend(allow=True).load(artifact, LoadOptions(device="GPU"))


def test_python_that_is_not_allowed_says_which_setting_allows_it(tmp_path: Path, hosts: Hosts) -> None:
    with pytest.raises(LoadFailed, match="python_models = true"):
        HostedBackend(PythonBackend(allow=False), hosts).load(python_models.mlp(tmp_path), LoadOptions())


def test_options_that_are_not_a_time_fail_to_load(tmp_path: Path, load: Load) -> None:
    with pytest.raises(LoadFailed, match="positive number of seconds"):
        load(python_models.mlp(tmp_path), run_timeout_s="soon")
