"""Steps of sequences, whose state the daemon keeps, beside runs of the same model whose client carries the state."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import msgpack
import numpy as np
import zmq

from bench.makers import BenchModel
from bench.scenarios import Bench
from bench.servers import BenchError
from edge_runtime.messages import RequestHeader, SequenceStep, TensorHeader
from edge_runtime.wire.codec import pack_extra, pack_request
from tests.models import onnx_models

SEQUENCES = 16
SIZE = 512
"""Of the state and the input: a run takes about .2 ms."""

STATE = '[[sequence.state]]\ninput = "h_in"\noutput = "h_out"\n'


def sequences(bench: Bench) -> None:
    """Sixteen sequences, one request of each in flight; both models in hosts, one client for both."""
    folder = bench.children.folder / "recurrent"
    folder.mkdir()
    path = onnx_models.recurrent(folder, SIZE)
    daemon = bench.daemon(BenchModel("stateless", path, (SIZE,), SIZE))
    (daemon.models / "stateless" / "model.toml").write_text('isolation = "always"\n')
    stateful = daemon.models / "stateful" / "1"
    stateful.mkdir(parents=True)
    (stateful / "model.onnx").write_bytes(path.read_bytes())
    (stateful.parent / "model.toml").write_text(STATE)
    daemon.start_and_settle(_request(bench.children.folder / "recurrent.request"))
    for number in bench.rounds("sequences"):
        models = sorted(("stateful", "stateless"), reverse=bool(number % 2))
        rates = {model: _rate(daemon.endpoint, model, bench.seconds) for model in models}
        bench.figures.add("sequences.16.ratio", rates["stateful"] / rates["stateless"])
        bench.figures.add("sequences.16.rate", rates["stateful"])
    daemon.stop()


SCENARIOS = {"sequences": sequences}


# ---- private --------------------------------------------------------------------------------------------------------


def _header(model: str, *names: str) -> RequestHeader:
    inputs = tuple(TensorHeader(name, "FP32", (1, SIZE)) for name in names)
    return RequestHeader(model=model, inputs=inputs, has_extra=model == "stateful")


def _request(path: Path) -> Path:
    """The frames of one stateless request, in load.c's file format."""
    with path.open("wb") as file:
        for frame in (pack_request(_header("stateless", "x", "h_in")), bytes(8), bytes(4 * SIZE), bytes(4 * SIZE)):
            file.write(struct.pack("I", len(frame)) + frame)
    return path


def _rate(endpoint: str, model: str, seconds: float) -> float:
    """Steps a second. Raises BenchError: one was not answered."""
    x = np.zeros((1, SIZE), np.float32).tobytes()
    is_stateful = model == "stateful"
    header = pack_request(_header(model, *(("x",) if is_stateful else ("x", "h_in"))))
    behind = [pack_extra(SequenceStep(each + 1, start=True)) if is_stateful else x for each in range(SEQUENCES)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        for each in range(SEQUENCES):
            socket.send_multipart([header, b"%d" % each, x, behind[each]])
            if is_stateful:
                behind[each] = pack_extra(SequenceStep(each + 1))
        count, began_s = 0, time.monotonic()
        while time.monotonic() < began_s + seconds:
            if not socket.poll(30_000):
                raise BenchError(f"{model}: no answer within 30 s")
            reply = socket.recv_multipart()
            if len(reply) != 4 - is_stateful:
                raise BenchError(f"{model}: {msgpack.unpackb(reply[0])}")
            each = int(reply[1])
            if not is_stateful:
                behind[each] = reply[3]
            socket.send_multipart([header, b"%d" % each, x, behind[each]])
            count += 1
        rate = count / (time.monotonic() - began_s)
        for _ in range(SEQUENCES):  # none is in flight when the other model's turn comes
            socket.recv_multipart()
        return rate
