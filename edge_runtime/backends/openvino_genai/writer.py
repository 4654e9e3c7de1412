"""The answers of one language model in its host: begun and ended as ordered, written a step at a time.

Owns: the library's pipeline of all answers under way, which request of it is which generation, and what each step made
of them. A step that fails ends the generation that is to blame, and no other. Thread: one at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, PromptTooLong, RunFailed, UnreadableText, Unsupported
from edge_runtime.language.messages import TOO_LONG, Begin, Orders, StepEvents, TextEvent, TokenScore, TokenScores
from edge_runtime.language.new_text import NewText
from edge_runtime.language.parameters import Parameters

NO_LIMIT = (1 << 64) - 1
"""The library's own word for a number that is not set."""


class _Generation:
    """One answer under way. number: the daemon's. tokens: made so far; left: of the prompt, not read yet."""

    def __init__(self, begin: Begin, ids: list[int], config: Any, text: NewText) -> None:
        self.number = begin.id
        self.parameters = begin.parameters
        self.ids = ids
        self.config = config
        self.text = text
        self.handle: Any = None
        self.tokens = 0
        self.left = len(ids)
        self.is_told = False


class Writer:
    """Writes answers by the library's pipeline.

    make: makes the pipeline, at the beginning and once more where it is broken. context: most tokens of a prompt with
    its answer. prefill_tokens: of a step. block_tokens, blocks: of the cache of keys and values.
    """

    def __init__(
        self,
        library: ModuleType,
        make: Callable[[], Any],
        *,
        context: int,
        prefill_tokens: int,
        block_tokens: int,
        blocks: int,
        max_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._library = library
        self._make = make
        self._pipeline: Any = make()
        self._tokenizer: Any = self._pipeline.get_tokenizer()
        self.context = min(context, block_tokens * blocks)
        self._prefill_tokens = prefill_tokens
        self._kv_total = block_tokens * blocks
        self._max_tokens = max_tokens
        self._clock = clock
        self._live: dict[int, _Generation] = {}
        self._requests = 0  # the library's numbers
        self._has_cancelled = False

    # ---- a step -----------------------------------------------------------------------------------------------------

    def step(self, orders: Orders) -> StepEvents:
        """Carry out orders, and make one step of the library where anything is under way.

        Raises nothing: a failure is the event of its generation.
        """
        events = list(self._take(orders))
        began_s = self._clock()
        prefill = decode = 0
        if self._live or self._has_cancelled:
            prefill, decode = self._count_step()
            events += self._run()
            if self._has_cancelled and not self._live:
                events += self._run()  # frees what they held
        return StepEvents(
            events=tuple(events),
            prefill_tokens=prefill,
            decode_tokens=decode,
            step_s=self._clock() - began_s if prefill or decode else 0.0,
            waiting_prefill=sum(each.left for each in self._live.values()),
            live=len(self._live),
            kv_used=self._kv_used(),
            kv_total=self._kv_total,
            context=self.context,
        )

    def _take(self, orders: Orders) -> Iterable[TextEvent]:
        """Cancel and begin what the orders say. Returns the events of those that cannot go on."""
        known = {*orders.live, *(each.id for each in orders.begins)}
        for number in [number for number in self._live if number not in known]:
            self._cancel(number)
        for number in orders.live:
            if number not in self._live:
                yield TextEvent(number, code=RunFailed.code, message="the process that wrote it has ended; ask again")
        for begin in orders.begins:
            try:
                self._live[begin.id] = self._begin(begin)
            except PromptTooLong as error:
                yield TextEvent(begin.id, code=TOO_LONG, message=error.message)
            except EdgeRuntimeError as error:
                yield TextEvent(begin.id, code=error.code, message=error.message)

    def _run(self) -> list[TextEvent]:
        """Make one step of the library's pipeline; where it fails, without those that are to blame."""
        try:
            self._has_cancelled = False
            self._pipeline.step()
        except Exception as error:  # noqa: BLE001  the library's errors have no kind of their own
            return self._recover(error)
        return self._read()

    # ---- orders -----------------------------------------------------------------------------------------------------

    def _begin(self, begin: Begin) -> _Generation:
        """Give a generation to the library. Raises the caller's fault."""
        ids = self._ids_of(begin)
        config = self._config_of(begin.parameters, len(ids))
        made = _Generation(begin, ids, config, NewText(self._decode, begin.parameters.stop))
        self._add(made)
        return made

    def _add(self, generation: _Generation) -> None:
        import numpy as np

        self._requests += 1
        ids = self._library.openvino.Tensor(np.array([generation.ids], np.int64))
        try:
            generation.handle = self._pipeline.add_request(self._requests, ids, generation.config)
        except (RuntimeError, ValueError, TypeError) as error:
            raise RunFailed(f"OpenVINO GenAI: {_reason(error)}") from error

    def _ids_of(self, begin: Begin) -> list[int]:
        """Return the tokens of a prompt. Raises UnreadableText, DecodeFailed, PromptTooLong."""
        if begin.text is None:
            raise Unsupported("chats are not read yet; send the prompt as text")
        try:
            text = begin.text.decode()
        except UnicodeDecodeError as error:
            raise UnreadableText(f"the prompt is not UTF-8: byte {error.start} of {len(begin.text)}") from None
        ids = self._encoded(text, special=True)
        if not ids:
            raise DecodeFailed("the prompt is empty; a model goes on with a text, so send one")
        if len(ids) >= self.context:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; the context of the model holds {self.context}, at least one of "
                "the answer among them; send a shorter one"
            )
        return ids

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special).input_ids.data[0].tolist()
        return found

    def _config_of(self, parameters: Parameters, prompt: int) -> Any:
        """Return the library's settings of one answer: the model's own, and on top what was asked for."""
        config = self._pipeline.get_config()
        room = self.context - prompt
        config.max_new_tokens = min(room, parameters.max_tokens or self._max_tokens or room)
        config.num_return_sequences = config.num_beams = 1
        config.stop_strings = set()
        config.apply_chat_template = False
        config.ignore_eos = parameters.ignore_eos
        if parameters.temperature is not None:
            config.do_sample = parameters.temperature > 0
            config.temperature = parameters.temperature or 1.0
        for name in ("top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if (value := getattr(parameters, name)) is not None:
                setattr(config, name, value)
        if parameters.top_k is not None:
            config.top_k = parameters.top_k or NO_LIMIT
        if parameters.seed is not None:
            config.rng_seed = parameters.seed % (1 << 63)
        if parameters.logprobs is not None:
            if parameters.logprobs > 1:
                raise Unsupported(
                    f"logprobs: got {parameters.logprobs}; OpenVINO GenAI tells the likeliest alone: ask for 0 or 1"
                )
            config.logprobs = 1
        try:
            config.validate()
        except RuntimeError as error:
            raise DecodeFailed(f"OpenVINO GenAI: {_reason(error)}") from error
        return config

    def _cancel(self, number: int) -> None:
        self._live.pop(number).handle.cancel()
        self._has_cancelled = True

    # ---- what a step made -------------------------------------------------------------------------------------------

    def _count_step(self) -> tuple[int, int]:
        """Return how many tokens the next step reads of prompts, and how many it writes.

        As the library's scheduler: answers go first, and what they leave of its budget goes to prompts in their order.
        """
        decode = sum(not each.left for each in self._live.values())
        budget = max(self._prefill_tokens - decode, 0)
        prefill = 0
        for each in self._live.values():
            share = min(each.left, budget - prefill)
            each.left -= share
            prefill += share
        return prefill, decode

    def _read(self) -> list[TextEvent]:
        """Take from each generation what the step made of it."""
        return [event for each in [*self._live.values()] if (event := self._news(each)) is not None]

    def _news(self, each: _Generation) -> TextEvent | None:
        handle, statuses = each.handle, self._library.GenerationStatus
        ids: list[int] = []
        scores: list[float] = []
        reason = ""
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
                scores += output.generated_log_probs
                reason = _REASONS.get(output.finish_reason.name, "")
        status = handle.get_status()
        if not ids and status == statuses.RUNNING:
            return None
        each.tokens += len(ids)
        each.left = 0 if ids else each.left
        text = each.text.add(ids)
        if status == statuses.IGNORED:
            self._live.pop(each.number)
            return TextEvent(
                each.number, code=RunFailed.code, message="the cache of keys and values has no room for it"
            )
        if status != statuses.RUNNING or each.text.is_stopped:
            reason = "stop" if each.text.is_stopped else reason or "stop"
            text += each.text.end()
            if status == statuses.RUNNING:
                self._cancel(each.number)
            else:
                self._live.pop(each.number)
        else:
            reason = ""
        scored = self._scores(ids, scores) if each.parameters.logprobs is not None else ()
        return TextEvent(each.number, text, len(each.ids), each.tokens, 0, (), scored, reason)

    def _scores(self, ids: list[int], scores: list[float]) -> tuple[TokenScores, ...]:
        def one(token: int, score: float) -> TokenScores:
            text = self._decode([token])
            data = tuple(text.encode())
            return TokenScores(text, score, data, (TokenScore(text, score, data),))

        return tuple(one(token, score) for token, score in zip(ids, scores, strict=False))

    def _decode(self, ids: Any) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text

    def _kv_used(self) -> int:
        share: float = self._pipeline.get_metrics().cache_usage / 100
        return round(share * self._kv_total)

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _recover(self, error: Exception) -> list[TextEvent]:
        """End those that made a step fail. The others go on: those without a token yet are begun once more, alone."""
        suspects = [each for each in self._live.values() if not each.tokens]
        others = [each for each in self._live.values() if each.tokens]
        for each in suspects:
            self._cancel(each.number)
        events: list[TextEvent] = []
        if not self._steps():
            for each in others:
                events.append(_failed(each, error))
                self._live.pop(each.number)
            self._pipeline = self._make()
        events += self._read()
        for each in suspects:
            with contextlib.suppress(EdgeRuntimeError):
                self._add(each)
                each.left = len(each.ids)
                self._live[each.number] = each
                if self._steps():
                    events += self._read()
                    continue
                self._cancel(each.number)
                self._steps()
            events.append(_failed(each, error))
        return _joined(events)

    def _steps(self) -> bool:
        """Make a step; whether it went well."""
        try:
            self._pipeline.step()
        except Exception:  # noqa: BLE001  as above
            return False
        self._has_cancelled = False
        return True

    def close(self) -> None:
        """Drop the pipeline."""
        for each in self._live.values():
            each.handle.cancel()
        self._live.clear()
        self._pipeline = self._tokenizer = None


_REASONS: Mapping[str, str] = {"STOP": "stop", "LENGTH": "length", "TOOL_CALL": "stop"}


def _failed(each: _Generation, error: Exception) -> TextEvent:
    return TextEvent(each.number, code=RunFailed.code, message=f"OpenVINO GenAI: {_reason(error)}")


def _joined(events: Iterable[TextEvent]) -> list[TextEvent]:
    """One event of each generation, of those of several steps."""
    found: dict[int, TextEvent] = {}
    for each in events:
        before = found.get(each.id)
        if before is None:
            found[each.id] = each
        else:
            found[each.id] = TextEvent(
                each.id,
                before.text + each.text,
                each.prompt_tokens or before.prompt_tokens,
                each.completion_tokens or before.completion_tokens,
                each.cached_tokens or before.cached_tokens,
                before.tool_calls + each.tool_calls,
                before.logprobs + each.logprobs,
                each.finish_reason,
                each.code,
                each.message,
            )
    return [*found.values()]


def _reason(error: Exception) -> str:
    """The library's message without its lines of source locations, cut to 600 characters."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(told or lines)[:600]


def context_of(folder: Path) -> int | None:
    """Return the context that a model's config.json tells; None where it tells none."""
    import json

    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    for each in (config, config.get("text_config") or {}) if isinstance(config, dict) else ():
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if isinstance(value := each.get(key), int) and value > 0:
                return value
    return None
