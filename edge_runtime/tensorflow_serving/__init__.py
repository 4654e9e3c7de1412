"""TensorFlow Serving's protocol on the HTTP door, which is KServe's first one too."""

from edge_runtime.doors.http.protocols import ProtocolDeclaration

PROTOCOL = ProtocolDeclaration("tensorflow_serving", "edge_runtime.tensorflow_serving.protocol:open_protocol")
