"""Declarations that this distribution ships: of each backend, door, importer, file kind, verb and the like, as text.

`python -m tests.architecture.shipped_table` writes the table from the declarations in the source; new ones come last,
and the order of rows stays: backends in the order of preference, importers in the order in which they are asked. Read
by plugins.py alone. Imports nothing, so that a start costs no scan. What a verb or the start needs of each door before
it imports one is here whole: options, addresses, entries of `stats`.
"""

from __future__ import annotations

from collections.abc import Mapping

# shipped: begin
SHIPPED: Mapping[str, Mapping[str, str]] = {
    "backends": {
        "onnxruntime": "edge_runtime.backends.onnxruntime:BACKEND",
        "openvino": "edge_runtime.backends.openvino:BACKEND",
        "litert": "edge_runtime.backends.litert:BACKEND",
        "tensorrt": "edge_runtime.backends.tensorrt:BACKEND",
        "pytorch": "edge_runtime.backends.pytorch:BACKEND",
        "catboost": "edge_runtime.backends.catboost:BACKEND",
        "python": "edge_runtime.backends.python:BACKEND",
        "openvino-genai": "edge_runtime.backends.openvino_genai:BACKEND",
    },
    "answers": {
        "classes": "edge_runtime.words.values:CLASSES",
        "number": "edge_runtime.words.values:NUMBER",
        "text": "edge_runtime.words.values:TEXT",
        "embedding": "edge_runtime.words.values:EMBEDDING",
        "tags": "edge_runtime.words.values:TAGS",
        "picture": "edge_runtime.pictures.values:PICTURE",
        "boxes": "edge_runtime.pictures.values:BOXES",
        "mask": "edge_runtime.pictures.values:MASK",
        "masks": "edge_runtime.pictures.values:MASKS",
        "keypoints": "edge_runtime.pictures.values:KEYPOINTS",
        "labels": "edge_runtime.text:LABELS",
        "windows": "edge_runtime.series.values:WINDOWS",
        "tokens": "edge_runtime.text:TOKENS",
    },
    "doors": {
        "http": "edge_runtime.doors.http:DOOR",
        "grpc": "edge_runtime.doors.grpc:DOOR",
        "mqtt": "edge_runtime.doors.mqtt:DOOR",
        "frigate": "edge_runtime.frigate:DOOR",
        "camera": "edge_runtime.site:CAMERAS",
        "publish": "edge_runtime.site:DOOR",
        "enrolment": "edge_runtime.enrolment:DOOR",
        "thermal": "edge_runtime.heat:DOOR",
    },
    "importers": {
        "torchserve": "edge_runtime_converters.importing.importers:TORCHSERVE",
        "mlflow_models": "edge_runtime_converters.importing.importers:MLFLOW_MODELS",
        "bentos": "edge_runtime_converters.importing.importers:BENTOS",
        "model_server": "edge_runtime_converters.importing.importers:MODEL_SERVER",
        "optimum_exports": "edge_runtime_converters.importing.importers:OPTIMUM_EXPORTS",
        "triton": "edge_runtime_converters.importing.importers:TRITON",
    },
    "kinds": {
        "config.pbtxt": "edge_runtime.triton:CONFIG",
        "pipeline.toml": "edge_runtime.pipelines:PIPELINE",
        "torchserve.json": "edge_runtime.torchserve:HANDLER",
        "config.json": "edge_runtime.text:CONFIG",
    },
    "metrics": {
        "triton_names": "edge_runtime.triton:METRICS",
    },
    "operations": {
        "model_config": "edge_runtime.triton.words:MODEL_CONFIG",
        "model_statistics": "edge_runtime.triton.words:MODEL_STATISTICS",
        "camera_add": "edge_runtime.site:ADD",
        "camera_remove": "edge_runtime.site:REMOVE",
        "cameras": "edge_runtime.site:LIST",
        "events": "edge_runtime.pages:EVENTS",
        "history": "edge_runtime.pages:HISTORY",
        "overview": "edge_runtime.pages:OVERVIEW",
        "doctor": "edge_runtime.pages:DOCTOR",
        "results": "edge_runtime.site:RESULTS",
        "tuning": "edge_runtime.pages:TUNING",
        "example": "edge_runtime.pages:EXAMPLE",
    },
    "parts": {
        "update": "edge_runtime.updates:PART",
        "builds": "edge_runtime.builds:PART",
        "tracing": "edge_runtime.otel:PART",
    },
    "protocols": {
        "openai": "edge_runtime.openai:PROTOCOL",
        "tensorflow_serving": "edge_runtime.tensorflow_serving:PROTOCOL",
        "torchserve": "edge_runtime.torchserve.inference:PROTOCOL",
        "page": "edge_runtime.pages:PROTOCOL",
        "ollama": "edge_runtime.ollama:PROTOCOL",
    },
    "states": {
        "sequences": "edge_runtime.sequences:STATES",
    },
    "stages": {
        "track": "edge_runtime.tracks:TRACK",
    },
    "steps": {
        "pictures": "edge_runtime.pictures:STEPS",
        "series": "edge_runtime.series:STEPS",
        "text": "edge_runtime.text:STEPS",
    },
    "tables": {
        "language": "edge_runtime.language.settings:TABLE",
    },
    "verbs": {
        "serve": "edge_runtime.cli.verbs:SERVE",
        "infer": "edge_runtime.cli.verbs:INFER",
        "models": "edge_runtime.cli.verbs:MODELS",
        "status": "edge_runtime.cli.verbs:STATUS",
        "bench": "edge_runtime.cli.verbs:BENCHMARK",
        "tune": "edge_runtime.tuning:VERB",
        "profile": "edge_runtime.cli.verbs:PROFILE",
        "repo": "edge_runtime.publish:VERB",
        "update": "edge_runtime.updates:VERB",
        "token": "edge_runtime.doors.access:VERB",
        "convert": "edge_runtime_converters:CONVERT",
        "import": "edge_runtime_converters:IMPORT",
        "plugins": "edge_runtime.cli.verbs:PLUGINS",
        "completion": "edge_runtime.cli.verbs:COMPLETION",
        "cameras": "edge_runtime.site:VERB",
        "doctor": "edge_runtime.pages:VERB",
        "fleet": "edge_runtime.fleet:VERB",
        "chat": "edge_runtime.language:VERB",
        "authority": "edge_runtime.enrolment:AUTHORITY",
        "enroll": "edge_runtime.enrolment:VERB",
    },
}
"""Kind -> name -> "module:attribute"."""

