"""Answers every operation of `operations.py`: one method a row, of the row's name.

Owns: the shapes of the results (wire v1). Thread: `answer` runs on a transport's thread; load, unload and the longer
operations of updates reply later, from the loader's or the updater's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Protocol

from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.errors import (
    Cancelled,
    ConfigError,
    DecodeFailed,
    EdgeRuntimeError,
    Forbidden,
    NotReady,
    QueueFull,
    Unsupported,
)
from edge_runtime.hosts.regions import Regions
from edge_runtime.messages import RequestHeader
from edge_runtime.model_spec import TensorSpec
from edge_runtime.models.loader import Loader
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.pending_loads import PendingLoads
from edge_runtime.models.servable import Servable
from edge_runtime.operations import OPERATIONS, OperationAnswer, Scope
from edge_runtime.steps import steps_fields

log = logging.getLogger(__name__)

Done = Callable[[Any], None]
"""Takes the result of an operation, or an EdgeRuntimeError; called once, from any thread."""

APART_RETRY_MS = 200.0
"""An answer that is made apart takes some 25 ms where there are 50 models."""

MOST_STATS = 256
"""Callers that wait for `stats`."""

STOP_NOTICES = 10_000
"""Connections that wait for one, some 1 KB each: a client may name itself anew each time, and leaves unheard."""

METADATA = "metadata"
"""The sender of requests for metadata that wait for a load: they never run."""


class Status(Protocol):
    """A daemon's status.

    is_ready: every model found at the start is ready, failed, on demand or suspected of having ended a process, or
    `start_limit_s` is over. is_draining: it stops, and answers admitted requests.
    """

    is_ready: bool
    is_draining: bool

    @property
    def doors(self) -> Mapping[str, Any]:
        """Those that are open beside ZeroMQ's, by name."""
        ...

    @property
    def open_door(self) -> Callable[[str], None]:
        """A function that opens one more by its name. It raises ConfigError, and may take a while."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return the result of `stats`."""
        ...


class Updates(Protocol):
    """The updater as operations see it."""

    def status(self) -> dict[str, Any]:
        """Tell what runs, what is under way, what was refused and how the last check ended."""
        ...

    def history(self, count: int) -> list[dict[str, Any]]:
        """List the last events, newest first."""
        ...

    def check(self, done: Done) -> None:
        """Look what is offered, and install nothing."""
        ...

    def apply(self, done: Done) -> None:
        """Look, and install what is meant for this device."""
        ...

    def import_folder(self, folder: str, done: Done) -> None:
        """Install from a folder."""
        ...

    def roll_back(self, model: str, done: Done) -> None:
        """Let the release before serve again."""
        ...


class OperationCall(Struct, frozen=True):
    """One call of an operation. reply: called once. is_control: whether it came to a control endpoint.

    max_frame_bytes: the largest tensor that its endpoint takes. connection: by which it came; None where there is none.
    sender: whose requests share a queue with it. cancel: ends a request of it that is answered in parts, by its id.
    """

    reply: Done
    is_control: bool
    max_frame_bytes: int = 0
    connection: Hashable = None
    sender: Hashable = None
    cancel: Callable[[str], bool] | None = None


