"""The page of a device: what a browser shows of it, by the operations of the one table."""

from edge_runtime.doors.http.protocols import ProtocolDeclaration

PROTOCOL = ProtocolDeclaration("page", "edge_runtime.pages.protocol:open_protocol")
