# ruff: noqa: E402  (what follows imports torch, and is left out where there is none)
"""TorchScript and exported programs in a real daemon: what is served, what a hostile file reaches, what is refused."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test-converters has it")

import edge_runtime
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.model_spec import TensorSpec
from tests.contract.running_daemon import running_daemon
from tests.converters.pytorch_models import Identity, Mlp, TwoInTwoOut, Wide, save_program, save_script
from tests.converters.sources import images, network

DAMAGED = 8
"""Files of each kind."""


class Reader(torch.nn.Module):
    """Reads a file by an operator of PyTorch's own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_file(self.path, False, 4, dtype=torch.uint8).to(torch.float32)


class Writer(torch.nn.Module):
    """Writes a file so."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.path)
        return x


class Changing(torch.nn.Module):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(2)
        return x, x.sum(1)


FOUR = torch.zeros(2, 4)
SHAPE = "[input.INPUT__0]\nshape = [-1, 4]\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder.parent / f"{folder.name}-secret").write_bytes(b"1234")
    secret = folder.parent / f"{folder.name}-secret"

    def scripted(name: str, module: torch.nn.Module, toml: str = "") -> None:
        save_script(module, folder / name / "1")
        (folder / name / "model.toml").write_text(toml)

    save_script(network(torch), folder / "traced" / "1", torch.zeros(2, 64))
    save_program(network(torch), folder / "exported" / "1", (TensorSpec("image", "FP32", (-1, 64)),))
    scripted("scripted", Mlp(), "[input.x]\nshape = [-1, 16]\n")
    scripted(
        "two", TwoInTwoOut(), '[input.INPUT__0]\nshape = [-1, 3]\n[input.b__1]\nshape = [-1, 2]\ndatatype = "INT64"\n'
    )
    scripted("changing", Changing(), SHAPE)
    scripted("half", Mlp(), 'precision = "bf16"\n[input.x]\nshape = [-1, 16]\n')
    scripted("unsaid", Identity())
    scripted("misnamed", Identity(), "[input.image]\nshape = [-1, 2]\n")
    scripted("inside", Identity(), 'isolation = "never"\n[input.x]\nshape = [-1, 2]\n')
    scripted("reads-itself", Reader(folder / "reads-itself" / "1" / "model.pt"), SHAPE)
    for name, path in (
        ("reads-beside", folder / "reads-beside" / "1" / "beside.txt"),
        ("reads-other", folder / "traced" / "1" / "model.pt"),
        ("reads-secret", secret),
    ):
        scripted(name, Reader(path), SHAPE)
    (folder / "reads-beside" / "1" / "beside.txt").write_bytes(b"1234")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_script(Reader(folder / "traced" / "1" / "model.pt"), folder, FOUR, name="loose.pt")
    scripted("wide", Wide(), "threads = 2\n[input.x]\nshape = [-1, 1024]\n")
    scripted("writes", Writer(folder / "writes" / "1" / "written"), SHAPE)
    (folder / "pickled" / "1").mkdir(parents=True)
    torch.save(network(torch).state_dict(), folder / "pickled" / "1" / "model.pt")
    (folder / "old-pickle" / "1").mkdir(parents=True)
    (folder / "old-pickle" / "1" / "model.pt").write_bytes(b"\x80\x02cposix\nsystem\nq\x00X\x05\x00\x00\x00false\x85R.")
    _put_damaged(folder, folder / "traced" / "1" / "model.pt", "damaged-script")
    _put_damaged(folder, folder / "exported" / "1" / "model.pt2", "damaged-program")
    return folder


def _put_damaged(models: Path, source: Path, name: str) -> None:
    """Copies of a file, cut or with some bytes changed."""
    whole, chance = source.read_bytes(), random.Random(7)
    for number in range(DAMAGED):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 8, 64))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if number % 3 == 0:
            del data[chance.randrange(len(data)) :]
        file = models / f"{name}-{number}" / "1" / source.name
        file.parent.mkdir(parents=True)
        file.write_bytes(data)


@pytest.fixture(scope="module")
def daemon(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(models, tmp_path_factory.mktemp("run"), calibrate=False, start_limit_s=120) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[edge_runtime.Client]:
    with edge_runtime.Client(daemon.endpoints[0]) as client:
        yield client


def told(client: edge_runtime.Client, model: str) -> tuple[str, str]:
    (found,) = [each for each in client.models() if each["name"] == model]
    return found["state"], found["reason"]


@pytest.mark.parametrize(("model", "names"), [("traced", ("INPUT__0", "OUTPUT__0")), ("exported", ("image", "output"))])
def test_a_network_answers_as_in_pytorch_in_batches(
    client: edge_runtime.Client, model: str, names: tuple[str, str]
) -> None:
    assert told(client, model) == ("ready", "")
    for rows in (1, 2, 7):
        x = images(rows)
        with torch.inference_mode():
            wanted = network(torch)(torch.from_numpy(x)).numpy()
        got = client.infer(model, {names[0]: x})[names[1]]
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)
    (entry,) = [each for each in client.models() if each["name"] == model]
    assert (entry["backend"], entry["device"], entry["precision"]) == ("pytorch", "CPU", "f32")
    assert entry["host"]["pid"]


def test_a_scripted_module_takes_its_shapes_from_the_settings(client: edge_runtime.Client) -> None:
    assert told(client, "scripted") == ("ready", "")
    assert client.infer("scripted", {"x": np.ones((3, 16), np.float32)})["y"].shape == (3, 4)


@pytest.mark.parametrize(("model", "threads"), [("wide", 2), ("scripted", 1)])
def test_a_forked_host_has_the_threads_of_its_runs_and_no_more(
    client: edge_runtime.Client, model: str, threads: int
) -> None:
    """OpenMP's pools survive no fork, so the parent starts none; nor does a run take more cores than it counts."""
    width = 1024 if model == "wide" else 16
    for rows in (1, 64, 8):
        x = np.full((rows, width), rows, np.float32)
        assert np.isfinite(client.infer(model, {"x": x})["y"]).all()
    (entry,) = [each for each in client.models() if each["name"] == model]
    runners = max(len(os.sched_getaffinity(0)) // threads, 1)
    kept = 2  # one listens to the daemon; PyTorch has one of its own since its import
    assert sum(1 for _ in Path(f"/proc/{entry['host']['pid']}/task").iterdir()) <= runners * threads + kept


def test_inputs_are_named_as_triton_names_them_and_outputs_by_the_keys_of_a_dictionary(
    client: edge_runtime.Client,
) -> None:
    assert told(client, "two") == ("ready", "")
    got = client.infer("two", {"INPUT__0": np.ones((1, 3), np.float32), "b__1": np.array([[1, 2]])})
    assert got["sum"].tolist() == [[2, 2, 2]]
    assert got["twice"].tolist() == [[2, 4]]


def test_a_module_that_changes_its_input_leaves_the_callers_as_it_was(client: edge_runtime.Client) -> None:
    shared = client.allocate((1, 4), np.float32)
    shared[:] = 1
    for _ in range(2):
        got = client.infer("changing", {"INPUT__0": shared})
        assert (got["OUTPUT__0"].tolist(), got["OUTPUT__1"].tolist()) == ([[2, 2, 2, 2]], [8])
    assert shared.tolist() == [[1, 1, 1, 1]]


def test_precision_turns_a_module_into_another_and_keeps_its_datatypes(client: edge_runtime.Client) -> None:
    (entry,) = [each for each in client.models() if each["name"] == "half"]
    assert (entry["state"], entry["precision"]) == ("ready", "bf16")
    x = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    got, exact = client.infer("half", {"x": x})["y"], client.infer("scripted", {"x": x})["y"]
    assert got.dtype == np.float32
    assert 0 < np.abs(got - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("unsaid", r"does not say the shape of 'x'.*model.toml:\n\[input.INPUT__0\]\nshape = "),
        ("misnamed", r"\[input.image\]; the module takes INPUT__0 or x"),
        ("inside", r'isolation = "never" is refused for model.pt'),
        (
            "pickled",
            r"model.pt is a pickle of PyTorch .*reading one can run code, so it is never loaded.*torch.export.save",
        ),
        ("old-pickle", r"model.pt is a pickle of PyTorch .*reading one can run code, so it is never loaded"),
    ],
)
def test_a_model_that_is_not_served_says_why_and_what_to_do(
    client: edge_runtime.Client, model: str, reason: str
) -> None:
    state, why = told(client, model)
    assert state == "failed"
    assert re.search(reason, why, re.DOTALL), why


