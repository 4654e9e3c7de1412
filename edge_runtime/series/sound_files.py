"""Files of sound as samples: WAV by its own chunks, FLAC by the library soundfile; or 16 bits without a header. Pure.

The standard library's `wave` reads neither floats nor, before Python 3.12, the extensible form that most recorders
write; a WAV is a list of chunks, so it is read here. Nothing is believed of a length that a file claims.
"""

from __future__ import annotations

import io
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import UnreadableSeries
from edge_runtime.extras import install_advice

Floats = npt.NDArray[np.float32]

MOST_CHANNELS = 8
"""Of a file: 7.1, and arrays of microphones. They are mixed down to one."""

MOST_SAMPLES = 1 << 25
"""Of a file that is packed: 128 MiB as floats, half an hour at 16 kHz."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
"""`wFormatTag` (Microsoft, mmreg.h)."""

_FEWEST_FORMAT_BYTES, _EXTENSIBLE_BYTES = 16, 26
"""Of a chunk `fmt `: WAVEFORMAT with bits a sample; up to the first two bytes of its sub-format."""

_OTHERS = (
    (b"ID3", "MP3"), (b"\xff\xfb", "MP3"), (b"\xff\xf3", "MP3"), (b"OggS", "Ogg"), (b"FORM", "AIFF"), (b"RF64", "RF64"),
    (b"\x1aE\xdf\xa3", "WebM or Matroska"), (b"caff", "CAF"), (b"\xff\xd8\xff", "JPEG"), (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
)  # fmt: skip
"""First bytes of files that are not read: as bare samples they would be noise."""


class _Format(NamedTuple):
    tag: int
    channels: int
    rate: int
    bits: int


def read_samples(data: bytes, rate: int) -> Floats:
    """Samples of -1 to 1, one channel. rate: that they must have. Raises UnreadableSeries."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _of_wav(data, rate)
    if data[:4] == b"fLaC":
        return _of_flac(data, rate)
    other = next((name for start, name in _OTHERS if data.startswith(start)), "MP4" if data[4:8] == b"ftyp" else "")
    if other:
        raise UnreadableSeries(f"it is {other}; wanted WAV, FLAC, or bare samples of 16 bits")
    if len(data) % 2:
        raise UnreadableSeries(
            f"it is neither WAV nor FLAC, and as bare samples of 16 bits its {len(data):,} bytes are half a sample too "
            "many"
        )
    return _scaled(np.frombuffer(data, "<i2"), 16)


def wav_of(samples: Floats, rate: int) -> bytes:
    """Samples of -1 to 1 as a WAV of 16 bits."""
    data = np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    head = struct.pack("<HHIIHH", _PCM, 1, rate, rate * 2, 2, 16)
    parts = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def _of_wav(data: bytes, rate: int) -> Floats:
    """The samples of a WAV. Source: Multimedia Programming Interface and Data Specifications 1.0, Microsoft and IBM."""
    at, found = 12, None
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        body = at + 8
        if name == b"data":
            if found is None:
                raise UnreadableSeries("this WAV has its data before its format")
            return _decoded(memoryview(data)[body:], size, found, rate)
        if body + size > len(data):
            break
        if name == b"fmt ":
            found = _format_of(data[body : body + size])
        at = body + size + size % 2  # chunks begin at even places
    raise UnreadableSeries(f"this WAV ends after {len(data):,} bytes, before its samples; it is cut off or broken")


def _format_of(chunk: bytes) -> _Format:
    if len(chunk) < _FEWEST_FORMAT_BYTES:
        raise UnreadableSeries(f"the format of this WAV has {len(chunk)} bytes; wanted at least {_FEWEST_FORMAT_BYTES}")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and len(chunk) >= _EXTENSIBLE_BYTES:
        tag = struct.unpack_from("<H", chunk, 24)[0]
    return _Format(tag, channels, rate, bits)


def _decoded(body: memoryview, size: int, found: _Format, rate: int) -> Floats:
    """size: that the chunk claims. A recorder that streams claims 0 or as many as fit: then it is what is there."""
    _check(found.channels, found.rate, rate)
    if (found.tag, found.bits) not in (*((_PCM, bits) for bits in (8, 16, 24, 32)), (_FLOAT, 32), (_FLOAT, 64)):
        raise UnreadableSeries(
            f"this WAV has format {found.tag:#x} with {found.bits} bits; wanted PCM of 8, 16, 24 or 32 bits, or floats "
            "of 32 or 64"
        )
    is_open = size in (0, 0xFFFFFFFF)
    if size > len(body) and not is_open:
        raise UnreadableSeries(
            f"this WAV claims {size:,} bytes of samples and has {len(body):,}; it is cut off or broken"
        )
    width = found.bits // 8 * found.channels
    body = body[: len(body) if is_open else size]
    body = body[: len(body) // width * width]
    flat: Floats
    if found.tag == _FLOAT:
        flat = np.frombuffer(body, f"<f{found.bits // 8}").astype(np.float32)
    elif found.bits == 8:
        flat = (np.frombuffer(body, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    elif found.bits == 24:
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        flat = _scaled(wide.view("<i4")[:, 0], 32)
    else:
        flat = _scaled(np.frombuffer(body, f"<i{found.bits // 8}"), found.bits)
    return _mixed(flat.reshape(-1, found.channels))


def _of_flac(data: bytes, rate: int) -> Floats:
    """The samples of a FLAC. Raises UnreadableSeries: also where its library is not installed."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise UnreadableSeries(f"FLAC needs soundfile ({error}); {install_advice('audio')}") from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file.channels, file.samplerate, rate)
            samples: Any = file.read(MOST_SAMPLES, dtype="float32", always_2d=True)
            is_longer = len(file.read(1)) > 0
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise UnreadableSeries(f"this FLAC cannot be read: {error}") from None
    if is_longer:
        raise UnreadableSeries(f"this FLAC has over {MOST_SAMPLES:,} samples; send it in parts")
    return _mixed(samples)


def _check(channels: int, own_rate: int, rate: int) -> None:
    """Raise UnreadableSeries for another rate than the model takes, and for none or too many channels."""
    if not 1 <= channels <= MOST_CHANNELS:
        raise UnreadableSeries(f"it has {channels} channels; wanted 1 to {MOST_CHANNELS}")
    if own_rate != rate:
        raise UnreadableSeries(
            f"it has {own_rate} samples a second, and the model takes {rate}; send it with this rate: "
            f"ffmpeg -i FILE -ar {rate} -ac 1 OUT.wav"
        )


def _scaled(whole: npt.NDArray[Any], bits: int) -> Floats:
    scaled: Floats = whole.astype(np.float32) * np.float32(2.0 ** (1 - bits))
    return scaled


def _mixed(frames: Floats) -> Floats:
    """One channel: the mean of all. frames: [samples, channels]."""
    mixed: Floats = frames[:, 0] if frames.shape[1] == 1 else frames.mean(axis=1, dtype=np.float32)
    return mixed
