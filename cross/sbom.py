"""The bill of materials of an image, CycloneDX 1.6: every Debian package and wheel, version, hash, licence and purl.

The same image has the same bill: the serial number comes from the content, and the time is the image's.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from cross.debian import Package
from cross.tree import Tree
from cross.wheels import Wheel


def make_sbom(
    name: str, own: Wheel, created: str, *, debian: Iterable[Package], base: Tree, wheels: Iterable[Wheel]
) -> bytes:
    """The document for the image `name`. base: Debian's files, for their licences. own: our wheel."""
    components = [
        *(_of_debian(package, base) for package in debian),
        *(_of_wheel(wheel) for wheel in (own, *wheels)),
    ]
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": {
                "type": "container",
                "bom-ref": "image",
                "name": name,
                "version": own.version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
        "dependencies": [{"ref": "image", "dependsOn": [str(component["bom-ref"]) for component in components]}],
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
    return component


def _component(name: str, version: str, sha256: str, purl: str) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": sha256}],
    }
