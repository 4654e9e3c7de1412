"""Carries calls of the Open Inference Protocol over gRPC: one channel, each call a stream of its own.

Owns: the channel, and the meaning of its statuses. doors/grpc/protobuf_messages.py has the messages. Thread: any.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from edge_runtime.client import forks
from edge_runtime.client.in_flight import NotBack, closed, closed_before_answer, no_reply
from edge_runtime.doors.grpc.protobuf_messages import METHODS, InferRequest
from edge_runtime.doors.open_inference.client_call import (
    OipCall,
    OipQuestion,
    OipReplies,
    OipReply,
    OipTensor,
    server_error,
)
from edge_runtime.doors.open_inference.oip import ANSWER
from edge_runtime.doors.open_inference.url import OipAccess
from edge_runtime.errors import DecodeFailed, Draining
from edge_runtime.protobufs import plain
from edge_runtime.telemetry.tracing import TRACEPARENT

CODE, PUSHBACK_MS = "edge-runtime-code", "grpc-retry-pushback-ms"
"""Trailing metadata: our code of an error, and gRPC's own key for when to try again."""

WANTS_END, FINAL = "triton_enable_empty_final_response", "triton_final_response"
"""Triton's parameters: of a request that wants the end of its answers marked, and the mark."""

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A closed client has no connection left, and no proxy of the web stands between it and a device.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Trying again is the caller's to decide.
    ("grpc.enable_retries", 0),
)

_STATUS_CODES = {
    "INVALID_ARGUMENT": "tensor_mismatch", "ALREADY_EXISTS": "tensor_mismatch", "OUT_OF_RANGE": "tensor_mismatch",
    "UNAUTHENTICATED": "unauthenticated", "PERMISSION_DENIED": "forbidden", "NOT_FOUND": "model_not_found",
    "RESOURCE_EXHAUSTED": "tensor_mismatch", "CANCELLED": "cancelled", "UNIMPLEMENTED": "unsupported",
    "UNAVAILABLE": "not_ready", "DEADLINE_EXCEEDED": "deadline_exceeded",
}  # fmt: skip
"""Codes of answers that name none, as those of other products; "run_failed" for the rest."""


