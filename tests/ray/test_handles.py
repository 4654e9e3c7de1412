"""A deployment of `ray_serve.deployment`, asked by its handle in a real Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

from edge_runtime import Runtime
from edge_runtime.errors import DeadlineExceeded, DeadlineUnmeetable, ModelNotFound, TensorMismatch
from edge_runtime.ray_serve import Instant, infer
from tests.ray.conftest import ENOUGH_MS, ONE, ROWS


def test_answer_by_a_handle_is_that_of_the_runtime(served: Any, models: Path) -> None:
    answer = infer(served, "mlp", {"x": ROWS}, timeout_ms=ENOUGH_MS)
    with Runtime(models) as runtime:
        np.testing.assert_array_equal(answer["y"], runtime.infer("mlp", {"x": ROWS})["y"])
    assert (answer.model, answer.version) == ("mlp", 1)


def test_errors_of_a_replica_are_the_callers_own(served: Any) -> None:
    with pytest.raises(ModelNotFound) as not_found:
        infer(served, "absent", {"x": ROWS})
    with pytest.raises(TensorMismatch):
        infer(served, "mlp", {"x": ROWS[:, :3]})
    assert type(not_found.value) is ModelNotFound


def test_deadline_counts_from_where_the_request_began(served: Any) -> None:
    infer(served, "sleeper", {"x": ONE})
    now = Instant.now()
    began = Instant(now.boot, now.monotonic_s - 1.0, now.utc_s - 1.0)
    with pytest.raises((DeadlineUnmeetable, DeadlineExceeded)):  # the replica's word, or the caller's own
        infer(served, "sleeper", {"x": ONE}, timeout_ms=1_010.0, began=began)
    assert infer(served, "sleeper", {"x": ONE}, timeout_ms=ENOUGH_MS, began=began)["y"].shape == (1, 4)


def test_replica_has_the_cores_that_ray_gives_it(served: Any) -> None:
    assert served.status.remote().result()["cores"] == 1
