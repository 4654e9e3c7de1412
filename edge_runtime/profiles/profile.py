"""Profiles: the backends and limits of a device class, read from `device_profiles/*.toml`.

Owns: a profile's fields, finding and reading the files, and applying configuration and this host's facts to one.
match.py chooses a host's profile. `device_profiles/README.md` describes each field, with units.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from edge_runtime.errors import ConfigError
from edge_runtime.plugins import declared, names
from edge_runtime.profiles.facts import Facts
from edge_runtime.typed_toml import build, parse_toml

LEAST_UNANSWERED_BYTES, MOST_UNANSWERED_BYTES = 256 << 20, 1 << 30
"""Of the default of limits.total_unanswered_bytes: one connection may have what limits.unanswered_bytes allows."""

LEAST_HOST_BYTES = 512 << 20
"""Libraries reserve memory that they never touch, for the stacks of their threads above all, and die without."""

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Celsius = Annotated[float, Meta(ge=0, le=150)]


class MatchRules(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every given rule must hold. Of a list of texts one must match, of cpu_flags all.

    architectures: as `uname -m`. device_tree_models: texts within the board's model. device_tree_compatible: names that
    the board lists. nvidia_gpu, jetson: present or absent. Memory is that which the process may use.
    """

    architectures: tuple[str, ...] = ()
    device_tree_models: tuple[str, ...] = ()
    device_tree_compatible: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    nvidia_gpu: bool | None = None
    jetson: bool | None = None
    min_memory_bytes: Positive | None = None
    max_memory_bytes: Positive | None = None


class BackendChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One backend with its options; where it cannot load a model, the profile's next one is tried.

    precision "" and device "" are the backend's default. threads: cores that one run takes (None: the measured layout).
    spin: threads wait by spinning. extra: options in the backend's own words. delegate: a library that takes operators
    to an accelerator, with its options, for a backend whose declaration `takes_delegate`. It is code, so no model.toml
    has it.
    """

    name: str
    device: str = ""
    precision: Literal["", "f32", "bf16", "f16", "int8"] = ""
    threads: Positive | None = None
    spin: bool = False
    extra: dict[str, str] = field(default_factory=dict)
    delegate: str = ""
    delegate_options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.delegate_options and not self.delegate:
            raise ValueError("delegate_options are given without a delegate, the path of its library")
        if self.delegate:
            takes = [name for name in names("backends") if declared("backends", name).takes_delegate]
            if self.name not in takes:
                raise ValueError(f"delegate is an option of the backend {' or '.join(takes)}, and this is {self.name}")


class Limits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The daemon's share of the device. The lower of memory_bytes and memory_fraction (of usable memory) counts.

    cores None: all that the process may use. queue_rows and queue_bytes: of each model. max_run_ms: longest run while
    another model waits.
    """

    memory_bytes: Positive | None = None
    memory_fraction: Share = 0.5
    cores: Positive | None = None
    queue_rows: Positive = 4096
    queue_bytes: Positive = 64 << 20
    max_run_ms: PositiveFloat = 50.0