class GrpcLink:
    """A channel to one server; it connects with the first call, and again when it was lost."""

    def __init__(self, access: OipAccess) -> None:
        self._address = access.address
        self._metadata = (("authorization", f"Bearer {access.token}"),) if access.token else ()
        self._access = access
        self._channel = self._new_channel()
        self._infer = self._channel.unary_unary(
            METHODS["ModelInfer"].path, InferRequest.SerializeToString, METHODS["ModelInfer"].response.FromString
        )
        stream = METHODS["ModelStreamInfer"]
        self._stream = self._channel.stream_stream(
            stream.path, InferRequest.SerializeToString, stream.response.FromString
        )
        self._is_closed = False
        self._has_answered = False
        self._forks = forks.count

    def infer(self, request: OipCall, wait_s: float) -> OipReply:
        """Run a model."""
        is_sequence = "sequence_id" in request.parameters
        metadata = self._metadata_of(request)
        sent = self._send(self._infer, _infer_message(request), wait_s, may_repeat=not is_sequence, metadata=metadata)
        return _answer(sent)

    def stream(self, request: OipCall, wait_s: float, *, is_whole: bool) -> OipReplies:
        """Run a model by ModelStreamInfer. Without a deadline a part is waited for as long as the connection lasts."""
        self.check_process()
        if self._is_closed:
            raise closed()
        message = _infer_message(request)
        message.parameters[WANTS_END].bool_param = True
        try:
            metadata = self._metadata_of(request)
            call = self._stream(iter((message,)), timeout=wait_s if is_whole else None, metadata=metadata)
        except ValueError:  # of a channel that is closed
            raise closed() from None
        return _Messages(self, call, wait_s)

    def ask(self, question: OipQuestion, wait_s: float) -> Any:
        """Return the fields of an operation's answer."""
        name = question.name
        method_name, fields = _fields_of(question)
        method = METHODS[method_name]
        call = self._channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
        found = self._send(call, method.request(**fields), wait_s)
        if name in ("server_live", "server_ready", "model_ready"):
            field = name.rpartition("_")[2]
            return {field: getattr(found, field)}
        if name == "repository_index":
            return [plain(each) for each in found.models]
        return plain(found.config if name == "model_config" else found)

    def close(self) -> None:
        """End every call with ConnectionError. Idempotent."""
        self._is_closed = True
        if self._forks != forks.count:
            return  # the channel is the parent's
        self._channel.close()

    def check_process(self) -> None:
        """Raise RuntimeError in the child of a fork: a channel belongs to the process that made it."""
        if self._forks != forks.count:
            raise forks.crossed()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _metadata_of(self, request: OipCall) -> tuple[tuple[str, str], ...]:
        return self._metadata if request.traceparent is None else (*self._metadata, (TRACEPARENT, request.traceparent))

    def _send(
        self,
        call: Any,
        message: Any,
        wait_s: float,
        *,
        may_repeat: bool = True,
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> Any:
        self.check_process()
        if self._is_closed:
            raise closed()
        end_s = time.monotonic() + wait_s
        try:
            found = call(message, timeout=wait_s, metadata=self._metadata if metadata is None else metadata)
        except grpc.RpcError as error:
            # The library makes a deadline of the wall clock: where that is stepped at this moment, it has passed.
            if may_repeat and _is_late(error) and end_s - time.monotonic() > wait_s / 10:
                return self._send(call, message, end_s - time.monotonic(), metadata=metadata)
            failed = self.error_of(error, wait_s)
            if self._has_answered and isinstance(failed, ConnectionRefusedError):
                failed = NotBack(str(failed))
            raise failed from None
        except ValueError:  # of a channel that is closed
            raise closed() from None
        self._has_answered = True
        return found

    def error_of(self, error: Any, wait_s: float) -> Exception:
        """Return the error of a call that failed."""
        status, text = error.code().name, error.details() or ""
        told = dict(error.trailing_metadata() or ())
        if CODE not in told:
            if self._is_closed:
                return closed_before_answer()
            if status == "DEADLINE_EXCEEDED":
                return no_reply(self._address.url, wait_s)
            if status == "CANCELLED" or "goaway" in text.lower():
                # A server that stops: it cancels what it has not taken, and by HTTP/2 (RFC 9113, 6.8) a stream that
                # ends by its GOAWAY was not processed.
                return Draining(f"{self._address.url} stopped before it took this request; send it again later")
            if status == "UNAVAILABLE" and "connect" in text.lower():
                return ConnectionRefusedError(
                    f"nothing listens at {self._address.url} ({text}); is the daemon started with --grpc?"
                )
            if status == "UNAVAILABLE" and any(word in text.lower() for word in ("socket", "closed", "reset")):
                return ConnectionError(f"{self._address.url}: {text}")
        after_ms = told.get(PUSHBACK_MS, "")
        return server_error(
            str(told.get(CODE, "")),
            text,
            _STATUS_CODES.get(status, "run_failed"),
            float(after_ms) if after_ms.isascii() and after_ms.isdigit() else None,
        )

    def _new_channel(self) -> Any:
        access, address = self._access, self._address
        place = f"unix:{address.path}" if address.path else address.url.partition("://")[2]
        if not address.is_tls:
            return grpc.insecure_channel(place, OPTIONS)
        files = (access.ca_file, access.key_file, access.cert_file)
        contents = [None if file is None else Path(file).read_bytes() for file in files]
        return grpc.secure_channel(place, grpc.ssl_channel_credentials(*contents), OPTIONS)


class _Messages:
    """The answer of ModelStreamInfer, message by message; OipReplies."""

    def __init__(self, link: GrpcLink, call: Any, wait_s: float) -> None:
        self._link = link
        self._call = call
        self._wait_s = wait_s

    def next(self) -> OipReply | None:
        """Wait for the next message. Raises the error that it is."""
        try:
            found = next(self._call, None)
        except grpc.RpcError as error:
            raise self._link.error_of(error, self._wait_s) from None
        if found is None:
            return None
        if found.error_message:
            self.close()
            code = found.infer_response.parameters[CODE].string_param
            raise server_error(code, found.error_message, "run_failed", None)
        reply = _answer(found.infer_response)
        final = bool(reply.parameters.get(FINAL))
        return replace(reply, final=final) if reply.outputs or not final else None

    def close(self) -> None:
        """Cancel it where it has not ended. Idempotent."""
        self._call.cancel()


def _is_late(error: Any) -> bool:
    """Whether the library ended a call at its deadline; an answer of the server's has our code."""
    return error.code().name == "DEADLINE_EXCEEDED" and CODE not in dict(error.trailing_metadata() or ())


def _infer_message(request: OipCall) -> Any:
    message = InferRequest(
        model_name=request.model, model_version="" if request.version is None else str(request.version)
    )
    for name, value in request.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    for name, datatype, shape, data in request.inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(bytes(data))
    for name in request.outputs or ():
        message.outputs.add(name=name)
    return message


def _answer(found: Any) -> OipReply:
    """Raises DecodeFailed for an answer without raw contents."""
    if len(found.raw_output_contents) != len(found.outputs):
        raise DecodeFailed(
            f"the server sent {len(found.raw_output_contents)} raw contents for {len(found.outputs)} outputs"
        )
    outputs = [
        OipTensor(each.name, each.datatype, tuple(each.shape), data)
        for each, data in zip(found.outputs, found.raw_output_contents, strict=True)
    ]
    parameters = plain(found).get("parameters", {})
    return OipReply(found.model_name, found.model_version, outputs, parameters, _words(parameters.get(ANSWER)))


def _words(told: Any) -> Any:
    """The parameter `answer`, of which another server may have its own."""
    try:
        return json.loads(told) if isinstance(told, str) else None
    except ValueError:
        return None


def _fields_of(question: OipQuestion) -> tuple[str, dict[str, Any]]:
    """The method of an operation and the fields of its message."""
    model, version = question.values.get("model") or "", question.values.get("version")
    of_model = {"name": model, "version": "" if version is None else str(version)}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "server_live": ("ServerLive", {}),
        "server_ready": ("ServerReady", {}),
        "model_ready": ("ModelReady", of_model),
        "server_metadata": ("ServerMetadata", {}),
        "model_metadata": ("ModelMetadata", of_model),
        "model_config": ("ModelConfig", of_model),
        "model_statistics": ("ModelStatistics", of_model),
        "repository_index": ("RepositoryIndex", {}),
        "repository_load": ("RepositoryModelLoad", {"model_name": model}),
        "repository_unload": ("RepositoryModelUnload", {"model_name": model}),
    }
    return found[question.name]
