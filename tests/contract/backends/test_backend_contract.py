"""What every backend promises (edge_runtime.testing), held against each of ours with real models."""

from __future__ import annotations

import pytest

from edge_runtime.testing import BackendContract, BackendKit
from tests.contract.backends.backend_kits import all_kits

KITS = all_kits()


class TestBackends(BackendContract):
    @pytest.fixture(params=KITS, ids=lambda kit: kit.label)
    def kit(self, request: pytest.FixtureRequest) -> BackendKit:
        found: BackendKit = request.param
        return found


for _name in (
    "test_several_inputs_and_outputs_keep_the_models_order",
    "test_bytes_go_through_unchanged_or_fail_to_load",
):
    pytest.mark.smoke(getattr(BackendContract, _name))

# It is about the libraries, whatever the Python.
pytest.mark.long(BackendContract.test_loading_and_closing_again_and_again_keeps_memory_flat)
