"""Rate against latency of the candidates measured at the objective, as SVG. Pure: results in, text out.

Written by hand: axes, lines and labels are a page of code, and a plotting library takes tens of MB on a device. Colours
follow the reader's light or dark background.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.results import FullMeasurement

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 52
COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5")

_HEAD = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'

_SUBTITLE = (
    "99th percentile of latency by rate of requests, which come at random; full dots: highest rate within the objective"
)

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 } .small { font-size: 12px; fill: #57606a }
.back { fill: #ffffff } .grid { stroke: #d8dee4 } .axis { stroke: #57606a }
.slo { stroke: #cf222e; stroke-dasharray: 6 4 }
.line { fill: none; stroke-width: 1.8 } .chosen { stroke-width: 3.4 } .slo-text { fill: #cf222e }
.c0 { stroke: #0969da } .c1 { stroke: #8250df } .c2 { stroke: #1a7f37 } .c3 { stroke: #bf8700 } .c4 { stroke: #bf3989 }
.c5 { stroke: #6e7781 } circle { fill: #ffffff; stroke-width: 1.8 } .best { fill: currentColor }
@media (prefers-color-scheme: dark) {
 text { fill: #e6edf3 } .small { fill: #9198a1 } .back { fill: #0d1117 } .grid { stroke: #21262d }
 .axis { stroke: #9198a1 } .slo { stroke: #ff7b72 } .slo-text { fill: #ff7b72 } circle { fill: #0d1117 }
 .c0 { stroke: #58a6ff }
 .c1 { stroke: #bc8cff } .c2 { stroke: #3fb950 } .c3 { stroke: #d29922 } .c4 { stroke: #f778ba } .c5 { stroke: #9198a1 }
}
"""


@dataclass(frozen=True, slots=True)
class PlottedRates:
    """One candidate's line: (rate, p99 seconds) of each probe, and of the best one, if it has any."""

    label: str
    points: tuple[tuple[float, float], ...]
    best: tuple[float, float] | None
    is_chosen: bool


def line_of(full: FullMeasurement, label: str, *, is_chosen: bool) -> PlottedRates:
    """A candidate's probes by rate."""
    points = tuple(sorted((probe.rate, probe.p99_s) for probe in full.probes if probe.p99_s > 0))
    best = (full.rate, full.p99_s) if full.rate else None
    return PlottedRates(label, points, best, is_chosen)


def draw(title: str, objective: Objective, lines: Sequence[PlottedRates]) -> str:
    """The picture as SVG. lines: in the order of their colours; without points only axes are drawn."""
    rates = [rate for line in lines for rate, _ in line.points] or [1.0]
    times = [p99_s for line in lines for _, p99_s in line.points] + [objective.limit_s]
    across = _Linear(0.0, max(rates) * 1.05, LEFT, WIDTH - RIGHT)
    # Latencies far beyond the objective only need to show that they are beyond.
    highest = min(max(times), objective.limit_s * 8)
    down = _Logarithmic(min(times) * 0.8, max(highest, objective.limit_s) * 1.25, HEIGHT - BOTTOM, TOP)
    parts = [
        _HEAD + f' role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        f'<text class="small" x="{LEFT}" y="42">{_SUBTITLE}</text>',
        *_axes(across, down),
        *_objective(objective, down),
        *(piece for number, line in enumerate(lines) for piece in _line(line, number, across, down)),
        *_legend(lines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ---- private --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Linear:
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        step = 10 ** math.floor(math.log10(self.high))
        while self.high / step < 5:
            step /= 2 if f"{step:e}"[0] == "1" else 2.5 if f"{step:e}"[0] == "5" else 2
        return [step * number for number in range(int(self.high / step) + 1)]


@dataclass(frozen=True, slots=True)
class _Logarithmic:
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.start + min(share, 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1.0, 2.0, 5.0)
        return [s * 10.0**p for p in powers for s in steps if self.low <= s * 10.0**p <= self.high]


def _axes(across: _Linear, down: _Logarithmic) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts: list[str] = []
    for tick in down.ticks():
        y = down.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * 1e3:g}</text>')
    for tick in across.ticks():
        x = across.place(tick)
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{bottom}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">requests/s</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">p99, ms</text>')
    return parts


def _objective(objective: Objective, down: _Logarithmic) -> list[str]:
    y, right = down.place(objective.limit_s), WIDTH - RIGHT
    return [
        f'<line class="slo" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="slo-text" x="{right}" y="{y - 6:.1f}" text-anchor="end">{escape(str(objective))}</text>',
    ]


def _line(plotted: PlottedRates, number: int, across: _Linear, down: _Logarithmic) -> list[str]:
    if not plotted.points:
        return []
    colour = COLOURS[number % len(COLOURS)]
    chosen = " chosen" if plotted.is_chosen else ""
    places = [(across.place(rate), down.place(p99_s)) for rate, p99_s in plotted.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="line {colour}{chosen}" points="{line}"/>']
    parts += [f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    if plotted.best is not None:
        x, y = across.place(plotted.best[0]), down.place(plotted.best[1])
        # A stroke as wide as the circle makes a full dot in the line's colour.
        parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="stroke-width: 7"/>')
    return parts


def _legend(lines: Sequence[PlottedRates]) -> list[str]:
    parts: list[str] = []
    for number, line in enumerate(lines):
        y, colour = TOP + 16 + number * 19, COLOURS[number % len(COLOURS)]
        weight = ' font-weight="600"' if line.is_chosen else ""
        label = f"{line.label}{' (chosen)' if line.is_chosen else ''}"
        thick = " chosen" if line.is_chosen else ""
        parts.append(
            f'<line class="line {colour}{thick}" x1="{LEFT + 12}" x2="{LEFT + 36}" y1="{y - 4}" y2="{y - 4}"/>'
        )
        parts.append(f'<text x="{LEFT + 44}" y="{y}"{weight}>{escape(label)}</text>')
    return parts
