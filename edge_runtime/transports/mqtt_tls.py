"""TLS towards a broker: whom to trust, and what to show. Versions below 1.2 are not spoken."""

from __future__ import annotations

import ssl

from edge_runtime.config.broker import BrokerAccess
from edge_runtime.errors import ConfigError


class ClosingSocket(ssl.SSLSocket):
    """Closes itself when its handshake fails; paho leaves that to the collector."""

    def _handshake_or_close(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise

    do_handshake = _handshake_or_close


def tls_context(access: BrokerAccess) -> ssl.SSLContext:
    """The context of a client. Raises ConfigError for files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = ClosingSocket
        if access.cert_file is not None:
            context.load_cert_chain(access.cert_file, access.key_file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        names = ", ".join(str(each) for each in (access.ca_file, access.cert_file, access.key_file) if each)
        raise ConfigError(f"mqtt: the certificates cannot be used ({names}): {reason}") from None
    return context
