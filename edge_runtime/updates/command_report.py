"""The updater's report for a person: its state, the result of a check, the history.

Pure but for the screen. A field that the daemon does not send, being older or still starting, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.cli.screen import Screen, duration_text, size_text

DOING = {
    "broken": "out of order",
    "starting": "starting",
    "idle": "idle",
    "verifying": "verifying",
    "staging": "fetching",
    "warming": "trying",
    "observing": "observing",
    "rolling_back": "rolling back",
    "rejecting": "refusing",
}
"""States in a person's words; an unknown one, of a newer daemon, is shown as it is."""

UNTOUCHED = "What serves is as it was."

ONLY_IMPORTS = "none; updates come by `edge-runtime update import DIR`"

ADVICE = {
    "refused": "It is not tried again here; publish a release that does better.",
    "refused before": "It is not tried again here; publish a release that does better, and assign that.",
    "put off": "It is tried again at the next check; `edge-runtime update apply` does so now.",
}
"""By the fate of a release that was to be installed and is not."""


def doing_text(status: Mapping[str, Any]) -> str:
    """Return a state in a person's words."""
    state = str(status.get("state", ""))
    return DOING.get(state, state)


def step_text(step: Mapping[str, Any]) -> str:
    """Return a release under way with its state: digits release 4 (version 3): fetching."""
    return f"{step.get('model')} release {step.get('release')} (version {step.get('version')}): {doing_text(step)}"


def step_detail(step: Mapping[str, Any]) -> str:
    """Return how many bytes of a release are fetched, or the detail of the step."""
    total = step.get("total_bytes")
    return f"{size_text(step.get('done_bytes', 0))} of {size_text(total)}" if total else str(step.get("detail") or "")


def status_fields(stats: Mapping[str, Any]) -> dict[str, str]:
    """Return the updater's line of `edge-runtime status`; empty where no updates are configured."""
    status = stats.get("update")
    return {"updates": _line_of(status) if status else ""}


def _line_of(status: Mapping[str, Any]) -> str:
    step, checked = status.get("under_way"), status.get("checked")
    parts = [_joined(step_text(step), step_detail(step)) if step else doing_text(status)]
    if checked is not None:
        parts.append(f"checked {_ended(checked)}")
    refused = status.get("refused") or ()
    if refused:
        parts.append(f"refused last: {refused[-1]['model']} release {refused[-1]['release']}")
    return "; ".join([*parts, *_obstacles(status).values()])


def print_status(status: Mapping[str, Any], screen: Screen) -> None:
    """Print the whole status of updates, the most important first."""
    screen.heading(doing_text(status))
    step, checked = status.get("under_way"), status.get("checked")
    next_s = status.get("next_check_s")
    screen.fields(
        {
            "under way": _joined(step_text(step), step_detail(step)) if step else "",
            "repository": str(status["source"] or ONLY_IMPORTS) if "source" in status else "",
            "group": str(status.get("group", "")),
            "device": str(status.get("device_id", "")),
            "waits for": str(status.get("waits_for") or ""),
            "configuration": _configuration_text(status.get("configuration") or {}),
            "last check": _ended(checked, names_source=True) if "checked" in status else "",
            "next check": "" if next_s is None else "due" if not next_s else f"in {duration_text(next_s)}",
            **{name: screen.painted(text, "red") for name, text in _obstacles(status).items()},
            **{name: screen.painted(text, "yellow") for name, text in _doubts(status).items()},
        }
    )
    observed = (step or {}).get("observation")
    if observed:
        screen.line()
        screen.table(
            ("observed", "before", "now"),
            [[each["name"], each["before"], each["now"]] for each in observed],
            ("before", "now"),
        )
    rows = [_model_row(name, each) for name, each in sorted((status.get("models") or {}).items())]
    if rows:
        screen.line()
        screen.table(
            ("model", "version", "release", "before", "state", "reason"), rows, ("version", "release", "before")
        )
    elif "models" in status:
        screen.line("No model runs by an update yet.")
    left = [each for each in (checked or {}).get("offers", ()) if each.get("action") not in ("runs", "installed")]
    if left:
        screen.line()
        screen.heading("Not installed at the last check")
        print_offers(left, screen)
    refused = status.get("refused") or ()
    if refused:
        screen.line()
        screen.heading("Refused, never tried again")
        rows = [[str(each["model"]), str(each["release"]), str(each.get("reason", ""))] for each in refused]
        screen.table(("model", "release", "reason"), rows, ("release",))


