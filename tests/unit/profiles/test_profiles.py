"""Profiles: recorded devices get theirs, the rules of choosing, limits on one host, and files that are wrong."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.daemon.assemble import effective_profile
from edge_runtime.errors import ConfigError
from edge_runtime.profiles.detect import detect
from edge_runtime.profiles.facts import Facts, facts_as_json
from edge_runtime.profiles.match import match_profile
from edge_runtime.profiles.profile import (
    BackendChoice,
    Limits,
    MatchRules,
    Profile,
    load_profile,
    load_profiles,
    profiles_folder,
    resolve_limits,
)
from edge_runtime.typed_toml import bare_type, is_struct, parse_toml

RECORDED = Path(__file__).parent / "recorded_facts"
DEVICES = sorted(path.stem for path in RECORDED.glob("*.toml"))
SHIPPED = load_profiles()


def recorded(device: str) -> dict[str, Any]:
    path = RECORDED / f"{device}.toml"
    return parse_toml(path.read_text(encoding="utf-8"), str(path))


def lay_out(files: dict[str, str], root: Path) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def facts_of(device: str, root: Path) -> Facts:
    said = recorded(device)
    return detect(lay_out(said["files"], root), architecture=said["architecture"])


# ---- recorded devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_device_gets_its_profile(device: str, tmp_path: Path) -> None:
    match = match_profile(facts_of(device, tmp_path), SHIPPED)
    assert match.profile.name == recorded(device)["profile"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_device_is_read_as_it_is(device: str, tmp_path: Path) -> None:
    facts = facts_of(device, tmp_path)
    wanted = recorded(device)["facts"]
    hottest = wanted.pop("hottest_celsius", None)
    assert {name: getattr(facts, name) for name in wanted} == wanted
    assert max((each.celsius for each in facts.temperatures), default=None) == hottest


@pytest.mark.parametrize("device", DEVICES)
def test_every_profile_not_chosen_says_why(device: str, tmp_path: Path) -> None:
    match = match_profile(facts_of(device, tmp_path), SHIPPED)
    assert set(match.rejected) == {profile.name for profile in SHIPPED} - {match.profile.name}
    assert all(reasons and all(reasons) for reasons in match.rejected.values())


@pytest.mark.parametrize("device", DEVICES)
def test_facts_survive_being_recorded_as_json(device: str, tmp_path: Path) -> None:
    facts = facts_of(device, tmp_path)
    assert msgspec.json.decode(json.dumps(facts_as_json(facts)), type=Facts) == facts


def test_every_shipped_profile_has_a_recorded_device() -> None:
    assert {recorded(device)["profile"] for device in DEVICES} == {profile.name for profile in SHIPPED}


def test_this_host_gets_a_profile() -> None:
    facts = detect()
    effective = match_profile(facts, SHIPPED).profile.effective(facts)
    assert 1 <= effective.limits.cores <= facts.cores_online
    assert effective.backends


# ---- detection ------------------------------------------------------------------------------------------------------


def test_a_host_that_reports_nothing_still_has_facts(tmp_path: Path) -> None:
    facts = detect(tmp_path, architecture="riscv64")
    assert facts == Facts(architecture="riscv64")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        # The outer group grants less than the inner one.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "600000 100000\n",
            },
            3,
        ),
        # A container whose path is the host's, with only its own folder mounted.
        ({"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        # Both hierarchies: v1 holds the controllers, v2 is mounted beside them.
        (
            {
                "proc/self/cgroup": "1:cpu:/\n0::/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "a b c\n"}, 8),
        ({"proc/self/cgroup": "0::/../../etc\n"}, 8),
    ],
)
def test_cores_honour_cgroup_quotas(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    lay_out({"sys/devices/system/cpu/online": "0-7\n", **files}, tmp_path)
    assert detect(tmp_path, "x86_64").cores == cores


def test_cores_honour_affinity(tmp_path: Path) -> None:
    lay_out({"sys/devices/system/cpu/online": "0-7\n"}, tmp_path)
    facts = detect(tmp_path, "x86_64", usable_cpus=3)
    assert (facts.cores, facts.cores_online) == (3, 8)


FILES = (
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/self/cgroup",
    "sys/fs/cgroup/cpu.max",
    "sys/fs/cgroup/memory.max",
    "sys/devices/system/cpu/online",
    "proc/device-tree/compatible",
    "etc/nv_tegra_release",
    "proc/driver/nvidia/version",
    "sys/class/thermal/thermal_zone0/temp",
)
ODD = (
    b"0::/\n",
    b"0::/a\0b\n",
    b"MemTotal: \n",
    b"MemTotal: -5 kB\n",
    b"1 0\n",
    b"3-1,\n",
    b"0-99999999999999999999\n",
    b"NVRM version:\n",
    b"9" * 5_000,
)


@given(st.dictionaries(st.sampled_from(FILES), st.one_of(st.binary(max_size=60), st.sampled_from(ODD))))
def test_odd_files_leave_facts_unknown_and_never_fail(tmp_path_factory: Any, files: dict[str, bytes]) -> None:
    root: Path = tmp_path_factory.mktemp("root")
    for name, raw in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(raw)
    facts = detect(root, "aarch64")
    assert 1 <= facts.cores <= facts.cores_online <= 1 << 16
    assert facts.memory_bytes is None or facts.memory_bytes > 0


# ---- choosing -------------------------------------------------------------------------------------------------------


def profile(name: str, **rules: Any) -> Profile:
    return Profile(
        name=name, description=name, match=MatchRules(**rules), backends=(BackendChoice(name="onnxruntime"),)
    )


BOARD = Facts(
    architecture="aarch64",
    device_tree_model="Acme Board 2",
    device_tree_compatible=("acme,board-2", "acme,soc"),
    cpu_flags=("asimd", "asimddp"),
    memory_bytes=4 << 30,
)


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        ({"device_tree_models": ("Acme",)}, {"device_tree_compatible": ("acme,soc",), "cpu_flags": ("asimd",)}),
        ({"device_tree_compatible": ("acme,soc",)}, {"cpu_flags": ("asimd", "asimddp")}),
        ({"cpu_flags": ("asimd",)}, {"min_memory_bytes": 1, "architectures": ("aarch64",)}),
        ({"min_memory_bytes": 1}, {"architectures": ("aarch64",)}),
        ({"cpu_flags": ("asimd", "asimddp")}, {"cpu_flags": ("asimd",)}),
        ({"architectures": ("aarch64",)}, {}),
        ({"architectures": ("aarch64",)}, {"jetson": False, "nvidia_gpu": False}),
    ],
)
def test_the_more_specific_profile_wins(winner: dict[str, Any], loser: dict[str, Any]) -> None:
    # The names are chosen so that the alphabet would decide otherwise.
    match = match_profile(BOARD, [profile("a-loser", **loser), profile("b-winner", **winner)])
    assert match.profile.name == "b-winner"
    assert "b-winner is more specific" in match.rejected["a-loser"][0]


def test_between_equals_the_name_decides_whatever_the_order() -> None:
    a, b = profile("a", cpu_flags=("asimd",)), profile("b", cpu_flags=("asimddp",))
    assert match_profile(BOARD, [a, b]).profile == match_profile(BOARD, [b, a]).profile == a


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"architectures": ("x86_64",)}, "architecture is aarch64, wanted x86_64"),
        ({"device_tree_models": ("Jetson",)}, "board is Acme Board 2, wanted Jetson"),
        ({"device_tree_compatible": ("x,y",)}, "board is compatible with acme,board-2 acme,soc, wanted x,y"),
        ({"cpu_flags": ("asimd", "sve2")}, "the CPU lacks sve2"),
        ({"jetson": True}, "is not a Jetson"),
        ({"nvidia_gpu": True}, "no NVIDIA GPU with its driver"),
        ({"min_memory_bytes": 8 << 30}, "usable memory is 4.0 GiB, wanted at least 8.0 GiB"),
        ({"max_memory_bytes": 2 << 30}, "usable memory is 4.0 GiB, wanted at most 2.0 GiB"),
    ],
)
def test_a_rule_that_does_not_hold_is_said(rules: dict[str, Any], said: str) -> None:
    match = match_profile(BOARD, [profile("no", **rules), profile("yes")])
    assert match.rejected["no"] == (said,)


def test_a_profile_asked_for_is_taken_even_if_it_does_not_fit() -> None:
    match = match_profile(BOARD, [profile("no", architectures=("x86_64",)), profile("yes")], "no")
    assert match.profile.name == "no"
    assert "architecture is aarch64" in match.reason
    assert match.rejected == {"yes": ("no was asked for",)}


def test_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'jetson-oron', wanted one of a, b"):
        match_profile(BOARD, [profile("a"), profile("b")], "jetson-oron")


def test_a_host_that_nothing_fits_is_an_error_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match=r"--profile.*architecture is aarch64"):
        match_profile(BOARD, [profile("no", architectures=("x86_64",))])


# ---- limits ---------------------------------------------------------------------------------------------------------

COUNTS = st.one_of(st.none(), st.integers(1, 1 << 20))


@given(COUNTS, COUNTS, st.integers(1, 64), COUNTS)
def test_cores_are_never_more_than_usable_nor_less_than_one(
    said: int | None, overlaid: int | None, usable: int, threads: int | None
) -> None:
    facts = Facts(architecture="x86_64", cores_online=64, cores=usable)
    made = Profile(
        name="x", description="", match=MatchRules(), backends=(BackendChoice(name="onnxruntime", threads=threads),),
        limits=Limits(cores=said),
    )  # fmt: skip
    effective = made.effective(facts, LimitSettings(cores=overlaid))
    assert 1 <= effective.limits.cores <= usable
    assert (effective.backends[0].threads or 1) <= effective.limits.cores


@pytest.mark.parametrize(
    ("limits", "overlay", "memory_bytes"),
    [
        (Limits(memory_fraction=0.5), None, 4 << 30),
        (Limits(memory_fraction=0.5, memory_bytes=1 << 30), None, 1 << 30),
        (Limits(memory_fraction=0.25, memory_bytes=6 << 30), None, 2 << 30),
        # The configuration may take more than the profile's share, and never more than there is.
        (Limits(memory_fraction=0.5), LimitSettings(memory_bytes=6 << 30), 6 << 30),
        (Limits(memory_fraction=0.5), LimitSettings(memory_bytes=9 << 30), 8 << 30),
    ],
)
def test_memory_is_the_lower_of_bytes_and_share(
    limits: Limits, overlay: LimitSettings | None, memory_bytes: int
) -> None:
    facts = Facts(architecture="x86_64", memory_bytes=8 << 30)
    assert resolve_limits(limits, facts, overlay).memory_bytes == memory_bytes


def test_without_known_memory_only_said_bytes_bound_it() -> None:
    facts = Facts(architecture="x86_64")
    assert resolve_limits(Limits(), facts).memory_bytes is None
    assert resolve_limits(Limits(memory_bytes=5), facts).memory_bytes == 5


def test_the_configuration_lies_over_the_profile() -> None:
    facts = Facts(architecture="x86_64", cores=8)
    resolved = resolve_limits(Limits(), facts, LimitSettings(queue_rows=7, queue_bytes=8, max_run_ms=9.0))
    assert (resolved.queue_rows, resolved.queue_bytes, resolved.max_run_ms) == (7, 8, 9.0)
    untouched = resolve_limits(Limits(), facts, LimitSettings())
    assert untouched == resolve_limits(Limits(), facts)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda each: each.name)
def test_a_shipped_profile_never_lowers_precision_and_never_spins(shipped: Profile) -> None:
    assert all(choice.precision == "" and not choice.spin for choice in shipped.backends)
    assert shipped.limits.max_run_ms == 50.0


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda each: each.name)
def test_a_shipped_profile_ends_on_the_cpu(shipped: Profile) -> None:
    order = [(choice.name, choice.device) for choice in shipped.backends]
    if shipped.name.startswith("jetson"):
        assert order[:3] == [("tensorrt", "GPU"), ("onnxruntime", "CUDA"), ("onnxruntime", "CPU")]
    assert order[-1] == ("pytorch", "CPU")
    assert ("litert", "CPU") in order
    assert ("onnxruntime", "CPU") in order


def test_every_number_of_a_shipped_profile_has_its_reason_above() -> None:
    for path in sorted(profiles_folder().glob("*.toml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        section_has_reason = False
        for line in lines:
            if line.startswith("["):
                section_has_reason = False
            elif line.startswith("#"):
                section_has_reason = True
            elif " = " in line and line.partition(" = ")[2][0].isdigit():
                assert section_has_reason, f"{path.name}: {line}"


def test_the_readme_names_every_key() -> None:
    readme = (profiles_folder() / "README.md").read_text(encoding="utf-8")

    def keys(kind: Any) -> set[str]:
        found = set()
        for each in msgspec.structs.fields(kind):
            inner = bare_type(each.type)
            inner = next(iter(typing.get_args(inner)), inner)
            found |= {each.name} | (keys(inner) if is_struct(inner) else set())
        return found

    wanted = keys(Profile)
    assert {"throttle_celsius", "memory_fraction", "spin"} <= wanted
    assert [key for key in sorted(wanted) if f"`{key}`" not in readme and f"[{key}]" not in readme] == []


GOOD = """
name = "x"
description = "text"
[match]
[[backends]]
name = "onnxruntime"
"""


def test_a_minimal_profile_loads(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD)
    assert load_profiles(tmp_path)[0].limits == Limits()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace('"x"', '"y"'), "name: got 'y', wanted 'x'"),
        (GOOD + 'devise = "CPU"', r"backends\[0\].devise: unknown key 'devise'; did you mean 'device'\?"),
        (GOOD + 'precision = "int4"', r"backends\[0\].precision: got 'int4', wanted one of"),
        (GOOD + "[limits]\nmemory_fraction = 2", "limits.memory_fraction: got 2, wanted a number, above 0, 1 or less"),
        (GOOD + "[thermal]\nwarn_celsius = 90\nthrottle_celsius = 80", "thermal: warn_celsius = 90 is above"),
        (GOOD.replace("[[backends]]\n", "[extra]\n"), "backends: is missing"),
        ("name = ", "x.toml:1"),
        ('name = "\x00"', "x.toml:1"),
    ],
)
def test_a_wrong_profile_is_an_error_naming_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_profile(tmp_path / "x.toml")
    assert str(tmp_path / "x.toml") in caught.value.message


def test_a_folder_without_profiles_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no device profiles"):
        load_profiles(tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"name": "openvino", "delegate": "/opt/libnpu.so"},
            "delegate is an option of the backend onnxruntime or litert",
        ),
        ({"name": "litert", "delegate_options": {"device": "0"}}, "without a delegate"),
    ],
)
def test_a_delegate_needs_a_backend_that_takes_one_and_its_options_need_a_delegate(
    row: dict[str, Any], words: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(row, BackendChoice)
    config = msgspec.convert({"backends": [row]}, Config)
    with pytest.raises(ConfigError, match=f"backends: .*{words}"):
        effective_profile(config, BOARD)
