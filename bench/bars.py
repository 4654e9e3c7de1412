# ruff: noqa: RUF001 (a table for people writes the signs of multiplication and subtraction as they are)
"""The bars: what each figure must reach, and the table and JSON file that say whether it did."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MAX_GENERATOR_SHARE = 0.8
"""Above this share of its own maximum the generator may be what limits a rate."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure and its bound. `rounds` says what stands for all rounds: losses are summed, the rest are medians."""

    figure: str
    what: str
    sign: Literal["≥", "≤", "=", ""] = ""
    bound: float = 0.0
    reach: float | None = None
    unit: str = ""
    rounds: Literal["median", "sum"] = "median"

    def is_met(self, value: float) -> bool | None:
        """None when the figure is only reported."""
        if not self.sign:
            return None
        return {"≥": value >= self.bound, "≤": value <= self.bound, "=": value == self.bound}[self.sign]


@dataclass(slots=True)
class Figures:
    """What was measured: figure -> one value a round, and sentences about single scenarios."""

    values: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, figure: str, value: float) -> None:
        """One round's value."""
        self.values.setdefault(figure, []).append(float(value))

    def note(self, scenario: str, sentence: str) -> None:
        """Something a reader should know, once."""
        if sentence not in self.notes.setdefault(scenario, []):
            self.notes[scenario].append(sentence)

    def median(self, figure: str) -> float:
        """Over the rounds so far."""
        return statistics.median(self.values[figure])


def _before_bars() -> list[Bar]:
    depths = {"mlp": (1, 16, 64, 256), "small5ms": (1, 16, 64), "mobilenetv2": (1, 16, 64), "resnet18": (16,)}
    return [
        Bar(f"before.{name}.{in_flight}.{figure}", f"{name}, {in_flight} in flight: {what}, now ÷ before", sign, bound)
        for name, every in depths.items()
        for in_flight in every
        for figure, what, sign, bound in (
            ("rate_ratio", "rate", "≥", 0.98),
            ("p50_ratio", "p50", "", 0.0),
            ("cpu_ratio", "CPU a request", "", 0.0),
        )
    ]


def _mlp_bars() -> list[Bar]:
    bars = []
    for in_flight, rate, rate_reach, p99, p99_reach in (
        (1, 0.8, 0.9, 1.3, 1.1),
        (16, 0, 0, 0, 0),
        (64, 0.72, 0.85, 0, 0),
        (256, 0.65, 0.8, 1.8, 1.3),
    ):
        name = f"mlp, {in_flight} in flight"
        sign: Literal["≥", ""] = "≥" if rate else ""
        bars.append(Bar(f"mlp.{in_flight}.rate_ratio", f"{name}: rate ÷ bare loop", sign, rate, rate_reach or None))
        if in_flight == 64:
            bars.append(Bar("mlp.64.rate", f"{name}: rate (idle machine)", "≥", 100_000, 170_000, "/s"))
        else:
            bars.append(Bar(f"mlp.{in_flight}.rate", f"{name}: rate", unit="/s"))
        bars.append(
            Bar(f"mlp.{in_flight}.p99_ratio", f"{name}: p99 ÷ bare loop's", "≤" if p99 else "", p99, p99_reach or None)
        )
        bars.append(Bar(f"mlp.{in_flight}.p50_ratio", f"{name}: p50 ÷ bare loop's"))
    bars.append(Bar("generator.max", "generator's own maximum, small frames, against an echo", unit="/s"))
    bars.append(Bar("generator.share", "highest rate measured ÷ that maximum", "≤", MAX_GENERATOR_SHARE))
    return bars


def _pipeline_bars() -> list[Bar]:
    what = "pipeline of three at 2 × capacity, 500 ms"
    return [
        Bar("pipelines.tiny.ratio", "three tiny steps in a chain ÷ asked one after another, 64 in flight", "≥", 2.0),
        Bar("pipelines.tiny.rate", "three tiny steps in a chain, 64 in flight: rate", unit="/s"),
        Bar("pipelines.picture.ratio", "decode, resize, MobileNetV2, top-k: p50 ÷ sum of the steps' runs", "≤", 1.15),
        Bar("pipelines.picture.p50_ms", "decode, resize, MobileNetV2, top-k, one at a time: p50", unit="ms"),
        Bar("pipelines.hop_ms", "600 KB from the end of a step in a host to the next one", "≤", 0.15, None, "ms"),
        Bar("pipelines.overload.goodput_ratio", f"{what}: goodput ÷ capacity", "≥", 0.9),
        Bar("pipelines.overload.ran_and_expired", f"{what}: share that ran a step and was not answered", "≤", 0.03),
        Bar("pipelines.overload.neither", f"{what}: requests without a reply", "=", 0, rounds="sum"),
        Bar("pipelines.reloads.done", "reloads of a step under load"),
        Bar("pipelines.reloads.failed", "pipeline requests lost or failed during them", "=", 0, rounds="sum"),
    ]


