"""Heads of HTTP requests as calls of the Open Inference Protocol, and of protocols beside it.

Owns: paths and verbs, the headers that change a call, and the inflation of bodies. answer.py writes responses.
Pure. Thread: any.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from edge_runtime.doors.access.rules import DoorAddress
from edge_runtime.doors.http.answer import BINARY, READINESS
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.form import FORM_TYPE, boundary_of, check_picture_type
from edge_runtime.doors.http.head import BadMessage, HttpHead, too_large
from edge_runtime.doors.http.protocols import HttpProtocol, Paths, paths
from edge_runtime.doors.open_inference.operations import Caller
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, Unsupported
from edge_runtime.request.replies import Encoding
from edge_runtime.telemetry.tracing import TRACEPARENT

INFER = "infer"

_MODEL = r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_MEMORY = r"/v2/{}sharedmemory(?:/region/(?P<name>[^/]+))?"

_PATHS: Paths = paths(
    (_MODEL + r"/infer", {"POST": INFER}),
    (_MODEL + r"/(?P<generate>generate|generate_stream)", {"POST": INFER}),
    (r"/v2/health/live", {"GET": "server_live"}),
    (r"/v2/health/ready", {"GET": "server_ready"}),
    (_MODEL + r"/ready", {"GET": "model_ready"}),
    (r"/v2", {"GET": "server_metadata"}),
    (r"/v2/models/stats", {"GET": "model_statistics"}),
    (_MODEL, {"GET": "model_metadata"}),
    (_MODEL + r"/config", {"GET": "model_config"}),
    (_MODEL + r"/stats", {"GET": "model_statistics"}),
    (_MODEL + r"/trace/setting", {"GET": "trace_setting", "POST": "trace_setting"}),
    (r"/v2/repository/index", {"POST": "repository_index"}),
    (r"/v2/repository/models/(?P<name>[^/]+)/load", {"POST": "repository_load"}),
    (r"/v2/repository/models/(?P<name>[^/]+)/unload", {"POST": "repository_unload"}),
    *(
        (_MEMORY.format(kind) + f"/{verb}", {"GET" if verb == "status" else "POST": f"{kind}_shared_memory_{verb}"})
        for kind in ("system", "cuda")
        for verb in ("status", "register", "unregister")
    ),
    (r"/v2/trace/setting", {"GET": "trace_setting", "POST": "trace_setting"}),
    (r"/v2/logging", {"GET": "log_settings", "POST": "log_settings"}),
)
"""Triton's paths: case-sensitive, no slash at their end."""

OPTIONS = "options"
"""The call of a browser that asks what a page may send."""

TEXT_TYPE = "text/plain"

HEAD_LENGTH = "inference-header-content-length"
"""Bytes of the JSON head before the tensors in binary form. 0: the body is one input's data, and nothing else."""

MAX_OIP_HEAD_BYTES = 1 << 20
"""A JSON head whose tensors follow it in binary form: thousands of inputs."""

INFLATED_BYTES = 1 << 20
"""Inflated in one step, some 2 ms."""


@dataclass(slots=True)
class HttpCall:
    """A head, read as a call. refusal: the response where the call cannot be made, None where it can.

    name: the protocol's name of the call; values: the parts of its path. head_bytes: of the JSON before binary tensors,
    None without. is_picture, boundary: the body is a picture, or a form with this boundary; is_text: a text, unless it
    begins as JSON, which pages in browsers send so; else it is JSON. inflates,
    deflates: the content coding of the body and of the answer, None: plain. key: of equal calls in the cache of known
    headers; b"" where each is read anew. callers: by address, who calls. encoding: writes errors and results, and
    answers where the body asks for no other. ignores_body: it is not read. is_json: a body that begins as an object is
    one, with inputs or pictures. protocol: whose it is, None: the Open Inference Protocol's. also: the same head as
    calls of further protocols that answer its path. check: raises an EdgeRuntimeError where the address that it came by
    may not be asked; None: the rules of the door say all.
    """

    name: str = ""
    values: dict[str, str] = field(default_factory=dict)
    refusal: Frames | None = None
    head_bytes: int | None = None
    is_picture: bool = False
    is_text: bool = False
    boundary: bytes | None = None
    inflates: str | None = None
    deflates: str | None = None
    timeout_ms: float | None = None
    key: bytes = b""
    is_json: bool = False
    callers: dict[Hashable, Caller | Frames] = field(default_factory=dict)
    encoding: Encoding = BINARY
    ignores_body: bool = False
    protocol: HttpProtocol | None = None
    also: Sequence[HttpCall] = ()
    check: Callable[[DoorAddress], None] | None = None

    @property
    def takes_oip(self) -> bool:
        """Whether its body is a request for inference of the Open Inference Protocol."""
        return self.name == INFER and "generate" not in self.values and self.protocol is None

    @property
    def version(self) -> int | None:
        """The version in its path."""
        text = self.values.get("version")
        return int(text[:20]) if text else None

    @property
    def takes_pictures(self) -> bool:
        """Whether its Content-Type says that the body is a picture, or a form with pictures."""
        return self.is_picture or self.boundary is not None


