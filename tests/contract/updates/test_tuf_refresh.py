"""Top-level metadata: what is asked for, what is believed, and what is trusted afterwards. One test, one rule."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tuf.api.metadata import MetaFile

from tests.fakes.http_server import Answer
from tests.fakes.tuf_device import Site, new_site
from tests.fakes.tuf_repository import NOW, TOP

FIRST = {"root": 1, "snapshot": 1, "targets": 1, "timestamp": 1}
LONG_AGO = NOW - timedelta(days=5)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with new_site(tmp_path) as it:
        yield it


# ---- the workflow ---------------------------------------------------------------------------------------------------


def test_the_first_refresh_asks_for_four_files_and_no_more(site: Site) -> None:
    assert site.device.refresh() == 0
    assert site.asked() == ["2.root.json", "timestamp.json", "1.snapshot.json", "1.targets.json"]
    assert site.device.trusted == FIRST


def test_a_refresh_with_nothing_new_asks_for_the_next_root_and_the_timestamp_only(site: Site) -> None:
    site.device.refresh()
    site.asked()
    assert site.device.refresh() == 0
    assert site.asked() == ["2.root.json", "timestamp.json"]
    assert site.device.trusted == FIRST


def test_no_request_but_get_is_made(site: Site) -> None:
    site.repository.add_target("file", b"content")
    site.repository.publish_all()
    site.device.refresh()
    site.device.download("file")
    assert {request.method for request in site.server.requests} == {"GET"}


def test_metadata_is_kept_byte_for_byte(site: Site) -> None:
    for role in TOP[1:]:
        site.repository.published[role][-1] += b" \n"
    assert site.device.refresh() == 0
    for role in TOP:
        assert (site.device.metadata_dir / f"{role}.json").read_bytes() == site.repository.published[role][-1]


def test_a_download_refreshes_first_even_when_the_artifact_does_not_exist(site: Site) -> None:
    assert site.device.download("no such artifact") == 1
    assert site.asked() == ["2.root.json", "timestamp.json", "1.snapshot.json", "1.targets.json"]
    assert site.device.trusted == FIRST


def test_without_consistent_snapshots_files_have_no_version_in_their_names(site: Site) -> None:
    site.repository.root.consistent_snapshot = False
    site.repository.publish("root")
    assert site.device.refresh() == 0
    assert site.asked() == ["2.root.json", "3.root.json", "timestamp.json", "snapshot.json", "targets.json"]


def test_unknown_fields_are_kept_and_count_in_signatures(site: Site) -> None:
    site.device.refresh()
    site.repository.root.unrecognized_fields["custom"] = {"a": [1, "b"]}
    site.repository.root.roles["root"].unrecognized_fields["more"] = "value"
    site.repository.timestamp.unrecognized_fields["issued"] = "2026-01-01T00:00:00Z"
    site.repository.publish("root", "timestamp")
    assert site.device.refresh() == 0
    assert site.device.trusted == FIRST | {"root": 2, "timestamp": 2}


def test_an_unknown_field_that_was_added_after_signing_is_refused(site: Site) -> None:
    site.repository.edit("timestamp", lambda document: document["signed"].update(custom=1))
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1}


# ---- the root that is trusted first -------------------------------------------------------------------------------


def _without_version(document: dict[str, Any]) -> None:
    del document["signed"]["version"]


def _badly_signed(document: dict[str, Any]) -> None:
    document["signatures"][0]["sig"] = "00" * 64


def _of_another_type(document: dict[str, Any]) -> None:
    document["signed"]["_type"] = "targets"


@pytest.mark.parametrize("change", [_without_version, _badly_signed, _of_another_type])
def test_a_bad_first_root_is_refused_and_nothing_is_asked_for(site: Site, change: Any) -> None:
    document = json.loads(site.repository.published["root"][0])
    change(document)
    data = json.dumps(document).encode()
    assert site.device.init(data) == 1
    (site.device.metadata_dir / "root.json").write_bytes(data)
    assert site.device.refresh() == 1
    assert site.asked() == []


def test_nothing_is_asked_for_when_a_root_is_first_trusted(site: Site) -> None:
    assert site.asked() == []
    assert site.device.trusted == {"root": 1}


def test_without_a_first_root_nothing_is_asked_for(site: Site) -> None:
    (site.device.metadata_dir / "root.json").unlink()
    assert site.device.refresh() == 1
    assert site.asked() == []


# ---- signatures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "trusted"),
    [
        ("root", {"root": 1}),
        ("timestamp", {"root": 2}),
        ("snapshot", {"root": 2, "timestamp": 2}),
        ("targets", {"root": 2, "snapshot": 2, "timestamp": 2}),
    ],
)
def test_a_role_that_nobody_signed_stops_the_refresh_there(site: Site, role: str, trusted: dict[str, int]) -> None:
    site.repository.signers[role] = []
    site.repository.publish("root", "targets", "snapshot", "timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == trusted


@pytest.mark.parametrize(
    ("role", "trusted"),
    [
        ("root", {"root": 1}),
        ("snapshot", {"root": 2, "timestamp": 2}),
        ("targets", {"root": 2, "snapshot": 2, "timestamp": 2}),
    ],
)
def test_a_file_that_holds_another_version_than_its_name_says_is_refused(
    site: Site, role: str, trusted: dict[str, int]
) -> None:
    site.repository.signed[role].version = 2
    site.repository.publish("root", "targets", "snapshot", "timestamp")  # version 3, found as 2
    if role == "snapshot":
        site.repository.timestamp.snapshot_meta.version = 2
        site.repository.published["timestamp"].pop()
        site.repository.republish("timestamp")
    if role == "targets":
        site.repository.snapshot.meta["targets.json"].version = 2
        site.repository.published["snapshot"].pop()
        site.repository.republish("snapshot")
    assert site.device.refresh() == 1
    assert site.device.trusted == trusted


def test_metadata_of_another_type_is_refused_even_when_its_key_is_right(site: Site) -> None:
    repository = site.repository
    repository.add_key("snapshot", repository.signers["timestamp"][0])
    repository.snapshot.meta = {"snapshot.json": MetaFile(1)}
    repository.publish("root", "snapshot")
    repository.published["timestamp"].append(repository.published["snapshot"].pop())
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 2}


# ---- hashes and lengths of metadata ---------------------------------------------------------------------------------


def test_hashes_and_lengths_in_snapshot_and_timestamp_are_checked_and_right_ones_accepted(site: Site) -> None:
    site.repository.has_hashes = True
    site.repository.publish_all()
    assert site.device.refresh() == 0
    assert site.device.trusted == {"root": 1, "snapshot": 2, "targets": 2, "timestamp": 2}


@pytest.mark.parametrize("field", ["hashes", "length"])
def test_targets_that_are_not_what_the_snapshot_names_are_refused(site: Site, field: str) -> None:
    site.repository.has_hashes = True
    site.repository.publish_all()
    site.device.refresh()
    site.repository.publish("targets")
    meta = site.repository.snapshot.meta["targets.json"]
    if field == "hashes":
        meta.hashes = {"sha256": "46419349341cfb2d95f6ae3d4cd5c3d3dd7f4673985dad42a45130be5e0531a0"}
    else:
        meta.length = len(site.repository.published["targets"][-1]) - 1
    site.repository.publish("snapshot", "timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "snapshot": 3, "targets": 2, "timestamp": 3}


def test_a_snapshot_that_is_not_what_the_timestamp_names_is_refused(site: Site) -> None:
    site.device.refresh()
    site.repository.has_hashes = True
    site.repository.publish("snapshot")
    site.repository.timestamp.snapshot_meta.hashes = {"sha256": "00" * 32}
    site.repository.publish("timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == FIRST | {"timestamp": 2}


def test_metadata_with_an_unknown_hash_algorithm_only_is_refused(site: Site) -> None:
    site.repository.publish("snapshot")
    site.repository.timestamp.snapshot_meta.hashes = {"md6": "00" * 16}
    site.repository.publish("timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "timestamp": 2}


# ---- what is missing ------------------------------------------------------------------------------------------------


def test_a_missing_snapshot_fails_and_keeps_the_timestamp(site: Site) -> None:
    site.device.refresh()
    site.repository.timestamp.snapshot_meta.version += 1
    site.repository.publish("timestamp")
    assert site.device.refresh() == 1
    assert site.asked()[-1] == "2.snapshot.json"
    assert site.device.trusted == FIRST | {"timestamp": 2}


def test_missing_targets_fail_and_keep_timestamp_and_snapshot(site: Site) -> None:
    site.device.refresh()
    site.repository.snapshot.meta["targets.json"].version += 1
    site.repository.publish("snapshot", "timestamp")
    assert site.device.refresh() == 1
    assert site.asked()[-1] == "2.targets.json"
    assert site.device.trusted == FIRST | {"timestamp": 2, "snapshot": 2}


def test_a_missing_timestamp_fails(site: Site) -> None:
    site.device.refresh()
    site.server.answer = lambda request: Answer(404) if "timestamp" in request.path else None
    assert site.device.refresh() == 1
    assert site.asked()[-1] == "timestamp.json"
    assert site.device.trusted == FIRST


@pytest.mark.parametrize("status", [403, 404])
def test_forbidden_and_not_found_both_say_that_there_is_no_newer_root(site: Site, status: int) -> None:
    site.server.answer = lambda request: Answer(status) if "2.root" in request.path else None
    assert site.device.refresh() == 0
    assert site.device.trusted == FIRST


@pytest.mark.parametrize("status", [400, 410, 429, 500, 503, 204])
def test_any_other_answer_to_the_next_root_is_a_failure_and_no_proof_that_there_is_none(
    site: Site, status: int
) -> None:
    site.server.answer = lambda request: Answer(status) if "2.root" in request.path else None
    assert site.device.refresh() == 1
    assert site.asked() == ["2.root.json"]


# ---- rollback -------------------------------------------------------------------------------------------------------


def test_an_older_timestamp_is_refused(site: Site) -> None:
    site.repository.publish("timestamp")
    site.device.refresh()
    site.repository.start_again("timestamp")
    site.asked()
    assert site.device.refresh() == 1
    assert site.device.trusted["timestamp"] == 2
    assert site.asked()[-1] == "timestamp.json"


def test_a_timestamp_of_the_same_version_but_other_content_is_passed_over(site: Site) -> None:
    site.device.refresh()
    kept = (site.device.metadata_dir / "timestamp.json").read_bytes()
    site.repository.timestamp.snapshot_meta.version = 100
    site.repository.published["timestamp"] = [site.repository.sign("timestamp")]
    assert site.device.refresh() == 0
    assert site.asked()[-1] == "timestamp.json"
    assert (site.device.metadata_dir / "timestamp.json").read_bytes() == kept


@pytest.mark.parametrize("has_hashes", [False, True])
def test_a_newer_timestamp_that_names_an_older_snapshot_is_refused(site: Site, has_hashes: bool) -> None:
    site.repository.has_hashes = has_hashes
    site.repository.publish("snapshot", "timestamp")
    site.device.refresh()
    site.repository.start_again("snapshot", 1)
    site.repository.publish("timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == FIRST | {"snapshot": 2, "timestamp": 2}
    assert site.asked()[-1] == "timestamp.json"


def test_a_snapshot_that_the_timestamp_does_not_name_is_not_asked_for(site: Site) -> None:
    site.repository.publish("snapshot", "timestamp")
    site.device.refresh()
    site.repository.publish("snapshot")
    assert site.device.refresh() == 0
    assert site.asked()[-1] == "timestamp.json"
    assert site.device.trusted["snapshot"] == 2


@pytest.mark.parametrize("has_hashes", [False, True])
def test_a_snapshot_that_names_older_targets_is_refused(site: Site, has_hashes: bool) -> None:
    """Also with hashes: the kept snapshot no longer matches the new timestamp's, and still guards against rollback."""
    site.repository.has_hashes = has_hashes
    site.repository.publish_all()
    site.device.refresh()
    site.repository.start_again("targets", 1)
    site.repository.publish("snapshot", "timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "snapshot": 2, "targets": 2, "timestamp": 3}


def test_a_snapshot_that_leaves_a_role_out_is_refused(site: Site) -> None:
    site.repository.delegate("targets", "team")
    site.repository.publish_all()
    site.device.refresh()
    del site.repository.snapshot.meta["team.json"]
    site.repository.publish("snapshot", "timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted["snapshot"] == 2


def test_a_mix_of_an_old_snapshot_and_a_new_timestamp_is_refused(site: Site) -> None:
    old = site.repository.published["snapshot"][0]
    site.repository.publish_all()
    site.repository.published["snapshot"][-1] = old
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "timestamp": 2}


def test_a_mix_of_old_targets_and_a_new_snapshot_is_refused(site: Site) -> None:
    old = site.repository.published["targets"][0]
    site.repository.publish_all()
    site.repository.published["targets"][-1] = old
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "timestamp": 2, "snapshot": 2}


