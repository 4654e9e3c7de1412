"""Pictures and forms that lie, over HTTP: each gets one clear answer, and nobody else notices."""

from __future__ import annotations

import gzip
import io
import random
import struct
import zlib

import pytest
from PIL import Image

from tests.contract.pictures.test_picture_doors import FORM, form
from tests.contract.pictures.test_pictures import COLOURS, picture
from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import put_model
from tests.fakes.daemon_process import GROWTH_BYTES, DaemonProcess
from tests.models import onnx_models

INFER = "/v2/models/colours/infer"
RED = picture("red")
BODY_TIMEOUT_S = 1.0
MUTATED = 3000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A process of its own: what strangers hold is not part of its memory."""
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "colours", onnx_models.colours, toml=COLOURS)
    (folder / "models" / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    config = f'[http]\nendpoint = "127.0.0.1:0"\nmax_body_bytes = {8 << 20}\nbody_timeout_s = {BODY_TIMEOUT_S}\n'
    with DaemonProcess(folder, config=config) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture
def honest(daemon):
    """A client that was there before, and is answered as before afterwards."""
    with RawHttp(daemon.address("http")) as client:
        assert is_answered(client)
        yield client
        assert is_answered(client)


@pytest.fixture
def stranger(daemon, honest):
    with RawHttp(daemon.address("http")) as client:
        yield client


def is_answered(client: RawHttp) -> bool:
    answer = client.ask("POST", INFER, form(("picture", "a.png", RED)), content_type=FORM)
    return answer.status == 200 and answer.fields["classes"][0]["label"] == "red"


def test_forms_that_are_mutated_get_one_answer_each(daemon, stranger):
    chance = random.Random(14)
    whole = form(("picture", "a.png", RED), ("raw", None, b"false"), ("picture", "b.png", RED))
    started = daemon.resident_bytes()
    for _ in range(MUTATED):
        body = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(body) + 1)
            match chance.randrange(4):
                case 0:
                    body[at:at] = chance.randbytes(chance.randint(1, 9))
                case 1:
                    del body[at : at + chance.randint(1, 200)]
                case 2:
                    body[at : at + 4] = chance.choice([b"\r\n--", b"--edge", b"\r\n\r\n", b"\0"])
                case _:
                    body[at : at + 1] = chance.randbytes(1)
        answer = stranger.ask("POST", INFER, bytes(body), content_type=FORM)
        assert answer.status in {200, 400, 500}, answer
        assert answer.status == 200 or answer.code in {"decode_failed", "run_failed", "tensor_mismatch"}
    assert daemon.resident_bytes() - started < GROWTH_BYTES


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", form(("picture", "a", RED))),
        ("multipart/form-data; boundary=" + "x" * 100, form(("picture", "a", RED))),
        ("multipart/form-data; boundary=other", form(("picture", "a", RED))),
        (FORM, b""),
        (FORM, form(*[("picture", None, b"x")] * 10_000)),
        (FORM, form(*[(f"p{index}", None, b"1") for index in range(10_000)])),
        (FORM, form(("picture", "a" * 100_000, RED))),
        (FORM, form(("picture", "a", RED), end=b"")),
        (FORM, form(("picture", "a", RED))[:-1000]),
        (FORM, b"--edge\r\n" + b"a: b\r\n" * 100_000),
        (FORM, b"\r\n--edge" * 500_000),
        (FORM, b"--edge\r\n\r\n\r\n" * 300_000),
        (FORM, b"--edg" * 1_000_000),
        (FORM, b"--edge\r\ncontent-disposition: form-data" + b'; a="' * 700 + b"\r\n\r\n\r\n--edge--"),
    ],
)  # fmt: skip
def test_a_form_that_lies_is_refused_and_its_connection_goes_on(stranger, kind, body):
    answer = stranger.ask("POST", INFER, body, content_type=kind)
    assert (answer.status, answer.code) == (400, "decode_failed")
    assert is_answered(stranger)


def test_a_form_in_a_form_is_refused(stranger):
    part = b'--edge\r\nContent-Disposition: form-data; name="picture"\r\nContent-Type: multipart/mixed\r\n\r\n'
    answer = stranger.ask("POST", INFER, part * 2 + form(("picture", "a", RED)), content_type=FORM)
    assert (answer.status, answer.code) == (400, "decode_failed")


def test_a_form_that_never_ends_is_refused_in_time(stranger):
    stranger.send(request("POST", INFER, form(("picture", "a", RED))[:50], content_type=FORM, content_length=9000))
    answer = stranger.response()
    assert answer.status == 408
    assert stranger.has_ended()


def test_a_form_that_is_a_bomb_when_inflated_is_refused(stranger):
    bomb = gzip.compress(form(("picture", "a", bytes(64 << 20))), 9)
    assert stranger.ask("POST", INFER, bomb, content_type=FORM, content_encoding="gzip").status == 413


def png_that_says(width: int, height: int) -> bytes:
    """A PNG whose head says a size that its data does not have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")


def bomb_of_zeros() -> bytes:
    """A PNG of 10 000 x 10 000 pixels in 300 KB."""
    file = io.BytesIO()
    Image.new("RGB", (10_000, 10_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [png_that_says(2**31 - 1, 2**31 - 1), png_that_says(60_000, 60_000), png_that_says(8_000, 8_000), bomb_of_zeros()],
    ids=["absurd", "huge", "cut", "bomb"],
)
def test_a_picture_that_is_a_bomb_is_refused_as_its_senders_fault(daemon, stranger, data):
    started = daemon.resident_bytes()
    for body, kind in ((data, "image/png"), (form(("picture", "a.png", data)), FORM)):
        answer = stranger.ask("POST", INFER, body, content_type=kind)
        assert (answer.status, answer.code) == (400, "decode_failed"), answer.body
    assert is_answered(stranger)
    assert daemon.resident_bytes() - started < GROWTH_BYTES
