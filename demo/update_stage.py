"""The publisher's folder, the web server and the device in the demonstration of updates."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.daemon import PROGRAM, Daemon, DemoFailed, end_process, running_daemon, shown_command
from demo.screen import Screen

COMMAND_LIMIT_S = 60.0
PASSPHRASE = "only for this demonstration"  # noqa: S105 (of keys that live for a minute)
SETTINGS = """\
[update]
url = "{url}"
root_file = "{root}"
group = "line-1"
poll_s = 1          # it looks each second here; 3600 when not said, and at once when a broker wakes it
poll_jitter = 0
wake_jitter_s = 0
window_s = 3        # how long a release is observed before it is kept; 60 when not said
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """A folder with `repository`, `models`, and the device's configuration and state."""

    screen: Screen
    folder: Path

    @property
    def repository(self) -> Path:
        """The publisher's folder."""
        return self.folder / "repository"

    @property
    def models(self) -> Path:
        """The team's versions of the digit model."""
        return self.folder / "models" / "digits"

    @property
    def golden(self) -> Path:
        """The images of each version's golden input."""
        return self.folder / "golden.npz"

    def edge_runtime(self, *words: str) -> str:
        """Show a command as typed, run it, and return its output. Raises DemoFailed."""
        command = [str(PROGRAM), *words]
        self.screen.line(self.screen.paint(f"  $ {shown_command(command)}", "bold"))
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise DemoFailed(f"{shown_command(command)}: exit status {done.returncode}\n{done.stderr}{done.stdout}")
        return done.stdout

    @contextmanager
    def server(self) -> Iterator[str]:
        """Serve the repository on a port of this machine, as any web server would."""
        command = [str(PROGRAM), "repo", "serve", "--port", "0"]
        server = subprocess.Popen(
            command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )  # fmt: skip
        try:
            assert server.stdout is not None
            with server.stdout as said:
                found = re.search(r"http://[\w.:]+", said.readline().decode())
                if found is None:
                    raise DemoFailed(f"{shown_command(command)}: did not say where it serves")
                yield found[0]
        finally:
            end_process(server)

    @contextmanager
    def device(self, url: str) -> Iterator[Daemon]:
        """A ready daemon that follows the repository at an address."""
        config = self.folder / "device.toml"
        config.write_text(SETTINGS.format(url=url, root=self.repository / "metadata" / "1.root.json"))
        title = "A device: the daemon, with an address, a group, and the root's public keys"
        options = ["--config", str(config)]
        with running_daemon(self.screen, title, self.folder, options, "nothing is served yet") as daemon:
            for line in config.read_text().splitlines():
                self.screen.line(f"  | {line}")
            yield daemon

    def _environment(self) -> dict[str, str]:
        own = {"EDGE_RUNTIME_REPO": str(self.repository), "EDGE_RUNTIME_PASSPHRASE": PASSPHRASE}
        return {**os.environ, **own}
