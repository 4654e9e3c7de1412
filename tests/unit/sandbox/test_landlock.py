"""Why a machine guards less of the disk than it could: judged by what its kernel answered."""

from __future__ import annotations

import errno

import pytest

from edge_runtime.sandbox.landlock import guard, judge_guard, landlock_version

OPEN = ("other files", "truncating files that they may read", "signals to other processes")


@pytest.mark.parametrize(
    ("error", "release", "active", "cause", "said"),
    [
        (
            errno.ENOSYS,
            "4.9.337-tegra",
            "",
            "kernel_too_old",
            "Linux 4.9.337-tegra has no Landlock, which came with 5.13",
        ),
        (errno.ENOSYS, "5.10.0-30-amd64", "", "kernel_too_old", "came with 5.13"),
        (errno.ENOSYS, "5.15.148-tegra", "", "absent", "was built without Landlock, or a container's filter hides it"),
        (errno.ENOSYS, "6.1.0-30-amd64", "lockdown,capability,apparmor\n", "absent", "was built without Landlock"),
        (errno.ENOSYS, "6.1.0-30-amd64", "lockdown,landlock,apparmor\n", "filtered", "filter of system calls"),
        (errno.EOPNOTSUPP, "6.1.0-30-amd64", "lockdown,capability\n", "switched_off", "(lsm=)"),
        (errno.EPERM, "6.18.44", "", "filtered", "filter of system calls keeps Landlock from this process"),
        (errno.EACCES, "6.18.44", "", "filtered", "a container's or a unit's"),
    ],
)
def test_a_machine_without_landlock_says_why_it_has_none(
    error: int, release: str, active: str, cause: str, said: str
) -> None:
    found = judge_guard(-1, error, release=release, active=active)
    assert (found.version, found.unguarded, found.cause) == (0, OPEN, cause)
    assert said in found.reason


@pytest.mark.parametrize(("version", "count"), [(1, 2), (2, 2), (3, 1), (5, 1)])
def test_an_old_landlock_says_what_it_leaves_open_and_which_kernel_closes_it(version: int, count: int) -> None:
    found = judge_guard(version, 0, release="5.15.0-101-generic", active="")
    assert (found.version, found.unguarded) == (version, OPEN[-count:])
    assert found.cause == "kernel_too_old"
    assert found.reason == f"Linux 5.15.0-101-generic has version {version} of Landlock; all needs 6.12"


@pytest.mark.parametrize("version", [6, 7])
def test_a_machine_that_guards_all_gives_no_cause(version: int) -> None:
    assert judge_guard(version, 0, release="6.12.0", active="") == (version, (), "", "")


def test_this_machines_guard_is_what_its_kernel_answers() -> None:
    found = guard()
    assert found.version == landlock_version()
    assert bool(found.unguarded) == bool(found.cause) == bool(found.reason)
    assert found.as_json()["landlock"] == found.version
