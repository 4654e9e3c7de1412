"""The settings of `[http]`, described below each field as in config/settings.py."""

from __future__ import annotations

from edge_runtime.doors.access.settings import DoorSettings


class HttpSettings(DoorSettings, frozen=True, forbid_unknown_fields=True):
    """The Open Inference Protocol over HTTP; see [HTTP and gRPC](http.md)."""

    strict_readiness: bool = False
    """Whether one model that failed to load makes the daemon not ready, as with Triton."""

    page: bool | None = None
    """Whether `GET /` opens a page that shows this device in a browser; see [the page](page.md). When absent: where the
    door listens on loopback or a Unix socket only. From other machines it is shown over TLS alone."""

    openai: bool = False
    """Whether paths of OpenAI's protocol are answered too: `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`,
    `/v1/models`, and `/rerank`; see [HTTP and gRPC](http.md#openais-protocol)."""

    ollama: bool = False
    """Whether Ollama's paths are answered too: `/api/chat`, `/api/generate`, `/api/embed`, `/api/tags` and others; see
    [Language models](language.md#ollamas-protocol)."""

    tensorflow_serving: bool = False
    """Whether TensorFlow Serving's paths are answered too, which KServe's first protocol has:
    `/v1/models/NAME:predict`; see [HTTP and gRPC](http.md#tensorflow-servings-protocol)."""

    torchserve: bool = False
    """Whether TorchServe's paths are answered too (`--torchserve`): `/predictions/NAME`, `/ping`, `/models`; see
    [From TorchServe](from-torchserve.md)."""

    torchserve_hosts: tuple[str, ...] = ()
    """Servers, `"host"` or `"host:port"`, whose archives `POST /models?url=https://host/NAME.mar` takes into the models
    folder, where control is allowed. When empty: no archive is fetched."""
