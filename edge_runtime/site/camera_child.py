"""A camera read in a child process of the sandbox: streams come from outside, and decoders of them have had holes.

Owns: PyAV (FFmpeg), which opens `/dev/video0`, RTSP, HTTP and files alike, its bounds, and our words for its errors.
Keeps only the newest picture, turns and crops it, and sends one when the daemon asks. camera.py starts it and is the
other end of its channel.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from edge_runtime.extras import install_advice
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.sandbox.process_memory import bound_data
from edge_runtime.site.settings import WHOLE

FRAME_ASK = struct.Struct("<cB")
"""What the daemon asks by: a byte of FRAME_FORMS, and the slot of shared memory for the frame, 0 for none. A descriptor
that comes with it is that slot's from now on."""

FRAME_HEAD = struct.Struct("<IIIQd?")
"""A frame: height, width, channels (0: it has two axes), its number in the stream, when it came (time.time), and
whether it lies in its slot; else its bytes follow. With height 0 a reason follows, of as many bytes as width says."""

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

_WORDS = {
    errno.ENOENT: "there is no such file or device",
    errno.EACCES: "it may not be read by this user",
    errno.EPERM: "it may not be read by this user",
    errno.EBUSY: "another program has it open",
    errno.ENODEV: "there is no such device",
    errno.ENXIO: "there is no such device",
    errno.ECONNREFUSED: "its address refuses connections: the camera is off, or the port is another",
    errno.ECONNRESET: "it ended the connection",
    errno.EPIPE: "it ended the connection",
    errno.EHOSTUNREACH: "its address cannot be reached: the camera is off, or on another network",
    errno.ENETUNREACH: "its address cannot be reached: this device has no network there",
    errno.ETIMEDOUT: "its address does not answer",
    errno.EIO: "it cannot be read: its name is not known here, or it broke off",
    errno.ENOMEM: "its pictures need more memory than a reader gets",
}
"""Why a camera gives no pictures, by the error of the system."""

NAMED_WORDS = {
    "EOFError": "the stream ended",
    "InvalidDataError": "it sends something else than a video",
    "HTTPBadRequestError": "it refuses the request (400): look at its address",
    "HTTPUnauthorizedError": "it wants another user or password (401)",
    "HTTPForbiddenError": "it forbids this user the stream (403)",
    "HTTPNotFoundError": "it has no stream at this address (404)",
    "HTTPOtherClientError": "it refuses the request (4xx): look at its address",
    "HTTPServerError": "it answers that it fails (5xx)",
    "DecoderNotFoundError": "its pictures are of a kind that this copy of PyAV cannot decode",
    "DemuxerNotFoundError": "its stream is of a kind that this copy of PyAV cannot read",
    "ProtocolNotFoundError": "this copy of PyAV does not speak its protocol",
    "StreamNotFoundError": "the stream has no pictures",
    "PatchWelcomeError": "its pictures are of a kind that FFmpeg does not know yet",
}
"""The same by the class of PyAV's error."""

MAX_ERRNO = 4096
"""Errors of the system are below; FFmpeg's own are above."""

PROTOCOLS = {
    "rtsp": "rtsp,rtsps,rtp,srtp,udp,tcp,tls",
    "http": "http,https,tcp,tls",
    "file": "file",
}
"""Protocols that FFmpeg may use for a camera of this kind: a hostile stream can name others."""


def frame_shape(wanted: bytes, head: bytes) -> tuple[int, ...] | None:
    """The shape of a frame by its head; None where no camera could give it, as a broken child may say."""
    height, width, channels, *_ = FRAME_HEAD.unpack(head)
    if channels != _CHANNELS[wanted] or not 0 < height * width * 3 <= 2 * MAX_FRAME_BYTES:
        return None
    return (height, width, channels) if channels else (height, width)