def _image_bars() -> list[Bar]:
    bars = []
    for name in ("mobilenetv2", "resnet18"):
        for in_flight in (16, 64):
            what = f"{name}, 600 KB frames, {in_flight} in flight: served ÷ best layout"
            bars.append(Bar(f"images.{name}.{in_flight}.ratio", what, "≥", 0.82, 0.92))
        what = f"{name}, one at a time: p50 ÷ raw run of the same layout"
        bars.append(Bar(f"images.{name}.1.p50_ratio", what, "≤", 1.25, 1.10))
    bars.append(Bar("images.generator.max", "generator's own maximum, 600 KB frames", unit="/s"))
    bars.append(Bar("images.generator.share", "highest rate with such frames ÷ that maximum", "≤", MAX_GENERATOR_SHARE))
    return bars


def _shared_bars() -> list[Bar]:
    bars = []
    for in_flight in (16, 64):
        what = f"mobilenetv2, 600 KB, {in_flight} in flight"
        bars.append(Bar(f"shared.{in_flight}.frames_ratio", f"{what}, in frames: served ÷ best layout", "≥", 0.91))
        bars.append(
            Bar(f"shared.{in_flight}.shared_ratio", f"{what}, in shared memory: served ÷ best layout", "≥", 0.95, 0.98)
        )
        bars.append(Bar(f"shared.{in_flight}.gain", f"{what}: rate, shared memory ÷ frames"))
    bars.append(Bar("shared.1.p50_gain", "mobilenetv2, 600 KB, one at a time: p50, frames ÷ shared memory"))
    what = "mobilenetv2 in shared memory, 500 ms, 2 × capacity"
    bars.append(Bar("shared.overload.goodput_ratio", f"{what}: goodput ÷ capacity", "≥", 0.98))
    bars.append(Bar("shared.overload.refused_p99_ms", f"{what}: refusals' p99", "≤", 4, None, "ms"))
    bars.append(Bar("shared.overload.neither", f"{what}: neither answered nor refused", "=", 0, rounds="sum"))
    return bars


def _host_bars() -> list[Bar]:
    bars = []
    for name, bound in (("small5ms", 0.95), ("mobilenetv2", 0.91), ("resnet18", 0.91)):
        for in_flight in (16, 64):
            key, what = f"hosts.{name}.{in_flight}", f"{name} in a host, {in_flight} in flight, frames"
            bars.append(Bar(f"{key}.ratio", f"{what}: served ÷ best layout that batches alike", "≥", bound))
            bars.append(Bar(f"{key}.inside_ratio", f"{what}: served ÷ inside the daemon", "≥", 1.0))
        sign: Literal["≤", ""] = "≤" if name == "mobilenetv2" else ""
        bars.append(Bar(f"hosts.{name}.1.p50_ratio", f"{name} in a host, one at a time: p50 ÷ raw run", sign, 1.08))
        bars.append(Bar(f"hosts.{name}.1.added_ms", f"{name} in a host, one at a time: p50 − raw run", unit="ms"))
    killed, memory = "hosts.killed", "hosts.memory"
    return [
        *bars,
        Bar("hosts.mlp.64.inline_ratio", "mlp forced into a host, 64 in flight: rate ÷ inline", "≥", 0.65),
        Bar("hosts.mlp.64.rate", "mlp forced into a host, 64 in flight: rate", unit="/s"),
        Bar("hosts.mlp.1.inline_ratio", "mlp forced into a host, one at a time: rate ÷ inline"),
        Bar(f"{killed}.lost", "a host killed under load: requests lost", "=", 0, rounds="sum"),
        Bar(f"{killed}.failed", "the same: requests failed", "=", 0, rounds="sum"),
        Bar(f"{killed}.others_failed", "the same: other model's requests lost or failed", "=", 0, rounds="sum"),
        Bar(f"{killed}.back_s", "a host killed under load: until it serves again, median", "≤", 0.2, None, "s"),
        Bar(f"{killed}.worst_s", "the same: the worst", "≤", 0.6, None, "s"),
        Bar(f"{memory}.onnxruntime.private_mib", "a host with mlp, ONNX Runtime: private", "≤", 12, None, "MiB"),
        Bar(f"{memory}.openvino.private_mib", "a host with mlp, OpenVINO: private", "≤", 15, None, "MiB"),
        Bar(f"{memory}.onnxruntime.pss_mib", "daemon and children, mlp in a host: PSS", unit="MiB"),
        Bar(f"{memory}.openvino.pss_mib", "the same with OpenVINO: PSS", unit="MiB"),
        Bar(f"{memory}.idle_pss_mib", "idle with mlp, daemon and all its children: PSS", "≤", 60, None, "MiB"),
        Bar("hosts.shared.pss_mib", "100 quiet models in shared hosts, with the daemon: PSS", "≤", 130, None, "MiB"),
        Bar("hosts.shared.processes", "the same: processes", "≤", 6),
        Bar("hosts.shared.ready_s", "the same: from the start until all are ready", "≤", 2, None, "s"),
        Bar("hosts.alone.pss_mib", "100 models, each in a host of its own, with the daemon: PSS", unit="MiB"),
        Bar("hosts.alone.processes", "the same: processes"),
        Bar("hosts.alone.ready_s", "the same: from the start until all are ready", unit="s"),
        Bar("hosts.cold.mlp_s", "cold start to first answer, mlp in a host", unit="s"),
        Bar("hosts.cold.mobilenetv2_s", "cold start to first answer, mobilenetv2 in a host", "≤", 0.5, None, "s"),
    ]


