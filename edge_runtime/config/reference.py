"""What each key of `config.toml` and `model.toml` means, as annotated TOML that can be copied and edited.

Owns: the sentence for each key. Types, limits and defaults come from the structs, so that they cannot disagree; a test
holds that every key has its sentence and that the text, uncommented, is the defaults.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from edge_runtime.config.settings import Config, ModelSettings
from edge_runtime.typed_toml import bare_type, is_struct, wanted

CONFIG_KEYS = {
    "models": "the models folder",
    "state": "folder for what was measured; absent: $STATE_DIRECTORY, /var/lib/edge-runtime or $XDG_STATE_HOME",
    "profile": "the device profile; absent: the one that fits this host (`edge-runtime profile show`)",
    "python_models": "allow model.py, which is code of whoever can write the models folder",
    "watch": "take versions that appear, change or leave in the models folder",
    "calibrate": "measure run time by rows and threads when idle, about 1 s for each model, kept in the state folder",
    "start_limit_s": "seconds after which clients are let in even when models still load",
    "drain_s": "seconds that SIGTERM waits for requests already admitted",
    "zmq": "ZeroMQ endpoints",
    "zmq.endpoints": "where clients connect; absent: ipc, infer.sock in $RUNTIME_DIRECTORY or /run/edge-runtime",
    "zmq.control": "where load and unload are asked for; absent: the first ipc endpoint and `.control`",
    "zmq.max_frame_bytes": "largest frame read; a connection that sends a larger one is closed",
    "zmq.send_bound_bytes": "replies kept for one connection that does not read, before they are dropped and counted",
    "zmq.insecure": "allow tcp beyond this machine without CURVE: whoever can connect may use and stop every model",
    "zmq.curve": "encryption and the list of clients let in; needed for tcp beyond this machine",
    "zmq.curve.secret_key_file": "file of the daemon's secret key",
    "zmq.curve.client_keys_file": "file of the public keys of clients let in, one a line",
    "metrics": "numbers for Prometheus, at /metrics",
    "metrics.host": "address to serve on; there is no password, so keep it to this machine",
    "metrics.port": "port to serve on, 0 for any free one; absent: not served",
    "log": "what the daemon writes to standard error",
    "log.level": "least level written",
    "log.format": "absent: text on a terminal, JSON otherwise",
    "limits": "each lies over the profile's limit of the same name",
    "limits.memory_bytes": "memory for models; idle ones leave, least recently used first, to stay under it",
    "limits.cores": "cores for all runs together; never more than the process may use",
    "limits.queue_rows": "rows that may wait, of each model",
    "limits.queue_bytes": "bytes that may wait, of each model",
    "limits.max_run_ms": "longest run while another model waits",
}

MODEL_KEYS = {
    "max_batch_rows": "most rows in one request and one run; absent: the profile's, and the measured curve below it",
    "batch": "whether axis 0 is rows; absent: when it is dynamic everywhere and a probe at load agrees",
    "mode": "inline: on the thread that receives; absent: inline when a batch runs in under about 0.2 ms",
    "max_queue_delay_ms": "how long an idle model may wait for a fuller batch; 0: never",
    "preferred_batch_rows": "sizes that batches are cut at; empty: any",
    "default_timeout_ms": "deadline of requests that say none; absent: none",
    "max_queue_rows": "rows that may wait; absent: the profile's",
    "max_queue_bytes": "bytes that may wait; absent: the profile's",
    "priority": "of requests that say none; 1 is first",
    "instances": "most runs at once; absent: as many as the cores allow",
    "threads": "cores that one run takes; absent: the measured layout",
    "backend": "absent: the profile's order",
    "device": "absent: the profile's, for example CPU, CUDA, GPU, NPU, AUTO",
    "precision": "absent: the backend's own; a lower one is quicker and less exact",
    "options": "options in the backend's own words, passed through",
    "versions": "which versions are loaded: one of the three; absent: the newest",
    "versions.latest": "the newest so many",
    "versions.all": "every one that is there",
    "versions.specific": "these",
    "warmup": "runs before the model is ready",
    "warmup.runs": "runs at each number of rows",
    "warmup.rows": "numbers of rows",
    "warmup.shapes": "shapes of inputs whose inner dimensions are dynamic, by input name, axis 0 left out",
    "pinned": "never leaves to free memory",
    "on_demand": "loaded by its first request, which is refused with not_ready until it is",
}

WIDTH = 120


def config_reference() -> str:
    """Every key of config.toml with its default, or commented out where absent means something else."""
    return "\n".join(_table(Config, CONFIG_KEYS, "")).strip() + "\n"


def model_reference() -> str:
    """The same of model.toml."""
    return "\n".join(_table(ModelSettings, MODEL_KEYS, "")).strip() + "\n"


# ---- private --------------------------------------------------------------------------------------------------------


def _table(kind: type[msgspec.Struct], keys: Mapping[str, str], path: str) -> Iterator[str]:
    """Plain keys first, then tables: TOML reads a key after a table's head as the table's."""
    fields = msgspec.structs.fields(kind)
    for field in fields:
        if not is_struct(bare_type(field.type)):
            yield from _comment(keys[path + field.name], wanted(field.type))
            yield _line(field)
    for field in fields:
        inner = bare_type(field.type)
        if is_struct(inner):
            name = path + field.name
            is_absent = field.default is None
            yield ""
            yield from _comment(keys[name], "")
            yield f"# [{name}]" if is_absent else f"[{name}]"
            yield from _table(inner, keys, f"{name}.")


def _line(field: msgspec.structs.FieldInfo) -> str:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if default is msgspec.NODEFAULT or default is None:
        return f"# {field.name} ="
    return f"{field.name} = {_value(default)}"


def _comment(sentence: str, kind: str) -> list[str]:
    text = sentence + (f" ({kind})" if kind else "")
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _value(value: Any) -> str:
    """A default as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return "{}"
    return f"{value:_}" if isinstance(value, int) else str(value)
