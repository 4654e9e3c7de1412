"""The page's files: what others wrote is theirs byte for byte, the whole is small, and nothing asks another machine."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

import edge_runtime.pages

STATIC = Path(edge_runtime.pages.__file__).parent / "static"
VENDOR = STATIC / "vendor"
FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())
OURS = [path for path in FILES if VENDOR not in path.parents]
MOST_BYTES = 300_000
"""Of all files, compressed: what a phone fetches once over a slow network in a second or two."""

IMPORTED = re.compile(r"""^(?:import|export)\s*[\w$*{},\s]*?(?:\bfrom)?\s*["']([^"']+)["']""", re.MULTILINE)
RECORD = json.loads((VENDOR / "vendored.json").read_text())


@pytest.mark.parametrize("name", RECORD["files"])
def test_vendored_file_is_that_of_its_package(name):
    row = RECORD["files"][name]
    text = (VENDOR / name).read_bytes()
    if "changed" in row:
        there, here = (each.encode() for each in row["changed"])
        assert text.count(here) == 1
        text = text.replace(here, there)
    assert hashlib.sha256(text).hexdigest() == row["sha256"]
    assert row["package"] in RECORD["packages"]


def test_vendored_files_are_all_recorded_with_their_licences():
    assert {path.name for path in VENDOR.iterdir()} == {*RECORD["files"], "vendored.json", "LICENSES.txt"}
    licences = (VENDOR / "LICENSES.txt").read_text()
    for name, package in RECORD["packages"].items():
        assert f"==== {name}\n" in licences
        assert package["licence"] in {"MIT", "Apache-2.0"}
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["integrity"].startswith("sha512-")


def test_static_files_are_small_in_all():
    assert sum(len(gzip.compress(path.read_bytes(), 9)) for path in FILES) <= MOST_BYTES


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_static_modules_import_files_that_are_there(path):
    for name in IMPORTED.findall(path.read_text()):
        assert name.startswith("./"), name
        assert (path.parent / name).is_file(), name


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_static_files_name_no_other_machine(path):
    found = re.findall(r"""https?://[^\s"'`<>)]*""", path.read_text())
    assert set(found) <= {"http://www.w3.org/2000/svg", "https://"}


def test_static_html_holds_no_script_or_style_of_its_own():
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html, re.IGNORECASE)
    for script in re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL):
        assert "src=" in script[0]
        assert script[1] == ""
    for place in re.findall(r'(?:src|href)="([^"]+)"', html):
        assert (STATIC / place.removeprefix("/page/")).is_file(), place


def test_static_modules_make_no_markup_of_text():
    for path in OURS:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text()
        ), path.name
