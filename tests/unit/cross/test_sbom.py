"""The bill of materials: what it says of a wheel's own libraries, of a package and of an image."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cross.sbom import make_sbom
from cross.wheels import Wheel, inside, read_wheel

CREATED = "2026-01-01T00:00:00Z"
METADATA = "Metadata-Version: 2.1\nName: Seeing_Things\nVersion: 1.2+local\nLicense-Expression: MIT\n"
WEBP = {"type": "library", "name": "libwebp", "version": "1.6.0", "purl": "pkg:generic/libwebp@1.6.0"}
TOLD = {
    "bomFormat": "CycloneDX",
    "components": [
        {"type": "library", "name": "seeing-things", "purl": "pkg:pypi/seeing-things@1.2?file_name=x"},
        {**WEBP, "scope": "required"},
        WEBP,
        {"type": "library", "name": "zlib-ng", "version": "2.3", "licenses": [{"license": {"id": "Zlib"}}]},
    ],
}


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    path = tmp_path / "seeing_things-1.2-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("seeing_things-1.2.dist-info/METADATA", METADATA)
        archive.writestr("seeing_things-1.2.dist-info/sboms/auditwheel.cdx.json", json.dumps(TOLD))
        archive.writestr("seeing_things-1.2.dist-info/sboms/other.spdx.json", json.dumps({"spdxVersion": "2.3"}))
        archive.writestr("seeing_things/_see.cpython-311-x86_64-linux-gnu.so", b"a module of Python")
        archive.writestr("seeing_things/library.py", b"")
        archive.writestr("seeing_things.libs/libjpeg-6dc8d115.so.62.4.0", b"jpeg")
        archive.writestr("seeing_things.libs/libquad-96973f99-934c22de.so", b"quad")
        archive.writestr("pillow.libs/libavif-c6062d5f.so.16", b"left out of what is built")
    return read_wheel(path)


def test_a_wheel_is_seen_into_as_far_as_it_is_unpacked(wheel: Wheel) -> None:
    found = inside(wheel)
    assert set(found.libraries) == {
        "seeing_things.libs/libjpeg-6dc8d115.so.62.4.0",
        "seeing_things.libs/libquad-96973f99-934c22de.so",
    }
    assert [each["name"] for each in found.told] == ["seeing-things", "libwebp", "libwebp", "zlib-ng"]


def test_the_libraries_in_a_wheel_stand_below_it_by_file_and_by_what_its_makers_say(wheel: Wheel) -> None:
    (entry,) = bill(wheel)["components"]
    purl = "pkg:pypi/seeing-things@1.2+local"
    assert (entry["purl"], entry["licenses"]) == (purl, [{"expression": "MIT"}])
    parts = {part["name"]: part for part in entry["components"]}
    assert list(parts) == ["libjpeg.so.62.4.0", "libquad.so", "libwebp", "zlib-ng"]
    jpeg = parts["libjpeg.so.62.4.0"]
    assert jpeg["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"jpeg").hexdigest()}]
    assert jpeg["evidence"] == {"occurrences": [{"location": "seeing_things.libs/libjpeg-6dc8d115.so.62.4.0"}]}
    assert "version" not in jpeg, "the number in a file's name is the interface's"
    assert (parts["libwebp"]["version"], "scope" in parts["libwebp"]) == ("1.6.0", False)
    assert parts["zlib-ng"]["licenses"] == [{"license": {"id": "Zlib"}}]
    refs = [part["bom-ref"] for part in parts.values()]
    assert all(ref.startswith(f"{purl}#") for ref in refs)
    assert len(set(refs)) == len(refs)


@pytest.mark.parametrize(
    ("purl", "kind"), [(None, "container"), ("pkg:deb/edge-runtime/x@1?arch=amd64", "application")]
)
def test_a_bill_says_what_it_is_of(wheel: Wheel, purl: str | None, kind: str) -> None:
    document = bill(wheel, purl)
    described = document["metadata"]["component"]
    assert (described["type"], described.get("purl")) == (kind, purl)
    (depends,) = document["dependencies"]
    assert depends["ref"] == described["bom-ref"]
    assert bill(wheel, purl) == document


def bill(wheel: Wheel, purl: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(make_sbom("x", "1", CREATED, wheels=[wheel], purl=purl))
    return found