def _triton_bars() -> list[Bar]:
    what = "identity TritonPythonModel"
    return [
        Bar("triton_python.64.ratio", f"{what}, 64 in flight: rate ÷ identity model.py of ours", "≥", 0.85),
        Bar("triton_python.64.rate", f"{what}, 64 in flight: rate", unit="/s"),
        Bar("triton_python.1.ratio", f"{what}, one at a time: rate ÷ identity model.py of ours"),
        Bar("triton_python.1.rate", f"{what}, one at a time: rate", unit="/s"),
    ]


def _tree_bars() -> list[Bar]:
    what = "XGBoost of 500 trees, 64 in flight, one row each"
    return [
        Bar("trees.ratio", f"{what}: rate ÷ XGBoost's predict of 32 rows, its best threads", "≥", 0.8),
        Bar("trees.rate", f"{what}: rate", unit="/s"),
        Bar("trees.raw", "XGBoost's predict of 32 rows in process: rows", unit="/s"),
        Bar("trees.callers_ratio", f"{what}: rate ÷ XGBoost's, called by a thread for each core"),
        Bar("trees.operator_ratio", "the same trees in ONNX Runtime ÷ XGBoost, 32 unlike rows, one core: rows"),
        Bar("trees.p99_ms", f"{what}: p99", unit="ms"),
    ]


def _language_bars() -> list[Bar]:
    what = "language model, 88 M parameters, SSE"
    bars = []
    for streams, bound in ((1, 0.95), (4, 0.95), (8, 0.90)):
        name = f"{what}, streams: {streams}"
        bars.append(Bar(f"language.{streams}.ratio", f"{name}: tokens a second ÷ the library's own", "≥", bound))
        bars.append(Bar(f"language.{streams}.tokens_s", f"{name}: tokens", unit="/s"))
    over, again = "2 × what it can write, with deadlines", "64 clients that ask again at once, with deadlines"
    bars += [
        Bar("language.cpu_ratio", f"{what}: tokens of a CPU second, 4 streams ÷ one", "≥", 3.0),
        Bar("language.cpu_tokens", f"{what}, 4 streams: tokens of a CPU second"),
        Bar("language.newcomer.p99_ratio", "1 024 tokens join 4 streams: p99 of a step ÷ (budget + step)", "≤", 2.0),
        Bar("language.newcomer.p99_ms", "the same: p99", unit="ms"),
        Bar("language.close_steps", "steps from a closed connection to its slot in use again, worst", "≤", 2),
        Bar("language.overload.goodput_ratio", f"{over}: tokens of answers in time ÷ capacity", "≥", 0.9),
        Bar("language.overload.first_in_time", f"{over}: admitted whose first token was in time", "≥", 0.99),
        Bar("language.overload.refused_p99_ms", f"{over}: refusals, p99", "≤", 20, unit="ms"),
        Bar("language.overload.admitted", f"{over}: share admitted"),
        Bar("language.again.goodput_ratio", f"{again}: tokens of answers in time ÷ capacity", "≥", 0.9),
        Bar("language.again.first_in_time", f"{again}: admitted whose first token was in time"),
        Bar("language.again.refused_s", f"{again}: refusals", unit="/s"),
        Bar("language.beside.p99_ratio", "small5ms beside 4 streams: p99 ÷ (p99 alone + a step)", "≤", 1.2),
        Bar("language.beside.p99_ms", "the same: p99", unit="ms"),
    ]
    return bars


def _tune_bars() -> list[Bar]:
    bars = []
    for name in ("mobilenetv2", "resnet18"):
        key, what = f"tune.{name}", f"tune, {name}, 16 in flight"
        bars.append(Bar(f"{key}.ratio", f"{what}: chosen ÷ ONNX Runtime f32's best layout, served", "≥", 2.2, 3.0))
        bars.append(Bar(f"{key}.served_ratio", f"{what}: chosen, served ÷ raw", "≥", 0.78, 0.9))
        bars.append(
            Bar(f"{key}.distinct", f"tune, {name}: answers of f32 to noise (random weights; 1: agreement is not news)")
        )
        bars.append(Bar(f"{key}.agreement", f"tune, {name}: agrees with f32 (random weights, noise)"))
    what = "tune, mobilenetv2 beside 30 % of other work"
    bars.append(Bar("tune.choice.found", f"{what}: tries that wrote the best way, or one within 3 %", "≥", 0.9))
    bars.append(Bar("tune.choice.least", f"{what}: the worst choice ÷ the best way", "≥", 0.9))
    bars.append(Bar("tune.choice.took_s", f"{what}: a try", "≤", 600, None, "s"))
    bars.append(Bar("tune.small5ms.served_ratio", "tune, small input, 16 in flight: served ÷ raw", "≥", 0.95))
    bars.append(Bar("tune.digits.drop", "tune, digits, 0.5 % allowed: labels given up", "≤", 0.005))
    bars.append(Bar("tune.digits.int8_drop", "tune, digits: labels that int8 gives up on held-out images", "≤", 0.005))
    bars.append(Bar("tune.digits.exact_is_f32", "tune, digits, nothing allowed: an f32 choice", "=", 1))
    bars.append(Bar("tune.digits.exact_gain", "tune, digits, nothing allowed: chosen ÷ untuned", "≥", 1.0))
    return bars


