"""MQTT: the broker's connection, topics, messages, the device's status, and its client."""

from edge_runtime.doors.door import TLS_OPTIONS, DoorDeclaration
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.plugins import Option

DOOR = DoorDeclaration(
    "mqtt",
    "edge_runtime.doors.mqtt.door:open_door",
    MqttSettings,
    extra="mqtt",
    brings={"home_assistant": "publish"},
    options=(
        Option(
            "--mqtt",
            "URL",
            "also serve through a broker, mqtt[s]://[user@]host[:port][/DEVICE];"
            " the device's id is else the host's name",
            ("mqtt.url",),
        ),
    ),
    entries=("mqtt",),
    status_fields="edge_runtime.doors.mqtt.status_line:status_fields",
    schemes=("mqtt", "mqtts"),
    form="mqtt[s]://[user@]broker[:port]/DEVICE",
    client="edge_runtime.doors.mqtt.command:connect",
    client_class="MqttClient",
    client_options=(
        Option("--password-file", "FILE", "file with the password for the broker"),
        *TLS_OPTIONS,
        Option("--prefix", "T", "what MQTT topics begin with (default edge)", default="edge"),
    ),
)
