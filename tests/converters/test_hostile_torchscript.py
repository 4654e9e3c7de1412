# ruff: noqa: E402  (what follows imports torch, and is left out where there is none)
"""TorchScript that means harm: its runs fail, its host ends with what it holds, and other models are answered on."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test-converters has it")

import edge_runtime
from edge_runtime.config.settings import LimitSettings
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.errors import EdgeRuntimeError, RunFailed
from tests.contract.running_daemon import running_daemon
from tests.converters.pytorch_models import save_script

SETTINGS = "batch = false\n[input.INPUT__0]\nshape = [-1, 4]\n[limits]\nrun_limit_ms = 2_000\n"
HARM = 13.0


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0


class Endless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = 0
        while bool(x[0, 0] == 13.0):
            n += 1
        return x + n


class Huge(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x[0, 0] == 13.0):
            return torch.ones([60000, 60000])[:1, :4] + x
        return x + 0


class Growing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: list[torch.Tensor] = []
        while bool(x[0, 0] == 13.0):
            held.append(torch.ones([1024, 1024]))
        return x + 0


class Printing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x[0, 0] == 13.0):
            print("yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy")
        return x + 0


class Outside(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x[0, 0] == 13.0):
            return torch.as_strided(x, [1, 4], [1 << 40, 1 << 40], 1 << 40) + x
        return x + 0


HOSTILE = {"endless": Endless, "huge": Huge, "growing": Growing, "printing": Printing, "outside": Outside}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")

    def put(name: str, module: torch.nn.Module) -> Path:
        file = save_script(module, folder / name / "1")
        (folder / name / "model.toml").write_text(SETTINGS)
        return file

    for name, module in {"good": Same, **HOSTILE}.items():
        put(name, module())
    _rewrite(put("dots", Same()), lambda _, content: content, ("../../../out", "model/a/../../out"))
    call = b"\x80\x02cposix\nsystem\nX\x05\x00\x00\x00false\x85R."
    _rewrite(put("calls", Same()), lambda name, content: call if name.endswith("/data.pkl") else content)
    return folder


def _rewrite(file: Path, change: Callable[[str, bytes], bytes], more: tuple[str, ...] = ()) -> None:
    """Change the members of an archive, and add empty ones."""
    with zipfile.ZipFile(file) as archive:
        members = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {**members, **dict.fromkeys(more, b"")}.items():
            archive.writestr(name, content)


@pytest.fixture(scope="module")
def daemon(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    limits = LimitSettings(host_memory_bytes=1 << 30)
    with running_daemon(
        models, tmp_path_factory.mktemp("run"), calibrate=False, start_limit_s=120, limits=limits
    ) as daemon:
        yield daemon


def number(value: float) -> dict[str, np.ndarray]:
    return {"INPUT__0": np.full((1, 4), value, np.float32)}


@pytest.mark.parametrize("model", HOSTILE)
def test_a_run_that_means_harm_fails_alone(daemon: Daemon, model: str) -> None:
    stop = threading.Event()
    answers: list[float] = []
    faults: list[Exception] = []

    def ask_good() -> None:
        with edge_runtime.Client(daemon.endpoints[0]) as client:
            while not stop.is_set():
                try:
                    answers.append(float(client.infer("good", number(len(answers)))["OUTPUT__0"][0, 0]))
                except EdgeRuntimeError as error:
                    faults.append(error)

    thread = threading.Thread(target=ask_good)
    thread.start()
    try:
        with edge_runtime.Client(daemon.endpoints[0]) as client:
            with pytest.raises(RunFailed):
                client.infer(model, number(HARM), timeout_ms=60_000)
            assert client.infer(model, number(1), timeout_ms=60_000)["OUTPUT__0"].tolist() == [[1, 1, 1, 1]]
    finally:
        stop.set()
        thread.join()
    assert faults == []
    assert answers == list(range(len(answers)))


def test_members_with_paths_write_nothing_and_a_pickle_in_an_archive_calls_nothing(
    daemon: Daemon, models: Path
) -> None:
    with edge_runtime.Client(daemon.endpoints[0]) as client:
        told = {each["name"]: (each["state"], each["reason"]) for each in client.models()}
    assert told["dots"] == ("ready", "")
    assert [path for path in models.parent.rglob("out") if path.is_file()] == []
    assert told["calls"][0] == "failed"
    assert "posix.system" in told["calls"][1]
