"""When an engine is built while another backend serves: load it beside, hold it to what serves, swap.

Owns: which engines wait for the end of an exchange. Thread: the loader's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from edge_runtime.backends.base import Instance
from edge_runtime.errors import BackendError, LoadFailed
from edge_runtime.repository.folder import ModelFolder, VersionFolder
from edge_runtime.serving.exchange_bench import ExchangeBench
from edge_runtime.serving.folder_models import FolderModels
from edge_runtime.serving.loading import Loaded
from edge_runtime.serving.servables import Standing, State
from edge_runtime.serving.warmup import make_inputs
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

SAME_PRECISION_DIFFERENCE = 0.01
"""Of the largest value: what other kernels in f32 differ by is below 1e-3 for ResNet-50, and another answer is not."""

OTHER_PRECISION_DIFFERENCE = 0.25
"""The same where one runs in fewer bits, as its owner asked for: what is found is garbage, not a loss of accuracy."""

MEANWHILE = ("onnxruntime", "openvino")
"""Backends that serve the same model while its engine is built, and stand one more caller."""

_WAITING = (State.READY, State.BUILDING)


class Takeovers:
    """Lets built engines take over. refuse(artifact, reason): an engine that is not to be used."""

    def __init__(self, bench: ExchangeBench, folders: FolderModels, refuse: Callable[[str, str], None]) -> None:
        self._bench = bench
        self._folders = folders
        self._refuse = refuse
        self._held: dict[str, str] = {}

    def progress(self, artifact: str, words: str) -> None:
        """Say in the live table how far a build is."""
        for _, _, standing in self._waiting_for(artifact):
            self._bench.servables.stand(replace(standing, reason=f"tensorrt: {words}"))

    def done(self, artifact: str, fault: str) -> None:
        """A build ended; fault: why there is no engine, "" where there is."""
        for folder, version, standing in list(self._waiting_for(artifact)):
            if folder.name in self._bench.placement.held:
                # An update is observed: what is measured of it must not change under way.
                self._held[artifact] = fault
            elif fault and standing.state is State.READY:
                self._bench.servables.stand(replace(standing, reason=f"tensorrt: {fault}"))
            else:
                self._load(folder, version, artifact)

    def resume(self) -> None:
        """An exchange ended: let those take over that waited for it."""
        held, self._held = self._held, {}
        for artifact, fault in held.items():
            self.done(artifact, fault)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _waiting_for(self, artifact: str) -> Iterator[tuple[ModelFolder, VersionFolder, Standing]]:
        for standing in self._bench.servables.standings():
            folder = self._bench.folder_of(standing.model)
            version = folder.versions.get(standing.number) if folder is not None else None
            if folder is None or version is None or standing.state not in _WAITING:
                continue
            if any(str(path.absolute()) == artifact for path in version.files.values()):
                yield folder, version, standing

    def _load(self, folder: ModelFolder, version: VersionFolder, artifact: str) -> None:
        """Load it beside what serves, swap; where it is not taken, what serves goes on."""

        def hold_to_account(loaded: Loaded) -> None:
            old = self._bench.servables.find(folder.name, version.number)
            if old is None or not _are_comparable(old.layouts.narrow, loaded.servable.layouts.narrow):
                return
            try:
                compare(old.layouts.narrow, loaded)
            except LoadFailed as error:
                self._refuse(artifact, error.message)
                raise

        self._bench.lifecycle.load_or_report(folder, version, check=hold_to_account)
        if folder.name not in self._bench.releases:
            # An older version may have answered for it until now.
            self._folders.settle(folder.name)


def _are_comparable(old: Instance, new: Instance) -> bool:
    """Whether two instances run the same model, and the old one may be asked beside those who use it.

    An engine that is replaced by another is of files that changed since; `model.py` is another model altogether.
    """
    if new.backend != "tensorrt" or old.backend not in MEANWHILE:
        return False
    names = [
        ([tensor.name for tensor in each.spec.inputs], [tensor.name for tensor in each.spec.outputs])
        for each in (old, new)
    ]
    return names[0] == names[1]


def compare(old: Instance, loaded: Loaded) -> None:
    """Hold a new instance's answers to those of what serves, on made-up inputs. Raises LoadFailed: they differ."""
    new = loaded.servable.layouts.narrow
    first = loaded.first_runs
    if not first.times:
        return
    inputs = make_inputs(new.spec, 1, first.length, loaded.servable.settings.warmup.shapes)
    try:
        expected, got = old.run(inputs), new.run(inputs)
    except BackendError as error:
        raise LoadFailed(f"its engine could not be held to what serves: {error.message}") from error
    is_same = old.precision == new.precision
    allowed = SAME_PRECISION_DIFFERENCE if is_same else OTHER_PRECISION_DIFFERENCE
    for tensor, want, have in zip(new.spec.outputs, expected, got, strict=True):
        found = difference(want, have)
        if found > allowed:
            raise LoadFailed(
                f"its engine answers otherwise than what serves: output {tensor.name!r} differs by {found:.1%} of its "
                f"largest value, allowed {allowed:.0%}; what serves goes on"
            )


def difference(want: Array, have: Array) -> float:
    """Largest difference as a share of the largest value; infinite where shapes differ or numbers are none. Pure.

    Integers are not compared: a class that changes by a rounding is no fault.
    """
    if want.shape != have.shape:
        return float("inf")
    if want.dtype.kind != "f" or have.dtype.kind != "f" or not want.size:
        return 0.0
    left, right = want.astype(np.float64), have.astype(np.float64)
    if not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return float("inf")
    finite = np.isfinite(left)
    scale = float(np.max(np.abs(left), initial=0.0, where=finite))
    largest = float(np.max(np.abs(left - right), initial=0.0, where=finite))
    return largest / max(scale, 1e-6)
