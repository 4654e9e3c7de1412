"""Makes a Serve deployment of a folder of models.

Owns: the options by which Serve leaves queue, batches and refusals to the runtime in each replica. Thread: any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import BackpressureConfig

from edge_runtime.config.settings import Config
from edge_runtime.ray_serve.replica import Replica

ONGOING_REQUESTS = 10_000
"""Requests that a replica has at once: more than its queue ever admits, so that Serve keeps none back."""

QUEUED_REQUESTS = 1_000
"""Requests that wait in one proxy or handle while no replica can take them, such as while the first starts."""

RETRY_AFTER_S = 1.0
"""Told to callers that Serve itself refuses."""

SHUTDOWN_SLACK_S = 20.0
"""A replica has so long beyond `drain_s` to end its hosts and files."""


def deployment(
    models: str | Path = "models",
    *,
    config: Config | None = None,
    models_per_replica: int | None = None,
    **options: Any,
) -> Any:
    """Make a Serve deployment whose replicas each serve a folder of models by a `Runtime`.

    models: on every node that may have a replica. config: as of `Runtime`; None: the folder is followed. A replica uses
    the cores that Ray gives it (`ray_actor_options={"num_cpus": 2}`), unless `config` says how many.
    models_per_replica: a replica loads a model at its first request, and unloads the one that was unused for longest
    beyond that number; Serve prefers replicas that have it (`serve.multiplexed`). None: it loads all.
    options: of `serve.deployment`, such as `num_replicas`; they go before ours.
    """
    wanted = config or Config()
    settings = msgspec.to_builtins(
        wanted
    )  # its class is made for the doors that it names, and would not be found there

    class Models(Replica):
        """The folder's replicas."""

        def __init__(self) -> None:
            super().__init__(str(models), settings, loads_asked_for=models_per_replica is not None)

    if models_per_replica is not None:
        decorate = serve.multiplexed(max_num_models_per_replica=models_per_replica)
        Models.loaded = decorate(Replica.loaded)  # type: ignore[method-assign]
    Models.__name__ = Models.__qualname__ = "Models"
    ours: dict[str, Any] = {
        "name": "models",
        "max_ongoing_requests": ONGOING_REQUESTS,
        "max_queued_requests": QUEUED_REQUESTS,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        "graceful_shutdown_timeout_s": wanted.drain_s + SHUTDOWN_SLACK_S,
        # What waits is answered in milliseconds: two seconds between looks would only prolong each redeploy.
        "graceful_shutdown_wait_loop_s": 0.2,
    }
    return serve.deployment(**{**ours, **options})(Models)
