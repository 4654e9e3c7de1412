"""The load generator for machines without a C compiler: load.c's command line and output, in Python.

Its own maximum is a quarter of load.c's, so above some 100 000 requests a second it measures itself; the bench says so
when it does (the share of its maximum is in the table). Slots, windows and what counts are as in load.c.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import signal
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import zmq
from zmq.backend import Socket as Backend

DONTWAIT, SNDMORE = int(zmq.DONTWAIT), int(zmq.SNDMORE)
OPEN_LOOP_IN_FLIGHT = 1 << 17
MAX_PENDING = 1 << 20
RECEIVE_AT_ONCE = 256
PR_SET_PDEATHSIG = 1


class Tally:
    """Latencies in microseconds of what ended, by answer or error code."""

    def __init__(self, measure_from: float, measure_until: float, by_arrival: bool) -> None:
        self._from, self._until, self._by_arrival = measure_from, measure_until, by_arrival
        self.answers: list[float] = []
        self.errors: dict[str, list[float]] = {}
        self.total_ok = self.total_errors = self.in_span = 0

    def add(self, began: float, now: float, is_answer: bool, header: bytes) -> None:
        """Count one reply."""
        if is_answer:
            self.total_ok += 1
            self.in_span += self._from <= now <= self._until
        else:
            self.total_errors += 1
        if not self._from <= (began if self._by_arrival else now) <= self._until:
            return
        us = (now - began) * 1e6
        if is_answer:
            self.answers.append(us)
        else:
            self.errors.setdefault(_code_of(header), []).append(us)


def generate(options: argparse.Namespace, frames: list[bytes]) -> dict[str, Any]:
    """Send and receive until the time is up and everything came back or the drain is over; load.c's JSON as a dict."""
    socket = zmq.Context().socket(zmq.DEALER)
    for name, value in ((zmq.LINGER, 0), (zmq.RECONNECT_IVL, 5), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
        socket.set(name, value)
    socket.connect(options.addr)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    receive, send, clock = Backend.recv, Backend.send, time.monotonic
    before, after = frames[: options.id_frame], frames[options.id_frame + 1 :]
    rate, rng = options.rate, random.Random(options.seed)
    limit = OPEN_LOOP_IN_FLIGHT if rate > 0 else options.conc
    start = next_arrival = clock()
    measure_from = start + options.warm
    until = measure_from + options.secs
    tally = Tally(measure_from, until, by_arrival=rate > 0)
    pending: deque[float] = deque()
    in_flight: dict[bytes, float] = {}
    sent = stray = unsent = 0

    def start_one(at: float) -> None:
        nonlocal sent
        sent += 1
        request_id = sent.to_bytes(8, "little")
        in_flight[request_id] = at
        for frame in before:
            send(socket, frame, SNDMORE)
        send(socket, request_id, SNDMORE if after else 0)
        for frame in after[:-1]:
            send(socket, frame, SNDMORE)
        if after:
            send(socket, after[-1], 0)

    while True:
        now = clock()
        is_sending = now < until
        if not is_sending and (not in_flight or now > until + options.drain):
            break
        if is_sending and rate <= 0:
            while len(in_flight) < limit:
                start_one(now)
        elif is_sending:
            while next_arrival <= now:
                if len(pending) < MAX_PENDING:
                    pending.append(next_arrival)
                else:
                    unsent += next_arrival >= measure_from
                next_arrival += rng.expovariate(rate)
            while pending and len(in_flight) < limit:
                start_one(pending.popleft())
        received = 0
        try:
            while received < RECEIVE_AT_ONCE:
                header = receive(socket, DONTWAIT)
                request_id = receive(socket, DONTWAIT)
                while socket.get(zmq.RCVMORE):
                    receive(socket, DONTWAIT)
                received += 1
                began = in_flight.pop(request_id, None)
                if began is None:
                    stray += 1
                else:
                    tally.add(began, clock(), header[:1] == bytes((options.ok_byte,)), header)
        except zmq.Again:
            pass
        if not received:
            wait_s = 0.005
            if is_sending and rate > 0 and len(in_flight) < limit:
                wait_s = max(0.0, next_arrival - clock())
            poller.poll(math.ceil(wait_s * 1e3))
    return _summary(tally, options, sent, len(in_flight), unsent + len(pending), stray)


def echo(endpoint: str, reply_bytes: int) -> None:
    """Answer [identity, header, id, zeros] to every request until killed."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.set(zmq.SNDHWM, 0)
    router.set(zmq.RCVHWM, 0)
    router.bind(endpoint)
    receive, send, reply = Backend.recv, Backend.send, bytes(reply_bytes)
    while True:
        frames = [receive(router, 0), receive(router, 0), receive(router, 0)]
        while router.get(zmq.RCVMORE):
            receive(router, 0, False)
        for frame in frames:
            send(router, frame, SNDMORE)
        send(router, reply)


def main(arguments: list[str]) -> None:
    """Read load.c's options; those it does not know are ignored, as load.c does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the bench
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--echo")
    parser.add_argument("--reply-bytes", type=int, default=16)
    parser.add_argument("--addr")
    parser.add_argument("--req")
    for name, kind, default in (
        ("conc", int, 1),
        ("rate", float, 0.0),
        ("secs", float, 3.0),
        ("warm", float, 1.0),
        ("slo-ms", float, 1e9),
        ("drain", float, 5.0),
        ("seed", int, 0),
        ("id-frame", int, 1),
        ("ok-byte", int, 132),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    options, _ = parser.parse_known_args(arguments)
    if options.echo:
        echo(options.echo, options.reply_bytes)
    content = Path(options.req).read_bytes()
    frames, offset = [], 0
    while offset < len(content):
        (length,) = struct.unpack_from("I", content, offset)
        frames.append(content[offset + 4 : offset + 4 + length])
        offset += 4 + length
    print(json.dumps(generate(options, frames)))


# ---- private --------------------------------------------------------------------------------------------------------


def _code_of(header: bytes) -> str:
    at = header.find(b"\xa4code")
    if at < 0 or at + 6 > len(header):
        return "unreadable"
    length = header[at + 5] & 0x1F
    return header[at + 6 : at + 6 + length].decode(errors="replace")


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else -1.0


def _summary(
    tally: Tally, options: argparse.Namespace, sent: int, lost: int, unsent: int, stray: int
) -> dict[str, Any]:
    answers = sorted(tally.answers)
    errors = sorted(us for times in tally.errors.values() for us in times)
    within = sum(us <= options.slo_ms * 1e3 for us in answers)
    return {
        "ok": len(answers),
        "rej": len(errors),
        "err": stray,
        "timeout": lost,
        "unsent": unsent,
        "sent": sent,
        "total_ok": tally.total_ok,
        "total_rej": tally.total_errors,
        "in_span": tally.in_span,
        "rps": len(answers) / options.secs,
        "goodput": within / options.secs,
        **{
            f"{name}_us": _quantile(answers, q)
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999))
        },
        "max_us": _quantile(answers, 1.0),
        "rp50_us": _quantile(errors, 0.5),
        "rp99_us": _quantile(errors, 0.99),
        "codes": {
            code: {"count": len(times), "p99_us": _quantile(sorted(times), 0.99)}
            for code, times in tally.errors.items()
        },
    }


if __name__ == "__main__":
    main(sys.argv[1:])
