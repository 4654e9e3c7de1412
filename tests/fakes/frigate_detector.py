"""Frigate's ZeroMQ detector as its plugin behaves (`frigate/detectors/plugins/zmq_ipc.py`, 2026-07), without Frigate.

The sequence, the timeouts, and what becomes of the socket after each of them are the plugin's: a REQ socket; a
handshake when it is made, and after each timeout or error, on a new socket; readiness that a first handshake grants,
and that nothing takes away again.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import zmq

ZERO_RESULT = np.zeros((20, 6), np.float32)


class Detector:
    """One detector. Use as a context manager; its first handshake is made on entering.

    handshakes: replies to handshakes and models, in order. errors: those that replies to pictures carried, which the
    plugin ignores.
    """

    def __init__(
        self,
        endpoint: str,
        model: Path | None,
        model_type: str = "yologeneric",
        *,
        name: str | None = None,
        request_timeout_ms: int = 10_000,
        handshake_timeout_ms: int = 30_000,
    ) -> None:
        """model: its file. name: as it is asked for, the file's where none is given."""
        self.handshakes: list[dict] = []
        self.errors: list[str] = []
        self.is_ready = False
        self._endpoint = endpoint
        self._model = model
        self._model_type = model_type
        self._name = name or (model.name if model is not None else "")
        self._request_timeout_ms = request_timeout_ms
        self._handshake_timeout_ms = handshake_timeout_ms
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None

    def __enter__(self):
        self._create_socket()
        self._initialize_model()
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def detect_raw(self, tensor: np.ndarray) -> np.ndarray:
        """What the plugin gives Frigate: zeros for every error."""
        if not self.is_ready:
            return ZERO_RESULT
        try:
            self._socket.send_multipart([self._header(tensor), memoryview(tensor.tobytes(order="C"))])
            return self._decode(self._socket.recv_multipart())
        except zmq.ZMQError:  # a timeout is one
            self._create_socket()
            self._initialize_model()
            return ZERO_RESULT

    def send(self, *frames: bytes) -> list[bytes]:
        """Send what the plugin never would, on its socket; zmq.Again: no answer came."""
        self._socket.send_multipart(frames)
        return self._socket.recv_multipart()

    def _header(self, tensor: np.ndarray) -> bytes:
        fields = {"shape": list(tensor.shape), "dtype": str(tensor.dtype.name), "model_type": self._model_type}
        return json.dumps(fields).encode()

    def _create_socket(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.REQ)
        self._socket.set(zmq.RCVTIMEO, self._request_timeout_ms)
        self._socket.set(zmq.SNDTIMEO, self._request_timeout_ms)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(self._endpoint)

    def _initialize_model(self) -> None:
        try:
            if self._check_and_transfer_model():
                self.is_ready = True
        except zmq.ZMQError:
            pass  # logged, and never tried again where it was the first

    def _check_and_transfer_model(self) -> bool:
        reply = self._ask([json.dumps({"model_request": True, "model_name": self._name}).encode()])
        available, loaded = reply.get("model_available", False), reply.get("model_loaded", False)
        if available:
            return loaded
        return self._send_model_data()

    def _send_model_data(self) -> bool:
        if self._model is None or not self._model.exists():
            return False
        header = json.dumps({"model_data": True, "model_name": self._name}).encode()
        reply = self._ask([header, self._model.read_bytes()])
        return reply.get("model_saved", False) and reply.get("model_loaded", False)

    def _ask(self, frames: list[bytes]) -> dict:
        self._socket.send_multipart(frames)
        self._socket.set(zmq.RCVTIMEO, self._handshake_timeout_ms)
        try:
            frames = self._socket.recv_multipart()
        finally:
            self._socket.set(zmq.RCVTIMEO, self._request_timeout_ms)
        assert len(frames) == 1, "the plugin takes no other form"
        reply = json.loads(frames[0].decode())
        self.handshakes.append(reply)
        return reply

    def _decode(self, frames: list[bytes]) -> np.ndarray:
        if len(frames) == 1:
            assert len(frames[0]) == 480
            return np.frombuffer(frames[0], np.float32).reshape(20, 6)
        header = json.loads(frames[0].decode())
        if "error" in header:
            self.errors.append(header["error"])
        result = np.frombuffer(frames[1], np.dtype(header.get("dtype", "float32"))).reshape(tuple(header["shape"]))
        assert result.shape == (20, 6)
        assert result.dtype == np.float32
        return result


def picture(level: int = 255, side: int = 32, dtype: str = "uint8") -> np.ndarray:
    """A picture of one colour, as Frigate gives it to a detector."""
    return np.full((1, 3, side, side), level, dtype)
