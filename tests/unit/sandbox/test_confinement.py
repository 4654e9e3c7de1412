"""A confined child sees of the disk, the network and other processes what its task names, and no more."""

from __future__ import annotations

import json
import os
import platform
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from edge_runtime.sandbox.child import run_child, start_child
from edge_runtime.sandbox.landlock import landlock_version
from tests.fakes.sandboxed_work import Attempt, Work, attempt, attempt_forked, attempt_forked_beside_a_gpu, describe
from tests.models.onnx_models import mlp

LIMIT_S = 60.0
NEEDED = 6
"""The version of Landlock that keeps signals in."""

pytestmark = pytest.mark.skipif(landlock_version() < NEEDED, reason=f"the kernel's Landlock is below {NEEDED}")


def tried(
    *steps: tuple[str, object], reads: tuple[Path, ...] = (), writes: tuple[Path, ...] = (), starts_none: bool = False
) -> list[str]:
    """What came of each step in a child: "" where it could be done, else the error's name."""
    task = Attempt([(name, str(place)) for name, place in steps])
    ending = run_child(attempt, task, limit_s=LIMIT_S, reads=reads, writes=writes, starts_none=starts_none)
    assert ending.result is not None, ending.reason
    return ending.result


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two models' version folders, each with a file."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(b"w")
    return tmp_path


def test_a_child_reads_its_own_folder_and_no_other(models: Path) -> None:
    steps = [("read", models / "own" / "weights"), ("read", models / "other" / "weights"), ("list", models)]
    assert tried(*steps, reads=(models / "own",)) == ["", "EACCES", "EACCES"]


def tried_within(*places: Path, reads: Path, within: tuple[Path, ...]) -> list[str]:
    """What came of reading each place in a child that sees only what lies within some folders."""
    steps = [("read", str(place)) for place in places]
    task = Attempt(steps, str(reads), within=tuple(map(str, within)))
    ending = run_child(attempt_forked, task, limit_s=LIMIT_S, reads=[Path("/")])
    assert ending.result is not None, ending.reason
    return ending.result


def test_a_child_reads_no_link_of_its_folder_unless_its_caller_names_the_place(models: Path) -> None:
    (models / "own" / "link").symlink_to(models / "other" / "weights")
    assert tried(("read", models / "own" / "link"), reads=(models / "own",)) == ["EACCES"]


def test_a_child_reads_the_plain_files_within_a_folder_that_its_own_links_to_and_nothing_else(models: Path) -> None:
    home, own, outside = models / "home", models / "home" / "1", models / "other"
    (home / "store").mkdir(parents=True)
    (home / "store" / "weights").write_bytes(b"w")
    (own / "..data").mkdir(parents=True)
    (own / "..data" / "mounted").write_bytes(b"w")
    os.mkfifo(home / "store" / "fifo")
    for name, target in (
        ("file", "../store/weights"), ("config", "..data/mounted"), ("folder", "../store"), ("fifo", "../store/fifo"),
        ("out", outside / "weights"), ("root", "/"), ("above", "../.."), ("gone", "nowhere"),
    ):  # fmt: skip
        (own / name).symlink_to(target)
    places = [own / "file", own / "config", own / "out", own / "root" / str(outside / "weights")[1:]]
    places += [own / "above" / "other" / "weights", own / "folder" / "fifo", home / "store" / "fifo"]
    got = tried_within(*places, reads=own, within=(home,))
    assert got == ["", "", "EACCES", "EACCES", "EACCES", "EACCES", "EACCES"]


def test_a_folder_that_became_a_link_to_elsewhere_is_not_opened_to_a_child(models: Path) -> None:
    (models / "home").mkdir()
    (models / "home" / "1").symlink_to(models / "other")
    assert tried_within(models / "home" / "1" / "weights", reads=models / "home" / "1", within=(models / "home",)) == [
        "EACCES"
    ]