def test_targets_that_no_snapshot_names_are_not_asked_for(site: Site) -> None:
    site.device.refresh()
    site.repository.publish("targets")
    assert site.device.refresh() == 0
    assert site.asked()[-1] == "timestamp.json"
    assert site.device.trusted == FIRST


def test_old_metadata_is_still_a_guard_after_a_refresh_that_broke_off(site: Site) -> None:
    site.repository.publish_all()
    site.server.answer = lambda request: Answer(500) if "targets" in request.path else None
    assert site.device.refresh() == 1
    site.server.answer = lambda _request: None
    for role in ("timestamp", "snapshot", "targets"):
        site.repository.published[role].pop()
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "timestamp": 2, "snapshot": 2}


# ---- fast forward, and how a repository recovers from it ------------------------------------------------------------


def test_a_raised_timestamp_is_forgotten_when_its_key_is_replaced(site: Site) -> None:
    site.repository.start_again("timestamp", 100)
    site.device.refresh()
    assert site.device.trusted["timestamp"] == 100
    site.repository.rotate("timestamp")
    site.repository.publish("root")
    site.repository.start_again("timestamp")
    assert site.device.refresh() == 0
    assert site.device.trusted == FIRST | {"root": 2}


def test_a_raised_snapshot_is_forgotten_when_the_keys_of_snapshot_and_timestamp_are_replaced(site: Site) -> None:
    site.repository.start_again("snapshot", 100)
    site.repository.publish("timestamp")
    site.device.refresh()
    assert site.device.trusted["snapshot"] == 100
    site.repository.rotate("snapshot")
    site.repository.rotate("timestamp")
    site.repository.start_again("snapshot")
    site.repository.publish("root", "timestamp")
    assert site.device.refresh() == 0
    assert site.device.trusted["snapshot"] == 1


