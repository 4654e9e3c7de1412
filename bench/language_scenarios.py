"""A language model asked by OpenAI's protocol: its pace beside the library's own, newcomers, overload, clients that go.

The model is made on the spot, with random weights (tests/models/language_models.py, 88 M parameters in int8), on half
the cores; the library runs in a process of its own with as many threads, by turns. A prompt begins as no other, so that
nothing of it is in the cache.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import makers
from bench.language_load import Answer, LanguageClients
from bench.load import write_request
from bench.raw_language import LONG_TOKENS, PROMPT_TOKENS, LanguageResult, LanguageRun, new_prompt
from bench.scenarios import HERE, Bench
from bench.servers import BenchError, Daemon
from edge_runtime.language.settings import MAX_STREAMS, PREFILL_TOKENS
from tests.models.language_models import large_model

MODEL = "words"
TOKENS = 128
"""Of an answer whose pace is measured."""

SHORT_TOKENS = 32
"""Of one of many."""

LIMIT_S = 300.0
FIRST_IN_ANSWERS, WHOLE_IN_ANSWERS = 2.0, 4.0
"""Deadlines under overload, in times of one answer beside seven others."""

TURNED_AWAY = (429, 503)
"""Refused before anything was done."""

NEWCOMERS = 4
CLOSES = 5
ASKING_AGAIN = 64


@dataclass(slots=True)
class Served:
    """A daemon that serves the model, its clients, and the folder and threads that the library is measured with."""

    daemon: Daemon
    clients: LanguageClients
    folder: Path
    threads: int


def language_pace(bench: Bench) -> None:
    """Pace at 1, 4 and 8 streams, tokens of a CPU second, newcomers with long prompts, and clients that go."""
    with served(bench) as found:
        for number in bench.rounds("language_pace"):
            cpu: dict[int, float] = {}
            for streams in (1, 4, 8):
                raw = _raw(found, streams, bench.seconds)
                ours, cpu[streams] = _pace(found, streams, bench.seconds)
                bench.figures.add(f"language.{streams}.ratio", ours / raw.tokens_s)
                bench.figures.add(f"language.{streams}.tokens_s", ours)
                if streams == 4:
                    _newcomers(bench, found, raw)
            bench.figures.add("language.cpu_ratio", cpu[4] / cpu[1])
            bench.figures.add("language.cpu_tokens", cpu[4])
            if number == 0:
                bench.figures.add("language.close_steps", max(_close_steps(found) for _ in range(CLOSES)))


def language_overload(bench: Bench) -> None:
    """Twice what it can write, with deadlines; then clients that ask again at once."""
    with served(bench) as found:
        for _ in bench.rounds("language_overload"):
            capacity, answer_s = _capacity(found, bench.seconds)
            for key, measured in (
                ("overload", _overloaded(found, bench.overload_seconds, capacity, answer_s)),
                ("again", _asked_again(found, bench.overload_seconds, answer_s)),
            ):
                answers, span_s = measured
                _judge(bench, f"language.{key}", answers, span_s, capacity, answer_s)


def language_beside(bench: Bench) -> None:
    """A vision model's p99 while four streams are written."""
    vision = makers.small5ms()
    request = write_request(bench.children.folder / "beside.request", vision)
    with served(bench, vision.path, vision.name) as found:
        found.daemon.wait_for_answer(request)
        for _ in bench.rounds("language_beside"):
            step_s = _raw(found, 4, bench.seconds).step_s
            alone = bench.rate(found.daemon.endpoint, request, 1)
            with _writing(found, 4):
                beside = bench.rate(found.daemon.endpoint, request, 1)
            bench.figures.add("language.beside.p99_ratio", beside.p99_ms / (alone.p99_ms + step_s * 1e3))
            bench.figures.add("language.beside.p99_ms", beside.p99_ms)


SCENARIOS = {
    "language_pace": language_pace,
    "language_overload": language_overload,
    "language_beside": language_beside,
}


