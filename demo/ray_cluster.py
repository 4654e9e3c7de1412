"""A Ray cluster on this machine alone, for the demo, the tests and the bench of `edge_runtime.ray_serve`.

Owns: what Ray starts, which all ends with it. Its first import of ray comes after the environment is set.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import tempfile
import warnings
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
    # Of its HAProxy ingress, where RAY_SERVE_ENABLE_HA_PROXY=1. It sends a request again whose replica ended before it
    # answered, if it has all of it in its buffer. Replicas that end need not wait for other balancers.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "10",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    "RAY_metrics_report_interval_ms": "1000",  # ten seconds else, which the tests would wait
    # Its warnings of things to come would be on the terminal.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

HAPROXY_PORTS = "HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC"

HAPROXY_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
"""Where HAProxy has its files, by the end of the variable's name; of all users in /tmp else."""

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
    ports = {f"RAY_SERVE_{name}_PORT": str(free_port()) for name in HAPROXY_PORTS}
    for name, value in {**ENVIRONMENT, **ports, **(environment or {})}.items():
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

    failure = ""
    for _ in range(START_TRIES):
        folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: Unix sockets lie in it
        os.environ["HOME"] = str(folder)  # where Ray writes its token
        for name, path in HAPROXY_FILES.items():
            os.environ[f"RAY_SERVE_HAPROXY_{name}"] = str(folder / "haproxy" / path)
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
            failure = str(error)
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
            _forget_processes()
        else:
            return folder
    raise RayNotStarted(f"Ray did not start in {START_TRIES} tries: {failure}")


def _forget_processes() -> None:
    """Forget what Ray started, and ended without waiting for it: Python warns of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
