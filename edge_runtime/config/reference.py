"""What each key of `config.toml` and `model.toml` means, as annotated TOML that can be copied and edited.

Owns: the sentence for each key. Types, limits and defaults come from the structs, so that they cannot disagree; a test
holds that every key has its sentence and that the text, uncommented, is the defaults.
"""

from __future__ import annotations

import textwrap
import typing
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
    "mqtt": "the broker to be reached through; absent: no MQTT. url or host is needed",
    "mqtt.url": "mqtt[s]://[user@]host[:port][/device]; lies over host, port, username and device_id",
    "mqtt.host": "the broker's name or address; TLS when ca_file or cert_file is given",
    "mqtt.port": "absent: 1883, with TLS 8883",
    "mqtt.device_id": "this device in topics, <prefix>/<device_id>/...; absent: the host's name",
    "mqtt.prefix": "what the topics of all devices begin with",
    "mqtt.username": "absent: none, or the one in url",
    "mqtt.password_file": "file with the password on its first line",
    "mqtt.ca_file": "certificates that the broker's must be signed by; absent: the system's",
    "mqtt.cert_file": "this device's certificate, for brokers that want one",
    "mqtt.key_file": "and its key",
    "mqtt.keepalive_s": "seconds of silence after which the broker is asked whether it is still there",
    "mqtt.session_expiry_s": "seconds that the broker keeps QoS 1 requests while this device is away",
    "mqtt.receive_maximum": "QoS 1 messages that the broker may send before one is acknowledged",
    "mqtt.max_packet_bytes": "largest request taken; the broker drops larger ones",
    "mqtt.reconnect_min_s": "about the first wait after a lost connection; it doubles with each failed try",
    "mqtt.reconnect_max_s": "about the longest",
    "mqtt.reply_prefixes": "where replies may go; empty: <prefix>/<device_id>/reply/ and reply/",
    "mqtt.groups": "groups of devices that this one belongs to",
    "mqtt.state_interval_s": "seconds between two publications of the device's state; changes of models come at once",
    "mqtt.home_assistant": 'discovery prefix of Home Assistant, most often "homeassistant"; absent: it is not told',
    "publish": "results published as they come; a table [[publish]] for each rule",
    "publish.model": "the model",
    "publish.source": "zmq: what ZeroMQ clients are answered; folder: each file that appears there is run",
    "publish.folder": "for source = folder: .npy, .json, pictures where Pillow is installed",
    "publish.topic": "absent: <prefix>/<device_id>/result/<model>",
    "publish.on": "change: when outputs differ from those published last; interval: the latest of each interval",
    "publish.interval_s": "for interval, and the least time between two for change",
    "publish.outputs": "outputs that are compared and published; empty: all",
    "publish.qos": "0: at most once, 1: at least once",
    "publish.retain": "the broker keeps the last one for those who come later",
    "publish.remove": "for source = folder: remove a file once its result was published",
    "update": "signed models from a repository; absent: none. root_file is needed; url or folder, but for sticks only",
    "update.url": "the repository's address, above metadata/ and targets/; with neither it nor folder: sticks only",
    "update.folder": "a folder that mirrors it, for devices without a network",
    "update.group": "the group of devices whose assignments this one follows",
    "update.root_file": "the root of trust, 1.root.json of the repository; everything else is untrusted",
    "update.device_id": "absent: mqtt.device_id, else the host's name; it decides who goes first (percent)",
    "update.ca_file": "certificates that an https repository's must be signed by; absent: the system's",
    "update.allow_http": "allow http beyond this machine: safe to install from, but everybody sees what is fetched",
    "update.require_signed": "serve nothing from the models folder; false: models that no release has are served",
    "update.auto": "install what is assigned; false: only when `edge-runtime update apply` asks for it",
    "update.poll_s": "seconds between two looks at the repository",
    "update.poll_jitter": "share of poll_s that each wait is longer or shorter by, so that a fleet spreads",
    "update.wake_jitter_s": "a device that is woken by MQTT waits for up to this, so that a fleet spreads",
    "update.min_check_s": "however often it is woken, at most one look in so many seconds",
    "update.cap_bytes_per_s": "most bytes a second that downloads take; absent: no cap",
    "update.reserve_bytes": "what must stay free on the disk after a download",
    "update.observe": "swap: all requests at once; shadow: copies of requests first; canary: some requests first",
    "update.window_s": "seconds that a new version is observed before it is kept; shadow and canary take as long again",
    "update.failure_share": "share of requests that may fail beyond those of the version before",
    "update.latency_ratio": "how many times as long as before a run may take",
    "update.canary_percent": "percent of requests that observe = canary gives to the new version",
    "update.shadow_share": "share of one core that copies of requests may take with observe = shadow",
    "update.shadow_agreement": "share of copies with the same highest score; absent: outputs must be nearly the same",
    "update.trial_s": "seconds that the trial of a new version in a child process may take",
    "update.trial_memory_bytes": "memory that the trial may take; absent: the memory for models",
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
    "backends": "what models are loaded with, in the order tried, in place of the profile's; a table [[backends]] each",
    "backends.name": "onnxruntime, openvino, tensorrt",
    "backends.device": "empty: the backend's own",
    "backends.precision": "empty: the backend's own; int8 wants model.int8.onnx or .xml in each version",
    "backends.threads": "cores that one run takes; absent: the measured layout",
    "backends.spin": "threads wait by spinning: a little faster, and a core is always busy",
    "backends.extra": "options in the backend's own words",
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
    "precision": "absent: the backend's own; a lower one is quicker and less exact. int8 wants model.int8.onnx or .xml",
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


def _table(kind: type[msgspec.Struct], keys: Mapping[str, str], path: str, *, is_on: bool = True) -> Iterator[str]:
    """Plain keys first, then tables: TOML reads a key after a table's head as the table's.

    is_on: False comments out every key, for a table that is absent unless somebody writes it.
    """
    fields = msgspec.structs.fields(kind)
    for field in fields:
        if _inner_table(field) is None:
            yield from _comment(keys[path + field.name], wanted(field.type))
            yield _line(field, is_on=is_on)
    for field in fields:
        inner = _inner_table(field)
        if inner is not None:
            name = path + field.name
            is_list = inner is not bare_type(field.type)
            is_inner_on = is_on and not is_list and field.default is not None
            head = f"[[{name}]]" if is_list else f"[{name}]"
            yield ""
            yield from _comment(keys[name], "")
            yield head if is_inner_on else f"# {head}"
            yield from _table(inner, keys, f"{name}.", is_on=is_inner_on)


def _inner_table(field: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | None:
    """The struct of a field that is a table, or a list of tables."""
    for kind in (bare_type(field.type), *typing.get_args(bare_type(field.type))):
        if is_struct(kind):
            return kind  # type: ignore[no-any-return]
    return None


def _line(field: msgspec.structs.FieldInfo, *, is_on: bool) -> str:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if default is msgspec.NODEFAULT or default is None:
        return f"# {field.name} ="
    return f"{'' if is_on else '# '}{field.name} = {_value(default)}"


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
