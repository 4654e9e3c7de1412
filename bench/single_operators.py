"""What models of one operator do to the process that loads and runs them: crashes, endless runs, memory, by operator.

    python -m bench.single_operators --library onnxruntime --of table --each 20
    python -m bench.single_operators --library openvino --of table,standard,schema --each 8 --json results.json

Owns: the children that run them. A child loads, warms up and runs model after model as the daemon would, until one ends
it; another child goes on behind that one. `inside` marks models that the rule lets run inside the daemon: of these none
may do harm, and the exit status says so. tests/unit/backends/onnx/test_inside_children.py runs a share of `table`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_runtime.backends.base import Backend, Instance, LoadOptions
from edge_runtime.backends.declaration import why_not_inside
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import BackendError
from edge_runtime.models.warmup import warm_up
from tests.models.single_operators import Case, table_cases

CPU_LIMIT_S = 5.0
"""Of one load or one run in processor time; the slowest of the others take a tenth of a second."""

SILENCE_LIMIT_S = 120.0
"""A child that says nothing for so long waits for something that never comes."""

MEMORY_LIMIT_BYTES = 2 << 30
"""Of a child's data: more is an error that the library reports, or a crash."""

LARGE_BYTES = 256 << 20
"""A model that adds more than this to the peak of its process takes memory without bound."""

CHILD_CASES = 100
"""Models of one child at most, so that what they leave behind cannot add up."""


@dataclass(frozen=True, slots=True)
class CaseEnding:
    """What became of one model. ending: answered, load_failed, run_failed, crash, endless, silent or large."""

    name: str
    operator: str
    is_inside: bool
    ending: str
    stage: str = ""
    detail: str = ""

    @property
    def does_harm(self) -> bool:
        """Whether it would have ended or starved the daemon."""
        return self.ending in ("crash", "endless", "silent", "large")


def run_cases(library: str, cases: Sequence[Case]) -> Iterator[CaseEnding]:
    """Run every model in children of this process, which must have one thread; the library is imported here once."""
    chosen = backend(library)
    probe = chosen.probe()
    assert probe.is_available, probe.reason
    first = 0
    while first < len(cases):
        endings = _child(chosen, cases[first : first + CHILD_CASES])
        yield from endings
        first += len(endings)


