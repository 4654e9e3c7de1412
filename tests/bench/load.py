"""Builds and runs the load generator: a process of its own, which shares no interpreter with what it measures.

load.c where there is a compiler, linked to the libzmq inside the pyzmq wheel; else generator.py, which is a quarter as
fast; or any program with load.c's command line and output (`--load-generator`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from edge_runtime.wire.codec import RequestHeader, TensorHeader, pack_array, pack_request
from tests.bench.makers import BenchModel, cache_folder
from tests.bench.servers import OK_BYTE, BenchError

HERE = Path(__file__).parent
START_AND_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the generator saw.

    Rates count answers alone. lost: sent, and neither answered nor refused when the drain ended. unsent: arrivals that
    the generator could not send in time. answered_in_time_span: answers that came within the measured seconds, whenever
    their request was due. refused_p99_ms: over all error replies; None when there were none.
    """

    rate: float
    goodput: float
    answered: int
    refused: int
    answered_in_time_span: int
    sent: int
    lost: int
    unsent: int
    stray: int
    p50_ms: float
    p99_ms: float
    refused_p99_ms: float | None
    codes: Mapping[str, Mapping[str, float]]


class Generator:
    """A built generator and how to call it."""

    def __init__(self, kind: str, command: Sequence[str], echo_command: Sequence[str]) -> None:
        self.kind = kind
        self._command = tuple(command)
        self._echo_command = tuple(echo_command)

    def echo(self, endpoint: str, reply_bytes: int) -> list[str]:
        """Command line of the echo server that finds the generator's own maximum."""
        return [*self._echo_command, "--echo", endpoint, "--reply-bytes", str(reply_bytes)]

    def closed(self, endpoint: str, request: Path, in_flight: int, seconds: float, warm_s: float = 0.5) -> Load:
        """Keep `in_flight` requests in flight for `seconds` after `warm_s`."""
        return self._run(endpoint, request, seconds, warm_s, ("--conc", str(in_flight)))

    def open(
        self,
        endpoint: str,
        request: Path,
        rate: float,
        seconds: float,
        *,
        deadline_ms: float = 1e9,
        seed: int = 0,
        warm_s: float = 1.0,
    ) -> Load:
        """Poisson arrivals, `rate` a second; goodput counts answers within `deadline_ms` of their scheduled arrival."""
        words = ("--rate", f"{rate:.3f}", "--slo-ms", f"{deadline_ms:.3f}", "--seed", str(seed))
        return self._run(endpoint, request, seconds, warm_s, words)

    def _run(self, endpoint: str, request: Path, seconds: float, warm_s: float, words: Sequence[str]) -> Load:
        drain_s = 10.0
        command = [*self._command, "--proto", "zmq", "--addr", endpoint, "--req", str(request)]
        command += ["--id-frame", "1", "--rid-frame", "1", "--st-frame", "0", "--ok-byte", str(OK_BYTE)]
        command += ["--secs", f"{seconds:.3f}", "--warm", f"{warm_s:.3f}", "--drain", f"{drain_s:.0f}", *words]
        limit_s = warm_s + seconds + drain_s + START_AND_STOP_S
        found = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        if found.returncode:
            raise BenchError(f"the load generator failed ({found.returncode}): {found.stderr.strip()[-500:]}")
        return _load(json.loads(found.stdout))


def find_generator(external: Path | None) -> Generator:
    """`external` when given, else load.c when it can be built, else Python."""
    in_python = [sys.executable, str(HERE / "generator.py")]
    native = _build()
    echo_command = [str(native)] if native else in_python
    if external is not None:
        return Generator(f"external: {external.name}", [str(external.resolve())], echo_command)
    if native is not None:
        return Generator("native (load.c)", [str(native)], echo_command)
    return Generator("Python (no C compiler: apt-get install gcc libc6-dev)", in_python, in_python)


def write_request(path: Path, model: BenchModel, *, served_as: str = "", timeout_ms: float | None = None) -> Path:
    """The frames of one request for one row of `model`, in load.c's file format; values are 0.5 everywhere."""
    header, tensor = _request(model, served_as or model.name, timeout_ms)
    with path.open("wb") as file:
        for frame in (header, bytes(8), tensor):
            file.write(struct.pack("I", len(frame)) + frame)
    return path


def mqtt_payload(model: BenchModel, *, timeout_ms: float | None = None) -> bytes:
    """The same request in the array form, for a broker."""
    header, tensor = _request(model, model.name, timeout_ms)
    return pack_array(header, [tensor])


# ---- private --------------------------------------------------------------------------------------------------------


def _request(model: BenchModel, served_as: str, timeout_ms: float | None) -> tuple[bytes, bytes]:
    tensors = (TensorHeader("x", "FP32", (1, *model.row_shape)),)
    header = pack_request(RequestHeader(model=served_as, inputs=tensors, timeout_ms=timeout_ms))
    return header, struct.pack("<f", 0.5) * (model.row_bytes // 4)


def _load(words: Mapping[str, Any]) -> Load:
    return Load(
        rate=words["rps"],
        goodput=words["goodput"],
        answered=words["ok"],
        refused=words["rej"],
        answered_in_time_span=words.get("in_span", words["ok"]),
        sent=words["sent"],
        lost=words["timeout"],
        unsent=words["unsent"],
        stray=words["err"],
        p50_ms=words["p50_us"] / 1e3,
        p99_ms=words["p99_us"] / 1e3,
        refused_p99_ms=words["rp99_us"] / 1e3 if words["rp99_us"] >= 0 else None,
        codes=words.get("codes", {}),
    )


def _build() -> Path | None:
    """The built load.c; None without a compiler or library. The wheel's libzmq first: both ends then run the same."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source = HERE / "load.c"
    digest = hashlib.sha256(source.read_bytes() + sys.executable.encode() + zmq.zmq_version().encode()).hexdigest()[:12]
    built = cache_folder() / f"load-{digest}"
    if built.exists():
        return built
    bundled = sorted((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*.so*"))
    attempts = [["-DLOAD_WITHOUT_ZMQ_H", str(library), f"-Wl,-rpath,{library.parent}"] for library in bundled]
    attempts += [["-lzmq"]]
    part = built.with_suffix(".part")
    for words in attempts:
        command = [compiler, "-O2", "-std=gnu11", str(source), "-o", str(part), *words, "-lm"]
        if subprocess.run(command, capture_output=True, timeout=120, check=False).returncode:
            continue
        if subprocess.run([str(part)], capture_output=True, timeout=10, check=False).returncode == 2:  # its usage
            part.replace(built)
            return built
    return None
