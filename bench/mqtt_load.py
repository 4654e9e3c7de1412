"""One client process on a broker: requests in a closed loop or as Poisson arrivals, and what became of each.

    python -m bench.mqtt_load '{"port": 1883, "topic": "edge/bench/infer/mlp", "payload": FILE, …}'

A process of its own, as load.c is for ZeroMQ. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bench.mqtt_links import ID_BYTES, LeanLink, Link, PahoLink

GIVEN_UP_AFTER_S = 2.0
"""Beyond a request's timeout: what has no reply by then has none."""

ALLOWANCE_MS = 10.0
"""What the way there and back may take through a broker where nothing waits. A lone round trip takes under 1 ms; the
rest is for a kernel with more processes to run than cores."""

ANSWER_BYTE = 0x84
"""Second byte of an answer, whose header is a map of four keys; a plain request echoed has four too."""

IDLE_WAIT_S = 0.005
MAX_AT_ONCE = 128
"""Arrivals that are handed over together, about what the socket takes: what is only kept in here is not sent yet."""

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class MqttRun:
    """What to ask. rate 0: a closed loop of `in_flight`; else Poisson arrivals. timeout_ms: what the payload says.

    payload: a file with the MQTT payload of the request. client: see mqtt_links.py; "lean" knows QoS 0 only.
    topic: where to ask; without one the client asks itself, through the broker, which tells what both can do at most.
    """

    port: int
    topic: str
    payload: str
    in_flight: int = 1
    rate: float = 0.0
    seconds: float = 3.0
    warm_s: float = 0.3
    timeout_ms: float = 5000.0
    qos: Literal[0, 1] = 0
    client: Literal["paho", "lean"] = "paho"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MqttLoad:
    """What one run saw. rate, p50 and p99 are of answers in the measured span; the rest is of the whole run.

    Latencies count from a request's arrival, which in an open loop was drawn beforehand; whether an answer is late is
    counted from when the request was sent, because only then its timeout begins. past_timeout: later than the timeout.
    late: by more than ALLOWANCE_MS and `lag_ms` besides. lag_ms: the longest time for which this process did not read.
    never: no reply within the timeout and GIVEN_UP_AFTER_S. unsent_p99_ms: how long arrivals waited to be sent.
    """

    rate: float
    p50_ms: float
    p99_ms: float
    sent: int
    answered: int
    refused: dict[str, int]
    past_timeout: int
    late: int
    latest_ms: float
    never: int
    duplicated: int
    stray: int
    lag_ms: float
    unsent_p99_ms: float


