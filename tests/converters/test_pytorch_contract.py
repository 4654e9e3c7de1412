"""The PyTorch backend keeps what every backend promises (edge_runtime.testing)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; make test-converters has it")

from edge_runtime.backends.registry import backend
from edge_runtime.testing import BackendContract, BackendKit
from tests.converters.pytorch_models import DeclaringBackend, program

_CORRUPT = (b"", b"\x00", b"\x80\x02cos\nsystem\n", b"PK\x03\x04 and no more", b"PK\x05\x06" + bytes(18))
_DECLARING = DeclaringBackend()


def _without_bytes(make: Callable[..., Path]) -> Callable[..., Path | None]:
    """A tensor of PyTorch has no text."""

    def made(model: str, folder: Path, **arguments: Any) -> Path | None:
        return None if arguments.get("datatype") == "BYTES" else make(model, folder, **arguments)

    return made


_KITS = (
    BackendKit("torchscript", _DECLARING, _without_bytes(_DECLARING.make), _CORRUPT, has_bytes=False, has_bound=False),
    BackendKit("program", backend("pytorch"), _without_bytes(program), _CORRUPT, has_bytes=False, has_bound=False),
)


class TestPyTorch(BackendContract):
    @pytest.fixture(params=_KITS, ids=lambda kit: kit.label)
    def kit(self, request: pytest.FixtureRequest) -> BackendKit:
        found: BackendKit = request.param
        return found
