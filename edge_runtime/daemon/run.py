"""The life of the daemon: bind control, load, bind infer, ready; reload on SIGHUP; drain and stop on SIGTERM.

Owns: the I/O thread, the sockets and the order of things. Thread: `serve` runs on the main thread, which only waits
for signals.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from edge_runtime import __version__
from edge_runtime.config.endpoints import control_endpoint_beside, default_infer_endpoint
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import Core, assemble_core
from edge_runtime.daemon.state_lock import StateLock
from edge_runtime.errors import ConfigError
from edge_runtime.frontend.control_frontend import ControlFrontend
from edge_runtime.frontend.infer_frontend import InferFrontend
from edge_runtime.frontend.zmq_frontend import ZmqFrontend
from edge_runtime.serving.self_check import SelfCheck
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.logs import configure_logging
from edge_runtime.telemetry.notify import Notifier
from edge_runtime.transports.zmq_bind import BoundSocket, ZapResponder, bind_router, new_context
from edge_runtime.transports.zmq_transport import Endpoint, IoLoop

if TYPE_CHECKING:
    from edge_runtime.daemon.mqtt_door import MqttDoor

log = logging.getLogger("edge_runtime")

SWITCH_INTERVAL_S = 0.0002
"""Longest a thread keeps the interpreter while another waits: Python's 5 ms would be most of a tight deadline, and
0.2 ms narrowed the range of goodput and of the refusals' tail in a prototype."""

BEAT_S = 0.25
"""The I/O loop comes round at least this often, so that a stalled one is noticed."""

