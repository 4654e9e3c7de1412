"""The C client of the documents compiles without a warning and does what it says, against a real daemon."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.contract.running_daemon import put_model, running_daemon
from tests.models import onnx_models

SOURCE = Path(__file__).parents[4] / "docs" / "shared_memory_client.c"
LIMIT_S = 300.0

ZMQ_H = """
#include <stddef.h>
enum { ZMQ_DEALER = 5, ZMQ_SNDMORE = 2 };
void *zmq_ctx_new(void);
void *zmq_socket(void *, int);
int zmq_connect(void *, const char *);
int zmq_send(void *, const void *, size_t, int);
int zmq_recv(void *, void *, size_t, int);
"""
"""What the client uses of zmq.h, which the wheel's libzmq comes without."""


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    libraries = sorted((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*.so*"))
    if not libraries:
        pytest.skip("this pyzmq brings no libzmq of its own")
    folder = tmp_path_factory.mktemp("client")
    (folder / "zmq.h").write_text(ZMQ_H)
    words = ["-O2", "-Wall", "-Wextra", "-Werror", f"-I{folder}", str(SOURCE), "-o", str(folder / "client")]
    words += [str(libraries[0]), f"-Wl,-rpath,{libraries[0].parent}"]
    subprocess.run([compiler, *words], check=True, timeout=LIMIT_S)
    return folder / "client"


def test_it_is_as_short_as_the_documents_say() -> None:
    assert len(SOURCE.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("isolation", ["auto", "always"])
def test_it_runs_a_model_on_shared_memory(client: Path, tmp_path: Path, isolation: str) -> None:
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with running_daemon(tmp_path / "models", tmp_path / "run", isolation=isolation) as daemon:
        path = daemon.endpoints[1].removeprefix("ipc://")
        told = subprocess.run([client, path, "mlp"], capture_output=True, text=True, check=True, timeout=LIMIT_S)
        first, second = onnx_models.mlp_weights()
        x = np.arange(16, dtype=np.float32)[None] / 16
        wanted = (np.maximum(x @ first, 0) @ second)[0]
        np.testing.assert_allclose([float(word) for word in told.stdout.split()], wanted, rtol=1e-3, atol=1e-4)
        refused = subprocess.run([client, path, "none"], capture_output=True, check=False, timeout=LIMIT_S)
        assert refused.returncode == 1
        assert b"model_not_found" in refused.stderr
