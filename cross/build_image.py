"""Build an image: `make image ARCH=arm64`, or `python -m cross.build_image --arch arm64`.

It has three layers, so that a new version of the daemon is one small one: Debian's files with Python, the required
packages, the daemon. The same inputs give the same bytes: the working tree, the locks of Python and of Debian, and the
time of the last commit that changed one (or SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cross import bytecode, debian, oci, sbom, wheels
from cross.building import ShowStep, made_line, run_program, show_nothing, watched
from cross.tree import Tree

ROOT = Path(__file__).parents[1]
INPUTS = (
    "edge_runtime", "converters", "device_profiles", "cross",
    "pyproject.toml", "hatch_build.py", "requirements/dev.lock", "requirements/sources.lock", "README.md", "LICENSE",
    "deploy/kserve/config.toml",
)  # fmt: skip

ALWAYS = ("http", "grpc", "mqtt", "pictures", "text", "audio", "prometheus", "update")
FLAVOURS = {
    "onnxruntime": ("onnxruntime", *ALWAYS),
    "openvino": ("openvino", *ALWAYS),
    "litert": ("onnxruntime", "litert", *ALWAYS),
    "sources": ("onnxruntime", "convert-lightgbm", "convert-sklearn", "convert-xgboost", *ALWAYS),
    "jetson": ("onnxruntime", *ALWAYS),
}
"""Extras of each. The openvino flavour runs ONNX files as well, by OpenVINO; sources converts what training libraries
write."""

ONLY_IN = {"libgomp1": "sources"}
"""Packages of Debian's lock that one flavour has alone: LightGBM's library is linked with OpenMP's."""

DEBIAN_13 = (13, 41)
JETPACK_6 = (10, 35)
"""Minor versions of Python 3 and of glibc 2; JetPack 6 is Ubuntu 22.04."""

USER = 10001
"""Owns the writable folders and nothing else. Above 10 000, so that it is not a user of the host."""

STATE = "var/lib/edge-runtime"
SOCKETS = "run/edge-runtime"
SBOM = "usr/share/sbom/edge-runtime.cdx.json"

COMMAND = """#!/usr/bin/python3.{minor} -I
import sys
from edge_runtime.cli.main import main
sys.exit(main())
"""

HEALTH = ["CMD", "/usr/local/bin/edge-runtime", "status", "--ready"]
SECOND_NS = 1_000_000_000


