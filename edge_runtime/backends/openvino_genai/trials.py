"""Grammars of answers for the library, each tried alone before it joins the answers under way.

A grammar that the library cannot read fails in the step of all answers, and a large one holds that step while it is
prepared. So each is prepared first by a pipeline of its own, which has a model that computes nothing, and the tokenizer
of the real one: what it prepares is kept there, until the pipeline is made anew. Meanwhile the interpreter is free.
Owns a thread for each trial, which lives as long as it; and the count of bytes that the library keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any

from edge_runtime.backends.openvino_genai import BACKEND
from edge_runtime.errors import QueueFull
from edge_runtime.language.calls import AnswerShape, Guide
from edge_runtime.language.settings import GRAMMARS_MB
from edge_runtime.sandbox.process_memory import allocated_bytes

_KEPT = 256
"""Guides whose trial went well, and that are remembered; the library keeps what it prepared."""

MOST_WAITING = 8
"""Trials at once, one of which runs: a small grammar takes some ms, a large one seconds."""

RETRY_MS = 1_000.0
"""After which to come again with a schema that cannot be tried now: answers under way are to end first."""


def structured(library: ModuleType, guide: Guide) -> Any:
    """Return the library's setting that holds an answer to a guide."""
    kinds = library.StructuredOutputConfig
    if not guide.trigger:
        return kinds(grammar=guide.grammar)
    tag = kinds.Tag(guide.begin, kinds.EBNF(guide.grammar), guide.end)
    return kinds(compound_grammar=kinds.TriggeredTags([guide.trigger], [tag], False, guide.is_once))


class Trials:
    """Makes guides, and tries them one at a time.

    tokenizer: of the pipeline that uses them; folder: of its model. most_bytes: that the library may keep of them
    before it is to be made anew; up to twice as much it keeps where that cannot be.
    """

    def __init__(self, library: ModuleType, tokenizer: Any, folder: Path, most_bytes: int = GRAMMARS_MB << 20) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self.folder = folder
        self._most_bytes = most_bytes
        self._kept_bytes = 0
        self._pipeline: Any = None
        self._one_at_a_time = Lock()
        self._threads: list[Thread] = []
        self._good: OrderedDict[str, Guide] = OrderedDict()

    def begin(self, wanted: AnswerShape) -> Future[Guide]:
        """Begin a trial of what an answer must be; its result is the guide, at once where that has had one.

        The future raises what is wrong with a schema (DecodeFailed, Unsupported), and what the library has against it;
        a cancelled one is not tried, unless it is already. Raises QueueFull: too many wait, or the library keeps too
        much.
        """
        trial: Future[Guide] = Future()
        key = wanted.key
        if (known := self._good.get(key)) is not None:
            self._good.move_to_end(key)
            trial.set_result(known)
            return trial
        self._threads = [each for each in self._threads if each.is_alive()]
        if len(self._threads) >= MOST_WAITING:
            raise QueueFull(
                f"{MOST_WAITING} new schemas are prepared already; ask again later, or with one that was used before",
                retry_after_ms=RETRY_MS,
            )
        if self._kept_bytes >= 2 * self._most_bytes:
            raise QueueFull(
                f"the new schemas of late take {self._kept_bytes >> 20} MB, which are free once no answer is under "
                "way; ask again later, or with one that was used before",
                retry_after_ms=RETRY_MS,
            )
        thread = Thread(target=self._run, args=(key, wanted, trial), name="grammar-trial", daemon=True)
        self._threads.append(thread)
        thread.start()
        return trial

    @property
    def are_many(self) -> bool:
        """Whether the library keeps so much of them that it is to be made anew."""
        return self._kept_bytes >= self._most_bytes

    def close(self) -> None:
        """Wait for the trials under way, and forget the pipeline."""
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._pipeline = None

    def _run(self, key: str, wanted: AnswerShape, trial: Future[Guide]) -> None:
        with self._one_at_a_time:
            if not trial.set_running_or_notify_cancel():
                return
            try:
                guide = self._good.get(key) or wanted.guide()
                if key not in self._good:
                    self.try_alone(guide)
                self._good[key] = guide
                while len(self._good) > _KEPT:
                    self._good.popitem(last=False)
            except Exception as error:  # noqa: BLE001  the library's errors have no kind of their own
                trial.set_exception(error)
            else:
                trial.set_result(guide)

    def try_alone(self, guide: Guide) -> None:
        """Have the library prepare a guide. Raises RuntimeError: it cannot."""
        import numpy as np
        from openvino import Tensor

        if self._pipeline is None:
            self._pipeline = self._made()
        config = self._library.GenerationConfig()
        config.max_new_tokens = 1
        config.apply_chat_template = False
        config.structured_output_config = structured(self._library, guide)
        before_bytes = allocated_bytes()
        try:
            self._pipeline.generate(Tensor(np.ones((1, 1), np.int64)), config)
        finally:
            self._kept_bytes += max(allocated_bytes() - before_bytes, 0)  # with what answers took meanwhile

    def _made(self) -> Any:
        """Return a pipeline whose model scores every token the same."""
        import tempfile

        import numpy as np
        from openvino import Core, Model, PartialShape, Tensor, Type, save_model
        from openvino import opset13 as ops

        # As many as the real model scores: the library keeps what it prepared for each number.
        graph = next(each for each in map(self.folder.joinpath, BACKEND.artifacts) if each.exists())
        scored = Core().read_model(graph).output(0).partial_shape[-1].get_length()
        names = ("input_ids", "attention_mask", "beam_idx")
        ids, mask, beam = (
            ops.parameter(shape, dtype, name)
            for name, shape, dtype in zip(
                names, ([-1, -1], [-1, -1], [-1]), (np.int64, np.int64, np.int32), strict=True
            )
        )
        for name, each in zip(names, (ids, mask, beam), strict=True):
            each.set_friendly_name(name)
            each.output(0).tensor.set_names({name})
        # A state, as the library wants one of each model; all that is read is multiplied by its zero.
        state = ops.read_value(ops.constant(np.zeros((1, 1), np.float32)), "state", Type.f32, PartialShape([-1, 1]))
        state = ops.gather(state, beam, ops.constant(0))
        read = ops.convert(ops.add(ids, ops.reduce_sum(mask, ops.constant([0, 1]))), "f32")
        zero = ops.unsqueeze(ops.multiply(read, state), ops.constant(2))
        logits = ops.result(ops.multiply(zero, ops.constant(np.zeros((1, 1, scored), np.float32))))
        logits.output(0).tensor.set_names({"logits"})
        model = Model([logits], [ops.assign(state, "state")], [ids, mask, beam], "trial")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trial.xml"
            save_model(model, str(path), compress_to_fp16=False)
            text, weights = path.read_text(), np.fromfile(path.with_suffix(".bin"), np.uint8)
        return self._library.LLMPipeline(text, Tensor(weights), self._tokenizer, "CPU", ATTENTION_BACKEND="SDPA")
