"""The bill of materials of an image or a package, CycloneDX 1.6: Debian's packages and wheels.

Each has its version, hash, licence and purl. A wheel's entry holds what is inside of it: the libraries that its makers
put in, each by its file and hash, and what the wheel's own bills say (PEP 770), such as the crates of a module in Rust.
The same image has the same bill: the serial number comes from the content, and the time is the image's.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from cross.debian import Package
from cross.tree import Tree
from cross.wheels import Inside, Wheel, inside


def make_sbom(
    name: str,
    version: str,
    created: str,
    *,
    wheels: Iterable[Wheel],
    debian: Iterable[Package] = (),
    base: Tree | None = None,
    purl: str | None = None,
) -> bytes:
    """The document for `name`. base: Debian's files, for their licences. purl: a package's; None for an image."""
    components = [
        *(_of_debian(package, base or Tree()) for package in debian),
        *(_of_wheel(wheel) for wheel in wheels),
    ]
    kind = "container" if purl is None else "application"
    ref = "image" if purl is None else "package"
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": {
                "type": kind,
                "bom-ref": ref,
                "name": name,
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                **({"purl": purl} if purl is not None else {}),
            },
        },
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": [str(component["bom-ref"]) for component in components]}],
    }
    content = json.dumps(document, sort_keys=True)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}"
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


# ---- private --------------------------------------------------------------------------------------------------------


def _of_debian(package: Package, base: Tree) -> dict[str, Any]:
    version = quote(package.version, safe="+~.-")
    purl = f"pkg:deb/debian/{quote(package.name, safe='+.-')}@{version}?arch={package.architecture}&distro=debian-13"
    component = _component(package.name, package.version, package.sha256, purl)
    linked = base.target(f"usr/share/doc/{package.name}")  # to the folder of another package of the same source
    file = f"usr/share/doc/{linked or package.name}/copyright"
    text = base.read(file).decode(errors="replace")
    names = sorted(set(re.findall(r"^License: *([A-Za-z0-9][^\n]{0,79})$", text, re.MULTILINE)))
    # Some copyright files are prose; they are in the image.
    component["licenses"] = [{"license": {"name": name.strip()}} for name in names or [f"see /{file}"]]
    return component


def _of_wheel(wheel: Wheel) -> dict[str, Any]:
    purl = f"pkg:pypi/{wheel.name}@{quote(wheel.version, safe='+.-')}"
    component = _component(wheel.name, wheel.version, wheel.sha256, purl)
    expression = wheel.metadata["License-Expression"]
    stated = wheel.metadata["License"] or ""
    classified = [
        line.rpartition(" :: ")[2]
        for line in wheel.metadata.get_all("Classifier") or ()
        if line.startswith("License :: ")
    ]
    if expression:
        component["licenses"] = [{"expression": str(expression)}]
    elif stated and "\n" not in stated:
        component["licenses"] = [{"license": {"name": str(stated)}}]
    elif classified:
        component["licenses"] = [{"license": {"name": name}} for name in classified]
    if parts := list(_parts(purl, wheel.name, inside(wheel))):
        component["components"] = parts
    return component


def _parts(purl: str, name: str, found: Inside) -> Iterator[dict[str, Any]]:
    """What a wheel holds of others: its libraries, and the entries of its own bills but for itself."""
    for path, sha256 in found.libraries.items():
        yield {
            "type": "library",
            "bom-ref": f"{purl}#{quote(path)}",
            # auditwheel puts a digest into the name, so that two wheels' copies of a library differ.
            "name": re.sub(r"(-[0-9a-f]{8})+(?=\.so)", "", PurePosixPath(path).name),
            "hashes": [{"alg": "SHA-256", "content": sha256}],
            "evidence": {"occurrences": [{"location": path}]},
        }
    told: set[str] = set()
    for entry in found.told:
        known = str(entry.get("purl") or f"{entry.get('name')}@{entry.get('version')}")
        if known in told or known.lower().startswith(f"pkg:pypi/{name}@"):
            continue
        told.add(known)
        kept: dict[str, Any] = {key: entry[key] for key in ("name", "version", "purl", "licenses") if key in entry}
        yield {"type": "library", "bom-ref": f"{purl}#told/{quote(known, safe='')}", **kept}


def _component(name: str, version: str, sha256: str, purl: str) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": sha256}],
    }