def test_code_in_torchscript_reads_its_own_file(client: edge_runtime.Client) -> None:
    """So that the next test finds a sandbox, and no operator that does not work."""
    assert told(client, "reads-itself") == ("ready", "")
    assert (
        client.infer("reads-itself", {"INPUT__0": np.zeros((1, 4), np.float32)})["OUTPUT__0"].astype(np.uint8).tobytes()
        == b"PK\x03\x04"
    )


@pytest.mark.parametrize("model", ["reads-beside", "reads-other", "reads-secret", "loose"])
def test_code_in_torchscript_reads_no_other_file_of_the_disk(client: edge_runtime.Client, model: str) -> None:
    state, why = told(client, model)
    assert (state, "Permission denied" in why) == ("failed", True), why


def test_code_in_torchscript_writes_nothing(client: edge_runtime.Client, models: Path) -> None:
    """PyTorch does not tell that it cannot write, so the module is served."""
    written = models / "writes" / "1" / "written"
    assert told(client, "writes") == ("ready", "")
    client.infer("writes", {"INPUT__0": np.zeros((1, 4), np.float32)})
    assert not written.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.load(str(models / "writes" / "1" / "model.pt"))(FOUR)
    assert written.exists(), "outside the sandbox it does write"


def test_damaged_files_are_a_reason_or_a_model_and_the_others_are_served(client: edge_runtime.Client) -> None:
    damaged = [each for each in client.models() if each["name"].startswith("damaged")]
    assert len(damaged) == 2 * DAMAGED
    for each in damaged:
        assert each["state"] in ("ready", "failed")
        assert each["state"] == "ready" or len(each["reason"]) > 20, each
    assert sum(each["state"] == "failed" for each in damaged) > DAMAGED
    assert client.infer("traced", {"INPUT__0": images(1)})["OUTPUT__0"].shape == (1, 10)
