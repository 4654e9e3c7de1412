"""Files of sound as samples: what is read, and what is refused with what was wanted."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest

from edge_runtime.errors import UnreadableSeries
from edge_runtime.series.sound_files import read_samples, wav_of

RAMP = np.linspace(-1, 0.999, 50).astype(np.float32)


def standard_wav(width: int, data: bytes, channels: int = 1, rate: int = 8000) -> bytes:
    """As the standard library writes it."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(data)
    return file.getvalue()


def chunked(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = b"".join(name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2) for name, body in chunks)
    return b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WAVE" + parts


def form(tag: int, channels: int, bits: int, rate: int = 8000) -> bytes:
    return struct.pack("<HHIIHH", tag, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_every_width_are_samples_of_one(width):
    whole = np.floor(RAMP.astype(np.float64) * 2 ** (8 * width - 1)).astype(np.int64)
    if width == 1:
        data = (whole + 128).astype(np.uint8).tobytes()
    else:
        data = b"".join(int(each).to_bytes(width, "little", signed=True) for each in whole)
    found = read_samples(standard_wav(width, data), 8000)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, RAMP, atol=2.0 ** (1 - 8 * width))


@pytest.mark.parametrize("bits", [32, 64])
def test_floats_and_the_extensible_form_are_read(bits):
    data = RAMP.astype(f"<f{bits // 8}").tobytes()
    extensible = form(0xFFFE, 1, bits) + struct.pack("<HHIH", 22, bits, 4, 3) + bytes(14)
    for head in (form(3, 1, bits), extensible):
        wav = chunked((b"LIST", b"odd"), (b"fmt ", head), (b"fact", b"1234"), (b"data", data))
        np.testing.assert_allclose(read_samples(wav, 8000), RAMP, atol=1e-7)


def test_channels_are_mixed_down_to_their_mean():
    both = np.array([[16384, 0], [-16384, -8192]], "<i2").tobytes()
    assert read_samples(standard_wav(2, both, channels=2), 8000).tolist() == [0.25, -0.375]


def test_bytes_without_a_header_are_samples_of_16_bits():
    assert read_samples(np.array([0, 16384, -32768], "<i2").tobytes(), 8000).tolist() == [0, 0.5, -1]


def test_a_wav_that_was_written_as_it_came_ends_where_it_ends():
    wav = bytearray(wav_of(RAMP, 8000))
    for claimed in (0, 0xFFFFFFFF):
        wav[40:44] = struct.pack("<I", claimed)
        assert len(read_samples(bytes(wav), 8000)) == 50


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (wav_of(RAMP, 8000)[:-10], "claims 100 bytes of samples and has 90; it is cut off"),
        (wav_of(RAMP, 8000)[:30], "before its samples"),
        (b"RIFF\0\0\0\0WAVE", "before its samples"),
        (chunked((b"data", b"1234")), "its data before its format"),
        (chunked((b"fmt ", b"12")), "format of this WAV has 2 bytes"),
        (chunked((b"fmt ", form(1, 10, 16)), (b"data", bytes(40))), "10 channels; wanted 1 to 8"),
        (chunked((b"fmt ", form(1, 0, 16)), (b"data", bytes(40))), "0 channels"),
        (chunked((b"fmt ", form(1, 1, 12)), (b"data", bytes(40))), "12 bits; wanted PCM of 8, 16, 24 or 32"),
        (chunked((b"fmt ", form(0x55, 1, 16)), (b"data", bytes(40))), "format 0x55"),
        (chunked((b"fmt ", form(1, 1, 16, 44_100)), (b"data", bytes(40))), "44100 samples a second, .* takes 8000"),
        (
            chunked((b"fmt ", form(1, 1, 16)), (b"data", bytes(40)))[:36] + b"data" + struct.pack("<I", 1 << 30),
            "claims",
        ),
        (b"OggS" + bytes(20), "it is Ogg; wanted WAV"),
        (b"ID3\4" + bytes(20), "it is MP3"),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "it is PNG"),
        (b"\0\0\0\x20ftypM4A " + bytes(20), "it is MP4"),
        (bytes(5), "half a sample too many"),
    ],
)
def test_bytes_that_cannot_be_read_as_sound_are_refused_with_their_fault(data, fault):
    with pytest.raises(UnreadableSeries, match=fault):
        read_samples(data, 8000)


def test_a_wav_that_was_cut_anywhere_is_samples_or_refused():
    whole = standard_wav(2, RAMP.tobytes())
    for end in range(len(whole)):
        try:
            read_samples(whole[:end], 8000)
        except UnreadableSeries:
            continue


def test_flac_is_read_as_the_wav_that_it_was_made_of():
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, RAMP, 8000, format="FLAC", subtype="PCM_16")
    np.testing.assert_allclose(read_samples(file.getvalue(), 8000), RAMP, atol=2**-15)
    with pytest.raises(UnreadableSeries, match="8000 samples a second"):
        read_samples(file.getvalue(), 16_000)
    with pytest.raises(UnreadableSeries, match="cannot be read"):
        read_samples(file.getvalue()[:30], 8000)
