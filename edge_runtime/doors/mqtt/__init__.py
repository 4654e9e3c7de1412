"""MQTT: the broker's connection, topics, messages, the device's status, and its client."""
