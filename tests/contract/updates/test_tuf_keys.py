"""Keys: thresholds, duplicates, kinds, and how they are replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner

from tests.fakes.tuf_device import Site, new_site
from tests.fakes.tuf_repository import signer

KINDS = ["ed25519", "ecdsa", "rsassa-pss-sha256", "rsa-pkcs1v15-sha256"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with new_site(tmp_path) as it:
        yield it


# ---- thresholds -----------------------------------------------------------------------------------------------------


def test_two_signatures_do_not_meet_a_threshold_of_three(site: Site) -> None:
    site.repository.root.roles["snapshot"].threshold = 3
    site.repository.add_key("snapshot")
    site.repository.add_key("snapshot")
    site.repository.publish("root", "targets", "snapshot", "timestamp")
    assert site.device.refresh() == 0
    site.repository.signers["snapshot"].pop()
    site.repository.publish_all()
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 2, "snapshot": 2, "targets": 2, "timestamp": 3}


def test_a_threshold_above_the_number_of_keys_is_never_met(site: Site) -> None:
    for _ in range(4):
        site.repository.add_key("snapshot")
    site.repository.root.roles["snapshot"].threshold = 6
    site.repository.publish("root", "snapshot", "timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 2, "timestamp": 2}


def test_one_key_listed_many_times_counts_once(site: Site) -> None:
    repository = site.repository
    key = repository.add_key("snapshot")
    repository.root.roles["snapshot"].threshold = 3
    repository.publish("root", "snapshot", "timestamp")
    repository.edit("snapshot", _repeat_signature_of(key.public_key.keyid))
    assert site.device.refresh() == 1
    assert "snapshot" not in site.device.trusted


def test_a_role_that_lists_one_key_twice_makes_its_root_unusable(site: Site) -> None:
    root = site.repository.root
    root.roles["snapshot"].keyids.append(root.roles["snapshot"].keyids[0])
    site.repository.publish("root")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1}


def test_two_signatures_of_one_key_id_are_refused_even_where_one_is_enough(site: Site) -> None:
    keyid = site.repository.signers["snapshot"][0].public_key.keyid
    site.repository.edit("snapshot", _repeat_signature_of(keyid))
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "timestamp": 1}


@pytest.mark.parametrize("signature", ["00" * 64, "", "not hex"])
def test_one_bad_signature_does_not_spoil_enough_good_ones(site: Site, signature: str) -> None:
    spoiled = site.repository.signers["timestamp"][0].public_key.keyid
    site.repository.add_key("timestamp")
    site.repository.publish("root", "timestamp")
    site.repository.edit("timestamp", _set_signature_of(spoiled, signature))
    assert site.device.refresh() == 0
    assert site.device.trusted["timestamp"] == 2


# ---- kinds of keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_key_signs_a_root_and_its_wrong_signature_is_refused(site: Site, kind: str) -> None:
    key = site.repository.add_key("root", signer(1, kind))
    site.repository.root.roles["root"].threshold = 2
    site.repository.publish("root")
    assert site.device.refresh() == 0
    assert site.device.trusted["root"] == 2
    site.repository.publish("root")
    other = site.repository.published["root"][1]
    site.repository.edit("root", _set_signature_of(key.public_key.keyid, _signature_of(other, key.public_key.keyid)))
    assert site.device.refresh() == 1
    assert site.device.trusted["root"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_key_signs_every_other_role(site: Site, kind: str) -> None:
    for number, role in enumerate(("targets", "snapshot", "timestamp")):
        site.repository.root.roles[role].keyids.clear()
        site.repository.signers[role] = []
        site.repository.add_key(role, signer(10 + number, kind))
    site.repository.publish("root")
    site.repository.publish_all()
    assert site.device.refresh() == 0
    assert site.device.trusted == {"root": 2, "snapshot": 2, "targets": 2, "timestamp": 2}


def test_fields_of_a_key_that_tuf_does_not_know_do_not_matter(site: Site) -> None:
    key = CryptoSigner.generate_ed25519()
    key.public_key.unrecognized_fields["keyid_hash_algorithms"] = ["md5"]
    key.public_key.unrecognized_fields["extra"] = {"a": 1, "b": 2}
    site.repository.root.roles["snapshot"].keyids.clear()
    site.repository.signers["snapshot"] = []
    site.repository.add_key("snapshot", key)
    site.repository.publish("root", "snapshot", "timestamp")
    assert site.device.refresh() == 0
    assert site.device.trusted["snapshot"] == 2


@pytest.mark.parametrize(("field", "value"), [("keytype", "enigma"), ("scheme", "rot13")])
def test_a_root_with_a_key_of_an_unknown_kind_is_refused(site: Site, field: str, value: str) -> None:
    key = CryptoSigner.generate_ed25519()
    setattr(key.public_key, field, value)
    site.repository.root.add_key(key.public_key, "timestamp")
    site.repository.publish("root")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1}


# ---- roots that follow one another -----------------------------------------------------------------------------------

# Each root: numbers of its keys, threshold, numbers of the keys that sign it. The last is accepted, or it is not.
ROOTS: dict[str, tuple[list[tuple[list[int], int, list[int]]], bool]] = {
    "one key replaced, signed by both": ([([1], 1, [1]), ([2], 1, [2, 1]), ([2], 1, [2])], True),
    "signatures of strangers beside": ([([1], 1, [3, 1, 4]), ([2], 1, [3, 2, 1, 4]), ([2], 1, [3, 2, 4])], True),
    "three of five, others each time": (
        [([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 2, 3, 4], 3, [0, 4, 1]), ([0, 1, 2, 3, 4], 3, [1, 2, 3])],
        True,
    ),
    "three of five, one replaced": ([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 3, 4, 5], 3, [0, 4, 1])], True),
    "three of five, all replaced at once": (
        [([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([5, 6, 7, 8, 9], 3, [0, 2, 4, 5, 6, 7]), ([5, 6, 7, 8, 9], 3, [5, 6, 7])],
        True,
    ),
    "threshold raised": ([([1, 2, 3], 1, [1]), ([1, 2, 3], 2, [1, 2])], True),
    "threshold lowered": ([([1, 2, 3], 2, [1, 2]), ([1, 2, 3], 1, [1, 2]), ([1, 2, 3], 1, [1])], True),
    "one key more and threshold raised": ([([1], 1, [1]), ([1, 2], 2, [1, 2])], True),
    "the old key did not sign": ([([1], 1, [1]), ([2], 1, [2, 3, 4])], False),
    "the new key did not sign": ([([1], 1, [1]), ([2], 1, [1, 3, 4])], False),
    "two of three new ones signed": ([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 3, 4, 5], 3, [0, 2, 4])], False),
    "two of three old ones signed": ([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 3, 4, 5], 3, [0, 4, 5])], False),
    "raised threshold not met": ([([1, 2, 3], 1, [1]), ([1, 2, 3], 2, [2])], False),
    "lowered, but the old threshold not met": ([([1, 2, 3], 2, [1, 2]), ([1, 2, 3], 1, [1])], False),
}


@pytest.mark.parametrize("case", ROOTS.values(), ids=ROOTS.keys())
def test_a_root_must_be_signed_by_a_threshold_of_the_old_keys_and_of_its_own(
    site: Site, case: tuple[list[tuple[list[int], int, list[int]]], bool]
) -> None:
    roots, is_accepted = case
    repository = site.repository
    repository.published["root"].clear()
    repository.root.version = 0
    for keys, threshold, signers in roots:
        repository.root.roles["root"].keyids.clear()
        repository.root.roles["root"].threshold = threshold
        for number in keys:
            repository.root.add_key(signer(number).public_key, "root")
        repository.signers["root"] = [signer(number) for number in signers]
        repository.root.version += 1
        repository.republish("root")
    assert site.device.init(repository.published["root"][0]) == 0
    assert site.device.refresh() == (0 if is_accepted else 1)
    expected = repository.published["root"][-1 if is_accepted else -2]
    assert (site.device.metadata_dir / "root.json").read_bytes() == expected


# Keys, threshold, signing keys, whether it is accepted.
OTHERS: dict[str, tuple[list[int], int, list[int], bool]] = {
    "replaced": ([2], 1, [2], True),
    "strangers beside": ([1], 1, [3, 1, 4], True),
    "not signed by the new key": ([2], 1, [1, 3, 4], False),
    "three of five, two right": ([0, 1, 3, 4, 5], 3, [0, 2, 4], False),
    "three of five, two signed": ([0, 1, 3, 4, 5], 3, [0, 4], False),
    "three of five": ([0, 1, 2, 3, 4], 3, [0, 2, 4], True),
    "three of five, others": ([0, 1, 2, 3, 4], 3, [1, 2, 3], True),
}


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_a_role_must_be_signed_by_a_threshold_of_the_keys_in_the_newest_root(
    site: Site, case: tuple[list[int], int, list[int], bool], role: str
) -> None:
    keys, threshold, signers, is_accepted = case
    repository = site.repository
    site.device.refresh()
    repository.root.roles[role].keyids.clear()
    repository.root.roles[role].threshold = threshold
    for number in keys:
        repository.root.add_key(signer(number).public_key, role)
    repository.signers[role] = [signer(number) for number in signers]
    repository.publish("root")
    repository.publish_all()
    assert site.device.refresh() == (0 if is_accepted else 1)
    assert site.device.trusted["root"] == 2
    assert site.device.trusted[role] == (2 if is_accepted else 1)
    if is_accepted:
        assert (site.device.metadata_dir / f"{role}.json").read_bytes() == repository.published[role][-1]


def test_a_device_that_is_years_behind_walks_through_every_root(site: Site) -> None:
    for _ in range(60):
        old = list(site.repository.signers["root"])
        site.repository.rotate("root")
        new = list(site.repository.signers["root"])
        site.repository.signers["root"] = old + new
        site.repository.publish("root")
        site.repository.signers["root"] = new
    assert site.device.refresh() == 0
    assert site.device.trusted["root"] == 61
    assert site.asked()[:61] == [f"{number}.root.json" for number in range(2, 63)]


def test_a_root_version_that_is_left_out_ends_the_walk_before_it(site: Site) -> None:
    for _ in range(3):
        site.repository.publish("root")
    site.repository.published["root"][2] = b""
    assert site.device.refresh() == 0
    assert site.device.trusted["root"] == 2


def test_a_root_that_was_accepted_before_a_bad_one_stays(site: Site) -> None:
    site.repository.publish("root")
    site.repository.signers["root"] = []
    site.repository.publish("root")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 2}


def _signature_of(data: bytes, keyid: str) -> str:
    return next(str(one["sig"]) for one in json.loads(data)["signatures"] if one["keyid"] == keyid)


def _set_signature_of(keyid: str, signature: str) -> Any:
    def change(document: dict[str, Any]) -> None:
        for one in document["signatures"]:
            if one["keyid"] == keyid:
                one["sig"] = signature

    return change


def _repeat_signature_of(keyid: str) -> Any:
    def change(document: dict[str, Any]) -> None:
        one = next(one for one in document["signatures"] if one["keyid"] == keyid)
        document["signatures"] += [one] * 4

    return change
