"""Shows a device that really boots: the package installed, a model served, an update rolled back, a kill, a power cut.

    make demo-device        or, once set up, as root:  python -m demo.device_demo [--json]

The device is a Debian 12 with systemd in a container of systemd-nspawn: no Docker, no hardware. It needs root,
mmdebstrap and systemd-container, and says so where they are missing. All that it started and mounted is gone when it
ends.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from demo.asking import Asking
from demo.booted_device import UNIT, BootedDevice, why_no_device
from demo.daemon import DemoFailed, short_folder
from demo.device_package import build_package, why_no_package
from demo.device_root import device_root, is_made
from demo.digit_releases import GOOD, POOR, SLOW, write_golden, write_version
from demo.digits import load_held_out
from demo.program import keeps_its_promises, run
from demo.screen import Screen
from demo.update_stage import SETTINGS, Stage
from edge_runtime import Client

STICK = "/media/stick"
CONFIG = "/etc/edge-runtime/config.toml"
ROOT_FILE = "/etc/edge-runtime/1.root.json"
SEVEN = Path(__file__).with_name("seven.json")
MODEL = Path(__file__).parent / "models" / "digits" / "1" / "model.onnx"
OUTCOME_LIMIT_S = 90.0
LOOK_S = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line. Returns the exit status: 0 on success, or when nothing can be shown here."""
    parser = argparse.ArgumentParser(prog="python -m demo.device_demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="the last line is a summary as JSON")
    wants_json = parser.parse_args(arguments).json
    screen = Screen()
    reason = why_no_package() or why_no_device()
    if reason is not None:
        screen.line(f"Nothing is shown: {reason}")
        return 0
    summary: dict[str, Any] = {}

    def show() -> bool:
        with short_folder() as folder:
            summary.update(_demonstrate(Stage(screen, folder)))
        return keeps_its_promises(screen, what_is_wrong(summary))

    status = run(screen, show, "The service: deploy/systemd.")
    if wants_json and summary:
        print(json.dumps(summary))
    return status


def what_is_wrong(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each promise that a summary shows broken."""
    promises = {
        "the first answer is not the digit that was asked for": summary["first_answer"] == 7,
        "the slow release was not rolled back": "a run takes" in summary["refused"],
        "a request was lost while releases came and went": summary["lost"] == 0,
        "the wrong version serves in the end": summary["serves"] == GOOD,
        "systemd did not start the killed daemon again": summary["restarts"] == 1,
    }
    return [sentence for sentence, holds in promises.items() if not holds]


# ---- the scenes -----------------------------------------------------------------------------------------------------


def _demonstrate(stage: Stage) -> dict[str, Any]:
    screen = stage.screen
    with screen.step(f"A Debian 12 for the device{'' if is_made() else ': made once, in about a minute'}"):
        root = device_root()
    stick = stage.folder / "stick"
    with screen.step("The package, for Debian 12 on amd64"):
        package = build_package(stick)
        screen.line(f"  {package.name}")
    shutil.copy(MODEL, stick / "model.onnx")
    shutil.copy(SEVEN, stick / "seven.json")
    with BootedDevice(stage.folder / "device", [root], {STICK: stick}) as device:
        with screen.step("The device is switched on"):
            screen.line(f"  systemd has started everything after {device.boot():.2f} s")
        first_answer = _install_and_ask(screen, device, package)
        refused, lost = _update(stage, device)
        restarts = _kill(screen, device)
        serves = _cut_power(screen, device)
        with screen.step("The device is switched off in order"):
            device.shut_down()
    return {"first_answer": first_answer, "refused": refused, "lost": lost, "restarts": restarts, "serves": serves}


def _install_and_ask(screen: Screen, device: BootedDevice, package: Path) -> int:
    with screen.step("The package is installed, with no network"):
        _shown(screen, device, f"apt-get install -qq -y {STICK}/{package.name}")
        took_s = (_stamp_us(device, "ActiveEnter") - _stamp_us(device, "ExecMainStart")) / 1e6
        screen.line(f"  the service was ready {screen.paint(f'{took_s:.2f} s', 'bold', 'green')} after its start")
        screen.line(_indented(device.run("systemctl", "status", "--no-pager", "--lines=0", UNIT).output))
    with screen.step("A model is put into its folder, and a member of the group edge-runtime asks it"):
        _shown(screen, device, f"install -D -m 644 {STICK}/model.onnx /var/lib/edge-runtime/models/digits/1/model.onnx")
        _shown(screen, device, "useradd --groups edge-runtime technician")
        with Client(device.endpoint) as client:
            client.wait_ready(OUTCOME_LIMIT_S, "digits")
        ask = f"edge-runtime infer digits --input {STICK}/seven.json"
        screen.line(_indented(_shown(screen, device, ask, user="technician")))
        answer = json.loads(device.run(*ask.split(), "--json", user="technician").output)
    return int(answer["outputs"][1]["data"][0])


def _update(stage: Stage, device: BootedDevice) -> tuple[str, int]:
    """Versions 1 and 2 are installed, version 4 is rolled back. Returns the reason and the lost requests."""
    screen = stage.screen
    with screen.step("A publisher on this machine: keys, a team, a group of devices, version 1"):
        stage.edge_runtime("repo", "init", stage.repository.name, "--yes")
        stage.edge_runtime("repo", "add-team", "vision", "--yes")
        stage.edge_runtime("repo", "add-group", "line-1", "--yes")
        write_golden(stage.golden)
        _publish(stage, POOR)
    with stage.server() as url:
        with screen.step("The device learns where the repository is, and whose signatures count"):
            device.path(ROOT_FILE).write_bytes((stage.repository / "metadata" / "1.root.json").read_bytes())
            with device.path(CONFIG).open("a") as config:
                config.write("\n" + SETTINGS.format(url=url, root=ROOT_FILE))
            _shown(screen, device, f"systemctl restart {UNIT}")
        with Client(device.endpoint) as client:
            _wait_for(client, lambda status: _version(status) == POOR)
            with Asking(client, load_held_out().images) as asking:
                with screen.step("Version 2 is published, while a client asks without a pause"):
                    _publish(stage, GOOD)
                    _wait_for(client, lambda status: _version(status) == GOOD and status["under_way"] is None)
                    screen.line(f"  {screen.paint('version 2 serves', 'green')}")
                with screen.step("Version 4: its answers are right, but it is far slower"):
                    _publish(stage, SLOW)
                    status = _wait_for(client, lambda status: bool(status["refused"]) and status["under_way"] is None)
                    reason = str(status["refused"][0]["reason"])
                    screen.line(f"  {screen.paint('rolled back', 'yellow')}: {reason}")
                    screen.line(f"  {screen.paint(f'version {_version(status)} serves', 'green')}")
            screen.line(f"  {asking.tally.asked:,} requests, {asking.tally.unanswered} lost")
    return reason, asking.tally.unanswered


def _kill(screen: Screen, device: BootedDevice) -> int:
    with screen.step("The daemon is killed"):
        _shown(screen, device, f"systemctl kill --kill-whom=main --signal=KILL {UNIT}")
        took_s = _wait_serving(device)
        screen.line(f"  it answers again after {screen.paint(f'{took_s:.2f} s', 'bold', 'green')}")
        return int(device.unit("NRestarts"))


def _cut_power(screen: Screen, device: BootedDevice) -> int:
    """The version that serves afterwards."""
    with screen.step("The power is cut, and comes back"):
        device.cut_power()
        booted_s = device.boot()
        took_s = booted_s + _wait_serving(device)
        screen.line(f"  it answers {screen.paint(f'{took_s:.2f} s', 'bold', 'green')} after it was switched on")
        with Client(device.endpoint) as client:
            return _version(client.update_status())


# ---- parts of scenes ------------------------------------------------------------------------------------------------


def _publish(stage: Stage, version: int) -> None:
    write_version(stage.models, version)
    model = str((stage.models / str(version)).relative_to(stage.folder))
    stage.edge_runtime("repo", "publish", model, "--team", "vision", "--golden", stage.golden.name, "--yes")
    stage.edge_runtime("repo", "assign", "line-1", f"digits={version}", "--yes")


def _shown(screen: Screen, device: BootedDevice, command: str, user: str | None = None) -> str:
    """Show a command as typed on the device, run it, and return its output."""
    screen.line(screen.paint(f"  {user or 'root'}@device {'$' if user else '#'} {command}", "bold"))
    return device.run(*command.split(), user=user).output


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def _stamp_us(device: BootedDevice, name: str) -> int:
    return int(device.unit(f"{name}TimestampMonotonic"))


def _version(status: Mapping[str, Any]) -> int:
    return int(status.get("models", {}).get("digits", {}).get("version", 0))


def _wait_serving(device: BootedDevice) -> float:
    """Wait until the digit model answers. Returns the time, in seconds."""
    began = time.monotonic()
    with Client(device.endpoint) as client:
        client.wait_ready(OUTCOME_LIMIT_S, "digits")
        client.infer("digits", {"image": np.zeros((1, 64), np.float32)})
    return time.monotonic() - began


def _wait_for(client: Client, holds: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """The first status that `holds`. Raises DemoFailed after a limit."""
    end_s = time.monotonic() + OUTCOME_LIMIT_S
    while time.monotonic() < end_s:
        status = client.update_status()
        if "models" in status and holds(status):
            return status
        time.sleep(LOOK_S)
    raise DemoFailed(f"after {OUTCOME_LIMIT_S:.0f} s the device still says {json.dumps(status)}")


if __name__ == "__main__":
    sys.exit(main())
