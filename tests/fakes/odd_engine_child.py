"""The function that builds engines in a child, in the real one's place: misbehaves as the model's name asks."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from edge_runtime.backends.tensorrt.engine_builds import EngineTask
from edge_runtime.builds.build_cache import BuildCache
from edge_runtime.errors import LoadFailed, StorageFailed
from edge_runtime.sandbox.ending import ShowProgress


def build_oddly(task: EngineTask, progress: ShowProgress) -> None:
    Path(task.folder).mkdir(exist_ok=True)
    cache = BuildCache(Path(task.folder))
    for share in (0.2, 0.4, 0.6):
        progress("Odd phase", share)
    match Path(task.plan.artifact).name:
        case "crashing":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hanging":
            Path(task.folder, "hangs").touch()
            time.sleep(600)
        case "hungry":
            memory = bytearray(600 << 20)
            memory[::4096] = b"x" * len(memory[::4096])
            time.sleep(600)
        case "silent":
            os._exit(0)
        case "printing":
            os.write(1, b"rubbish\n")
            for descriptor in range(3, 16):  # its reports are among them
                try:
                    os.write(descriptor, b"rubbish\n")
                except OSError:
                    continue
        case "full":
            raise StorageFailed("no space left")
        case "refused":
            raise LoadFailed("no kernel for it")
    with Path(task.folder, "built").open("a") as log:
        log.write(f"{task.key}\n")
    cache.write(task.key, task.plan.artifact.encode())
