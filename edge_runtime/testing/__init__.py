"""The contracts of a backend and of a door, as tests of pytest (extra `testing`): for plug-ins, and for ours.

docs/plugins.md says how to run them. Needs pytest.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("edge_runtime.testing.backend_contract", "edge_runtime.testing.door_contract")

from edge_runtime.testing.backend_contract import BackendContract  # noqa: E402 (after the line above)
from edge_runtime.testing.backend_kit import BackendKit, mlp_answer, mlp_input, mlp_weights  # noqa: E402
from edge_runtime.testing.door_contract import DoorContract  # noqa: E402
from edge_runtime.testing.door_kit import Ask, DoorKit  # noqa: E402

__all__ = ["Ask", "BackendContract", "BackendKit", "DoorContract", "DoorKit", "mlp_answer", "mlp_input", "mlp_weights"]