def _poisson_bars(
    key: str, what: str, goodput: float, goodput_reach: float, refused_ms: float, reach_ms: float
) -> list[Bar]:
    return [
        Bar(f"{key}.2x.goodput_ratio", f"{what}, 2 × capacity: goodput ÷ capacity", "≥", goodput, goodput_reach),
        Bar(f"{key}.2x.p99_ratio", f"{what}, 2 × capacity: p99 of answers ÷ deadline", "≤", 1.0),
        Bar(f"{key}.2x.refused_p99_ms", f"{what}, 2 × capacity: p99 until a refusal", "≤", refused_ms, reach_ms, "ms"),
        Bar(f"{key}.2x.neither", f"{what}, 2 × capacity: neither answered nor refused", "=", 0, rounds="sum"),
        Bar(f"{key}.0.9x.goodput_ratio", f"{what}, 0.9 × capacity: goodput ÷ offered"),
        Bar(f"{key}.0.9x.p99_ms", f"{what}, 0.9 × capacity: p99", unit="ms"),
        Bar(f"{key}.0.5x.goodput_ratio", f"{what}, 0.5 × capacity: goodput ÷ offered"),
        Bar(f"{key}.0.5x.p99_ms", f"{what}, 0.5 × capacity: p99", unit="ms"),
    ]


def _mqtt_bars() -> list[Bar]:
    at_64 = "mqtt, QoS 0, mlp, 64 in flight"
    bars = [
        Bar("mqtt.64.rate_ratio", f"{at_64}: rate ÷ bare paho echo's", "≥", 0.75, 0.9),
        Bar("mqtt.64.rate", f"{at_64}: rate", unit="/s"),
        Bar("mqtt.64.echo_rate", f"{at_64}: rate of the echo", unit="/s"),
        Bar("mqtt.64.lean.rate_ratio", f"{at_64}, asked by a client leaner than paho: rate ÷ echo's"),
        Bar("mqtt.64.lean.rate", f"{at_64}, asked by it: rate", unit="/s"),
        Bar("mqtt.64.qos1.rate_ratio", "mqtt, QoS 1, mlp, 64 in flight: rate ÷ bare paho echo's"),
        Bar("mqtt.1.added_p50_ms", "mqtt, mlp, one at a time: p50 − bare paho echo's", "≤", 0.5, unit="ms"),
        Bar("mqtt.1.p50_ms", "mqtt, mlp, one at a time: p50", unit="ms"),
        Bar("mqtt.rate.failed", "requests refused, lost or answered twice over these", "=", 0, rounds="sum"),
    ]
    for name in ("mlp", "small5ms"):
        key, what = f"mqtt.overload.{name}", f"mqtt, {name}, 2 × capacity"
        bars += [
            Bar(f"{key}.late", f"{what}: answered late", "=", 0, rounds="sum"),
            Bar(f"{key}.lost", f"{what}: no reply, beyond what the broker dropped", "=", 0, rounds="sum"),
            Bar(f"{key}.dropped", f"{what}: dropped by the broker (QoS 0)", rounds="sum"),
            Bar(f"{key}.duplicated", f"{what}: answered twice", "=", 0, rounds="sum"),
            Bar(f"{key}.offered_ratio", f"{what}: of these, what the broker took from the generator"),
            Bar(f"{key}.goodput_ratio", f"{what}: answered ÷ capacity"),
            Bar(f"{key}.p99_ms", f"{what}: p99 of answers, from when they were due", unit="ms"),
        ]
    return [
        *bars,
        Bar("mqtt.devices.devices", "mqtt, client devices asking once a second"),
        Bar("mqtt.devices.lost", "their requests: lost", "=", 0, rounds="sum"),
        Bar("mqtt.devices.duplicated", "their requests: answered twice", "=", 0, rounds="sum"),
        Bar("mqtt.devices.refused", "their requests: refused", rounds="sum"),
        Bar("mqtt.devices.p99_ms", "their requests: p99", unit="ms"),
        *_wake_bars(),
    ]


def _wake_bars() -> list[Bar]:
    wake, kill = "mqtt.wake", "mqtt.wake.kill"
    return [
        Bar(f"{wake}.devices", "mqtt, devices woken at once, that all look at once"),
        Bar(f"{wake}.woken_s", "from the order until the last of them is woken", unit="s"),
        Bar(f"{wake}.known_s", "from the order until the last of them knows it", "≤", 10, None, "s"),
        Bar(f"{wake}.lost", "orders that a device never learned of", "=", 0, rounds="sum"),
        Bar(f"{wake}.doubled", "orders that a device applied twice", "=", 0, rounds="sum"),
        Bar(f"{kill}.woken_ratio", "the broker killed meanwhile: share that the wake reached"),
        Bar(f"{kill}.known_s", "the same: from the order until the last knows it", unit="s"),
        Bar(f"{kill}.lost", "the same: orders that a device never learned of", "=", 0, rounds="sum"),
        Bar(f"{kill}.doubled", "the same: orders that a device applied twice", "=", 0, rounds="sum"),
    ]


