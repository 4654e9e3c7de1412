"""A real daemon, started as a container would be, and asked what the kubelet asks it."""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 300.0
SERVICE = "digits-predictor.models.svc.cluster.local"
"""What callers inside a cluster have as Host."""


@contextmanager
def daemon(words: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`edge-runtime` with these words, its folders below `folder`; must end with 0 when it is told to."""
    command = [str(Path(sys.executable).with_name("edge-runtime")), *words]
    # Short: a Unix socket's path takes 107 bytes.
    environment = {"RUNTIME_DIRECTORY": str(folder / "r"), "STATE_DIRECTORY": str(folder / "s")}
    for path in environment.values():
        Path(path).mkdir(mode=0o777)
    with (folder / "daemon.log").open("w") as log:
        running = subprocess.Popen(command, cwd=folder, env={**environment, "HOME": str(folder)}, stderr=log)
    try:
        yield running
    except AssertionError as error:
        raise AssertionError(f"{error}\n{(folder / 'daemon.log').read_text()}") from error
    finally:
        running.terminate()
        status = running.wait(LIMIT_S)
    assert status == 0, (folder / "daemon.log").read_text()


def status_of(port: int, path: str, host: str = SERVICE) -> int | None:
    """The status of one GET; None while nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        answer.read()
    except ConnectionError:
        return None
    finally:
        connection.close()
    return answer.status


def wait_for(port: int, path: str, running: subprocess.Popen[bytes]) -> None:
    """Until a GET answers 200, as a probe that is asked again and again."""
    end_s = time.monotonic() + LIMIT_S
    while (status := status_of(port, path)) != 200:
        assert running.poll() is None, f"it ended with {running.returncode}"
        assert time.monotonic() < end_s, f"{path} answers {status}"
        time.sleep(0.05)
