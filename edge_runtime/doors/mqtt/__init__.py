"""MQTT: the broker's connection, topics, messages, the device's status, and its client."""

from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.doors.mqtt.settings import MqttSettings

DOOR = DoorDeclaration(
    "mqtt",
    "edge_runtime.doors.mqtt.door:open_door",
    MqttSettings,
    extra="mqtt",
    brings={"home_assistant": "publish"},
    schemes=("mqtt", "mqtts"),
    client="edge_runtime.doors.mqtt.command:connect",
)
