"""Images in the OCI image format 1.1, each in one archive that docker, podman, skopeo and containerd read.

Owns: digests, descriptors, and an archive with the same bytes for the same layers and configuration. No network, no
daemon. The archive has Docker's `manifest.json` as well, for `docker load` before version 25.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

REFERENCE = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes named by their digest: here, or in an archive at an offset (layers of a base may be gigabytes)."""

    digest: str
    size: int
    data: bytes | None = None
    archive: Path | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """A compressed layer. diff_id: the digest before compression. made_by: a line of the image's history."""

    blob: Blob
    diff_id: str
    made_by: str
    media_type: str = LAYER


@dataclass(frozen=True, slots=True)
class Image:
    """A manifest, and every blob that it names, itself included."""

    manifest: Blob
    config: Blob
    layers: tuple[Layer, ...]
    architecture: str

    @property
    def compressed_bytes(self) -> int:
        """The download of a device that has no layer of the image."""
        return self.manifest.size + self.config.size + sum(layer.blob.size for layer in self.layers)


def make_layer(tar: bytes, made_by: str) -> Layer:
    """Compress an archive, with time 0 and no name in gzip's header."""
    return Layer(_blob(gzip.compress(tar, compresslevel=6, mtime=0)), _digest(tar), made_by)


def make_image(
    layers: tuple[Layer, ...], architecture: str, config: Mapping[str, Any], created: str, base: Image | None = None
) -> Image:
    """An image of layers and run configuration. base: an image whose layers come first and whose environment is kept.

    The base's PATH wins, since it names the folders of its programs; of other variables `config` wins.
    """
    history = [{"created": created, "created_by": layer.made_by} for layer in layers]
    if base is not None:
        of_base = json.loads(base.config.data or b"{}")
        history = [*of_base.get("history", ()), *history]
        config = {**config, "Env": _joined(of_base.get("config", {}).get("Env", ()), config["Env"])}
        layers = (*base.layers, *layers)
    written = _json_blob(
        {
            "architecture": architecture, "os": "linux", "created": created, "config": config,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]}, "history": history,
        }
    )  # fmt: skip
    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST, "config": _descriptor(written, CONFIG),
        "layers": [_descriptor(layer.blob, layer.media_type) for layer in layers],
        "annotations": dict(sorted(config["Labels"].items())),
    }  # fmt: skip
    return Image(_json_blob(manifest), written, layers, architecture)


def write_archive(path: Path, images: list[Image], name: str) -> str:
    """Write an OCI layout as one tar, whole or not at all. Return the digest of the index, or of the only image.

    name: `repository:tag`, the image's name where it is loaded.
    """
    manifests: list[dict[str, Any]] = [
        {**_descriptor(image.manifest, MANIFEST), "platform": {"architecture": image.architecture, "os": "linux"}}
        for image in images
    ]
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}
    blobs = [blob for image in images for blob in (image.manifest, image.config, *(each.blob for each in image.layers))]
    if len(images) > 1:
        joined = _json_blob({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
        blobs.append(joined)
        manifests = [_descriptor(joined, INDEX)]
    else:
        (image,) = images
        files["manifest.json"] = _json(
            [
                {
                    "Config": _place(image.config),
                    "RepoTags": [name],
                    "Layers": [_place(each.blob) for each in image.layers],
                }
            ]
        )
    annotations = {REFERENCE: name.rpartition(":")[2], "io.containerd.image.name": f"docker.io/library/{name}"}
    manifests[0]["annotations"] = annotations
    files["index.json"] = _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
    _write_tar(path, files, blobs)
    return str(manifests[0]["digest"])


def read_archive(path: Path) -> Image:
    """The only image of an archive made by `write_archive`, `skopeo copy … oci-archive:` or `docker save`."""
    blobs: dict[str, tuple[int, int]] = {}
    with tarfile.open(path, "r:") as tar:
        index: dict[str, Any] = {}
        for member in tar:
            if member.name == "index.json":
                index = json.load(tar.extractfile(member) or io.BytesIO(b"{}"))
            elif member.name.startswith("blobs/sha256/") and member.isfile():
                blobs["sha256:" + member.name.rpartition("/")[2]] = (member.offset_data, member.size)

    def read(descriptor: Mapping[str, Any]) -> bytes:
        offset, size = blobs[descriptor["digest"]]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    (named,) = index["manifests"]
    manifest = read(named)
    fields = json.loads(manifest)
    if "layers" not in fields:
        raise ValueError(f"{path}: got several images; wanted an archive of one architecture")
    config = read(fields["config"])
    described = json.loads(config)
    layers = tuple(
        Layer(
            Blob(each["digest"], each["size"], archive=path, offset=blobs[each["digest"]][0]),
            diff_id, "", each["mediaType"],
        )
        for each, diff_id in zip(fields["layers"], described["rootfs"]["diff_ids"], strict=True)
    )  # fmt: skip
    return Image(_blob(manifest), _blob(config), layers, described["architecture"])


# ---- private --------------------------------------------------------------------------------------------------------


def _joined(of_base: Iterable[str], own: Iterable[str]) -> list[str]:
    below, above = (dict(line.split("=", 1) for line in lines) for lines in (of_base, own))
    path = {"PATH": below["PATH"]} if "PATH" in below else {}
    return [f"{name}={value}" for name, value in {**below, **above, **path}.items()]


def _write_tar(path: Path, files: Mapping[str, bytes], blobs: list[Blob]) -> None:
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(files.items()):
            tar.addfile(_member(name, len(data)), io.BytesIO(data))
        for _, blob in sorted({blob.digest: blob for blob in blobs}.items()):
            member = _member(_place(blob), blob.size)
            if blob.data is not None:
                tar.addfile(member, io.BytesIO(blob.data))
                continue
            assert blob.archive is not None
            with blob.archive.open("rb") as source:
                source.seek(blob.offset)
                tar.addfile(member, source)
    part.replace(path)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o644, 0
    return member


def _place(blob: Blob) -> str:
    return "blobs/sha256/" + blob.digest.partition(":")[2]


def _descriptor(blob: Blob, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": blob.digest, "size": blob.size}


def _json_blob(value: object) -> Blob:
    return _blob(_json(value))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _blob(data: bytes) -> Blob:
    return Blob(_digest(data), len(data), data)


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
