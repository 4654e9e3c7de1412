"""The life of the daemon: bind every endpoint, load, ready; reload on SIGHUP; drain and stop.

Owns: the I/O thread, the sockets and the order of things. Made by assemble.py. Thread: main.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_runtime import __version__, plugins
from edge_runtime.config.endpoints import daemon_endpoints, memory_socket_beside
from edge_runtime.config.settings import Config
from edge_runtime.daemon.core import Reloaded, RunningDaemon
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.daemon.state_lock import StateLock
from edge_runtime.doors.binding import IPC_MODE, EarlySocket
from edge_runtime.doors.door import drain, keeping
from edge_runtime.doors.zmq.bind import BoundSocket, ClientKeys, Loopback, bind_router
from edge_runtime.doors.zmq.frontend import ZmqFrontend
from edge_runtime.doors.zmq.memory_socket import MemorySocket
from edge_runtime.doors.zmq.transport import Endpoint
from edge_runtime.errors import ConfigError
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.sandbox.landlock import guard
from edge_runtime.telemetry.logs import configure_logging
from edge_runtime.telemetry.notify import Notifier

if TYPE_CHECKING:
    from edge_runtime.models.self_check import SelfCheck
    from edge_runtime.telemetry.prometheus import MetricsServer

log = logging.getLogger("edge_runtime")

BEAT_S = 0.25
"""The I/O loop comes round at least this often, so that a stalled one is noticed."""

RELOADABLE = ("log", "drain_s")
"""Settings that SIGHUP takes over; sockets, limits and backends are fixed for a daemon's life."""

STOP_LOOK_S = 0.05
"""How often a start looks for an order to stop."""

LOAD_LIMIT_S = 0.25
"""How long a stop waits for a load inside the daemon, a look at the folder, or a check for updates. Those in hosts are
ended, and one that cannot be ends with the process: a stop during the start takes less than a second."""

MEET_S = 0.25
"""How long, at most, to wait at the end for the first message of a connection that was just made."""

LINGER_S = 1.0
"""After the last reply was handed over, sockets have this long to send it."""


