"""Where things are on a device, what its service manager knows, and clients that ask its daemon."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from demo.booted_device import BootedDevice
from demo.digits import load_held_out
from edge_runtime import Client
from edge_runtime.errors import EdgeRuntimeError, Refused

if TYPE_CHECKING:
    from typing_extensions import Self

HOST = "/media/host"
"""A folder of the host, as a stick in the device."""

CONFIG = "/etc/edge-runtime/config.toml"
STATE = "/var/lib/edge-runtime"
MODELS = f"{STATE}/models"

LIMIT_S = 60.0
"""For what takes a second or two where nothing else runs."""

ATTEMPT_PAUSE_S = 0.005


class Digit:
    """A scanned digit, and which one it is."""

    def __init__(self) -> None:
        held_out = load_held_out()
        self._image = held_out.images[:1].astype(np.float32)
        self._label = int(held_out.labels[0])

    def is_known_to(self, client: Client) -> bool:
        """Whether the daemon says which digit it is. Raises as `Client.infer`."""
        return int(client.infer("digits", {"image": self._image})["digit"][0]) == self._label


def wait_right_answer(device: BootedDevice) -> float:
    """Until the device's daemon recognises a digit: how long that took, in seconds."""
    began = time.monotonic()
    with Client(device.endpoint) as client:
        client.wait_ready(LIMIT_S, "digits")
        assert Digit().is_known_to(client)
    return time.monotonic() - began


def main_pid(device: BootedDevice) -> int:
    """The daemon's number among the device's processes."""
    return int(device.unit("MainPID"))


def stamp_s(device: BootedDevice, name: str) -> float:
    """When something happened to the service, by the device's monotonic clock."""
    return int(device.unit(f"{name}TimestampMonotonic")) / 1e6


def start_took_s(device: BootedDevice) -> float:
    """From the start of the daemon's process to READY=1, as systemd saw it."""
    return stamp_s(device, "ActiveEnter") - stamp_s(device, "ExecMainStart")


class PatientClient:
    """Asks for a digit without a pause, and again where the daemon says `draining` or is gone. A context manager.

    One connection for all. failed: requests with no answer within LIMIT_S, refused for another reason, or wrong.
    """

    def __init__(self, endpoint: str) -> None:
        self.answered = 0
        self.tried_again: Counter[str] = Counter()
        self.failed: list[str] = []
        self.longest_s = 0.0
        self._endpoint = endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="patient client")
        self._has_answer = threading.Condition()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def wait_answers(self, count: int) -> None:
        """Until so many more requests were answered."""
        with self._has_answer:
            wanted = self.answered + count
            assert self._has_answer.wait_for(lambda: self.answered >= wanted, LIMIT_S), self.tried_again

    def _ask_on(self) -> None:
        digit = Digit()
        with Client(self._endpoint) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                trouble = self._ask(client, digit, began + LIMIT_S)
                if trouble is not None:
                    self.failed.append(trouble)
                with self._has_answer:
                    self.answered += trouble is None
                    self.longest_s = max(self.longest_s, time.monotonic() - began)
                    self._has_answer.notify_all()

    def _ask(self, client: Client, digit: Digit, end_s: float) -> str | None:
        """One request until it is answered: what went wrong, if anything did."""
        while True:
            try:
                return None if digit.is_known_to(client) else "a wrong answer"
            except Refused as refusal:
                if refusal.code != "draining":
                    return repr(refusal)
                self.tried_again["draining"] += 1
            except ConnectionError as error:
                self.tried_again["gone"] += 1
                if time.monotonic() > end_s:
                    return repr(error)
            except (EdgeRuntimeError, TimeoutError) as error:
                return repr(error)
            self._stop.wait(ATTEMPT_PAUSE_S)
