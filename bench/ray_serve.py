"""Ray Serve with the runtime in its replicas, beside Ray Serve alone: CPU, overload, and what is lost when parts end.

`make bench-ray` runs all on one line of JSON each, ARGS="cpu" one of overload, events, cpu, planes, node; it wants a
quiet machine. planes is cpu again, by Serve's HAProxy and gRPC. The model of overload and events sleeps 100 ms for at
most 4 rows: an accelerator's stand-in, 40 a second.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from demo.ray_cluster import ENVIRONMENT, HOST, OBJECT_STORE_BYTES, free_port, running_ray
from tests.models import onnx_models, python_models

DEADLINE_MS = 600.0
OFFERED_PER_S = 80.0
ONE = np.zeros((1, 4), np.float32)
HTTP_BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
HTTP_ANSWER = json.dumps({"model_name": "mlp", "outputs": [{"name": "y", "shape": [1, 4], "data": [0.5] * 4}]})
NODES_HOST = "127.0.0.2"
"""A driver that joins a cluster at 127.0.0.1 looks for it at the machine's own address (`resolve_ip_for_localhost`)."""

Ask = Callable[[], Awaitable[Any]]


def say(what: str, **figures: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


def make_models(folder: Path) -> Path:
    onnx_models.mlp(folder / "mlp" / "1")
    body = "import time\n\ndef infer(inputs):\n    time.sleep(0.1)\n    return {'y': inputs['x']}\n"
    python_models.write(folder / "sleeper" / "1", [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])], body)
    (folder / "sleeper" / "model.toml").write_text("max_batch_rows = 4\n")
    return folder


def ours(models: Path, **options: Any) -> Any:
    from edge_runtime.config.settings import Config
    from edge_runtime.ray_serve import deployment

    config = Config(calibrate=False, python_models=True, state=tempfile.mkdtemp(dir=models.parent))
    return deployment(models, config=config, **{"ray_actor_options": {"num_cpus": 1}, **options})


# ---- CPU ------------------------------------------------------------------------------------------------------------


def cpu_s() -> float:
    """Of this process and of all that Ray started."""
    total = 0.0
    for each in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


