"""Where passphrases and PINs come from: given beforehand, or asked for. Kept for one command, never written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edge_runtime.errors import PublishError
from edge_runtime.publish.sealed_key import SCRYPT_N

MIN_CHARACTERS = 8
"""For new ones; a thief of the file can try about as many as he pays for, each costing what `sealed_key` says."""

_TRIES = 3


class Passphrases:
    """given: tried for every key before anybody is asked. ask: shows a sentence and gives what was typed; None: nobody.

    scrypt_n: cost of new key files.
    """

    def __init__(
        self, given: Sequence[str] = (), ask: Callable[[str], str] | None = None, *, scrypt_n: int = SCRYPT_N
    ) -> None:
        self._known = list(given)
        self._ask = ask
        self._new: str | None = None
        self.scrypt_n = scrypt_n

    def candidates(self, key: str) -> Iterator[str]:
        """What may open a key, one after another until it does; what opened one is tried first for the next."""
        tried: list[str] = []
        for known in list(self._known):
            tried.append(known)
            yield known
        for _ in range(_TRIES if self._ask is not None else 0):
            assert self._ask is not None
            typed = self._ask(f"Passphrase of {key}: ")
            if typed not in tried:
                tried.append(typed)
                self._known.insert(0, typed)
                yield typed

    def why_none(self, key: str) -> str:
        """The sentence when no candidate opened a key."""
        if self._known or self._ask is not None:
            return f"{key}: wrong passphrase; nothing was signed"
        return (
            f"{key}: needs its passphrase and there is no terminal to ask on; give it by --passphrase-file, "
            "or in EDGE_RUNTIME_PASSPHRASE"
        )

    def for_new_keys(self) -> str:
        """One passphrase for all keys that a command makes. Raises PublishError: none, too short, mistyped."""
        if self._new is None:
            self._new = self._known[0] if self._known else self._asked_twice()
            if len(self._new) < MIN_CHARACTERS:
                raise PublishError(f"the passphrase has {len(self._new)} characters, wanted {MIN_CHARACTERS} or more")
            if self._new not in self._known:
                self._known.insert(0, self._new)
        return self._new

    def secret(self, name: str) -> str:
        """A PIN or the like that a signing device asks for by name. Raises PublishError: nobody can be asked."""
        if self._ask is None:
            raise PublishError(f"the key asks for its {name}, and there is no terminal to ask on")
        return self._ask(f"{name}: ")

    def _asked_twice(self) -> str:
        if self._ask is None:
            raise PublishError(
                "new key files need a passphrase and there is no terminal to ask on; give it by --passphrase-file, "
                "or in EDGE_RUNTIME_PASSPHRASE"
            )
        typed = self._ask("Passphrase for the new keys: ")
        if self._ask("The same again: ") != typed:
            raise PublishError("the two passphrases differ; nothing was written")
        return typed