@contextmanager
def served(bench: Bench, beside: Path | None = None, beside_name: str = "") -> Iterator[Served]:
    """A daemon with the model, and its clients. beside: another model's file."""
    folder = large_model(bench.children.folder / "language")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    config = bench.children.folder / "language.toml"
    config.write_text(f'[http]\nendpoint = "127.0.0.1:{address[1]}"\nopenai = true\n')
    daemon = Daemon(bench.children, {}, config=config)
    shutil.copytree(folder, daemon.models / MODEL / "1")
    threads = max(len(os.sched_getaffinity(0)) // 2, 1)
    (daemon.models / MODEL / "model.toml").write_text(f"threads = {threads}\n[language]\nmax_streams = {MAX_STREAMS}\n")
    if beside is not None:
        version = daemon.models / beside_name / "1"
        version.mkdir(parents=True)
        shutil.copyfile(beside, version / f"model{beside.suffix}")
    daemon.start()
    clients = LanguageClients(address, MODEL)
    try:
        _wait(clients)
        daemon.settle()
        yield Served(daemon, clients, folder, threads)
    finally:
        clients.close()
        daemon.stop()


# ---- private --------------------------------------------------------------------------------------------------------


def _wait(clients: LanguageClients) -> None:
    """Until an answer is whole. Raises BenchError."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        try:
            (answer,) = _all_of(clients, [clients.ask("A", 1)])
        except OSError:
            time.sleep(0.2)
            continue
        if answer.is_whole:
            return
        if answer.status not in (404, *TURNED_AWAY):
            break
        time.sleep(0.2)
    raise BenchError(f"model {MODEL} gave no whole answer: {answer.tail.decode()[-300:]}")


def _all_of(clients: LanguageClients, answers: list[Answer]) -> list[Answer]:
    """Read until all of these have ended."""
    clients.read_until(lambda: all(each.end_s for each in answers), LIMIT_S)
    clients.let_go()
    return answers


def _raw(found: Served, streams: int, seconds: float) -> LanguageResult:
    """The library's own figures. Raises BenchError."""
    run = LanguageRun(str(found.folder), found.threads, streams, TOKENS, PREFILL_TOKENS, seconds)
    done = subprocess.run(
        [sys.executable, str(HERE / "raw_language.py"), json.dumps(asdict(run))],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise BenchError(f"the library alone, {streams} streams: {done.stderr.strip()[-500:]}")
    return LanguageResult(**json.loads(done.stdout))


def _pace(found: Served, streams: int, seconds: float) -> tuple[float, float]:
    """Tokens a second once all streams write, the median of several goes; and tokens of a CPU second of the daemon."""
    rates, tokens, until_s = [], 0, time.monotonic() + seconds
    began_cpu_s = found.daemon.cpu_s()
    while time.monotonic() < until_s or not rates:
        asked = [found.clients.ask(new_prompt(PROMPT_TOKENS), TOKENS) for _ in range(streams)]
        answers = _all_of(found.clients, asked)
        _check(answers)
        all_write_s, last_s = max(each.first_s for each in answers), max(each.end_s for each in answers)
        rates.append(streams * (TOKENS - 1) / (last_s - all_write_s))
        tokens += streams * TOKENS
    return statistics.median(rates), tokens / (found.daemon.cpu_s() - began_cpu_s)


def _newcomers(bench: Bench, found: Served, raw: LanguageResult) -> None:
    """How long streams wait for a token while long prompts join."""
    clients, gaps = found.clients, []
    with _writing(found, 4) as writing:
        for _ in range(NEWCOMERS):
            newcomer = clients.ask(new_prompt(LONG_TOKENS), 1)
            _check(_all_of(clients, [newcomer]))
            for each in writing:
                times = [at_s for at_s in each.times if newcomer.sent_s <= at_s <= newcomer.end_s]
                gaps += list(np.diff(times))
    p99_s = float(np.quantile(gaps, 0.99))
    bench.figures.add("language.newcomer.p99_ratio", p99_s / (raw.prefill_s + raw.step_s))
    bench.figures.add("language.newcomer.p99_ms", p99_s * 1e3)


@contextmanager
def _writing(found: Served, streams: int) -> Iterator[list[Answer]]:
    """Streams that write all the while."""
    answers = [found.clients.ask(new_prompt(PROMPT_TOKENS), 1 << 11) for _ in range(streams)]
    found.clients.read_until(lambda: all(each.times for each in answers), LIMIT_S)
    try:
        yield answers
        _check([each for each in answers if each.end_s])
    finally:
        for each in answers:
            if not each.end_s:
                found.clients.leave(each)
        _idle(found.clients)


def _idle(clients: LanguageClients) -> None:
    """Until slots are free again: an answer is whole."""
    _check(_all_of(clients, [clients.ask("A", 1)]))


def _close_steps(found: Served) -> int:
    """Steps that others got between a close and the first token of the one that waited, but for that token's own."""
    clients = found.clients
    with _writing(found, MAX_STREAMS) as writing:
        waiting = clients.ask(new_prompt(PROMPT_TOKENS), 1)
        until_s = time.monotonic() + 0.3
        clients.read_until(lambda: time.monotonic() > until_s, LIMIT_S)
        closed_s = time.monotonic()
        clients.leave(writing.pop())
        _check(_all_of(clients, [waiting]))
        seen = [at_s for at_s in writing[0].times if closed_s < at_s <= waiting.first_s]
    return max(len(seen) - 1, 0)


def _capacity(found: Served, seconds: float) -> tuple[float, float]:
    """Tokens a second of short answers with every slot taken, and the time of one of them."""
    answers, span_s = _closed(found, MAX_STREAMS, seconds, {})
    whole = [each for each in answers if each.is_whole]
    if not whole:
        raise BenchError("no answer was whole")
    answer_s = statistics.median(each.end_s - each.sent_s for each in whole)
    return _tokens_a_second(whole, span_s, answer_s), answer_s


def _tokens_a_second(answers: list[Answer], span_s: float, answer_s: float) -> float:
    """Tokens a second of whole answers, from when the first ones end until nothing is asked any more."""
    began_s = min((each.sent_s for each in answers), default=0.0)
    from_s, until_s = began_s + min(answer_s, span_s / 2), began_s + span_s
    return sum(from_s < each.end_s <= until_s for each in answers) * SHORT_TOKENS / (until_s - from_s)


def _closed(found: Served, clients: int, seconds: float, headers: dict[str, float]) -> tuple[list[Answer], float]:
    """So many clients, each of which asks again as soon as it is answered or refused; and the seconds it took."""

    def ask(after: Answer | None = None) -> Answer:
        return found.clients.ask(new_prompt(PROMPT_TOKENS), SHORT_TOKENS, headers, after)

    began_s = time.monotonic()
    ended: list[Answer] = []
    for _ in range(clients):
        ask()
    while time.monotonic() < began_s + seconds or len(ended) < 2 * MAX_STREAMS:
        for each in found.clients.read(0.05):
            ended.append(each)
            ask(each)
    span_s = time.monotonic() - began_s
    found.clients.read_until(lambda: not found.clients.live, LIMIT_S)
    found.clients.let_go()
    return ended, span_s


def _overloaded(found: Served, seconds: float, capacity: float, answer_s: float) -> tuple[list[Answer], float]:
    """Arrivals at random at twice the capacity, each with deadlines."""
    headers, ended = _deadlines(answer_s), []
    began_s = next_s = time.monotonic()
    while time.monotonic() < began_s + seconds:
        if time.monotonic() >= next_s:
            found.clients.ask(new_prompt(PROMPT_TOKENS), SHORT_TOKENS, headers)
            next_s += random.expovariate(2 * capacity / SHORT_TOKENS)
        ended += found.clients.read(min(next_s - time.monotonic(), 0.05))
    span_s = time.monotonic() - began_s
    ended += found.clients.read_until(lambda: not found.clients.live, LIMIT_S)
    found.clients.let_go()
    return ended, span_s


def _asked_again(found: Served, seconds: float, answer_s: float) -> tuple[list[Answer], float]:
    return _closed(found, ASKING_AGAIN, seconds, _deadlines(answer_s))


def _deadlines(answer_s: float) -> dict[str, float]:
    return {
        "x-first-token-ms": FIRST_IN_ANSWERS * answer_s * 1e3,
        "x-request-timeout-ms": WHOLE_IN_ANSWERS * answer_s * 1e3,
    }


def _judge(bench: Bench, key: str, answers: list[Answer], span_s: float, capacity: float, answer_s: float) -> None:
    """Add the figures of answers with deadlines."""
    refused = [each for each in answers if each.status in TURNED_AWAY]
    admitted = [each for each in answers if each.status not in TURNED_AWAY]
    whole_s, first_s = WHOLE_IN_ANSWERS * answer_s, FIRST_IN_ANSWERS * answer_s
    in_time = [each for each in admitted if each.is_whole and each.end_s - each.sent_s <= whole_s]
    first = [each for each in admitted if each.times and each.first_s - each.sent_s <= first_s]
    bench.figures.add(f"{key}.goodput_ratio", _tokens_a_second(in_time, span_s, answer_s) / capacity)
    bench.figures.add(f"{key}.first_in_time", len(first) / max(len(admitted), 1))
    bench.figures.add(f"{key}.admitted", len(admitted) / max(len(answers), 1))
    if refused:
        times_ms = [(each.end_s - each.sent_s) * 1e3 for each in refused]
        bench.figures.add(f"{key}.refused_p99_ms", float(np.quantile(times_ms, 0.99)))
        bench.figures.add(f"{key}.refused_s", len(refused) / span_s)


def _check(answers: list[Answer]) -> None:
    """Raise BenchError for one that was not whole."""
    for each in answers:
        if not each.is_whole:
            raise BenchError(f"an answer was not whole: {each.status} {each.tail.decode(errors='replace')[-300:]}")
