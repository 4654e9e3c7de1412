"""The figures of the house are counted from the source and from a request that really ran."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.architecture import figures
from tests.architecture.next_door import REASONS
from tests.architecture.source_tree import ROOT


def test_a_request_and_an_update_are_followed_through_our_own_files() -> None:
    command = [sys.executable, "-m", "tests.architecture.figures", "--calls"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    request, _, update = told.partition("an update from check to commit: ")
    assert "edge_runtime/doors/zmq/transport.py: Endpoint.take" in request
    assert "edge_runtime/request/policy.py: plan_batch" in request
    assert "edge_runtime/updates/" not in request
    assert "edge_runtime/durable.py: " in update
    for section, calls, fewest in (("One request", request, 12), ("One update", update, 10)):
        called = re.findall(r"\.py: ([\w.]+)$", calls, re.MULTILINE)
        often = {"Dispatcher.next_job", "RolloutProgress.advance"}  # called before and after as well
        passed = [name for name in steps_of_page(section) if name in called and name not in often]
        assert len(passed) >= fewest, f"docs/architecture.md, {section}: of its steps only {passed} were called"
        assert passed == sorted(passed, key=called.index), f"docs/architecture.md, {section}: steps in another order"
    json_over_http = update.partition("a request in JSON over HTTP: ")[2]
    assert "edge_runtime/doors/http/frontend.py: HttpFrontend.requests" in json_over_http
    assert "RequestPlan.__init__" not in json_over_http, "what is known is planned once, whatever its form"


def steps_of_page(section: str) -> list[str]:
    """The functions of a section's table of steps, in its order: those of its third or second column, `where`."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    found: list[str] = []
    for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        cells = row.split(" | ")
        if "any other message" not in row and "roll back" not in cells[0]:
            found += re.findall(r"`([\w.]+)(?:\(\))?`", cells[-2])
    return found


def test_each_product_file_is_counted() -> None:
    assert figures.count().files == len(figures.product_modules()) > 100


def test_each_module_that_only_its_neighbour_imports_has_a_reason_to_be_a_file() -> None:
    assert figures.count().next_door == sorted(REASONS)
