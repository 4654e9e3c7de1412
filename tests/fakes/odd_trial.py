"""The function of a trial's child, in the real one's place, with backends that misbehave beside the real ones."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from msgspec.structs import replace

from edge_runtime.backends.base import Backend, Instance, LoadOptions, Probe
from edge_runtime.backends.registry import backend, declaration_of
from edge_runtime.errors import LoadFailed
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.updates.trial import TrialResult, TrialTask, try_in_child


class OddBackend:
    """`crashing` reads address 0 at load, `surprising` raises what nobody expects, `telling` says what it sees of its
    process, `printing` prints on standard output what looks like an answer, and then does all right."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.declaration = replace(declaration_of("onnxruntime"), name=name)

    def probe(self) -> Probe:
        return Probe(self.name, is_available=True)

    def load(self, artifact: Path, options: LoadOptions) -> Instance:
        if self.name == "crashing":
            ctypes.string_at(0)
        if self.name == "surprising":
            raise KeyError("unknown operator")
        if self.name == "telling":
            core = resource.getrlimit(resource.RLIMIT_CORE)
            raise LoadFailed(
                f"MY_KEY={os.environ.get('MY_KEY')} parent={os.getppid()} niceness={os.nice(0)} core={core}"
            )
        os.write(1, b'{"type":"error","error":"not what it seems"}\n')
        return backend("onnxruntime").load(artifact, options)


def make_backend(name: str) -> Backend:
    return OddBackend(name) if name in ("crashing", "surprising", "telling", "printing") else backend(name)


def try_odd(task: TrialTask, progress: ShowProgress) -> TrialResult:
    return try_in_child(task, progress, make_backend)