class Daemon:
    """One daemon. `start` returns when it is ready, `stop` when everything admitted was answered or time is up.

    status: its own. doors: beside ZeroMQ's, by name, in the order in which they start; they close in
    the opposite one.
    """

    def __init__(
        self,
        context: DoorContext,
        *,
        frontend: InferFrontend,
        checks: InferFrontend,
        notifier: Notifier,
        early: EarlySocket | None,
        lock: StateLock | None = None,
    ) -> None:
        """frontend: answers the clients of ZeroMQ, checks: what the daemon asks itself. lock: of the state, if any."""
        self._context = context
        core = self._core = context.core
        config = self._config = core.config
        self._frontend = frontend
        self._checks = checks
        self.doors = context.doors
        self._loop = context.loop
        self._host = context.host
        self._notifier = notifier
        self._descriptors = context.descriptors
        self._early = early
        self._loopback: Loopback | None = None
        self._self_check: SelfCheck | None = None
        self.status = context.status
        self._state_lock = lock or StateLock(core.state, may_share=config.state is None and core.updates is None)
        self._bound: list[BoundSocket] = []
        self._endpoints: list[Endpoint] = []
        self._memory_sockets: list[MemorySocket] = []
        self._keys: ClientKeys | None = None
        self._metrics_server: MetricsServer | None = None
        self._io_thread: threading.Thread | None = None
        self._told_models = (False, -1, "")
        self._beat_due_s = 0.0
        self._watchdog_due_s = 0.0

    @property
    def endpoints(self) -> list[str]:
        """Addresses bound so far, control first."""
        return list(self.status.endpoints)

    @property
    def is_stuck(self) -> bool:
        """Whether work inside the daemon went on when it stopped: only the end of the process ends it."""
        return self._core.is_stuck

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus looks; None when metrics are off."""
        if self._metrics_server is None:
            return None
        return f"http://{self._config.metrics.host}:{self._metrics_server.port}/metrics"

    def lend(self, running: RunningDaemon) -> None:
        """Tell the parts of the core how to ask for a reload. Before `start`."""
        self._core.daemon = running

    def start(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Bind every endpoint, load what is there, notify systemd. Raises ConfigError before anything is served.

        A model answers once it is loaded; the broker hears of the device when all are. is_stopped: asked while models
        load; once it is true the start is left, `stop` must follow, and this is False.
        """
        infer, control = daemon_endpoints(self._config.zmq.endpoints, self._config.zmq.control)
        curve = self._config.zmq.curve
        self._keys = ClientKeys(curve.client_keys_file) if curve is not None else None
        self._bind(control, is_control=True)
        self._state_lock.take()
        if not self._state_lock.is_shared:
            self._core.marks.open()
        for address in infer:
            self._bind(address, is_control=False)
        self._start_metrics()
        self._start_io_thread()
        for door in tuple(self.doors.values()):
            door.start()
        self._core.start()
        limit_s = time.monotonic() + self._config.start_limit_s
        while not self._core.wait_settled(STOP_LOOK_S):
            if is_stopped():
                return False
            if time.monotonic() >= limit_s:
                log.warning("serving before every model is ready", extra={"after_s": self._config.start_limit_s})
                break
        self._start_self_check()
        self.status.is_ready = True
        for door in tuple(self.doors.values()):
            door.ready()
        self._report_ready()
        self._core.hosts.end_early()
        self._core.loader.load_suspects()
        return True

    def reload(self, config: Config) -> Reloaded:
        """SIGHUP: take the settings that may change while serving; look at models and client keys again.

        Other changed settings are named in a warning: they need a restart.
        """
        reasons: list[str] = []
        self._notifier.reloading()
        taken = {*RELOADABLE, *self._context.take_tables(config)}
        needs_restart = [
            name
            for name in dict.fromkeys((*type(self._config).__struct_fields__, *type(config).__struct_fields__))
            if name not in taken and getattr(config, name, None) != getattr(self._config, name, None)
        ]
        if needs_restart:
            log.warning("changed settings need a restart", extra={"settings": ", ".join(needs_restart)})
        configure_logging(config.log.level, config.log.format, sys.stderr)
        self._config = replace(self._config, **{name: getattr(config, name) for name in RELOADABLE})
        if self._keys is not None:
            self._loop.call(self._reload_keys)
        for door in tuple(self.doors.values()):
            try:
                door.reload()
            except ConfigError as error:  # the door has logged it
                reasons.append(error.message)
        reasons += self._context.open_new()
        self._core.loader.rescan()
        log.info("configuration reloaded")
        self._notifier.ready()
        return Reloaded(tuple(reasons), tuple(needs_restart))

    def stop(self) -> None:
        """Stop admitting, answer what was admitted within `drain_s`, close. Idempotent."""
        self._notifier.stopping()
        self.status.is_ready, self.status.is_draining = False, True
        self._stop_admitting()
        is_drained = self._core.close(self._config.drain_s, load_limit_s=LOAD_LIMIT_S)
        self._end_io_thread()
        self._close_doors()
        self._release()
        log.info("stopped", extra={"drained": is_drained})

    # ---- private ----------------------------------------------------------------------------------------------------

    def _stop_admitting(self) -> None:
        """Wait until every door refuses new requests: before that, models must not be closed under them."""
        for door in reversed(tuple(self.doors.values())):
            door.stop_admitting(self._config.drain_s)
        if self._io_thread is not None:
            self._loop.call(self._checks.drain)
            drain(self._loop.call, self._frontend, self._config.drain_s)

    def _end_io_thread(self) -> None:
        """Send the last replies of the ZeroMQ endpoints, and refuse what their connections send from now on."""
        for bound in self._bound:
            bound.hide()
        self._loop.stop(MEET_S)
        if self._io_thread is not None:
            self._io_thread.join()
            self._io_thread = None
            # Invariant: nothing is read from here on, so what is unanswered now was never run.
            self._frontend.tell_stop()
            self._loop.send_rest()
        for bound in self._bound:  # at once: who connects now is not heard
            bound.close()
        for endpoint in self._endpoints:
            endpoint.end(LINGER_S)
        self._endpoints.clear()

    def _close_doors(self) -> None:
        """Close all that clients reach; `endpoints` is empty then."""
        for door in reversed(tuple(self.doors.values())):
            door.close()
        if self._loopback is not None:
            self._loopback.close()
        self._core.regions.close()
        for each in self._memory_sockets:
            each.close()
        self.status.endpoints.clear()

    def _release(self) -> None:
        """Free what the sockets used, and let another daemon have the addresses and the state folder."""
        if self._metrics_server is not None:
            self._metrics_server.close()
        for bound in self._bound:
            bound.release()
        self._bound.clear()
        self._loop.close()
        self._state_lock.release()

    def _start_io_thread(self) -> None:
        self._io_thread = threading.Thread(
            target=self._loop.run, args=(self._beat, BEAT_S), name="edge-io", daemon=True
        )
        self._io_thread.start()

    def _bind(self, address: str, *, is_control: bool) -> None:
        bound = bind_router(
            address,
            self._config.zmq,
            self._descriptors,
            is_control=is_control,
            early=self._early,
            keys=self._keys,
        )
        self._bound.append(bound)
        self.status.endpoints.append(bound.address)
        self._new_endpoint(bound, self._frontend, is_control=is_control)
        if not is_control and bound.ipc_path is not None:
            self._share_memory(bound.ipc_path)

    def _new_endpoint(self, bound: BoundSocket, frontend: InferFrontend, *, is_control: bool) -> Endpoint:
        """Serve one more endpoint."""
        endpoint = Endpoint(
            self._loop,
            bound,
            ZmqFrontend(frontend),
            send_bound_bytes=self._config.zmq.send_bound_bytes,
            max_frame_bytes=self._config.zmq.max_frame_bytes,
            message_frames=self._config.limits.message_frames,
            message_bytes=self._config.limits.message_bytes,
            total_send_bound_bytes=self._core.infer.unanswered.total_bytes,
            is_control=is_control,
        )
        self._endpoints.append(endpoint)
        self._loop.call(lambda: self._loop.add(endpoint))
        return endpoint

    def _share_memory(self, ipc_path: Path) -> None:
        """Bind the memory socket beside an ipc endpoint. Where it cannot be, clients send frames."""
        if not self._config.shared_memory.total_bytes:
            return
        path = memory_socket_beside(ipc_path)
        try:
            memory_socket = MemorySocket(self._loop, path, self._core.regions, IPC_MODE, self._descriptors)
        except OSError as error:
            log.warning("clients share no memory", extra={"path": str(path), "reason": str(error)})
            return
        self._memory_sockets.append(memory_socket)
        self._loop.call(memory_socket.start)

    def _start_self_check(self) -> None:
        """Feed the watchdog only while models answer from now on; until now, while the I/O loop goes round."""
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is not None:
            from edge_runtime.models.self_check import SelfCheck

            core = self._core
            # An endpoint like the clients', on the same loop, but nobody can connect: what comes here is the daemon's.
            bound = BoundSocket(socket.socket(socket.AF_UNIX), "self-check")
            self._bound.append(bound)
            endpoint = self._new_endpoint(bound, self._checks, is_control=False)
            self._loop.call(lambda: self._loop.unwatch(bound.socket.fileno()))
            self._loopback = Loopback(self._loop.call, endpoint)
            self._self_check = SelfCheck(core.table, core.clock, interval_s, self._loopback)

    def _reload_keys(self) -> None:
        with keeping("the client keys are"):
            if self._keys is not None:
                self._keys.reload()

    def _start_metrics(self) -> None:
        settings = self._config.metrics
        if settings.port is None:
            return
        from edge_runtime.telemetry.prometheus import serve_metrics

        also = [name for name in plugins.names("metrics") if getattr(settings, name)]
        self._metrics_server = serve_metrics(
            self._core.metrics,
            self._host,
            settings.host,
            settings.port,
            also=also,
            busiest=self._core.busiest,
        )
        url = f"http://{settings.host}:{self._metrics_server.port}/metrics"
        self.status.pages.append(url)
        log.info("metrics", extra={"url": url})

    def _beat(self) -> None:
        """Called by the I/O loop each time round: if models answer too, serving works, and the watchdog is fed."""
        now_s = time.monotonic()
        if now_s < self._beat_due_s:
            return
        self._beat_due_s = now_s + BEAT_S
        for frontend in (self._frontend, self._checks):
            frontend.count_runs()
            frontend.routes()  # forgets those of versions that are gone
        self._loop.sweep()
        self._tell_models()
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is not None and now_s >= self._watchdog_due_s:
            self._watchdog_due_s = now_s + interval_s / 2
            if self._self_check is None or self._self_check.is_alive():
                self._notifier.watchdog()

    def _tell_models(self) -> None:
        """Keep systemd's words true: once for each change of the table. Thread: I/O; main, when it has begun."""
        table = self._core.table
        is_ready, generation = self.status.is_ready, table.generation
        if self._told_models[:2] == (is_ready, generation) or self.status.is_draining:
            return
        listing = table.listing()
        ready = sum(entry["state"] == "ready" for entry in listing)
        text = f"{ready} of {len(listing)} model versions ready" if is_ready else table.progress()
        self._told_models = is_ready, generation, text
        self._notifier.status(text)

    def _report_ready(self) -> None:
        found = guard()
        if found.unguarded:
            told = {"unguarded": ", ".join(found.unguarded), "reason": found.reason}
            # Where nothing is closed, a model's code reads what the daemon may.
            log.log(logging.INFO if found.version else logging.WARNING, "not all is closed to hosts", extra=told)
        self._notifier.ready()
        self._tell_models()
        log.info(
            "ready",
            extra={
                "version": __version__,
                "profile": self._core.profile.name,
                "models": self._told_models[2],
                "endpoints": " ".join(self.endpoints),
                "took_s": round(time.monotonic() - self.status.started_s, 3),
            },
        )
