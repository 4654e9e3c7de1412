"""A model with a language model's inputs and outputs that writes by a script: each part and fault when a test wants it.

The script is JSON in the prompt, or in the last message of a chat: a list of parts. A part is the outputs of one
response (`text`, `finish_reason`, `usage`, `tool_calls`, `logprobs`), or a word: `asked` tells what the model was
asked, `fail` breaks, `endless` writes until its caller has gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import triton_models
from tests.models.triton_models import tensor

SCRIPTED = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            asked = {"parameters": json.loads(request.parameters())}
            for name in ("chat", "text"):
                given = pb_utils.get_input_tensor_by_name(request, name)
                if given is not None and given.as_numpy().size:
                    said = given.as_numpy().reshape(-1)[0].decode()
                    asked[name] = json.loads(said) if name == "chat" else said
            script = asked["text"] if "text" in asked else asked["chat"]["messages"][-1]["content"]
            script = script if isinstance(script, str) else script[0]["text"]
            for part in json.loads(script):
                if part == "endless":
                    while not sender.is_cancelled():
                        sender.send(pb_utils.InferenceResponse(self.outputs(text="x" * 1000)))
                elif part == "fail":
                    error = pb_utils.TritonError("the model broke", pb_utils.TritonError.INTERNAL)
                    sender.send(pb_utils.InferenceResponse(error=error))
                else:
                    part = {"text": json.dumps(asked), "finish_reason": "stop"} if part == "asked" else part
                    sender.send(pb_utils.InferenceResponse(self.outputs(**part)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def outputs(self, text="", finish_reason="", usage=(0, 0, 0), tool_calls=(), logprobs=()):
        def one(name, value):
            return pb_utils.Tensor(name, np.array([value.encode()], object))

        return [
            one("text", text),
            one("finish_reason", finish_reason),
            pb_utils.Tensor("usage", np.array(usage, np.int32)),
            one("tool_calls", json.dumps(list(tool_calls))),
            one("logprobs", json.dumps(list(logprobs))),
        ]
"""


def put_scripted(models: Path, name: str = "scripted") -> Path:
    """Write it into a folder of models, which want `python_models = true`. Returns its folder."""
    outputs = [tensor(each, "STRING", 1) for each in ("text", "finish_reason", "tool_calls", "logprobs")]
    more: dict[str, Any] = {"max_batch_size": 0, "model_transaction_policy": {"decoupled": True}}
    return triton_models.put(
        models,
        name,
        SCRIPTED,
        input=[tensor(each, "STRING", 1, optional=True) for each in ("text", "chat")],
        output=[*outputs, tensor("usage", "INT32", 3)],
        **more,
    )
