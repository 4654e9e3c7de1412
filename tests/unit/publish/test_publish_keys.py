"""Private keys: sealed files, PEM, the environment; wrong passphrases; names; nothing readable by others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from edge_runtime.durable import SYSTEM_DISK
from edge_runtime.errors import PublishError
from edge_runtime.publish.key_ring import KeyRing, NewKeys
from edge_runtime.publish.passphrases import Passphrases, seal, unseal
from tests.fakes.publishing import CHEAP_N, PASSPHRASE, passphrases


def ring(folder: Path, *given: str) -> KeyRing:
    return KeyRing(folder, passphrases(*given), SYSTEM_DISK)


def pem(passphrase: bytes | None = None, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    lock = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, form, lock)


def test_a_sealed_key_opens_with_its_passphrase_and_no_other() -> None:
    sealed = seal(b"secret", "right", scrypt_n=CHEAP_N)
    assert b"secret" not in sealed
    assert unseal(sealed, "right") == b"secret"
    assert unseal(sealed, "wrong") is None


@pytest.mark.parametrize("field", ["salt", "nonce", "sealed"])
def test_a_sealed_key_that_was_changed_does_not_open(field: str) -> None:
    sealed = json.loads(seal(b"secret", "right", scrypt_n=CHEAP_N))
    sealed[field] = "00" + sealed[field][2:] if sealed[field][:2] != "00" else "01" + sealed[field][2:]
    assert unseal(json.dumps(sealed).encode(), "right") is None


@pytest.mark.parametrize("data", [b"{", b"{}", b'{"kdf": "scrypt", "n": 1e9}', b"{" + b"x" * 1000])
def test_bytes_that_are_not_a_sealed_key_are_refused(data: bytes) -> None:
    with pytest.raises(PublishError, match="not a sealed key"):
        unseal(data, "right")


def test_new_keys_are_files_that_only_their_owner_reads_and_only_the_passphrase_opens(tmp_path: Path) -> None:
    keys = ring(tmp_path / "keys")
    key = keys.add("root", NewKeys(2))[0]
    keys.save()
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["ring.json", "root-1.key", "root-2.key"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "keys").iterdir())
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    signature = ring(tmp_path / "keys").signer(key).sign(b"data")
    key.verify_signature(signature, b"data")
    with pytest.raises(PublishError, match="root-1: wrong passphrase"):
        ring(tmp_path / "keys", "another one").signer(key)


def test_an_online_key_needs_no_passphrase(tmp_path: Path) -> None:
    keys = KeyRing(tmp_path, Passphrases(), SYSTEM_DISK)
    key = keys.add("timestamp", NewKeys(is_online=True))[0]
    keys.save()
    KeyRing(tmp_path, Passphrases(), SYSTEM_DISK).signer(key)


def test_without_a_passphrase_and_a_terminal_no_key_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="--passphrase-file"):
        KeyRing(tmp_path, Passphrases(), SYSTEM_DISK).add("root", NewKeys())
    with pytest.raises(PublishError, match="wanted 8 or more"):
        KeyRing(tmp_path, Passphrases(["short"]), SYSTEM_DISK).add("root", NewKeys())


def test_a_person_types_a_new_passphrase_twice_and_an_old_one_until_it_fits(tmp_path: Path) -> None:
    said = iter([PASSPHRASE, PASSPHRASE])
    keys = KeyRing(tmp_path, Passphrases(ask=lambda _: next(said), scrypt_n=CHEAP_N), SYSTEM_DISK)
    key = keys.add("root", NewKeys())[0]
    keys.save()
    typed = iter(["no", "not this", PASSPHRASE])
    KeyRing(tmp_path, Passphrases(ask=lambda _: next(typed)), SYSTEM_DISK).signer(key)
    differing = iter([PASSPHRASE, "mistyped it"])
    with pytest.raises(PublishError, match="differ"):
        KeyRing(tmp_path, Passphrases(ask=lambda _: next(differing)), SYSTEM_DISK).add("root", NewKeys())


@pytest.mark.parametrize(
    "data",
    [pem(), pem(PASSPHRASE.encode()), pem(form=PrivateFormat.OpenSSH)],
    ids=["pkcs8", "pkcs8-locked", "openssh"],
)
def test_a_pem_key_signs_from_a_file_and_from_the_environment(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.pem").write_bytes(data)
    monkeypatch.setenv("MY_KEY", data.decode())
    for uri in (f"file:{tmp_path / 'mine.pem'}", "envvar:MY_KEY"):
        keys = ring(tmp_path / "keys")
        key = keys.add("root", NewKeys(uris=(uri,)))[0]
        key.verify_signature(keys.signer(key).sign(b"data"), b"data")


def test_a_key_given_twice_is_one_key(tmp_path: Path) -> None:
    (tmp_path / "mine.pem").write_bytes(pem())
    uri = f"file:{tmp_path / 'mine.pem'}"
    with pytest.raises(PublishError, match="not 2 different keys"):
        ring(tmp_path).add("root", NewKeys(uris=(uri, uri)))


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("nothing", "not a source of a key"),
        ("ftp:x", "not a source of a key"),
        ("file:absent.pem", "No such file"),
        ("envvar:ABSENT_KEY", "no ABSENT_KEY"),
        ("awskms:x", "cannot be read from there"),
        ("hsm:", "cannot be used"),
    ],
)
def test_a_source_that_gives_no_key_says_why(uri: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=complaint):
        ring(tmp_path).add("root", NewKeys(uris=(uri,)))


def test_bytes_that_are_not_a_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.pem").write_bytes(b"junk")
    with pytest.raises(PublishError, match="not a private key"):
        ring(tmp_path).add("root", NewKeys(uris=("file:junk.pem",)))


def test_a_file_that_holds_another_key_now_does_not_sign(tmp_path: Path) -> None:
    keys = ring(tmp_path)
    key = keys.add("timestamp", NewKeys(is_online=True))[0]
    keys.save()
    (tmp_path / "timestamp-1.pem").write_bytes(pem())
    with pytest.raises(PublishError, match="another key than the one that is trusted"):
        ring(tmp_path).signer(key)


def test_names_are_never_used_twice_even_when_the_ring_is_lost(tmp_path: Path) -> None:
    keys = ring(tmp_path)
    keys.add("root", NewKeys(2))
    keys.save()
    (tmp_path / "ring.json").unlink()
    again = ring(tmp_path)
    assert again.name(again.add("root", NewKeys())[0].keyid) == "root-3"


def test_a_key_on_a_stick_that_is_not_plugged_in_cannot_sign(tmp_path: Path) -> None:
    stick = tmp_path / "stick.pem"
    stick.write_bytes(pem())
    keys = ring(tmp_path)
    key = keys.add("root", NewKeys(uris=(f"file:{stick}",)))[0]
    keys.save()
    assert ring(tmp_path).can_sign(key.keyid)
    stick.unlink()
    assert not ring(tmp_path).can_sign(key.keyid)
