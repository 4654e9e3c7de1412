"""Delegated roles: which are asked for, in which order, who may vouch for whom, and how their names are written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from edge_runtime.updates.store import MetadataStore
from tests.fakes.tuf_device import Site, new_site
from tests.fakes.tuf_repository import NOW, TufRepository, role_file

REFRESH = 4
"""Requests of a first refresh."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with new_site(tmp_path) as it:
        yield it


@dataclass(frozen=True)
class Edge:
    """One delegation."""

    delegator: str
    role: str
    paths: tuple[str, ...] = ("*",)
    terminating: bool = False


# Delegations in their order, and the roles that are asked for when a target is nowhere.
GRAPHS: dict[str, tuple[list[Edge], list[str]]] = {
    "one": ([Edge("targets", "A")], ["A"]),
    "two beside": ([Edge("targets", "A"), Edge("targets", "B")], ["A", "B"]),
    "two deep": ([Edge("targets", "A"), Edge("targets", "B"), Edge("B", "C")], ["A", "B", "C"]),
    "depth first": (
        [Edge("targets", "A"), Edge("targets", "B"), Edge("A", "C"), Edge("A", "D")],
        ["A", "C", "D", "B"],
    ),
    "three deep": ([Edge("targets", "A"), Edge("targets", "B"), Edge("A", "C"), Edge("C", "D")], ["A", "C", "D", "B"]),
    "terminating ends all but what is below": (
        [Edge("targets", "A"), Edge("targets", "B"), Edge("A", "C", terminating=True), Edge("A", "D")],
        ["A", "C"],
    ),
    "terminating, and three deep": (
        [Edge("targets", "A"), Edge("targets", "B"), Edge("A", "C", terminating=True), Edge("C", "D")],
        ["A", "C", "D"],
    ),
    "terminating, but for other paths": (
        [Edge("targets", "A", ("*.py",), terminating=True), Edge("targets", "B")],
        ["B"],
    ),
    "paths that do not match": ([Edge("targets", "A", ("*.py",)), Edge("targets", "B"), Edge("A", "C")], ["B"]),
    "paths that do not match below": (
        [Edge("targets", "A"), Edge("targets", "B"), Edge("A", "C", ("*.py",)), Edge("C", "D")],
        ["A", "B"],
    ),
    "a circle": (
        [Edge("targets", "A"), Edge("targets", "B"), Edge("B", "C"), Edge("C", "D"), Edge("D", "B")],
        ["A", "B", "C", "D"],
    ),
    "two to the same": (
        [Edge("targets", "A"), Edge("targets", "B"), Edge("B", "C"), Edge("A", "C")],
        ["A", "C", "B"],
    ),
    "two to the same, for other paths": (
        [Edge("targets", "A"), Edge("targets", "B"), Edge("B", "C"), Edge("A", "C", ("*.py",))],
        ["A", "B", "C"],
    ),
}


def build(repository: TufRepository, edges: list[Edge]) -> None:
    for edge in edges:
        repository.delegate(edge.delegator, edge.role, list(edge.paths), terminating=edge.terminating)
    repository.publish_all()


@pytest.mark.parametrize(("edges", "visited"), GRAPHS.values(), ids=GRAPHS.keys())
def test_roles_are_asked_for_depth_first_in_the_order_of_their_delegators(
    site: Site, edges: list[Edge], visited: list[str]
) -> None:
    build(site.repository, edges)
    assert site.device.download("nowhere") == 1
    assert site.asked()[REFRESH:] == [f"1.{role}.json" for role in visited]
    assert set(site.device.trusted) == {"root", "timestamp", "snapshot", "targets", *visited}


TREE = [
    Edge("targets", "A", ("*.doc", "*.md")),
    Edge("targets", "B", ("releases/*/*",)),
    Edge("B", "C", ("releases/x/*",)),
    Edge("B", "D", ("releases/y/*.zip",)),
]