def read_call(head: HttpHead, protocols: Sequence[HttpProtocol] = ()) -> HttpCall:
    """Read a head as a call of those of the protocols that answer its path, else of the Open Inference Protocol."""
    found = [(each, *row) for each in protocols if (row := _row(head.path, each.paths)) is not None]
    if found:
        fitting = [row for row in found if head.method in (*row[2], "OPTIONS")]
        call, *also = (_call_of(head, *row) for row in fitting or found[:1])
        call.also = also
        return call
    call = HttpCall()
    try:
        _find(head, call)
        read_headers(head, call)
    except EdgeRuntimeError as error:
        call.refusal = call.encoding.refusal(error, None)
    is_plain_binary = bool(call.head_bytes) and call.deflates is None
    if call.takes_oip and call.inflates is None and (call.head_bytes is None or is_plain_binary):
        call.key = f"{head.path}\0{call.timeout_ms}\0{call.deflates}\0".encode()
        call.is_json = call.head_bytes is None and not call.takes_pictures
    return call


def allowed_page(head: HttpHead) -> bytes:
    """The headers by which a browser lets a web page read a response, or send a request that it asks about (CORS)."""
    lines = [f"Access-Control-Allow-Origin: {head.headers['origin']}", "Vary: Origin"]
    if head.method == "OPTIONS":
        asked = head.headers.get("access-control-request-headers", "")
        lines += ["Access-Control-Allow-Methods: GET, POST", "Access-Control-Max-Age: 600"]
        lines += [f"Access-Control-Allow-Headers: {asked}"] if asked else []
    else:
        told = f"Inference-Header-Content-Length, Retry-After, retry-after-ms, x-should-retry, {TRACEPARENT}"
        lines.append(f"Access-Control-Expose-Headers: {told}")
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


def _row(path: str, rows: Paths) -> tuple[re.Match[str], Mapping[str, str]] | None:
    """The first row of paths that a path is of."""
    return next(((found, calls) for each, calls in rows if (found := each.fullmatch(path)) is not None), None)


def _call_of(head: HttpHead, protocol: HttpProtocol, found: re.Match[str], calls: Mapping[str, str]) -> HttpCall:
    """A head as the call of a protocol whose path it has."""
    call = HttpCall(values=_values(found), protocol=protocol)
    call.encoding = protocol.encoding(call)
    try:
        call.name = _name(head, calls)
        if call.name != OPTIONS:
            protocol.understand(head, call)
            read_headers(head, call)
    except EdgeRuntimeError as error:
        call.refusal = call.encoding.refusal(error, None)
    return call


def _name(head: HttpHead, calls: Mapping[str, str]) -> str:
    """The name of a call by its method. Raises BadMessage."""
    if head.method == "OPTIONS":  # what a browser asks before a page's request, without its token
        return OPTIONS
    if head.method not in calls:
        raise BadMessage(f"got {head.method}, wanted {' or '.join(calls)} for {head.path}", 405)
    return calls[head.method]


def _values(found: re.Match[str]) -> dict[str, str]:
    return {key: unquote(value) for key, value in found.groupdict().items() if value is not None}


def _find(head: HttpHead, call: HttpCall) -> None:
    row = _row(head.path, _PATHS)
    if row is not None:
        found, calls = row
        call.name = _name(head, calls)
        if call.name == OPTIONS:
            return
        if call.name in {"server_ready", "model_ready"}:
            call.encoding = READINESS
        call.values = _values(found)
        return
    wanted = "the protocol's paths begin with /v2"
    if head.path.startswith("/v2/"):
        wanted = (
            "below /v2 there are health/live, health/ready, repository/index (POST; it lists the models), "
            "models/stats, and models/NAME[/versions/N] with its ready, config, stats, infer and generate"
        )
    raise BadMessage(f"there is no {head.path[:200]!r} here; {wanted}", 404)


