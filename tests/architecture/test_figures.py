"""The figures of the house are counted from the source and from a request that really ran."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture import figures
from tests.architecture.source_tree import ROOT


def test_a_request_and_an_update_are_followed_through_our_own_files() -> None:
    command = [sys.executable, "-m", "tests.architecture.figures", "--calls"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    request, _, update = told.partition("an update from check to commit: ")
    assert "edge_runtime/transports/zmq_transport.py: Endpoint.drain" in request
    assert "edge_runtime/scheduling/policy.py: plan_batch" in request
    assert "edge_runtime/update/" not in request
    assert "edge_runtime/repository/durable.py: " in update


def test_each_product_file_is_counted() -> None:
    assert figures.count().files == len(figures.product_modules()) > 100
