"""An instant that several machines know, so that a deadline counts from where a request came in.

Pure but for the clocks that it reads. Thread: any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RETRY_S = 60.0
"""A request without a deadline is sent again for so long: a node's loss and a replica's start take some 30 s."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.2
"""Before a request is sent again."""


@dataclass(frozen=True, slots=True)
class Instant:
    """When a request began.

    boot, monotonic_s: of the kernel that it began on, whose processes share one monotonic clock. utc_s: for other
    machines, as good as their clocks agree.
    """

    boot: str
    monotonic_s: float
    utc_s: float

    @classmethod
    def now(cls) -> Instant:
        """The present."""
        return cls(_boot(), time.monotonic(), time.time())

    def age_s(self) -> float:
        """Seconds since then, 0 where the clocks of two machines say less."""
        if self.boot == _boot():
            return time.monotonic() - self.monotonic_s
        return max(time.time() - self.utc_s, 0.0)

    def tries(self, longest_s: float) -> Iterator[float]:
        """Pauses before each try of a request that began then, while there is time for one more.

        The first error of a replica that died makes Serve's router forget it, so the first pause is short.
        """
        yield 0.0
        pause_s = FIRST_PAUSE_S
        while pause_s < longest_s - self.age_s():
            yield pause_s
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def text(self) -> str:
        """The value of a header, which `of_text` reads."""
        return f"{self.boot};{self.monotonic_s!r};{self.utc_s!r}"

    @classmethod
    def of_text(cls, text: str) -> Instant | None:
        """Read the value of a header; None where it is none."""
        boot, _, rest = text.partition(";")
        monotonic, _, utc = rest.partition(";")
        try:
            return cls(boot, float(monotonic), float(utc))
        except ValueError:
            return None


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
