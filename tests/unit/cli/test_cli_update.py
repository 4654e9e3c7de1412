"""`edge-runtime update` against a ROUTER that speaks wire v1: what it sends, what a person reads, its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import main
from edge_runtime.errors import Unsupported, UpdateError
from tests.fakes.server import FakeServer
from tests.fakes.updates import ENTRY, STATUS, STEP, checked, offered


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock") as server:
        monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", server.endpoint)
        server.results["update_status"] = STATUS
        server.results["update_history"] = [ENTRY]
        yield server


@pytest.fixture
def control(tmp_path: Path, server: FakeServer) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock.control", is_control=True) as control:
        yield control


def shown(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    """The output of `update` with these words, and its complaints."""
    assert main(["update", *words]) == status
    out, err = capsys.readouterr()
    return out, err


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# ---- status and history ---------------------------------------------------------------------------------------------


def test_status_says_what_runs_and_what_was_refused_and_why(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = shown(capsys, "status")
    assert out.startswith("idle\n")
    assert "last check  2026-11-21T11:55:00Z, https://models.example, went well" in out
    assert "next check  in 52 min 5 s" in out
    assert ["digits", "2", "3", "1", "serves"] in rows(out)
    assert "digits        2  output 'scores' is not what its golden output says" in out
    assert "clock" not in out
    assert "memory" not in out
    out, _ = shown(capsys, "status", "--json")
    assert json.loads(out) == STATUS


def test_status_says_what_is_under_way(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.results["update_status"] = {**STATUS, "state": "staging", "under_way": STEP}
    out, _ = shown(capsys, "status")
    assert out.startswith("fetching\n  under way   digits release 4 (version 3): fetching, 12.0 MiB of 48.0 MiB\n")


def test_status_shows_what_is_compared_while_a_release_is_observed(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    observed = [{"name": "requests", "before": "1200", "now": "31"}, {"name": "failures", "before": "0", "now": "2"}]
    step = {**STEP, "state": "observing", "detail": "2 of 60 s observed", "observation": observed}
    server.results["update_status"] = {**STATUS, "state": "observing", "under_way": step}
    out, _ = shown(capsys, "status")
    assert ["requests", "1200", "31"] in rows(out)
    assert ["failures", "0", "2"] in rows(out)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"state_lost": True}, "memory      it was lost and begun anew"),
        ({"clock": {**STATUS["clock"], "is_behind": True}}, "but it is 2026-11-21T11:00:00Z or later; set it"),
        ({"clock": {**STATUS["clock"], "is_synchronised": False}}, "no time service sets it"),
        ({"checked": checked(reason="nobody answers")}, "11:55:00Z, https://models.example, failed: nobody answers"),
        ({"checked": None}, "last check  none since the daemon's start"),
        ({"checked": checked(offered("put off", "no room"))}, "3        4    100 %  put off  no room"),
        ({"models": {}}, "No model runs by an update yet."),
        ({"models": {"x": {**STATUS["models"]["digits"], "not_served": "a bad file"}}}, "not served  a bad file"),
        ({"next_check_s": 0.0}, "next check  due"),
        ({"checked": {**checked(), "source": "/media/stick"}}, "2026-11-21T11:55:00Z, /media/stick, went well"),
        ({"source": "", "next_check_s": None}, "repository  none; updates come by `edge-runtime update import DIR`\n"),
    ],
)
def test_status_says_what_is_wrong(
    changed: dict[str, Any], says: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.results["update_status"] = {**STATUS, **changed}
    out, _ = shown(capsys, "status")
    assert says in out


def test_a_release_that_runs_is_not_reported_twice(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.results["update_status"] = {**STATUS, "checked": checked(offered("runs"), offered("installed"))}
    out, _ = shown(capsys, "status")
    assert "Not installed" not in out


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"state": "starting"}, "starting\n"),
        ({"state": "broken", "reason": "no room"}, "out of order\n  trouble  no room\n"),
        ({"state": "hovering"}, "hovering\n"),
    ],
)
def test_status_of_an_updater_that_reports_little_is_shown_as_it_is(
    told: dict[str, Any], said: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.results["update_status"] = told
    assert shown(capsys, "status") == (said, "")


def test_status_is_seen_through_the_control_endpoint_while_models_load(
    tmp_path: Path, control: FakeServer, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results["update_status"] = {"state": "starting"}
    server.close()
    out, err = shown(capsys, "status")
    assert out == "starting\n"
    assert err.endswith("is starting, 1 of 1 ready\n")


def test_history_is_newest_first_and_as_long_as_asked(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, "history", "--count", "3")
    assert rows(out) == [
        ["when", "model", "release", "what", "reason"],
        ["2026-11-21T11:55:00Z", "digits", "3", "committed"],
    ]
    assert server.requests[-1].header.parameters == {"count": 3}
    out, _ = shown(capsys, "history", "--json")
    assert json.loads(out) == [ENTRY]
    server.results["update_history"] = []
    assert shown(capsys, "history")[0] == "Nothing has happened yet.\n"


@pytest.mark.parametrize("words", [["status"], ["history"]])
def test_a_daemon_without_updates_is_status_1(
    words: list[str], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for op in ("update_status", "update_history"):
        server.results[op] = Unsupported("updates are not configured; add [update]")
    assert "add [update]" in shown(capsys, *words, status=1)[1]


# ---- orders ---------------------------------------------------------------------------------------------------------


def test_check_lists_what_is_offered_and_why_it_is_not_taken(
    control: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results["update_check"] = checked(
        offered("available", percent=10.0), offered("passed over", "for arm only", model="cats", version=None)
    )
    out, err = shown(capsys, "check")
    assert rows(out)[:3] == [
        ["model", "version", "release", "devices", "state", "reason"],
        ["digits", "3", "4", "10", "%", "available"],
        ["cats", "4", "100", "%", "passed", "over", "for", "arm", "only"],
    ]
    assert "`edge-runtime update apply` installs" in out
    assert err == "looking what is offered …\n"
    control.results["update_check"] = checked(offered("runs"))
    assert "update apply" not in shown(capsys, "check")[0]
    assert [request.header.op for request in control.requests] == ["update_check", "update_check"]


def test_apply_says_how_it_ended_for_each_model(control: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    control.results["update_apply"] = checked(offered("installed", "as fast as before"), offered("runs", model="cats"))
    out, _ = shown(capsys, "apply")
    assert "installed  as fast as before" in out
    control.results["update_apply"] = checked()
    assert "no release for this device's group" in shown(capsys, "apply")[0]


@pytest.mark.parametrize("action", ["check", "apply"])
@pytest.mark.parametrize(
    ("result", "says"),
    [
        (checked(reason="nobody answers"), ["did not go well: nobody answers", "What serves is as it was"]),
        (checked(offered("refused", "too slow")), ["digits release 4 was refused: too slow", "not tried again here"]),
        (checked(offered("put off", "no room")), ["was put off: no room", "tried again at the next check"]),
        (
            checked(offered("installed"), offered("refused", "bad", model="a"), offered("put off", "x", model="b")),
            ["a release 4 was refused: bad", "b release 4 was put off: x"],
        ),
    ],
    ids=["failed", "refused", "put off", "some"],
)
def test_an_update_that_did_not_go_well_is_status_1_with_what_to_do(
    action: str, result: dict[str, Any], says: list[str], control: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results[f"update_{action}"] = result
    _, err = shown(capsys, action, status=1)
    assert all(sentence in err for sentence in says), err
    out, err = shown(capsys, action, "--json", status=1)
    assert json.loads(out) == result
    assert says[0] in err


BEFORE = offered("refused before", "release 4 of digits was refused here before: too slow")


@pytest.mark.parametrize("action", ["apply", "import /media/stick"])
def test_a_release_that_was_refused_before_is_not_installed_and_status_1(
    action: str, control: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results["update_apply"] = control.results["update_import"] = checked(BEFORE)
    _, err = shown(capsys, *action.split(), status=1)
    assert err.count("too slow") == 1
    assert "publish a release that does better, and assign that" in err


def test_a_check_that_finds_what_was_refused_before_went_well(
    control: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results["update_check"] = checked(BEFORE)
    out, err = shown(capsys, "check")
    assert "refused before" in out
    assert "too slow" in out
    assert "publish" not in err


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (checked(reason="it expired"), "the import of /media/stick did not go well: it expired"),
        (checked(offered("put off", "no room")), "try again: `edge-runtime update import /media/stick`"),
    ],
    ids=["failed", "put off"],
)
def test_an_import_that_did_not_go_well_names_the_stick(
    result: dict[str, Any], says: str, control: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results["update_import"] = result
    _, err = shown(capsys, "import", "/media/stick", status=1)
    assert says in err
    assert "next check" not in err
    assert "update apply" not in err


def test_a_stick_without_anything_for_this_group_is_named(
    control: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results["update_import"] = checked()
    assert shown(capsys, "import", "/media/stick")[0] == "/media/stick names no release for this device's group.\n"


def test_import_names_the_folder_as_the_daemon_finds_it(
    tmp_path: Path, control: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    control.results["update_import"] = checked(offered("installed"))
    out, _ = shown(capsys, "import", "stick")
    assert "installed" in out
    assert control.requests[-1].header.parameters == {"folder": f"{tmp_path}/stick"}


def test_rollback_says_what_serves_now(control: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    control.results["update_rollback"] = {"model": "digits", "release": 1}
    assert "digits release 1 serves again" in shown(capsys, "rollback", "digits")[0]
    control.results["update_rollback"] = {"model": "digits", "withdrawn": True}
    assert "is taken back" in shown(capsys, "rollback", "digits")[0]
    assert json.loads(shown(capsys, "rollback", "digits", "--json")[0])["withdrawn"] is True
    assert {request.header.model for request in control.requests} == {"digits"}


def test_a_command_that_the_updater_refuses_is_status_1(
    control: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control.results["update_rollback"] = UpdateError("no release of 'nobody' is active here")
    assert "no release of 'nobody'" in shown(capsys, "rollback", "nobody", status=1)[1]
    assert main(["update", "rollback", "nobody", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "update_failed"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "wants an action"),
        (["appply"], "invalid choice"),
        (["rollback"], "MODEL"),
        (["import"], "DIR"),
        (["history", "--count", "0"], "wanted 1 or more"),
    ],
)
def test_a_wrong_command_line_is_status_2(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint in shown(capsys, *words, status=2)[1]


# ---- elsewhere ------------------------------------------------------------------------------------------------------


def test_the_daemons_status_has_a_line_about_updates_where_there_are_some(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.results["stats"] = {"uptime_s": 1.5, "update": {**STATUS, "under_way": STEP}}
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert (
        "  updates  digits release 4 (version 3): fetching, 12.0 MiB of 48.0 MiB; checked 2026-11-21T11:55:00Z" in out
    )
    assert "refused last: digits release 2" in out
    server.results["stats"] = {"uptime_s": 1.5, "update": None}
    assert main(["status"]) == 0
    assert "updates" not in capsys.readouterr().out
