"""Protocols on the HTTP door are found by their settings, and one that is off is not imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edge_runtime import plugins
from edge_runtime.doors.http.settings import HttpSettings

NAMES = plugins.names("protocols")

PROGRAM = """
import sys
import edge_runtime.doors.http.door
print(*[name for name in sys.modules if name.startswith("edge_runtime.")])
"""


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_setting_of_its_name_which_is_off_unless_it_depends_on_the_address(name: str) -> None:
    assert getattr(HttpSettings(), name) is (None if name == "page" else False)


def test_the_door_imports_none_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    imported = done.stdout.split()
    assert "edge_runtime.doors.http.protocols" in imported
    assert [
        each for each in imported if each.startswith(tuple(f"edge_runtime.{name}" for name in (*NAMES, "pages")))
    ] == []
