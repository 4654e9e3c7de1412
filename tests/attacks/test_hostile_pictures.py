"""Pictures that mean harm: each is answered once, and the daemon, the model's host and other pictures take no harm."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
from PIL import Image

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import DecodeFailed
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import Form, ModelSteps
from tests.contract.pictures.test_pictures import COLOURS, framed, picture_header
from tests.contract.running_daemon import RawClient, put_model
from tests.fakes.daemon_process import GROWTH_BYTES, DaemonProcess, resident_bytes
from tests.models import onnx_models
from tests.pictures import encoded, photo, with_scans

AT_ONCE = 16
"""Requests on their way: what is good and what is bad share batches."""

MEMORY_BYTES = 160 << 20
"""What the host may take beside what it began with: a picture of as many pixels as are allowed does not fit."""

BEGAN_BYTES = 96 << 20
"""More than a host with ONNX Runtime and Pillow begins with, on any Python."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "colours", onnx_models.colours, toml=COLOURS)
    (folder / "models" / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    config = f"[limits]\nhost_memory_bytes = {MEMORY_BYTES}\n"
    with DaemonProcess(folder, config=config) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture
def client(daemon):
    with RawClient(daemon.endpoint) as client:
        yield client


def host_of(client):
    return client.result("models")[0]["host"]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, lines=b"\0" * 4096, more=b""):
    """An RGB picture. more: chunks before the pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def originals():
    """Pictures of every kind that is read, small, so that a change hits what matters."""
    pixels = photo(48, 40)
    frames = [Image.fromarray(photo(48, 40, seed)) for seed in (1, 2)]
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        encoded(pixels, "JPEG", exif=exif),
        encoded(pixels, "JPEG", progressive=True),
        encoded(Image.fromarray(pixels).convert("CMYK"), "JPEG"),
        encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]),
        encoded(pixels, "PNG", exif=exif),
        encoded(Image.fromarray(pixels).convert("P"), "PNG", transparency=3),
        encoded(pixels, "WEBP"),
        encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        encoded(pixels, "BMP"),
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
    ]


def mutated(random_, kinds):
    """One of them with bytes changed, cut out or put in, numbers made huge, or the head of one before another."""
    data = bytearray(random_.choice(kinds))
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        at = random_.randrange(len(data) if random_.random() < 0.5 else min(len(data), 64))
        match random_.randrange(6):
            case 0 | 1:
                data[at] = random_.randrange(256)
            case 2:
                data[at : at + 4] = random_.choice(
                    (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\xff\0")
                )
            case 3:
                del data[at : at + random_.randrange(1, 40)]
            case 4:
                data[at:at] = random_.randbytes(random_.randrange(1, 40))
            case _:
                data = data[:at] + random_.choice(kinds)[at:]
        if not data:
            break
    return bytes(data)


def attack(client, count, seed):
    """Send that many changed pictures, a good one after each seventh; returns how many changed ones were refused."""
    random_, kinds = random.Random(seed), originals()
    good = framed(encoded(np.full((40, 48, 3), (0, 0, 255), np.uint8)))
    waiting, refused, sent = set(), 0, 0
    while sent < count or waiting:
        while sent < count and len(waiting) < AT_ONCE:
            is_good = sent % 8 == 7
            name = b"%s %d" % (b"good" if is_good else b"bad", sent)
            client.send(picture_header(), name, good if is_good else framed(mutated(random_, kinds)))
            waiting.add(name)
            sent += 1
        header, name, *arrays = client.receive()
        waiting.remove(name)  # fails for a second answer
        answer = msgpack.unpackb(header)
        if name.startswith(b"good"):
            assert np.frombuffer(arrays[0], np.float32)[:2].tolist() == [2.0, 1.0], answer
        elif "error" in answer:
            assert answer["error"]["code"] == "decode_failed", answer
            refused += 1
    assert client.is_silent()
    return refused


def holds(client, daemon, count, seed):
    attack(client, 200, seed)
    daemon_before = daemon.resident_bytes()
    assert attack(client, count, seed + 1) > count // 4
    after = host_of(client)
    assert (after["restarts"], after["last_end"]) == (0, "")  # a busy model's move to a host of its own is not an end
    assert resident_bytes(after["pid"]) < BEGAN_BYTES + MEMORY_BYTES
    assert daemon.resident_bytes() - daemon_before < GROWTH_BYTES


def test_a_thousand_changed_pictures_are_each_answered_once(client, daemon):
    holds(client, daemon, 1_000, 1)


@pytest.mark.long
def test_10_000_changed_pictures_are_each_answered_once(client, daemon):
    holds(client, daemon, 10_000, 2)


def lying_gif():
    gif = bytearray(encoded(photo(48, 40), "GIF"))
    gif[6:10] = b"\xff" * 4
    return bytes(gif)


def lying_jpeg():
    jpeg = bytearray(encoded(photo(48, 40), "JPEG", progressive=True))
    at = jpeg.index(b"\xff\xc2") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 8_000, 8_000)
    return bytes(jpeg)


BOMBS = {
    "too many pixels": (lambda: png(8_200, 8_200), "67108864"),
    "more pixels than a number holds": (lambda: png(2**31 - 1, 2**31 - 1), "pixels"),
    "more memory than the host may have": (lambda: png(8_000, 8_000, bytes(8_000 * 24_001)), "memory"),
    "a size that is a lie": (lambda: png(7_000, 3_000), "pictur"),  # it cannot be read, or has no room by then
    "a GIF that says it is large": (lying_gif, "pixels"),
    "a progressive JPEG that says it is large": (lying_jpeg, ""),
    "3000 scans": (lambda: with_scans(encoded(photo(48, 40), "JPEG", progressive=True), 3_000), "over 500 scans"),
    "profiles of colours that inflate": (
        lambda: png(1, 1, bytes(4), chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes((1 << 20) - 16))) * 4_000),
        "longer than any of its size",
    ),
    "64 MiB of text beside one pixel": (
        lambda: png(1, 1, bytes(4), chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(1 << 26)))),
        "no picture can be read",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_the_next_picture_is_answered(client, name):
    make, said = BOMBS[name]
    got = msgpack.unpackb(client.ask(picture_header(), b"bomb", framed(make()))[0])
    assert got["error"]["code"] == "decode_failed", got
    assert said in got["error"]["message"]
    attack(client, 8, 3)
    after = host_of(client)
    assert (after["restarts"], after["last_end"]) == (0, "")
    assert resident_bytes(after["pid"]) < BEGAN_BYTES + MEMORY_BYTES


def test_pillow_reads_every_kind_in_the_sandbox_of_a_host(tmp_path: Path) -> None:
    artifact = onnx_models.picture_copy(tmp_path, ("rows", 40, 48, 3), "UINT8")
    hosts = Hosts()
    made = HostedBackend(backend("onnxruntime"), hosts)
    options = LoadOptions(steps=ModelSteps({"image": PictureSteps()}), host_memory_bytes=64 << 20, threads=2)
    instance = made.load(artifact, options)
    try:
        instance.finish_warm_up()
        form = instance.forms[Form("picture", answers=False)]
        sent = np.empty(len(originals()), object)
        sent[:] = originals()
        (rows,) = form.run({"image": sent})
        assert rows.shape == (len(sent), 40, 48, 3)
        with pytest.raises(DecodeFailed, match="memory"):
            form.run({"image": np.array([png(5_000, 5_000, bytes(5_000 * 15_001))], object)})
        assert form.run({"image": sent[:1]})[0].shape == (1, 40, 48, 3)
        assert instance.host.restarts == 0
    finally:
        instance.close()
        hosts.close()
