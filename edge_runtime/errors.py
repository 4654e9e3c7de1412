"""The one tree of errors; each carries the code that goes over the wire.

Owns: codes, whether a caller may try again, and the sentence a person reads. Raised everywhere, turned into a reply in
three places only (I/O loop, worker loop, update loop). Codes are wire v1 and never change (docs/architecture.md, Wire).
"""

from __future__ import annotations

MAX_ERROR_CHARACTERS = 2000
"""Of a message: the reasons of several backends, each cut to 600 characters, fit. Names that callers choose, and files
with a thousand faults, do not."""

_END_CHARACTERS = 400
"""Kept of a longer message's end, where it says what to do."""


def shortened(message: str) -> str:
    """Return a message of at most `MAX_ERROR_CHARACTERS`; a longer one loses its middle, and says so."""
    if len(message) <= MAX_ERROR_CHARACTERS:
        return message
    left_out = f" … ({len(message)} characters, not all shown) … "
    return message[: MAX_ERROR_CHARACTERS - _END_CHARACTERS - len(left_out)] + left_out + message[-_END_CHARACTERS:]


class EdgeRuntimeError(Exception):
    """Base of every error this package raises on purpose.

    `code` is stable and on the wire; `retryable` says whether the same request may succeed later; `retry_after_ms`
    is a forecast in milliseconds (None: no forecast). The message says what, got, wanted, and what to do about it,
    in at most `MAX_ERROR_CHARACTERS`.
    """

    code: str = "internal"
    retryable: bool = False

    def __init__(self, message: str, *, retry_after_ms: float | None = None) -> None:
        message = shortened(message)
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms


class RequestError(EdgeRuntimeError):
    """The caller's fault: sending the same request again fails again."""


class DecodeFailed(RequestError):
    """The message is not wire v1: bad or over-long header, missing or over-long id, too many frames or bytes."""

    code = "decode_failed"


class UnreadablePicture(DecodeFailed):
    """A picture or frame is not what the model's declared steps read, or is cut, damaged or too large."""


class UnreadableSeries(DecodeFailed):
    """A series of samples is not what the model's declared steps read: cut, damaged, too short, too long."""


class UnreadableSnapshot(DecodeFailed):
    """A sequence cannot begin from what was sent: it is not a snapshot, or another model's, changed or cut."""


class Unsupported(RequestError):
    """Understood, but not offered: another protocol version, an unknown op, a datatype the backend lacks."""

    code = "unsupported"


class Unauthenticated(RequestError):
    """The door wants a token, and the request has none that it knows."""

    code = "unauthenticated"


class Forbidden(RequestError):
    """Not allowed here: a control op on an infer endpoint, a reply topic outside the allowed prefixes."""

    code = "forbidden"


class LoadsNotAsked(Forbidden):
    """This daemon's settings say that models are loaded and unloaded by no request."""


class ModelNotFound(RequestError):
    """No such model, or the named version is absent."""

    code = "model_not_found"


class TensorMismatch(RequestError):
    """Tensors do not fit the model's specs: names, datatypes, shapes, rows, number or length of frames."""

    code = "tensor_mismatch"


class SequenceLost(RequestError):
    """The sequence that a request continues is not known: it ended, was idle for too long, or its host died."""

    code = "sequence_lost"


class PromptTooLong(TensorMismatch):
    """The prompt, with what is to be written at least, is more tokens than the language model's context holds."""


class UnreadableText(TensorMismatch):
    """An element of a BYTES tensor is not UTF-8, and the library that runs the model takes text only."""


class Refused(EdgeRuntimeError):
    """The daemon is healthy, but not for this request at this moment."""

    retryable = True


class RegionNotFound(TensorMismatch):
    """No shared memory is registered under this name."""


class RegionExists(TensorMismatch):
    """Shared memory is registered under this name already."""


class RegionNotOpened(DecodeFailed):
    """No shared memory of the machine has this key, or it may not be opened."""


class NotReady(Refused):
    """The model is known but loading, unloaded or failed; the message carries the reason."""

    code = "not_ready"


class NotServed(NotReady):
    """The model is known, and does not come by itself: it is unloaded, or failed to load."""


class QueueFull(Refused):
    """The queue's bound in rows or bytes is reached."""

    code = "queue_full"


class DeadlineUnmeetable(Refused):
    """The forecast finish is after the deadline, so the request was refused before any work was done on it."""

    code = "deadline_unmeetable"


class Draining(Refused):
    """The daemon is stopping; ask another one, or this one after its restart."""

    code = "draining"


class DeadlineExceeded(Refused):
    """Admitted, but its deadline passed before an answer was there."""

    code = "deadline_exceeded"


