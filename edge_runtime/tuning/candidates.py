"""What may be tried: backends and precisions that the profile allows, and layouts that the cores allow. Pure.

Owns: the order. The first engine is what serves without tuning, so that a tune cut short never does worse than none;
then come those that are usually quickest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.profile import BackendChoice

PLAIN = ""
"""The precision of the model itself, which nothing is changed of."""

ROWS = (1, 4, 16, 64)
"""Batch limits tried besides the measured one; between them the rate hardly differs."""

_SPEED = ("int8", "f16", "bf16", PLAIN)
"""Precisions, usually quickest first. Source: ResNet-18 on one machine, 84 images/s in f32, 190 in bf16, 300 to 400 in
int8 (tests/bench/results)."""

_CPU_FLAGS = {
    "bf16": frozenset(("avx512_bf16", "amx_bf16", "bf16")),
    "f16": frozenset(("avx512_fp16", "asimdhp")),
}
"""Where a CPU computes in a precision; elsewhere it would be emulated, or refused. Source: /proc/cpuinfo's names."""

_CAST_ON_CPU = {"openvino": ("bf16", "f16")}
"""Precisions that a backend lowers an f32 model to by itself, on a CPU."""


class Engine(Struct, frozen=True):
    """A backend with its device and precision; PLAIN: the model as it is. Whatever the layout, it answers the same."""

    backend: str
    device: str = ""
    precision: str = PLAIN

    @property
    def key(self) -> str:
        """One word for it, in files and messages."""
        return "-".join(filter(None, (self.backend, self.device.lower(), self.precision or "plain")))


class Layout(Struct, frozen=True):
    """How an engine's runs share the cores; None: what the daemon measures when nothing is said."""

    threads: int | None = None
    instances: int | None = None
    max_batch_rows: int | None = None

    @property
    def key(self) -> str:
        """One word for it."""
        return "-".join("auto" if each is None else str(each) for each in (self.threads, self.instances, self.rows))

    @property
    def rows(self) -> int | None:
        """Short for max_batch_rows."""
        return self.max_batch_rows


MEASURED = Layout()
"""What serves when nobody says anything: one thread a run, all cores for a run that is alone, rows by the curve."""


class Candidate(Struct, frozen=True):
    """One way to serve the model."""

    engine: Engine
    layout: Layout = MEASURED

    @property
    def key(self) -> str:
        """One word for it."""
        return f"{self.engine.key}-{self.layout.key}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be had of one backend here: variants, those that lie in the version or can be made from it.

    has_plain: whether it loads the model itself.
    """

    has_plain: bool
    variants: frozenset[str] = frozenset()


def engines(choices: Sequence[BackendChoice], offers: Mapping[str, Offer], facts: Facts) -> list[Engine]:
    """Engines in the order to be tried; the plain one of the first backend that has one leads.

    choices: the profile's. offers: by backend, for those that are usable here.
    """
    found: list[Engine] = []
    for choice in choices:
        offer = offers.get(choice.name)
        if offer is None:
            continue
        precisions = {*offer.variants, *((PLAIN,) if offer.has_plain else ()), *_casts(choice, offer, facts)}
        found += [Engine(choice.name, choice.device, precision) for precision in _SPEED if precision in precisions]
    unique = list(dict.fromkeys(found))
    first = next((engine for engine in unique if engine.precision == PLAIN), None)
    ranked = sorted(unique, key=lambda engine: _SPEED.index(engine.precision))
    return ranked if first is None else [first, *(engine for engine in ranked if engine != first)]


def thread_layouts(cores: int) -> list[Layout]:
    """Threads and instances, rows left to the curve: measured, one thread a run, all cores a run, and between."""
    shares = [(1, cores), (cores, 1)]
    if cores >= 4:
        shares.append((cores // 2, 2))
    return [MEASURED, *(Layout(threads, instances) for threads, instances in dict.fromkeys(shares))]


def row_layouts(base: Layout, max_rows: int) -> list[Layout]:
    """The same threads and instances with each batch limit up to `max_rows`."""
    return [Layout(base.threads, base.instances, rows) for rows in ROWS if rows <= max_rows]


def _casts(choice: BackendChoice, offer: Offer, facts: Facts) -> set[str]:
    """Precisions that the backend makes of the plain model."""
    if not offer.has_plain:
        return set()
    kind = choice.device.upper().partition(":")[0].partition(".")[0]
    if kind in ("", "CPU"):
        able = _CAST_ON_CPU.get(choice.name, ())
        return {precision for precision in able if _CPU_FLAGS[precision].intersection(facts.cpu_flags)}
    return {"f16"}
