"""A microphone, or another sound, read in a child process of the sandbox, as cameras are (camera_child.py).

Owns: PyAV (FFmpeg), which opens ALSA's devices, RTSP, HTTP and files alike; the pace of a file; samples at the rates
that models take, and windows of them. It sends each window as soon as its last sample is there. microphone.py starts it
and is the other end of its channel.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime.extras import install_advice
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.sandbox.process_memory import bound_data
from edge_runtime.site.camera_child import NAMED_WORDS, PROTOCOLS, reason_of

Floats = npt.NDArray[np.float32]

SOUND_CUT = struct.Struct("<IIII")
"""A request of the daemon: a number from 1 on by which the windows come back, rate, window and hop in samples."""

SOUND_HEAD = struct.Struct("<IIQd")
"""A window: the number of its cut, its samples, which follow as FP32, its own number, and when its last sample came
(time.time). With 0 in place of the first a reason follows, of as many bytes as the second says."""

SILENCE_S = 10.0
"""A microphone that gives no samples for so long is gone; those of a silent room are samples."""

MAX_DATA_BYTES = 256 << 20
"""Memory of the child beyond Python's own: FFmpeg's decoders of sound take 20 MB, a window at most 16."""

MOST_CHANNELS = 8
"""As of a file that is sent (series/sound_files.py). They are mixed down to one."""

AHEAD_S = 5.0
"""How far a stream may be ahead of the clock: what a server has kept comes at once. More is waited for."""

GATHERED_S = 0.01
"""Of sound that is looked at together."""

ALSA_CONFIG = "/usr/share/alsa/alsa.conf"
"""Where ALSA's own package has it (libasound2-data); PyAV's copy of ALSA looks where it was built."""

_WORDS = {
    **NAMED_WORDS,
    "EOFError": "the sound ended",
    "InvalidDataError": "it is not a sound that this copy of PyAV can read",
    "DecoderNotFoundError": "its sound is of a kind that this copy of PyAV cannot decode",
    "DemuxerNotFoundError": "it is of a kind that this copy of PyAV cannot read",
    "StreamNotFoundError": "it has no sound",
    "PatchWelcomeError": "its sound is of a kind that FFmpeg does not know yet",
}
"""Why there is no sound, by the class of PyAV's error."""


class MicrophoneTask(Struct, frozen=True):
    """The task of a microphone's child. kind: "alsa", or as of a camera. channel: the descriptor of its socket.

    alsa_config: the file that ALSA reads first.
    """

    address: str
    kind: str
    channel: int
    silence_s: float
    alsa_config: str = ALSA_CONFIG


class _SoundError(Exception):
    """Why there is no sound."""


def read_microphone(task: MicrophoneTask, _progress: ShowProgress) -> None:
    """Send the windows that are asked for on the channel, until the daemon closes it; or the reason of the end."""
    bound_data(MAX_DATA_BYTES)
    os.environ["ALSA_CONFIG_PATH"] = task.alsa_config
    with socket.socket(fileno=task.channel) as channel:
        sent = _Sender(channel)
        heard = _Heard(sent)
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        is_reading = False
        while not sent.is_over:
            left_s = heard.last_s + task.silence_s - time.monotonic() if is_reading else None
            if left_s is not None and left_s <= 0:
                sent.end(f"no sound came for {task.silence_s:g} s")
                return
            if not poller.poll(None if left_s is None else left_s * 1e3):
                continue
            asked = channel.recv(SOUND_CUT.size, socket.MSG_WAITALL)
            if len(asked) < SOUND_CUT.size:
                return
            number, rate, window, hop = SOUND_CUT.unpack(asked)
            heard.add(number, rate, window, hop)
            if not is_reading:
                is_reading = True
                threading.Thread(target=_read, args=(task, heard, sent, rate), daemon=True).start()


class _Sender:
    """This end of the channel. Thread: the reader's sends windows, either the end."""

    def __init__(self, channel: socket.socket) -> None:
        self.is_over = False
        self._channel = channel
        self._lock = threading.Lock()

    def window(self, cut: int, samples: Floats, number: int, captured_s: float) -> None:
        """Send one window. Raises OSError: the daemon is gone."""
        with self._lock:
            if not self.is_over:
                self._channel.sendall(SOUND_HEAD.pack(cut, len(samples), number, captured_s))
                self._channel.sendall(np.ascontiguousarray(samples).data)

    def end(self, reason: str) -> None:
        """Say why there is no more."""
        said = reason.encode()
        with self._lock, contextlib.suppress(OSError):
            if not self.is_over:
                self.is_over = True
                self._channel.sendall(SOUND_HEAD.pack(0, len(said), 0, 0.0) + said)
                self._channel.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for what is asked


