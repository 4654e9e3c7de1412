"""TorchScript beside raw PyTorch: what the daemon, its host and its messages cost a ResNet-18 that PyTorch runs.

Raw is PyTorch in inference mode, in the quickest form of the module and the best layout (raw.py). It runs where torch
can be imported: `PYTHONPATH=$PWD/build/convert/venv/lib/python3.11/site-packages .venv/bin/python -m bench --only
torchscript`, after `make test-converters`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.makers import BenchModel, cache_folder
from bench.scenarios import Bench, say

SETTINGS = "[input.x]\nshape = [-1, 3, 224, 224]\n"
IN_FLIGHT = 16


def missing() -> str:
    """Why it cannot be measured here; "" where it can."""
    return (
        ""
        if find_spec("torch")
        else "was not measured: torch is not installed (bench/torch_scenarios.py says how it comes)"
    )


def torchscript(bench: Bench) -> None:
    """ResNet-18 as TorchScript, 16 in flight, beside raw PyTorch at its best, with one row or the daemon's rows."""
    if why := missing():
        bench.figures.note("torchscript", why)
        say(f"torchscript {why}")
        return
    model, figures = resnet18(), bench.figures
    request = bench.request(model)
    daemon = bench.daemon(model, settings=SETTINGS)
    daemon.start_and_settle(request)
    rows = daemon.calibrated_rows(model.name)
    figures.note("torchscript", f"batch limit {rows}")
    for number in bench.rounds("torchscript"):
        raw, served = 0.0, 0.0
        for side in ("raw", "served") if number % 2 else ("served", "raw"):
            if side == "served":
                served = bench.rate(daemon.endpoint, request, IN_FLIGHT).rate
            else:
                raw = max(
                    bench.raw(model, layout, backend="pytorch", rows=count).rows_per_s
                    for layout in ("all", "callers")
                    for count in sorted({1, rows})
                )
        figures.add("torchscript.16.ratio", served / raw)
        figures.add("torchscript.16.rate", served)
        figures.add("torchscript.raw.rate", raw)
    daemon.stop()


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"torchscript": torchscript}


# ---- the model ------------------------------------------------------------------------------------------------------


def resnet18() -> BenchModel:
    """ResNet-18 (He et al. 2015, table 1) as torchvision builds it, batch normalisation and all, weights of a seed."""
    path = cache_folder() / "resnet18.pt"
    if not path.exists():
        _write(path)
    return BenchModel("resnet18", path, (3, 224, 224), 1000)


def _write(path: Path) -> None:
    import warnings

    import torch

    nn = torch.nn

    def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> Any:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs))

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first, self.second = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1)
            is_same = stride == 1 and inputs == outputs
            self.shortcut = nn.Identity() if is_same else convolution(inputs, outputs, 1, stride)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))

    class Network(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            layers: list[Any] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
            channels = 64
            for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
                for step in (stride, 1):
                    layers.append(Block(channels, width, step))
                    channels = width
            self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    torch.manual_seed(4)
    part = path.with_suffix(f".{os.getpid()}.part")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch keeps TorchScript for existing models
        torch.jit.trace(Network().eval(), torch.zeros(2, 3, 224, 224)).save(str(part))
    part.replace(path)
