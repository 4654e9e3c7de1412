"""Conversions by processes that find PyTorch imported, as a daemon's do: it takes seconds, a small model tenths.

Each is forked and confined for itself. What `edge-runtime convert` starts anew for each is tested beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from edge_runtime.hosts.hosts import Hosts
from edge_runtime.sandbox.child import ChildFunction, Show, TaskT
from edge_runtime.sandbox.ending import ChildLimits, Ending, ResultT, ShowProgress
from edge_runtime_converters import preparation
from edge_runtime_converters.comparison import Report
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.formats import SourceFormat
from edge_runtime_converters.options import ConversionOptions

EXTRAS = {
    SourceFormat.PYTORCH: "convert-pytorch",
    SourceFormat.TORCHSCRIPT: "convert-pytorch",
    SourceFormat.KERAS: "convert-keras",
}

_LATER = (
    "torch.export.pt2_archive", "torch._functorch.aot_autograd", "torch._inductor.fx_passes",
    "torch.onnx._internal.exporter._core", "onnxscript.function_libs.torch_lib.ops", "openvino", "nncf",
)  # fmt: skip
"""What conversions from PyTorch import only when they come to it."""


def prepare(extra: str) -> None:
    """Import what conversions of an extra need, in the process that forks them."""
    preparation.prepare(extra)
    for module in _LATER:
        with contextlib.suppress(ImportError):  # the conversion that needs it says so
            import_module(module)


class PreparedConversions:
    """Converts one model after the other."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def convert(self, options: ConversionOptions, source_format: SourceFormat) -> Report:
        """Convert as `conversion.convert` does. source_format: one of EXTRAS. Raises ConversionFailed."""

        def run(
            function: ChildFunction[TaskT, ResultT],
            task: TaskT,
            *,
            limit_s: float,
            reads: Sequence[Path],
            writes: Sequence[Path],
            show: Show | None,
        ) -> Ending[ResultT]:
            return self._hosts.call(
                function,
                task,
                prepare=prepare,
                what=EXTRAS[source_format],
                limits=ChildLimits(limit_s=limit_s),
                reads=reads,
                writes=writes,
                show=show,
            )

        return convert(options, run=run)


def _nothing(_: str, __: ShowProgress) -> None:
    """Only let the process be there that imports for all."""


@contextlib.contextmanager
def prepared_conversions() -> Iterator[PreparedConversions]:
    """Conversions until the end of the context."""
    hosts = Hosts(parent_idle_s=3600.0)
    try:
        if find_spec("torch") is not None:
            hosts.call(
                _nothing, "", prepare=prepare, what=EXTRAS[SourceFormat.PYTORCH], limits=ChildLimits(limit_s=300.0)
            )
        yield PreparedConversions(hosts)
    finally:
        hosts.close()
