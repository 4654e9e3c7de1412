"""A daemon with one tiny language model, asked in process, and the replies that tell what came of an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.config.loading import configured
from edge_runtime.config.settings import ZmqSettings
from edge_runtime.daemon.assemble import assemble_core, assemble_daemon
from edge_runtime.daemon.core import Core
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.language.asking import OUTPUTS, chat_request, part_of, text_request
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.models.servable import Servable
from edge_runtime.request.request import CHECK, Request
from tests.contract.running_daemon import ANSWER_S
from tests.models.language_models import tiny_model, tiny_vision_model

SLOTS, CACHE_MB = 4, 32


class Words:
    """The model "words" of a daemon."""

    def __init__(self, core: Core, daemon: Daemon, folder: Path) -> None:
        self.folder = folder
        self.core = core
        self.daemon = daemon

    @property
    def servable(self) -> Servable:
        return self.core.table.resolve("words", None)

    @property
    def numbers(self) -> dict:
        """The metrics of the model."""
        return self.core.metrics.snapshot()["models"]["words"]

    @property
    def host(self) -> int:
        """The process of its host."""
        return self.servable.layouts.host().pid

    def ask(
        self,
        reply: Whole | None = None,
        *,
        text: str = "Hello",
        chat: dict | None = None,
        priority: int = 0,
        **parameters: object,
    ) -> Any:
        """Ask for an answer that goes on until its bound, in parts or whole; returns at once."""
        timeout_ms = parameters.pop("timeout_ms", None)
        reply = reply or Parts()
        given = {"ignore_eos": True, "temperature": 0.0, **parameters}
        if chat is None:
            header, tensors = text_request(self.servable, text.encode(), given, timeout_ms)
        else:
            header, tensors = chat_request(self.servable, chat, given, timeout_ms)
        header = type(header)(
            model=header.model, inputs=header.inputs, outputs=header.outputs, timeout_ms=timeout_ms,
            parameters=given, priority=priority,
        )  # fmt: skip
        reply.request = Request(
            header, tensors, len(text), reply, reply.sender, self.core.clock.monotonic_s(), self.core.metrics
        )
        self.core.infer.submit(reply.request)
        return reply

    def check(self) -> Parts:
        """Ask as the daemon asks itself: every input is there."""
        reply = Parts()
        header = RequestHeader(
            model="words", inputs=tuple(TensorHeader(name, "BYTES", (1,)) for name in ("text", "chat")), outputs=OUTPUTS
        )
        tensors = [np.array([b"0"], object)] * 2
        now_s = self.core.clock.monotonic_s()
        reply.request = Request(header, tensors, 2, reply, reply.sender, now_s, self.core.metrics, CHECK)
        self.core.infer.submit(reply.request)
        return reply

    def wait_until_idle(self) -> None:
        """Wait until no answer is under way, and the cache holds none."""
        until(lambda: not self.numbers["streams"] and not self.numbers["kv_used_tokens"])


class Whole:
    """The reply of an answer that comes whole. on_end: called at its end. ends: how many it had."""

    user_id, writes_text = "", False

    def __init__(self, sender: object = None, on_end: Callable[[Any], None] = lambda _: None) -> None:
        self.sender = sender if sender is not None else self
        self.request: Request | None = None
        self.parts: list = []
        self.error: EdgeRuntimeError | None = None
        self.ends = 0
        self._on_end = on_end
        self._ended = threading.Event()

    def answer(self, request: Request) -> None:
        self.parts.append(part_of(request))
        self._end()

    def refuse(self, error: EdgeRuntimeError) -> None:
        self.error = error
        self._end()

    def wait(self) -> Any:
        assert self._ended.wait(ANSWER_S), "the answer has no end"
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    def _end(self) -> None:
        self.ends += 1
        self._on_end(self)
        self._ended.set()


class Parts(Whole):
    """The reply of an answer in parts. on_part, on_end: called at each part, and at the end."""

    def __init__(
        self,
        on_part: Callable[[Parts], None] = lambda _: None,
        sender: object = None,
        on_end: Callable[[Parts], None] = lambda _: None,
    ) -> None:
        super().__init__(sender, on_end)
        self._on_part = on_part
        self._came = threading.Event()

    def part(self, request: Request) -> None:
        assert not self.ends, "a part came behind the end"
        self.parts.append(part_of(request))
        self._came.set()
        self._on_part(self)

    def wait_for_part(self) -> None:
        """Wait until one more part has come."""
        self._came.clear()
        assert self._came.wait(ANSWER_S), "no further part comes"


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + ANSWER_S
    while not is_so():
        assert time.monotonic() < end_s, "waited for nothing"
        time.sleep(0.002)


@contextmanager
def words_served(folder: Path, toml: str = "", **size: object) -> Iterator[Words]:
    """Serve a tiny model as "words", with SLOTS streams at once, until the end of the block."""
    make = tiny_vision_model if size.get("sees") else tiny_model
    make(folder / "models" / "words" / "1", **{"context": 4096, **size})
    (folder / "models" / "words" / "model.toml").write_text(
        toml or f"[language]\nmax_streams = {SLOTS}\nkv_cache_mb = {CACHE_MB}\nprefix_caching = false\n"
    )
    (folder / "run").mkdir()
    zmq = ZmqSettings(endpoints=(f"ipc://{folder}/run/infer.sock",))
    http = HttpSettings(endpoint="127.0.0.1:0", openai=True, ollama=True)
    config = configured(
        models=str(folder / "models"), state=str(folder / "state"), zmq=zmq, http=http, start_limit_s=5 * ANSWER_S
    )
    core = assemble_core(config)
    daemon = assemble_daemon(config, core)
    try:
        daemon.start()
        yield Words(core, daemon, folder)
    finally:
        daemon.stop()