def _seen_bars() -> list[Bar]:
    ten, quiet = "the device's page with ten viewers", "the device's page, nothing asked: cores of the daemon"
    devices = "the fleet's page, 10 000 devices"
    return [
        Bar("page.rate_ratio", f"{ten}: mlp, 64 in flight, rate ÷ without", "≥", 0.95),
        Bar("page.p99_ratio", f"{ten}: p99 ÷ without"),
        Bar("page.idle.0.cores", f"{quiet}, no viewer"),
        Bar("page.idle.1.cores", f"{quiet}, one viewer", "≤", 0.02),
        Bar("page.idle.10.cores", f"{quiet}, ten viewers"),
        Bar("page.paint_s", f"{ten}: first paint in Chromium", "≤", 1.5, unit="s"),
        Bar("page.shown_s", f"{ten}: until its models are shown", unit="s"),
        Bar("fleet.loaded_s", f"{devices}: all known, from the start on", unit="s"),
        Bar("fleet.devices_s", f"{devices}: the list as JSON", "≤", 0.5, unit="s"),
        Bar("fleet.paint_s", f"{devices}: first paint in Chromium", "≤", 1.5, unit="s"),
        Bar("fleet.listed_s", f"{devices}: until a hundred of them are listed", "≤", 1.5, unit="s"),
        Bar("fleet.change_s", f"{devices}: until a change is told of", "≤", 3.0, unit="s"),
        Bar("fleet.memory_mib", f"{devices}: memory of its process", "≤", 150, unit="MiB"),
        Bar("fleet.cores", f"{devices}: cores, 667 states a second"),
        Bar("scrape.series", "1 000 models, all asked, ten asked for in detail: series of a scrape", "≤", 6000),
        Bar("scrape.ms", "the same: time of a scrape, compressed", "≤", 150, unit="ms"),
        Bar("scrape.cpu_ms", "the same: CPU time of the daemon", unit="ms"),
        Bar("scrape.bytes", "the same: bytes of a scrape, before that"),
        Bar("tracing.few.rate_ratio", "1 in 1 000 requests traced: mlp, 64 in flight, rate ÷ without", "≥", 0.98),
        Bar("tracing.all.rate_ratio", "all requests traced: the same", "≥", 0.5),
        Bar("tracing.off.p99_ms", "mlp, one by one, not traced: p99", unit="ms"),
        Bar("tracing.off.most_ms", "the same: the slowest", unit="ms"),
        *(
            bar
            for kind, what in (("closed", "that is not there"), ("silent", "that never answers"))
            for bar in (
                Bar(f"tracing.{kind}.added_ms", f"all traced, a collector {what}: p99 beyond", "≤", 1.0, unit="ms"),
                Bar(f"tracing.{kind}.p99_ms", "the same: p99", unit="ms"),
                Bar(f"tracing.{kind}.most_ms", "the same: the slowest", unit="ms"),
            )
        ),
    ]


def _update_bars() -> list[Bar]:
    bars = [
        Bar("update.patch.fetched_ratio", "46 MB model whose last 16 % changed: bytes fetched ÷ full size", "≤", 0.20),
        Bar("update.patch.install_s", "the same: patch read, applied, hashed and laid out durably", "≤", 1.0, unit="s"),
    ]
    for key, what in (("good", "good updates"), ("bad", "rolled-back or refused updates")):
        bars += [
            Bar(f"update.{key}.done", f"{what} under load"),
            Bar(f"update.{key}.unanswered", f"{what}: requests lost or answered wrongly", "=", 0, rounds="sum"),
            Bar(f"update.{key}.p50_ratio", "requests' p50 during them ÷ without"),
            Bar(f"update.{key}.p99_ratio", "requests' p99 during them ÷ without"),
            Bar(f"update.{key}.longest_ms", "the longest request during them", unit="ms"),
            Bar(f"update.{key}.took_s", "one of them, from the order to its end", unit="s"),
        ]
    for key, what in (("", "check with nothing new"), (".pure", "the same without the cryptography package")):
        bars += [
            Bar(f"update.check{key}.requests", f"{what}: requests", "=", 2),
            Bar(f"update.check{key}.bytes", f"{what}: bytes of answers, headers too", "≤", 2048),
            Bar(f"update.check{key}.cpu_ms", f"{what}: CPU time of the daemon", "≤", 50, unit="ms"),
        ]
    return [
        *bars,
        Bar(
            "update.memory.peak_mib", "10 000 targets in 33 roles: peak RSS of a check − daemon's", "≤", 40, unit="MiB"
        ),
        Bar("update.memory.kept_mib", "the same: RSS after it − daemon's", "≤", 40, unit="MiB"),
        Bar("update.idle.start_s", "cold start to first answer with an installed release", unit="s"),
        Bar("update.idle.plain_start_s", "the same model from a folder, no [update]", unit="s"),
        Bar("update.idle.pss_mib", "idle with an installed release: PSS", unit="MiB"),
        Bar("update.idle.plain_pss_mib", "the same model from a folder, no [update]: PSS", unit="MiB"),
        Bar("update.crash.back_s", "abort after a swap: until the version before answers again", "≤", 2.0, unit="s"),
    ]