@pytest.mark.parametrize(
    ("path", "is_found", "visited"),
    [
        ("targetfile", True, []),
        ("README.md", True, ["A"]),
        ("releases/x/x_v1", True, ["B", "C"]),
        ("releases/y/y_v1.zip", True, ["B", "D"]),
        ("releases/z/z_v1.zip", False, ["B"]),
        ("docs/README.md", False, []),
    ],
)
def test_a_target_is_found_only_where_every_role_on_the_way_may_speak_of_it(
    site: Site, path: str, is_found: bool, visited: list[str]
) -> None:
    build(site.repository, TREE)
    for role, target in [
        ("targets", "targetfile"),
        ("A", "README.md"),
        ("A", "docs/README.md"),
        ("C", "releases/x/x_v1"),
        ("D", "releases/y/y_v1.zip"),
        ("D", "releases/z/z_v1.zip"),
    ]:
        site.repository.add_target(target, f"{role} says {target}".encode(), role)
    site.repository.publish_all()
    assert site.device.download(path) == (0 if is_found else 1)
    assert site.asked()[REFRESH : REFRESH + len(visited)] == [f"2.{role}.json" for role in visited]
    assert site.device.artifacts == ([site.repository.artifacts[path]] if is_found else [])


def test_a_role_that_is_here_and_current_is_not_asked_for_again(site: Site) -> None:
    build(site.repository, [Edge("targets", "A"), Edge("A", "B")])
    site.device.download("nowhere")
    site.asked()
    assert site.device.download("nowhere") == 1
    assert site.asked() == ["2.root.json", "timestamp.json"]


def test_a_changed_role_is_asked_for_and_an_unchanged_one_is_not(site: Site) -> None:
    build(site.repository, [Edge("targets", "A"), Edge("targets", "B")])
    site.device.download("nowhere")
    site.repository.publish("B", "snapshot", "timestamp")
    site.asked()
    assert site.device.download("nowhere") == 1
    assert site.asked() == ["2.root.json", "timestamp.json", "3.snapshot.json", "2.B.json"]


def test_the_role_that_comes_first_decides_when_two_name_a_target(site: Site) -> None:
    build(site.repository, [Edge("targets", "A"), Edge("targets", "B")])
    site.repository.add_target("file", b"second", "B")
    site.repository.add_target("file", b"first", "A")
    site.repository.publish_all()
    assert site.device.download("file") == 0
    assert site.device.artifacts == [b"first"]


@pytest.mark.parametrize("is_there", [True, False])
def test_paths_are_delegated_by_the_beginning_of_their_hash(site: Site, is_there: bool) -> None:
    path = "models/detector"
    digest = hashlib.sha256(path.encode()).hexdigest()
    site.repository.delegate(
        "targets", "bin", hash_prefixes=[digest[:2] if is_there else f"{~int(digest[0], 16) & 15:x}"]
    )
    site.repository.add_target(path, b"content", "bin")
    site.repository.publish_all()
    assert site.device.download(path) == (0 if is_there else 1)
    assert ("1.bin.json" in site.asked()) is is_there


@pytest.mark.parametrize("bit_length", [1, 4, 8])
def test_succinct_bins_are_asked_for_one_at_a_time(site: Site, bit_length: int) -> None:
    site.repository.delegate_bins(bit_length, "bin")
    path = "models/detector"
    number = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") >> (32 - bit_length)
    role = f"bin-{number:0{len(f'{2**bit_length - 1:x}')}x}"
    site.repository.add_target(path, b"content", role)
    site.repository.publish_all()
    assert site.device.download(path) == 0
    assert site.asked()[REFRESH] == f"1.{role}.json"


# ---- who vouches for whom --------------------------------------------------------------------------------------------


