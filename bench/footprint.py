"""Memory, CPU and disk that the daemon takes when it does nothing."""

from __future__ import annotations

import importlib.metadata
import py_compile
import re
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import psutil
from packaging.requirements import Requirement

import edge_runtime

PACKAGE = "edge-runtime"


def memory_mib(pid: int) -> tuple[float, float]:
    """PSS and RSS in MiB of a process and its children (/proc/PID/smaps_rollup; PSS splits shared pages fairly)."""
    pss_kib = rss_kib = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        pss_kib += _kib(rollup, "Pss")
        rss_kib += _kib(rollup, "Rss")
    return pss_kib / 1024, rss_kib / 1024


def private_mib(pid: int) -> float:
    """Memory that a process alone has written, in MiB: what it takes beyond files and what it shares."""
    return _kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Private_Dirty") / 1024


def cpu_percent(pid: int, seconds: float) -> float:
    """CPU time of a process over `seconds` of waiting, in percent of one core."""
    process = psutil.Process(pid)
    before, start = process.cpu_times(), time.perf_counter()
    time.sleep(seconds)
    after, elapsed = process.cpu_times(), time.perf_counter() - start
    return float(after.user + after.system - before.user - before.system) / elapsed * 100


def installed_bytes(extras: set[str]) -> dict[str, int]:
    """Bytes on disk of each distribution that `pip install edge-runtime[extras]` brings, from what is installed here.

    Raises importlib.metadata.PackageNotFoundError when one of them is not.
    """
    waiting, sizes = [(PACKAGE, frozenset(extras))], {PACKAGE: _package_bytes()}
    seen = set(waiting)
    while waiting:
        name, wanted_extras = waiting.pop()
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in (wanted_extras or {""})]
            if requirement.marker and not any(requirement.marker.evaluate(words) for words in environments):
                continue
            key = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if key not in sizes:
                sizes[key] = _distribution_bytes(key)
            item = (key, frozenset(requirement.extras))
            if item not in seen:
                seen.add(item)
                waiting.append(item)
    return sizes


# ---- private --------------------------------------------------------------------------------------------------------


def _kib(rollup: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", rollup, re.MULTILINE)
    if found is None:
        raise ValueError(f"smaps_rollup holds no {field}")
    return int(found.group(1))


def _distribution_bytes(name: str) -> int:
    return _bytes_compiled(Path(str(file.locate())) for file in importlib.metadata.distribution(name).files or ())


def _package_bytes() -> int:
    """The package itself, which may be an editable install: its folders in the wheel (pyproject.toml)."""
    root = Path(edge_runtime.__file__).parents[1]
    folders = (root / PACKAGE.replace("-", "_"), root / "device_profiles", root / "converters/edge_runtime_converters")
    return _bytes_compiled(file for folder in folders for file in folder.rglob("*"))


def _bytes_compiled(files: Iterable[Path]) -> int:
    """Bytes of files, with each Python file's compiled form, which pip writes beside it; what is there is left out."""
    total = 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        for file in files:
            if file.suffix == ".pyc" or not file.is_file():
                continue
            total += file.stat().st_size
            if file.suffix == ".py" and (compiled := py_compile.compile(str(file), f"{folder}/compiled", quiet=2)):
                total += Path(compiled).stat().st_size
    return total