def _oip_bars() -> list[Bar]:
    bars = []
    for door, bound, reach in (("http", 0.75, None), ("grpc", 0.8, 0.9)):
        for in_flight in (1, 16, 64):
            key, what = f"{door}.{in_flight}", f"{door}, mlp, binary, {in_flight} in flight"
            bars += [
                Bar(f"{key}.rate_ratio", f"{what}: rate ÷ the library's own echo", "≥", bound, reach),
                Bar(f"{key}.rate", f"{what}: rate", unit="/s"),
                Bar(f"{key}.echo_rate", f"{what}: rate of the echo", unit="/s"),
                Bar(f"{key}.cpu_us", f"{what}: CPU a request", unit="us"),
                Bar(f"{key}.echo_cpu_us", f"{what}: CPU a request of the echo", unit="us"),
                Bar(f"{key}.failed", f"{what}: refused or lost", "=", 0, rounds="sum"),
            ]
    for name, what, bound, reach in (
        ("http", "HTTP", 0.95, None),
        ("region", "HTTP, tensor in memory named by the client", 1.03, None),
        ("grpc", "gRPC", 0.85, 0.95),
    ):
        for in_flight in (16, 64):
            key, image = f"oip.images.{name}.{in_flight}", f"mobilenetv2, 600 KB, {in_flight} in flight, {what}"
            sign: Literal["≥", ""] = "" if (name, in_flight) == ("grpc", 64) else "≥"
            bars.append(Bar(f"{key}.ratio", f"{image}: rate ÷ ZeroMQ frames", sign, bound, reach))
            bars.append(Bar(f"{key}.rate", f"{image}: rate", unit="/s"))
            if name == "region":
                bars.append(Bar(f"{key}.cpu_ratio", f"{image}: CPU a request ÷ HTTP's frames", "≤", 1.0))
    for door in ("http", "grpc"):
        key, what = f"oip.overload.{door}", f"{door}, mobilenetv2, 500 ms, 2 × capacity"
        bars += [
            Bar(f"{key}.goodput_ratio", f"{what}: goodput ÷ capacity", "≥", 0.9, 0.95),
            Bar(f"{key}.lost", f"{what}: neither answered nor refused", "=", 0, rounds="sum"),
            Bar(f"{key}.p99_ms", f"{what}: p99 of answers", unit="ms"),
        ]
    for in_flight in (1, 16, 64):
        what = f"ZeroMQ, mlp, {in_flight} in flight, both doors open and idle"
        bars.append(Bar(f"oip.idle.{in_flight}.rate_ratio", f"{what}: rate ÷ without doors", "≥", 0.98))
    return [
        *bars,
        Bar("oip.idle.http.above_echo_mib", "idle PSS that --http adds − what its echo adds", "≤", 5, None, "MiB"),
        Bar("oip.idle.grpc.above_echo_mib", "idle PSS that --grpc adds − what its echo adds", "≤", 5, None, "MiB"),
        Bar("oip.json.cpu_us", "JSON of 64 floats over ZeroMQ: daemon's CPU a request", "≤", 40, 25, "us"),
        Bar("oip.json.frames_cpu_us", "mlp in frames, 64 in flight: daemon's CPU a request", unit="us"),
        Bar("oip.flood.p99_ratio", "mlp over ZeroMQ beside a flood over HTTP at 2 ×: p99 ÷ alone", "≤", 1.5),
        Bar("oip.flood.p99_ms", "the same: p99", unit="ms"),
        Bar("oip.flood.p50_ratio", "the same: p50 ÷ alone"),
        Bar("oip.flood.goodput_ratio", "the flooded mobilenetv2 meanwhile: goodput ÷ capacity"),
        Bar("spin.zmq.p50_ratio", "mobilenetv2, one at a time, `spin`: p50 ÷ raw, all cores, spinning too", "≤", 1.1),
        Bar("spin.http.p50_ratio", "the same over HTTP", "≤", 1.1),
        Bar("spin.grpc.p50_ratio", "the same over gRPC"),
    ]


