"""The kind of link by which this device reaches others: so that nothing large is fetched over one that is paid by byte.

Reads /proc and /sys. Owns: what a kind is. A tunnel is `other`: what carries it cannot be seen from here.
"""

from __future__ import annotations

from pathlib import Path

ETHERNET, WIFI, MOBILE, OTHER = "ethernet", "wifi", "mobile", "other"

_PPP, _RAW_IP, _ETHER = "512", "519", "1"
"""ARPHRD_* of linux/if_arp.h. A modem is one of the first two, where its driver does not show it as Ethernet."""


def link_in_use(proc: Path = Path("/proc/net"), sys: Path = Path("/sys/class/net")) -> tuple[str, str]:
    """Return the interface of the default route, and its kind; ("", "other") where there is no default route."""
    interface = _default_of_ipv4(proc / "route") or _default_of_ipv6(proc / "ipv6_route")
    return interface, kind_of(sys / interface) if interface else OTHER


def kind_of(interface: Path) -> str:
    """Return the kind of an interface. interface: its folder below /sys/class/net."""
    type_number, description = _text(interface / "type"), _text(interface / "uevent")
    if "DEVTYPE=wwan" in description or type_number in (_PPP, _RAW_IP) or interface.name.startswith("wwan"):
        return MOBILE
    if "DEVTYPE=wlan" in description or (interface / "wireless").exists() or (interface / "phy80211").exists():
        return WIFI
    return ETHERNET if type_number == _ETHER else OTHER


def _default_of_ipv4(file: Path) -> str:
    """Return the interface of the default route with the lowest metric. Columns as of proc_net_route(5)."""
    rows = [line.split() for line in _text(file).splitlines()[1:]]
    found = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(found, default=(0, ""))[1]


def _default_of_ipv6(file: Path) -> str:
    rows = [line.split() for line in _text(file).splitlines()]
    found = [
        (int(row[5], 16), row[9]) for row in rows if len(row) > 9 and row[0] == "0" * 32 and row[1] == "00"
    ]  # the kernel's own entry for "unreachable" is on lo
    return min(((metric, name) for metric, name in found if name != "lo"), default=(0, ""))[1]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