def test_raised_targets_are_forgotten_when_the_key_of_the_snapshot_is_replaced(site: Site) -> None:
    site.repository.start_again("targets", 100)
    site.repository.publish("snapshot", "timestamp")
    site.device.refresh()
    assert site.device.trusted["targets"] == 100
    site.repository.rotate("snapshot")
    site.repository.start_again("targets")
    site.repository.publish("root", "snapshot", "timestamp")
    assert site.device.refresh() == 0
    assert site.device.trusted["targets"] == 1


def test_a_replaced_root_key_alone_forgets_nothing(site: Site) -> None:
    site.repository.start_again("timestamp", 100)
    site.device.refresh()
    site.repository.publish("root")
    site.repository.start_again("timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted["timestamp"] == 100


# ---- expiry ---------------------------------------------------------------------------------------------------------


def test_an_expired_root_is_kept_and_nothing_more_is_believed(site: Site) -> None:
    site.device.refresh()
    site.repository.root.expires = LONG_AGO
    site.repository.publish("root")
    site.repository.publish_all()
    site.asked()
    assert site.device.refresh() == 1
    assert site.device.trusted == FIRST | {"root": 2}
    assert site.asked() == ["2.root.json", "3.root.json"]


@pytest.mark.parametrize(
    ("role", "trusted"),
    [
        ("timestamp", FIRST),
        ("snapshot", FIRST | {"timestamp": 2}),
        ("targets", FIRST | {"timestamp": 2, "snapshot": 2}),
    ],
)
def test_an_expired_role_is_refused_and_the_old_one_stays(site: Site, role: str, trusted: dict[str, int]) -> None:
    site.device.refresh()
    site.repository.signed[role].expires = LONG_AGO
    site.repository.publish_all()
    assert site.device.refresh() == 1
    assert site.device.trusted == trusted


def test_a_device_whose_root_expired_follows_to_one_that_has_not(site: Site) -> None:
    site.repository.root.expires = NOW + timedelta(days=7)
    site.repository.publish("root")
    assert site.device.refresh() == 0
    site.repository.root.expires = NOW + timedelta(days=21)
    site.repository.publish("root")
    assert site.device.refresh(now_utc=NOW + timedelta(days=18)) == 0
    assert site.device.trusted["root"] == 3


def test_a_device_whose_timestamp_expired_follows_to_one_that_has_not(site: Site) -> None:
    site.repository.timestamp.expires = NOW + timedelta(days=7)
    site.repository.publish("timestamp")
    site.device.refresh()
    site.repository.timestamp.expires = NOW + timedelta(days=21)
    site.repository.publish_all()
    assert site.device.refresh(now_utc=NOW + timedelta(days=18)) == 0
    assert site.device.trusted == {"root": 1, "timestamp": 3, "snapshot": 2, "targets": 2}


def test_a_device_whose_snapshot_and_targets_expired_follows_to_ones_that_have_not(site: Site) -> None:
    for role in ("snapshot", "targets"):
        site.repository.signed[role].expires = NOW + timedelta(days=7)
    site.repository.publish_all()
    site.device.refresh()
    for role in ("snapshot", "targets"):
        site.repository.signed[role].expires = NOW + timedelta(days=21)
    site.repository.publish_all()
    assert site.device.refresh(now_utc=NOW + timedelta(days=18)) == 0
    assert site.device.trusted == {"root": 1, "timestamp": 3, "snapshot": 3, "targets": 3}


def test_an_expired_timestamp_still_guards_against_an_older_one(site: Site) -> None:
    site.repository.timestamp.expires = NOW + timedelta(days=7)
    site.repository.publish("timestamp")
    site.device.refresh()
    site.repository.timestamp.expires = NOW + timedelta(days=30)
    site.repository.start_again("timestamp")
    assert site.device.refresh(now_utc=NOW + timedelta(days=18)) == 1
    assert site.device.trusted["timestamp"] == 2


@pytest.mark.parametrize("role", TOP)
def test_a_repository_that_stands_still_is_believed_until_it_expires_and_then_not(site: Site, role: str) -> None:
    assert site.device.refresh(now_utc=NOW + timedelta(days=29)) == 0
    assert site.device.refresh(now_utc=NOW + timedelta(days=31)) == 1
    assert site.device.trusted == FIRST


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "bound"),
    [("2.root", 512_000), ("timestamp", 16_384), ("1.snapshot", 2_000_000), ("1.targets", 5_000_000)],
)
def test_a_file_of_the_bound_of_its_role_is_read_and_one_byte_more_is_not(site: Site, file: str, bound: int) -> None:
    role = file.rpartition(".")[2]
    if role == "root":
        site.repository.publish("root")
    data = site.repository.published[role][-1]
    site.server.answer = lambda request: Answer(200, data.ljust(bound + 1)) if file in request.path else None
    assert site.device.refresh() == 1
    assert site.device.trusted.get(role, 1) == 1
    site.server.answer = lambda request: Answer(200, data.ljust(bound)) if file in request.path else None
    assert site.device.refresh() == 0
    assert (site.device.metadata_dir / f"{role}.json").stat().st_size == bound


