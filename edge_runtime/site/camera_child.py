"""A camera read in a child process of the sandbox: streams come from outside, and decoders of them have had holes.

Owns: PyAV (FFmpeg), which opens `/dev/video0`, RTSP, HTTP and files alike, and its bounds. Keeps only the newest
picture, and sends one when the daemon asks. camera.py starts it and is the other end of its channel.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

from msgspec import Struct

from edge_runtime.extras import install_advice
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.sandbox.process_memory import bound_data

FRAME_HEAD = struct.Struct("<III")
"""Shape of a frame, whose bytes follow: height, width, channels (0: it has two axes). With height 0 a reason follows,
of as many bytes as width says."""

FRAME_FORMS = {"picture": b"c", "frames": b"c", "gray": b"g", "nv12": b"n", "yuyv": b"y"}
"""The byte by which the daemon asks for a frame, by the source that a model declares (steps.PictureSource)."""

_FFMPEG_FORMS = {b"c": "rgb24", b"g": "gray", b"n": "nv12", b"y": "yuyv422"}
_CHANNELS = {b"c": 3, b"g": 1, b"n": 0, b"y": 2}

MAX_FRAME_BYTES = 64 << 20
"""As the largest frame of a client: 22 million pixels, twice those of 4K."""

SILENCE_S = 10.0
"""A camera that gives no picture for so long is gone; slow ones give one a second."""

MAX_DATA_BYTES = 1 << 30
"""Memory of the child beyond Python's own. A 4K stream of H.264 takes 400 MB, with 16 reference pictures."""

_PROTOCOLS = {
    "rtsp": "rtsp,rtsps,rtp,srtp,udp,tcp,tls",
    "http": "http,https,tcp,tls",
    "file": "file",
}
"""Protocols that FFmpeg may use for a camera of this kind: a hostile stream can name others."""


def frame_shape(wanted: bytes, head: bytes) -> tuple[int, ...] | None:
    """The shape of a frame by its head; None where no camera could give it, as a broken child may say."""
    height, width, channels = FRAME_HEAD.unpack(head)
    if channels != _CHANNELS[wanted] or not 0 < height * width * 3 <= 2 * MAX_FRAME_BYTES:
        return None
    return (height, width, channels) if channels else (height, width)


class CameraTask(Struct, frozen=True):
    """The task of a camera's child. kind: a key of _PROTOCOLS, or "v4l2". channel: the descriptor of its socket."""

    address: str
    kind: str
    channel: int
    silence_s: float


def read_camera(task: CameraTask, _progress: ShowProgress) -> None:
    """Read a camera until it ends; answer each byte on the channel with the newest frame, or the reason of the end."""
    newest = _Newest(task.silence_s)
    bound_data(MAX_DATA_BYTES)
    threading.Thread(target=_read, args=(task, newest), daemon=True).start()
    with socket.socket(fileno=task.channel) as channel:
        while wanted := channel.recv(1):
            try:
                pixels = newest.frame(_FFMPEG_FORMS[wanted])
            except _CameraError as error:
                said = str(error).encode()
                channel.sendall(FRAME_HEAD.pack(0, len(said), 0) + said)
                return
            channel.sendall(FRAME_HEAD.pack(*pixels.shape[:2], _CHANNELS[wanted]))
            channel.sendall(memoryview(pixels).cast("B"))


class _CameraError(Exception):
    """Why there is no frame."""


