"""A device for tests: the daemon's core in this process, with its updater and a folder of state that outlives it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.clock import Calendar
from edge_runtime.config.settings import Config, LimitSettings, UpdateSettings
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.core import Core
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.durable import SYSTEM_DISK, Disk
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.tensors import Array
from tests.fakes.releases import Made
from tests.fakes.update_site import GROUP, UpdateSite, adder

ANSWER_S = 180.0


class UpdatedDevice:
    """One running core. Commands return what they answer, or raise what they are refused with."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        assert runtime.core.updates is not None
        self.updates = runtime.core.updates

    def apply(self) -> dict[str, Any]:
        """`update apply`."""
        return self._answer(self.updates.apply)

    def outcome(self, model: str = "adder") -> tuple[str, str]:
        """`update apply`, which must go well: what became of the model's assignment, and why."""
        checked = self.apply()
        assert checked["is_ok"], checked["reason"]
        (offer,) = [each for each in checked["offers"] if each["model"] == model]
        return offer["action"], offer["reason"]

    def check(self) -> dict[str, Any]:
        """`update check`."""
        return self._answer(self.updates.check)

    def roll_back(self, model: str) -> dict[str, Any]:
        """`update rollback`."""
        return self._answer(lambda done: self.updates.roll_back(model, done))

    def import_folder(self, folder: Path) -> dict[str, Any]:
        """`update import`."""
        return self._answer(lambda done: self.updates.import_folder(str(folder), done))

    def status(self) -> dict[str, Any]:
        """`update status`."""
        return self.updates.status()

    def run(self, model: str, **inputs: Array) -> tuple[int, dict[str, Array]]:
        """One request that names no version: the version that answered, and its outputs."""
        answer = self.runtime.infer(model, inputs)
        return answer.version, answer.outputs

    def adds(self) -> float:
        """What the serving release of "adder" adds."""
        _, outputs = self.run("adder", x=np.zeros((1, 2), np.float32))
        return float(outputs["y"][0, 0])

    def _answer(self, ask: Any) -> dict[str, Any]:
        answered = threading.Event()
        answers: list[Any] = []
        ask(lambda result: (answers.append(result), answered.set()))
        assert answered.wait(ANSWER_S)
        if isinstance(answers[0], EdgeRuntimeError):
            raise answers[0]
        return answers[0]


def update_settings(home: Path, root: bytes, **changes: Any) -> UpdateSettings:
    """`[update]` of a device that observes for no time and never looks by itself. Writes the root file.

    Run times are judged where a test says so (`latency_ratio=3.0`): a busy machine stretches them.
    """
    file = home / "1.root.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(root)
    usual = {
        "root_file": str(file),
        "group": GROUP,
        "device_id": "dev1",
        "auto": False,
        "window_s": 0.0,
        "reserve_bytes": 0,
        "wake_jitter_s": 1e6,
        "latency_ratio": 1e3,
    }
    return UpdateSettings(**{**usual, **changes})


class Fleet:
    """A repository, its mirror on the disk, and one device that follows the mirror."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = UpdateSite()
        self.mirror = folder / "mirror"

    def device(
        self,
        *,
        models: Path | None = None,
        disk: Disk = SYSTEM_DISK,
        calendar: Calendar | None = None,
        memory_bytes: int | None = None,
        **changes: Any,
    ) -> AbstractContextManager[UpdatedDevice]:
        """The device; its state outlives it. memory_bytes: for models. changes: of `[update]`."""
        self.sync()
        settings = update_settings(self.folder, self.site.root, **{"folder": str(self.mirror), **changes})
        return updated_device(
            self.folder, settings, models=models, disk=disk, calendar=calendar, memory_bytes=memory_bytes
        )

    def sync(self) -> None:
        """Bring the mirror up to date."""
        self.site.write(self.mirror)

    def adder(self, number: int, **others: Any) -> Made:
        """See `update_site.adder`; signed by nobody yet."""
        return adder(self.folder / "made" / str(number), number, **others)

    def release(self, number: int, *, percent: float = 100.0, **others: Any) -> Made:
        """Publish an `adder`, and let the group run it."""
        made = self.site.release(self.adder(number, **others), percent)
        self.sync()
        return made

    def take_away(self) -> None:
        """Let the group run nothing."""
        self.site.assign()
        self.sync()


@contextmanager
def updated_device(
    folder: Path,
    settings: UpdateSettings,
    *,
    models: Path | None = None,
    disk: Disk = SYSTEM_DISK,
    calendar: Calendar | None = None,
    memory_bytes: int | None = None,
) -> Iterator[UpdatedDevice]:
    """A device whose state lies in `folder`. models: its models folder, an empty one unless given."""
    core = updated_core(folder, settings, models=models, disk=disk, calendar=calendar, memory_bytes=memory_bytes)
    with Runtime(core=core) as runtime:
        yield UpdatedDevice(runtime)


def updated_core(
    folder: Path,
    settings: UpdateSettings,
    *,
    models: Path | None = None,
    disk: Disk = SYSTEM_DISK,
    calendar: Calendar | None = None,
    memory_bytes: int | None = None,
) -> Core:
    """The core of `updated_device`, not started yet."""
    models = models or folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    return assemble_core(
        Config(
            # These tests start hundreds of devices, and none of them is about hosts. What a load takes of memory is
            # measured in the process that loads, though, and this one does other work meanwhile.
            isolation="never" if memory_bytes is None else "always",
            models=str(models),
            state=str(folder / "state"),
            watch=False,
            calibrate=False,
            limits=LimitSettings(cores=1, memory_bytes=memory_bytes),
            update=settings,
        ),
        disk=disk,
        calendar=calendar,
    )
