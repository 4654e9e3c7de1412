"""The text of an answer as its tokens come: whole characters, and nothing of a text that ends it.

Owns: what of the text may be told already. Its parts, joined, are what the whole answer's tokens are decoded to, up to
the first stop text. Pure, but for the decoder that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNREADABLE = "\N{REPLACEMENT CHARACTER}"

_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8: what is missing of one shows as at most three unreadable ones."""


class NewText:
    """Decodes the tokens of one answer step by step.

    is_stopped: whether a stop text came; nothing is added any more.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """decode: returns the text of tokens, with UNREADABLE in place of bytes that cannot be read, or nothing."""
        self.is_stopped = False
        self._decode = decode
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._from = 0  # tokens before this one are decoded, and change nothing behind them
        self._told = ""  # what the others were decoded to, as far as it was taken
        self._held = ""  # taken, and not told, since it may be the beginning of a stop text

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that further tokens made certain."""
        if self.is_stopped:
            return ""
        before = len(self._tokens)
        self._tokens.extend(tokens)
        text = self._decode(self._tokens[self._from :])
        certain = text[: len(text) - _unreadable_end(text)]
        new = certain[len(self._told) :]
        self._told = certain if len(certain) > len(self._told) else self._told
        if new and len(certain) == len(text):
            # The next decoding begins with these tokens, since some decoders write a first one otherwise.
            self._from = before
            self._told = self._decode(self._tokens[before:])
        return self._stop_at(new)

    def end(self) -> str:
        """Return the rest: no token comes any more."""
        if self.is_stopped:
            return ""
        text = self._decode(self._tokens[self._from :])
        new = self._stop_at(text[len(self._told) :])
        held, self._held = self._held, ""
        return new + held

    def _stop_at(self, new: str) -> str:
        """Return the certain beginning of the text that is held, with the new one behind it."""
        text = self._held + new
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.is_stopped, self._held = True, ""
            return text[:found]
        kept = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _unreadable_end(text: str) -> int:
    """Return how many of the last characters the next bytes may make readable."""
    return min(len(text) - len(text.rstrip(UNREADABLE)), _CHARACTER_BYTES - 1)


def _begun(text: str, stop: str) -> int:
    """Return how much of the text's end is the beginning of a stop text, which is not in it."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)
