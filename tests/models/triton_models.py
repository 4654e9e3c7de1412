"""Python models as Triton's documentation shows them, in folders as Triton has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format

from edge_runtime.protobufs import from_json, message_class

HEAD = "import json\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"


def tensor(name: str, data_type: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": list(dims), **more}


def put(models: Path, name: str, body: str, toml: str = "", **config: Any) -> Path:
    """Write `NAME/1/model.py`, the usual imports before `body`, and `config.pbtxt` where there is a configuration.

    Returns the folder of the model.
    """
    folder = models / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(HEAD + body)
    if config:
        message = from_json(message_class("inference.ModelConfig"), {"name": name, "backend": "python", **config})
        (folder / "config.pbtxt").write_text(text_format.MessageToString(message))
    if toml:
        (folder / "model.toml").write_text(toml)
    return folder


ADD_SUB = '''
class TritonPythonModel:
    """Adds and subtracts, as the first example of Triton's documentation."""

    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        output0_config = pb_utils.get_output_config_by_name(model_config, "OUTPUT0")
        self.output0_dtype = pb_utils.triton_string_to_numpy(output0_config["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            out_tensor_0 = pb_utils.Tensor("OUTPUT0", (in_0 + in_1).astype(self.output0_dtype))
            out_tensor_1 = pb_utils.Tensor("OUTPUT1", (in_0 - in_1).astype(self.output0_dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[out_tensor_0, out_tensor_1]))
        return responses

    def finalize(self):
        print("Cleaning up...")
'''

IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]
            )
            for request in requests
        ]
"""


def add_sub(models: Path, name: str = "add_sub") -> Path:
    """INPUT0, INPUT1 FP32 [4] -> their sum and difference; one request a run, no rows."""
    ports = {"input": [tensor(f"INPUT{i}", "FP32", 4) for i in range(2)]}
    return put(models, name, ADD_SUB, output=[tensor(f"OUTPUT{i}", "FP32", 4) for i in range(2)], **ports)


def rows(models: Path, name: str, body: str, size: int = 2, kind: str = "FP32", **config: Any) -> Path:
    """Write a model x [rows, size] -> y the same, whose requests run together."""
    ports = {"input": [tensor("x", kind, size)], "output": [tensor("y", kind, size)]}
    return put(models, name, body, **{"max_batch_size": 64, "dynamic_batching": {}, **ports, **config})


REPEATS = """
import threading

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        count, end = int(x[0]), int(x[1])
        for index in range(count):
            is_last = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if end == 1 and index == count - 1 else 0
            y = pb_utils.Tensor("y", np.array([index, count], np.float32))
            sender.send(pb_utils.InferenceResponse([y]), flags=is_last)
        if end == 0:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if end == 2:
            error = pb_utils.TritonError("the end", pb_utils.TritonError.UNSUPPORTED)
            sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Sends x[0] responses; x[1]: how it ends: 0 by a flag alone, 1 by one with the last response, 2 by an error, 3 not."""

CANCELLED = """
class TritonPythonModel:
    seen = 0

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0] == 0:
                y = pb_utils.Tensor("y", np.array([self.seen, 0], np.float32))
                sender.send(pb_utils.InferenceResponse([y]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            while not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(2, np.float32))]))
            self.seen += 1
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Sends responses until its caller has left, and tells a caller with x[0] = 0 how many have."""

WRITES = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text, chat = [pb_utils.get_input_tensor_by_name(request, name) for name in ("text", "chat")]
            if text is not None:
                words = text.as_numpy()[0].decode().split()
            else:
                messages = json.loads(chat.as_numpy()[0])["messages"]
                words = [str(len(messages)), *messages[-1]["content"].split()]
            words += [f"{key}={value}" for key, value in sorted(json.loads(request.parameters()).items())]
            for word in words:
                self.send(sender, word + " ")
            if "bad" in words:
                error = pb_utils.TritonError("a bad word", pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            while "endless" in words and not sender.is_cancelled():
                self.send(sender, ".")
            self.send(sender, "", "stop", pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, sender, text, reason="", flags=0):
        tensors = {"text": text, "finish_reason": reason}
        made = [pb_utils.Tensor(name, np.array([each.encode()], np.object_)) for name, each in tensors.items()]
        sender.send(pb_utils.InferenceResponse(made), flags=flags)
"""
"""Says a text again, or of a chat how many messages there are and the last of them, a word a response; then the
parameters. "bad" ends with an error, "endless" when its caller leaves."""


def writer(models: Path, name: str) -> Path:
    """Write a model as language models are: text or chat in, text and finish_reason out in parts, all STRING [1]."""
    ports = {
        "input": [tensor(each, "STRING", 1, optional=True) for each in ("text", "chat")],
        "output": [tensor(each, "STRING", 1) for each in ("text", "finish_reason")],
    }
    return put(models, name, WRITES, max_batch_size=0, model_transaction_policy={"decoupled": True}, **ports)


def without_batching(folder: Path) -> None:
    """Take dynamic batching out of a model's configuration."""
    path = folder / "config.pbtxt"
    text = path.read_text()
    assert "dynamic_batching {\n}\n" in text
    path.write_text(text.replace("dynamic_batching {\n}\n", ""))


def decoupled(models: Path, name: str, body: str, **config: Any) -> Path:
    """Write a decoupled model that sees each request alone; x: FP32 [2], y: FP32 [2]."""
    folder = rows(models, name, body, max_batch_size=0, model_transaction_policy={"decoupled": True}, **config)
    without_batching(folder)
    return folder
