"""The runtime inside Ray Serve: the same folder of models, queue, batches and refusals, in each of many replicas.

    from ray import serve
    from edge_runtime import ray_serve

    handle = serve.run(ray_serve.deployment("models/", num_replicas=2).bind())
    answer = ray_serve.infer(handle, "digits", {"image": image}, timeout_ms=200)

deployment    makes a Serve deployment around `Runtime`
infer         asks a replica by its handle, and asks another one where that ends; infer_async: the same in an event loop
Instant       when a request began, for a caller that passes it on
autoscaling   scales by the forecast delay as well as by requests

Imported by nothing of the daemon. The handbook is docs/scale.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_runtime.ray_serve.autoscaler import autoscaling
    from edge_runtime.ray_serve.caller import infer, infer_async
    from edge_runtime.ray_serve.deployments import deployment
    from edge_runtime.ray_serve.instant import Instant

__all__ = ["Instant", "autoscaling", "deployment", "infer", "infer_async"]

_PLACES = {
    "Instant": "instant",
    "autoscaling": "autoscaler",
    "deployment": "deployments",
    "infer": "caller",
    "infer_async": "caller",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: a caller pays for nothing of a replica."""
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
