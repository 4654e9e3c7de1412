"""The command line against a ROUTER that speaks wire v1: what it prints, what it sends, and its exit status."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime import __version__
from edge_runtime.cli.actions import actions_of
from edge_runtime.cli.completion import script_for
from edge_runtime.cli.main import main, verb_names
from edge_runtime.errors import LoadFailed, ModelNotFound
from tests.fakes.server import METADATA, FakeServer, Received

Run = Callable[..., int]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock") as server:
        monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def control(tmp_path: Path, server: FakeServer) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock.control", is_control=True) as control:
        yield control


def infers(server: FakeServer) -> list[Received]:
    return [request for request in server.requests if request.header.op == "infer"]


def two_inputs(server: FakeServer) -> None:
    server.results["metadata"] = {
        **METADATA,
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": [-1, 8]},
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
        ],
    }


# ---- the program itself ---------------------------------------------------------------------------------------------


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in verb_names())


@pytest.mark.parametrize("verb", verb_names())
def test_each_verb_says_what_it_takes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_no_verb_is_a_usage_error_that_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "infer" in capsys.readouterr().err


def test_json_may_be_asked_for_before_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "profile", "list"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["infre"], "did you mean 'infer'?"),
        (["infer", "m", "--timout-ms", "3"], "did you mean '--timeout-ms'?"),
        (["models", "lst"], "did you mean 'list'?"),
        (["--json"], "--json comes behind the verb"),
        (["--timeout-ms", "3", "infer", "m"], "--timeout-ms comes behind the verb"),
        (["help", "infre"], "did you mean 'infer'?"),
        (["models"], "wants an action"),
        (["profile"], "wants an action"),
        (["infer"], "MODEL"),
        (["infer", "m", "--repeat", "0"], "wanted 1 or more"),
        (["infer", "m", "--priority", "10"], "invalid choice: 10"),
        (["bench", "m", "--in-flight", "1,x"], "got 'x', wanted a whole number"),
        (["bench", "m", "--rate", "-1"], "wanted more than 0"),
        (["bench", "m", "--rate", "5", "--in-flight", "5"], "not allowed with"),
        (["serve", "--modles", "x"], "did you mean '--models'?"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_a_wrong_command_line_is_status_2_with_a_hint(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert complaint in err
    assert out == ""


def test_the_module_is_the_same_program_and_help_imports_no_numpy() -> None:
    program = "import sys; from edge_runtime.cli.main import main; main(['--help']); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


def test_output_that_nobody_reads_any_more_is_not_a_traceback() -> None:
    program = "import sys; from edge_runtime.cli.main import main; sys.exit(main(['profile', 'list']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(60) == 1


# ---- no daemon ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["infer", "m", "--zeros"], ["models", "list"], ["models", "load", "m"], ["status"], ["bench", "m"]]
)
def test_no_daemon_is_one_paragraph_that_says_how_to_start_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--connect", f"{tmp_path}/none.sock"]) == 1
    err = capsys.readouterr().err
    assert f"no daemon answers at ipc://{tmp_path}/none.sock" in err
    assert "edge-runtime serve --models DIR" in err
    assert "Traceback" not in err


def test_an_error_is_json_too_when_json_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--connect", f"{tmp_path}/none.sock"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["retryable"]) == ("no_daemon", True)


def test_a_bad_endpoint_and_a_bad_key_file_are_errors_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--connect", "ftp://x/y"]) == 1
    assert "wanted ipc:///path" in capsys.readouterr().err
    keys = tmp_path / "keys.toml"
    keys.write_text('server_key = "x"\n')
    assert main(["status", "--connect", "tcp://127.0.0.1:9", "--curve-keys", str(keys)]) == 1
    assert "public_key" in capsys.readouterr().err
    assert main(["status", "--connect", "tcp://127.0.0.1:9", "--curve-keys", f"{tmp_path}/none"]) == 1
    assert "cannot be read" in capsys.readouterr().err


# ---- infer ----------------------------------------------------------------------------------------------------------


def test_a_npy_file_goes_in_and_the_answer_is_shown(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2, 3, 4.5]], np.float32))
    assert main(["infer", "echo", "--input", f"x={tmp_path}/x.npy", "--timing"]) == 0
    shown = capsys.readouterr().out
    assert "x  FP32 [1, 4]" in shown
    assert "4.5" in shown
    assert "ran 1.50 ms in a batch of 2" in shown


def test_an_answer_as_json_is_the_protocols(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "echo", "--input", "@[[1, 2, 3, 4]]", "--json", "--version", "3", "--timeout-ms", "50"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model_version"] == "3"
    assert answer["outputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]
    assert answer["latency_ms"]["max"] > 0
    header = infers(server)[0].header
    assert (header.version, header.timeout_ms) == (3, 50.0)


def test_more_rows_than_one_request_takes_go_in_several(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.arange(70 * 4, dtype=np.float32).reshape(70, 4)
    np.save(tmp_path / "rows.npy", rows)
    assert main(["infer", "echo", "--input", f"x={tmp_path}/rows.npy", "--output", f"{tmp_path}/out.npy"]) == 0
    assert [request.header.inputs[0].shape[0] for request in infers(server)] == [32, 32, 6]
    assert np.array_equal(np.load(tmp_path / "out.npy"), rows)
    assert "70 rows in 3 requests: one takes 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.json", b"[[1, 2, 3, 4]]"),
        ("flat.json", b"[1, 2, 3, 4]"),
        ("x.bin", np.array([1, 2, 3, 4], "<f4").tobytes()),
        ("x.raw", np.array([1, 2, 3, 4], "<f4").tobytes()),
    ],
)
def test_a_file_takes_the_models_datatype_and_shape(
    name: str, content: bytes, tmp_path: Path, server: FakeServer
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["infer", "echo", "--input", str(tmp_path / name)]) == 0
    (request,) = infers(server)
    assert request.header.inputs[0].shape == (1, 4)
    assert request.tensors[0] == np.array([1, 2, 3, 4], "<f4").tobytes()


def test_raw_bytes_may_have_their_own_shape_and_datatype(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(range(8)))
    words = ["infer", "echo", "--input", f"{tmp_path}/x.bin", "--shape", "2,4", "--datatype", "uint8"]
    assert main(words) == 0
    assert infers(server)[0].header.inputs[0].datatype == "UINT8"
    assert infers(server)[0].header.inputs[0].shape == (2, 4)


def test_doubles_in_a_npy_file_are_read_as_the_models_floats_and_said(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.arange(4.0))
    assert main(["infer", "echo", "--input", f"{tmp_path}/x.npy"]) == 0
    assert "float64 read as FP32" in capsys.readouterr().err
    assert infers(server)[0].header.inputs[0].shape == (1, 4)


@pytest.mark.parametrize(
    "said",
    [
        {"ids": [[1, 2, 3, 4, 5, 6, 7, 8]], "text": ["né"]},
        {
            "inputs": [
                {"name": "ids", "shape": [1, 8], "data": [1, 2, 3, 4, 5, 6, 7, 8]},
                {"name": "text", "data": ["né"]},
            ]
        },
    ],
    ids=["names", "protocol"],
)
def test_stdin_may_hold_every_input(said: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    two_inputs(server)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(said)))
    assert main(["infer", "echo", "--input", "-"]) == 0
    (request,) = infers(server)
    assert request.tensors == (np.arange(1, 9, dtype="<i8").tobytes(), b"\x03\x00\x00\x00" + "né".encode())


def test_made_up_inputs_are_the_same_for_the_same_seed(server: FakeServer) -> None:
    two_inputs(server)
    for seed in ("1", "1", "2"):
        assert main(["infer", "echo", "--random", "--rows", "3", "--seed", seed]) == 0
    assert main(["infer", "echo", "--zeros", "--input", "ids=@[[1,2,3,4,5,6,7,8]]", "--shape", "text=1"]) == 0
    first, again, other, zeros = infers(server)
    assert first.tensors == again.tensors != other.tensors
    assert [tensor.shape for tensor in first.header.inputs] == [(3, 8), (3,)]
    assert zeros.tensors == (np.arange(1, 9, dtype="<i8").tobytes(), bytes(4))


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        ([], 2, "input 'x' is missing; the model wants --input x=FILE"),
        (["--input", "y=@1"], 2, "no input 'y'"),
        (["--input", "@[1"], 2, "not JSON"),
        (["--input", "x.txt"], 2, "none of .npy"),
        (["--input", "@1", "--input", "@2"], 2, "given twice"),
        (["--zeros", "--shape", "2,x"], 2, "wanted lengths"),
        (["--zeros", "--shape", "2,5"], 2, "the model wants [-1, 4]"),
        (["--zeros", "--datatype", "FP23"], 2, "did you mean 'FP32'?"),
        (["--input", '@["a", "b"]'], 1, "the model wants FP32"),
        (["--input", "@[[1, 2], [3]]"], 1, "input 'x'"),
        (["--input", "none.npy"], 1, "none.npy: No such file"),
        (["--input", "none.png"], 1, "none.png"),
    ],
)
def test_an_input_that_does_not_fit_is_said_before_anything_is_sent(
    words: list[str], status: int, complaint: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", "echo", *words]) == status
    assert complaint in capsys.readouterr().err
    assert infers(server) == []


def test_files_that_are_not_arrays_are_refused(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.npy").write_bytes(b"\x80\x04.")  # a pickle
    assert main(["infer", "echo", "--input", f"{tmp_path}/x.npy"]) == 1
    assert "not a .npy file of numbers" in capsys.readouterr().err
    (tmp_path / "x.bin").write_bytes(bytes(15))
    assert main(["infer", "echo", "--input", f"{tmp_path}/x.bin"]) == 1
    assert "is 15 bytes" in capsys.readouterr().err


def test_scores_are_shown_best_first(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.results["metadata"] = {**METADATA, "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 7]}]}
    assert main(["infer", "echo", "--input", "@[[0.1, 0.05, 0.5, 0.2, 0.05, 0.05, 0.05]]"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:5] == ["1. [2]  50.00%", "2. [3]  20.00%", "3. [0]  10.00%"]


def test_a_large_output_is_shown_in_brief(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.results["metadata"] = {**METADATA, "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 20, 20]}]}
    assert main(["infer", "echo", "--random", "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "mean 0.5" in shown or "mean 0.4" in shown
    assert len(shown.splitlines()) < 30


def test_outputs_are_saved_as_npy(tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "echo", "--input", "@[[1,2,3,4]]", "--output", f"{tmp_path}/out"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "x.npy"), [[1, 2, 3, 4]])
    assert main(["infer", "echo", "--zeros", "--output", f"{tmp_path}/one.npy"]) == 0
    assert np.load(tmp_path / "one.npy").shape == (1, 4)
    two_inputs(server)
    assert main(["infer", "echo", "--zeros", "--output", f"{tmp_path}/two.npy"]) == 2
    assert "2 outputs" in capsys.readouterr().err


def test_repeat_shows_latencies(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "echo", "--zeros", "--repeat", "5"]) == 0
    assert "5 times: p50" in capsys.readouterr().out
    assert len(infers(server)) == 5


def test_a_model_name_that_is_nearly_right_is_named(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.results["metadata"] = ModelNotFound("no model 'ehco'; there are: echo")
    assert main(["infer", "ehco", "--zeros"]) == 1
    assert "did you mean 'echo'?" in capsys.readouterr().err


def test_a_refusal_is_an_error_with_its_code(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "busy", "--zeros", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "queue_full"
    assert "64 rows wait" in err


# ---- models ---------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_what_there_is_to_say(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.results["models"] = [
        {"name": "a", "version": 1, "state": "ready", "reason": "", "backend": "openvino", "memory_bytes": 3 << 20},
        {"name": "b", "version": 12, "state": "failed", "reason": "no such operator: Foo", "memory_bytes": 0},
    ]
    assert main(["models", "list"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "version", "state", "backend", "memory", "reason"]
    assert first.split() == ["a", "1", "ready", "openvino", "3.0", "MiB"]
    assert second.endswith("no such operator: Foo")
    assert main(["models", "list", "--names"]) == 0
    assert capsys.readouterr().out.split() == ["a", "b"]
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == server.results["models"]
    server.results["models"] = []
    assert main(["models", "list"]) == 0
    assert "<models>/<name>/1/model.onnx" in capsys.readouterr().out


def test_files_that_are_not_served_are_listed_and_long_reasons_stand_below_the_table(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "is a pickle, which holds code: " + "where it was made, " * 5
    left = {"version": None, "state": "not_served", "backend": "", "memory_bytes": 0}
    server.results["models"] = [
        {"name": "a", "version": 1, "state": "ready", "reason": "", "backend": "openvino", "memory_bytes": 0},
        {"name": "b", "version": 2, "state": "failed", "reason": long, "memory_bytes": 0},
        {"name": "c", "reason": long, "path": "/models/c.pkl", **left},
        {"name": "my d", "reason": "'my d' is not a model name", "path": "/models/my d.onnx", **left},
    ]
    assert main(["models", "list"]) == 0
    table, *below = capsys.readouterr().out.strip().split("\n\n")
    rows = [line.split() for line in table.splitlines()[1:]]
    begins = f"{long[:59].rstrip()}…"
    assert [line.partition(begins)[0].split() for line in table.splitlines()[2:4]] == [
        ["b", "2", "failed"],
        ["c", "not_served"],
    ]
    assert rows[3] == ["my", "d", "not_served", "'my", "d'", "is", "not", "a", "model", "name"]
    assert [line.strip() for line in below] == [f"b 2: {long}".strip(), f"/models/c.pkl: {long}".strip()]
    assert main(["models", "list", "--names"]) == 0
    assert capsys.readouterr().out.split() == ["a", "b"]


def test_show_says_what_a_model_takes_and_gives(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "echo"]) == 0
    shown = capsys.readouterr().out
    assert "[?, 4]" in shown
    assert "4.0 MiB" in shown


def test_load_and_unload_go_to_control_and_show_the_outcome(
    control: FakeServer, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "load", "echo", "--version", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == ["echo", "3", "ready"]
    assert "loading echo" in err
    assert main(["models", "unload", "echo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert [request.header.op for request in control.requests] == ["load", "unload"]
    control.results["load"] = LoadFailed("model.onnx: no such operator: Foo")
    assert main(["models", "load", "echo"]) == 1
    assert "no such operator" in capsys.readouterr().err


def test_a_daemon_that_still_loads_is_seen_through_its_control_endpoint(
    control: FakeServer, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    control.results["models"] = [{"name": "echo", "version": 3, "state": "loading", "reason": ""}]
    assert main(["models", "list"]) == 0
    assert "loading" in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "live, not ready" in capsys.readouterr().out


# ---- status ---------------------------------------------------------------------------------------------------------

STATS: dict[str, Any] = {
    "version": "0.1.0",
    "uptime_s": 100.0,
    "ready": True,
    "profile": "x86-generic",
    "models": [{"name": "echo", "version": 3, "state": "ready"}],
    "host": {"rss_bytes": 50 << 20, "cpu_cores": 0.5, "temperatures_celsius": {"cpu": 61.2}},
    "metrics": {
        "models": {
            "echo": {
                "answered": 5000,
                "refused": {"queue_full": 7, "deadline_unmeetable": 2},
                "batch_rows": {"mean": 3.25},
                "total_ms": {"p50": 0.5, "p95": 1.25, "p99": 12.5},
                "queue_rows": 4,
            }
        },
        "counters": {"replies_dropped": 1234},
    },
}


def test_status_shows_rates_latencies_queues_and_refusals(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.results["stats"] = STATS
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("echo"))
    assert row.split() == ["echo", "3", "ready", "50.0", "0.500", "1.25", "12.5", "3.2", "4", "9"]
    assert "deadline_unmeetable 2, queue_full 7" in shown
    assert "1,234" in shown
    assert "61 °C" in shown
    assert "1 min 40 s" in shown


def test_status_shows_what_is_to_be_known_of_a_version(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "tensorrt: its engine is being built (42%, timing tactics)"
    server.results["stats"] = STATS | {"models": [{"name": "echo", "version": 3, "state": "ready", "reason": reason}]}
    assert main(["status"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[shown.index("reasons") + 1].split(maxsplit=2) == ["echo", "3", reason]


def test_status_shows_the_processes_of_models_and_why_the_last_ended(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {"pid": 4711, "restarts": 2, "memory_bytes": 43 << 20, "last_end": "its process was ended by SIGSEGV"}
    entries = [{"name": "echo", "version": 3, "host": host}, {"name": "inside", "version": 1, "host": None}]
    server.results["stats"] = STATS | {"models": entries}
    assert main(["status"]) == 0
    shown = capsys.readouterr().out.splitlines()
    wanted = "echo 3 process 4711, 43.0 MiB, 2 restarts, the last: its process was ended by SIGSEGV"
    assert shown[shown.index("hosts") + 1].split() == wanted.split()
    assert not any(line.startswith("inside 1") for line in shown[shown.index("hosts") :])


def test_status_says_what_is_open_to_hosts_and_why(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"landlock": 0, "unguarded": ["other files", "signals"], "cause": "filtered", "reason": "a filter"}
    for sandbox, line in (
        (told, "sandbox     open to hosts: other files, signals (a filter)"),
        ({**told, "unguarded": []}, ""),
    ):
        server.results["stats"] = {**STATS, "sandbox": sandbox}
        assert main(["status"]) == 0
        shown = [each.strip() for each in capsys.readouterr().out.splitlines() if "sandbox" in each]
        assert shown == ([line] if line else [])


@pytest.mark.parametrize(
    "stats",
    [
        {},
        {"uptime_s": 0},
        {"metrics": None, "models": None},
        {"metrics": {"models": {"gone": {"total_ms": {"p50": None}}}}},
        {"host": {"rss_bytes": None, "temperatures_celsius": {}}},
    ],
)
def test_status_stands_what_a_daemon_does_not_tell(
    stats: dict[str, Any], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.results["stats"] = stats
    assert main(["status"]) == 0
    assert "live, not ready" in capsys.readouterr().out


def test_status_for_a_health_check_fails_until_the_daemon_is_ready(server: FakeServer) -> None:
    server.results["stats"] = {**STATS, "ready": False}
    assert main(["status", "--ready"]) == 1
    server.results["stats"] = STATS
    assert main(["status", "--ready"]) == 0


def test_status_as_json_is_what_the_daemon_says(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.results["stats"] = STATS
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"endpoint": server.endpoint, **STATS}


# ---- bench ----------------------------------------------------------------------------------------------------------


def test_bench_measures_each_load(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "echo", "--in-flight", "1,8", "--seconds", "1", "--warmup", "0.1", "--rows", "2"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["in_flight"] for run in found["runs"]] == [1, 8]
    for run in found["runs"]:
        assert run["answered"] > 0
        assert run["lost"] == 0
        assert 0 < run["latency_ms"]["p50"] <= run["latency_ms"]["p99"] <= run["latency_ms"]["max"]
        assert 0 <= run["client_ms"]["p50"] <= run["client_ms"]["max"] <= run["latency_ms"]["max"]
        assert 0 <= run["mean_ms"]["client"] <= run["client_ms"]["max"]
        assert run["mean_ms"]["daemon"] is None, "this one tells nothing of its own"
    assert infers(server)[-1].header.inputs[0].shape == (2, 4)
    assert main(words) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.startswith("load")
    assert first.startswith("1 in flight")
    assert second.startswith("8 in flight")


def test_bench_offers_a_rate_whether_or_not_the_daemon_keeps_up(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "echo", "--rate", "300", "--seconds", "1", "--warmup", "0", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert 200 < run["sent"] < 400, "Poisson: 300 with a standard deviation of 17"
    assert run["answered"] <= run["sent"]
    assert run["lost"] == 0


def test_bench_of_a_model_that_refuses_says_so_at_once(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "busy", "--seconds", "1"]) == 1
    assert "64 rows wait" in capsys.readouterr().err


# ---- profile, completion, serve -------------------------------------------------------------------------------------


def test_profile_show_says_what_was_chosen_and_why_not_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"]["name"] not in found["rejected"]
    assert all(found["rejected"].values())
    assert {probe["name"] for probe in found["backends"]} >= {"onnxruntime", "openvino", "python"}
    assert main(["profile", "show"]) == 0
    shown = capsys.readouterr().out
    assert f"Profile {found['profile']['name']}" in shown
    assert "Not chosen" in shown


def test_profile_list_marks_the_one_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(profile["chosen"] for profile in found) == 1
    assert main(["profile", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(found) + 1


def test_an_unknown_profile_is_an_error_that_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "--profile", "toaster"]) == 1
    assert "raspberry-pi-5" in capsys.readouterr().err


def test_the_bash_completion_knows_verbs_options_and_models(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    program = f'edge-runtime() {{ {sys.executable} -m edge_runtime "$@"; }}'

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("edge-runtime", *words))
        asked = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _edge_runtime; echo "${{COMPREPLY[@]}}"'
        return subprocess.run(
            ["bash", "-c", f"{program}\n{script}\n{asked}"], capture_output=True, text=True, check=True
        ).stdout.split()

    assert completed("mod") == ["models"]
    assert completed("models", "l") == sorted(name for name in actions_of("models") if name.startswith("l"))
    assert completed("infer", "ec") == ["echo"]
    assert completed("models", "show", "") == ["echo"]
    assert completed("models", "try", "") == ["echo"]
    assert completed("update", "r") == ["rollback"]
    assert completed("update", "rollback", "") == ["echo"]
    assert completed("infer", "echo", "--tim") == ["--timeout-ms", "--timing"]
    assert completed("convert", "m.onnx", "--to", "o") == ["onnx", "openvino", "ort"]
    assert completed("convert", "m.onnx", "--to", "onnx", "--precision", "") == ["fp32", "fp16", "bf16", "int8"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in verb_names())
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shell"] == shell


def test_the_zsh_completion_completes_the_first_time_it_is_loaded_from_a_folder(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh; do: apt-get install zsh")
    (tmp_path / "_edge-runtime").write_text(script_for("zsh"))
    # compadd outside a completion would fail: this one says what it is given.
    begin = 'fpath=($0 $fpath); compadd() { print -r -- "$@"; }; _files() { print files; }; autoload -U _edge-runtime; '

    def completed(*words: str) -> tuple[str, str]:
        line = " ".join(f"'{word}'" for word in ("edge-runtime", *words))
        shown = subprocess.run(
            ["zsh", "-f", "-c", f"{begin} words=({line}); CURRENT={len(words) + 1}; _edge-runtime", str(tmp_path)],
            capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return shown.stdout, shown.stderr

    assert completed("completion", "") == ("-- bash zsh fish\n", "")
    assert completed("convert", "m.onnx", "--to", "") == ("-- onnx openvino ort tensorrt\n", "")
    assert completed("convert", "m.onnx", "--output", "") == ("files\n", "")


def test_the_fish_completion_knows_options_and_their_values(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish; do: apt-get install fish")
    (tmp_path / "edge-runtime.fish").write_text(script_for("fish"))

    def completed(line: str) -> list[str]:
        shown = subprocess.run(
            ["fish", "--no-config", "-c", f"source {tmp_path}/edge-runtime.fish; complete -C '{line}'"],
            capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return [found.partition("\t")[0] for found in shown.stdout.splitlines()]

    assert completed("edge-runtime convert m.onnx --to op") == ["openvino"]
    assert completed("edge-runtime convert m.onnx --prec") == ["--precision"]
    assert completed("edge-runtime completion ba") == ["bash"]


def test_serve_says_what_is_wrong_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--models", f"{tmp_path}/none"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "iris.onnx").touch()
    assert main(["serve", "--models", f"{tmp_path}/iris.onnx"]) == 2
    assert f"is a file, wanted a folder of models; to serve this file alone: --model iris={tmp_path}" in (
        capsys.readouterr().err
    )
    assert main(["serve", "--config", f"{tmp_path}/none.toml"]) == 2
    assert "none.toml" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("modles = 'x'\n")
    assert main(["serve", "--config", f"{tmp_path}/config.toml"]) == 2
    assert "modles" in capsys.readouterr().err