class CameraTask(Struct, frozen=True):
    """The task of a camera's child. kind: a key of PROTOCOLS, or "v4l2". channel: the descriptor of its socket.

    rotate, crop: as of CameraSettings.
    """

    address: str
    kind: str
    channel: int
    silence_s: float
    rotate: int = 0
    crop: tuple[float, float, float, float] = WHOLE


def read_camera(task: CameraTask, _progress: ShowProgress) -> None:
    """Read a camera until it ends; answer each byte on the channel with the newest frame, or the reason of the end."""
    newest = _Newest(task)
    bound_data(MAX_DATA_BYTES)
    threading.Thread(target=_read, args=(task, newest), daemon=True).start()
    with socket.socket(fileno=task.channel) as channel:
        slots: dict[int, mmap.mmap] = {}
        while True:
            asked, descriptors, *_ = socket.recv_fds(channel, FRAME_ASK.size, 1)
            if not asked:
                return
            wanted, slot = FRAME_ASK.unpack(asked)
            for descriptor in descriptors:
                slots[slot] = mmap.mmap(descriptor, 0)
                os.close(descriptor)
            try:
                taken = newest.frame(_FFMPEG_FORMS[wanted])
            except _CameraError as error:
                said = str(error).encode()
                channel.sendall(FRAME_HEAD.pack(0, len(said), 0, 0, 0.0, False) + said)
                return
            height, width = taken.pixels.shape[:2]
            pixels, memory = memoryview(taken.pixels).cast("B"), slots.get(slot)
            is_shared = memory is not None and len(memory) >= len(pixels)
            if memory is not None and is_shared:
                memory[: len(pixels)] = pixels
            head = height, width, _CHANNELS[wanted], taken.number, taken.captured_s, is_shared
            channel.sendall(FRAME_HEAD.pack(*head))
            if not is_shared:
                channel.sendall(pixels)


class _CameraError(Exception):
    """Why there is no frame."""


class _Taken(NamedTuple):
    """A picture of the stream. pixels: as it came, a packet or FFmpeg's frame, until it is made an array."""

    pixels: Any
    number: int
    captured_s: float


class _Newest:
    """The newest picture of a stream: a packet where each is a picture by itself, which most are never decoded of.

    It is given once in each form, so that models that take different forms see the same pictures.
    """

    def __init__(self, task: CameraTask) -> None:
        self._silence_s = task.silence_s
        self._nothing = _nothing(task)
        self._rotate, self._crop = task.rotate, task.crop
        self._changed = threading.Condition()
        self._item = _Taken(None, 0, 0.0)
        self._given: dict[str, int] = {}
        self._reason = ""

    def put(self, item: Any) -> None:
        """Replace what is there. Thread: the reader's."""
        with self._changed:
            self._item = _Taken(item, self._item.number + 1, time.time())
            self._changed.notify()

    def end(self, reason: str) -> None:
        """There is no more."""
        with self._changed:
            self._reason = reason
            self._changed.notify()

    def frame(self, form: str) -> _Taken:
        """Wait for a picture that was not given in FFmpeg's `form` yet, as an array. Raises _CameraError."""
        end_s = time.monotonic() + self._silence_s
        why = ""
        while (left_s := end_s - time.monotonic()) > 0:
            with self._changed:
                if self._item.number <= self._given.get(form, 0) and not self._reason:
                    self._changed.wait(left_s)
                item, reason = self._item, self._reason
            if item.number <= self._given.get(form, 0):
                if reason:
                    raise _CameraError(f"{reason}{why}")
                continue
            self._given[form] = item.number
            try:
                frame = self._decoded(item)
                if frame is not None:
                    return item._replace(pixels=_pixels(frame, form, self._rotate, self._crop))
            except _CameraError as error:
                why = f"; {error}"
            except Exception as error:  # noqa: BLE001 (one broken picture; the next may be whole)
                why = f"; the last picture could not be decoded: {reason_of(error, self._nothing)}"
        raise _CameraError(f"{self._nothing}{why}")

    def _decoded(self, item: _Taken) -> Any:
        """FFmpeg's frame of a picture; None where its packet has none. A packet is decoded once."""
        if not hasattr(item.pixels, "decode"):
            return item.pixels
        frames = item.pixels.decode()
        with self._changed:
            if frames and self._item.number == item.number:
                self._item = item._replace(pixels=frames[-1])
        return frames[-1] if frames else None


