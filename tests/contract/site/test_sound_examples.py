"""The examples of sound, as a reader runs them: the script makes all, the daemon serves it, and the broker tells it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge_runtime.config.loading import load_config
from tests.contract.running_daemon import ANSWER_S, running_daemon
from tests.contract.site.test_cameras import next_result
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer

EXAMPLES = Path(__file__).parents[3] / "examples"


@needs_mosquitto
@pytest.mark.parametrize(
    ("example", "topic", "labels"),
    [
        ("wake_word", "wake/kitchen", ["nothing", "hello", "nothing", "stop", "nothing"]),
        ("vibration_alarm", "motor/pump", ["good", "alarm"]),
    ],
)
def test_an_example_tells_what_its_configuration_says(broker, tmp_path, example, topic, labels):
    made = subprocess.run(
        [sys.executable, str(EXAMPLES / example / "make.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=ANSWER_S,
    )
    assert made.returncode == 0, made.stderr
    config = load_config(tmp_path / "config.toml", {})
    mqtt = replace(config.mqtt, url=f"{broker.url}/dev1", reconnect_min_s=0.05)
    with Peer(broker.url) as listener:
        listener.subscribe("edge/dev1/result/#", 1)
        with running_daemon(Path(config.models), tmp_path / "run", mqtt=mqtt, publish=config.publish):
            told = []
            while len(told) < len(labels):
                result = next_result(listener, f"edge/dev1/result/{topic}")
                label = result["classes"][0]["label"]
                if not told or told[-1] != label:
                    told.append(label)
    assert told == labels
    if example == "vibration_alarm":
        assert result["number"]["unit"] == "g"
        assert result["number"]["value"] > 0.5
