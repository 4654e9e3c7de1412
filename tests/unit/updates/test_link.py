"""The kind of link to the outside, read from folders as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.updates.link import link_in_use

ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
wwan0\t00000000\t0100000A\t0003\t0\t0\t700\t00000000\t0\t0\t0
eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
"""


def interface(sys: Path, name: str, *, type_number: str = "1", uevent: str = "", has: str = "") -> None:
    folder = sys / name
    folder.mkdir(parents=True)
    (folder / "type").write_text(f"{type_number}\n")
    (folder / "uevent").write_text(uevent)
    if has:
        (folder / has).mkdir()


def device(folder: Path, routes: str = "", routes_6: str = "") -> tuple[Path, Path]:
    """The places of /proc/net and /sys/class/net."""
    proc, sys = folder / "proc", folder / "sys"
    proc.mkdir()
    (proc / "route").write_text(routes)
    (proc / "ipv6_route").write_text(routes_6)
    return proc, sys


def test_link_is_the_default_route_of_the_lowest_metric(tmp_path: Path) -> None:
    proc, sys = device(tmp_path, ROUTES)
    interface(sys, "eth0")
    interface(sys, "wwan0", type_number="519")
    assert link_in_use(proc, sys) == ("eth0", "ethernet")


@pytest.mark.parametrize(
    ("name", "made", "kind"),
    [
        ("eth0", {}, "ethernet"),
        ("br0", {"uevent": "DEVTYPE=bridge"}, "ethernet"),
        ("wlan0", {"uevent": "DEVTYPE=wlan"}, "wifi"),
        ("wlp2s0", {"has": "wireless"}, "wifi"),
        ("mlan0", {"has": "phy80211"}, "wifi"),
        ("wwan0", {"type_number": "519"}, "mobile"),
        ("usb0", {"uevent": "INTERFACE=usb0\nDEVTYPE=wwan"}, "mobile"),
        ("ppp0", {"type_number": "512"}, "mobile"),
        ("wg0", {"type_number": "65534"}, "other"),
    ],
)
def test_link_kind_is_the_interfaces(tmp_path: Path, name: str, made: dict[str, str], kind: str) -> None:
    proc, sys = device(tmp_path, ROUTES.replace("eth0", name))
    interface(sys, name, **made)
    assert link_in_use(proc, sys) == (name, kind)


def test_link_of_ipv6_alone_is_found(tmp_path: Path) -> None:
    zero = "0" * 32
    lines = [
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo",
        f"{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003    wlan0",
    ]
    proc, sys = device(tmp_path, "Iface\n", "\n".join(lines))
    interface(sys, "wlan0", has="wireless")
    assert link_in_use(proc, sys) == ("wlan0", "wifi")


def test_link_is_other_where_there_is_no_route(tmp_path: Path) -> None:
    assert link_in_use(tmp_path / "none", tmp_path / "none") == ("", "other")
