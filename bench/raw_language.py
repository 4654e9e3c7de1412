"""OpenVINO GenAI's continuous batching in plain Python, with no server around it.

    python raw_language.py '{"folder": …, "threads": 1, "streams": 4, "tokens": 9, "prefill_tokens": 128, "seconds": 3}'

A process of its own each time, as raw.py. Prints one line of JSON: tokens a second once all streams write, the time of
a step of that, and the time of a step that reads a whole budget of a prompt and writes nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import string
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

PROMPT_TOKENS = 32
LONG_TOKENS = 1024
BLOCKS = 512
"""Of 32 tokens, in the cache: far more than the streams need."""


@dataclass(frozen=True, slots=True)
class LanguageRun:
    """What to measure: a model's folder, and how much is written at once."""

    folder: str
    threads: int
    streams: int
    tokens: int
    prefill_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LanguageResult:
    """What the library needs."""

    tokens_s: float
    step_s: float
    prefill_s: float


def new_prompt(tokens: int) -> str:
    """A prompt of so many tokens that begins as no other: of the bench's models, each capital is one."""
    return "".join(random.choices(string.ascii_uppercase + string.digits, k=tokens))


def measure(run: LanguageRun) -> LanguageResult:
    """Write with all streams again and again, then read prompts alone."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = BLOCKS
    scheduler.max_num_batched_tokens = run.prefill_tokens
    scheduler.max_num_seqs = max(run.streams, 1)
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": run.threads, "ENABLE_CPU_PINNING": False}
    pipeline = openvino_genai.ContinuousBatchingPipeline(run.folder, scheduler, "CPU", properties)
    _written(pipeline, 1, 8)
    rates, steps, until_s = [], [], time.monotonic() + run.seconds
    while time.monotonic() < until_s or not rates:
        found = _written(pipeline, run.streams, run.tokens)
        rates.append(run.streams * (run.tokens - 1) / sum(found))
        steps += found
    reads = [each for _ in range(3) for each in _read(pipeline, run.prefill_tokens)]
    return LanguageResult(statistics.median(rates), statistics.median(steps), statistics.median(reads))


def _written(pipeline: Any, streams: int, tokens: int) -> list[float]:
    """Seconds of the steps after which every stream has a token more."""
    handles = [_begun(pipeline, PROMPT_TOKENS, tokens) for _ in range(streams)]
    waiting, took = set(range(streams)), []
    while pipeline.has_non_finished_requests():
        began_s = time.perf_counter()
        pipeline.step()
        for place, handle in enumerate(handles):
            while handle.can_read():
                handle.read()
                waiting.discard(place)
        if not waiting:
            took.append(time.perf_counter() - began_s)
    return took[1:]


def _read(pipeline: Any, budget: int) -> list[float]:
    """Seconds of the steps that read a whole budget of one prompt."""
    handle, took = _begun(pipeline, LONG_TOKENS, 1), []
    for _ in range(LONG_TOKENS // budget):
        began_s = time.perf_counter()
        pipeline.step()
        took.append(time.perf_counter() - began_s)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    del handle
    return took


_numbers = iter(range(1 << 30))


def _begun(pipeline: Any, prompt: int, tokens: int) -> Any:
    config = pipeline.get_config()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
    config.apply_chat_template = False
    return pipeline.add_request(next(_numbers), new_prompt(prompt), config)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(LanguageRun(**json.loads(sys.argv[1]))))))
