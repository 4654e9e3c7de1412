"""A signed repository of models for tests of devices: whatever is put into it is signed, also what no publisher would.

Owns: one team, one group, and what the group runs. `repository` has the keys, for tests that turn against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_runtime.tensors import Array
from edge_runtime.updates.manifest import Assignment, encode_assignments
from tests.fakes.releases import Made, make_release
from tests.fakes.tuf_repository import TufRepository
from tests.models import onnx_models

TEAM, GROUP = "vision", "line"

X = np.arange(4, dtype=np.float32).reshape(2, 2)
"""The golden input of `adder`."""


class UpdateSite:
    """A repository with the roles `team-vision` and `fleet-line`. `find` is what a server of it answers with."""

    def __init__(self) -> None:
        self.repository = TufRepository()
        self.repository.delegate("targets", f"team-{TEAM}", [f"team/{TEAM}/*/*/*"])
        self.repository.delegate("targets", f"fleet-{GROUP}", [f"fleet/{GROUP}/assign.json"])
        self.repository.publish(f"team-{TEAM}", "targets")
        self._assigned: dict[str, list[tuple[Made, float]]] = {}
        self.assign()

    @property
    def root(self) -> bytes:
        """What devices are shipped with."""
        return self.repository.published["root"][0]

    def find(self, path: str) -> bytes | None:
        """The file at a path below the repository's address."""
        return self.repository.find(path)

    def publish(self, made: Made) -> Made:
        """Let the team sign a release."""
        for name, data in made.files.items():
            self.repository.add_target(f"{made.path.rpartition('/')[0]}/{name}", data, f"team-{TEAM}")
        self.repository.add_target(made.path, made.manifest_data, f"team-{TEAM}")
        self.repository.publish(f"team-{TEAM}", "snapshot", "timestamp")
        return made

    def assign(self, *made: Made, percent: float = 100.0) -> None:
        """Let the group run these: of each model named, these only; with no model, nothing at all."""
        self.assign_shares(*((each, percent) for each in made))

    def assign_shares(self, *shares: tuple[Made, float]) -> None:
        """The same, each for its own percentage."""
        if not shares:
            self._assigned.clear()
        for model in {made.release.model for made, _ in shares}:
            self._assigned[model] = [each for each in shares if each[0].release.model == model]
        entries = [
            Assignment(made.release.model, made.path, made.release.manifest_sha256, percent)
            for several in self._assigned.values()
            for made, percent in several
        ]
        self.repository.add_target(f"fleet/{GROUP}/assign.json", encode_assignments(entries), f"fleet-{GROUP}")
        self.repository.publish(f"fleet-{GROUP}", "snapshot", "timestamp")

    def release(self, made: Made, percent: float = 100.0) -> Made:
        """Publish it and let the group run it."""
        self.publish(made)
        self.assign(made, percent=percent)
        return made

    def write(self, folder: Path) -> Path:
        """The repository as it is now, as files of a mirror or a stick."""
        repository = self.repository
        (folder / "metadata").mkdir(parents=True, exist_ok=True)
        for role, versions in repository.published.items():
            for number, data in enumerate(versions, 1):
                if data:
                    name = f"{role}.json" if role == "timestamp" else f"{number}.{role}.json"
                    (folder / "metadata" / name).write_bytes(data)
        for role in repository.signed:
            if role in ("root", "timestamp", "snapshot"):
                continue
            for path, target in repository.targets(role).targets.items():
                file = folder / "targets" / target.get_prefixed_paths()[0]
                file.parent.mkdir(parents=True, exist_ok=True)
                if not file.exists():
                    file.write_bytes(repository.artifacts[path])
        return folder


def adder(
    folder: Path,
    number: int,
    *,
    adds: float | None = None,
    says: float | None = None,
    counter: int | None = None,
    **others: object,
) -> Made:
    """Release `number` of the model "adder": x FP32 [rows, 2] -> y = x + number.

    adds: another number instead; says: what its golden output says it adds. others: of the manifest.
    """
    added = float(number if adds is None else adds)
    weights = onnx_models.numpy_helper.from_array(np.full(2, added, np.float32), "w")
    data = onnx_models.add_weights(folder, weights).read_bytes()
    claimed = np.float32(added if says is None else says)
    return onnx_release(
        data, {"x": X}, {"y": X + claimed}, model="adder", version=number, counter=counter or number, **others
    )


CHAIN = """
[[step]]
name = "first"
model = "most"
inputs = {x = "input.x"}

[[step]]
name = "second"
model = "rest"
inputs = {x = "first.y"}

[output]
y = "second.y"
"""


def chain(folder: Path, number: int, *, says: float | None = None, **others: object) -> Made:
    """Release `number` of "adder" as a pipeline of two models, which add three quarters of it and the rest.

    So a chain of two releases adds no whole number. says: what its golden output says it adds. others: of the manifest.
    """
    files: dict[str, tuple[str, bytes]] = {}
    for name, share in (("most", 0.75), ("rest", 0.25)):
        weights = onnx_models.numpy_helper.from_array(np.full(2, number * share, np.float32), "w")
        data = onnx_models.add_weights(folder / name, weights).read_bytes()
        files[f"{name}/model.onnx"] = ("onnxruntime", data)
    claimed = np.float32(number if says is None else says)
    golden = ({"x": X}, {"y": X + claimed})
    return make_release(
        files, golden, **{"model": "adder", "version": number, "counter": number, "pipeline": CHAIN, **others}
    )  # type: ignore[arg-type]


def onnx_release(data: bytes, inputs: Mapping[str, Array], outputs: Mapping[str, Array], **others: object) -> Made:
    """A release of one ONNX file. Its declared inputs and outputs have open rows, as the golden ones have some."""
    return make_release({"model.onnx": ("onnxruntime", data)}, (inputs, outputs), **others)  # type: ignore[arg-type]
