"""An endpoint answers JeroMQ, in pure Java: Debian's speaks ZMTP 2.0, as clients of many years do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.contract.running_daemon import floats, header, put_model
from tests.fakes import zmq_site
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models

JAR = Path("/usr/share/java/jeromq.jar")
PROGRAM = Path(zmq_site.__file__).with_name("JeromqClient.java")
COUNT = 20


@pytest.mark.skipif(shutil.which("javac") is None, reason="no Java compiler: sudo apt-get install default-jdk-headless")
@pytest.mark.skipif(not JAR.exists(), reason="no JeroMQ: sudo apt-get install libjeromq-java")
@pytest.mark.parametrize("kind", ["DEALER", "REQ"])
def test_jeromq_is_answered_over_tcp(tmp_path, kind):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    wanted = [floats(1, 16).tobytes(), bytes(64)] * (COUNT // 2)
    lines = [",".join(frame.hex() for frame in (header(), b"%d" % number, data)) for number, data in enumerate(wanted)]
    with DaemonProcess(tmp_path, "--zmq", "tcp://127.0.0.1:*") as daemon:
        daemon.wait_ready()
        address = daemon.address("ready").split()[-1]
        command = ["java", "-Xint", "-cp", str(JAR), str(PROGRAM), address, kind]
        told = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=120, check=True)
    replies = [[bytes.fromhex(frame) for frame in line.split(",")] for line in told.stdout.split()]
    assert [reply[1] for reply in replies] == [b"%d" % number for number in range(COUNT)]
    assert len({reply[2] for reply in replies}) == 2
    assert replies[0][2] != replies[1][2] == replies[3][2]
