"""One form of a model's steps, or one function of several, as an instance of its own: it lives in the model's host.

Thread: as `HostInstance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edge_runtime.backends.base import HostStatus, OnEnd, RunOwner
from edge_runtime.model_spec import ModelSpec
from edge_runtime.steps import Form
from edge_runtime.tensors import Array, Tensors

if TYPE_CHECKING:
    from edge_runtime.hosts.host_run import HostRun
    from edge_runtime.hosts.instance import HostInstance


class FormInstance:
    """A model asked in one form of its steps, or one function of several: the same host and runners, other tensors."""

    def __init__(self, model: HostInstance, number: int, spec: ModelSpec) -> None:
        self.spec = spec
        self._model = model
        self._number = number

        self.forms: dict[Form, FormInstance] = {}
        self.backend, self.device, self.precision = model.backend, model.device, model.precision
        self.concurrency, self.ahead = model.concurrency, model.ahead
        self.memory_bytes = 0  # the model's own

    @property
    def hands_over(self) -> bool:
        """Whether large results go where the host of a pipeline's next step reads them; one setting for all forms."""
        return self._model.hands_over

    @hands_over.setter
    def hands_over(self, value: bool) -> None:
        self._model.hands_over = value

    @property
    def host(self) -> HostStatus:
        """The status of its host now."""
        return self._model.host

    def room(self, nbytes: int) -> Array | None:
        """Memory that the model's host maps."""
        return self._model.room(nbytes)

    def finish_warm_up(self) -> None:
        """End the warm-up of the model's host. Raises LoadFailed: it died too often."""
        self._model.finish_warm_up()

    def restore(self) -> None:
        """Wait until the model's host can run again. Raises LoadFailed."""
        self._model.restore()

    def bind(self, max_rows: int) -> None:
        """Return None, as a host does."""

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once, as HostInstance does; all outputs."""
        del outputs
        parts = [[np.asarray(inputs[spec.name]) for spec in self.spec.inputs]]
        return self._model.run_for_load(parts, form=self._number)

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool = False) -> list[Array]:
        """Run requests of this form together. Raises RunFailed, RunTooLong, HostEnded."""
        return self._model.run_parts(parts, limit_s, alone=alone, form=self._number)

    @property
    def begins(self) -> bool:
        """Whether runs may be begun."""
        return self._model.begins

    def begin(self, parts: Sequence[Sequence[Array]], limit_s: float, owner: RunOwner, on_end: OnEnd) -> HostRun:
        """Begin a run of this form, as `HostedInstance.begin`."""
        return self._model.begin(parts, limit_s, owner, on_end, form=self._number)

    def close(self) -> None:
        """Nothing: the model's own instance ends the host."""
