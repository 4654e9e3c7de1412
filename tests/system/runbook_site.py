"""A publisher, a web server and a device for the runbook: its own commands, run on a repository and a daemon.

Paths of the runbook stand for folders of the test, `systemctl` for this process starting and stopping the daemon, and
what the time servers would do is the test's own clock.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from edge_runtime import Client
from edge_runtime.config.loading import load_config
from edge_runtime.daemon.assemble import assemble_core, assemble_daemon
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.errors import ModelNotFound
from edge_runtime.publish.static_server import StaticServer
from edge_runtime.updates.device_time import SystemCalendar
from tests.fakes.publishing import PASSPHRASE, Publisher

RUNBOOK = (Path(__file__).parents[2] / "deploy" / "runbook.md").read_text()
COMMAND_LIMIT_S = 600.0
DAY = timedelta(days=1)

SETTINGS = """\
models = "{home}/models-folder"
calibrate = false
watch = false
[limits]
cores = 1
[zmq]
endpoints = ["ipc://{home}/infer.sock"]
[update]
url = "{url}"
root_file = "{home}/etc/1.root.json"
group = "line-1"
auto = false
window_s = 0
wake_jitter_s = 1e6
reserve_bytes = 1000000
"""


@dataclass(frozen=True)
class Section:
    """One thing that goes wrong. blocks: of commands, by line. quotes: patterns of what a person sees."""

    title: str
    blocks: tuple[tuple[str, ...], ...]
    quotes: tuple[re.Pattern[str], ...]


def sections(text: str = RUNBOOK) -> dict[str, Section]:
    """The runbook's entries by title."""
    found = {}
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        blocks = [tuple(_lines(block)) for block in re.findall(r"^```sh\n(.*?)^```", body, re.DOTALL | re.MULTILINE)]
        quotes = [line for block in re.findall(r"^```text\n(.*?)^```", body, re.DOTALL | re.MULTILINE)
                  for line in block.splitlines()]  # fmt: skip
        found[title] = Section(title, tuple(blocks), tuple(_pattern(quote) for quote in quotes))
    return found


def _lines(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def _pattern(quote: str) -> re.Pattern[str]:
    """`…` stands for anything; how wide a column is does not matter."""
    parts = [r"\s+".join(re.escape(word) for word in part.split()) for part in quote.split("…")]
    return re.compile(".*".join(parts))


class WallClock(SystemCalendar):
    """What a device takes for the time: `ahead` of the true one."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now_utc(self) -> datetime:
        return super().now_utc() + self.ahead


class Site:
    """Everything that an entry needs. Leave it with `close`."""

    def __init__(self, folder: Path, home: Path, repository: Path) -> None:
        """home: of the device; short, for the sake of its sockets. repository: is copied."""
        self.folder, self.home = folder, home
        self.clock = WallClock()
        self.said = ""
        self.publisher = Publisher(folder / "repository")
        shutil.copytree(repository, self.publisher.path)
        self.replaced = {
            "publisher:": "",
            "server:": "",
            "/srv/publish/models": str(self.publisher.path),
            "/srv/edge-runtime-repository": str(folder / "server"),
            "/srv/backup": str(folder / "backup"),
            "/media/stick": str(folder / "stick"),
            "/etc/edge-runtime": str(home / "etc"),
            "/var/lib/edge-runtime": str(home / "state"),
        }
        for path in (folder / "backup", folder / "stick", home / "etc", home / "state", home / "models-folder"):
            path.mkdir(parents=True)
        self._daemon: Daemon | None = None
        self._servers: list[tuple[StaticServer, threading.Thread]] = []
        self.url = self.serve(self.publisher.path)
        shutil.copy(self.publisher.path / "metadata" / "1.root.json", home / "etc")
        self.configure(self.url)

    # ---- the device -------------------------------------------------------------------------------------------------

    def configure(self, url: str) -> None:
        """Write the device's configuration; takes effect when it starts."""
        (self.home / "etc" / "config.toml").write_text(SETTINGS.format(home=self.home, url=url))

    def start(self) -> None:
        """Start the device's daemon."""
        config = load_config(self.home / "etc" / "config.toml", {"state": str(self.home / "state")})
        self._daemon = assemble_daemon(config, assemble_core(config, calendar=self.clock))
        self._daemon.start()

    def stop(self) -> None:
        """Stop it. Idempotent."""
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None

    def serves(self) -> int | None:
        """The version that answers a request; None: the device has no such model."""
        with Client(f"ipc://{self.home}/infer.sock") as client:
            try:
                return client.infer("digits", {"image": np.zeros((1, 64), np.float32)}).version
            except ModelNotFound:
                return None

    # ---- the server -------------------------------------------------------------------------------------------------

    def serve(self, folder: Path) -> str:
        """Show a repository over HTTP; its address."""
        server = StaticServer(folder)
        thread = threading.Thread(target=server.serve)
        thread.start()
        self._servers.append((server, thread))
        return server.url.rstrip("/")

    def close_servers(self) -> None:
        """The web servers are gone."""
        for server, thread in self._servers:
            server.stop()
            thread.join()
            with server:
                pass
        self._servers.clear()

    def close(self) -> None:
        """Stop the device and the servers."""
        self.stop()
        self.close_servers()

    # ---- commands ---------------------------------------------------------------------------------------------------

    def do(self, *lines: str, fails: bool = False) -> str:
        """Run lines of the runbook; what they said. fails: each is to end with status 1."""
        return "".join(self._do(line, fails=fails) for line in lines)

    def _do(self, line: str, *, fails: bool) -> str:
        words = line.partition("#")[0].split()
        if words[:1] == ["sudo"]:
            words = words[1:]
        match words:
            case ["systemctl", "stop", "edge-runtime"]:
                self.stop()
                return ""
            case ["systemctl", ("start" | "restart") | "enable", *_]:
                self.stop()
                self.start()
                return ""
            case ["timedatectl", "set-ntp", "true"]:
                self.clock.ahead = timedelta()
                return ""
            case ["rsync", "-a", source, target]:  # which need not be installed here
                words = ["cp", "-a", f"{source}.", target]
        if words[:2] == ["edge-runtime", "repo"] and words[2] not in ("status", "bundle"):
            words.append("--yes")  # a person would be asked
        text = " ".join(words)
        for name, real in self.replaced.items():
            text = text.replace(name, real)
        done = self._command(["bash", "-c", text])
        said = done.stdout + done.stderr
        for name, real in self.replaced.items():
            said = said.replace(real, name) if real else said
        self.said += said
        assert done.returncode == (1 if fails else 0), f"$ {line}\n{said}"
        return said

    def _command(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "EDGE_RUNTIME_REPO": str(self.publisher.path),
            "EDGE_RUNTIME_PASSPHRASE": PASSPHRASE,
            "EDGE_RUNTIME_ENDPOINT": f"ipc://{self.home}/infer.sock",
            "COLUMNS": "400",
        }
        return subprocess.run(
            command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_LIMIT_S, check=False,
        )  # fmt: skip

    def missing(self, section: Section) -> list[str]:
        """What the entry quotes and nothing said."""
        return [quote.pattern for quote in section.quotes if quote.search(self.said) is None]


@contextlib.contextmanager
def site_of(folder: Path, home: Path, repository: Path) -> Iterator[Site]:
    """A site, closed at the end."""
    site = Site(folder, home, repository)
    try:
        yield site
    finally:
        site.close()
