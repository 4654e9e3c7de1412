"""A hostile client, as a process of its own: 200 silent connections and a stream of bad messages, replies never read.

Run as `hostile.py ENDPOINT MESSAGES_A_SECOND`, until it is stopped.
"""

from __future__ import annotations

import random
import socket
import sys
import time

import msgpack
import zmq

SILENT_CONNECTIONS = 200
STEP_S = 0.01


def main(endpoint: str, rate: float) -> None:
    """Attack until the process is stopped."""
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(SILENT_CONNECTIONS)]
    for each in silent:
        each.connect(endpoint.removeprefix("ipc://"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVHWM, 1)
        dealer.connect(endpoint)
        generator = random.Random(1)
        header = msgpack.packb({"v": 1, "op": "infer", "model": "mlp", "inputs": []})
        pieces = [header, b"", b"{", b"\x80", b"\xdf" + b"\xff" * 60_000, bytes(64), generator.randbytes(300)]
        due_s = time.monotonic()
        while True:
            for _ in range(int(rate * STEP_S)):
                frames = [generator.choice(pieces) for _ in range(generator.randrange(1, 5))]
                try:
                    dealer.send_multipart(frames, zmq.DONTWAIT)
                except zmq.Again:
                    break
            due_s += STEP_S
            time.sleep(max(due_s - time.monotonic(), 0.0))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