def print_offers(offers: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """Print the fate of each release that the repository names for the group."""
    rows = [
        [
            str(each.get("model", "")),
            "" if each.get("version") is None else str(each["version"]),
            str(each.get("release", "")),
            f"{each.get('percent', 100.0):g} %",
            str(each.get("action", "")),
            str(each.get("reason") or ""),
        ]
        for each in offers
    ]
    screen.table(("model", "version", "release", "devices", "state", "reason"), rows, ("version", "release", "devices"))


def print_history(entries: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """Print the history, newest first."""
    rows = [[str(each.get(key, "")) for key in ("at_utc", "model", "counter", "what", "reason")] for each in entries]
    screen.table(("when", "model", "release", "what", "reason"), rows, ("release",))


def failures(checked: Mapping[str, Any], *, installs: bool = True, imported: str = "") -> list[str]:
    """Return a paragraph for each failure of a check, with what to do about it.

    installs: whether the check installs; where not, a release that was refused before is not a failure. imported: the
    folder that was imported, if one was.
    """
    if not checked.get("is_ok"):
        what = f"import of {imported}" if imported else "check"
        return [f"the {what} did not go well: {checked.get('reason')}\n{UNTOUCHED}"]
    return [
        f"{_told_of(each)}\n{UNTOUCHED} {_advice(each['action'], imported)}"
        for each in checked.get("offers", ())
        if each.get("action") in ADVICE and (installs or each["action"] != "refused before")
    ]


def _told_of(offer: Mapping[str, Any]) -> str:
    if offer["action"] == "refused before":
        return str(offer.get("reason"))  # says all of it
    return f"{offer.get('model')} release {offer.get('release')} was {offer['action']}: {offer.get('reason')}"


def _advice(action: str, imported: str) -> str:
    if action == "put off" and imported:
        return f"Once that is mended, try again: `edge-runtime update import {imported}`."
    return ADVICE[action]


def _model_row(name: str, status: Mapping[str, Any]) -> list[str]:
    before, trouble = status.get("previous_release"), str(status.get("not_served") or "")
    state = "not served" if trouble else "serves"
    return [
        name, str(status.get("version", "")), str(status.get("release", "")), "" if before is None else str(before),
        state, trouble,
    ]  # fmt: skip


def _ended(checked: Mapping[str, Any] | None, *, names_source: bool = False) -> str:
    """Return when and how the last check ended. names_source: and where, the repository or an imported folder."""
    if checked is None:
        return "none since the daemon's start"
    how = "went well" if checked.get("is_ok") else f"failed: {checked.get('reason')}"
    where = checked.get("source") if names_source else None
    return ", ".join(filter(None, (str(checked.get("at_utc")), where, how)))


def _obstacles(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the obstacles that keep this device from installing any release."""
    found: dict[str, str] = {}
    clock = _clock(status)
    if status.get("reason"):
        found["trouble"] = str(status["reason"])
    if clock.get("is_behind"):
        found["clock"] = f"it says {clock.get('now_utc')}, but it is {clock.get('floor_utc')} or later; set it"
    if status.get("state_lost"):
        found["memory"] = "it was lost and begun anew; nothing is installed before a whole check has gone well"
    return found


def _configuration_text(told: Mapping[str, Any]) -> str:
    """Return the state of the group's signed configuration; "" where there is none."""
    state, name = told.get("state"), str(told.get("sha256", ""))[:12]
    if state in (None, "none", "off") and not told.get("reason"):
        return ""
    return _joined(" ".join(filter(None, (str(state), name))), str(told.get("reason") or ""))


def _doubts(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the faults that there may be, and need not be."""
    clock = _clock(status)
    if not clock or clock.get("is_behind") or clock.get("is_synchronised"):
        return {}
    return {"clock": f"it says {clock.get('now_utc')}, and no time service sets it: expiry may be judged wrongly"}


def _clock(status: Mapping[str, Any]) -> Mapping[str, Any]:
    clock: Mapping[str, Any] = status.get("clock") or {}
    return clock


def _joined(text: str, detail: str) -> str:
    return f"{text}, {detail}" if detail else text
