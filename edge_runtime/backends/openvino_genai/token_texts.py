"""The text of tokens, without the library where a table says the same: a call of it takes 80 to 400 us of each step.

Owns: the table, and whether it holds. Tokenizers that write bytes, as those of Llama 3, Qwen and GPT do, have one;
others, which change a text by what stands beside, are asked each time. Thread: as the writer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

TRIED = "K\N{LATIN SMALL LETTER U WITH DIAERESIS}che \N{GRINNING FACE}, 21 \N{DEGREE SIGN}C!\n\n  and the rest."
"""A text whose tokens must read as it does."""

BROKEN = (b"\xf0\x9f", b"\xc3(", b"\xe2\x82a", b"\x80\x80", b"\xed\xa0\x80")
"""Bytes that cannot be read, where tokens are single bytes: the library must write what Python does."""


class TokenTexts:
    """Decodes tokens as the library does, special ones left out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._table = _table_of(tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with U+FFFD for bytes that cannot be read."""
        if self._table is None:
            found: str = self._tokenizer.decode(list(tokens))
            return found
        return self.bytes(tokens).decode(errors="replace")

    def bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; of a tokenizer without a table those of their text."""
        table = self._table
        if table is None:
            return self.text(tokens).encode()
        return b"".join([table[token] if token < len(table) else b"" for token in tokens])


def _table_of(tokenizer: Any) -> list[bytes] | None:
    """Return the bytes of each token; None where the library does not decode by them."""
    with contextlib.suppress(RuntimeError, ValueError, TypeError, UnicodeError):
        known: dict[bytes, int] = tokenizer.get_vocab()
        table = [b""] * (max(known.values()) + 1)
        for raw, token in known.items():
            table[token] = raw
        alone = tokenizer.decode([[token] for token in range(len(table))])
        for token, text in enumerate(alone):
            if not text:
                table[token] = b""  # a special one
            elif text != table[token].decode(errors="replace"):
                return None
        tried = tokenizer.encode(TRIED).input_ids.data[0].tolist()
        single = {raw: token for raw, token in known.items() if len(raw) == 1}
        sequences = [tried, *([single[bytes([each])] for each in data] for data in BROKEN if _is_spelt(data, single))]
        if all(tokenizer.decode(each) == _read(table, each) for each in sequences):
            return table
    return None


def _is_spelt(data: bytes, single: dict[bytes, int]) -> bool:
    return all(bytes([each]) in single for each in data)


def _read(table: Sequence[bytes], tokens: Sequence[int]) -> str:
    return b"".join(table[token] for token in tokens).decode(errors="replace")
