"""Build edge-runtime_<version>~<distribution>_<architecture>.deb on any Linux with dpkg-deb, without Docker or root.

The package has a virtual environment in /usr/lib/edge-runtime for the distribution's own Python, with wheels of
requirements/dev.lock for that platform; the service, its drop-ins and a configuration. The same inputs give the same
bytes. `make deb` runs it; tests call `build`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from cross import wheels
from cross.building import ShowStep, made_line, run_program, show_nothing, watched
from cross.wheels import MACHINES, ROOT, Target
from deploy.debian.manual import manual
from edge_runtime.cli.completion import script_for

HERE = Path(__file__).parent
UNITS = ROOT / "deploy" / "systemd"
EXTRAS = ("onnxruntime", "litert", "http", "grpc", "mqtt", "pictures", "text", "audio", "update", "prometheus")
MAINTAINER = "edge-runtime maintainers <maintainers@edge-runtime.invalid>"
LIMIT_S = 600.0

DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
    "deploy/runbook.md",
    "deploy/broker",
    "deploy/repository",
    "deploy/engines",
    "deploy/monitoring",
    "deploy/containers",
    "deploy/kserve",
    "cross/README.md",
    "cross/debian.lock",
    "demo/README.md",
    "device_profiles/README.md",
    "bench/results",
)
"""The handbook and every file that it links to, with the same paths below /usr/share/doc, so that links hold."""

COMPLETIONS = {
    "bash": "bash-completion/completions/edge-runtime",
    "zsh": "zsh/vendor-completions/_edge-runtime",
    "fish": "fish/vendor_completions.d/edge-runtime.fish",
}
"""The folders below /usr/share where shells look for completions of packages."""

CHANGES = """\
edge-runtime ({version}) unstable; urgency=medium

  * What changed is in NEWS.gz.

 -- {maintainer}  {date}
"""


@dataclass(frozen=True)
class Distribution:
    """A distribution's minor versions of Python 3 and glibc 2."""

    minor: int
    glibc: int

    @property
    def python(self) -> str:
        """The version of Python, as in 3.11."""
        return f"3.{self.minor}"


DISTRIBUTIONS = {
    "bookworm": Distribution(11, 36),
    "trixie": Distribution(13, 41),
    "jammy": Distribution(10, 35),
    "noble": Distribution(12, 39),
}


def build(
    architecture: str,
    name: str,
    folder: Path,
    *,
    version: str | None = None,
    level: int | None = 6,
    show_step: ShowStep = show_nothing,
) -> Path:
    """Build one package into a folder and return its file. version: None is the source's. level: of xz; None: no xz."""
    distribution = DISTRIBUTIONS[name]
    version = version or _source_version()
    epoch = _epoch()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-deb-") as made:
        root = Path(made) / "root"
        _lay_out_environment(root, Target(architecture, distribution.minor, distribution.glibc), version, show_step)
        _lay_out_service(root, f"{version}~{name}", epoch)
        _lay_out_words(root, version, epoch)
        _write_control(root, architecture, distribution, f"{version}~{name}")
        _make_plain(root, epoch)
        packing = ("-Znone",) if level is None else ("-Zxz", f"-z{level}")
        package = folder / f"edge-runtime_{version}~{name}_{architecture}.deb"
        show_step("packing" if level is None else f"packing with xz -{level}{', about a minute' if level > 3 else ''}")
        half = folder / f".{package.name}.part"  # a partial file must not have a package's name
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", *packing, "--build", str(root), str(half)],
            check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        )  # fmt: skip
        half.replace(package)
    return package


# ---- content --------------------------------------------------------------------------------------------------------


def _lay_out_environment(root: Path, target: Target, version: str, show_step: ShowStep) -> None:
    """A virtual environment as of `python -m venv`, with packages for the target machine."""
    python = f"3.{target.minor}"
    home = root / "usr/lib/edge-runtime"
    packages = home / "lib" / f"python{python}" / "site-packages"
    packages.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-wheel-") as made:
        own = wheels.build_own(Path(made))
        required = wheels.collect(own, EXTRAS, target, wheels.CACHE / "wheels", show_step=show_step)
        show_step(f"unpacking {len(required)} packages of Python")
        for wheel in [*required, own]:
            wheels.unpack(wheel, packages.relative_to(root).as_posix()).write(root)
    _set_version(packages, version)
    (home / "bin").mkdir()
    (home / "bin" / "python3").symlink_to(f"../../../bin/python{python}")
    (home / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n")
    command = home / "bin" / "edge-runtime"
    command.write_text(
        "#!/usr/lib/edge-runtime/bin/python3 -I\n"
        "import sys\n\nfrom edge_runtime.cli.main import main\n\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/edge-runtime").symlink_to("../lib/edge-runtime/bin/edge-runtime")


def _lay_out_service(root: Path, version: str, epoch: int) -> None:
    units = root / "usr/lib/systemd/system"
    shared = root / "usr/share/edge-runtime"
    documents = root / "usr/share/doc/edge-runtime"
    for target, files in (
        (units, [UNITS / "edge-runtime.service", UNITS / "edge-runtime-retry.timer"]),
        (shared / "drop-ins", sorted((UNITS / "drop-ins").glob("*.conf"))),
        (root / "etc/edge-runtime", [HERE / "config.toml"]),
        (documents, [HERE / "copyright"]),
    ):
        target.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
    _lay_out_documents(documents)
    overrides = root / "usr/share/lintian/overrides/edge-runtime"
    overrides.parent.mkdir(parents=True)
    shutil.copyfile(HERE / "lintian-overrides", overrides)
    for name, text in (
        ("changelog.gz", CHANGES.format(version=version, maintainer=MAINTAINER, date=formatdate(epoch))),
        ("NEWS.gz", (ROOT / "CHANGELOG.md").read_text("utf-8")),
    ):
        (documents / name).write_bytes(gzip.compress(text.encode(), 9, mtime=epoch))


def _lay_out_documents(target: Path) -> None:
    for name in DOCUMENTS:
        source = ROOT / name
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        for file in files:
            if file.is_file() and not file.name.startswith("."):
                place = target / file.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)