class _Cut:
    """Windows that were asked for. at: where the next one begins. number: of the last one.

    is_whole: it was asked for before the file began. has_given: a window since then.
    """

    def __init__(self, number: int, window: int, hop: int, at: int) -> None:
        self.id, self.window, self.hop, self.at = number, window, hop, at
        self.number = 0
        self.is_whole = self.has_given = False


class _Track:
    """The sound at one rate: its last samples, and the windows cut of it. end: samples so far."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.end = 0
        self.cuts: list[_Cut] = []
        self._begin = 0
        self._kept: list[Floats] = []
        self._resampler: tuple[int, Any] | None = None

    def put(self, samples: Floats, own_rate: int) -> None:
        """Take more samples of `own_rate`, which may change."""
        samples = self._at_rate(samples, own_rate)
        self._kept.append(samples)
        self.end += len(samples)

    def windows(self) -> Iterator[tuple[_Cut, Floats, float]]:
        """Yield the windows that are whole by now, and for how long each has been."""
        due = min((cut.at + cut.window for cut in self.cuts), default=self.end)
        if due > self.end:
            return
        kept = np.concatenate(self._kept)
        for cut in self.cuts:
            while (last := cut.at + cut.window) <= self.end:
                cut.number += 1
                cut.has_given = True
                yield cut, kept[cut.at - self._begin : last - self._begin], (self.end - last) / self.rate
                cut.at += cut.hop
        # Invariant: never more than a window and what came last.
        needed = min(max(min((cut.at for cut in self.cuts), default=self.end) - self._begin, 0), len(kept))
        self._kept = [kept[needed:]]
        self._begin += needed

    def begin_again(self) -> None:
        """Forget what came: a window has no end of a file with its beginning."""
        self._kept, self._begin = [], self.end
        self._resampler = None
        for cut in self.cuts:
            cut.at, cut.is_whole, cut.has_given = self.end, True, False

    def _at_rate(self, samples: Floats, own_rate: int) -> Floats:
        if own_rate == self.rate:
            return samples
        import av

        if self._resampler is None or self._resampler[0] != own_rate:
            self._resampler = own_rate, av.AudioResampler(format="flt", layout="mono", rate=self.rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], format="flt", layout="mono")
        frame.sample_rate = own_rate
        found = [each.to_ndarray()[0] for each in self._resampler[1].resample(frame)]
        return np.concatenate(found) if found else samples[:0]


class _Heard:
    """The sound so far, at every rate that is asked for. last_s: when something came last (time.monotonic)."""

    def __init__(self, sent: _Sender) -> None:
        self.last_s = time.monotonic()
        self._sent = sent
        self._lock = threading.Lock()
        self._tracks: dict[int, _Track] = {}

    def add(self, number: int, rate: int, window: int, hop: int) -> None:
        """Cut such windows from now on."""
        with self._lock:
            track = self._tracks.setdefault(rate, _Track(rate))
            track.cuts.append(_Cut(number, window, hop, track.end))

    def put(self, samples: Floats, rate: int) -> None:
        """Take samples that end now, and send the windows that they end. Raises OSError: the reader is gone."""
        self.last_s, now_s = time.monotonic(), time.time()
        with self._lock:
            for track in self._tracks.values():
                track.put(samples, rate)
                for cut, window, ago_s in track.windows():
                    self._sent.window(cut.id, window, cut.number, now_s - ago_s)

    def begin(self) -> None:
        """A file, or a stream, begins."""
        with self._lock:
            for track in self._tracks.values():
                track.begin_again()

    def end(self, whole_s: float) -> None:
        """It has ended. whole_s: how long it was. Raises _SoundError: it was shorter than a window."""
        with self._lock:
            for track in self._tracks.values():
                for cut in track.cuts:
                    if cut.is_whole and not cut.has_given:
                        raise _SoundError(f"it is {whole_s:.3g} s long; a window has {cut.window / track.rate:.3g} s")


def _read(task: MicrophoneTask, heard: _Heard, sent: _Sender, rate: int) -> None:
    """Follow the sound to its end. Whatever ends it is the reason. rate: that a device is asked for."""
    try:
        is_first = True
        while is_first or task.kind == "file":  # a file is played again and again
            is_first = False
            heard.end(_follow(task, heard, rate))
        sent.end("the sound ended")
    except ImportError:
        sent.end(f"microphones need PyAV; {install_advice('camera')}")
    except _SoundError as error:
        sent.end(str(error))
    except Exception as error:  # noqa: BLE001 (anything that a stream makes a library raise)
        sent.end(reason_of(error, f"no sound came for {task.silence_s:g} s", _WORDS))


def _follow(task: MicrophoneTask, heard: _Heard, rate: int) -> float:
    """Read to the end. Return how long the sound was, in seconds. Raises _SoundError: there is none."""
    length_s = 0.0
    slack_s = 0.0 if task.kind == "file" else AHEAD_S
    with _opened(task, rate) as container:
        if not container.streams.audio:
            raise _SoundError("it has no sound")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise _SoundError("its sound is of no kind that FFmpeg knows")
        stream.codec_context.thread_count = 1  # the cores are the models'
        heard.begin()
        began_s = time.monotonic()
        for samples, own_rate in _gathered(_frames(container, stream)):
            length_s += len(samples) / own_rate
            time.sleep(max(began_s + length_s - slack_s - time.monotonic(), 0.0))
            heard.put(samples, own_rate)
    if not length_s:
        raise _SoundError("it has no samples")
    return length_s


def _frames(container: Any, stream: Any) -> Iterator[tuple[Floats, int]]:
    """Yield the samples of each frame, and their rate."""
    import av

    for packet in container.demux(stream):
        frames: list[Any] = []
        with contextlib.suppress(av.error.InvalidDataError):  # one that is broken; the next may be whole
            frames = packet.decode()
        for frame in frames:
            yield _mixed(frame), frame.sample_rate


def _gathered(frames: Iterator[tuple[Floats, int]]) -> Iterator[tuple[Floats, int]]:
    """Yield at least GATHERED_S of one rate at a time, but for the last: some devices give a few samples a frame."""
    parts: list[Floats] = []
    count = rate = 0
    for samples, own_rate in frames:
        if parts and own_rate != rate:
            yield np.concatenate(parts), rate
            parts, count = [], 0
        parts.append(samples)
        rate, count = own_rate, count + len(samples)
        if count >= GATHERED_S * rate:
            yield np.concatenate(parts), rate
            parts, count = [], 0
    if count:
        yield np.concatenate(parts), rate


def _opened(task: MicrophoneTask, rate: int) -> Any:
    """PyAV's container."""
    import av

    options = {"protocol_whitelist": PROTOCOLS[task.kind]} if task.kind in PROTOCOLS else {}
    lenient = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    if task.kind == "rtsp":
        options["rtsp_transport"] = "tcp"
    if task.kind != "alsa":
        limit_s = (task.silence_s, task.silence_s)
        return av.open(task.address, options=options, **lenient, timeout=limit_s)
    if not Path(task.alsa_config).exists():
        raise _SoundError(f"ALSA's own files are missing ({task.alsa_config}): apt install libasound2-data")
    first: Exception | None = None
    for channels in (1, 2, MOST_CHANNELS):  # hardware has a number of its own
        try:
            options = {"sample_rate": str(rate), "channels": str(channels)}
            return av.open(task.address, format="alsa", options=options, **lenient)
        except av.error.FFmpegError as error:
            first = first or error
    assert first is not None
    raise first


def _mixed(frame: Any) -> Floats:
    """The samples of a frame, -1 to 1, one channel. Raises _SoundError: it has too many channels."""
    channels, array = len(frame.layout.channels), frame.to_ndarray()
    if not 1 <= channels <= MOST_CHANNELS:
        raise _SoundError(f"it has {channels} channels; wanted 1 to {MOST_CHANNELS}")
    if not frame.format.is_planar:
        array = array.reshape(-1, channels).T
    if array.dtype == np.uint8:
        array = (array.astype(np.float32) - np.float32(128)) / np.float32(128)
    elif array.dtype.kind == "i":
        array = array.astype(np.float32) * np.float32(2.0 ** (1 - 8 * array.dtype.itemsize))
    samples: Floats = array.mean(axis=0, dtype=np.float32)
    return samples