def test_a_length_that_metadata_names_narrows_what_is_read(site: Site) -> None:
    site.repository.has_hashes = True
    site.repository.publish("snapshot", "timestamp")
    site.repository.published["snapshot"][-1] += b" "
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "timestamp": 2}


def test_a_length_that_metadata_names_never_widens_what_is_read(site: Site) -> None:
    data = site.repository.published["targets"][0]
    large = data + b" " * 5_000_001
    site.repository.published["targets"][0] = large
    site.repository.snapshot.meta["targets.json"] = MetaFile(
        1, len(large), {"sha256": hashlib.sha256(large).hexdigest()}
    )
    site.repository.publish("snapshot", "timestamp")
    assert site.device.refresh() == 1
    assert site.device.trusted == {"root": 1, "timestamp": 2, "snapshot": 2}


# ---- what is kept on the device may be broken -----------------------------------------------------------------------


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b"[" * 100_000])
def test_a_kept_file_that_is_broken_is_fetched_anew(site: Site, role: str, content: bytes) -> None:
    site.device.refresh()
    (site.device.metadata_dir / f"{role}.json").write_bytes(content)
    assert site.device.refresh() == 0
    assert site.device.trusted == FIRST


def test_nothing_but_metadata_ends_in_json(site: Site) -> None:
    site.repository.add_target("models/a.json", b"{}")
    site.repository.publish_all()
    assert site.device.download("models/a.json") == 0
    assert sorted(file.name for file in site.device.metadata_dir.rglob("*.json")) == [
        "root.json", "snapshot.json", "targets.json", "timestamp.json",
    ]  # fmt: skip
