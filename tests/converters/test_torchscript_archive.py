"""TorchScript that would touch files, or call what is not PyTorch's own, never reaches torch.jit.load."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.onnx_from_torchscript import convert
from edge_runtime_converters.options import parse_shapes
from edge_runtime_converters.pytorch_archives import write_safe_archive
from tests.converters.programs import write_archive
from tests.converters.sources import needs

SOUND = """class Network(Module):
  __parameters__ = []
  def forward(self: __torch__.Network, x: Tensor) -> Tensor:
    _0 = getattr(self, "0")
    return ops.prim.NumToTensor(torch.size(torch.add(x, x), 0))
"""


def archive(path: Path, code: str, **more: bytes) -> Path:
    members = {"data.pkl": b"", "constants.pkl": b"", "version": b"3", "code/__torch__.py": code.encode()}
    return write_archive(path, {**members, **more})


def test_code_that_computes_passes_unchanged(tmp_path: Path) -> None:
    write_safe_archive(archive(tmp_path / "model.pt", SOUND), tmp_path / "safe.pt")
    with zipfile.ZipFile(tmp_path / "safe.pt") as made:
        assert made.read("model/code/__torch__.py").decode() == SOUND


@pytest.mark.parametrize(
    "line",
    [
        'torch.save(x, "canary")',
        'torch . save (x, "canary")',
        'torch.# hidden\n  save(x, "canary")',
        'torch.\\\n  save(x, "canary")',
        'x.save("canary")',
        'ops.aten.save(x, "canary")',
        'getattr(torch, "save")(x, "canary")',
        'getattr(torch, "sa" "ve")(x, "canary")',
        'torch.from_file("/etc/passwd", None, 8)',
        "ops.custom.run(x)",
        "ops . custom . run(x)",
        "__torch__.torch.classes.custom.Thing(x)",
        "t\N{CYRILLIC SMALL LETTER O}rch.add(x, x)",
    ],
)
def test_code_that_does_more_is_refused(tmp_path: Path, line: str) -> None:
    path = archive(tmp_path / "model.pt", f"{SOUND}    _1 = {line}\n")
    with pytest.raises(ConversionFailed, match=r"nothing of it was loaded|not TorchScript"):
        write_safe_archive(path, tmp_path / "safe.pt")


def test_members_that_torchscript_does_not_have_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "model.pt", SOUND, **{"mobile_interface.bin": b""})
    with pytest.raises(ConversionFailed, match="none of TorchScript's own files"):
        write_safe_archive(path, tmp_path / "safe.pt")


@pytest.mark.filterwarnings("ignore")
def test_pytorch_by_itself_writes_files_that_torchscript_names_and_the_conversion_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (torch,) = needs("torch")
    monkeypatch.chdir(tmp_path)

    class Saving(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.save(x, "canary")
            return x

    try:
        torch.jit.script(Saving()).save("model.pt")
    except Exception:  # noqa: BLE001 (each version says it with another class)
        pytest.skip("this PyTorch does not script torch.save")
    torch.jit.load("model.pt")(torch.ones(2))
    assert (tmp_path / "canary").exists(), "the attack is one"
    (tmp_path / "canary").unlink()
    with pytest.raises(ConversionFailed, match="'save'"):
        convert(tmp_path / "model.pt", tmp_path / "model.onnx", parse_shapes(("x=-1,3",)))
    assert not (tmp_path / "canary").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_pickle_in_the_archive_makes_no_python_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (torch,) = needs("torch")
    monkeypatch.chdir(tmp_path)
    # cos\nsystem\n(S'touch canary'\ntR. : what Python's unpickler would run
    path = archive(tmp_path / "model.pt", SOUND, **{"data.pkl": b"cos\nsystem\n(S'touch canary'\ntR."})
    assert torch is not None
    with pytest.raises(ConversionFailed, match="cannot load it"):
        convert(path, tmp_path / "model.onnx", parse_shapes(("x=-1,3",)))
    assert not (tmp_path / "canary").exists()