class Tally:
    """What became of the requests so far; times are monotonic seconds."""

    def __init__(self, run: MqttRun, begin_s: float) -> None:
        self._run = run
        self._from_s = begin_s + run.warm_s
        self._until_s = self._from_s + run.seconds
        self._waiting: dict[bytes, tuple[float, float]] = {}
        self._latencies_s: list[float] = []
        self._over_timeout_s: list[float] = []
        self._unsent_s: list[float] = []
        self._refused: dict[str, int] = {}
        self._sent = self._answered = self._never = self._duplicated = self._stray = 0
        self._lag_s = 0.0

    @property
    def in_flight(self) -> int:
        """Requests without a reply."""
        return len(self._waiting)

    def send(self, arrivals_s: list[float], now_s: float) -> list[bytes]:
        """Ids for requests that are sent now."""
        ids = []
        for arrival_s in arrivals_s:
            self._sent += 1
            request_id = self._sent.to_bytes(ID_BYTES, "big")
            self._waiting[request_id] = (arrival_s, now_s)
            self._unsent_s.append(now_s - arrival_s)
            ids.append(request_id)
        return ids

    def reply(self, request_id: bytes, payload: bytes, now_s: float) -> None:
        """Count one."""
        times = self._waiting.pop(request_id, None)
        if times is None:
            is_known = len(request_id) == ID_BYTES and 0 < int.from_bytes(request_id, "big") <= self._sent
            self._duplicated += is_known
            self._stray += not is_known
            return
        arrival_s, sent_s = times
        over_s = now_s - sent_s - self._run.timeout_ms / 1e3
        if over_s > GIVEN_UP_AFTER_S:
            self._never += 1
        elif payload[1] != ANSWER_BYTE:
            code = code_of(payload)
            self._refused[code] = self._refused.get(code, 0) + 1
        else:
            self._answered += 1
            if over_s > 0:
                self._over_timeout_s.append(over_s)
            if self._from_s <= now_s <= self._until_s:
                self._latencies_s.append(now_s - arrival_s)

    def has_lagged(self, seconds: float) -> None:
        """This process did not read for so long."""
        self._lag_s = max(self._lag_s, seconds)

    def result(self) -> MqttLoad:
        """Everything, at the end."""
        allowed_s = ALLOWANCE_MS / 1e3 + self._lag_s
        return MqttLoad(
            rate=len(self._latencies_s) / self._run.seconds,
            p50_ms=quantile_ms(self._latencies_s, 0.5),
            p99_ms=quantile_ms(self._latencies_s, 0.99),
            sent=self._sent,
            answered=self._answered,
            refused=self._refused,
            past_timeout=len(self._over_timeout_s),
            late=sum(over_s > allowed_s for over_s in self._over_timeout_s),
            latest_ms=max(self._over_timeout_s, default=0.0) * 1e3,
            never=self._never + len(self._waiting),
            duplicated=self._duplicated,
            stray=self._stray,
            lag_ms=self._lag_s * 1e3,
            unsent_p99_ms=quantile_ms(self._unsent_s, 0.99),
        )


def generate(run: MqttRun, link: Link) -> MqttLoad:
    """Ask and listen until the time is up and every request was answered or given up."""
    clock, rng = time.monotonic, random.Random(run.seed)
    begin_s = read_s = next_arrival_s = clock()
    until_s = begin_s + run.warm_s + run.seconds
    end_s = until_s + run.timeout_ms / 1e3 + GIVEN_UP_AFTER_S
    tally = Tally(run, begin_s)
    while True:
        now_s = clock()
        arrivals_s: list[float] = []
        if now_s < until_s and not link.wants_write():
            if run.rate:
                while next_arrival_s <= now_s and len(arrivals_s) < MAX_AT_ONCE:
                    arrivals_s.append(next_arrival_s)
                    next_arrival_s += rng.expovariate(run.rate)
            else:
                arrivals_s = [now_s] * (run.in_flight - tally.in_flight)
        elif now_s >= end_s or (now_s >= until_s and not tally.in_flight):
            return tally.result()
        link.ask(tally.send(arrivals_s, now_s))
        wait_s = IDLE_WAIT_S
        if run.rate and now_s < until_s:
            wait_s = min(wait_s, max(0.0, next_arrival_s - clock()))
        waited_s = clock()
        tally.has_lagged(waited_s - read_s)
        replies = link.replies(wait_s)
        read_s = clock()
        tally.has_lagged(read_s - waited_s - wait_s)
        for request_id, payload in replies:
            tally.reply(request_id, payload, read_s)


def code_of(payload: bytes) -> str:
    """The error code of a refusal, from its msgpack."""
    at = payload.find(b"\xa4code")
    return payload[at + 6 : at + 6 + (payload[at + 5] & 0x1F)].decode() if at >= 0 else "unreadable"


def quantile_ms(seconds: list[float], q: float) -> float:
    """One quantile in milliseconds; -1 of nothing."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3 if ordered else -1.0


def main(arguments: list[str]) -> None:
    """Read a MqttRun as JSON and print a MqttLoad."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the bench
    run = MqttRun(**json.loads(arguments[0]))
    payload, reply_topic = Path(run.payload).read_bytes(), f"reply/load-{os.getpid()}"
    topic = run.topic or reply_topic
    link: Link
    if run.client == "lean":
        link = LeanLink(run.port, topic, reply_topic, payload)
    else:
        link = PahoLink(run.port, topic, reply_topic, payload, run.qos)
    load = generate(run, link)
    link.close()
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    main(sys.argv[1:])