class Batching(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """max_batch_rows: hard limit of rows in one request and one run, for models without their own."""

    max_batch_rows: Positive = 256


class Thermal(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The hottest zone's limits: from warn_celsius on it deserves a warning, from throttle_celsius on it slows down."""

    warn_celsius: Celsius | None = None
    throttle_celsius: Celsius | None = None

    def __post_init__(self) -> None:
        warn, throttle = self.warn_celsius, self.throttle_celsius
        if warn is not None and throttle is not None and warn > throttle:
            raise ValueError(f"warn_celsius = {warn:g} is above throttle_celsius = {throttle:g}")


class Profile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device class, as in its file. `effective` applies it to a host."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    description: str
    match: MatchRules
    backends: Annotated[tuple[BackendChoice, ...], Meta(min_length=1)]
    limits: Limits = Limits()
    batching: Batching = Batching()
    thermal: Thermal = Thermal()

    def effective(
        self, facts: Facts, overlay: LimitOverlay | None = None, backends: Sequence[BackendChoice] = ()
    ) -> EffectiveProfile:
        """This profile on this host, with the configuration's `[limits]` on top. Pure; raises nothing.

        backends: the configuration's, which replace the profile's; empty keeps the profile's.
        """
        limits = resolve_limits(self.limits, facts, overlay)
        return EffectiveProfile(
            name=self.name,
            description=self.description,
            backends=tuple(_within(choice, limits.cores) for choice in backends or self.backends),
            limits=limits,
            batching=self.batching,
            thermal=self.thermal,
        )


class LimitOverlay(Protocol):
    """The configuration's `[limits]`, a neighbour's type; None keeps the profile's."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory for models."""
        ...

    @property
    def cores(self) -> int | None:
        """Cores for all runs together."""
        ...

    @property
    def queue_rows(self) -> int | None:
        """Rows that may wait, of each model."""
        ...

    @property
    def queue_bytes(self) -> int | None:
        """Bytes that may wait, of each model."""
        ...

    @property
    def max_run_ms(self) -> float | None:
        """Longest run while another model waits."""
        ...


class ResolvedLimits(Struct, frozen=True):
    """Limits as numbers for one host. cores is at least 1 and never above what the process may use.

    memory_bytes None: neither the host nor a setting says the memory, so models are not bounded.
    """

    memory_bytes: int | None
    cores: int
    queue_rows: int
    queue_bytes: int
    max_run_ms: float


class EffectiveProfile(Struct, frozen=True):
    """A profile applied to a host, as the daemon uses it. No backend has more threads than limits.cores."""

    name: str
    description: str
    backends: tuple[BackendChoice, ...]
    limits: ResolvedLimits
    batching: Batching
    thermal: Thermal


def resolve_limits(limits: Limits, facts: Facts, overlay: LimitOverlay | None = None) -> ResolvedLimits:
    """Limits of one host: the overlay's if given, within what the process may use. Pure.

    The overlay's memory may exceed the profile's share of the device, not the device.
    """
    usable = facts.memory_bytes
    shares = (limits.memory_bytes, None if usable is None else int(usable * limits.memory_fraction))
    memory_bytes = min((share for share in shares if share is not None), default=None)
    resolved = ResolvedLimits(
        memory_bytes=memory_bytes,
        cores=max(min(limits.cores or facts.cores, facts.cores), 1),
        queue_rows=limits.queue_rows,
        queue_bytes=limits.queue_bytes,
        max_run_ms=limits.max_run_ms,
    )
    if overlay is None:
        return resolved
    wanted_bytes = overlay.memory_bytes
    if wanted_bytes is not None and usable is not None:
        wanted_bytes = min(wanted_bytes, usable)
    return replace(
        resolved,
        memory_bytes=resolved.memory_bytes if wanted_bytes is None else wanted_bytes,
        cores=resolved.cores if overlay.cores is None else max(min(overlay.cores, facts.cores), 1),
        queue_rows=overlay.queue_rows or resolved.queue_rows,
        queue_bytes=overlay.queue_bytes or resolved.queue_bytes,
        max_run_ms=overlay.max_run_ms or resolved.max_run_ms,
    )


def usual_unanswered_bytes(facts: Facts) -> int:
    """Return the default of `limits.total_unanswered_bytes` on a host. Pure."""
    return min(max((facts.memory_bytes or 0) // 8, LEAST_UNANSWERED_BYTES), MOST_UNANSWERED_BYTES)


def usual_host_bytes(memory_bytes: int | None) -> int | None:
    """Return the default of `limits.host_memory_bytes`: as much as all models, and enough for a library's own needs.

    memory_bytes: for models. Pure.
    """
    return None if memory_bytes is None else max(memory_bytes, LEAST_HOST_BYTES)


def load_profiles(folder: Path | None = None) -> tuple[Profile, ...]:
    """Every profile in a folder, by name. None: the folder shipped with this package.

    Raises ConfigError: the folder holds none, a file is not a profile, or its name differs from the profile's.
    """
    folder = folder or profiles_folder()
    profiles = [load_profile(path) for path in sorted(folder.glob("*.toml"))]
    if not profiles:
        raise ConfigError(
            f"{folder}: got no device profiles; install the package again, or name a folder that has some"
        )
    return tuple(profiles)


def load_profile(path: Path) -> Profile:
    """One profile from its file. Raises ConfigError naming the file and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    profile = build(Profile, parse_toml(text, str(path)), str(path))
    if profile.name != path.stem:
        raise ConfigError(f"{path}: name: got {profile.name!r}, wanted {path.stem!r}, the file's own")
    return profile


def profiles_folder() -> Path:
    """The folder of the profiles: inside the installed package, or beside it in a checkout (editable install)."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "device_profiles"
    return inside if inside.is_dir() else package.parent / "device_profiles"


def _within(choice: BackendChoice, cores: int) -> BackendChoice:
    """The choice, with at most `cores` threads."""
    if choice.threads is None or choice.threads <= cores:
        return choice
    return msgspec.structs.replace(choice, threads=cores)