def _lay_out_words(root: Path, version: str, epoch: int) -> None:
    """The manual page and the shells' completions, of this tree's command line."""
    page = root / "usr/share/man/man1/edge-runtime.1.gz"
    page.parent.mkdir(parents=True)
    page.write_bytes(gzip.compress(manual(version, epoch).encode(), 9, mtime=epoch))
    for shell, place in COMPLETIONS.items():
        script = root / "usr/share" / place
        script.parent.mkdir(parents=True)
        script.write_text(script_for(shell) + "\n", encoding="utf-8")


def _write_control(root: Path, architecture: str, distribution: Distribution, version: str) -> None:
    control = root / "DEBIAN"
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    control.mkdir()
    size = sum(path.stat().st_size for path in files) // 1024
    depends = (
        f"python3 (>= {distribution.python}~)", f"python3 (<< 3.{distribution.minor + 1}~)",
        f"libc6 (>= 2.{_oldest_glibc(root)})", "libgcc-s1", "libstdc++6", "passwd",
    )  # fmt: skip
    (control / "control").write_text(
        f"""\
Package: edge-runtime
Version: {version}
Architecture: {architecture}
Maintainer: {MAINTAINER}
Installed-Size: {size}
Depends: {", ".join(depends)}
Recommends: systemd, ca-certificates
Section: science
Priority: optional
Description: serve models on a device over ZeroMQ, HTTP, gRPC and MQTT
 Drop an ONNX model into a folder and it is served, in batches, with a latency
 bound that holds under overload: a request carries a deadline, and is answered
 in time or told at once that it will not be. Models are updated with
 signatures, observed, and rolled back where they do badly.
 .
 With ONNX Runtime for the CPU, the Open Inference Protocol over HTTP and gRPC,
 MQTT, updates and Prometheus metrics.
"""
    )
    sums = [
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {path.relative_to(root)}\n"
        for path in files
    ]
    (control / "md5sums").write_text("".join(sums))
    (control / "conffiles").write_text("/etc/edge-runtime/config.toml\n")
    for script in ("postinst", "prerm", "postrm"):
        shutil.copyfile(HERE / script, control / script)
        (control / script).chmod(0o755)


# ---- steps ----------------------------------------------------------------------------------------------------------


def _set_version(packages: Path, version: str) -> None:
    module = packages / "edge_runtime" / "__init__.py"
    text = re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', module.read_text("utf-8"), flags=re.MULTILINE)
    module.write_text(text, encoding="utf-8")


def _oldest_glibc(root: Path) -> int:
    """The minor version of the newest glibc symbol that a library needs; names are plain text in ELF files."""
    wanted: set[int] = {17}
    for path in root.rglob("*.so*"):
        wanted.update(int(found) for found in re.findall(rb"\0GLIBC_2\.(\d+)\0", path.read_bytes()))
    return max(wanted)


def _make_plain(root: Path, epoch: int) -> None:
    """Set modes and times that depend on neither the builder nor the time."""
    for path in [root, *sorted(root.rglob("*"))]:
        if not path.is_symlink():
            is_program = path.parent.name in {"bin", "DEBIAN"} or path.suffix == ".sh"
            is_script = is_program and path.is_file() and path.read_bytes()[:2] == b"#!"
            path.chmod(0o755 if path.is_dir() or is_script else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _source_version() -> str:
    text = (ROOT / "edge_runtime" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def _epoch() -> int:
    """`SOURCE_DATE_EPOCH`, else the last commit's time, else the lock's (reproducible-builds.org)."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    try:
        log = subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return int((ROOT / "requirements/dev.lock").stat().st_mtime)
    return int(log.stdout)


def main() -> int:
    """Build the package and print its name, size and digest. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Build a Debian package.", allow_abbrev=False)
    parser.add_argument("--architecture", choices=sorted(MACHINES), default="amd64")
    parser.add_argument("--distribution", choices=sorted(DISTRIBUTIONS), default="bookworm")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    parser.add_argument("--version", help="default: the source's")
    parser.add_argument("--level", type=int, choices=range(10), default=6, help="of xz: 0 takes 10 s, 6 a minute")
    arguments = parser.parse_args()
    return run_program("deb", lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> None:
    with watched("building the daemon's wheel") as show_step:
        package = build(
            arguments.architecture,
            arguments.distribution,
            arguments.folder,
            version=arguments.version,
            level=arguments.level,
            show_step=show_step,
        )
    sys.stdout.write(f"{made_line(package)}\n")


if __name__ == "__main__":
    raise SystemExit(main())
