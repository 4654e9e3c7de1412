"""Every setting of the daemon and of one model: type, limits, default and meaning.

A string below a field is that key's description: `docs/configuration.md` is generated from these classes by
`python -m edge_runtime.config.reference`, and no other place describes a key. Units end the names: `_ms`, `_s`,
`_bytes`. `None` means that the key is absent; its description then says what applies. loading.py reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from edge_runtime import plugins
from edge_runtime.answers import answer_kinds
from edge_runtime.kept_state import SequenceSettings
from edge_runtime.steps import InputSteps, InputTables, OutputSteps, Preset, table_kind
from edge_runtime.typed_toml import inner_table, joined

FIRST_PRIORITY, LOWEST_PRIORITY = 1, 9
"""Of 1 (first) to 9 (wire v1)."""

Priority = Annotated[int, Meta(ge=FIRST_PRIORITY, le=LOWEST_PRIORITY)]
Place = Annotated[str, Meta(min_length=1)]
"""A path; an empty one would mean the folder in which the daemon happens to start."""

LARGEST = 10**15
"""Above any count or size of a device, in bytes, rows or runs: a larger number is a slip, and TOML's have no end."""

LONGEST = 1e9
"""Seconds (31 years) or milliseconds (11 days): it keeps out TOML's `inf` and `nan`, which no wait can use."""

Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
VersionNumber = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
PositiveFloat = Annotated[float, Meta(gt=0, le=LONGEST)]
NotNegative = Annotated[float, Meta(ge=0, le=LONGEST)]

DEFAULT_MODELS = "models"
"""In the folder in which the daemon starts."""

ALL_MODELS = "*"
"""In `load_models`."""

DEFAULT_PRIORITY = 5
"""The middle of 1 (first) to 9 (wire v1)."""

LanguageTable = Annotated[Any, Meta(extra={"table": "language"})]
"""The struct of a capability's table in `model.toml`, by its name among the "tables"; None: there is no such table."""


class TableDeclaration(Struct, frozen=True):
    """A table of `model.toml` that a capability reads. table: "module:attribute" of its struct."""

    name: str
    table: str


class Versions(Struct, frozen=True, forbid_unknown_fields=True):
    """The versions of the model to load: one of the first three keys. Without any, the newest version is loaded."""

    latest: Positive | None = None
    """Load this many of the newest versions."""

    all: bool = False
    """Load every version in the folder."""

    specific: tuple[VersionNumber, ...] = ()
    """Load these version numbers."""

    hold_interface: bool = False
    """Whether a version whose tensors clients of the one before cannot use (other names, datatypes or shapes, a new
    input) is refused, and the old one serves on, also after a restart. `false`: it serves, and its state says so."""

    def __post_init__(self) -> None:
        named = [name for name in ("latest", "all", "specific") if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"got {' and '.join(named)}; one of latest, all, specific says which versions are loaded")


class Warmup(Struct, frozen=True, forbid_unknown_fields=True):
    """Runs before the model is ready. One run allocates everything; a GPU gains from more."""

    runs: Annotated[int, Meta(ge=0, le=LARGEST)] = 1
    """Runs at each of `rows`. 0: the model is ready without a run, and `batch` alone says whether axis 0 is rows."""

    inputs: str | None = None
    """A file of inputs in place of made-up ones, beside `model.toml` or in the version's folder: `sample.npz`
    (a BYTES input may be the bytes of one picture, as uint8), or `sample.json` (lists by input name)."""

    rows: tuple[Positive, ...] = (1,)
    """Batch rows to run with."""

    shapes: dict[str, tuple[Positive, ...]] = field(default_factory=dict)
    """Shapes of inputs with dynamic inner dimensions, by input name, without axis 0: `{"text" = [128]}`."""


class QueuePolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """What may wait at one level, and for how long."""

    timeout_ms: NotNegative = 0.0
    """How long a request may wait until its run begins; 0: without end. A deadline counts beside it."""

    on_timeout: Literal["reject", "delay"] = "reject"
    """What becomes of a request that waited longer: it is refused with `deadline_exceeded`, over HTTP 503 as by Triton;
    or it waits on, behind all others of its level."""

    allow_override: bool = False
    """Whether a request's own `timeout` (microseconds) counts in place of `timeout_ms`, where it is shorter."""

    max_requests: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    """Requests that may wait; further ones get `queue_full`. 0: as many as `max_queue_rows` allows."""