def _pixels(frame: Any, form: str, rotate: int, crop: tuple[float, float, float, float]) -> Any:
    if frame.width * frame.height * 3 > MAX_FRAME_BYTES:
        raise _CameraError(f"it has {frame.width} x {frame.height} pixels; at most {MAX_FRAME_BYTES // 3} are taken")
    # What a video declares (its display matrix) is counter-clockwise.
    quarters = round(((getattr(frame, "rotation", 0) or 0) - rotate) / 90) % 4
    if quarters or crop != WHOLE:
        frame = _turned(frame, quarters, crop, is_even=form in ("nv12", "yuyv422"))
    if form in ("nv12", "yuyv422"):  # as steps read them, whatever the camera has
        array = frame.reformat(format=form, dst_colorspace="ITU601", dst_color_range="MPEG").to_ndarray()
    else:
        array = frame.to_ndarray(format=form)
    return np.ascontiguousarray(array)  # FFmpeg pads rows of most widths


def _turned(frame: Any, quarters: int, crop: tuple[float, float, float, float], *, is_even: bool) -> Any:
    """Turn a frame counter-clockwise by quarters of a circle, and cut a part out. is_even: its sides have to be."""
    import av

    pixels = np.rot90(frame.to_ndarray(format="rgb24"), quarters)
    high, wide = pixels.shape[:2]
    left, top = int(crop[0] * wide), int(crop[1] * high)
    right, bottom = max(round(crop[2] * wide), left + 1), max(round(crop[3] * high), top + 1)
    pixels = pixels[top:bottom, left:right]
    if is_even:
        pixels = pixels[: len(pixels) // 2 * 2, : pixels.shape[1] // 2 * 2]
        if not pixels.size:
            raise _CameraError("the part that is cropped has less than 2 x 2 pixels")
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")


def _read(task: CameraTask, newest: _Newest) -> None:
    """Follow the stream to its end. Whatever ends it is the reason."""
    try:
        while _follow(task, newest) and task.kind == "file":  # a file is played again and again
            pass
        newest.end("the stream ended")
    except ImportError:
        newest.end(f"cameras need PyAV; {install_advice('camera')}")
    except Exception as error:  # noqa: BLE001 (anything that a stream makes a library raise)
        newest.end(reason_of(error, _nothing(task)))


def _follow(task: CameraTask, newest: _Newest) -> bool:
    """Read to the end. Return whether there was a picture."""
    import av

    options = {"max_pixels": str(MAX_FRAME_BYTES // 3)}
    if task.kind in PROTOCOLS:
        options["protocol_whitelist"] = PROTOCOLS[task.kind]
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


def _nothing(task: CameraTask) -> str:
    return f"no picture came for {task.silence_s:g} s"


def reason_of(error: Exception, nothing: str, named: Mapping[str, str] = NAMED_WORDS) -> str:
    """Return why a stream gives no more, in our words, without the address, which may hold a password.

    nothing: that none came in time. named: by the class of PyAV's error.
    """
    name = type(error).__name__
    if name == "ExitError":  # "Immediate exit requested": what FFmpeg calls PyAV's time limit
        return nothing
    if isinstance(error, _CameraError):
        return str(error)
    number = getattr(error, "errno", None)
    if words := named.get(name) or _WORDS.get(number or 0):
        return words
    if isinstance(error, OSError) and number and number < MAX_ERRNO:
        return f"it cannot be read: {os.strerror(number).lower()}"
    return f"it cannot be read: FFmpeg reports {name}"
