"""New devices: an authority that gives them certificates and configurations, and the device that asks and renews."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb
from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.enrolment.settings import EnrolmentSettings

VERB = Verb(
    "enroll",
    "make this a device of a fleet: certificate, configuration, root of trust",
    "edge_runtime.enrolment.command",
)
AUTHORITY = Verb(
    "authority",
    "give new devices of a fleet what they need: tokens, a server",
    "edge_runtime.enrolment.authority_command",
)
DOOR = DoorDeclaration("enrolment", "edge_runtime.enrolment.door:open_door", EnrolmentSettings, extra="enrolment")
