"""Pictures in a chat: from the part of a message to the bytes of its file, and the marks in a prompt that mean them.

Owns: which parts are pictures, their bounds, and that a prompt has exactly the marks that its chat has pictures: an
engine takes a mark in a caller's text for a picture too. Nothing is ever fetched: a picture comes with its request.
Decodes none. Pure. Thread: any.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edge_runtime.errors import DecodeFailed
from edge_runtime.wire.codec import short

MOST_PICTURES = 8
"""Of one chat. Each takes the engine as long as some hundred tokens of text, and no other answer goes on meanwhile."""

MOST_PIXELS = 24 << 20
"""Of one picture: a telephone's has 12 to 24 million. They take 150 MB while they are decoded."""

LONGEST_SIDE = 1024
"""Pixels: a larger picture is scaled down to it. Models look at 224 to 1344, and take tokens by the area."""

PICTURE_PARTS = ("image_url", "input_image")
"""The types of parts that are pictures, in OpenAI's two protocols."""

_SLICE = 1 << 16
"""Characters that are decoded at once, a multiple of 4: 4 MiB take 45 ms of a Xeon, and hold the interpreter."""

_DATA = re.compile(r"data:([a-zA-Z0-9.+/-]{0,64})((?:;[a-zA-Z0-9=.+-]{1,32}){0,4}),")

MOST_MARK_LIKE = 32
"""Different texts of a prompt that look like a mark, and of which it is asked whether the model knows them."""

_MARK_LIKE = re.compile(
    r"<[^<>\s]{0,40}?(?:image|img|vision|video|audio|slice|endoftext1)[^<>\s]{0,40}>|<unk>", re.IGNORECASE
)
"""By these, families of models mark pictures and sounds. Source: openvino.genai, visual_language/vlm_config.hpp."""

_NUMBERED = re.compile(r"<\|(?:image|audio)_\d+\|>", re.IGNORECASE)
"""Phi's marks; its tokens do not have them."""


class SentPicture(NamedTuple):
    """A picture as it came. where: its place in the chat. text: its file, in base64."""

    where: str
    text: str

    def data(self) -> bytes:
        """Return the bytes of the file. Raises DecodeFailed. Lets other threads run meanwhile."""
        text = self.text
        if "\n" in text:  # some programs write lines
            text = text.replace("\r", "").replace("\n", "")
        try:
            parts = [base64.b64decode(text[at : at + _SLICE], validate=True) for at in range(0, len(text), _SLICE)]
        except (binascii.Error, ValueError) as error:
            raise DecodeFailed(f"{self.where} is not base64: {error}; send the bytes of a picture's file") from None
        if not parts:
            raise DecodeFailed(f"{self.where} is empty; send the bytes of a picture's file in it")
        return b"".join(parts)


def picture_of(part: Mapping[str, Any], where: str) -> SentPicture:
    """Return a part that is a picture. Raises DecodeFailed."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    where = f"{where}.image_url.url" if isinstance(given, Mapping) else f"{where}.image_url"
    if not isinstance(url, str):
        raise DecodeFailed(f'{where} is {short(url)}; wanted the picture itself, as "data:image/png;base64,…"')
    head = _DATA.match(url)
    if head is None:
        raise DecodeFailed(
            f'{where} is {short(url)}: pictures are never fetched; send it itself, as "data:image/png;base64,…"'
        )
    kind, options = head.groups()
    if not options.lower().endswith(";base64") or not kind.lower().startswith(("image/", "application/octet-stream")):
        raise DecodeFailed(f'{where} begins with {short(head[0])}; wanted "data:image/png;base64," or another image/')
    return SentPicture(where, url[head.end() :])


def check_marks(prompt: str, marks: tuple[str, ...], begin: str, is_token: Callable[[str], bool]) -> None:
    """Raise DecodeFailed unless a prompt has each mark of its pictures once, and no other mark that an engine knows.

    begin: of the engine's own marks. is_token: whether a text is one token of the model, and so more than text.
    """
    for mark in marks:
        if prompt.count(mark) != 1:
            raise DecodeFailed(
                f"the model's chat template has a picture {prompt.count(mark)} times, wanted once: send pictures in "
                f'messages of "user", and write no {mark} in a text'
            )
    if prompt.count(begin) != len(marks):
        raise DecodeFailed(f"a text has {begin}…, by which the engine marks pictures; leave it out")
    likely = {found[0] for found in _MARK_LIKE.finditer(prompt)} - {*marks}
    for text in sorted(likely):
        if len(likely) > MOST_MARK_LIKE or _NUMBERED.fullmatch(text) or is_token(text):
            raise DecodeFailed(
                f"a text has {text}, by which models mark pictures; leave it out, or write it with spaces. A picture "
                'is a part of its own: {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'
            )
