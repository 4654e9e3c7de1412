"""Each engine's answers beside those of the model as it is: whether it works, and how much accuracy it gives up.

Owns: which graph each engine loads and where it lies on the bench, and what the model as it is answers. Thread: one
owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import EdgeRuntimeError, LoadFailed
from edge_runtime.repository.digest import sha256_of_file
from edge_runtime.repository.names import variant_of
from edge_runtime.tensors import Array
from edge_runtime.tuning.accuracy import compare
from edge_runtime.tuning.candidates import Engine
from edge_runtime.tuning.engine_artifacts import Artifact, EngineArtifacts
from edge_runtime.tuning.engine_child import Finding
from edge_runtime.tuning.engine_trial import EngineTrial
from edge_runtime.tuning.results import EngineResult
from edge_runtime.tuning.workbench import Workbench


@dataclass(frozen=True, slots=True)
class Judgement:
    """By what engines are judged. inputs: a file of samples. labels: one a sample. scores: as in `Wish`."""

    inputs: Path
    labels: tuple[int, ...] | None
    scores: str | None


class EngineComparison:
    """Compares engines with `first`, the model as it is. root: a folder of our own, for outputs."""

    def __init__(
        self,
        first: Engine,
        described: Finding,
        judgement: Judgement,
        *,
        trial: EngineTrial,
        artifacts: EngineArtifacts,
        bench: Workbench,
        root: Path,
    ) -> None:
        self._first = first
        self._described = described
        self._judgement = judgement
        self._trial = trial
        self._artifacts = artifacts
        self._bench = bench
        self._root = root
        self._laid: dict[Engine, Artifact] = {}
        self._reference: list[dict[str, Array]] | None = None
        self._digests: dict[Path, str] = {}

    def compare(self, engine: Engine) -> EngineResult:
        """Run an engine on all inputs that judge; what is wrong with it is a reason.

        Raises LoadFailed: the model as it is no longer runs. ConfigError: see `accuracy.compare`.
        """
        try:
            graph = self.graph_of(engine)
        except EdgeRuntimeError as error:
            return EngineResult(engine, error.message)
        ran = self._trial.run(engine, graph, self._judgement.inputs, self._root / f"{engine.key}.npz")
        if ran.finding.fault:
            return EngineResult(engine, ran.finding.fault, artifact=graph.name)
        if ran.finding.interface != self._described.interface:
            reason = f"takes and gives {ran.finding.interface}, the model as it is {self._described.interface}"
            return EngineResult(engine, reason, artifact=graph.name)
        datatypes = {form.name: form.datatype for form in ran.finding.outputs}
        reference = self._reference_outputs(engine, ran.outputs)
        judgement = self._judgement
        accuracy = compare(datatypes, reference, ran.outputs, judgement.labels, judgement.scores)
        return EngineResult(engine, "", ran.finding.precision, graph.name, accuracy)

    def artifact_of(self, engine: Engine) -> Artifact:
        """The file that an engine loads, as it lies in the version or was made. Raises EdgeRuntimeError."""
        if engine not in self._laid:
            artifact = self._artifacts.of(engine)
            self._bench.add(artifact.made)
            self._laid[engine] = artifact
        return self._laid[engine]

    def graph_of(self, engine: Engine) -> Path:
        """Where it lies on the bench. Raises EdgeRuntimeError."""
        return self._bench.folder / self.artifact_of(engine).graph.name

    def digest_of(self, engine: Engine) -> str:
        """Of a variant's graph, whether it lies in the version or was made. Raises EdgeRuntimeError.

        "" for the model itself, which is in every result's name.
        """
        graph = self.graph_of(engine)
        if variant_of(graph.name) and graph not in self._digests:
            self._digests[graph] = sha256_of_file(graph)
        return self._digests.get(graph, "")

    def _reference_outputs(self, engine: Engine, outputs: list[dict[str, Array]]) -> list[dict[str, Array]]:
        """What the model as it is answers; run once more where it was compared in an earlier tune."""
        if engine == self._first:
            self._reference = outputs
        if self._reference is None:
            file = self._root / "reference.npz"
            ran = self._trial.run(self._first, self.graph_of(self._first), self._judgement.inputs, file)
            if ran.finding.fault:
                raise LoadFailed(f"{self._first.backend}: {ran.finding.fault}")
            self._reference = ran.outputs
        return self._reference
