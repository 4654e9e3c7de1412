"""Daemons of a bench that follow a signed repository, and what they are asked to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.load import write_request
from bench.makers import BenchModel
from bench.scenarios import Bench
from bench.servers import START_LIMIT_S, BenchError, Daemon
from edge_runtime import Client
from tests.fakes.http_server import HttpServer
from tests.fakes.releases import Made
from tests.fakes.update_site import GROUP, UpdateSite

APPLY_LIMIT_MS = 300_000.0
MODEL, ROW_SHAPE = "adder", (2,)
"""Of tests/fakes/update_site."""


def following(
    bench: Bench,
    url: str,
    root: bytes,
    *,
    state: Path | None = None,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Daemon:
    """A daemon with `[update]`, not started, which installs when it is asked to. settings: of `[update]` besides."""
    folder = bench.children.folder / bench.children.new_name("c")
    folder.mkdir()
    (folder / "1.root.json").write_bytes(root)
    usual = {"root_file": str(folder / "1.root.json"), "url": url, "group": GROUP, "device_id": "bench"}
    words = {**usual, "auto": False, "wake_jitter_s": 0.0, "window_s": 0.3, **settings}
    config = folder / "config.toml"
    config.write_text("\n".join(["[update]", *(f"{name} = {json.dumps(value)}" for name, value in words.items())]))
    return Daemon(bench.children, {}, state=state, config=config, environment=environment)


def apply_updates(daemon: Daemon, model: str = MODEL) -> tuple[str, str]:
    """`update apply`: what became of a model's assignment, and why. Raises BenchError: the check itself failed."""
    with Client(daemon.endpoint) as client:
        checked = client.update_apply(timeout_ms=APPLY_LIMIT_MS)
    offers = [each for each in checked["offers"] if each["model"] == model]
    if not checked["is_ok"] or not offers:
        raise BenchError(f"no update: {checked['reason'] or 'nothing is assigned'}")
    return offers[0]["action"], offers[0]["reason"]


def install(daemon: Daemon) -> None:
    """Start a daemon, let it install what is assigned, and wait until it has calibrated that. Raises BenchError."""
    daemon.start()
    with Client(daemon.endpoint) as client:
        client.wait_ready(START_LIMIT_S)
    if (outcome := apply_updates(daemon))[0] != "installed":
        raise BenchError(f"the first release: {outcome}")
    daemon.settle()


def unsigned(bench: Bench, made: Made, state: Path | None = None) -> Daemon:
    """A daemon without `[update]` that has a release's model in its folder, not started."""
    path = bench.children.folder / "unsigned.onnx"
    path.write_bytes(made.files["model.onnx"])
    return bench.daemon(BenchModel(made.release.model, path, ROW_SHAPE, *ROW_SHAPE), state=state)


def adder_request(bench: Bench) -> Path:
    """The frames of one request to a model as tests/models/onnx_models makes them: x FP32 [1, 2]."""
    return write_request(bench.children.folder / "adder.req", BenchModel(MODEL, Path(), ROW_SHAPE, *ROW_SHAPE))


@contextmanager
def served(site: UpdateSite) -> Iterator[str]:
    """The address of a repository while it is there."""
    with HttpServer(site.find) as server:
        yield server.url