def test_a_child_changes_nothing_but_what_its_task_names(models: Path) -> None:
    own, work = models / "own", models / "other"
    kept = [("write", own / "new"), ("write", own / "weights"), ("truncate", own / "weights"), ("make", own / "f")]
    kept += [("remove", own / "weights"), ("rename", own / "weights")]
    assert tried(*kept, reads=(own,), writes=(work,)) == ["EACCES"] * 6
    assert tried(("write", work / "new"), ("make", work / "f"), reads=(own,), writes=(work,)) == ["", ""]
    assert (own / "weights").read_bytes() == b"w"


def test_a_child_does_not_see_keys_of_the_system() -> None:
    assert tried(("list", "/etc"), ("list", "/root"), ("list", "/home"), ("list", "/var")) == ["EACCES"] * 4
    assert tried(("read", "/etc/passwd"), ("write", "/dev/null"), ("read", "/proc/cpuinfo")) == [""] * 3


def test_a_child_connects_to_nothing_not_even_to_the_daemons_sockets(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as abstract:
        door.bind(str(tmp_path / "s"))
        abstract.bind(f"\0edge-runtime-test-{os.getpid()}")
        for listening in (door, abstract):
            listening.listen()
        steps = [("connect", tmp_path / "s"), ("connect", f"@edge-runtime-test-{os.getpid()}")]
        assert tried(*steps, writes=(tmp_path,)) == ["EACCES"] * 2


@pytest.mark.parametrize(("reads", "unix"), [((), "Permission denied"), (None, "allowed")])
def test_a_child_with_network_opens_unix_sockets_only_where_it_sees_the_whole_disk(reads, unix) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as reports:
        child = start_child(describe, Work(), has_network=True, reads=reads, reports=writer)
        os.close(writer)
        try:
            report = json.loads(reports.read().splitlines()[-1])
        finally:
            child.end()
    facts = report["result"]
    assert (facts["ipv4"], facts["unix"]) == ("allowed", unix)


def test_a_child_neither_signals_nor_reads_nor_limits_the_process_that_made_it() -> None:
    own = str(os.getpid())
    steps = [("kill", own), ("memory", own), ("trace", own), ("limit", own), ("environment", own)]
    assert tried(*steps) == ["EPERM", "EACCES", "EPERM", "EACCES", "EACCES"]


def test_modes_owners_times_and_attributes_of_files_stay_as_they_are(models: Path) -> None:
    own = models / "own"
    weights = own / "weights"

    def facts() -> list[tuple[int, ...]]:
        found = [path.stat() for path in (own, weights, models / "other")]
        return [(each.st_mode, each.st_uid, each.st_gid, each.st_mtime_ns, each.st_ctime_ns) for each in found]

    before = facts()
    names = ("mode", "modes", "owner", "link_owner", "times", "attribute")
    steps = [(name, place) for name in names for place in (own, weights, models / "other")]
    refused = [("flags", weights), ("times_of_now", weights)]
    assert tried(*steps, *refused, reads=(own,)) == [""] * len(steps) + ["EPERM"] * 2
    assert facts() == before
    assert os.listxattr(weights) == []


def test_a_child_copies_and_touches_files_though_their_modes_and_times_are_not_its_own(models: Path) -> None:
    own = models / "own"
    steps = [("copy", own / "weights"), ("touch", own / "new"), ("touch", own / "new"), ("touch_tool", own / "newer")]
    assert tried(*steps, writes=(own,)) == [""] * 4
    assert (own / "copy").read_bytes() == b"w"


def test_a_child_sets_priorities_and_cores_of_nobody_else() -> None:
    me = os.getpid()
    names = ("nice", "affinity", "policy", "io_priority")

    def facts() -> tuple[object, ...]:
        return os.getpriority(os.PRIO_PROCESS, me), os.sched_getscheduler(me), os.sched_getaffinity(me)

    before = facts()
    # Those of cores and of scheduling answer 0, and do nothing: libraries name their own threads so.
    assert tried(*((name, me) for name in names), ("nice_user", "")) == ["EPERM", "", "", "EPERM", "EPERM"]
    assert facts() == before
    assert tried(*((name, 0) for name in names)) == [""] * 4


def test_a_child_sends_no_datagram_to_a_unix_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mail:
        mail.bind(str(tmp_path / "s"))
        mail.setblocking(False)
        steps = [("datagram", tmp_path / "s"), ("datagram_of_pair", tmp_path / "s"), ("pair", "")]
        assert tried(*steps, writes=(tmp_path,)) == ["EPERM", "EPERM", ""]
        with pytest.raises(BlockingIOError):
            mail.recv(1)


def test_a_child_makes_nothing_that_outlives_it_and_leaves_neither_its_group_nor_the_filter() -> None:
    names = ["session", "group", "shared_memory", "semaphores", "messages", "namespace", "ring"]
    names += ["second_numbers"] if platform.machine() == "x86_64" else []
    assert tried(*((name, "") for name in names)) == ["EPERM"] * 6 + ["EACCES"] * (len(names) - 6)


def test_a_child_starts_processes_unless_it_may_start_none_and_threads_always() -> None:
    steps = [("process", ""), ("fork", ""), ("thread", "")]
    assert tried(*steps) == [""] * 3
    assert tried(*steps, starts_none=True) == ["EPERM", "EPERM", ""]


def test_a_process_forked_from_a_prepared_parent_confines_itself_and_gets_memory_of_its_own(
    models: Path,
) -> None:
    take = ("take", str(24 << 20))
    steps = [
        ("read", f"{models}/own/weights"),
        ("read", f"{models}/other/weights"),
        take,
        ("take", str(64 << 20)),
        take,
    ]
    steps += [("unlimit", ""), ("kill", str(os.getpid()))]
    task = Attempt(steps, str(models / "own"))
    ending = run_child(attempt_forked, task, limit_s=LIMIT_S, reads=(models,))
    assert ending.result == ["", "EACCES", "", "MemoryError", "", "ValueError", "EPERM"], ending.reason


def test_a_forked_process_names_its_own_threads_where_there_is_an_nvidia_gpu_and_changes_nothing_else_of_proc(
    models: Path,
) -> None:
    """Else CUDA does not begin in it."""
    names = [("name thread", ""), ("name other thread", "")]
    others = [("write", f"/proc/{which}/{name}") for which in ("self", "1") for name in ("oom_score_adj", "comm")]
    task = Attempt([*names, *others], str(models / "own"))
    proc = (Path("/proc"),)
    beside = run_child(attempt_forked_beside_a_gpu, task, limit_s=LIMIT_S, reads=(models,), writes=proc)
    assert beside.result == ["", "", *["EACCES"] * 4], beside.reason
    without = run_child(attempt_forked, task, limit_s=LIMIT_S, reads=(models,), writes=proc)
    assert without.result == ["EACCES"] * 6, without.reason


def test_a_forked_process_whose_parent_is_gone_ends() -> None:
    ending = run_child(attempt_forked, Attempt([], parent=1 << 22), limit_s=LIMIT_S)
    assert ending.reason == "RuntimeError: exit status 1"


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_library_loads_and_runs_a_model_in_a_child_that_sees_its_folder_only(tmp_path: Path, name: str) -> None:
    if find_spec(name) is None:  # importing it here would start its threads
        pytest.skip(f"no {name}")
    version = tmp_path / "m" / "1"
    mlp(version)
    assert tried((name, version / "model.onnx"), reads=(version,)) == [""]
    assert tried((name, version / "model.onnx")) == ["LoadFailed"]


def test_openvino_keeps_its_cache_where_a_child_may_write(tmp_path: Path) -> None:
    if find_spec("openvino") is None:
        pytest.skip("no openvino")
    version, cache = tmp_path / "m" / "1", tmp_path / "cache"
    mlp(version)
    cache.mkdir()
    assert tried((f"openvino:{cache}", version / "model.onnx"), reads=(version,), writes=(cache,)) == [""]
    assert list(cache.iterdir())