class QueueTimeExpired(DeadlineExceeded):
    """It waited in the queue for longer than the model's `[queue]` allows."""


class Cancelled(Refused):
    """Taken back by its own caller (in process only)."""

    code = "cancelled"


class BackendError(EdgeRuntimeError):
    """The device's or the model's fault."""


class RunFailed(BackendError):
    """The backend failed while running this request."""

    code = "run_failed"


class HostEnded(RunFailed):
    """The host that ran this request died, or was killed, before the run ended.

    signal_name: the signal that ended it, such as "SIGSEGV", or its exit status in words. is_outside: a signal that the
    model cannot have caused. was_alone: no other run was on in the host, so the death is this run's. has_begun: False,
    where there was no host to begin it.
    """

    def __init__(
        self,
        message: str,
        *,
        signal_name: str = "",
        is_outside: bool = False,
        was_alone: bool = True,
        has_begun: bool = True,
    ) -> None:
        super().__init__(message)
        self.has_begun = has_begun
        self.signal_name = signal_name
        self.is_outside = is_outside
        self.was_alone = was_alone


class RunTooLong(RunFailed):
    """This run was over its limit, and was ended."""


class CalledTooSoon(RunFailed):
    """A run that no request asked for, such as a warm-up, called another model, which only a request's run may."""


class BackendUnavailable(BackendError):
    """A backend, provider or device that was asked for is not on this host."""

    code = "backend_unavailable"


class LoadFailed(BackendError):
    """A version could not be made ready."""

    code = "load_failed"


class NotBuiltYet(LoadFailed):
    """An engine for this device is being built from the model: it is loaded when that is done, by itself."""


class NotConvertedYet(NotBuiltYet):
    """The model's file is being converted into one that a backend here loads: it is loaded when that is done."""


class WaitsForModels(LoadFailed):
    """A pipeline asks models that are not loaded yet: it is loaded when they are, by itself."""


class ConfigError(EdgeRuntimeError):
    """A setting is wrong; the message names the key's path, the value and the allowed values."""

    code = "config"


class AddressTaken(ConfigError):
    """An address cannot be taken now: another process has it, or the machine has no such address yet; try again."""

    code = "address_taken"
    retryable = True


class StateTaken(ConfigError):
    """Another daemon has the state folder; name another, or try again when it has ended."""

    code = "state_taken"
    retryable = True


class StorageFailed(EdgeRuntimeError):
    """The disk is full, failing or not writable; the message says which content it has now."""

    code = "storage_failed"


class UpdateError(EdgeRuntimeError):
    """An update failed; the serving versions are untouched."""

    code = "update_failed"


class TrustError(UpdateError):
    """The repository's keys did not sign its content: never retried automatically, always reported."""

    code = "untrusted"


class MetadataExpired(TrustError):
    """The signatures have expired by this device's clock: the repository is not maintained, or the clock is wrong."""

    code = "metadata_expired"


class DownloadError(UpdateError):
    """The repository is unreachable, broke the connection, or is too slow; another try may succeed."""

    code = "download_failed"
    retryable = True


class NotPublished(DownloadError):
    """The repository has no such file, or refuses to show it (HTTP 403 and 404)."""

    code = "not_published"


class ReleaseFailed(UpdateError):
    """A release crashes, fails or answers wrongly on this device: it is refused for ever."""

    code = "release_failed"


class PublishError(EdgeRuntimeError):
    """A change of a repository failed; its published content is as before. Raised by the publisher's tool only."""

    code = "publish_failed"


class ConversionFailed(EdgeRuntimeError):
    """A model was not converted; nothing was written. Raised by the converters only."""

    code = "conversion_failed"


WIRE_ERRORS: dict[str, type[EdgeRuntimeError]] = {
    error.code: error
    for error in (
        DecodeFailed, Unsupported, Unauthenticated, Forbidden, ModelNotFound, TensorMismatch, SequenceLost, NotReady,
        QueueFull, DeadlineUnmeetable, Draining, DeadlineExceeded, Cancelled, RunFailed, BackendUnavailable, LoadFailed,
    )
}  # fmt: skip


def error_from_wire(code: str, message: str, retry_after_ms: float | None = None) -> EdgeRuntimeError:
    """Rebuild the exception that a reply describes; a code from a newer daemon becomes the base class."""
    kind = WIRE_ERRORS.get(code)
    if kind is None:
        error = EdgeRuntimeError(message, retry_after_ms=retry_after_ms)
        error.code = code
        return error
    return kind(message, retry_after_ms=retry_after_ms)
