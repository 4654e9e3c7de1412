"""What a run of tests says of itself while it runs, and which process runs what."""

from __future__ import annotations

import time
from typing import Any

import pytest

BEGUN_S: dict[str, float] = {}
"""Tests that run now, by name: where one process gives them to others, those of all."""


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> None:
    """Name each failure when it happens: a run that is cut off never comes to its summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and reporter is not None:
        said = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        reporter.write_line("\n".join(["", f"{report.when} failed: {report.nodeid}", *said[:6]]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Remember when a test began."""
    BEGUN_S[nodeid] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """Forget a test that ended."""
    BEGUN_S.pop(nodeid, None)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Forget a test that ended its process."""
    BEGUN_S.pop(crashitem, None)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name each test that a run did not wait for, which was cut off by a limit or by Ctrl-C."""
    for nodeid, begun_s in BEGUN_S.items():
        terminalreporter.write_line(f"still ran, for {time.monotonic() - begun_s:.0f} s: {nodeid}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together; where one ended its process it has failed, and the rest goes on without it.

    xdist 3.8 gives such a test to the next process again, and one that hangs would end each process in turn.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # without types
        def remove_node(self, node: Any) -> str | None:
            workload = self.assigned_work.pop(node)
            left = [(unit, name) for unit in workload.values() for name, is_done in unit.items() if not is_done]
            if not left:
                return None
            unit, crashed = left[0]
            unit[crashed] = True
            self.workqueue.update({file: unit for file, unit in workload.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return str(crashed)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None
