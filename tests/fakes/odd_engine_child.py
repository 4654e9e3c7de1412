"""The child that builds engines, in the real one's place: it misbehaves as the model's name asks; it builds nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from edge_runtime.serving.confinement import confine
from edge_runtime.serving.engine_cache import EngineCache
from edge_runtime.serving.engine_child import BuildNews, BuildRequest


def main(parent: str) -> int:
    with confine(int(parent)) as answer:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=BuildRequest)
        Path(request.folder).mkdir(exist_ok=True)
        cache = EngineCache(Path(request.folder))
        for share in (0.2, 0.4, 0.6):
            answer.write(msgspec.json.encode(BuildNews(share=share, phase="Odd phase")) + b"\n")
            answer.flush()
        match Path(request.order.artifact).name:
            case "crashing":
                ctypes.string_at(0)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hanging":
                Path(request.folder, "hangs").touch()
                time.sleep(600)
            case "hungry":
                memory = bytearray(600 << 20)
                memory[::4096] = b"x" * len(memory[::4096])
                time.sleep(600)
            case "silent":
                return 0
            case "printing":
                os.write(1, b"rubbish\n")
                answer.write(b"rubbish\n")
            case "full":
                answer.write(msgspec.json.encode(BuildNews(fault="no space left", may_pass=True)) + b"\n")
                return 0
            case "refused":
                answer.write(msgspec.json.encode(BuildNews(fault="no kernel for it")) + b"\n")
                return 0
        with Path(request.folder, "built").open("a") as log:
            log.write(f"{request.key}\n")
        cache.write(request.key, request.order.artifact.encode())
        answer.write(msgspec.json.encode(BuildNews(share=1.0, is_done=True)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
