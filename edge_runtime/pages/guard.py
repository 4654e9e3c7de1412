"""Who may open the page, and what a browser may do with it: the headers of its answers, and the rules of its requests.

Owns: the rules against other web pages that would call this one, show it in a frame, or have a name that DNS turned to
this machine. Pure. Thread: any.
"""

from __future__ import annotations

from edge_runtime.doors.access.rules import PAGE_MARK, DoorAccess, DoorAddress
from edge_runtime.doors.http.head import BadMessage, HttpHead
from edge_runtime.errors import Forbidden

MAX_CALL_BYTES = 64 << 10
"""Of the JSON of a call: names and a token. Inference goes by its own paths."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "media-src 'self' blob:; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)

HEADERS = (
    f"Content-Security-Policy: {POLICY}\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Frame-Options: DENY\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Permissions-Policy: camera=(self), microphone=(), geolocation=()\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Cross-Origin-Opener-Policy: same-origin\r\n"
)
"""Of every answer."""

NOT_KEPT = "Cache-Control: no-store\r\n"
"""Of every answer but files."""


def check_place(address: DoorAddress, access: DoorAccess, host: str | None) -> None:
    """Raise Forbidden where the page is not shown at all: an address off this machine without TLS, or a strange Host.

    host: the header; None: absent.
    """
    if not (address.is_this_machine or address.is_tls):
        raise Forbidden(
            f"the page of this device is shown on this machine, or over TLS, and {address} has neither; set "
            f"{access.key}.cert_file and {access.key}.key_file, or open it by ssh -L"
        )
    if host is not None and not access.is_own_host(address, host):
        raise Forbidden(
            f"Host: got {host[:80]!r}, which is not an address of this door; open the page by its address, or list "
            f"https://NAME in {access.key}.allowed_origins"
        )


def check_call(head: HttpHead, address: DoorAddress) -> None:
    """Raise Forbidden for a request that another web page may have made; BadMessage for its body."""
    headers = head.headers
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    own = f"{'https' if address.is_tls else 'http'}://{headers.get('host', '')}".lower()
    is_foreign = (origin is not None and origin.lower() != own) or site not in {None, "same-origin", "none"}
    if is_foreign:
        raise Forbidden("a page of another origin may not call the page of this device")
    if head.method != "GET" and headers.get(PAGE_MARK) != "1":
        raise Forbidden(f"wanted the header {PAGE_MARK}: 1, which only the page itself sends")
    if head.is_chunked:
        raise BadMessage("wanted Content-Length, got chunks", 411)
    if head.length > MAX_CALL_BYTES:
        raise BadMessage(f"a call of {head.length} bytes; wanted at most {MAX_CALL_BYTES}", 413)
