"""The PyTorch backend keeps what every backend promises; the tests are those of tests/contract."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; make test-converters has it")

from edge_runtime.backends.registry import backend
from tests.contract.backends.backend_kits import Kit
from tests.contract.backends.test_backend_contract import (  # noqa: F401  collected here, with the kits below
    test_a_device_that_is_not_there_is_unavailable_by_name,
    test_a_dynamic_axis_of_steps_gives_as_many_steps,
    test_a_dynamic_batch_axis_takes_any_number_of_rows,
    test_a_failed_run_leaves_the_instance_usable,
    test_a_fixed_batch_axis_is_in_the_spec_and_takes_only_that,
    test_a_missing_artifact_fails_to_load,
    test_a_result_stays_as_it_was_after_the_next_run,
    test_a_run_after_close_fails_and_close_is_idempotent,
    test_a_run_that_fails_inside_the_model_never_gives_an_earlier_answer,
    test_an_output_may_have_as_many_rows_as_the_data_asks_for,
    test_corrupt_artifacts_fail_to_load_with_a_reason,
    test_device_precision_and_memory_are_read_back,
    test_every_numeric_datatype_goes_through_unchanged,
    test_loading_and_closing_again_and_again_keeps_memory_flat,
    test_no_rows_give_no_rows_or_a_failed_run,
    test_outputs_come_in_the_order_asked_for,
    test_probe_says_it_is_available_with_version_and_devices,
    test_read_only_and_strided_inputs_give_the_same_answer,
    test_runs_from_as_many_threads_as_promised_keep_their_answers,
    test_several_inputs_and_outputs_keep_the_models_order,
    test_specs_are_the_models_own_with_a_dynamic_batch_axis,
)
from tests.converters.pytorch_models import DeclaringBackend, program

_CORRUPT = (b"", b"\x00", b"\x80\x02cos\nsystem\n", b"PK\x03\x04 and no more", b"PK\x05\x06" + bytes(18))
_DECLARING = DeclaringBackend()
_KITS = (
    Kit("torchscript", _DECLARING, _DECLARING.make, _CORRUPT, has_bytes=False, has_bound=False),
    Kit("program", backend("pytorch"), program, _CORRUPT, has_bytes=False, has_bound=False),
)


@pytest.fixture(params=_KITS, ids=lambda kit: kit.label)
def kit(request: pytest.FixtureRequest) -> Kit:
    found: Kit = request.param
    return found