class StopNotices:
    """The connections that hear last that the daemon stops. Thread: I/O; `tell` after it has ended."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Done] = {}

    def add(self, sender: Hashable, reply: Done) -> None:
        """Have a connection wait; in place of its earlier call, or of the oldest one over the bound."""
        if sender in self._waiting:
            self._waiting.pop(sender)(Cancelled("this connection asked for stop_notice again"))
        elif len(self._waiting) >= STOP_NOTICES:
            self._waiting.pop(next(iter(self._waiting)))(Cancelled("too many connections wait for stop_notice"))
        self._waiting[sender] = reply

    def forget(self, sender: Hashable) -> None:
        """Drop a connection that has ended, or that a reply was kept from."""
        self._waiting.pop(sender, None)

    def tell(self) -> None:
        """Answer all."""
        while self._waiting:
            self._waiting.popitem()[1](True)


class OperationHandlers:
    """Answers operations. Each handler takes an OperationCall and the row's parameters, checked, by name.

    A handler calls `call.reply` exactly once, now or later, with the result or an EdgeRuntimeError; or it raises one.
    """

    def __init__(
        self,
        table: ModelTable,
        loader: Loader,
        pending_loads: PendingLoads,
        status: Status,
        *,
        updates: Updates | None = None,
        regions: Regions | None = None,
    ) -> None:
        """updates: None where none are configured. regions: None where clients share no memory."""
        self._table = table
        self.loader = loader
        self._pending_loads = pending_loads
        self._turn_apart = threading.Lock()
        self._stats_lock = threading.Lock()
        self._asked_stats: list[OperationCall] = []  # Invariant: a thread is about them while there are any.
        self._status = status
        self._updates = updates
        self._regions = regions
        self.stop_notices = StopNotices()
        of_capabilities = plugins.names("operations")
        self._handlers = {
            name: partial(self._answer_by_capability, name) if name in of_capabilities else getattr(self, name)
            for name in OPERATIONS
        }

    def answer(self, header: RequestHeader, call: OperationCall) -> None:
        """Call `call.reply` exactly once with the result or an EdgeRuntimeError, or raise one."""
        operation = OPERATIONS.get(header.op)
        if operation is None:
            raise Unsupported(f"unknown op {header.op!r}; wanted one of {', '.join(('infer', *sorted(OPERATIONS)))}")
        if operation.scope is Scope.CONTROL and not call.is_control:
            raise Forbidden(f"{header.op} is answered on the control endpoint only")
        if operation.is_update and self._updates is None:
            raise Unsupported(
                "updates are not configured; add [update] with root_file, and url or folder, to the daemon's "
                "configuration, and restart it"
            )
        self._handlers[header.op](call, **operation.values_in(header))

    @property
    def offered(self) -> list[str]:
        """The names of the operations that this daemon answers: not those of parts that it does not have."""
        of_capabilities = plugins.names("operations")
        doors = {name: plugins.declared("operations", name).door for name in of_capabilities}
        return [
            name
            for name, row in OPERATIONS.items()
            if not (row.is_update and self._updates is None)
            and not (doors.get(name) and doors[name] not in self._status.doors)
        ]

    # ---- the daemon and its models ----------------------------------------------------------------------------------

    def live(self, call: OperationCall) -> None:
        """Reply True."""
        call.reply(True)

    def ready(self, call: OperationCall, model: str, version: int | None) -> None:
        """Reply whether the daemon, or one model, can answer."""
        if not model:
            call.reply(self._status.is_ready)
            return
        try:
            self._table.resolve(model, version)
        except EdgeRuntimeError:
            call.reply(False)
        else:
            call.reply(True)

    def attach_memory(self, call: OperationCall, secret: str) -> None:
        """Reply True: the regions that belong to the secret may be named by the connection that asks."""
        if self._regions is None or call.connection is None:
            raise Unsupported("no memory is shared here: it belongs to ipc endpoints; send the tensors themselves")
        try:
            self._regions.attach(bytes.fromhex(secret), call.connection)
        except ValueError:
            raise DecodeFailed("secret: wanted 32 hexadecimal digits") from None
        call.reply(True)

    def stop_notice(self, call: OperationCall) -> None:
        """Reply True when all that was admitted is answered, and nothing is read any more.

        Our clients ask it on every connection, so its refusal is a reply, which is counted nowhere.
        """
        if call.connection is None:
            call.reply(Unsupported("stop_notice is the last answer on a ZeroMQ connection; there is none here"))
        elif call.is_control:  # a load or an update under way is not waited for
            reason = "what a control endpoint has not answered may have been begun; ask another endpoint"
            call.reply(Unsupported(reason))
        else:
            self.stop_notices.add(call.sender, call.reply)

    def cancel(self, call: OperationCall, request_id: str) -> None:
        """Reply whether there was such a request; it has ended by then."""
        call.reply(call.cancel is not None and call.cancel(request_id))

    def models(self, call: OperationCall) -> None:
        """Reply the entries of all versions, and of the paths in the models folder that are none."""
        call.reply(self._table.inventory())

    def metadata(self, call: OperationCall, model: str, version: int | None) -> None:
        """Reply at once, or after the load of a model on demand, which this starts as a request would."""
        try:
            call.reply(self._described(model, version, call.max_frame_bytes))
        except NotReady:
            if not self._table.is_coming(model, version):
                raise
            told = partial(self._metadata_after_load, call, model, version)
            self._pending_loads.wait(RequestHeader(model=model), told, METADATA)
            if not self._table.ask_again(model, version):
                self._pending_loads.end(model, None)

    def _answer_by_capability(self, name: str, call: OperationCall, **values: Any) -> None:
        """Reply the answer of a capability."""
        declaration: OperationAnswer = plugins.declared("operations", name)
        if declaration.door and declaration.door not in self._status.doors:
            if declaration.opens:  # a thread of its own, since that imports what the door takes
                opening = partial(self._open_and_answer, declaration, call, values)
                threading.Thread(target=opening, name="edge-open-door", daemon=True).start()
                return
            raise Unsupported(
                f"{name} is answered where {declaration.door!r} is in the daemon's configuration; add it, and restart"
            )
        answer = plugins.named(declaration.answer)
        asked = self._status.doors[declaration.door] if declaration.door else self._table
        if not declaration.apart:
            call.reply(answer(asked, **values))
            return
        if not self._turn_apart.acquire(blocking=False):
            raise QueueFull(f"{name} is answered to another caller now; ask again", retry_after_ms=APART_RETRY_MS)
        apart = partial(self._answer_apart, declaration, call, partial(answer, asked, **values))
        threading.Thread(target=apart, name="edge-operation", daemon=True).start()

    def _answer_apart(self, declaration: OperationAnswer, call: OperationCall, answer: Callable[[], Any]) -> None:
        try:
            result = _made_apart(declaration.name, answer)
        finally:
            self._turn_apart.release()
        call.reply(result)

    def _open_and_answer(self, declaration: OperationAnswer, call: OperationCall, values: Mapping[str, Any]) -> None:
        def answer() -> Any:
            self._status.open_door(declaration.door)
            return plugins.named(declaration.answer)(self._status.doors[declaration.door], **values)

        call.reply(_made_apart(declaration.name, answer))

    def stats(self, call: OperationCall) -> None:
        """Reply counters, latencies, memory and uptime, on a thread of its own.

        The kernel walks all memory of the daemon and its hosts for it. Callers that come meanwhile get the next ones.
        """
        with self._stats_lock:
            if len(self._asked_stats) >= MOST_STATS:
                raise QueueFull(f"{MOST_STATS} callers wait for stats; ask again", retry_after_ms=APART_RETRY_MS)
            self._asked_stats.append(call)
            if len(self._asked_stats) == 1:
                self._begin_stats()

    def _begin_stats(self) -> None:
        threading.Thread(target=self._tell_stats, name="edge-operation", daemon=True).start()

    def _tell_stats(self) -> None:
        with self._stats_lock:
            asked = list(self._asked_stats)
        result = _made_apart("stats", self._status.stats)
        with self._stats_lock:
            del self._asked_stats[: len(asked)]
            if self._asked_stats:
                self._begin_stats()
        for call in asked:
            call.reply(result)

    def load(self, call: OperationCall, model: str, version: int | None) -> None:
        """Reply the model's entries once the load has ended."""
        self.loader.load(model, version, lambda error: self._reply_entries(call, model, error))

    def unload(self, call: OperationCall, model: str, version: int | None) -> None:
        """Reply the model's entries once admitted requests are answered."""
        self.loader.unload(model, version, lambda error: self._reply_entries(call, model, error))

    def _reply_entries(self, call: OperationCall, model: str, error: EdgeRuntimeError | None) -> None:
        if error is not None:
            call.reply(error)
            return
        call.reply([entry for entry in self._table.listing() if entry["name"] == model])

    def _metadata_after_load(
        self, call: OperationCall, model: str, version: int | None, failed: EdgeRuntimeError | None
    ) -> None:
        try:
            if failed is not None:
                raise failed
            call.reply(self._described(model, version, call.max_frame_bytes))
        except EdgeRuntimeError as error:
            call.reply(error)

    def _described(self, model: str, version: int | None, max_frame_bytes: int) -> dict[str, Any]:
        """The metadata of the Open Inference Protocol with the two limits that a client needs."""
        servable: Servable = self._table.resolve(model, version)
        versions = [each.number for each in self._table.live() if each.model == servable.model]
        described: dict[str, Any] = {
            "name": servable.model,
            "versions": [str(number) for number in sorted(versions)],
            "platform": servable.layouts.narrow.backend,
            "inputs": [_tensor(spec) for spec in servable.spec.inputs],
            "outputs": [_tensor(spec) for spec in servable.spec.outputs],
            "version": servable.number,
            "batches": servable.batches,
            "max_batch_rows": servable.max_rows,
            "max_frame_bytes": max_frame_bytes,
        }
        if servable.steps is not None:
            described["steps"] = steps_fields(servable.steps)
            described["forms"] = [
                {
                    "inputs": [_tensor(spec) for spec in each.spec.inputs],
                    "outputs": [_tensor(spec) for spec in each.spec.outputs if not spec.is_optional],
                }
                for form, each in servable.forms.items()
                if form.answers and form.kind != "tensor"
            ]
        if servable.chain is not None:
            described |= servable.chain.fields()
        if servable.about.offered is not None:
            described["preset"] = servable.about.offered
        if servable.about.conversion is not None:
            described["conversion"] = servable.about.conversion.report
        return described

    # ---- updates: `answer` has checked that they are configured ------------------------------------------------------

    @property
    def _updater(self) -> Updates:
        assert self._updates is not None
        return self._updates

    def update_status(self, call: OperationCall) -> None:
        """Reply the updater's state."""
        call.reply(self._updater.status())

    def update_history(self, call: OperationCall, count: int) -> None:
        """Reply the last events."""
        call.reply(self._updater.history(count))

    def update_check(self, call: OperationCall) -> None:
        """Reply the offers once the check has ended."""
        self._updater.check(call.reply)

    def update_apply(self, call: OperationCall) -> None:
        """Reply the offers once each is installed, refused or put off."""
        self._updater.apply(call.reply)

    def update_import(self, call: OperationCall, folder: str) -> None:
        """Reply as `update_apply`."""
        self._updater.import_folder(folder, call.reply)

    def update_rollback(self, call: OperationCall, model: str) -> None:
        """Reply which release serves now."""
        self._updater.roll_back(model, call.reply)


def _made_apart(name: str, answer: Callable[[], Any]) -> Any:
    """Return the answer, or the error that is sent in its place."""
    try:
        return answer()
    except ConfigError as error:
        return Unsupported(f"{name}: {error.message}")
    except EdgeRuntimeError as error:
        return error
    except Exception as error:
        log.exception("an operation could not be answered", extra={"operation": name})
        return Unsupported(f"{name}: a bug interrupted it; see the log ({type(error).__name__})")


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    described: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    if spec.quantisation is not None:
        described["quantization"] = dict(zip(("scale", "zero_point"), spec.quantisation, strict=True))
    return described
