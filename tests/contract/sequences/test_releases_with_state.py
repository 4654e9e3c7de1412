"""Models that keep state as signed releases: checked by their golden input, observed, and swapped with what runs."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from edge_runtime.config.settings import ZmqSettings
from edge_runtime.daemon.assemble import assemble_core, assemble_daemon
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import PublishError, SequenceLost
from tests.contract.running_daemon import ANSWER_S
from tests.contract.sequences.test_sequences_of_clients import asked_until_it_is_gone, total, x
from tests.contract.sequences.test_stateful_models import TOML
from tests.contract.updates.published_models import device_config, founded, publish
from tests.contract.updates.updated_device import UpdatedDevice
from tests.models import onnx_models, stateful_ir


@pytest.fixture
def publisher(tmp_path):
    return founded(tmp_path)


def make(folder, gain=1.0, toml=TOML):
    onnx_models.accumulator(folder / ("1" if gain == 1 else "2"), gain=gain)
    (folder / "model.toml").write_text(toml)
    return folder


@contextmanager
def device(publisher, home, **settings):
    zmq = ZmqSettings(endpoints=(f"ipc://{home}/infer.sock",))
    config = device_config(publisher, home, zmq=zmq, **settings)
    core = assemble_core(config)
    daemon = assemble_daemon(config, core)
    try:
        daemon.start()
        with Client(daemon.endpoints[0]) as client:
            yield UpdatedDevice(SimpleNamespace(core=core)), client
    finally:
        daemon.stop()


@pytest.mark.smoke
def test_a_release_is_described_and_checked_as_its_callers_see_it(publisher, tmp_path):
    manifest = publish(publisher, make(tmp_path / "acc")).manifest
    assert [each.name for each in manifest.inputs] == ["x"]
    assert [each.name for each in manifest.golden.inputs] == ["x"]
    with device(publisher, tmp_path / "device") as (fresh, client), client.sequence("acc") as steps:
        assert fresh.outcome("acc")[0] == "installed"
        assert [total(steps.infer(x(value))) for value in (1, 2)] == [1, 3]


def test_a_release_of_a_graph_with_states_of_its_own_is_checked_from_their_beginning(publisher, tmp_path):
    stateful_ir.accumulator(tmp_path / "ir")
    (tmp_path / "ir" / "model.toml").write_text("[sequence]\n")
    manifest = publish(publisher, tmp_path / "ir").manifest
    assert [each.name for each in manifest.inputs] == ["x"]
    with device(publisher, tmp_path / "device") as (fresh, client), client.sequence("ir") as steps:
        assert fresh.outcome("ir")[0] == "installed"
        assert [total(steps.infer(x(value))) for value in (1, 2)] == [6, 8]


def test_a_release_lets_running_sequences_end_on_the_one_before(publisher, tmp_path):
    publish(publisher, make(tmp_path / "acc"))
    with device(publisher, tmp_path / "device", drain_s=ANSWER_S) as (one, client):
        assert one.outcome("acc")[0] == "installed"
        old = client.sequence("acc")
        assert total(old.infer(x(1))) == 1
        publish(publisher, make(tmp_path / "acc", gain=100.0))
        assert one.outcome("acc")[0] == "installed"
        with client.sequence("acc") as new:
            assert total(new.infer(x(1))) == 100
        assert total(old.infer(x(2))) == 3
        assert total(old.infer(x(3), end=True)) == 6


def test_a_release_ends_sequences_that_take_longer_than_they_have(publisher, tmp_path):
    publish(publisher, make(tmp_path / "acc"))
    with device(publisher, tmp_path / "device", drain_s=0.01) as (one, client):
        assert one.outcome("acc")[0] == "installed"
        old = client.sequence("acc")
        assert total(old.infer(x(1))) == 1
        publish(publisher, make(tmp_path / "acc", gain=100.0))
        assert one.outcome("acc")[0] == "installed"
        with pytest.raises(SequenceLost):
            asked_until_it_is_gone(old)


def test_a_release_brings_no_files_of_initial_states(publisher, tmp_path):
    make(tmp_path / "acc", toml=TOML.replace('output = "z_sum"', 'output = "z_sum"\ninitial = "sum.bin"'))
    (tmp_path / "acc" / "initial_state").mkdir()
    (tmp_path / "acc" / "initial_state" / "sum.bin").write_bytes(np.float32(5).tobytes())
    with pytest.raises(PublishError, match="initial_state"):
        publish(publisher, tmp_path / "acc")
