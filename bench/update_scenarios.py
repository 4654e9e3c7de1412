"""What an update takes of a device: bytes and time, against what the whole files would be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from bench.scenarios import Bench
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import PreparedRelease, ReleaseOptions, prepare_release
from edge_runtime.publish.roles import add_team
from edge_runtime.updates.fetch import FetchLimits, FolderFetcher, Pacer
from edge_runtime.updates.manifest import encode_manifest
from edge_runtime.updates.releases import Releases
from edge_runtime.updates.repository_view import RepositoryView
from edge_runtime.updates.staging import Staging
from edge_runtime.updates.states import Release
from edge_runtime.updates.store import ArtifactStore, MetadataStore
from edge_runtime.updates.tuf_client import TufClient
from tests.fakes.publishing import Publisher
from tests.fakes.releases import sha256
from tests.models.onnx_models import save

LAYERS, CHANGED_LAYERS, WIDTH = 25, 4, 680
"""46 MB of fp32, as ResNet-18 has; its last 16 % are a version's own."""


def update_patch(bench: Bench) -> None:
    """A device that has one version gets the next, whose last layers are other ones: bytes and time of its patch."""
    publisher = Publisher(bench.children.folder / "repository").found()
    publisher.carry_out(lambda repository: add_team(repository, "vision", NewKeys(is_online=True)))
    old, new = (_publish(publisher, bench.children.folder, version) for version in (1, 2))
    whole_bytes = sum(artifact.length for artifact in new.manifest.artifacts)
    for number in bench.rounds("update_patch"):
        device = _Device(bench.children.folder / f"device-{number}", publisher)
        device.install(old)
        started_s = time.perf_counter()
        device.install(new)
        bench.figures.add("update.patch.install_s", time.perf_counter() - started_s)
        bench.figures.add("update.patch.fetched_ratio", device.fetched_bytes / whole_bytes)


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"update_patch": update_patch}


# ---- private --------------------------------------------------------------------------------------------------------


class _Device:
    """What of a device brings a release's files here, over a folder as from a stick: no network is measured."""

    def __init__(self, folder: Path, publisher: Publisher) -> None:
        store = ArtifactStore(folder / "artifacts")
        self._releases = Releases(folder / "releases", store)
        client = TufClient(
            FolderFetcher(publisher.path / "metadata"),
            MetadataStore(folder / "metadata"),
            now_utc=datetime.now(timezone.utc),
            bootstrap=publisher.root_1,
        )
        client.refresh()
        targets = FolderFetcher(publisher.path / "targets")
        self.fetched_bytes = 0
        pacer = Pacer(FetchLimits(total_s=60.0))
        self._staging = Staging(RepositoryView(client, targets, store, pacer), pacer)

    def install(self, prepared: PreparedRelease) -> None:
        """Fetch what is missing and lay the release out, durably."""
        manifest, data = prepared.manifest, encode_manifest(prepared.manifest)
        chosen = self._staging.stage(manifest, (".onnx",), self._releases.artifacts(), self)
        release = Release(manifest.model, manifest.version, manifest.release_counter, sha256(data))
        self._releases.lay_out(release, data, chosen)

    def show_bytes(self, done_bytes: int, _: int) -> None:
        """Note how much is fetched."""
        self.fetched_bytes = done_bytes


def _publish(publisher: Publisher, folder: Path, version: int) -> PreparedRelease:
    _write_model(folder / "models" / "resnet" / str(version), version)
    with publisher.opened() as repository:
        prepared = prepare_release(repository, ReleaseOptions("vision", folder / "models" / "resnet", version=version))
        prepared.change.commit()
    return prepared


def _write_model(folder: Path, version: int) -> None:
    nodes, weights, name = [], [], "x"
    for layer in range(LAYERS):
        is_own = layer >= LAYERS - CHANGED_LAYERS
        random = np.random.default_rng((layer, version if is_own else 0))
        matrix = random.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        result = "y" if layer == LAYERS - 1 else f"h{layer}"
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [result]))
        name = result
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in "xy"]
    save(folder, helper.make_graph(nodes, "graph", tensors[:1], tensors[1:], weights))
