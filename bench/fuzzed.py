"""Fuzzed messages, good and bad mixed in one burst, against a daemon process: replies missing, and memory growth.

    python -m bench.fuzzed 1_000_000

Prints one line of JSON: messages sent, replies missing and stray, and how much the daemon's resident memory grew from
the end of the warm-up (a tenth of the messages) to the end. The bar: none missing, at most 5 MiB.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgpack
import zmq

from bench.servers import REPOSITORY
from edge_runtime import Client

BURST = 500
ANSWER_MS = 30_000
X = bytes(64)
READY_S = 60.0


def header(model: str = "mlp", rows: int = 1, **fields: object) -> bytes:
    """A request's header."""
    inputs = [{"name": "x", "datatype": "FP32", "shape": [rows, 16]}]
    return bytes(msgpack.packb({"v": 1, "op": "infer", "model": model, "inputs": inputs, **fields}))


GOOD = [
    [header(), X],
    [header(rows=4), X * 4],
    [header("queued"), X],
    [header(outputs=[]), X],
    [header("queued", outputs=[]), X],
    [header(timing=True), X],
]
"""Header and tensor. Outputs may be none at all."""

PIECES = [header(), X, b"", b"{", b"{}", b"\x80" * 1000, b"\xdf" + b"\xff" * 2_000, bytes(200), b'{"model":"mlp"}']


def fuzzed(generator: random.Random, request_id: bytes) -> list[bytes]:
    """A message with its id where an id stands; anything else may be anything."""
    chance = generator.random()
    if chance < 0.6:
        head, *tensors = generator.choice(GOOD)
        return [head, request_id, *tensors]
    if chance < 0.8:
        head, *tensors = generator.choice(GOOD)
        spot = generator.randrange(len(head))
        broken = head[:spot] + bytes((generator.randrange(256),)) + head[spot + 1 :]
        return [broken, request_id, *tensors]
    first = generator.choice(PIECES) or b"-"
    rest = [generator.choice(PIECES) for _ in range(generator.randrange(4))]
    if generator.random() < 0.01:
        rest = [b"."] * 6_000  # over limits.message_frames
    return [first, request_id, *rest]


def resident_bytes(pid: int) -> int:
    """Of another process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def attack(endpoint: str, count: int, seed: int) -> tuple[int, int]:
    """Send so many in bursts, and count replies that are missing, and those to nothing."""
    generator = random.Random(seed)
    missing = stray = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.LINGER, 0)
        client.connect(endpoint)
        for begin in range(0, count, BURST):
            waiting = {b"%d" % number for number in range(begin, min(begin + BURST, count))}
            for request_id in list(waiting):
                client.send_multipart(fuzzed(generator, request_id))
            while waiting and client.poll(ANSWER_MS):
                reply = client.recv_multipart()
                request_id = reply[1] if len(reply) > 1 else b""
                if request_id in waiting:
                    waiting.discard(request_id)
                else:
                    stray += 1
            missing += len(waiting)
    return missing, stray


def main(count: int) -> None:
    """Serve, warm up, attack, and print what it cost."""
    from tests.models import onnx_models

    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        for name in ("mlp", "queued"):
            (models / name / "1").mkdir(parents=True)
            onnx_models.mlp(models / name / "1")
        (models / "queued" / "model.toml").write_text('mode = "workers"\n')
        endpoint = f"ipc://{folder}/infer.sock"
        command = [sys.executable, "-m", "edge_runtime", "serve", "--models", str(models), "--zmq", endpoint]
        with subprocess.Popen([*command, "--state", f"{folder}/state"], cwd=REPOSITORY) as daemon:
            try:
                with Client(endpoint) as client:
                    client.wait_ready(READY_S)
                warm = attack(endpoint, count // 10, 1)
                before = resident_bytes(daemon.pid)
                began_s = time.monotonic()
                missing, stray = attack(endpoint, count, 2)
                took_s = time.monotonic() - began_s
                growth = resident_bytes(daemon.pid) - before
            finally:
                daemon.terminate()
    print(
        json.dumps(
            {
                "messages": count,
                "missing": missing + warm[0],
                "stray": stray + warm[1],
                "growth_mib": round(growth / (1 << 20), 2),
                "took_s": round(took_s, 1),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
