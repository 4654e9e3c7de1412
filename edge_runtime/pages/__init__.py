"""The page of a device: what a browser shows of it, by the operations of the one table."""

from edge_runtime.cli.verbs import Verb
from edge_runtime.doors.http.protocols import ProtocolDeclaration
from edge_runtime.operations import OperationAnswer

PROTOCOL = ProtocolDeclaration("page", "edge_runtime.pages.protocol:open_protocol")
OVERVIEW = OperationAnswer("overview", "edge_runtime.pages.answers:overview", door="http")
HISTORY = OperationAnswer("history", "edge_runtime.pages.answers:history", door="http")
EVENTS = OperationAnswer("events", "edge_runtime.pages.answers:events", door="http")
DOCTOR = OperationAnswer("doctor", "edge_runtime.pages.answers:doctor", door="http", apart=True)
TUNING = OperationAnswer("tuning", "edge_runtime.pages.answers:tuning", door="http")
EXAMPLE = OperationAnswer("example", "edge_runtime.pages.answers:example", door="http", apart=True)
VERB = Verb("doctor", "tell how the device is and what happened last, for a report too", "edge_runtime.pages.command")
