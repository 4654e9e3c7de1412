"""The forecast of an answer's first token and of its last, by what steps and answers were like so far. Pure.

Owns: two rates, seconds for a token of a prompt and for a step by its streams; how many bytes of a prompt make a token;
how long answers are; and the forecast by these. Reads no clock. Not thread-safe.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from edge_runtime.request.scheduled_model import DEVIATIONS, LatencyModel

SMOOTHING = 0.1
"""Weight of something new in a moving mean: about the last twenty count, as of run times."""

LEAST_PREFILL = 16
"""Prompt tokens of a step that tell a rate: of fewer, the noise of the step is more than their share of it."""

BYTES_A_TOKEN = 3.0
"""Before a prompt was counted: English has 4, other languages 2 and fewer, so waits are rather thought too long."""

MOST_PICTURE_TOKENS, MOST_PICTURE_S = 65_536, 60.0
"""Of one picture: the largest models of today take 16 384, and as many seconds of a small device."""

MOST_TURNS = 256
"""Of those that wait, as many are followed one by one: a forecast is to cost less than the refusal that it makes."""

MOST_OFF = 8.0
"""A step over this many times what was foreseen counts as so many: one page fault storm is not a trend."""


class Work(NamedTuple):
    """The rest of an answer. prompt: tokens of its prompt that were not read. tokens: that it will write.

    looking_s: seconds in which tokens are made of its pictures, and no other answer goes on.
    """

    prompt: float
    tokens: float
    looking_s: float = 0.0


class WaitingWork(NamedTuple):
    """The requests that begin before a new one. work: of all together."""

    requests: int = 0
    work: Work = Work(0.0, 0.0)


class Forecast(NamedTuple):
    """Seconds from now until the first token, and until the last."""

    first_token_s: float
    whole_s: float


class Mean:
    """A moving mean of something, with its mean deviation. known: whether there was anything."""

    def __init__(self, most_off: float = math.inf) -> None:
        """most_off: how many times the mean a value counts for at most."""
        self._most_off = most_off
        self.mean = 0.0
        self.deviation = 0.0
        self.known = False

    @property
    def most(self) -> float:
        """The bound that most stay under, as `LatencyModel` reckons it."""
        return self.mean + DEVIATIONS * self.deviation

    def observe(self, value: float) -> None:
        """Learn from one more."""
        if not self.known:
            self.mean, self.deviation, self.known = value, value * SMOOTHING, True
            return
        off = (min(value, self.mean * self._most_off) if self.mean else value) - self.mean
        self.mean += SMOOTHING * off
        self.deviation += SMOOTHING * (abs(off) - self.deviation)

    def relax(self) -> None:
        """Forget a tenth of what is doubtful: nothing would correct a forecast that refuses everything."""
        self.deviation *= 1 - SMOOTHING


class StepRates:
    """Times of one model's steps, and sizes of its requests."""

    def __init__(self, slots: int, prefill_tokens: int) -> None:
        """slots: streams at once. prefill_tokens: most prompt tokens of a step."""
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.prefill_s = Mean(MOST_OFF)
        self._plain = LatencyModel()
        self._own: tuple[LatencyModel, Mean] | None = None  # of before the device was slowed
        self._reading = Mean()
        self._bytes_a_token: dict[str, Mean] = {}
        self._cached = Mean()
        self._lengths = Mean()
        self.picture_tokens = 0.0
        self.picture_s = 0.0
        self._text_share = Mean()
        self._pictures = Mean()

    def heed_heat(self, *, is_slowed: bool) -> None:
        """Learn times apart while the device is slowed for its heat; those of before hold again when it is cool."""
        if is_slowed and self._own is None:
            self._own = self._plain, self.prefill_s
            self._plain, self.prefill_s = self._plain.copy(), copy.copy(self.prefill_s)
        elif self._own is not None and not is_slowed:
            (self._plain, self.prefill_s), self._own = self._own, None

    # ---- what was seen -----------------------------------------------------------------------------------------------

    def observe_step(self, took_s: float, streams: int, prefill: int) -> None:
        """Learn from a step. streams: that got a token; prefill: prompt tokens that it read."""
        if streams:
            self._reading.observe(prefill)
        if streams and not prefill:
            self._plain.observe(streams, took_s)
        elif prefill >= min(LEAST_PREFILL, self.prefill_tokens):
            self.prefill_s.observe(max(took_s - self.plain_step_s(streams), 0.0) / prefill)

    def observe_prompt(self, kind: str, nbytes: int, tokens: float, cached: float) -> None:
        """Learn how many tokens a prompt has. kind: of its text, whose bytes weigh alike. cached: were read before."""
        self._bytes_a_token.setdefault(kind, Mean()).observe(nbytes / tokens)
        self._cached.observe(min(cached / tokens, 1.0))

    def observe_picture(self, tokens: float, seconds: float) -> None:
        """Learn what a host says that one picture takes, within bounds: it is not trusted."""
        self.picture_tokens = max(0.0, min(tokens, MOST_PICTURE_TOKENS))
        self.picture_s = max(0.0, min(seconds, MOST_PICTURE_S))

    def observe_request(self, nbytes: int, text_bytes: int, pictures: int) -> None:
        """Learn how much of the bytes of requests is text, and how many pictures they have."""
        self._text_share.observe(min(text_bytes / max(nbytes, 1), 1.0))
        self._pictures.observe(float(pictures))

    def observe_length(self, tokens: int) -> None:
        """Learn how long an answer was that ended by itself, or by its own bound."""
        self._lengths.observe(float(tokens))

    def relax(self) -> None:
        """Hope for better: nothing runs that would correct a forecast that was too dark."""
        self._plain.relax()
        self.prefill_s.relax()
        if self._own is None:  # else it may be the heat alone that refuses
            self._lengths.relax()

    # ---- what follows ------------------------------------------------------------------------------------------------

    def prompt_tokens(self, kind: str, nbytes: float) -> float:
        """Return about how many tokens a prompt of these bytes has."""
        known = self._bytes_a_token.get(kind)
        return nbytes / (known.mean if known is not None and known.mean else BYTES_A_TOKEN)

    def to_read(self, kind: str, nbytes: float) -> float:
        """Return how many of them are to be read, about: of prompts that begin alike the rest was read before."""
        return self.prompt_tokens(kind, nbytes) * (1 - max(self._cached.mean - self._cached.deviation, 0.0))

    def work(self, kind: str, text_bytes: float, pictures: float, tokens: float) -> Work:
        """Return the work of prompts with pictures. tokens: that their answers will have."""
        read = self.to_read(kind, text_bytes) + pictures * self.picture_tokens
        return Work(read, tokens, pictures * self.picture_s)

    def waiting_work(self, requests: int, kind: str, nbytes: float, tokens: float) -> WaitingWork:
        """Return the work of requests that wait, which have as much text and as many pictures as those of late."""
        share = self._text_share.mean if self._text_share.known else 1.0
        return WaitingWork(requests, self.work(kind, nbytes * share, requests * self._pictures.mean, tokens))

    def likely_tokens(self, kind: str, nbytes: float) -> float:
        """Return about how many tokens a prompt of a request of these bytes has, its pictures' with them."""
        share = self._text_share.mean if self._text_share.known else 1.0
        return self.prompt_tokens(kind, nbytes * share) + self._pictures.mean * self.picture_tokens

    def length(self, bound: int | None) -> float:
        """Return how many tokens an answer may well have. bound: that its request sets, None without."""
        likely = self._lengths.most if self._lengths.known else None
        if likely is None:
            return float(bound or 1)
        return max(min(likely, bound) if bound is not None else likely, 1.0)

    def left(self, bound: int | None, made: int) -> float:
        """Return how many tokens an answer may still have that has some. bound: as of `length`.

        One that is longer than most goes on for half as long again, as far as is known, within its bound.
        """
        longest = math.inf if bound is None else float(bound - made)
        return max(min(max(self.length(bound) - made, made / 2), longest), 1.0)

    def plain_step_s(self, streams: int) -> float:
        """Return the time of a step of these streams that reads no prompt; 0.0 while nothing is known."""
        return self._plain.mean_s(streams) if streams else 0.0

    def step_s(self, streams: int) -> float:
        """Return the time that most steps of these streams stay under, with an average share of prompts."""
        return self._plain.predict_s(streams) + self._reading.mean * self.prefill_s.mean if streams else 0.0

    def forecast(self, live: Sequence[Work], waiting: WaitingWork, new: Work) -> Forecast:
        """Return when a new answer has its first token and its last. live: those that are written now.

        All streams write at the same pace. Prompts are read one after another, of at most `prefill_tokens` in a step,
        which writes a token of every stream too; meanwhile all wait for it. A request that finds no slot free gets one
        when enough of those before it have ended.
        """
        streams = min(len(live) + waiting.requests + 1, self.slots)
        step_s = self._plain.predict_s(streams)
        read = sum(each.prompt for each in live) + waiting.work.prompt + new.prompt
        steps = max(-(-read // self.prefill_tokens), 1.0)
        own_steps = max(-(-new.prompt // self.prefill_tokens), 1.0)
        written_s = max(self._slot_s(live, waiting, step_s) + own_steps * step_s, steps * step_s)
        looking_s = sum(each.looking_s for each in live) + waiting.work.looking_s + new.looking_s
        first_s = read * self.prefill_s.most + written_s + looking_s
        return Forecast(first_s, first_s + (max(new.tokens, 1.0) - 1.0) * self.step_s(streams))

    def _slot_s(self, live: Sequence[Work], waiting: WaitingWork, step_s: float) -> float:
        """Return how long a new request waits for a slot, but for prompts that are read meanwhile.

        Those that wait take the next that is free, in their order, each for as long as one of them lasts on average.
        """
        if len(live) + waiting.requests < self.slots:
            return 0.0
        free_s = [each.tokens * step_s for each in live][: self.slots]
        free_s += [0.0] * (self.slots - len(free_s))
        heapq.heapify(free_s)
        each_s = waiting.work.tokens * step_s / max(waiting.requests, 1)
        for _ in range(min(waiting.requests, MOST_TURNS)):
            heapq.heapreplace(free_s, free_s[0] + each_s)
        return free_s[0] + max(waiting.requests - MOST_TURNS, 0) * each_s / self.slots