class QueuePolicies(Struct, frozen=True, forbid_unknown_fields=True):
    """A queue as Triton's dynamic batcher has it, for a model that was set up for Triton.

    Requests run in the order in which they came, level by level. Without this table senders take turns, deadlines
    decide the order, and no priority starves.
    """

    levels: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    """Levels of priority: requests of level 1 run before all others. A request's `priority` is its level. 0: one."""

    default_level: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    """The level of requests whose priority is 0 or above `levels`. Needed with `levels`."""

    keep_order: bool = False
    """Whether answers go out in the order in which their requests came, also where several runs are on at once."""

    default: QueuePolicy = QueuePolicy()
    level: dict[str, QueuePolicy] = field(default_factory=dict)
    """Tables `[queue.level.NUMBER]`: levels with a policy of their own, in place of `[queue.default]`."""

    def __post_init__(self) -> None:
        if self.levels and not 1 <= self.default_level <= self.levels:
            raise ValueError(f"default priority level must be in range [1, {self.levels}], got {self.default_level}")
        for name in self.level:
            is_number = name.isascii() and name.isdigit() and len(name) <= len(str(LARGEST)) and name[0] != "0"
            if not (is_number and int(name) <= self.levels):
                raise ValueError(
                    f"priority queue policy must have priority level in range [1, {self.levels}], got {name!r}"
                )
        if self.keep_order and self.levels > 1:
            raise ValueError("Only one priority level is allowed with keep_order (preserve_ordering): set levels to 1")
        if self.keep_order and any(
            each.on_timeout == "delay" and each.timeout_ms for each in (self.default, *self.level.values())
        ):
            raise ValueError('a policy cannot have on_timeout = "delay" with keep_order (preserve_ordering)')

    def policy_of(self, level: int) -> QueuePolicy:
        """The policy of a level; that of the one level where there are none is `default`."""
        return self.level.get(str(level), self.default)


Isolation = Literal["always", "auto", "never"]
"""Where models run: each in a host, in a host unless the written rule admits it inside the daemon, or inside."""


class ModelLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one model in its host. Each overrides the key of the same name in the daemon's `[limits]`."""

    host_memory_bytes: Positive | None = None
    """Memory that the model's host may take for it; an allocation beyond fails."""

    run_limit_ms: PositiveFloat | None = None
    """Longest run, after which it is ended."""


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One model's settings: `model.toml` beside its version folders.

    Every key may be absent; the model itself, a measurement or the device profile then decides.
    """

    max_batch_rows: Positive | None = None
    """Most rows in one request and in one run. When absent: the measured curve, up to the profile's limit."""

    batch: bool | None = None
    """Whether axis 0 is rows. When absent: if axis 0 is dynamic in every input and output and a run at load agrees."""

    mode: Literal["inline", "workers"] | None = None
    """How a model inside the daemon runs: `"inline"` on the I/O thread, `"workers"` on threads beside it. One in a host
    is never inline. When absent: inline when a batch runs in under about 0.2 ms."""

    max_queue_delay_ms: NotNegative = 0.0
    """How long an idle model may wait for a fuller batch while deadlines allow; 0 never waits."""

    preferred_batch_rows: tuple[Positive, ...] = ()
    """Row counts at which batches are cut; empty means any."""

    default_timeout_ms: PositiveFloat | None = None
    """Timeout of requests that carry none. When absent: they have no deadline."""

    max_queue_rows: Positive | None = None
    """Rows that may wait; further requests get `queue_full`. When absent: the profile's limit."""

    max_queue_bytes: Positive | None = None
    """Bytes that may wait; further requests get `queue_full`. When absent: the profile's limit."""

    priority: Priority = DEFAULT_PRIORITY
    """Priority of requests that carry none; 1 is first."""

    may_slow: bool = False
    """Whether all its requests may be slowed first while the device is too hot, whatever their priority; see
    [Heat](heat.md). Nothing without `[thermal]`."""

    instances: Positive | None = None
    """Most runs at once. When absent: as many as the cores allow."""

    threads: Positive | None = None
    """Cores that one run takes. When absent: the measured layout."""

    backend: str | None = None
    """`"onnxruntime"`, `"openvino"`, `"litert"`, `"tensorrt"`, `"pytorch"`, `"catboost"` or `"python"`. When absent:
    the profile's order."""

    device: str | None = None
    """The backend's device, such as `"CPU"`, `"GPU"`, `"NPU"`, `"AUTO"`, `"CUDA"`, `"TENSORRT"`, `"OPENVINO"` or
    `"DLA:0"`; [device_profiles/README.md](../device_profiles/README.md#devices) lists them. When absent: the
    profile's."""

    precision: Literal["f32", "bf16", "f16", "int8"] | None = None
    """Precision to run with; a lower one is faster and less exact, and `"int8"` needs an int8 file in each version.
    When absent: the backend's own."""

    options: dict[str, str] = field(default_factory=dict)
    """Options in the backend's own words, passed through; `"tensorrt.tf32" = "1"` reaches that backend alone."""

    versions: Versions = Versions()
    warmup: Warmup = Warmup()
    queue: QueuePolicies | None = None
    limits: ModelLimits = ModelLimits()
    isolation: Isolation | None = None
    """Whether the model runs in a host, a process of its own: `"always"`; `"auto"`, unless it is known that nothing a
    client sends can crash or stall it; `"never"`, which is refused for all but ONNX, IR and engines. When absent: the
    daemon's."""

    convert: Literal["auto", "never"] = "auto"
    """Whether a file that no backend here reads is converted when it is loaded: `"auto"`, where what converts it is
    [installed](convert.md#convert-at-load); `"never"`."""

    rerun: bool = True
    """Whether the requests of a batch whose host died are run again. `false` suits a model with side effects: they get
    `run_failed`."""

    pinned: bool = False
    """Never unload the model to free memory."""

    preset: Preset | None = None
    """Steps as a family of models means them, for what `[input.NAME]` and `[output.NAME]` leave out. When absent: as
    the model's own metadata says."""

    input: InputTables = field(default_factory=dict)
    """Tables `[input.NAME]`: pictures or texts in place of the model's own inputs."""

    output: dict[str, OutputSteps] = field(default_factory=dict)
    """Tables `[output.NAME]`: answers in place of this output."""

    sequence: SequenceSettings | None = None

    language: LanguageTable = None

    on_demand: bool = False
    """Load the model on its first request, which waits until the model is loaded, within its deadline."""

    def __post_init__(self) -> None:
        tables = {name: _input_table(name, each) for name, each in self.input.items()}
        force_setattr(self, "input", tables)
        if self.language is not None:
            kind: type[Struct] = plugins.named(plugins.declared("tables", "language").table)
            if not isinstance(self.language, kind):
                force_setattr(self, "language", inner_table(kind, self.language, "language"))
        largest = max(self.preferred_batch_rows, default=0)
        if self.max_batch_rows is not None and largest > self.max_batch_rows:
            raise ValueError(f"preferred_batch_rows has {largest}, above max_batch_rows = {self.max_batch_rows}")
        if self.pinned and self.on_demand:
            raise ValueError("got pinned and on_demand; a model that always stays cannot wait for its first request")
        if self.queue is not None and self.mode == "inline":
            raise ValueError('got [queue] and mode = "inline", which has no queue; leave one of them out')
        for name, output in self.output.items():
            if output.answer is not None and output.answer not in answer_kinds():
                raise ValueError(
                    f"output.{name}.answer: got {output.answer!r}, wanted one of {', '.join(answer_kinds())}"
                )
        if self.sequence is not None and (self.queue is not None or self.mode == "inline"):
            other = 'mode = "inline"' if self.queue is None else "[queue]"
            raise ValueError(f"got [sequence] and {other}; requests of a sequence run one by one, in a host")


def _input_table(name: str, keys: InputSteps | Mapping[str, Any]) -> InputSteps:
    """The table `[input.NAME]` of the capability that reads it. Raises ValueError."""
    if isinstance(keys, InputSteps):
        return keys
    if not isinstance(keys, Mapping):
        raise ValueError(f"{joined('input', name)}: got {keys!r}, wanted a table")
    try:
        kind = table_kind(keys)
    except ValueError as error:
        raise ValueError(f"{joined('input', name)}.{error}") from None
    return inner_table(kind, keys, joined("input", name))


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """CURVE encryption and the list of admitted clients. An endpoint that leaves the machine needs it."""

    secret_key_file: str
    """File of the daemon's secret key."""

    client_keys_file: str
    """File of the admitted clients' public keys, one a line."""


class ZmqSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """ZeroMQ endpoints: `ipc:///path` or `tcp://host:port`."""

    endpoints: tuple[str, ...] = ()
    """Infer endpoints (`--zmq`). When empty: ipc, `infer.sock` in `$RUNTIME_DIRECTORY`, `/run/edge-runtime`,
    `$XDG_RUNTIME_DIR/edge-runtime` or `/tmp/edge-runtime-<uid>`."""

    control: str | None = None
    """Control endpoint (`--control`). When absent: the first ipc endpoint's path and `.control`; without one, ipc,
    `control.sock` in the folder where `infer.sock` would be."""

    max_frame_bytes: Positive = 64 << 20
    """Largest frame; a connection that sends a larger one is closed. 64 MiB holds a batch of 100 pictures of
    600 KB."""

    send_bound_bytes: Positive = 64 << 20
    """Memory for replies to one connection that does not read; further replies are dropped and counted."""

    max_connections: Positive = 1024
    """Connections to one endpoint at once, as over HTTP; one that has brought no message is closed for a new one."""

    curve: Curve | None = None
    insecure: bool = False
    """Allow TCP beyond this machine without CURVE: everyone who can connect may use and unload every model."""

    def __post_init__(self) -> None:
        named = [*self.endpoints, *([self.control] if self.control is not None else [])]
        # The system chooses a different port each time, so the same wildcard may stand twice.
        twice = {each for each in named if named.count(each) > 1 and not each.endswith((":*", ":0"))}
        if twice:
            raise ValueError(f"{min(twice)!r} is named twice; each of endpoints and control is an address of its own")


class SharedMemorySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that the daemon shares with clients on this machine, through `<path>.memory` beside each ipc endpoint."""

    per_connection_bytes: Positive = 128 << 20
    """Most memory of one client: twice the largest frame, or a ring of 200 pictures of 600 KB."""

    per_user_bytes: Positive = 256 << 20
    """Most memory of all clients of one user of this machine."""

    total_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 512 << 20
    """Most memory of all clients together. Only what clients write takes memory. 0: there are no memory sockets."""

    client_named: bool = False
    """Whether HTTP and gRPC clients may name POSIX shared memory of their own (`--client-shared-memory`), as Triton's
    do. They could name that of every process of the daemon's user."""


class UpdateSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Signed models from a repository: its `url`, or a `folder` that mirrors it. Without this table: no updates.

    With neither key, releases come from sticks only, by `edge-runtime update import DIR`.
    """

    root_file: Place
    """The root of trust, `1.root.json` of the repository. The device trusts nothing else."""

    url: str | None = None
    """The repository's address, above `metadata/` and `targets/`; or `oci://HOST/NAME`, its place in a registry
    (`oci+http://` without TLS)."""

    folder: str | None = None
    """A folder that mirrors the repository, for devices without a network."""

    group: str = "default"
    """The group of devices whose assignments this device follows."""

    device_id: str | None = None
    """This device's id; it decides which devices are first (`percent`). When absent: `mqtt.device_id`, else the host's
    name."""

    ca_file: str | None = None
    """PEM certificates of the authorities that may sign an https repository's. When absent: the system's."""

    auth_file: str | None = None
    """Login for a registry: the file that `docker login` or `podman login --authfile` writes. When absent: none."""

    allow_http: bool = False
    """Allow http beyond this machine. Installing stays safe, but everyone on the way sees what is fetched."""

    redirect_hosts: tuple[str, ...] = ()
    """Other servers, `"host"` or `"host:port"`, that the repository may lead a device to. When empty: none."""

    require_signed: bool = True
    """Serve nothing from the models folder. `false` serves its models that no release has."""

    auto: bool = True
    """Install assigned releases. `false` installs only by `edge-runtime update apply`."""

    poll_s: PositiveFloat = 3600.0
    """Time between two checks of the repository."""

    poll_jitter: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Share of `poll_s` by which each wait is longer or shorter, so that a fleet spreads."""

    wake_jitter_s: NotNegative = 10.0
    """A device woken by MQTT waits up to this, so that a fleet spreads."""

    min_check_s: NotNegative = 30.0
    """At most one check in this time, however often the device is woken."""

    windows: tuple[str, ...] = ()
    """When releases are installed, in local time: `"01:00-05:00"`, `"sat,sun 00:00-24:00"`. Outside of them the device
    looks and installs nothing, unless `edge-runtime update apply` asks. When empty: always."""

    only_on: tuple[Literal["ethernet", "wifi", "mobile", "other"], ...] = ()
    """Kinds of links over which releases are fetched, by the interface of the default route. Over another one the
    device looks, some KB each time, and installs nothing, unless `edge-runtime update apply` asks. When empty: all."""

    proxy: str | None = None
    """An HTTP proxy by which the repository is reached: `"http://proxy.site:3128"`. When absent: the device's own,
    `proxy` above all tables."""

    configuration: bool = True
    """Follow the signed configuration of the group, and the repository's word on which group this device is in
    (docs/provisioning.md). `false`: this file alone counts."""

    camera_prefixes: tuple[Place, ...] = ()
    """Where a signed configuration may have cameras and microphones: beginnings of paths and of addresses, as
    `"/dev/video"` and `"rtsp://10.0.4.*/"`, where `*` is a number. When empty: nowhere."""

    cap_bytes_per_s: Annotated[int, Meta(ge=1024, le=LARGEST)] | None = None
    """Most bytes a second that downloads take. When absent: no cap."""

    reserve_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 256 << 20
    """Disk space that must stay free after a download."""

    observe: Literal["swap", "shadow", "canary"] = "swap"
    """First requests of a new version. `"swap"`: all at once; `"shadow"`: copies of requests first; `"canary"`:
    `canary_percent` of requests first."""

    window_s: NotNegative = 60.0
    """How long a new version is observed before it is kept; `"shadow"` and `"canary"` take as long again."""

    failure_share: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """Share of requests that may fail beyond the share that failed on the version before."""

    latency_ratio: Annotated[float, Meta(ge=1, le=1e3)] = 3.0
    """How many times as long as on the version before a run may take."""

    canary_percent: Annotated[float, Meta(gt=0, le=50)] = 10.0
    """Percent of requests that `observe = "canary"` sends to the new version."""

    shadow_share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Share of one core that copies of requests may take with `observe = "shadow"`."""

    shadow_agreement: Annotated[float, Meta(gt=0, le=1)] | None = None
    """For classifiers: share of copies with the same highest score. When absent: outputs must be near those of the
    version before."""

    trial_s: PositiveFloat = 120.0
    """Time that the trial of a new version in a child process may take."""

    trial_memory_bytes: Positive | None = None
    """Memory that the trial may take. When absent: the memory for models."""

    def __post_init__(self) -> None:
        if self.url is not None and self.folder is not None:
            raise ValueError("got url and folder; wanted one of them, where the repository is, or none: sticks only")
        for window in self.windows:
            from edge_runtime.config.windows import parse_window  # few devices have any

            try:
                parse_window(window)
            except ValueError as error:
                raise ValueError(f"windows: {error}") from None


class MetricsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Prometheus metrics over HTTP, at `/metrics`."""

    host: str = "127.0.0.1"
    """Address to serve on. There is no password, so the default is this machine alone."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Port to serve on (`--metrics`); 0 is any free one. When absent: metrics are not served."""

    per_model_limit: Annotated[int, Meta(ge=0)] = 30
    """Models that have series of their own: this number of the busiest, and those that a scrape asks for
    (`/metrics?model=NAME`). All others count as `model="(others)"`, so that a device with hundreds of models has a few
    thousand series: one told for itself has some 90."""

    triton_names: bool = False
    """Whether models' metrics come under Triton's names (`nv_inference_*`) too, for dashboards that exist."""


class TracingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Traces of requests, metrics and the log, sent to OpenTelemetry's collector. Without this table: nothing is sent.

    The device connects to the collector, which so sees devices behind NAT too; see [Traces](tracing.md).
    """

    endpoint: Place
    """The collector's address, for OTLP over HTTP: `"https://collector.example:4318"`. `v1/traces`, `v1/metrics` and
    `v1/logs` are below it."""

    rate: Annotated[float, Meta(ge=0, le=1)] = 0.001
    """The share of requests that are traced. One that carries a `traceparent` whose caller traces it is traced whatever
    this says; `0` traces no other."""

    metrics_s: NotNegative = 60.0
    """Time between two sendings of the metrics. `0`: none are sent."""

    logs: Literal["debug", "info", "warning", "error", "off"] = "warning"
    """Lowest level of the log that is sent, whatever `log.level` writes."""

    device_id: str | None = None
    """This device's name at the collector (`service.instance.id`). When absent: `update.device_id`, `mqtt.device_id`,
    or the host's name."""

    headers_file: str | None = None
    """A file of headers that go with everything, `Name: value` a line, such as a token that the collector wants."""

    ca_file: str | None = None
    """PEM certificates of the authorities that may sign an https collector's. When absent: the system's."""

    cert_file: str | None = None
    """PEM certificate that this device shows an https collector."""

    key_file: str | None = None
    """Its key, where `cert_file` does not hold it."""

    allow_http: bool = False
    """Allow http beyond this machine. Everyone on the way then reads what is sent, and its tokens."""

    store_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 16 << 20
    """Most bytes that wait in the state folder for a collector that does not answer; the oldest make room. `0`: nothing
    is kept."""


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""

    format: Literal["text", "json"] | None = None
    """When absent: text on a terminal, JSON otherwise."""


class LimitSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of what the daemon takes. A limit that the profile has too overrides the profile's."""

    memory_bytes: Positive | None = None
    """Memory for models, within the cgroup; to stay under it, the least recently used idle models are unloaded."""

    cores: Positive | None = None
    """Cores for all runs together, within what the process may use."""

    queue_rows: Positive | None = None
    """Rows that may wait, of each model."""

    queue_bytes: Positive | None = None
    """Bytes that may wait, of each model."""

    max_run_ms: PositiveFloat | None = None
    """Longest run of a batch while another model waits."""

    message_frames: Annotated[int, Meta(ge=3, le=LARGEST)] = 4098
    """Most frames of one ZeroMQ message; one with more gets `decode_failed`. The default is a header, an id, and as
    many tensors as a header can name."""

    message_bytes: Positive = 128 << 20
    """Most bytes of one message, all frames together; a larger one gets `decode_failed`. A message that does not end
    is noticed when the daemon has grown by as much, and its connection is closed. The default holds two of the
    largest frames."""

    unanswered_bytes: Positive = 128 << 20
    """Most bytes of one connection's requests that wait for their answers; further ones get `queue_full`. Its first
    always may. The default equals `message_bytes`."""

    total_unanswered_bytes: Positive | None = None
    """The same of all connections together. A connection gets no more than is left free for the others. It bounds the
    replies that clients do not read, too: the connection that has read nothing for longest is closed first. When
    absent: an eighth of the memory that the process may use, 256 MiB to 1 GiB."""

    host_memory_bytes: Positive | None = None
    """Memory that each host may take for its model; an allocation beyond fails. When absent: `memory_bytes`, and at
    least 512 MiB."""

    run_limit_ms: PositiveFloat | None = None
    """Longest run of a model in a host, after which it is ended. When absent: from the measured curve, at least 1 s."""


class BackendSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One backend to load models with; the entries are tried in their order and replace the profile's."""

    name: str
    """`"onnxruntime"`, `"openvino"`, `"litert"`, `"tensorrt"`, `"pytorch"` or `"catboost"`."""

    device: str = ""
    """The backend's device; empty means the backend's own default."""

    precision: Literal["", "f32", "bf16", "f16", "int8"] = ""
    """Empty means the backend's own; `"int8"` needs `model.int8.onnx` or `.xml` in each version."""

    threads: Positive | None = None
    """Cores that one run takes. When absent: the measured layout."""

    spin: bool = False
    """Whether threads wait by spinning: slightly faster, and a core is always busy."""

    extra: dict[str, str] = field(default_factory=dict)
    """Options in the backend's own words."""

    delegate: str = ""
    """A library that takes operators to an accelerator, by path: a delegate of `litert`, or a plug-in execution
    provider of `onnxruntime` (1.24 and later), which runs on `device`. It is code, so no model names it."""

    delegate_options: dict[str, str] = field(default_factory=dict)
    """The delegate's own options."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The daemon's settings: `/etc/edge-runtime/config.toml` or `--config FILE`. The command line overrides it."""

    models: Place | None = None
    """The models folder (`--models`). When absent: `models`, unless `model` names models."""

    model: dict[str, Place] = field(default_factory=dict)
    """Models by name that have a place of their own (`--model NAME=PATH`): one model's folder, of versions or holding
    its artifacts, or its file. Such a model stands before one of that name in the models folder."""

    state: Place | None = None
    """The folder that survives a restart, of one daemon (`--state`). When absent: `$STATE_DIRECTORY`,
    `/var/lib/edge-runtime` or `$XDG_STATE_HOME/edge-runtime`."""

    profile: str | None = None
    """The device profile by name (`--profile`). When absent: the best match for this host, which
    `edge-runtime profile show` explains."""

    zmq: ZmqSettings = ZmqSettings()
    shared_memory: SharedMemorySettings = SharedMemorySettings()
    update: UpdateSettings | None = None
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings | None = None
    log: LogSettings = LogSettings()
    limits: LimitSettings = LimitSettings()
    backends: tuple[BackendSettings, ...] = ()
    isolation: Isolation = "auto"
    """Whether models run in hosts, processes of their own: `"always"`, which no model's own setting weakens; `"auto"`,
    except those of which it is known that nothing a client sends can crash or stall them; `"never"`, except
    `model.py` and files other than ONNX, IR and engines."""

    python_models: bool = False
    """Allow `model.py` (`--python-models`), which is code of everyone who can write the models folder."""

    plugins: tuple[Place, ...] = ()
    """Distributions whose plug-ins are used (docs/plugins.md), as pip names them: `["edge-runtime-hailo"]`. Their code
    runs with the daemon's rights. `edge-runtime plugins` says what became of each."""

    watch: bool = True
    """Follow the models folder: load versions that appear or change, unload those that leave."""

    model_control: Literal["none", "poll", "explicit"] | None = None
    """Who has models loaded (`--model-control-mode`), in Triton's words: `"none"`, the start alone; `"poll"`, the
    folder alone; `"explicit"`, callers alone, after `load_models`. When absent: the folder, and callers too."""

    load_models: tuple[Place, ...] = ()
    """With `model_control = "explicit"`, the models to load at the start (`--load-model`); `"*"` alone: all."""

    calibrate: bool = True
    """Measure run time by rows and threads while idle, about 1 s for each model; the result is kept in `state`."""

    start_limit_s: PositiveFloat = 30.0
    """After this the daemon says that it is ready, whatever still loads. Models of a device take seconds; who waits for
    the service does not wait long for one that hangs, and that one is refused with `not_ready` until it is loaded."""

    drain_s: PositiveFloat = 10.0
    """How long SIGTERM waits for admitted requests."""

    proxy: str | None = None
    """An HTTP proxy by which the device reaches the repository of its updates, its authority, its collector, and
    servers of archives: `"http://proxy.site:3128"`. When absent: none, whatever the environment says. Brokers are
    reached without it."""

    no_proxy: tuple[Place, ...] = ()
    """Hosts that are reached without a proxy: a name, with all below it (`"site"`, `".site"`), an address, each with
    `:PORT` if only that is meant, a network (`"10.0.0.0/8"`), or `"*"`, all. A network names addresses, and no names
    that lead there. This machine is always reached without one."""

    def __post_init__(self) -> None:
        if self.model and self.requires_signed:
            raise ValueError(
                f"model (--model) names {', '.join(self.model)}, and update.require_signed holds: only signed releases "
                "are served; publish the model, or set update.require_signed = false"
            )
        if self.load_models and self.model_control != "explicit":
            raise ValueError(
                "Use of '--load-model' (load_models) requires setting '--model-control-mode=explicit' "
                "(model_control) as well"
            )
        if ALL_MODELS in self.load_models and len(self.load_models) > 1:
            raise ValueError(
                f"load_models: {ALL_MODELS!r} stands for all models, so it must be the only one; got "
                f"{', '.join(self.load_models)}"
            )

    def table(self, name: str) -> Any:
        """Return the settings of a door; None where the file has no table of its name (`loading.configured`)."""
        return getattr(self, name, None)

    @property
    def requires_signed(self) -> bool:
        """Whether only signed releases are served: then none of a folder."""
        return self.update is not None and self.update.require_signed

    @property
    def follows_folder(self) -> bool:
        """Whether changes of the models folder are served without anybody asking."""
        return self.model_control in {None, "poll"}

    def is_loaded_at_start(self, model: str) -> bool:
        """Whether the start loads a model that it finds."""
        if self.model_control != "explicit" or model in self.model:
            return True
        return self.load_models == (ALL_MODELS,) or model in self.load_models

    @property
    def models_folder(self) -> str | None:
        """The models folder that is served; None where only signed releases are, or only those that `model` names."""
        if self.requires_signed or (self.models is None and self.model):
            return None
        return self.models or DEFAULT_MODELS
