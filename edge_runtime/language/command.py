"""Chat with a language model in the terminal. What was said is kept until the end.

  edge-runtime chat qwen
  edge-runtime chat qwen --system "Answer in one sentence." -p temperature=0.2
  echo "Name a colour." | edge-runtime chat qwen

A line is a message. /image FILE shows a picture with the next one. Ctrl-C stops the answer, /clear forgets what was
said, /bye or Ctrl-D ends. From a pipe, too, each line is a message; there the first error ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.cli.arguments import add_connection, milliseconds, positive
from edge_runtime.cli.connection import connected
from edge_runtime.cli.screen import Screen
from edge_runtime.cli.written import WrittenText, check_writes, parameters_of, write_parts
from edge_runtime.client.pictures import picture_url
from edge_runtime.client.stream import CHAT
from edge_runtime.errors import EdgeRuntimeError

if TYPE_CHECKING:
    from edge_runtime.client.blocking_client import BlockingClient

HELP = "/image FILE shows a picture, /clear forgets what was said, /bye or Ctrl-D ends, Ctrl-C stops an answer"

IMAGE = "/image "

BYE = frozenset(("/bye", "/exit", "/quit"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chat`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the first message")
    parser.add_argument(
        "-p",
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a parameter of each request, such as temperature=0.2 or max_tokens=200",
    )
    parser.add_argument("--version", metavar="N", type=positive, help="one version (default: the daemon's choice)")
    parser.add_argument("--timeout-ms", metavar="MS", type=milliseconds, help="deadline of each answer")
    add_connection(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Ask with each line, and print each answer as it comes."""
    parameters = parameters_of(arguments.parameter)
    is_terminal = sys.stdin.isatty()
    with connected(arguments) as client:
        check_writes(client.metadata(arguments.model, arguments.version), CHAT, "chat")
        chat = _Chat(client, arguments, parameters, screen)
        if is_terminal:
            with contextlib.suppress(ImportError):  # keys for editing and earlier lines
                import readline  # noqa: F401
            screen.note(HELP)
        for line in _lines(screen, is_terminal=is_terminal):
            if line in BYE:
                break
            if line == "/clear":
                chat.clear()
            elif line.startswith(IMAGE):
                chat.show(Path(line.removeprefix(IMAGE).strip()), goes_on=is_terminal)
            elif line.startswith("/") and is_terminal:
                screen.note(HELP)
            elif line:
                chat.ask(line, goes_on=is_terminal)
    if screen.wants_json:
        screen.json({"model_name": arguments.model, "messages": chat.messages, "answers": chat.answers})
    return 0


class _Chat:
    """One conversation. messages: as OpenAI has them. answers: each with what it told beside its text."""

    def __init__(
        self, client: BlockingClient, arguments: argparse.Namespace, parameters: dict[str, Any], screen: Screen
    ) -> None:
        self.answers: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self._pictures: list[dict[str, Any]] = []
        self._client = client
        self._arguments = arguments
        self._parameters = parameters
        self._screen = screen
        self.clear()

    def clear(self) -> None:
        """Forget all but the system's message."""
        self._pictures = []
        system = self._arguments.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def show(self, file: Path, *, goes_on: bool) -> None:
        """Have a picture go with the next message. goes_on: as of `ask`."""
        try:
            self._pictures.append({"type": "image_url", "image_url": {"url": picture_url(file)}})
        except (EdgeRuntimeError, OSError) as error:
            if not goes_on:
                raise
            self._screen.error(error.message if isinstance(error, EdgeRuntimeError) else str(error))

    def ask(self, line: str, *, goes_on: bool) -> None:
        """Ask with one more message. goes_on: an error is told, and the next message may come; else it is raised."""
        arguments, written = self._arguments, WrittenText()
        seen, self._pictures = self._pictures, []
        content: Any = [*seen, {"type": "text", "text": line}] if seen else line
        messages = [*self.messages, {"role": "user", "content": content}]
        try:
            parts = self._client.stream(
                arguments.model,
                chat={"messages": messages},
                version=arguments.version,
                timeout_ms=arguments.timeout_ms,
                retry=True,
                **self._parameters,
            )
            with parts:
                write_parts(parts, written, self._screen)
        except KeyboardInterrupt:
            self._end(written)
            self._screen.note("stopped")
            if not written.text:
                return
        except (EdgeRuntimeError, OSError) as error:
            self._end(written)
            if not goes_on:
                raise
            self._screen.error(error.message if isinstance(error, EdgeRuntimeError) else str(error))
            return
        else:
            self._end(written)
        self.messages = [*messages, {"role": "assistant", "content": written.text}]
        self.answers.append(written.fields())

    def _end(self, written: WrittenText) -> None:
        if not self._screen.wants_json and written.text:
            self._screen.line()
            self._screen.flush()


def _lines(screen: Screen, *, is_terminal: bool) -> Iterator[str]:
    """The messages, without the blanks around them, until the input ends."""
    if not is_terminal:
        yield from map(str.strip, sys.stdin)
        return
    while True:
        try:
            yield input(">>> ").strip()
        except EOFError:
            screen.note("")
            return
        except KeyboardInterrupt:  # at the prompt: the line is dropped
            screen.note(f"\n{HELP}")
