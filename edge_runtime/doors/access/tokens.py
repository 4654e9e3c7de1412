"""The tokens of the HTTP and gRPC doors: the file that keeps them, and what the bearer of one may do.

Owns: the file's form, TOML with a table for each token, and how a token is recognised. The file has SHA-256 of tokens,
never a token. `edge-runtime token` writes it (doors/access/command.py), door_access.py reads it. Keeps nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from edge_runtime.config.endpoints import CONFIGURATION
from edge_runtime.config.loading import read_settings
from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import build, parse_toml

Right = Literal["infer", "control", "view"]
"""A scope of the table of operations (operations.py); view: the pictures of cameras."""

RIGHTS: tuple[Right, ...] = ("infer", "control", "view")

DEFAULT_TOKENS = CONFIGURATION.with_name("tokens.toml")
"""The file that `edge-runtime token` writes where neither it nor the configuration names another."""

TOKEN_BYTES = 32
"""As random as an ed25519 key, so that its SHA-256 needs no salt and no slow hash."""

PREFIX = "ert_"
"""Scanners for leaked secrets find tokens by it."""

NAME_FORM = "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or a digit"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Rights(Struct, frozen=True):
    """The rights of a caller. name: of its token; None: it needs none here."""

    may_infer: bool
    may_control: bool
    name: str | None = None
    may_view: bool = False


class TokenEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One token in the file."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    may: Annotated[tuple[Right, ...], Meta(min_length=1)]


class TokenFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens by name."""

    tokens: dict[str, TokenEntry] = field(default_factory=dict)

    def rights_of(self, token: str) -> Rights | None:
        """Return the rights of a token's bearer; None for an unknown token. It takes as long for every token."""
        return self.rights_of_digest(digest_of(token))

    def rights_of_digest(self, digest: str) -> Rights | None:
        """As `rights_of`, of a token by its SHA-256."""
        found: Rights | None = None
        for name, entry in self.tokens.items():
            if hmac.compare_digest(entry.sha256, digest):
                found = Rights("infer" in entry.may, "control" in entry.may, name, "view" in entry.may)
        return found

    def with_token(self, name: str, may: Sequence[Right]) -> tuple[TokenFile, str]:
        """Return the file with a new token, and the token. Raises ConfigError for a name that is bad or taken."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"token name: got {name!r}, wanted {NAME_FORM}")
        if name in self.tokens:
            raise ConfigError(f"there is a token {name!r} already; remove it first, or choose another name")
        token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
        entry = TokenEntry(digest_of(token), tuple(each for each in RIGHTS if each in may))
        return TokenFile({**self.tokens, name: entry}), token

    def without_token(self, name: str) -> TokenFile:
        """Return the file without a token. Raises ConfigError when there is none of that name."""
        if name not in self.tokens:
            known = ", ".join(self.tokens) or "none"
            raise ConfigError(f"there is no token {name!r}; there are: {known}")
        return TokenFile({other: entry for other, entry in self.tokens.items() if other != name})

    def text(self) -> str:
        """The file's text."""
        return HEAD + "".join(_table(name, entry) for name, entry in self.tokens.items())


HEAD = "# Tokens of the HTTP and gRPC doors, as SHA-256; written by `edge-runtime token`.\n"


def read_tokens(path: Path, key: str) -> TokenFile:
    """Read a file of tokens. key: the setting that names it. Raises ConfigError: the fault, and its place."""
    try:
        text = read_settings(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}; `edge-runtime token add NAME` makes the file") from None
    values: Mapping[str, object] = parse_toml(text, str(path))
    file = build(TokenFile, values, str(path))
    if odd := next((name for name in file.tokens if not _NAME.fullmatch(name)), None):
        raise ConfigError(f"{path}: tokens.{odd!r}: wanted a name of {NAME_FORM}")
    return file


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token, as the file has it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


# ---- private --------------------------------------------------------------------------------------------------------


def _table(name: str, entry: TokenEntry) -> str:
    may = ", ".join(f'"{each}"' for each in entry.may)
    return f'\n[tokens."{name}"]\nsha256 = "{entry.sha256}"\nmay = [{may}]\n'
