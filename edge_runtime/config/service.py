"""The service that the package installs: whether it is here, and whom to ask when it does not answer.

Owns: where systemd looks for the unit, and the advice. A stopped service leaves nothing below /run (RuntimeDirectory is
removed with it, systemd.exec(5)), so the unit or the configuration is what tells it from "nothing installed". Pure but
for `is_installed`, which only looks.
"""

from __future__ import annotations

from pathlib import Path

UNIT = "edge-runtime.service"
UNIT_FOLDERS = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
"""Of the folders in systemd.unit(5), those that packages and administrators use."""

CONFIGURATION = Path("/etc/edge-runtime/config.toml")
"""What a daemon reads when no other file is named (DESIGN 7); a package puts one there."""

BY_HAND = "start one with `edge-runtime serve --models DIR`, or name its endpoint (--connect, EDGE_RUNTIME_ENDPOINT)"
BY_SERVICE = (
    "it is the service edge-runtime's: `systemctl status edge-runtime` and `journalctl -u edge-runtime` say whether it "
    "runs and why not, `sudo systemctl start edge-runtime` starts it; another daemon is named by its endpoint "
    "(--connect, EDGE_RUNTIME_ENDPOINT)"
)


def is_installed() -> bool:
    """Whether the service's unit or its configuration is on this machine. What may not be looked at is not there."""
    return any(_exists(path) for path in (*(folder / UNIT for folder in UNIT_FOLDERS), CONFIGURATION))


def advice(endpoint: str, service_folder: Path, *, is_service_installed: bool) -> str:
    """What to do where nobody answers at an endpoint. service_folder: where the service has its sockets."""
    path = endpoint.removeprefix("ipc://")
    is_the_services = path != endpoint and Path(path).parent == service_folder
    return BY_SERVICE if is_the_services and is_service_installed else BY_HAND


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