def read_headers(head: HttpHead, call: HttpCall) -> None:
    """Note what the headers say of a call's body and answer. Raises BadMessage, DecodeFailed, Unsupported."""
    headers = head.headers
    text = headers.get(HEAD_LENGTH)
    if text is not None and call.name == INFER and call.protocol is None:
        if not (text.isascii() and text.isdigit()) or len(text) > 12:
            raise DecodeFailed(f"{HEAD_LENGTH}: got {text[:40]!r}, wanted a whole number of bytes")
        call.head_bytes = int(text)
        if not head.is_chunked and "content-encoding" not in headers and call.head_bytes > head.length:
            raise DecodeFailed(f"{HEAD_LENGTH}: got {call.head_bytes}, and the body has {head.length} bytes")
        head.body_shift = call.head_bytes
    if call.takes_oip and "content-type" in headers:
        _read_content_type(headers["content-type"], call)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in {"gzip", "deflate", "identity", ""}:
        raise Unsupported(f"Content-Encoding: got {coding[:40]!r}, wanted gzip, deflate or none")
    call.inflates = coding if coding in {"gzip", "deflate"} else None
    # Triton compresses answers to inference only, and its asyncio client reads no others compressed.
    if call.name == INFER and "accept-encoding" in headers:
        call.deflates = _accepted(headers["accept-encoding"])
    call.timeout_ms = _timeout_ms(headers)


def _read_content_type(text: str, call: HttpCall) -> None:
    """Note that a body is a picture, a text or a form. All other types are taken for JSON, as Triton does."""
    kind = text.partition(";")[0].strip().lower()
    if kind == FORM_TYPE:
        call.boundary = boundary_of(text)
    elif kind.startswith("image/"):
        check_picture_type(kind)
        call.is_picture = True
    elif kind.startswith("audio/"):
        call.is_picture = True  # it travels as one does
    call.is_text = kind == TEXT_TYPE and call.takes_oip
    if (call.takes_pictures or call.is_text) and call.head_bytes is not None:
        raise DecodeFailed(f"got {HEAD_LENGTH} beside Content-Type: {kind}; wanted one of them")


def _accepted(text: str) -> str | None:
    """The coding that a client takes, gzip before deflate at equal q; None: plain."""
    best: tuple[float, str] | None = None
    for item in text.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            continue
        if name == "*":
            name = "gzip"
        if name in {"gzip", "deflate"} and 0 < weight <= 1 and (best is None or (weight, name) > best):
            best = weight, name
    return best[1] if best is not None else None


def _timeout_ms(headers: Mapping[str, str]) -> float | None:
    found = []
    for name, scale in (("x-request-timeout-ms", 1.0), ("x-request-timeout-seconds", 1e3)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            value = float(text) * scale
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise DecodeFailed(f"{name}: got {text[:40]!r}, wanted a number of 0 or more")
        found.append(value)
    return min(found, default=None)


def inflate(data: bytes | memoryview, max_bytes: int) -> memoryview:
    """A body as it was before gzip or deflate. Raises DecodeFailed; BadMessage for more than `max_bytes`.

    It is inflated in steps, so that a small body that would fill the memory never does.
    """
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
    out = bytearray()
    waiting: bytes | memoryview = data
    try:
        while waiting and not inflater.eof:
            out += inflater.decompress(waiting, INFLATED_BYTES)
            if len(out) > max_bytes:
                raise too_large(len(out), max_bytes)
            waiting = inflater.unconsumed_tail
        if inflater.eof and inflater.unused_data:
            raise DecodeFailed(f"Content-Encoding: {len(inflater.unused_data)} bytes follow the compressed body")
        while not inflater.eof:
            more = inflater.decompress(b"", INFLATED_BYTES)
            if not more:
                raise DecodeFailed("Content-Encoding: the compressed body ends early")
            out += more
            if len(out) > max_bytes:
                raise too_large(len(out), max_bytes)
    except zlib.error as error:
        raise DecodeFailed(f"Content-Encoding: the body cannot be inflated: {error}") from None
    return memoryview(out)