class _Newest:
    """The newest picture of a stream: a packet where each is a picture by itself, which most are never decoded of."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._changed = threading.Condition()
        self._item: Any = None
        self._reason = ""

    def put(self, item: Any) -> None:
        """Replace what is there. Thread: the reader's."""
        with self._changed:
            self._item = item
            self._changed.notify()

    def end(self, reason: str) -> None:
        """There is no more."""
        with self._changed:
            self._reason = reason
            self._changed.notify()

    def frame(self, form: str) -> Any:
        """Wait for a picture that was not given yet, as an array in FFmpeg's `form`. Raises _CameraError."""
        end_s = time.monotonic() + self._silence_s
        why = ""
        while (left_s := end_s - time.monotonic()) > 0:
            with self._changed:
                if self._item is None and not self._reason:
                    self._changed.wait(left_s)
                item, self._item = self._item, None
                reason = self._reason
            if item is None and not reason:
                continue
            if item is None:
                raise _CameraError(f"{reason}{why}")
            try:
                frames = item.decode() if hasattr(item, "decode") else [item]
                if frames:
                    return _pixels(frames[-1], form)
            except Exception as error:  # noqa: BLE001 (one broken picture; the next may be whole)
                why = f"; the last could not be decoded: {_reason_of(error, self._silence_s)}"
        raise _CameraError(f"no picture came for {self._silence_s:g} s{why}")


def _pixels(frame: Any, form: str) -> Any:
    if frame.width * frame.height * 3 > MAX_FRAME_BYTES:
        raise _CameraError(f"it has {frame.width} x {frame.height} pixels; at most {MAX_FRAME_BYTES // 3} are taken")
    if form in ("nv12", "yuyv422"):  # as steps read them, whatever the camera has
        return frame.reformat(format=form, dst_colorspace="ITU601", dst_color_range="MPEG").to_ndarray()
    return frame.to_ndarray(format=form)


def _read(task: CameraTask, newest: _Newest) -> None:
    """Follow the stream to its end. Whatever ends it is the reason."""
    try:
        while _follow(task, newest) and task.kind == "file":  # a file is played again and again
            pass
        newest.end("the stream ended")
    except ImportError:
        newest.end(f"cameras need PyAV; {install_advice('camera')}")
    except Exception as error:  # noqa: BLE001 (anything that a stream makes a library raise)
        newest.end(_reason_of(error, task.silence_s))


def _follow(task: CameraTask, newest: _Newest) -> bool:
    """Read to the end. Return whether there was a picture."""
    import av

    options = {"max_pixels": str(MAX_FRAME_BYTES // 3)}
    if task.kind in _PROTOCOLS:
        options["protocol_whitelist"] = _PROTOCOLS[task.kind]
    if task.kind == "rtsp":
        options["rtsp_transport"] = "tcp"  # by UDP, pictures are torn where a packet is lost
    # From 19 on PyAV is so by itself, and knows no such option: a title in Latin-1 is not a reason to see nothing.
    lenient = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    with av.open(
        task.address,
        format="v4l2" if task.kind == "v4l2" else None,
        options=options,
        **lenient,
        timeout=None if task.kind == "v4l2" else (task.silence_s, task.silence_s),
    ) as container:
        if not container.streams.video:
            raise _CameraError("the stream has no pictures")
        stream = container.streams.video[0]
        codec = stream.codec_context
        if codec is None:
            raise _CameraError("the stream's pictures are of no kind that FFmpeg knows")
        codec.thread_count = 1  # the cores are the models'
        codec.options = {"max_pixels": options["max_pixels"]}
        is_each_whole = codec.codec.intra_only
        began_s: float | None = None
        count = 0
        for packet in container.demux(stream):
            if task.kind == "file" and packet.pts is not None:  # at the pace at which it was taken
                at_s = float(packet.pts * packet.time_base)
                began_s = time.monotonic() - at_s if began_s is None else began_s
                time.sleep(max(began_s + at_s - time.monotonic(), 0.0))
            found = [packet] if is_each_whole and packet.size else []
            if not is_each_whole:
                with contextlib.suppress(av.error.InvalidDataError):  # until the first picture that is whole by itself
                    found = packet.decode()
            for each in found:
                newest.put(each)
            count += len(found)
        return count > 0


def _reason_of(error: Exception, silence_s: float) -> str:
    """A library's error in its own words, without the address, which may hold a password."""
    if type(error).__name__ == "ExitError":  # "Immediate exit requested": what FFmpeg calls PyAV's time limit
        return f"no picture came for {silence_s:g} s"
    if isinstance(error, _CameraError):
        return str(error)
    said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return str(said)[:200]
