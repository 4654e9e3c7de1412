"""A client that keeps requests in flight and records the fate of each. One thread."""

from __future__ import annotations

import threading
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge_runtime import Client
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.messages import InferResult

if TYPE_CHECKING:
    from typing_extensions import Self

IN_FLIGHT = 4
ANSWER_LIMIT_S = 30.0


@dataclass(slots=True)
class Tally:
    """The fate of all requests so far: answers by version, and the texts of errors."""

    asked: int = 0
    answered: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def unanswered(self) -> int:
        """Requests without an answer: failed, or still in flight."""
        return self.asked - self.answered.total()


class Asking:
    """Asks the digit model, IN_FLIGHT requests at once, inside `with`; its end waits for every request.

    Shape: images [n, 64].
    """

    def __init__(self, client: Client, images: npt.NDArray[np.uint8]) -> None:
        self.tally = Tally()
        self._client = client
        self._images = images.astype(np.float32)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asking")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        waiting: deque[Future[InferResult]] = deque()
        while not self._stop.is_set() or waiting:
            while len(waiting) < IN_FLIGHT and not self._stop.is_set():
                image = self._images[self.tally.asked % len(self._images)][None]
                self.tally.asked += 1
                waiting.append(self._client.submit("digits", {"image": image}))
            try:
                self.tally.answered[waiting.popleft().result(ANSWER_LIMIT_S).version] += 1
            except (EdgeRuntimeError, ConnectionError, TimeoutError) as error:
                self.tally.failures.append(f"{type(error).__name__}: {error}")