class HttpClient:
    """Keeps as many connections as it has requests in flight; it reads no more of a response than its length."""

    def __init__(self, address: Any, request: bytes) -> None:
        self._address = address
        self._request = request
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @classmethod
    async def connected(cls, proxy: str, path: str, body: bytes) -> HttpClient:
        """Make one whose path is answered: Serve's proxies hear of a deployment a little later."""
        address = urlsplit(proxy)
        head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        client = cls(address, head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while await client.ask() == 404:
            pass
        return client

    async def ask(self) -> int:
        """Return the status of a response."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        self._idle.append((reader, writer))
        return int(head[9:12])


async def many(ask: Ask, count: int, in_flight: int) -> float:
    """CPU milliseconds a request."""
    left = iter(range(count))

    async def one_by_one() -> None:
        for _ in left:
            await ask()

    began_s = cpu_s()
    await asyncio.gather(*(one_by_one() for _ in range(in_flight)))
    return (cpu_s() - began_s) / count * 1e3


def measure_cpu(models: Path, proxy: str) -> None:
    from ray import serve
    from starlette.responses import Response

    from edge_runtime.messages import InferResult
    from edge_runtime.ray_serve import infer_async

    @serve.deployment(max_ongoing_requests=10_000)
    class Empty:
        """The same payload both ways, and nothing between."""

        def __init__(self) -> None:
            self._answer = {"y": np.zeros((1, 4), np.float32)}

        async def infer(self, *_: Any) -> InferResult:
            return InferResult("mlp", 1, self._answer)

        async def __call__(self, request: Any) -> Any:
            await request.body()
            return Response(HTTP_ANSWER, media_type="application/json")

    full = serve.run(ours(models).bind(), name="ours", route_prefix="/ours")
    empty = serve.run(Empty.bind(), name="empty", route_prefix="/empty")
    row = np.ones((1, 16), np.float32)
    options = dict.fromkeys(("raw", "version", "outputs"), None) | {
        "timeout_ms": 1e5,
        "priority": 0,
        "timing": False,
    }

    async def ask_ours() -> None:
        await infer_async(full, "mlp", {"x": row}, timeout_ms=1e5)

    async def ask_empty() -> None:
        await empty.infer.remote("mlp", {"x": row}, None, "bench", options)

    async def rounds(one: Ask, other: Ask, in_flight: int) -> list[tuple[float, float]]:
        await many(one, 200, in_flight)
        await many(other, 200, in_flight)
        return [(await many(one, 400, in_flight), await many(other, 400, in_flight)) for _ in range(5)]

    async def by_http(in_flight: int) -> list[tuple[float, float]]:
        body = json.dumps(HTTP_BODY).encode()
        clients = [
            await HttpClient.connected(proxy, f"/{name}/v2/models/mlp/infer", body) for name in ("ours", "empty")
        ]
        return await rounds(clients[0].ask, clients[1].ask, in_flight)

    planes = "Serve's HAProxy and gRPC" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "Serve's own"
    for in_flight in (1, 32):
        for kind, measured in (("a handle call", rounds(ask_ours, ask_empty, in_flight)), ("HTTP", by_http(in_flight))):
            found = asyncio.run(measured)
            say(
                f"CPU of {kind}, mlp, {in_flight} in flight, {planes}",
                ours_ms=statistics.median(each for each, _ in found),
                empty_ms=statistics.median(other for _, other in found),
                ratio=statistics.median(each / other for each, other in found),
            )
    serve.delete("ours")
    serve.delete("empty")


# ---- overload -------------------------------------------------------------------------------------------------------


async def closed_loop(ask: Ask, in_flight: int, for_s: float) -> float:
    """Answers a second."""
    until_s, count = time.monotonic() + for_s, 0

    async def one_by_one() -> None:
        nonlocal count
        while time.monotonic() < until_s:
            await ask()
            count += 1

    await asyncio.gather(*(one_by_one() for _ in range(in_flight)))
    return count / for_s


async def open_loop(ask: Ask, for_s: float) -> tuple[float, Counter[str], list[float]]:
    """Answers in time a second, endings, and the times of refusals."""
    endings: Counter[str] = Counter()
    refusals: list[float] = []
    chance = random.Random(1)

    async def one() -> None:
        began_s = time.monotonic()
        try:
            await asyncio.wait_for(ask(), DEADLINE_MS / 1e3)
            ending = "in time" if time.monotonic() - began_s <= DEADLINE_MS / 1e3 else "late"
        except Exception as error:  # noqa: BLE001 (counted)
            ending = getattr(error, "code", type(error).__name__)
            if ending in {"deadline_unmeetable", "queue_full", "BackPressureError"} or "BackPressure" in ending:
                refusals.append((time.monotonic() - began_s) * 1e3)
        endings[ending] += 1

    tasks, began_s, at_s = [], time.monotonic(), 0.0
    while at_s < for_s:
        at_s += chance.expovariate(OFFERED_PER_S)
        await asyncio.sleep(max(began_s + at_s - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return endings["in time"] / for_s, endings, refusals


def measure_overload(models: Path, _: str) -> None:
    from ray import serve

    from edge_runtime.ray_serve import infer_async

    class Plain:
        """Serve's own batches."""

        @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.005)
        async def run(self, rows: list[Any]) -> list[Any]:
            await asyncio.sleep(0.1)
            return rows

        async def infer(self, row: Any) -> Any:
            return await self.run(row)

    handle = serve.run(ours(models).bind(), name="ours", route_prefix=None)

    async def ask_ours() -> None:
        await infer_async(handle, "sleeper", {"x": ONE}, timeout_ms=DEADLINE_MS)

    async def ask_unbounded() -> None:
        await infer_async(handle, "sleeper", {"x": ONE}, timeout_ms=60_000)

    async def of_ours() -> None:
        await closed_loop(ask_unbounded, 16, 2.0)
        capacity = await closed_loop(ask_unbounded, 16, 6.0)
        in_time, endings, refusals = await open_loop(ask_ours, 10.0)
        say(
            "2 x overload, ours",
            capacity_per_s=capacity,
            in_time_per_s=in_time,
            share=in_time / capacity,
            refusal_p50_ms=statistics.median(refusals) if refusals else math.nan,
            endings=dict(endings),
        )

    asyncio.run(of_ours())
    asyncio.run(of_ours())
    serve.delete("ours")
    for ongoing, queued in ((64, -1), (8, 8), (4, 4)):
        deployed = serve.deployment(max_ongoing_requests=ongoing, max_queued_requests=queued)(Plain)
        plain = serve.run(deployed.bind(), name="plain", route_prefix=None)

        async def ask_plain(plain: Any = plain) -> None:
            await plain.infer.remote(ONE)

        async def of_plain(
            ask: Ask = ask_plain,
            most: int = min(ongoing, 16),
            name: str = f"{ongoing} at once and {queued} queued",
        ) -> None:
            capacity = await closed_loop(ask, most, 4.0)
            in_time, endings, refusals = await open_loop(ask, 8.0)
            say(
                f"2 x overload, plain, {name}",
                capacity_per_s=capacity,
                in_time_per_s=in_time,
                refusal_p50_ms=statistics.median(refusals) if refusals else math.nan,
                endings=dict(endings),
            )

        asyncio.run(of_plain())
        serve.delete("plain")


