"""Every setting of the daemon and of one model, typed, with its default and the reason for it.

Values only: reading files and laying one over another is loading.py's. Units end the names: `_ms`, `_s`, `_bytes`.
`None` means "not said": the profile, else what was measured, decides.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Priority = Annotated[int, Meta(ge=1, le=9)]
Place = Annotated[str, Meta(min_length=1)]
"""A path; an empty one would be the folder that the daemon happens to be started in."""

LARGEST = 10**15
"""No device counts or holds more, in bytes, rows or runs: a number beyond is a slip, and those of TOML have no end."""

Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
VersionNumber = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
# 1e9 is 31 years or 11 days: it keeps TOML's `inf` and `nan` out, which no wait can use.

DEFAULT_PRIORITY = 5
"""The middle of 1 (first) to 9 (wire v1)."""


class Versions(Struct, frozen=True, forbid_unknown_fields=True):
    """Which versions of a model are loaded: the newest `latest`, all of them, or the `specific` ones. One of three."""

    latest: Positive | None = None
    all: bool = False
    specific: tuple[VersionNumber, ...] = ()

    def __post_init__(self) -> None:
        said = [name for name in ("latest", "all", "specific") if getattr(self, name)]
        if len(said) > 1:
            raise ValueError(f"got {' and '.join(said)}; one of latest, all, specific says which versions are loaded")


class Warmup(Struct, frozen=True, forbid_unknown_fields=True):
    """Runs before ready: `runs` at each of `rows`. One run is enough to allocate; more help a GPU."""

    runs: Positive = 1
    rows: tuple[Positive, ...] = (1,)
    shapes: dict[str, tuple[Positive, ...]] = field(default_factory=dict)


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`model.toml`: everything may be absent; what is absent is read from the model or measured.

    batch: whether axis 0 is rows (None: dynamic everywhere and confirmed by a probe at load). mode: where runs happen
    (None: inline under about 200 us, else workers). threads: cores one run takes (None: the measured layout).
    """

    max_batch_rows: Positive | None = None
    batch: bool | None = None
    mode: Literal["inline", "workers"] | None = None
    max_queue_delay_ms: NotNegative = 0.0
    preferred_batch_rows: tuple[Positive, ...] = ()
    default_timeout_ms: PositiveFloat | None = None
    max_queue_rows: Positive | None = None
    max_queue_bytes: Positive | None = None
    priority: Priority = DEFAULT_PRIORITY
    instances: Positive | None = None
    threads: Positive | None = None
    backend: str | None = None
    device: str | None = None
    precision: Literal["f32", "bf16", "f16", "int8"] | None = None
    options: dict[str, str] = field(default_factory=dict)
    versions: Versions = Versions()
    warmup: Warmup = Warmup()
    pinned: bool = False
    on_demand: bool = False

    def __post_init__(self) -> None:
        largest = max(self.preferred_batch_rows, default=0)
        if self.max_batch_rows is not None and largest > self.max_batch_rows:
            raise ValueError(f"preferred_batch_rows has {largest}, above max_batch_rows = {self.max_batch_rows}")
        if self.pinned and self.on_demand:
            raise ValueError("got pinned and on_demand; a model that always stays cannot wait for its first request")


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """CURVE for endpoints that leave the machine: the server's secret key file and the client keys let in."""

    secret_key_file: str
    client_keys_file: str


class ZmqSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[zmq]`. Endpoints absent: DESIGN 5's default ipc paths.

    max_frame_bytes: libzmq closes a connection that sends more; 64 MiB holds a batch of 100 600 KB images.
    send_bound_bytes: memory that replies to one connection that does not read may take before they are dropped.
    """

    endpoints: tuple[str, ...] = ()
    control: str | None = None
    max_frame_bytes: Positive = 64 << 20
    send_bound_bytes: Positive = 64 << 20
    curve: Curve | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        named = [*self.endpoints, *([self.control] if self.control is not None else [])]
        # A port that the system chooses is another one each time.
        twice = {each for each in named if named.count(each) > 1 and not each.endswith((":*", ":0"))}
        if twice:
            raise ValueError(f"{min(twice)!r} is named twice; each of endpoints and control is an address of its own")


class MqttSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt]`: there when the daemon is to connect to a broker, `url` or `host` saying which (broker.py).

    keepalive_s: a half-open connection is noticed after about twice this. session_expiry_s: the broker keeps QoS 1
    requests this long while the connection is away; longer than a broker's restart, shorter than a caller's patience.
    receive_maximum: QoS 1 messages that the broker may send before it must wait for an acknowledgement.
    max_packet_bytes: the broker drops larger requests; as ZeroMQ's largest frame. reconnect_*: a broker that restarts
    is found again within seconds, and ten thousand devices do not come back in the same one.
    """

    url: str | None = None
    host: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    device_id: str | None = None
    prefix: str = "edge"
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    keepalive_s: Annotated[int, Meta(ge=1, le=65535)] = 20
    session_expiry_s: Annotated[int, Meta(ge=0, le=0xFFFFFFFE)] = 60
    receive_maximum: Annotated[int, Meta(ge=1, le=65535)] = 1024
    max_packet_bytes: Annotated[int, Meta(ge=1024, le=268_435_455)] = 64 << 20
    reconnect_min_s: PositiveFloat = 0.5
    reconnect_max_s: PositiveFloat = 60.0
    reply_prefixes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    state_interval_s: PositiveFloat = 15.0
    home_assistant: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("got one of cert_file and key_file; a client certificate needs both")
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError(f"reconnect_min_s = {self.reconnect_min_s} is above reconnect_max_s")


class PublishRule(Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[publish]]`: results of a model that are published as they come, for those who only want to listen.

    source: "zmq" takes the answers that ZeroMQ clients get; "folder" runs each file that appears in `folder`. on:
    "change" publishes when the outputs differ from those published last, "interval" the latest of each interval.
    interval_s: with "change" the least time between two. outputs: empty means all.
    """

    model: str
    source: Literal["zmq", "folder"] = "zmq"
    folder: str | None = None
    topic: str | None = None
    on: Literal["change", "interval"] = "change"
    interval_s: NotNegative = 0.0
    outputs: tuple[str, ...] = ()
    qos: Literal[0, 1] = 0
    retain: bool = False
    remove: bool = False

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.source == "folder"):
            raise ValueError('source = "folder" needs folder = "/path", and folder needs that source')
        if self.on == "interval" and not self.interval_s:
            raise ValueError('on = "interval" needs interval_s')
        if self.remove and self.source != "folder":
            raise ValueError('remove is for source = "folder"')


class UpdateSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[update]`: there when models come signed from a repository: `url`, or a `folder` that mirrors one.

    With neither, nothing is looked for: releases come on sticks, by `edge-runtime update import DIR`.

    group: whose assignments this device follows. root_file: the root of trust that came with the device. auto: install
    what is assigned; else only `edge-runtime update apply` does. poll_s: between two looks, a share `poll_jitter` more
    or less; wake_jitter_s: a woken fleet spreads over this. min_check_s: at most one look in that time (DESIGN 8).
    cap_bytes_per_s: of downloads. reserve_bytes: what downloads leave free on the disk. observe: how a new version
    begins (swap: all requests at once; shadow: on copies first; canary: on canary_percent first), for window_s each.
    failure_share, latency_ratio: how much worse than the version before is too much. shadow_agreement: for classifiers,
    the share of copies whose highest score must be the same; None: outputs must be near those of the version before.
    trial_s, trial_memory_bytes: limits of the child process that tries it first; memory None: the memory for models.
    """

    root_file: Place
    url: str | None = None
    folder: str | None = None
    group: str = "default"
    device_id: str | None = None
    ca_file: str | None = None
    allow_http: bool = False
    require_signed: bool = True
    auto: bool = True
    poll_s: PositiveFloat = 3600.0
    poll_jitter: Annotated[float, Meta(ge=0, le=1)] = 0.2
    wake_jitter_s: NotNegative = 10.0
    min_check_s: NotNegative = 30.0
    cap_bytes_per_s: Annotated[int, Meta(ge=1024, le=LARGEST)] | None = None
    reserve_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 256 << 20
    observe: Literal["swap", "shadow", "canary"] = "swap"
    window_s: NotNegative = 60.0
    failure_share: Annotated[float, Meta(ge=0, le=1)] = 0.02
    latency_ratio: Annotated[float, Meta(ge=1, le=1e3)] = 3.0
    canary_percent: Annotated[float, Meta(gt=0, le=50)] = 10.0
    shadow_share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    shadow_agreement: Annotated[float, Meta(gt=0, le=1)] | None = None
    trial_s: PositiveFloat = 120.0
    trial_memory_bytes: Positive | None = None

    def __post_init__(self) -> None:
        if self.url is not None and self.folder is not None:
            raise ValueError("got url and folder; wanted one of them, where the repository is, or none: sticks only")


class MetricsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[metrics]`: Prometheus over HTTP, off unless a port is given; loopback unless a host is given."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[log]`: format None is text on a terminal and JSON otherwise."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] | None = None


class LimitSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[limits]`: each overlays the profile's limit of the same name."""

    memory_bytes: Positive | None = None
    cores: Positive | None = None
    queue_rows: Positive | None = None
    queue_bytes: Positive | None = None
    max_run_ms: PositiveFloat | None = None


class BackendSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[backends]]`: as a profile's own; where there is one, they stand in place of the profile's, in their order."""

    name: str
    device: str = ""
    precision: Literal["", "f32", "bf16", "f16", "int8"] = ""
    threads: Positive | None = None
    spin: bool = False
    extra: dict[str, str] = field(default_factory=dict)


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """`config.toml` with the command line laid over it.

    start_limit_s: infer endpoints are bound after this even when models still load (DESIGN 5). drain_s: SIGTERM waits
    this long for admitted requests. watch: take versions that appear in the folder. python_models: allow `model.py`.
    """

    models: Place = "models"
    state: Place | None = None
    profile: str | None = None
    zmq: ZmqSettings = ZmqSettings()
    mqtt: MqttSettings | None = None
    publish: tuple[PublishRule, ...] = ()
    update: UpdateSettings | None = None
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    limits: LimitSettings = LimitSettings()
    backends: tuple[BackendSettings, ...] = ()
    python_models: bool = False
    watch: bool = True
    calibrate: bool = True
    start_limit_s: PositiveFloat = 30.0
    drain_s: PositiveFloat = 10.0

    @property
    def serves_folder(self) -> bool:
        """Whether models of the folder are served; not where only what is signed may be."""
        return self.update is None or not self.update.require_signed
