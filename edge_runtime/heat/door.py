"""The governor as the daemon opens it: a door without clients, with the thread that steps each second.

Imported only with `[thermal]`. Tells the governor's state in `stats`, metrics, the device's state on its broker, and
Home Assistant. Thread: main, but for `edge-heat`, and what the broker's door calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.errors import ConfigError
from edge_runtime.heat.governor import Governor
from edge_runtime.heat.lighter import LighterVariants
from edge_runtime.heat.throttle import HeatLimits, HeatStage

if TYPE_CHECKING:
    from edge_runtime.doors.mqtt.publishing import PublishingDoor

log = logging.getLogger(__name__)

STEP_S = 1.0
"""Between two readings: a chip's temperature follows its load within some seconds."""

JOIN_S = 5.0
"""A reading of sensors on a slow bus takes some 10 ms."""

BELOW_THROTTLE_C = 2.0
"""The default limit is this far below the profile's, so that the kernel never slows the device."""


def open_door(context: DoorContext) -> HeatDoor:
    """Return the door of `[thermal]`. Raises ConfigError: nothing says at which temperature this device is too hot."""
    return HeatDoor(context)


class HeatDoor:
    """The governor of one device. It is a part of the broker's door, where there is one."""

    topics: tuple[str, ...] = ()
    takes_retained = False

    def __init__(self, context: DoorContext) -> None:
        core, settings = context.core, context.settings("thermal")
        limit_celsius, throttle_celsius = settings.limit_celsius, core.profile.thermal.throttle_celsius
        if limit_celsius is None:
            if throttle_celsius is None:
                raise ConfigError(
                    f"thermal.limit_celsius: the profile {core.profile.name} does not say where this device throttles; "
                    "name the limit, as limit_celsius = 80"
                )
            limit_celsius = throttle_celsius - BELOW_THROTTLE_C
        zones = context.host.zones()
        if missing := [each for each in settings.zones if each not in zones]:
            raise ConfigError(
                f"thermal.zones: got {missing[0]!r}, wanted thermal zones that this device has: "
                f"{', '.join(sorted(zones)) or 'it has none'}"
            )
        if not zones and context.host.is_slowed() is None:
            log.warning("nothing tells this device's temperature, so nothing is slowed")
        self.governor = Governor(
            core.dispatcher,
            context.host,
            core.clock,
            HeatLimits(limit_celsius, core.dispatcher.cores, settings.low_priority, has_lighter=settings.lighter),
            zones=settings.zones,
            make_lighter=LighterVariants(core.table, core.loader, core.clock).switch,
        )
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._watch(context)
        if "mqtt" in context.doors:
            cast("PublishingDoor", context.doors["mqtt"]).attach(self)
        context.shared["device_entities"] = {"heat": ENTITY}

    def start(self) -> None:
        """Begin to read: loads are work too."""
        self._thread = threading.Thread(target=self._run, name="edge-heat", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """Nothing: it has begun."""

    def reload(self) -> None:
        """Nothing: its table needs a restart."""

    def stop_admitting(self, limit_s: float) -> None:  # noqa: ARG002 (nothing is asked here)
        """Stop, and let what was admitted have all cores: there is little time."""
        self.close()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None
            self.governor.release()

    def status(self) -> Mapping[str, Any]:
        """The governor's part of `stats`."""
        return {"thermal": self.governor.status()}

    # ---- a part of the broker's door; thread: its transport's --------------------------------------------------------

    def states(self) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
        """The governor's stage, as a source of the device's state: published when it changes."""
        return {"thermal": {"governor": {"state": self.governor.stage.value, "reason": self.governor.words}}}

    def sources(self) -> Sequence[dict[str, Any]]:
        """None: it gives no results."""
        return ()

    def message(self, payload: bytes) -> None:
        """Nothing: it listens to no topic."""

    def online(self) -> None:
        """Nothing: the state is retained."""

    def beat(self) -> None:
        """Nothing: the state is looked at by its publisher."""

    # ---- private ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over.wait(STEP_S):
            try:
                self.governor.step()
            except Exception:  # no bug may end the governor: the device would heat up unseen
                log.exception("an exception reached the governor of heat")

    def _watch(self, context: DoorContext) -> None:
        """Register the gauges; of what this device does not measure there is none."""
        governor, metrics = self.governor, context.core.metrics
        metrics.watch("thermal_limit_celsius", lambda: governor.limits.limit_celsius)
        metrics.watch("thermal_low_share", lambda: governor.throttle.low_share)
        metrics.watch("thermal_cores", lambda: governor.throttle.cores)
        metrics.watch_each(
            "thermal_stage",
            "stage",
            lambda: {each.value: float(each is governor.stage) for each in HeatStage},
        )
        if context.host.is_slowed() is not None:
            metrics.watch("thermal_is_slowed", lambda: float(bool(governor.reading.is_slowed)))
        if context.host.frequency_share() is not None:
            metrics.watch("frequency_share", lambda: governor.frequency_share or 0.0)
        if context.host.power_watts() is not None:
            metrics.watch("power_watts", lambda: governor.power_watts or 0.0)


ENTITY: Mapping[str, Any] = {
    "platform": "sensor",
    "name": "Heat",
    "entity_category": "diagnostic",
    "device_class": "enum",
    "options": [each.value for each in HeatStage],
    "value_template": "{{ value_json.get('thermal', {}).get('governor', {}).get('state') }}",
}
"""What Home Assistant shows of the governor, from the device's state."""
