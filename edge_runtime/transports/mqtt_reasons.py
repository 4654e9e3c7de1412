"""Why a broker cannot be reached, in words that say what to do. Pure."""

from __future__ import annotations

import socket as sockets
import ssl

from edge_runtime.config.broker import BrokerAccess
from edge_runtime.errors import ConfigError

CONNECT_LIMIT_S = 5.0
"""For each step of a connection: TCP, TLS, CONNACK, SUBACK. A broker on the site answers in milliseconds."""


def connect_failure(error: Exception, access: BrokerAccess) -> str:
    """Why no connection came about, in words."""
    match error:
        case ConfigError():
            return error.message
        case ssl.SSLCertVerificationError():
            why = f"the broker's certificate is not trusted: {error.verify_message}; check ca_file and the host name"
        case ssl.SSLError():
            said = getattr(error, "reason", None) or error
            why = f"TLS failed: {said}; does the broker want a client certificate, or no TLS?"
        case sockets.gaierror():
            why = f"the name is not known: {error.strerror}"
        case ConnectionResetError() if access.address.is_tls:
            why = "the connection was reset; does the broker speak TLS on this port, and want a client certificate?"
        case TimeoutError():
            why = f"no answer within {CONNECT_LIMIT_S:.0f} s"
        case ConnectionRefusedError():
            why = "nobody listens there; is the broker running?"
        case _:
            why = f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
    return f"{access.address.url}: {why}"


def refusal(reason: str, access: BrokerAccess) -> str:
    """What a CONNACK says, and what may help."""
    advice = {
        "Bad user name or password": "; check username and password_file",
        "Not authorized": "; check username, password_file and the client certificate",
        "Client identifier not valid": "; another device_id may help",
    }.get(reason, "")
    return f"{access.address.url}: the broker refuses the connection: {reason}{advice}"