# ---- events ---------------------------------------------------------------------------------------------------------


async def under_load(handle: Any, event: Callable[[], Any], least: int) -> Counter[str]:
    """Endings of at least so many requests of 16 callers, with an event after a quarter of them."""
    from edge_runtime.ray_serve import infer_async

    endings: Counter[str] = Counter()
    happened: asyncio.Future[Any] | None = None

    async def one_by_one() -> None:
        nonlocal happened
        while sum(endings.values()) < least or happened is None or not happened.done():
            try:
                await infer_async(handle, "sleeper", {"x": ONE}, timeout_ms=120_000)
                endings["answered"] += 1
            except Exception as error:  # noqa: BLE001 (counted)
                endings[f"{type(error).__name__}: {str(error)[:80]}"] += 1
            if happened is None and sum(endings.values()) >= least / 4:
                happened = asyncio.get_running_loop().run_in_executor(None, event)

    await asyncio.gather(*(one_by_one() for _ in range(16)))
    return endings


def deploy_two(models: Path, cpus: float = 0.5, **more: Any) -> Any:
    from ray import serve

    app = ours(models, num_replicas=2, ray_actor_options={"num_cpus": cpus, **more})
    return serve.run(app.bind(), name="ours", route_prefix=None)


def measure(name: str, handle: Any, event: Callable[[], Any]) -> None:
    endings = asyncio.run(under_load(handle, event, 500))
    sent = sum(endings.values())
    say(name, sent=sent, lost=sent - endings["answered"], endings=dict(endings))


def measure_events(models: Path, _: str) -> None:
    from ray import serve

    handle = deploy_two(models)

    def kill_replica() -> None:
        os.kill(handle.status.remote().result()["pid"], signal.SIGKILL)

    def add_version() -> None:
        new = models / "sleeper" / "part"
        shutil.copytree(models / "sleeper" / "1", new)
        new.rename(models / "sleeper" / "2")

    measure("replica killed under saturation", handle, kill_replica)
    measure("rolling redeployment", handle, lambda: deploy_two(models, 0.4))
    measure("new version in the folder", handle, add_version)
    serve.delete("ours")


def measure_node(models: Path) -> None:
    """On three nodes of a simulated cluster, of which one with a replica ends."""
    folder = tempfile.mkdtemp(prefix="ray-")
    os.environ.update(ENVIRONMENT, HOME=folder)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    settings = {"object_store_memory": OBJECT_STORE_BYTES, "node_ip_address": NODES_HOST}
    head = {"num_cpus": 1, "include_dashboard": False, **settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, resources={"replica": 1}, **settings) for _ in range(2)]
    try:
        ray.init(address=cluster.address, log_to_driver=False, _node_ip_address=NODES_HOST)
        serve.start(http_options={"host": HOST, "port": free_port()}, proxy_location="Disabled")
        handle = deploy_two(models, resources={"replica": 1})
        measure("node killed", handle, lambda: cluster.remove_node(nodes[1], allow_graceful=False))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


SCENARIOS = {"overload": measure_overload, "events": measure_events, "cpu": measure_cpu}


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder, "models"))
        if names == ["node"]:
            measure_node(models)
            return 0
        if names == ["planes"]:
            os.environ.update(RAY_SERVE_ENABLE_HA_PROXY="1", RAY_SERVE_USE_GRPC_BY_DEFAULT="1")
            names = ["cpu"]
        with running_ray() as proxy:
            for name in names or SCENARIOS:
                SCENARIOS[name](models, proxy)
    # Ray reads its environment once, so each other cluster is another process's.
    return 0 if names else max(map(in_another_process, ("planes", "node")))


def in_another_process(name: str) -> int:
    return os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", "bench.ray_serve", name])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
