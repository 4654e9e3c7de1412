"""What the table says of a model that it does not have."""

from __future__ import annotations

import pytest

from edge_runtime.errors import ModelNotFound, NotReady
from edge_runtime.models.executor import Executor
from edge_runtime.models.model_table import ModelTable


def test_no_model_is_unknown_before_the_folder_was_read():
    table = ModelTable(Executor())
    with pytest.raises(NotReady) as caught:
        table.resolve("late", None)
    assert caught.value.retryable
    assert not table.is_coming("late", None)

    table.is_complete = True
    with pytest.raises(ModelNotFound):
        table.resolve("late", None)
