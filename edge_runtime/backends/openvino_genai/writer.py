"""The answers of one language model in its host: begun and ended as ordered, written a step at a time.

Owns: the library's pipeline of all answers under way, which request of it is which generation, and what each step made
of them. A step that fails ends the generation that is to blame, and no other. Thread: one at a time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_runtime.backends.openvino_genai.eyes import MARK, MARKS, Eyes
from edge_runtime.backends.openvino_genai.token_texts import TokenTexts
from edge_runtime.backends.openvino_genai.trials import Trials, structured
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, PromptTooLong, RunFailed, UnreadableText, Unsupported
from edge_runtime.language.calls import CallReader, Guide
from edge_runtime.language.chat import ChatModel, PreparedChat, prepare
from edge_runtime.language.messages import (
    TOO_LONG,
    Begin,
    Orders,
    StepEvents,
    TextEvent,
    TokenScore,
    TokenScores,
    error_of,
)
from edge_runtime.language.new_text import NewText
from edge_runtime.language.parameters import Parameters
from edge_runtime.language.pictures import LONGEST_SIDE, check_marks
from edge_runtime.language.settings import GRAMMARS_MB
from edge_runtime.tensors import Array

NO_LIMIT = (1 << 64) - 1
"""The library's own word for a number that is not set."""

TRIAL_S = 0.02
"""A step waits so long for the trials of grammars, where nothing else is under way."""

HEAD_BYTES = 16
"""Of a text, for each token of the context: where so much of it is too long by itself, the rest is not looked at."""

OWN = -1
"""The number of an answer that the daemon did not order: of a run in the model's own form."""