def test_a_role_is_verified_anew_for_each_delegator_even_when_it_is_here(site: Site) -> None:
    """A's key signs C; B delegates to C too, with a key of its own that did not sign. In one process, and in two."""
    repository = site.repository
    repository.delegate("targets", "A", ["a/*"])
    repository.delegate("targets", "B", ["b/*"])
    repository.delegate("A", "C", ["*/*"])
    repository.delegate("B", "C", ["*/*"])
    repository.signers["C"] = repository.signers["C"][:1]
    repository.add_target("a/file", b"vouched for by A", "C")
    repository.add_target("b/file", b"vouched for by nobody", "C")
    repository.publish_all()
    assert site.device.download("a/file", "b/file") == 1
    assert site.device.artifacts == [b"vouched for by A"]
    assert site.device.download("b/file") == 1
    assert site.device.artifacts == [b"vouched for by A"]
    assert site.device.download("a/file") == 0


def test_a_role_that_two_delegators_vouch_for_is_fetched_once(site: Site) -> None:
    repository = site.repository
    repository.delegate("targets", "A", ["a/*"])
    repository.delegate("targets", "B", ["b/*"])
    repository.delegate("A", "C", ["*/*"])
    repository.delegate("B", "C", ["*/*"])
    repository.add_target("a/file", b"one", "C")
    repository.add_target("b/file", b"two", "C")
    repository.publish_all()
    assert site.device.download("a/file", "b/file") == 0
    assert site.device.artifacts == [b"one", b"two"]
    assert [name for name in site.asked() if name.endswith(".C.json")] == ["1.C.json"]


def test_a_role_whose_key_was_revoked_is_not_believed_though_it_is_here_and_unchanged(site: Site) -> None:
    repository = site.repository
    repository.delegate("targets", "team", ["team/*"])
    repository.add_target("team/model", b"by a key that is stolen later", "team")
    repository.publish_all()
    assert site.device.download("team/model") == 0
    thief = repository.signers.pop("team")
    delegations = repository.targets().delegations
    assert delegations is not None
    assert delegations.roles is not None
    delegations.roles["team"].keyids.clear()
    repository.delegate("targets", "team", ["team/*"])
    repository.publish("targets", "snapshot", "timestamp")
    repository.signers["team"] = thief
    assert site.device.download("team/model") == 1


def test_a_role_may_not_speak_of_paths_that_were_not_delegated_to_it(site: Site) -> None:
    repository = site.repository
    repository.delegate("targets", "red", ["team/red/*"])
    repository.delegate("targets", "blue", ["team/blue/*"])
    repository.add_target("team/blue/model", b"by the wrong team", "red")
    repository.publish_all()
    assert site.device.download("team/blue/model") == 1
    assert site.device.artifacts == []
    assert "1.red.json" not in site.asked()


def test_a_role_that_the_snapshot_does_not_name_stops_the_search(site: Site) -> None:
    site.repository.delegate("targets", "team")
    site.repository.publish("targets", "snapshot", "timestamp")
    assert site.device.download("anything") == 1
    assert site.asked()[REFRESH:] == []


def test_a_role_below_its_threshold_is_refused_and_not_kept(site: Site) -> None:
    site.repository.delegate("targets", "team")
    delegations = site.repository.targets().delegations
    assert delegations is not None
    assert delegations.roles is not None
    delegations.roles["team"].threshold = 2
    site.repository.publish_all()
    assert site.device.download("anything") == 1
    assert "team" not in site.device.trusted


def test_an_older_version_of_a_role_than_the_snapshot_names_is_refused(site: Site) -> None:
    site.repository.delegate("targets", "team")
    site.repository.publish_all()
    site.device.download("anything")
    site.repository.publish_all()
    site.repository.published["team"][-1] = site.repository.published["team"][0]
    assert site.device.download("anything") == 1
    assert site.device.trusted["team"] == 1


def test_a_delegated_role_that_is_rolled_back_by_the_snapshot_is_refused(site: Site) -> None:
    site.repository.delegate("targets", "team")
    site.repository.publish_all()
    site.repository.publish_all()
    site.device.download("anything")
    site.repository.start_again("team")
    site.repository.publish("snapshot", "timestamp")
    assert site.device.download("anything") == 1
    assert site.device.trusted["team"] == 2


