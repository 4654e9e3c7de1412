"""Records the promises: `python -m tests.promises.record` writes `frozen/` anew.

For the day before a large change. During it nothing there is written: what differs on purpose is a line of
`changes.toml`, with its reason. A message whose reply differs between three runs promises nothing and is left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.broker import Broker
from tests.promises import messages, replay, texts

FROZEN = Path(__file__).parent / "frozen"
RUNS = 3

TEXTS: dict[str, Callable[[], str]] = {
    "help": texts.help_of_every_verb,
    "settings": texts.settings,
    "operations": texts.operations,
    "api": texts.public_api,
}
DOORS: dict[str, tuple[Callable[[], Iterable[Any]], Callable[..., Iterator[Any]]]] = {
    "zmq": (messages.zmq_messages, replay.ask_zmq),
    "http": (messages.http_messages, replay.ask_http),
    "grpc": (messages.grpc_messages, replay.ask_grpc),
    "frigate": (messages.frigate_messages, replay.ask_frigate),
    "mqtt": (messages.mqtt_messages, replay.ask_mqtt),
}
"""The messages of a door, and how one daemon is asked them."""


def as_text(message: Any) -> Any:
    """A message whose bytes are text, as JSON keeps it."""
    if isinstance(message, bytes):
        return message.decode("latin-1")
    return message if isinstance(message, str) else [as_text(each) for each in message]


@contextmanager
def daemon_and_broker() -> Iterator[tuple[Any, Broker]]:
    """A daemon of the present code, fresh."""
    with tempfile.TemporaryDirectory(prefix="promises-") as name:
        folder = Path(name)
        with Broker(folder) as broker, replay.daemon_here(folder / "daemon", broker) as daemon:
            yield daemon, broker


def main() -> None:
    """Write every file of `frozen/`."""
    FROZEN.mkdir(exist_ok=True)
    for name, write in TEXTS.items():
        (FROZEN / f"{name}.txt").write_text(write(), encoding="utf-8")
    replies: dict[str, list[list[Any]]] = {name: [] for name in DOORS}
    asked = {name: [as_text(each) for each in make()] for name, (make, _) in DOORS.items()}
    for run in range(RUNS):
        with daemon_and_broker() as (daemon, broker):
            for name, (_, ask) in DOORS.items():
                replies[name].append(list(ask(daemon, broker, asked[name])))
                print(f"run {run + 1} of {RUNS}: {name}, {len(asked[name])} messages", flush=True)
            (FROZEN / "metrics.txt").write_text(texts.metric_names(daemon.metrics_url), encoding="utf-8")
    for name, runs in replies.items():
        lines = [
            json.dumps({"message": message, "reply": several[0]}, ensure_ascii=True, sort_keys=True)
            for message, *several in zip(asked[name], *runs, strict=True)
            if all(each == several[0] for each in several)
        ]
        (FROZEN / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} of {len(asked[name])} messages kept")


if __name__ == "__main__":
    main()