MEASURED_SIDES = (LONGEST_SIDE, LONGEST_SIDE // 2)
"""Of pictures with which a model is measured when it is loaded, the largest that there is first."""


class _Generation:
    """One answer under way. number: the daemon's. made: its tokens so far. left: of the prompt, not read yet.

    cached: tokens of the prompt that the cache had, at least: how many fewer were read than it has. reader: finds the
    calls in its text. trial: of its grammar. size: tokens of the prompt, with those of its pictures, which are guessed
    until its end. prompt, opening, pictures, shapes: of a model that sees pictures, which reads a prompt as text;
    pictures are there from when they are opened until they were read.
    """

    def __init__(
        self, begin: Begin, ids: list[int], config: Any, text: NewText, reader: CallReader | None = None
    ) -> None:
        self.reader = reader or CallReader(None)
        self.trial: Future[Guide] | None = None
        self.opening: Future[list[Array]] | None = None
        self.prompt = ""
        self.pictures: list[Array] = []
        self.shapes: list[tuple[int, ...]] = []
        self.number = begin.id
        self.parameters = begin.parameters
        self.ids = ids
        self.config = config
        self.most = int(config.max_new_tokens)
        self.text = text
        self.handle: Any = None
        self.made: list[int] = []
        self.size = self.left = len(ids)
        self.cached = 0

    @property
    def waits_for(self) -> list[Future[Any]]:
        """Return the work that must end before the library gets it."""
        return [each for each in (self.opening, self.trial) if each is not None]


class Writer:
    """Writes answers by the library's pipeline.

    make: makes the pipeline of the model in `folder`, at the beginning, and once more where it is broken or keeps too
    many grammars. context: most tokens of a prompt with its answer. prefill_tokens, streams: of a step. block_tokens,
    blocks: of the cache of keys and values. max_tokens: of an answer whose request does not say. grammar_bytes: of
    grammars, beyond which the pipeline is made anew once no answer is under way. eyes: of a model that sees pictures.
    """

    def __init__(
        self,
        library: ModuleType,
        make: Callable[[], Any],
        *,
        folder: Path,
        context: int,
        prefill_tokens: int,
        streams: int,
        block_tokens: int,
        blocks: int,
        max_tokens: int | None = None,
        grammar_bytes: int = GRAMMARS_MB << 20,
        eyes: Eyes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.eyes = eyes
        self._looked_s = 0.0
        self._library = library
        self._make = make
        self._folder = folder
        self._grammar_bytes = grammar_bytes
        self._renew()
        self.context = min(context, block_tokens * blocks)
        self._prefill_tokens = prefill_tokens
        self._streams = streams
        self._block_tokens = block_tokens
        self._kv_total = block_tokens * blocks
        self._max_tokens = max_tokens
        self._clock = clock
        self._live: dict[int, _Generation] = {}
        self._tried: dict[int, _Generation] = {}  # live for the daemon; the library gets them when their trial is over
        self._requests = 0  # the library's numbers
        self._frees = False  # whether the next step frees what answers held that have ended
        self._untold: list[TextEvent] = []
        self._steps = 0
        self._ended: set[int] = set()  # by the last step, which the daemon may not know yet

    def _renew(self) -> None:
        """Make the pipeline, and what goes with its tokenizer."""
        self._pipeline: Any = self._make()
        self._tokenizer: Any = self._pipeline.get_tokenizer()
        self._texts = TokenTexts(self._tokenizer)
        self._chats = ChatModel(self._tokenizer, MARK if self.eyes is not None else "")
        self._trials = Trials(self._library, self._tokenizer, self._folder, self._grammar_bytes)

    def _forget_grammars(self) -> None:
        """Drop the pipeline with the grammars that it keeps, and make another. Raises RunFailed: it cannot be made."""
        self._trials.close()
        del self._texts, self._chats, self._trials  # each has the tokenizer, which has the grammars
        self._pipeline = self._tokenizer = None
        self._make_again()

    def _make_again(self) -> None:
        try:
            self._renew()
            self.warm_up()
        except (RuntimeError, ValueError, TypeError, OSError, EdgeRuntimeError) as error:
            self._live.clear()
            self._pipeline = None  # the next step tries again
            raise RunFailed(f"OpenVINO GenAI cannot load the model again: {reason_of(error)}") from error

    # ---- a step -----------------------------------------------------------------------------------------------------

    def step(self, orders: Orders) -> StepEvents:
        """Carry out orders, and make one step of the library where anything is under way.

        Where nothing is, and the library keeps too many grammars, it is made anew. A failure is the event of its
        generation. Raises RunFailed: what was to be made anew cannot be made.
        """
        if self._pipeline is None:
            self._make_again()
        self._looked_s = 0.0
        events, self._untold = [*self._untold, *self._take(orders)], []
        events += self._take_tried()
        began_s = self._clock()
        prefill = decode = 0
        if self._live:
            prefill, decode = self._count_step()
            events += self._run()
        if self._frees and not self._live:
            self._run()  # frees what they held
            self._run()  # counts what is held
        self._steps += 1
        is_idle = not (self._live or self._tried)
        if is_idle and not (orders.begins or events) and self._trials.are_many:
            self._forget_grammars()
        told = tuple(_joined(events))
        self._ended = {each.id for each in told if each.is_last}
        return StepEvents(
            events=told,
            prefill_tokens=prefill,
            decode_tokens=decode,
            step_s=self._clock() - began_s if prefill or decode else 0.0,
            waiting_prefill=sum(each.left for each in (*self._live.values(), *self._tried.values())),
            live=len(self._live) + len(self._tried),
            kv_used=self._kv_used(),
            kv_total=self._kv_total,
            context=self.context,
            wants_rest=is_idle and self._trials.are_many,
            number=self._steps,
            picture_tokens=self.eyes.tokens if self.eyes is not None else 0,
            picture_s=self.eyes.seconds if self.eyes is not None else 0.0,
            looked_s=self._looked_s,
        )

    def warm_up(self) -> int:
        """Write one token, which makes the cache; return the bytes that it takes.

        With eyes a token more for each picture that measures them. Raises DecodeFailed: the model's own configuration
        of its answers cannot be used; RunFailed.
        """
        self.config_of(Parameters(), 1)  # whether the model's own configuration can be used
        self._write_one(())
        if self.eyes is not None and not self.eyes.tokens:
            self._measure(self.eyes)
        return int(self._pipeline.get_metrics().kv_cache_size_in_bytes)

    def _measure(self, eyes: Eyes) -> None:
        """Have the model look at grey squares. Raises RunFailed: the smallest does not fit its cache."""
        import numpy as np

        for side in MEASURED_SIDES:
            try:
                self._write_one([np.full((side, side, 3), 127, np.uint8)])
            except RunFailed:
                if side == MEASURED_SIDES[-1] and not eyes.tokens:
                    raise

    def _write_one(self, pictures: Sequence[Array]) -> None:
        """Write one token of nothing, or of pictures. Raises RunFailed."""
        config = self.config_of(Parameters(max_tokens=1, temperature=0.0), 1)
        made = _Generation(Begin(OWN, b"", None), [0], config, NewText(self._texts.text))
        if self.eyes is not None:
            made.ids = self._encoded("a", special=True)
            made.prompt, made.pictures = "".join(map(MARK.format, range(len(pictures)))) + "a", [*pictures]
            made.shapes = [each.shape for each in pictures]
        self._live[OWN] = made
        self._add(made)
        while self._live:
            for event in self._run():
                if event.code:
                    raise error_of(event)
        self._run()

    def write(self, begin: Begin) -> tuple[str, TextEvent]:
        """Write one answer to its end; return its text, and its last event. begin.id: OWN.

        What the steps make of others meanwhile is told by the next `step`. Raises the error that it ends with.
        """
        if self._pipeline is None:
            self._make_again()
        self._live[OWN] = self._begin(begin)
        text = ""
        while True:
            self._count_step()
            for event in self._run():
                if event.id != OWN:
                    self._untold.append(event)
                    continue
                text += event.text
                if event.code:
                    raise error_of(event)
                if event.is_last:
                    return text, event

    def _take(self, orders: Orders) -> Iterable[TextEvent]:
        """Cancel and begin what the orders say. Returns the events of those that cannot go on."""
        for number in [number for number in self._live if number not in orders.live]:
            self._cancel(number)
        for number in [number for number in self._tried if number not in orders.live]:
            for waited in self._tried.pop(number).waits_for:
                waited.cancel()
        told = {each.id for each in self._untold} | self._ended
        for number in orders.live:
            if number not in self._live and number not in self._tried and number not in told:
                yield TextEvent(number, code=RunFailed.code, message="the process that wrote it has ended; ask again")
        for begin in orders.begins:
            try:
                made = self._begin(begin)
                (self._tried if made.waits_for else self._live)[begin.id] = made
            except PromptTooLong as error:
                yield TextEvent(begin.id, code=TOO_LONG, message=error.message)
            except EdgeRuntimeError as error:
                retry_ms = error.retry_after_ms or 0.0
                yield TextEvent(begin.id, code=error.code, message=error.message, retry_after_ms=retry_ms)

    def _take_tried(self) -> Iterable[TextEvent]:
        """Begin the answers whose grammar was tried, and whose pictures are open. Returns the events of failures.

        A step looks at one chat's pictures: the others that write wait meanwhile.
        """
        tried = [*self._tried.values()]
        if tried and not self._live:
            wait([each for one in tried for each in one.waits_for if not each.done()], TRIAL_S, FIRST_COMPLETED)
        for each in tried:
            if not all(waited.done() for waited in each.waits_for) or (each.opening is not None and self._looked_s):
                continue
            del self._tried[each.number]
            try:
                if each.opening is not None:
                    self._take_pictures(each, each.opening.result())
                if each.trial is not None:
                    each.config.structured_output_config = structured(self._library, each.trial.result())
                self._add(each)
                self._live[each.number] = each
            except PromptTooLong as error:
                yield TextEvent(each.number, code=TOO_LONG, message=error.message)
            except EdgeRuntimeError as error:
                yield TextEvent(each.number, code=error.code, message=error.message)
            except Exception as error:  # noqa: BLE001  as in `_run`
                message = f"OpenVINO GenAI: {reason_of(error)}"
                yield TextEvent(each.number, code=RunFailed.code, message=message)

    def _run(self) -> list[TextEvent]:
        """Make one step of the library's pipeline; where it fails, without those that are to blame."""
        try:
            self._pipeline.step()
        except Exception as error:  # noqa: BLE001  the library's errors have no kind of their own
            return self._recover(error)
        self._frees = False
        return self._read()

    # ---- orders -----------------------------------------------------------------------------------------------------

    def _begin(self, begin: Begin) -> _Generation:
        """Give a generation to the library, or its grammar to a trial and its pictures to be opened.

        Raises the caller's fault.
        """
        chat = None if begin.chat is None else prepare(begin.chat, self._chats)
        ids = self._ids_of(begin, chat)
        config = self.config_of(begin.parameters, len(ids))
        text = NewText(self._texts.text if chat is None else self._decoder(chat.marks), begin.parameters.stop)
        made = _Generation(begin, ids, config, text, None if chat is None else chat.reader)
        if self.eyes is not None:
            made.prompt = self._checked_prompt(begin, chat)
            if chat is not None and chat.pictures:
                made.opening = self.eyes.open(chat.pictures)
        if chat is not None and chat.shape is not None:
            made.trial = self._trials.begin(chat.shape)
        if not made.waits_for:
            self._add(made)
        return made

    def _checked_prompt(self, begin: Begin, chat: PreparedChat | None) -> str:
        """Return the prompt as the library takes it where it sees pictures: as text. Raises DecodeFailed.

        The library adds special tokens to each prompt. Where a chat's has that of a beginning already, it is taken out.
        """
        prompt = (begin.text or b"").decode() if chat is None else chat.prompt
        marks = tuple(map(MARK.format, range(len(chat.pictures)))) if chat is not None else ()
        check_marks(prompt, marks, MARKS, lambda text: len(self._encoded(text, special=False)) == 1)
        first: str = self._tokenizer.get_bos_token()
        if chat is not None and first and prompt.startswith(first):
            bare = prompt.removeprefix(first)
            if self._encoded(bare, special=True) == self._encoded(prompt, special=False):
                return bare
        return prompt

    def _take_pictures(self, each: _Generation, pictures: list[Array]) -> None:
        """Reckon with the pictures of a chat, which are open. Raises PromptTooLong."""
        assert self.eyes is not None
        each.pictures, each.shapes = pictures, [picture.shape for picture in pictures]
        each.size = each.left = len(each.ids) + self.eyes.count(each.shapes)
        if each.size >= self.context:
            raise PromptTooLong(
                f"the prompt has about {each.size} tokens, {each.size - len(each.ids)} of them of its pictures; the "
                f"context of the model holds {self.context}, at least one of them of the answer; send fewer pictures"
            )
        each.most = min(each.most, self.context - each.size)

    def _decoder(self, marks: Sequence[str]) -> Callable[[Sequence[int]], str]:
        """Return a decoder that writes these texts where their special tokens stand, which are left out otherwise."""
        ids = {mark: self._encoded(mark, special=False) for mark in marks}
        kept = {found[0]: mark for mark, found in ids.items() if len(found) == 1}
        if not kept:
            return self._texts.text

        def decode(tokens: Sequence[int]) -> str:
            text, start = "", 0
            for at, token in enumerate(tokens):
                if token in kept:
                    text += (self._texts.text(tokens[start:at]) if at > start else "") + kept[token]
                    start = at + 1
            return text + (self._texts.text(tokens[start:]) if start < len(tokens) else "")

        return decode

    def _add(self, generation: _Generation) -> None:
        import numpy as np

        self._requests += 1
        generation.config.max_new_tokens = generation.most - len(generation.made)
        try:
            if self.eyes is not None:
                generation.handle = self._look(generation, self.eyes)
                return
            ids = self._library.openvino.Tensor(np.array([generation.ids + generation.made], np.int64))
            generation.handle = self._pipeline.add_request(self._requests, ids, generation.config)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise RunFailed(f"OpenVINO GenAI: {reason_of(error)}") from error

    def _look(self, generation: _Generation, eyes: Eyes) -> Any:
        """Add a request to a pipeline that sees pictures, which makes tokens of them here. Returns its handle."""
        began_s = self._clock()
        pictures = [self._library.openvino.Tensor(each) for each in generation.pictures]
        handle = self._pipeline.add_request(self._requests, generation.prompt, pictures, generation.config)
        with warnings.catch_warnings():
            # Else the library keeps the tokens of every prompt for ever, for a chat that nobody began.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pipeline.finish_chat()
        if pictures:
            took_s = self._clock() - began_s
            self._looked_s += took_s
            eyes.observe(took_s / len(pictures))
        return handle

    def _ids_of(self, begin: Begin, chat: PreparedChat | None) -> list[int]:
        """Return the tokens of a prompt. Raises UnreadableText, DecodeFailed, PromptTooLong."""
        given = begin.text or b""
        try:
            text = given.decode() if chat is None else chat.prompt
        except UnicodeDecodeError as error:
            raise UnreadableText(f"the prompt is not UTF-8: byte {error.start} of {len(given)}") from None
        for number in range(len(chat.pictures) if chat is not None else 0):
            text = text.replace(MARK.format(number), "")
        head = text[: HEAD_BYTES * self.context]
        ids = self._encoded(head, special=chat is None)
        if len(head) < len(text) and len(ids) < self.context:
            ids, head = self._encoded(text, special=chat is None), text
        if not ids and not (chat is not None and chat.pictures):
            raise DecodeFailed("the prompt is empty; a model goes on with a text, so send one")
        if len(ids) >= self.context:
            got = f"over {len(ids)}" if len(head) < len(text) else str(len(ids))
            raise PromptTooLong(
                f"the prompt has {got} tokens; the context of the model holds {self.context}, at least one of them "
                "of the answer; send a shorter one"
            )
        return ids

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special).input_ids.data[0].tolist()
        return found

    def config_of(self, parameters: Parameters, prompt: int) -> Any:
        """Return the library's settings of one answer: the model's own, and on top what was asked for."""
        config = self._pipeline.get_config()
        room = self.context - prompt
        config.max_new_tokens = min(room, parameters.max_tokens or self._max_tokens or room)
        config.num_return_sequences = config.num_beams = config.num_beam_groups = 1
        config.diversity_penalty = 0.0
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
            raise DecodeFailed(f"OpenVINO GenAI: {reason_of(error)}") from error
        return config

    def _cancel(self, number: int) -> None:
        self._live.pop(number).handle.cancel()
        self._frees = True

    # ---- what a step made -------------------------------------------------------------------------------------------

    def _count_step(self) -> tuple[int, int]:
        """Return how many tokens the next step reads of prompts, and how many it writes.

        As the library's scheduler: answers go first, and what they leave of its budget goes to prompts in their order.
        """
        running = [*self._live.values()][: self._streams]
        decode = sum(not each.left for each in running)
        budget = max(self._prefill_tokens - decode, 0)
        prefill = 0
        for each in running:
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
        each.made += ids
        if ids and each.left:
            each.cached, each.left = each.left // self._block_tokens * self._block_tokens, 0
        if is_over := status != statuses.RUNNING:
            self._count_exactly(each)
        if ids:
            each.pictures = []  # they were read
        is_end = reason == "stop" and bool(ids) and ids[-1] in each.config.stop_token_ids
        text = each.text.add(ids[:-1] if is_end else ids)
        if is_over or each.text.is_stopped:
            self._end(each, is_over=is_over)
            text += each.text.end()
            reason = "stop" if each.text.is_stopped else reason
        else:
            reason = ""
        if is_over and not reason:
            return TextEvent(
                each.number, code=RunFailed.code, message="the cache of keys and values has no room for it; ask later"
            )
        part = each.reader.read(text)
        if reason:
            last = each.reader.close(reason)
            part, reason = part.before(last), last.finish_reason
        scored = self._scores(ids, scores) if each.parameters.logprobs is not None else ()
        return TextEvent(each.number, part.text, each.size, len(each.made), each.cached, part.calls, scored, reason)

    def _count_exactly(self, each: _Generation) -> None:
        """Ask the library for the tokens of a prompt with pictures, of an answer that is over."""
        if not each.shapes or self.eyes is None or each.handle.get_status() != self._library.GenerationStatus.FINISHED:
            return
        tokens = int(each.handle.get_vlm_perf_metrics().get_num_input_tokens())
        self.eyes.learn(each.shapes, max(tokens - len(each.ids), 1))
        each.size = tokens

    def _end(self, each: _Generation, *, is_over: bool) -> None:
        """Forget an answer. is_over: for the library too."""
        if is_over:
            self._live.pop(each.number)
            self._frees = True
        else:
            self._cancel(each.number)

    def _scores(self, ids: list[int], scores: list[float]) -> tuple[TokenScores, ...]:
        def one(token: int, score: float) -> TokenScores:
            data = self._texts.bytes([token])
            text, numbers = data.decode(errors="replace"), tuple(data)
            return TokenScores(text, score, numbers, (TokenScore(text, score, numbers),))

        return tuple(one(token, score) for token, score in zip(ids, scores, strict=False))

    def _kv_used(self) -> int:
        share: float = self._pipeline.get_metrics().cache_usage / 100
        return round(share * self._kv_total)

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _recover(self, error: Exception) -> list[TextEvent]:
        """End the answers that made a step fail; the others go on.

        The library's steps fail for ever while any is left that was in the one that failed. So all leave, those without
        a token show alone whether their first step fails, and the others come again with what was written of them. An
        answer that a grammar guides cannot: the library would begin the grammar again; nor one of a model that sees
        pictures, whose prompt is text: of those, the ones without a token begin again with their pictures.
        """
        live = [*self._live.values()]
        self._leave()
        events: list[TextEvent] = []
        blamed = [each for each in live if not each.made and not self._tries(each, events)]
        guided = [
            each
            for each in live
            if each.made and (each.config.structured_output_config is not None or self.eyes is not None)
        ]
        blamed = blamed or guided or live
        ended = {each.id for each in events if each.is_last}
        for each in live:
            if each in blamed or each in guided:
                why = f"OpenVINO GenAI: {reason_of(error)}"
                events.append(TextEvent(each.number, code=RunFailed.code, message=why))
            elif each.number not in ended:
                self._add(each)
                self._live[each.number] = each
        return events

    def _tries(self, each: _Generation, events: list[TextEvent]) -> bool:
        """Begin an answer alone; whether its step goes well. events: gets what it wrote, where it goes on from that."""
        self._live[each.number] = each
        try:
            self._add(each)
            self._pipeline.step()
            if self.eyes is None:
                events += self._read()
            else:
                each.left = each.size
        except Exception:  # noqa: BLE001  as in `_run`
            return False
        finally:
            self._leave()
        return True

    def _leave(self) -> None:
        """Take all answers out of the pipeline, and make another where it does not let them go."""
        for each in self._live.values():
            each.handle.cancel()
        self._live.clear()
        try:
            self._pipeline.step()
        except Exception:  # noqa: BLE001  as in `_run`
            self._trials.close()
            self._renew()
        self._frees = False

    def close(self) -> None:
        """Drop the pipeline."""
        for each in self._live.values():
            each.handle.cancel()
        self._live.clear()
        for each in self._tried.values():
            for waited in each.waits_for:
                waited.cancel()
        self._tried.clear()
        if self.eyes is not None:
            self.eyes.close()
        if self._pipeline is not None:
            self._trials.close()
        self._pipeline = self._tokenizer = None


_REASONS: Mapping[str, str] = {"STOP": "stop", "LENGTH": "length", "TOOL_CALL": "stop"}


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
                each.retry_after_ms,
            )
    return [*found.values()]


def reason_of(error: Exception) -> str:
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