RELOADABLE = ("log", "drain_s")
"""Settings that SIGHUP takes over; sockets, limits and backends are what a running daemon was made of."""

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong, and will be as wrong the next time: the service does not start it again (and again) for that."""

LINGER_MS = 1_000
"""After the last reply was handed over, sockets have this long to send it."""


class Daemon:
    """One daemon. `start` returns when it is ready, `stop` when everything admitted was answered or time is up."""

    def __init__(self, config: Config, core: Core) -> None:
        self._config = config
        self._core = core
        self._notifier = Notifier()
        self._self_check = SelfCheck(core.servables, core.clock, self._notifier.watchdog_interval_s or 0.0)
        self._state_lock = StateLock(core.state, may_share=config.state is None and config.update is None)
        self._context = new_context()
        self._loop = IoLoop(core.metrics)
        self._host = HostProbe()
        self._control = ControlFrontend(
            core.servables,
            core.loader,
            core.lobby,
            stats=self.stats,
            is_ready=lambda: self._is_ready,
            updates=core.updates,
        )
        self._frontend = self._new_frontend()
        self._mqtt = self._new_mqtt_door()
        if self._mqtt is not None:
            self._frontend.listen(self._mqtt.taps())
        self._bound: list[BoundSocket] = []
        self._zap: ZapResponder | None = None
        self._metrics_server: Any = None
        self._io_thread: threading.Thread | None = None
        self._is_ready = False
        self._told_models = (-1, "")
        self._started_s = time.monotonic()
        self._beat_due_s = 0.0
        self._watchdog_due_s = 0.0

    @property
    def endpoints(self) -> list[str]:
        """Addresses bound so far, control first."""
        return [bound.address for bound in self._bound]

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus looks; None when metrics are off."""
        if self._metrics_server is None:
            return None
        return f"http://{self._config.metrics.host}:{self._metrics_server.port}/metrics"

    def start(self) -> None:
        """Bind control, load what is there, bind infer, tell systemd. Raises ConfigError before anything is served."""
        infer, control = _addresses(self._config)
        self._start_zap()
        self._bind(control, is_control=True)
        self._state_lock.take()
        self._start_metrics()
        self._io_thread = threading.Thread(
            target=self._loop.run, args=(self._beat, BEAT_S), name="edge-io", daemon=True
        )
        self._io_thread.start()
        self._notifier.status("loading models")
        self._core.start()
        if not self._core.wait_settled(self._config.start_limit_s):
            log.warning("serving before every model is ready", extra={"after_s": self._config.start_limit_s})
        for address in infer:
            self._bind(address, is_control=False)
        self._is_ready = True
        if self._mqtt is not None:
            self._mqtt.start()
        self._report_ready()

    def reload(self, config: Config) -> None:
        """SIGHUP: take the settings that may change while serving; look at models and client keys again.

        What else differs is named in a warning: it needs a restart.
        """
        self._notifier.reloading()
        needs_restart = [
            name
            for name in Config.__struct_fields__
            if name not in RELOADABLE and getattr(config, name) != getattr(self._config, name)
        ]
        if needs_restart:
            log.warning("changed settings need a restart", extra={"settings": ", ".join(needs_restart)})
        configure_logging(config.log, sys.stderr)
        self._config = replace(self._config, **{name: getattr(config, name) for name in RELOADABLE})
        if self._zap is not None:
            self._loop.call(self._reload_keys)
        self._core.loader.rescan()
        log.info("configuration reloaded")
        self._notifier.ready()

    def stop(self) -> None:
        """Stop admitting, answer what was admitted within `drain_s`, close. Idempotent."""
        self._notifier.stopping()
        self._is_ready = False
        self._stop_admitting()
        is_drained = self._core.close(self._config.drain_s)
        self._loop.stop()
        if self._io_thread is not None:
            self._io_thread.join()
            self._io_thread = None
        if self._mqtt is not None:
            self._mqtt.close()
        for bound in self._bound:
            bound.close(LINGER_MS)
        self._bound.clear()
        if self._zap is not None:
            self._zap.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
        self._context.term()
        self._loop.close()
        self._state_lock.release()
        log.info("stopped", extra={"drained": is_drained})

    def _stop_admitting(self) -> None:
        """Wait until every door refuses newcomers: before that, models must not be closed under them."""
        if self._mqtt is not None:
            self._mqtt.stop_admitting(self._config.drain_s)
        if self._io_thread is None:
            return
        has_stopped = threading.Event()
        self._loop.call(self._frontend.drain)
        self._loop.call(has_stopped.set)
        has_stopped.wait(self._config.drain_s)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _bind(self, address: str, *, is_control: bool) -> None:
        bound = bind_router(self._context, address, self._config.zmq)
        self._bound.append(bound)
        endpoint = Endpoint(
            self._loop,
            bound.socket,
            ZmqFrontend(self._frontend),
            send_bound_bytes=self._config.zmq.send_bound_bytes,
            max_frame_bytes=self._config.zmq.max_frame_bytes,
            is_control=is_control,
        )
        self._loop.call(lambda: self._loop.add(endpoint))

    def _new_frontend(self) -> InferFrontend:
        """One for each transport's thread, over the same servables and the same door."""
        core = self._core
        return InferFrontend(core.servables, core.infer, self._control, core.clock, core.metrics)

    def _new_mqtt_door(self) -> MqttDoor | None:
        settings = self._config.mqtt
        if settings is None:
            if self._config.publish:
                raise ConfigError("publish: results go to a broker, and none is named; add [mqtt], or --mqtt URL")
            return None
        try:
            from edge_runtime.daemon.mqtt_door import MqttDoor
        except ImportError as error:
            raise ConfigError(f"mqtt: {error}; install it with: pip install 'edge-runtime[mqtt]'") from None
        updates, update = self._core.updates, self._config.update
        return MqttDoor(
            settings,
            self._config.publish,
            self._core,
            self._new_frontend(),
            self._host,
            look=updates.look if updates is not None else None,
            wake_groups=(update.group,) if update is not None else (),
            update=updates.summary if updates is not None else None,
        )

    def _start_zap(self) -> None:
        curve = self._config.zmq.curve
        if curve is None:
            return
        denied = self._core.metrics
        self._zap = ZapResponder(self._context, curve.client_keys_file, lambda: denied.count("curve_denied"))
        self._loop.add_handler(self._zap.socket, self._zap.handle)

    def _reload_keys(self) -> None:
        try:
            if self._zap is not None:
                self._zap.reload()
        except ConfigError as error:
            log.error("the client keys are as before", extra={"reason": error.message})

    def _start_metrics(self) -> None:
        settings = self._config.metrics
        if settings.port is None:
            return
        from edge_runtime.telemetry.prometheus import serve_metrics

        self._metrics_server = serve_metrics(self._core.metrics, self._host, settings.host, settings.port)
        log.info("metrics", extra={"url": self.metrics_url})

    def _beat(self) -> None:
        """Called by the I/O loop each time round: if models answer too, serving works, and the watchdog is fed."""
        now_s = time.monotonic()
        if now_s < self._beat_due_s:
            return
        self._beat_due_s = now_s + BEAT_S
        self._frontend.fold_tally()
        self._loop.sweep()
        self._tell_models()
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is not None and now_s >= self._watchdog_due_s:
            self._watchdog_due_s = now_s + interval_s / 2
            if self._self_check.is_alive():
                self._notifier.watchdog()

    def _tell_models(self) -> None:
        """Keep what systemd shows true: once for each change of the table. Thread: I/O; main, when it has begun."""
        servables = self._core.servables
        if not self._is_ready or self._told_models[0] == servables.generation:
            return
        generation = servables.generation
        listing = servables.listing()
        ready = sum(entry["state"] == "ready" for entry in listing)
        text = f"{ready} of {len(listing)} model versions ready"
        self._told_models = generation, text
        self._notifier.status(text)

    def _report_ready(self) -> None:
        self._notifier.ready()
        self._tell_models()
        log.info(
            "ready",
            extra={
                "version": __version__,
                "profile": self._core.profile.name,
                "models": self._told_models[1],
                "endpoints": " ".join(self.endpoints),
                "took_s": round(time.monotonic() - self._started_s, 3),
            },
        )

    def stats(self) -> dict[str, Any]:
        """What the `stats` op answers (wire v1)."""
        core = self._core
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "ready": self._is_ready,
            "profile": core.profile.name,
            "endpoints": self.endpoints,
            "mqtt": self._mqtt.stats() if self._mqtt is not None else None,
            "update": core.updates.status() if core.updates is not None else None,
            "models": core.servables.listing(),
            "host": self._host.snapshot(),
            "metrics": core.metrics.snapshot(),
        }