def _child(chosen: Backend, cases: Sequence[Case]) -> list[CaseEnding]:
    """Run models in one child, until the last or one that ends it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with contextlib.suppress(BaseException):
            _work(chosen, cases, writer)
        os._exit(0)
    os.close(writer)
    said = b""
    cause = "crash"
    while True:
        ready, _, _ = select.select([reader], [], [], SILENCE_LIMIT_S)
        chunk = os.read(reader, 1 << 16) if ready else b""
        if not ready:
            cause = "silent"
            os.kill(child, signal.SIGKILL)
        if not chunk:
            break
        said += chunk
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return _endings(cases, said.decode(errors="replace").splitlines(), status, cause)


def _endings(cases: Sequence[Case], lines: list[str], status: int, cause: str) -> list[CaseEnding]:
    endings: list[CaseEnding] = []
    stage, is_inside, is_over = "", False, True
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "begin":
            is_inside, is_over = rest == "inside", False
        elif word == "stage":
            stage = rest
        elif word == "end":
            ending, _, detail = rest.partition(" ")
            case = cases[len(endings)]
            endings.append(CaseEnding(case.name, case.operator, is_inside, ending, stage, detail))
            is_over = True
    if not is_over:
        ended_by = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
        case = cases[len(endings)]
        cause = "endless" if ended_by == "SIGPROF" else cause
        endings.append(CaseEnding(case.name, case.operator, is_inside, cause, stage, ended_by))
    assert endings, f"a child ended before its first model: {status}"
    return endings


# ---- in the child ---------------------------------------------------------------------------------------------------


def _work(chosen: Backend, cases: Sequence[Case], report: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def say(*words: str) -> None:
        os.write(report, (" ".join(" ".join(words).split()) + "\n").encode())

    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            artifact = Path(folder) / "model.onnx"
            artifact.write_bytes(case.model)
            say("begin", "inside" if why_not_inside(chosen.declaration, artifact, LoadOptions()) is None else "host")
            peak = _peak_bytes()
            ending, detail = _load_and_run(chosen, artifact, case, say)
            grown = _peak_bytes() - peak
            if grown > LARGE_BYTES or "bad_alloc" in detail or "Failed to allocate" in detail:
                say("end", "large", f"{grown >> 20} MiB {detail}")
                return
            say("end", ending, detail[:200])


def _load_and_run(chosen: Backend, artifact: Path, case: Case, say: Any) -> tuple[str, str]:
    try:
        say("stage", "load")
        with _limited():
            instance = chosen.load(artifact, LoadOptions())
    except BackendError as error:
        return "load_failed", error.message
    failed = ""
    for number in range(-1, len(case.feeds)):
        try:
            say("stage", "warm_up" if number < 0 else f"run {number}")
            with _limited():
                if number < 0:
                    warm_up(instance, ModelSettings())
                elif _fits(instance, case, number):
                    instance.run(case.feeds[number])
        except BackendError as error:
            failed = error.message
        except Exception as error:  # noqa: BLE001  of what a library gave back: the daemon's worker loop catches it too
            failed = f"{type(error).__name__}: {error}"
    instance.close()
    return ("run_failed", failed) if failed else ("answered", "")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """End this process when the block takes too much processor time: Python could not interrupt a library."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _fits(instance: Instance, case: Case, number: int) -> bool:
    """Whether the daemon would let these inputs through."""
    feed = case.feeds[number]
    inputs = {tensor.name: tensor for tensor in instance.spec.inputs}
    return set(feed) == set(inputs) and all(
        inputs[name].fits(array.shape) and array.shape[:1] != (0,) for name, array in feed.items()
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- the command ----------------------------------------------------------------------------------------------------


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which models are made."""
    parser.add_argument("--library", choices=("onnxruntime", "openvino"), required=True)
    parser.add_argument("--of", default="table", help="table, standard, schema, separated by commas")
    parser.add_argument("--each", type=int, default=8, help="models of each operator of table and schema")
    parser.add_argument("--chains", type=int, default=0, help="chains of operators of the table")
    parser.add_argument("--every", type=int, default=1, help="one of so many models")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one: goes on where one ended")


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    """Make the models that the arguments say."""
    kinds = arguments.of.split(",")
    cases: list[Case] = []
    if "table" in kinds:
        cases += table_cases(arguments.each, chains=arguments.chains)
    if "standard" in kinds or "schema" in kinds:
        from tests.models.standard_operators import schema_cases, standard_cases

        if "standard" in kinds:
            cases += standard_cases()
        if "schema" in kinds and arguments.library == "onnxruntime":
            from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

            own = [each for each in get_all_operator_schema() if each.domain == "com.microsoft"]
            cases += schema_cases(own, arguments.each)
    return cases[arguments.first :: arguments.every]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.single_operators", description=__doc__)
    add_case_arguments(parser)
    parser.add_argument("--json", type=Path, help="write the report there")
    arguments = parser.parse_args()
    cases = make_cases(arguments)
    started = time.monotonic()
    endings: list[CaseEnding] = []
    for number, ending in enumerate(run_cases(arguments.library, cases)):
        endings.append(ending)
        if sys.stderr.isatty() and number % 100 == 0:
            print(f"\r{number} of {len(cases)}", end="", file=sys.stderr)
    report = _report(arguments.library, endings, sum(len(case.feeds) for case in cases), time.monotonic() - started)
    text = json.dumps(report, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    return 1 if report["harm_inside"] else 0


def _report(library: str, endings: Sequence[CaseEnding], feeds: int, seconds: float) -> dict[str, Any]:
    harm: dict[str, Counter[str]] = defaultdict(Counter)
    for ending in endings:
        if ending.does_harm:
            harm[ending.operator][f"{ending.ending} {ending.stage.split(' ')[0]}"] += 1
    inside = [ending for ending in endings if ending.is_inside]
    return {
        "library": f"{library} {backend(library).probe().version}",
        "models": len(endings),
        "inputs": feeds,
        "seconds": round(seconds, 1),
        "endings": dict(Counter(ending.ending for ending in endings)),
        "inside": {
            "models": len(inside),
            "by_operator": dict(Counter(ending.operator for ending in inside)),
            "endings": dict(Counter(ending.ending for ending in inside)),
        },
        "harm_by_operator": {operator: dict(harm[operator]) for operator in sorted(harm)},
        "harm": [asdict(ending) for ending in endings if ending.does_harm],
        "harm_inside": [asdict(ending) for ending in inside if ending.does_harm],
        "unexpected_inside": [asdict(ending) for ending in inside if ending.ending in ("load_failed", "run_failed")][
            :20
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