OPTIONS: Mapping[str, Mapping[str, tuple[str, str, tuple[str, ...], str | None]]] = {
    "serve": {
        "--http": (
            "A",
            "also serve the Open Inference Protocol over HTTP, at host:port or unix:/path",
            ("http.endpoint",),
            None,
        ),
        "--grpc": (
            "A",
            "the same over gRPC",
            ("grpc.endpoint",),
            None,
        ),
        "--http-control": (
            "A",
            "HTTP address on which models are loaded and unloaded, too",
            ("http.control",),
            None,
        ),
        "--grpc-control": (
            "A",
            "the same over gRPC",
            ("grpc.control",),
            None,
        ),
        "--allow-control": (
            "",
            "allow that on the endpoints of HTTP and gRPC themselves, on this machine or with tokens",
            ("http.control", "grpc.control"),
            None,
        ),
        "--client-shared-memory": (
            "",
            "let clients of HTTP and gRPC name POSIX shared memory of their own, as Triton's do",
            ("shared_memory.client_named",),
            None,
        ),
        "--torchserve": (
            "",
            "let HTTP answer TorchServe's paths too: /predictions, /ping, /models",
            ("http.torchserve",),
            None,
        ),
        "--mqtt": (
            "URL",
            (
                "also serve through a broker, mqtt[s]://[user@]host[:port][/DEVICE]; the device's id is else the "
                "host's name"
            ),
            ("mqtt.url",),
            None,
        ),
    },
    "connect": {
        "--password-file": (
            "FILE",
            "file with the password for the broker",
            ("mqtt",),
            None,
        ),
        "--ca-file": (
            "FILE",
            "PEM file of the authority that signed the server's certificate (mqtts://, https://, grpcs://)",
            ("http", "grpc", "mqtt"),
            None,
        ),
        "--cert-file": (
            "FILE",
            "PEM file of this client's certificate (for the same)",
            ("http", "grpc", "mqtt"),
            None,
        ),
        "--key-file": (
            "FILE",
            "PEM file of that certificate's key",
            ("http", "grpc", "mqtt"),
            None,
        ),
        "--token-file": (
            "FILE",
            "file with the token for http[s]:// and grpc[s]:// (default: $EDGE_RUNTIME_TOKEN)",
            ("http", "grpc"),
            None,
        ),
        "--prefix": (
            "T",
            "what MQTT topics begin with (default edge)",
            ("mqtt",),
            "edge",
        ),
    },
}
""""serve", or "connect" for verbs that ask a daemon -> the fields of an `Option` of a door, by name."""

ADDRESSES: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "mqtt": ("mqtt[s]://[user@]broker[:port]/DEVICE", ("mqtt", "mqtts"), "MqttClient"),
    "http": ("http[s]://host[:port]", ("http", "https", "http+unix"), "OipClient"),
    "grpc": ("grpc[s]://host[:port]", ("grpc", "grpcs", "grpc+unix"), "OipClient"),
}
"""Door -> the other fields of its `ClientAddress`."""

ENTRIES = ("mqtt",)
"""Of the result of `stats`, null where no door fills them."""
# shipped: end

CODE_BACKENDS = ("python",)
"""Backends of code, which every profile has: `python_models` in the configuration decides whether they load any."""
