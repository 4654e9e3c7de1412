"""The candidates of a tune: backends and precisions that the profile allows, and layouts that the cores allow. Pure.

Owns: the order. The first way serves without tuning, so that a tune cut short is never worse than none; the ways that
are usually quickest follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.profile import BackendChoice

PLAIN = ""
"""The precision of the unchanged model."""

ROWS = (1, 4, 16, 64)
"""Batch limits tried besides the measured one; between them the rate hardly differs."""

_SPEED = ("int8", "f16", "bf16", PLAIN)
"""Precisions, usually quickest first. Source: ResNet-18 on one machine, 84 images/s in f32, 190 in bf16, 300 to 400 in
int8 (bench/results)."""

_CPU_FLAGS = {
    "bf16": frozenset(("avx512_bf16", "amx_bf16", "bf16")),
    "f16": frozenset(("avx512_fp16", "asimdhp")),
}
"""CPUs that compute in a precision; others emulate or refuse it. Source: /proc/cpuinfo's names."""

_CAST_ON_CPU = {"openvino": ("bf16", "f16")}
"""Precisions that a backend lowers an f32 model to by itself, on a CPU."""


class Way(Struct, frozen=True):
    """One way to compute a model: a backend with its device and precision. Its answers do not depend on the layout."""

    backend: str
    device: str = ""
    precision: str = PLAIN

    @property
    def key(self) -> str:
        """Its name in files and messages, one word."""
        return "-".join(filter(None, (self.backend, self.device.lower(), self.precision or "plain")))


class ThreadLayout(Struct, frozen=True):
    """How runs share the cores; None: the value that the daemon measures by itself."""

    threads: int | None = None
    instances: int | None = None
    max_batch_rows: int | None = None

    @property
    def key(self) -> str:
        """Its name, one word."""
        values = (self.threads, self.instances, self.max_batch_rows)
        return "-".join("auto" if each is None else str(each) for each in values)


MEASURED = ThreadLayout()
"""The daemon's own layout: one thread a run, all cores for a run that is alone, rows by the curve."""


class Candidate(Struct, frozen=True):
    """A way and a layout: what a tune times, and what it chooses."""

    way: Way
    layout: ThreadLayout = MEASURED

    @property
    def key(self) -> str:
        """Its name, one word."""
        return f"{self.way.key}-{self.layout.key}"


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer of one backend. variants: precisions that the version has, or that can be made from it.

    has_plain: whether it loads the unchanged model.
    """

    has_plain: bool
    variants: frozenset[str] = frozenset()


def ways(choices: Sequence[BackendChoice], offers: Mapping[str, Offer], facts: Facts) -> list[Way]:
    """Ways in the order to try them; the plain one of the first backend that has one leads.

    choices: the profile's. offers: by backend, for the usable ones.
    """
    found: list[Way] = []
    for choice in choices:
        offer = offers.get(choice.name)
        if offer is None:
            continue
        precisions = {*offer.variants, *((PLAIN,) if offer.has_plain else ()), *_casts(choice, offer, facts)}
        found += [Way(choice.name, choice.device, precision) for precision in _SPEED if precision in precisions]
    unique = list(dict.fromkeys(found))
    first = next((way for way in unique if way.precision == PLAIN), None)
    ranked = sorted(unique, key=lambda way: _SPEED.index(way.precision))
    return ranked if first is None else [first, *(way for way in ranked if way != first)]


def thread_layouts(cores: int) -> list[ThreadLayout]:
    """Threads and instances, rows left to the curve: measured, one thread a run, all cores a run, and between."""
    shares = [(1, cores), (cores, 1)]
    if cores >= 4:
        shares.append((cores // 2, 2))
    return [MEASURED, *(ThreadLayout(threads, instances) for threads, instances in dict.fromkeys(shares))]


def row_layouts(base: ThreadLayout, max_rows: int) -> list[ThreadLayout]:
    """The same threads and instances with each batch limit up to `max_rows`."""
    return [ThreadLayout(base.threads, base.instances, rows) for rows in ROWS if rows <= max_rows]


def _casts(choice: BackendChoice, offer: Offer, facts: Facts) -> set[str]:
    """Precisions that the backend makes of the plain model."""
    if not offer.has_plain:
        return set()
    kind = choice.device.upper().partition(":")[0].partition(".")[0]
    if kind in ("", "CPU"):
        able = _CAST_ON_CPU.get(choice.name, ())
        return {precision for precision in able if _CPU_FLAGS[precision].intersection(facts.cpu_flags)}
    return {"f16"}