def main(words: list[str] | None = None) -> int:
    """Build one image, and an index of both architectures if the other was built of the same inputs."""
    arguments = _arguments(words)
    return run_program("image", lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> None:
    out, cache = Path(arguments.out), Path(arguments.cache)
    out.mkdir(parents=True, exist_ok=True)
    with watched("building the daemon's wheel") as show_step:
        image, bill, version = build(
            arguments.arch,
            arguments.flavour,
            cache,
            base=arguments.base,
            replacements=arguments.wheel,
            show_step=show_step,
        )
    name = f"edge-runtime-{version}-{arguments.flavour}"
    stem = out / f"{name}-{arguments.arch}"
    tag = f"edge-runtime:{version}-{arguments.flavour}"
    archive = stem.with_name(stem.name + ".oci.tar")
    digest = oci.write_archive(archive, [image], f"{tag}-{arguments.arch}")
    stem.with_name(stem.name + ".cdx.json").write_bytes(bill)
    print(
        made_line(stem.with_name(stem.name + ".oci.tar"), f"{image.compressed_bytes / 1e6:.1f} MB compressed", digest)
    )
    _join(out, name, tag, image)


def build(
    architecture: str,
    flavour: str,
    cache: Path,
    *,
    base: Path | None = None,
    replacements: tuple[Path, ...] = (),
    show_step: ShowStep = show_nothing,
) -> tuple[oci.Image, bytes, str]:
    """The image, its bill of materials and the daemon's version. Downloads packages that are not cached.

    base: an archive to build on instead of Debian. replacements: wheels that are on no index.
    """
    is_own_base = base is None
    minor, glibc = DEBIAN_13 if is_own_base else JETPACK_6
    packages_folder = f"usr/local/lib/python3.{minor}/dist-packages"
    own = wheels.build_own(cache / "own")
    required = wheels.collect(
        own,
        FLAVOURS[flavour],
        wheels.Target(architecture, minor, glibc),
        cache / "wheels",
        replacements,
        show_step=show_step,
    )
    chosen = debian.read_lock(architecture) if is_own_base else []
    chosen = [package for package in chosen if ONLY_IN.get(package.name, flavour) == flavour]
    system, compiler = debian.unpack(chosen, cache / "debian", show_step), Tree()
    if is_own_base:
        compiler = debian.unpack(debian.read_lock("amd64"), cache / "debian", show_step)
        system.add_all(_skeleton())
    show_step(f"unpacking {len(chosen)} packages of Debian and {len(required)} of Python")
    packages, daemon = Tree(), wheels.unpack(own, packages_folder)
    names = frozenset(wheel.name for wheel in required)
    for wheel in required:
        packages.add_all(wheels.unpack(wheel, packages_folder, names))
    if is_own_base:
        show_step("compiling Python modules")
        for tree in (system, packages, daemon):
            tree.add_all(bytecode.compile_all(tree, compiler))
    created, revision = _moment(), _revision()
    bill = sbom.make_sbom(
        f"edge-runtime-{flavour}-{architecture}",
        own.version,
        created,
        debian=chosen,
        base=system,
        wheels=(own, *required),
    )
    daemon.add_all(_places(COMMAND.format(minor=minor), bill))
    show_step("compressing the layers")
    layers = [
        oci.make_layer(packages.tar(), "Python packages of requirements/"),
        oci.make_layer(daemon.tar(), f"edge-runtime {own.version}"),
    ]
    if is_own_base:
        layers.insert(0, oci.make_layer(system.tar(), f"Debian packages of debian.lock, {debian.lock_day()}"))
    labels = {
        "org.opencontainers.image.title": "edge-runtime",
        "org.opencontainers.image.description": str(own.metadata["Summary"]),
        "org.opencontainers.image.version": own.version,
        "org.opencontainers.image.revision": revision,
        "org.opencontainers.image.created": created,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    below = oci.read_archive(base) if base is not None else None
    image = oci.make_image(tuple(layers), architecture, _run_config(labels), created, below)
    return image, bill, own.version


# ---- private --------------------------------------------------------------------------------------------------------


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make image", description="Build an OCI image.")
    parser.add_argument("--arch", choices=("amd64", "arm64"), default="amd64")
    parser.add_argument("--flavour", choices=sorted(FLAVOURS), default="onnxruntime")
    parser.add_argument("--base", type=Path, metavar="ARCHIVE", help="jetson: NVIDIA's image, as an OCI archive")
    text = "a wheel that is on no index, in place of one of that name: onnxruntime_gpu-….whl"
    parser.add_argument("--wheel", type=Path, action="append", default=[], metavar="FILE", help=text)
    parser.add_argument("--out", default="build/images")
    parser.add_argument("--cache", default=str(wheels.CACHE))
    arguments = parser.parse_args(words)
    arguments.wheel = tuple(arguments.wheel)
    if arguments.flavour == "jetson":
        if arguments.base is None:
            parser.error(
                "the jetson flavour is built on NVIDIA's image, which has the drivers' libraries. Fetch it:\n"
                "  skopeo copy --override-arch arm64 docker://nvcr.io/nvidia/l4t-jetpack:r36.4.0 oci-archive:l4t.tar\n"
                "then: make image ARCH=arm64 FLAVOUR=jetson BASE=l4t.tar"
            )
        arguments.arch = "arm64"
    elif arguments.base is not None:
        parser.error("a base is for the jetson flavour")
    return arguments


def _skeleton() -> Tree:
    """The files of Debian's maintainer scripts that an image needs."""
    tree = Tree()
    tree.file("etc/passwd", b"root:x:0:0:root:/root:/usr/sbin/nologin\n"
              b"edge-runtime:x:%d:%d::/var/lib/edge-runtime:/usr/sbin/nologin\n" % (USER, USER))  # fmt: skip
    tree.file("etc/group", b"root:x:0:\nedge-runtime:x:%d:\n" % USER)
    tree.file("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    tree.link("etc/localtime", "/usr/share/zoneinfo/Etc/UTC")
    for folder in ("dev", "proc", "sys", "run"):
        tree.folder(folder)
    tree.folder("root", 0o700)
    tree.folder("tmp", 0o1777)
    tree.folder("var/tmp", 0o1777)
    tree.link("usr/bin/python3", "python3.13")
    return tree


def _places(command: str, bill: bytes) -> Tree:
    """The command, its folders, and the bill of materials."""
    tree = Tree()
    tree.file("usr/local/bin/edge-runtime", command.encode(), mode=0o755)
    tree.folder("models")
    tree.folder("etc/edge-runtime")
    tree.file("etc/edge-runtime/kserve.toml", (ROOT / "deploy/kserve/config.toml").read_bytes())
    tree.folder(STATE, 0o750, owner=USER)
    tree.folder(SOCKETS, 0o750, owner=USER)
    tree.file(SBOM, bill)
    return tree


def _run_config(labels: dict[str, str]) -> dict[str, Any]:
    """How the image runs. Models are in `models` below the working folder, /models, unless configured otherwise."""
    return {
        "User": f"{USER}:{USER}",
        "Env": [
            "PATH=/usr/local/bin:/usr/bin",
            "LANG=C.UTF-8",
            f"HOME=/{STATE}",
            f"STATE_DIRECTORY=/{STATE}",
            f"RUNTIME_DIRECTORY=/{SOCKETS}",
        ],
        "Entrypoint": ["/usr/local/bin/edge-runtime"],
        "Cmd": ["serve"],
        "WorkingDir": "/",
        "Volumes": {f"/{STATE}": {}, f"/{SOCKETS}": {}},
        "StopSignal": "SIGTERM",
        "Labels": labels,
        # Docker's own key; the OCI format has none, and other programs ignore it.
        "Healthcheck": {
            "Test": HEALTH, "Interval": 30 * SECOND_NS, "Timeout": 10 * SECOND_NS, "StartPeriod": 60 * SECOND_NS,
            "Retries": 3,
        },
    }  # fmt: skip


def _moment() -> str:
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct", "--", *INPUTS) or "0"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(seconds)))


def _revision() -> str:
    """The last commit that changed an input, and whether the working tree has changed one since."""
    commit = _git("log", "-1", "--format=%H", "--", *INPUTS) or "unknown"
    return commit + ("-changed" if _git("status", "--porcelain", "--", *INPUTS) else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _join(out: Path, name: str, tag: str, image: oci.Image) -> None:
    """Write an index of both architectures if both were built of the same inputs."""
    other = {"amd64": "arm64", "arm64": "amd64"}[image.architecture]
    path = out / f"{name}-{other}.oci.tar"
    if not path.exists():
        return
    images = sorted([image, oci.read_archive(path)], key=lambda each: each.architecture)
    if len({_identity(each) for each in images}) > 1:
        print(f"{path} has other inputs, so no index of both is written; build it again")
        return
    digest = oci.write_archive(out / f"{name}.oci.tar", images, tag)
    print(made_line(out / f"{name}.oci.tar", "both architectures", digest))


def _identity(image: oci.Image) -> str:
    labels = json.loads(image.config.data or b"{}")["config"]["Labels"]
    return hashlib.sha256(json.dumps(labels, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
