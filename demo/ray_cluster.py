"""A Ray cluster on this machine alone, for the demo, the tests and the bench of `edge_runtime.ray_serve`.

Owns: what Ray starts, which all ends with it. Its first import of ray comes after the environment is set.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HOST = "127.0.0.1"

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine is slow to start it: the raylet has half a minute else, and Serve ends its own proxy.
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "90",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "90",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "edge_runtime.ray_serve.proxy:middlewares",
    # Its warnings of things to come would be on the terminal.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

OBJECT_STORE_BYTES = 128 << 20

START_TRIES = 3
"""Ray 2.60 gives each of its agents 15 s to start, whatever is set, which a busy machine may not keep."""


class RayNotStarted(RuntimeError):
    """Ray did not start on this machine."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running_ray(cpus: int = 4, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start Ray and Serve, and end them; the address of Serve's proxy. Raises RayNotStarted."""
    for name, value in {**ENVIRONMENT, **(environment or {})}.items():
        os.environ.setdefault(name, value)
    folder = _start(cpus)
    import ray
    from ray import serve

    port = free_port()
    try:
        serve.start(http_options={"host": HOST, "port": port})
        yield f"http://{HOST}:{port}"
    finally:
        try:
            serve.shutdown()
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _start(cpus: int) -> Path:
    """Start Ray; return its folder."""
    import ray

    failure: Exception | None = None
    for _ in range(START_TRIES):
        folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: Unix sockets lie in it
        os.environ["HOME"] = str(folder)  # where Ray writes its token
        try:
            ray.init(
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                _node_ip_address=HOST,
                _temp_dir=str(folder),
            )
        except Exception as error:  # noqa: BLE001  (Ray raises that class itself)
            failure = error
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return folder
    raise RayNotStarted(f"Ray did not start in {START_TRIES} tries: {failure}")