def test_an_expired_role_is_refused_and_not_kept(site: Site) -> None:
    site.repository.delegate("targets", "team", ["team/*"])
    site.repository.targets("team").expires = NOW - timedelta(days=1)
    site.repository.add_target("team/model", b"content", "team")
    site.repository.publish_all()
    assert site.device.refresh() == 0
    assert site.device.download("team/model") == 1
    assert site.device.artifacts == []
    assert "team" not in site.device.trusted


# ---- names ----------------------------------------------------------------------------------------------------------

UNUSUAL = [
    "?",
    "#",
    "/delegatedrole",
    "../delegatedrole",
    "..",
    ".",
    "%2F",
    "a b",
    "ä",
    "a/../../b",
    "x" * 80,
    "\n",
    "\0",
]


@pytest.mark.parametrize("role", UNUSUAL)
def test_an_unusual_role_name_is_quoted_in_requests_and_files_and_leaves_neither_folder(site: Site, role: str) -> None:
    site.repository.delegate("targets", role)
    site.repository.add_target("file", b"content", role)
    site.repository.publish_all()
    before = {path for path in site.device.metadata_dir.parent.rglob("*") if path.is_file()}
    assert site.device.download("file") == 0
    assert site.asked()[REFRESH] == f"1.{role_file(role)}"
    assert site.device.trusted[role] == 1
    new = {path for path in site.device.metadata_dir.parent.rglob("*") if path.is_file()} - before
    assert site.device.metadata_dir / role_file(role) in new
    assert {path.parent for path in new} == {site.device.metadata_dir, site.device.target_dir}


@pytest.mark.parametrize("role", ["root", "timestamp", "snapshot", "targets", ""])
def test_a_delegated_role_cannot_take_the_name_of_a_top_level_one(site: Site, role: str) -> None:
    site.device.refresh()
    site.repository.delegate("targets", "harmless")
    site.repository.publish_all()

    def rename(document: dict[str, object]) -> None:
        signed = document["signed"]
        assert isinstance(signed, dict)
        signed["delegations"]["roles"][0]["name"] = role

    _edit_and_sign(site.repository, rename)
    assert site.device.download("anything") == 1
    assert site.device.trusted == {"root": 1, "timestamp": 2, "snapshot": 2, "targets": 1}


def test_a_role_name_that_no_disk_can_hold_fails_and_harms_nothing(site: Site) -> None:
    site.repository.delegate("targets", "x" * 300)
    site.repository.publish_all()
    assert site.device.download("anything") == 1
    assert site.device.refresh() == 0


def test_no_more_than_32_delegations_are_followed_for_one_target(site: Site) -> None:
    build(site.repository, [Edge("targets", f"role-{number:03}") for number in range(40)])
    assert site.device.download("nowhere") == 1
    assert site.asked()[REFRESH:] == [f"1.role-{number:03}.json" for number in range(32)]


def test_ten_thousand_targets_in_bins_are_fetched_one_bin_at_a_time(site: Site) -> None:
    site.repository.delegate_bins(4, "bin")
    delegations = site.repository.targets().delegations
    assert delegations is not None
    for number in range(10_000):
        path = f"models/{number}"
        role, _ = next(iter(delegations.get_roles_for_target(path)))
        site.repository.add_target(path, b"%d" % number, role)
    site.repository.publish_all()
    assert site.device.download("models/4711") == 0
    assert site.device.artifacts == [b"4711"]
    assert len(site.asked()) == REFRESH + 2
    assert MetadataStore(site.device.metadata_dir).load("bin-0", 1) is None


def _edit_and_sign(repository: TufRepository, change: object) -> None:
    """Change what tuf's own classes would not let one write, and sign it as the targets role does."""
    import json

    from securesystemslib.formats import encode_canonical

    document = json.loads(repository.published["targets"][-1])
    assert callable(change)
    change(document)
    key = repository.signers["targets"][0]
    document["signatures"] = [key.sign(encode_canonical(document["signed"]).encode()).to_dict()]
    repository.published["targets"][-1] = json.dumps(document).encode()
