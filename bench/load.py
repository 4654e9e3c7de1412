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

from bench.makers import BenchModel, cache_folder
from bench.servers import OK_BYTE, BenchError
from edge_runtime.messages import RegionPlace, RequestHeader, TensorHeader
from edge_runtime.wire.codec import pack_array, pack_request

HERE = Path(__file__).parent
START_AND_STOP_S = 15.0


PLACES = 64
"""Of a ring in shared memory: as many as are in flight at most."""


@dataclass(frozen=True, slots=True)
class SharedRequest:
    """A request whose tensor lies in shared memory: the file of its headers, and the memory that they need."""

    path: Path
    memory_bytes: int


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

    @property
    def shares_memory(self) -> bool:
        """Whether it can name places in shared memory: load.c alone."""
        return self.kind.startswith("native")

    def closed(
        self, endpoint: str, request: Path | SharedRequest, in_flight: int, seconds: float, warm_s: float = 0.5
    ) -> Load:
        """Keep `in_flight` requests in flight for `seconds` after `warm_s`."""
        return self._run(endpoint, request, seconds, warm_s, ("--conc", str(in_flight)))

    def open(
        self,
        endpoint: str,
        request: Path | SharedRequest,
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

    def _run(
        self, endpoint: str, request: Path | SharedRequest, seconds: float, warm_s: float, words: Sequence[str]
    ) -> Load:
        if isinstance(request, SharedRequest):
            words = (*words, "--places", str(PLACES), "--memory", str(request.memory_bytes))
            request = request.path
        command = [*self._command, "--proto", "zmq", "--addr", endpoint, "--req", str(request)]
        command += ["--id-frame", "1", "--rid-frame", "1", "--st-frame", "0", "--ok-byte", str(OK_BYTE), *words]
        return run_load(command, seconds, warm_s)


def run_load(command: Sequence[str], seconds: float, warm_s: float) -> Load:
    """Run a generator for `seconds` after `warm_s`. Raises BenchError when it fails."""
    drain_s = 10.0
    words = ("--secs", f"{seconds:.3f}", "--warm", f"{warm_s:.3f}", "--drain", f"{drain_s:.0f}")
    limit_s = warm_s + seconds + drain_s + START_AND_STOP_S
    found = subprocess.run([*command, *words], capture_output=True, text=True, timeout=limit_s, check=False)
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


def write_shared_request(path: Path, model: BenchModel, timeout_ms: float | None = None) -> SharedRequest:
    """Headers of one row of `model` at each of PLACES places in region 1, in load.c's file format."""
    stride = -(-model.row_bytes // 64) * 64
    headers = [_header(model, model.name, timeout_ms, RegionPlace(1, number * stride)) for number in range(PLACES)]
    with path.open("wb") as file:
        for frame in (*headers, b""):
            file.write(struct.pack("I", len(frame)) + frame)
    return SharedRequest(path, PLACES * stride)


def mqtt_payload(model: BenchModel, *, timeout_ms: float | None = None) -> bytes:
    """The same request in the array form, for a broker."""
    header, tensor = _request(model, model.name, timeout_ms)
    return pack_array(header, [tensor])


# ---- private --------------------------------------------------------------------------------------------------------


def _request(model: BenchModel, served_as: str, timeout_ms: float | None) -> tuple[bytes, bytes]:
    return _header(model, served_as, timeout_ms), struct.pack("<f", 0.5) * (model.row_bytes // 4)


def _header(model: BenchModel, served_as: str, timeout_ms: float | None, place: RegionPlace | None = None) -> bytes:
    tensors = (TensorHeader("x", "FP32", (1, *model.row_shape), place),)
    return pack_request(RequestHeader(model=served_as, inputs=tensors, timeout_ms=timeout_ms))


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
    bundled = sorted((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*.so*"))
    attempts = [["-DLOAD_WITHOUT_ZMQ_H", str(library), f"-Wl,-rpath,{library.parent}"] for library in bundled]
    return built(HERE / "load.c", [*attempts, ["-lzmq"]], sys.executable + zmq.zmq_version())


def built(source: Path, attempts: Sequence[Sequence[str]] = ((),), made_for: str = "") -> Path | None:
    """A generator built from C, kept for the next run; None without a compiler or library.

    attempts: words for the compiler, tried in order. made_for: what else the result depends on.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    content = source.read_bytes() + (HERE / "counts.h").read_bytes() + made_for.encode()
    found = cache_folder() / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:12]}"
    if found.exists():
        return found
    part = found.with_suffix(".part")
    for words in attempts:
        command = [compiler, "-O2", "-std=gnu11", str(source), "-o", str(part), *words, "-lm"]
        if subprocess.run(command, capture_output=True, timeout=120, check=False).returncode:
            continue
        if subprocess.run([str(part)], capture_output=True, timeout=10, check=False).returncode == 2:  # its usage
            part.replace(found)
            return found
    return None