BARS: tuple[Bar, ...] = (
    *_before_bars(),
    *_mlp_bars(),
    Bar("overload.served_ratio", "mlp offered 10 × what it can serve: served ÷ own rate at 256 in flight", "≥", 0.9),
    Bar("overload.lost", "the same: lost", "=", 0, rounds="sum"),
    Bar("overload.after_ratio", "the same: rate at 64 straight afterwards ÷ before", "≥", 0.9),
    Bar("small.16.ratio", "small5ms, 16 in flight: served ÷ best layout", "≥", 0.95, 0.98),
    Bar("small.64.ratio", "small5ms, 64 in flight: served ÷ best layout", "≥", 0.95, 0.98),
    *_image_bars(),
    *_shared_bars(),
    *_host_bars(),
    *_oip_bars(),
    *_pipeline_bars(),
    Bar("torchscript.16.ratio", "TorchScript ResNet-18, 16 in flight: served ÷ raw PyTorch, best layout", "≥", 0.93),
    Bar("torchscript.16.rate", "the same: rate", unit="/s"),
    Bar("torchscript.raw.rate", "raw PyTorch in its best layout: rate", unit="/s"),
    Bar("picture.frames.ratio", "uint8 640x480 through steps ÷ FP32 224² made by the client: rate", "≥", 1.0),
    Bar("picture.frames.rate", "the same: rate", unit="/s"),
    Bar("picture.frames.bytes_ratio", "the same: bytes sent, frame ÷ tensor"),
    Bar("picture.steps.ratio", "the steps alone, one frame ÷ plain numpy and Pillow", "≤", 0.5),
    Bar("picture.steps.ms", "the same: time", unit="ms"),
    Bar("picture.jpeg.ratio", "JPEG 640x480 to classes, one at a time: p50 ÷ (decoding + raw run)", "≤", 1.15),
    Bar("picture.jpeg.ms", "the same: p50", unit="ms"),
    Bar("picture.boxes.share", "a YOLO of 3 M weights, 640²: the boxes' share of p50", "≤", 0.1),
    Bar("picture.boxes.ms", "the same: p50", unit="ms"),
    Bar("cameras.run_share", "8 cameras (files, 640x480) × 5 fps, one detector: frames run ÷ asked", "≥", 0.98),
    Bar(
        "cameras.cpu_percent", "the same: the daemon's own CPU beside decoding and runs, of a core", "≤", 3.0, unit="%"
    ),
    Bar(
        "cameras.picture_s", "the same, one picture a second: from a result to its picture, at most", "≤", 1.0, unit="s"
    ),
    Bar("windows.quarter.ratio", "log-mel of 10 s, windows that overlap: CPU, ours ÷ numpy and scipy", "≤", 0.7),
    Bar("windows.quarter.cpu_ms", "the same: CPU", unit="ms"),
    Bar("windows.whole.ratio", "the same, windows that do not overlap: CPU, ours ÷ numpy and scipy"),
    Bar("windows.whole.cpu_ms", "the same: CPU", unit="ms"),
    Bar("tracks.cpu_ms", "tracks, a frame of 20 boxes: CPU", "≤", 0.6, unit="ms"),
    Bar("tracks.cpu_p99_ms", "the same: p99", unit="ms"),
    Bar("tracks.switches_ratio", "id switches on the made-up scenes ÷ ByteTrack's own code", "≤", 1.1),
    Bar(
        "text.16.ratio",
        "a text to its label, 16 in flight: served ÷ tokenizers and the raw run, best layout",
        "≥",
        0.95,
    ),
    Bar("text.16.rate", "the same: rate", unit="/s"),
    Bar("sequences.16.ratio", "steps of 16 sequences ÷ runs of the same model, state carried by its client", "≥", 0.9),
    Bar("sequences.16.rate", "steps of 16 sequences: rate", unit="/s"),
    *_language_bars(),
    Bar("text.16.plain_rate", "tokenizers and the raw run in plain Python: rate", unit="/s"),
    Bar("frigate.ratio", "the same YOLO asked by Frigate's detector: p50 of detect_raw ÷ the raw run", "≤", 1.25),
    Bar("frigate.ms", "the same: p50", unit="ms"),
    Bar("frigate.pair.ratio", "two detectors at once: p50 of detect_raw ÷ the raw run of 2 rows", "≤", 1.25),
    Bar("frigate.pair.ms", "the same: p50", unit="ms"),
    Bar("bf16.mobilenetv2.ratio", "mobilenetv2, OpenVINO bf16, 16 in flight: served ÷ raw OpenVINO", "≥", 0.80, 0.90),
    Bar("bf16.mobilenetv2.shared_ratio", "the same in shared memory", "≥", 0.90),
    Bar("bf16.resnet18.ratio", "resnet18, OpenVINO bf16, 16 in flight: served ÷ raw OpenVINO", "≥", 0.80, 0.90),
    Bar("litert.f32.ratio", "mobilenetv2, LiteRT float, 16 in flight: served ÷ raw LiteRT", "≥", 0.93),
    Bar("litert.f32.shared_ratio", "the same in shared memory", "≥", 0.93),
    Bar("litert.int8.shared_ratio", "mobilenetv2, LiteRT int8, 16 in flight, shared memory: ÷ raw LiteRT", "≥", 0.93),
    Bar("litert.int8.ratio", "the same in frames"),
    Bar("int8.mobilenetv2.shared_ratio", "mobilenetv2, OpenVINO int8, 16 in flight, shared memory: ÷ raw", "≥", 0.90),
    Bar("int8.mobilenetv2.frames_ratio", "the same in frames"),
    *_poisson_bars("poisson.small5ms", "small5ms", 0.95, 1.0, 8, 4),
    *_poisson_bars("poisson.mobilenetv2", "mobilenetv2, 500 ms", 0.85, 0.92, 20, 10),
    Bar("two.mlp.p50_ratio", "mlp beside mobilenetv2 flooded at 2 ×: p50 ÷ alone", "≤", 1.2),
    Bar("two.mlp.p99_ms", "mlp beside it: p99", "≤", 5, 2, "ms"),
    Bar("two.small5ms.p99_in_runs", "small5ms beside it: (p99 − p99 alone) ÷ one run of the flooded", "≤", 1.0),
    Bar("two.flood.goodput_ratio", "the flooded mobilenetv2 meanwhile: goodput ÷ capacity"),
    Bar(
        "storm.goodput_ratio",
        "resnet18, 64 in flight, 1 s, sent again when refused: answered ÷ at 8 in flight",
        "≥",
        0.9,
    ),
    Bar("storm.lost", "the same: neither answered nor refused", "=", 0, rounds="sum"),
    Bar("storm.after_p50_ratio", "8 in flight, from 1 s after it: p50 ÷ before", "≤", 1.15),
    Bar(
        "polite.beside_greedy.answered_ratio", "2/s, 2 s, beside 100 in flight without a deadline: answered", "≥", 0.95
    ),
    Bar("polite.beside_crowd.answered_ratio", "0.15 of capacity beside 1.5, both 500 ms: answered", "≥", 0.95),
    Bar("hostile.p99_ratio", "mlp, 16 in flight, beside a hostile client: p99 ÷ alone", "≤", 2.0),
    Bar("hostile.rate_ratio", "the same: rate ÷ alone"),
    Bar("hostile.failed", "the same: lost or failed", "=", 0, rounds="sum"),
    Bar("hostile.growth_mib", "memory that a round of it left behind", "≤", 20, unit="MiB"),
    *_mqtt_bars(),
    *_update_bars(),
    *_seen_bars(),
    Bar(
        "drop.took_s",
        "every kind of file but PyTorch's dropped in at once: until all is decided",
        "≤",
        60,
        unit="s",
    ),
    Bar("drop.served", "of these kinds: served by the libraries that are here"),
    Bar("drop.named", "of these kinds: named with the reason"),
    Bar("drop.failed", "requests to a model in use meanwhile: lost or failed", "=", 0, rounds="sum"),
    Bar("drop.longest_ms", "the slowest of them", unit="ms"),
    Bar("reloads.done", "reloads of mlp under load", unit=""),
    Bar("reloads.failed", "reloads of mlp under load: requests lost or failed", "=", 0, rounds="sum"),
    Bar("cold.mlp.fresh_s", "cold start to first answer, mlp, nothing calibrated", "≤", 0.35, 0.25, "s"),
    Bar("cold.mlp.cached_s", "cold start to first answer, mlp, calibration cached", "≤", 0.35, 0.25, "s"),
    Bar("cold.mobilenetv2.fresh_s", "cold start to first answer, mobilenetv2, nothing calibrated", "≤", 0.5, None, "s"),
    Bar(
        "cold.mobilenetv2.cached_s", "cold start to first answer, mobilenetv2, calibration cached", "≤", 0.5, None, "s"
    ),
    *_tune_bars(),
    *_tree_bars(),
    *_triton_bars(),
    Bar("idle.pss_mib", "idle with mlp: PSS", "≤", 50, 45, "MiB"),
    Bar("idle.rss_mib", "idle with mlp: RSS", unit="MiB"),
    Bar("idle.cpu_percent", "idle with mlp: CPU, percent of a core", "≤", 0.5, None, "%"),
    Bar("size.onnxruntime_mb", "installed by pip, ONNX Runtime alone: size", "≤", 165, None, "MB"),
    Bar("size.openvino_mb", "installed by pip, OpenVINO too: size", unit="MB"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A bar with what was measured."""

    bar: Bar
    value: float
    rounds: tuple[float, ...]
    is_met: bool | None


def rows(figures: Figures) -> list[Row]:
    """The bars that were measured, in the order of BARS."""
    found = []
    stands_for_all: Mapping[str, Callable[[Sequence[float]], float]] = {"median": statistics.median, "sum": sum}
    for bar in BARS:
        if values := figures.values.get(bar.figure):
            value = stands_for_all[bar.rounds](values)
            found.append(Row(bar, value, tuple(values), bar.is_met(value)))
    return found


def table(figures: Figures) -> str:
    """The table as text: what, bar (and what to reach for), figure, the rounds' range, met."""
    lines = [("", "bar", "reach", "figure", "rounds", "met")]
    for row in rows(figures):
        bar = row.bar
        lines.append(
            (
                bar.what,
                f"{bar.sign} {number(bar.bound)} {bar.unit}".strip() if bar.sign else "",
                number(bar.reach) if bar.reach is not None else "",
                f"{number(row.value)} {bar.unit}".strip(),
                f"{number(min(row.rounds))}..{number(max(row.rounds))}" if len(row.rounds) > 1 else "",
                {True: "yes", False: "NO", None: ""}[row.is_met],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("─" * width for width in widths))
    for scenario, sentences in figures.notes.items():
        text.extend(f"{scenario}: {sentence}" for sentence in sentences)
    return "\n".join(text)


def write_json(path: Path, figures: Figures, about: Mapping[str, Any]) -> None:
    """Everything that was measured, with the machine it was measured on."""
    content = {
        **about,
        "bars": [
            {
                "figure": row.bar.figure,
                "what": row.bar.what,
                "bar": f"{row.bar.sign} {number(row.bar.bound)}" if row.bar.sign else None,
                "reach": row.bar.reach,
                "unit": row.bar.unit,
                "value": row.value,
                "rounds": row.rounds,
                "met": row.is_met,
            }
            for row in rows(figures)
        ],
        "figures": {
            name: {"median": statistics.median(values), "rounds": values} for name, values in figures.values.items()
        },
        "notes": figures.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def number(value: float) -> str:
    """A figure in three digits, or whole."""
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
