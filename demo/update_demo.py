"""Shows signed model updates from end to end: a good release that is taken, and two bad ones that are rolled back.

    make demo-update        or, once set up:  python -m demo.update_demo [--json]

Everything is real: the publisher's commands, a plain web server, the daemon, and a client that asks without a pause.
Each step is bounded in time, and all processes are stopped however this program ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from demo.asking import Asking, Tally
from demo.daemon import Daemon, DemoFailed, short_folder
from demo.digit_releases import BROKEN, GOOD, POOR, SLOW, broken, write_golden, write_version
from demo.digits import Digits, load_held_out
from demo.program import keeps_its_promises, run
from demo.screen import Screen
from demo.stolen_key import publish_untried
from demo.update_stage import PASSPHRASE, Stage
from edge_runtime import Client

ANSWER_LIMIT_S = 60.0
OUTCOME_LIMIT_S = 90.0


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line. Returns the exit status: 0 on success."""
    parser = argparse.ArgumentParser(prog="python -m demo.update_demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="the last line is a summary as JSON")
    wants_json = parser.parse_args(arguments).json
    screen = Screen()
    summary: dict[str, Any] = {}

    def show() -> bool:
        with short_folder() as folder:
            summary.update(_demonstrate(Stage(screen, folder), load_held_out()))
        return keeps_its_promises(screen, what_is_wrong(summary))

    status = run(screen, show, "deploy/runbook.md says what to do when something breaks.")
    if wants_json and summary:
        print(json.dumps(summary))
    return status


def what_is_wrong(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each promise that a summary shows broken."""
    accuracy, refused, answered = summary["accuracy"], summary["refused"], summary["answered_by"]
    promises = {
        "a request was lost": not summary["lost"],
        "version 2 is not better than version 1": accuracy[str(POOR)] < accuracy[str(GOOD)],
        "version 2 does not serve": summary["serves"] == GOOD,
        "versions 3 and 4 were not both refused": set(refused) == {str(BROKEN), str(SLOW)},
        "version 3 was not refused for its golden output": "golden" in refused.get(str(BROKEN), ""),
        "version 4 was not refused for its time": "a run takes" in refused.get(str(SLOW), ""),
        "version 3 answered a request": str(BROKEN) not in answered,
        "versions 1 and 2 did not both answer": {str(POOR), str(GOOD)} <= set(answered),
        "the daemon did not end in order": summary["ended_in_order"],
    }
    return [sentence for sentence, holds in promises.items() if not holds]


# ---- the scenes -----------------------------------------------------------------------------------------------------


def _demonstrate(stage: Stage, digits: Digits) -> dict[str, Any]:
    _found(stage)
    with stage.screen.step("Version 1: training was stopped after 3 of 120 passes"):
        _publish(stage, POOR)
    with stage.server() as url, stage.device(url) as daemon, Client(daemon.endpoint) as client:
        accuracy = {str(POOR): _show_first(stage, client, digits)}
        with Asking(client, digits.images) as asking:
            accuracy[str(GOOD)] = _show_better(stage, client, digits, asking.tally)
            _show_broken(stage, client, asking.tally)
            _show_slow(stage, client, asking.tally)
        status = client.update_status()
        _show_end(stage, daemon, asking.tally)
        with stage.screen.step("The daemon stops"):
            ended_in_order = daemon.stop(stage.screen)
    return {
        "accuracy": accuracy,
        "asked": asking.tally.asked,
        "answered_by": {str(version): count for version, count in sorted(asking.tally.answered.items())},
        "lost": asking.tally.unanswered,
        "refused": {str(each["release"]): each["reason"] for each in status["refused"]},
        "serves": status["models"]["digits"]["version"],
        "ended_in_order": ended_in_order,
    }


def _found(stage: Stage) -> None:
    with stage.screen.step("A repository: its keys, a team that may publish, a group of devices"):
        stage.edge_runtime("repo", "init", stage.repository.name, "--yes")
        stage.edge_runtime("repo", "add-team", "vision", "--yes")
        stage.edge_runtime("repo", "add-group", "line-1", "--yes")
        stage.screen.line("  Each role has keys of its own. Devices believe signatures, not servers.")
    write_golden(stage.golden)


def _show_first(stage: Stage, client: Client, digits: Digits) -> float:
    with stage.screen.step("The device finds version 1, tries it in a child process, and serves it"):
        _wait_for(stage, client, lambda status: status["models"].get("digits", {}).get("version") == POOR)
        return _accuracy(stage, client, digits, POOR)


def _show_better(stage: Stage, client: Client, digits: Digits, tally: Tally) -> float:
    with stage.screen.step("Version 2: trained to the end. From here on a client asks without a pause"):
        _publish(stage, GOOD)
        _wait_for(stage, client, lambda status: status["models"]["digits"]["version"] == GOOD)
        accuracy = _accuracy(stage, client, digits, GOOD)
        _show_tally(stage.screen, tally)
        return accuracy


def _show_broken(stage: Stage, client: Client, tally: Tally) -> None:
    with stage.screen.step("Version 3: labels counted from 1 by mistake, so it says 4 for a 3"):
        stage.screen.line(
            "  `repo publish` runs a model before it signs what it answers, so it would not do this. A thief"
        )
        stage.screen.line("  with the team's key does: he signs version 3 with the golden output of version 2.")
        publish_untried(stage.repository, PASSPHRASE, broken(), BROKEN)
        stage.edge_runtime("repo", "assign", "line-1", f"digits={BROKEN}", "--yes")
        _show_refusal(stage, client, BROKEN)
        _show_tally(stage.screen, tally)


def _show_slow(stage: Stage, client: Client, tally: Tally) -> None:
    with stage.screen.step("Version 4: answers what version 2 does, to the last digit, and is far slower"):
        stage.screen.line("  Its golden output is right. That it is slow shows only once it answers real requests.")
        _publish(stage, SLOW)
        _show_refusal(stage, client, SLOW)
        _show_tally(stage.screen, tally)


def _show_end(stage: Stage, daemon: Daemon, tally: Tally) -> None:
    with stage.screen.step("What the device says of all this"):
        stage.screen.line(stage.edge_runtime("update", "status", "--connect", daemon.endpoint))
        lost = tally.unanswered
        text = stage.screen.paint(f"{lost} lost", "bold", "red" if lost else "green")
        stage.screen.line(f"  {tally.asked:,} requests; one release taken, one refused, one taken back: {text}")
        for failure in tally.failures[:3]:
            stage.screen.line(f"    {failure}")


# ---- parts of scenes ------------------------------------------------------------------------------------------------


def _publish(stage: Stage, version: int) -> None:
    """Publish for every device of the group, by the publisher's commands, which try the release first."""
    write_version(stage.models, version)
    model = str((stage.models / str(version)).relative_to(stage.folder))
    stage.edge_runtime("repo", "publish", model, "--team", "vision", "--golden", stage.golden.name, "--yes")
    stage.edge_runtime("repo", "assign", "line-1", f"digits={version}", "--yes")


def _show_refusal(stage: Stage, client: Client, version: int) -> None:
    """Each release here has the number of its version."""

    def reason(status: Mapping[str, Any]) -> str:
        return next((str(each["reason"]) for each in status["refused"] if each["release"] == version), "")

    status = _wait_for(stage, client, lambda status: bool(reason(status)) and status["under_way"] is None)
    stage.screen.line(f"  {stage.screen.paint('refused', 'yellow')}: {reason(status)}")
    serves = f"version {status['models']['digits']['version']} serves"
    stage.screen.line(f"  {stage.screen.paint(serves, 'green')}; this device never tries version {version} again")


def _accuracy(stage: Stage, client: Client, digits: Digits, version: int) -> float:
    """The device's accuracy on held-out images, with the version that must answer."""
    images = digits.images.astype(np.float32)
    answers = [client.submit("digits", {"image": image[None]}) for image in images]
    found = [answer.result(ANSWER_LIMIT_S) for answer in answers]
    if {each.version for each in found} != {version}:
        raise DemoFailed(f"the device answers with versions {sorted({each.version for each in found})}, not {version}")
    share = float(np.mean([int(each["digit"][0]) for each in found] == digits.labels))
    percent = stage.screen.paint(f"{share:.1%}", "bold", "green")
    stage.screen.line(f"  version {version} answers; right on {len(images)} images that it has not seen: {percent}")
    return share


def _show_tally(screen: Screen, tally: Tally) -> None:
    answered = dict(tally.answered)
    by_version = ", ".join(f"{answered[version]:,} by version {version}" for version in sorted(answered))
    screen.line(f"  requests so far: {tally.asked:,} asked, {by_version}, {len(tally.failures)} lost")


def _wait_for(stage: Stage, client: Client, holds: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """The first status that `holds`. Raises DemoFailed after a limit."""
    end_s = time.monotonic() + OUTCOME_LIMIT_S
    while time.monotonic() < end_s:
        status = client.update_status()
        if "models" in status and holds(status):
            stage.screen.end_progress()
            return status
        step = status.get("under_way") or {}
        stage.screen.progress(f"the device: {step.get('state', status['state'])} {step.get('detail', '')}"[:110])
        time.sleep(0.1)
    raise DemoFailed(f"after {OUTCOME_LIMIT_S:.0f} s the device still says {json.dumps(status)}")


if __name__ == "__main__":
    sys.exit(main())
