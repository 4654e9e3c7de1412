"""What a device remembers of updates, through crashes at every durable step, full disks and broken files."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_runtime.errors import StorageFailed
from edge_runtime.updates import journal as journals
from edge_runtime.updates.journal import DATABASE, KEPT_HISTORY, RECORD, Journal, RefusedRelease
from edge_runtime.updates.states import Release, ReleaseState
from tests.fakes.dying_disk import DyingDisk, Killed, failing

REASON = "scores: 3 of 10 values are too far from the golden ones"
NOW = "2026-11-21T12:00:00Z"
ONE, TWO, THREE = (Release("digits", number, number, f"{number:064x}") for number in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "update"


@pytest.fixture
def journal(folder: Path) -> Iterator[Journal]:
    journal = Journal(folder)
    journal.open()
    yield journal
    journal.close()


def reopened(folder: Path) -> Journal:
    journal = Journal(folder)
    journal.open()
    return journal


def look(folder: Path, question: Callable[[Journal], object]) -> object:
    journal = reopened(folder)
    try:
        return question(journal)
    finally:
        journal.close()


def test_a_new_device_remembers_nothing_and_has_lost_nothing(journal: Journal) -> None:
    assert (journal.active(), journal.rollouts(), journal.refused(), journal.marks()) == ({}, {}, {}, {})
    assert not journal.is_state_lost
    assert journal.history() == []


@pytest.mark.long  # SQLite waits five seconds for the other
@pytest.mark.usefixtures("journal")
def test_two_daemons_do_not_share_a_journal_and_the_second_names_the_first(folder: Path) -> None:
    with pytest.raises(StorageFailed, match=r"database is locked; another daemon uses it.*--state"):
        reopened(folder)


def test_a_release_that_is_committed_is_active_after_a_restart_and_no_longer_under_way(
    journal: Journal, folder: Path
) -> None:
    for state in (ReleaseState.VERIFYING, ReleaseState.STAGING, ReleaseState.WARMING, ReleaseState.OBSERVING):
        journal.advance(ONE, state, NOW)
    journal.commit(ONE, NOW)
    journal.close()
    assert look(folder, Journal.active) == {"digits": ONE}
    assert look(folder, Journal.rollouts) == {}
    assert look(folder, Journal.counters) == {"digits": 1}
    assert look(folder, lambda journal: [entry.what for entry in journal.history()]) == [
        "committed", "observing", "warming", "staging", "verifying",
    ]  # fmt: skip


def test_a_release_that_is_rejected_is_never_tried_again(journal: Journal, folder: Path) -> None:
    journal.advance(TWO, ReleaseState.WARMING, NOW)
    journal.reject(TWO, NOW, REASON)
    journal.close()
    assert look(folder, Journal.refused) == {TWO.manifest_sha256: RefusedRelease("digits", 2, REASON)}
    assert look(folder, Journal.rollouts) == {}


def test_the_release_before_is_at_hand_until_an_operator_goes_back_to_it(journal: Journal, folder: Path) -> None:
    for release in (ONE, TWO, THREE):
        journal.commit(release, NOW)
    assert journal.previous() == {"digits": TWO}
    journal.go_back(TWO, NOW, "slower")
    journal.close()
    assert look(folder, Journal.active) == {"digits": TWO}
    assert look(folder, Journal.previous) == {}
    assert look(folder, Journal.refused) == {THREE.manifest_sha256: RefusedRelease("digits", 3, "slower")}
    assert look(folder, Journal.counters) == {"digits": 3}


def test_a_release_that_is_committed_again_is_not_the_one_before_itself(journal: Journal) -> None:
    journal.commit(ONE, NOW)
    journal.commit(ONE, NOW)
    assert journal.previous() == {}


def test_of_a_model_that_is_taken_away_only_its_counter_stays(journal: Journal, folder: Path) -> None:
    for release in (ONE, TWO):
        journal.commit(release, NOW)
    journal.take_away("digits", NOW, "its group no longer names it")
    journal.close()
    assert look(folder, lambda kept: (kept.active(), kept.previous(), kept.rollouts())) == ({}, {}, {})
    assert look(folder, Journal.counters) == {"digits": 2}


def test_nothing_of_the_database_is_a_mapped_file_which_would_end_the_process_on_a_full_disk(
    journal: Journal, folder: Path
) -> None:
    journal.commit(ONE, NOW)
    assert {file.name for file in folder.iterdir()} == {DATABASE, f"{DATABASE}-wal", RECORD}


def test_marks_and_counters_never_go_back(journal: Journal) -> None:
    journal.raise_marks({"root": 3, "timestamp": 7})
    journal.raise_marks({"root": 2, "timestamp": 8})
    assert journal.marks() == {"root": 3, "timestamp": 8}
    journal.commit(THREE, NOW)
    journal.commit(ONE, NOW)
    assert journal.counters() == {"digits": 3}


def test_a_try_is_counted_before_the_load_and_kept_over_restarts(journal: Journal, folder: Path) -> None:
    assert journal.advance(ONE, ReleaseState.WARMING, NOW).tries == 1
    journal.close()
    again = reopened(folder)
    assert again.restart(NOW)["digits"].state is ReleaseState.STAGING
    assert again.advance(ONE, ReleaseState.WARMING, NOW).tries == 2
    assert again.advance(ONE, ReleaseState.OBSERVING, NOW).tries == 2
    again.restart(NOW)
    assert again.advance(ONE, ReleaseState.WARMING, NOW).tries == 3
    assert again.restart(NOW)["digits"].state is ReleaseState.REJECTING
    again.close()


def test_a_stop_on_purpose_is_not_a_try_and_another_release_begins_at_none(journal: Journal) -> None:
    for _ in range(5):
        journal.advance(ONE, ReleaseState.WARMING, NOW)
        journal.take_back_try("digits")
    assert journal.rollouts()["digits"].tries == 0
    journal.advance(ONE, ReleaseState.WARMING, NOW)
    assert journal.advance(TWO, ReleaseState.WARMING, NOW).tries == 1


def test_a_restart_says_in_the_history_what_it_found(journal: Journal) -> None:
    journal.advance(ONE, ReleaseState.OBSERVING, NOW)
    journal.restart(NOW)
    assert journal.history()[0].reason == "the process ended while it was observing (try 0)"


def test_a_refusal_stands_in_the_history_once_with_its_reason(journal: Journal) -> None:
    journal.advance(TWO, ReleaseState.OBSERVING, NOW)
    journal.advance(TWO, ReleaseState.ROLLING_BACK, NOW, REASON)
    journal.advance(TWO, ReleaseState.REJECTING, NOW, REASON)
    journal.reject(TWO, NOW, REASON)
    told = [(entry.what, entry.reason) for entry in journal.history()]
    assert told == [("rejected", REASON), ("rolling_back", ""), ("observing", "")]


@pytest.mark.parametrize("state", [ReleaseState.ROLLING_BACK, ReleaseState.REJECTING])
def test_a_restart_in_the_middle_of_a_refusal_keeps_its_reason(journal: Journal, state: ReleaseState) -> None:
    journal.advance(TWO, state, NOW, REASON)
    (rollout,) = journal.restart(NOW).values()
    assert (rollout.state, rollout.reason) == (ReleaseState.REJECTING, REASON)
    assert REASON not in [entry.reason for entry in journal.history()], "it is told when it is rejected"


def test_the_history_is_bounded(journal: Journal) -> None:
    for number in range(KEPT_HISTORY + 20):
        journal.drop(ONE, NOW, str(number))
    found = journal.history(10 * KEPT_HISTORY)
    assert len(found) == KEPT_HISTORY
    assert found[0].reason == str(KEPT_HISTORY + 19)


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100, b"SQLite format 3\x00" + bytes(4000)])
def test_a_broken_database_is_set_aside_and_the_active_releases_are_kept(
    journal: Journal, folder: Path, content: bytes
) -> None:
    journal.commit(ONE, NOW)
    journal.raise_marks({"root": 3})
    journal.close()
    for each in folder.glob(f"{DATABASE}*"):
        each.unlink()
    (folder / DATABASE).write_bytes(content)
    again = reopened(folder)
    assert again.active() == {"digits": ONE}
    assert again.counters() == {"digits": 1}
    assert again.is_state_lost
    again.close()
    assert look(folder, lambda journal: journal.is_state_lost) is True
    if content:
        assert (folder / f"{DATABASE}.broken").read_bytes() == content


def test_a_database_that_is_gone_is_begun_again_from_the_record_and_missed_until_a_full_refresh(
    journal: Journal, folder: Path
) -> None:
    journal.commit(ONE, NOW)
    journal.close()
    (folder / DATABASE).unlink()
    again = reopened(folder)
    assert again.is_state_lost
    assert again.active() == {"digits": ONE}
    again.found_whole()
    assert not again.is_state_lost
    again.close()
    assert look(folder, lambda journal: journal.is_state_lost) is False


def test_a_database_and_a_record_that_are_both_broken_leave_an_empty_memory_that_says_so(
    journal: Journal, folder: Path
) -> None:
    journal.commit(ONE, NOW)
    journal.close()
    (folder / DATABASE).write_bytes(b"x" * 5000)
    (folder / RECORD).write_bytes(b"{")
    again = reopened(folder)
    assert (again.active(), again.is_state_lost) == ({}, True)
    again.close()


def test_a_damaged_record_is_made_whole_from_the_database(journal: Journal, folder: Path) -> None:
    journal.commit(ONE, NOW)
    whole = (folder / RECORD).read_bytes()
    journal.close()
    (folder / RECORD).write_bytes(b"")
    look(folder, Journal.active)
    assert (folder / RECORD).read_bytes() == whole


# ---- crashes --------------------------------------------------------------------------------------------------------


DURABLE = ("fsync", "rename", "commit")


def update(journal: Journal) -> None:
    """A whole life: one release committed, a second rejected, a third committed."""
    journal.open()
    journal.restart(NOW)
    journal.raise_marks({"timestamp": 1})
    for release in (ONE, TWO, THREE):
        if release.manifest_sha256 in journal.refused() or journal.counters().get("digits", 0) >= release.counter:
            continue
        for state in (ReleaseState.VERIFYING, ReleaseState.STAGING, ReleaseState.WARMING, ReleaseState.OBSERVING):
            journal.advance(release, state, NOW)
        if release is TWO:
            journal.reject(release, NOW, "bad")
        else:
            journal.commit(release, NOW)


def steps(folder: Path) -> int:
    disk = DyingDisk(counts=DURABLE)
    journal = Journal(folder, disk=disk)
    update(journal)
    journal.close()
    return len(disk.calls)


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_durable_step_leaves_the_old_or_the_new_and_the_life_goes_on(
    tmp_path: Path, *, after: bool
) -> None:
    count = steps(tmp_path / "whole")
    assert count > 15
    for number in range(1, count + 1):
        folder = tmp_path / str(number)
        dying = Journal(folder, disk=DyingDisk(number, after=after, counts=DURABLE))
        with pytest.raises(Killed):
            update(dying)
        dying.close()
        again = Journal(folder)
        again.open()
        assert again.active().get("digits") in {None, ONE, THREE}
        assert not again.is_state_lost
        active = again.active()
        again.close()
        alone = tmp_path / f"{number} record alone"
        alone.mkdir()
        if active:
            shutil.copy(folder / RECORD, alone)
        assert look(alone, Journal.active) == active
        for _ in range(5):  # tries may have been spent
            update(again)
            again.close()
        assert look(folder, Journal.active) == {"digits": THREE}
        assert TWO.manifest_sha256 in look(folder, Journal.refused)
        assert look(folder, Journal.marks) == {"timestamp": 1}


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("database or disk is full"),
        sqlite3.OperationalError("disk I/O error"),
        OSError(errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_a_disk_that_fails_changes_nothing_and_says_so(folder: Path, journal: Journal, error: Exception) -> None:
    journal.commit(ONE, NOW)
    journal.close()
    failed = Journal(folder, disk=DyingDisk(1, failing(error), lasts=False, counts=("commit",)))
    failed.open()
    with pytest.raises(StorageFailed, match="nothing was changed"):
        failed.commit(TWO, NOW)
    assert failed.active() == {"digits": ONE}
    failed.commit(TWO, NOW)
    assert failed.active() == {"digits": TWO}
    failed.close()


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_change_has_happened_also_where_the_disk_does_not_take_the_second_record(folder: Path, fault: int) -> None:
    disk = DyingDisk(1, failing(fault), counts=("rename",))
    journal = Journal(folder, disk=disk)
    journal.open()
    journal.commit(ONE, NOW)
    assert journal.active() == {"digits": ONE}
    assert (Journal(folder).recorded(), journal.recorded()) == ([], [ONE])
    journal.close()
    look(folder, Journal.active)
    assert Journal(folder).recorded() == [ONE]


def test_releases_that_were_active_are_remembered_across_starts(folder: Path) -> None:
    journal = reopened(folder)
    for release in (ONE, TWO, THREE, ONE):
        journal.commit(release, NOW)
    journal.close()
    assert look(folder, Journal.committed) == {each.manifest_sha256 for each in (ONE, TWO, THREE)}


def test_of_many_releases_that_were_active_the_last_ones_are_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "KEPT_COMMITTED", 4)
    journal = reopened(folder)
    journal.note_fact("starts x", "1")
    releases = [Release("digits", number, number, f"{number:064x}") for number in range(1, 10)]
    for release in releases:
        journal.commit(release, NOW)
    assert journal.committed() == {each.manifest_sha256 for each in releases[-4:]}
    assert journal.fact("starts x") == "1"
    journal.close()


def test_releases_in_a_journal_of_an_older_daemon_were_active_too(folder: Path) -> None:
    journal = reopened(folder)
    for release in (ONE, TWO):
        journal.commit(release, NOW)
    journal.close()
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as database, database:
        database.execute("delete from facts where name glob 'committed *'")
    assert look(folder, Journal.committed) == {ONE.manifest_sha256, TWO.manifest_sha256}
