"""The yardstick: what a plain Python server with the same frames reaches when it checks nothing.

    python bare.py ENDPOINT MODEL SHAPE [MAX_ROWS]

A ROUTER takes [identity, header, id, tensor], runs whatever has arrived (at most MAX_ROWS, 32) as one batch on bound
buffers and answers [identity, the request's header, id, tensor]. Headers are never decoded; a wrong frame breaks it.
The distance to it is what decoding, exact framing, admission, deadlines and metrics cost the daemon.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Any

import numpy as np
import onnxruntime
import zmq
from zmq.backend import Socket as Backend

DONTWAIT, SNDMORE, RCVMORE = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.RCVMORE)
PR_SET_PDEATHSIG = 1


class Batch:
    """One session with input and output buffers for `max_rows` rows, and a binding for each number of rows."""

    def __init__(self, model: str, row_shape: tuple[int, ...], max_rows: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        source, sink = session.get_inputs()[0].name, session.get_outputs()[0].name
        self._inputs = np.zeros((max_rows, *row_shape), np.float32)
        out_shape = session.run(None, {source: self._inputs[:1]})[0].shape[1:]
        self._outputs = np.zeros((max_rows, *out_shape), np.float32)
        self._bindings: list[Any] = []
        for rows in range(1, max_rows + 1):
            binding = session.io_binding()
            binding.bind_cpu_input(source, self._inputs[:rows])
            binding.bind_output(sink, "cpu", 0, np.float32, (rows, *out_shape), self._outputs.ctypes.data)
            self._bindings.append(binding)
        self._session = session
        self.input_rows = [memoryview(row.reshape(-1).view(np.uint8)) for row in self._inputs]
        self.output_rows = [memoryview(row.reshape(-1).view(np.uint8)) for row in self._outputs]

    def run(self, rows: int) -> None:
        """Run on the first `rows` rows; Python's wrapper around the call costs as much as the call, so go below it."""
        self._session._sess.run_with_iobinding(self._bindings[rows - 1]._iobinding, None)


def serve(endpoint: str, batch: Batch) -> None:
    """Answer until killed."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.set(zmq.SNDHWM, 0)
    router.set(zmq.RCVHWM, 0)
    router.bind(endpoint)
    receive, receive_into, send, get = Backend.recv, Backend.recv_into, Backend.send, Backend.get
    rows, answers, run = batch.input_rows, batch.output_rows, batch.run
    max_rows = len(rows)
    while True:
        waiting: list[tuple[Any, Any, Any]] = []
        flags = 0
        try:
            while len(waiting) < max_rows:
                identity = receive(router, flags)
                flags = DONTWAIT
                header, request_id = receive(router, flags), receive(router, flags)
                receive_into(router, rows[len(waiting)], flags=flags)
                while get(router, RCVMORE):
                    receive(router, flags)
                waiting.append((identity, header, request_id))
        except zmq.Again:
            pass
        run(len(waiting))
        for (identity, header, request_id), answer in zip(waiting, answers):  # noqa: B905 (answers is longer)
            send(router, identity, SNDMORE)
            send(router, header, SNDMORE)
            send(router, request_id, SNDMORE)
            send(router, bytes(answer))


def main(arguments: list[str]) -> None:
    """Read ENDPOINT MODEL SHAPE [MAX_ROWS] and serve."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the bench
    endpoint, model, shape = arguments[:3]
    max_rows = int(arguments[3]) if len(arguments) > 3 else 32
    serve(endpoint, Batch(model, tuple(int(length) for length in shape.split(",")), max_rows))


if __name__ == "__main__":
    main(sys.argv[1:])