def serve(config: Config, read_config: Callable[[], Config] | None = None) -> int:
    """Run a daemon until SIGTERM or SIGINT and return the exit status: 0 told to stop, 1 failed, 2 a setting is wrong.

    Thread: main.
    read_config: called on SIGHUP for the settings that may change while serving.
    """
    configure_logging(config.log, sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    daemon: Daemon | None = None
    with _heard_signals() as signals:
        try:
            daemon = Daemon(config, assemble_core(config))
            daemon.start()
            # What lives now lives long: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            while signals.recv(1)[0] == signal.SIGHUP:
                _reload(daemon, read_config or (lambda: config))
        except ConfigError as error:
            log.error(error.message)
            return EXIT_FAILED if error.retryable else EXIT_CONFIG
        finally:
            if daemon is not None:
                daemon.stop()
    return 0


def _reload(daemon: Daemon, read_config: Callable[[], Config]) -> None:
    """A configuration that cannot be read leaves the daemon as it is."""
    try:
        daemon.reload(read_config())
    except ConfigError as error:
        log.error("the configuration is as before", extra={"reason": error.message})


@contextmanager
def _heard_signals() -> Iterator[socket.socket]:
    """A socket that gets a byte, the number, for each SIGTERM, SIGINT and SIGHUP. Thread: main.

    A queue filled by Python handlers would not do: they run between bytecodes of the main thread, and for a signal
    that comes while that thread is on its way into a wait they run when the wait is over, which is never.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    fd_before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in HEARD}
    try:
        yield heard
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        heard.close()
        told.close()


def _addresses(config: Config) -> tuple[list[str], str]:
    """Infer endpoints and the control endpoint (DESIGN 5)."""
    infer = list(config.zmq.endpoints) or [default_infer_endpoint()]
    first_ipc = next((address for address in infer if address.startswith("ipc://")), None)
    control = config.zmq.control or control_endpoint_beside(first_ipc or default_infer_endpoint())
    return infer, control
