"""Pictures as they are sent in a chat: files of one colour, hostile ones, and the URLs that hold them."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

from PIL import Image

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def png(colour: tuple[int, int, int], size: tuple[int, int] = (64, 48)) -> bytes:
    """Return a PNG of one colour."""
    made = io.BytesIO()
    Image.new("RGB", size, colour).save(made, "PNG")
    return made.getvalue()


def bomb(side: int = 10_000) -> bytes:
    """Return a PNG of so many pixels a side in some hundred kB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = side.to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))
    pixels = zlib.compress(bytes(3 * side + 1) * side, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def url(data: bytes) -> str:
    """Return the URL that holds a file."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def part(picture: bytes | str) -> dict[str, Any]:
    """Return the part of a message. picture: a file, or a URL as it is."""
    return {"type": "image_url", "image_url": {"url": picture if isinstance(picture, str) else url(picture)}}


def messages(*pictures: bytes | str, text: str = "What is it?") -> list[dict[str, Any]]:
    """Return a user's message with pictures before its text."""
    return [{"role": "user", "content": [*map(part, pictures), {"type": "text", "text": text}]}]
