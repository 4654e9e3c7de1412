"""What test_kserve.py has KServe's own package do, in an environment that has it and nothing of ours: ask one model.

`python kserve_client.py HTTP_PORT GRPC_PORT MODEL INPUT` asks MODEL in every way that the clients know, and prints the
answers as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def ask(http: str, grpc: str, model: str, name: str) -> dict[str, Any]:
    rows = np.array([[1, 2]], np.float32)
    told: dict[str, Any] = {}

    def request(*, is_binary: bool) -> InferRequest:
        tensor = InferInput(name, [1, 2], "FP32")
        tensor.set_data_from_numpy(rows, binary_data=is_binary)
        return InferRequest(model, [tensor])

    second, first = InferenceRESTClient(RESTConfig(protocol="v2")), InferenceRESTClient(RESTConfig(protocol="v1"))
    async with InferenceGRPCClient(grpc) as by_grpc:
        told["v2 live"] = await second.is_server_live(http)
        told["v2 ready"] = await second.is_server_ready(http)
        told["v2 model"] = await second.is_model_ready(http, model)
        told["v2 absent"] = await second.is_model_ready(http, "absent")
        for is_binary in (False, True):
            answer = await second.infer(http, request(is_binary=is_binary), model_name=model)
            told[f"v2 infer {'binary' if is_binary else 'JSON'}"] = answer.outputs[0].as_numpy().tolist()
        told["v1 live"] = await first.is_server_live(http)
        told["v1 model"] = await first.is_model_ready(http, model)
        told["v1 infer"] = await first.infer(http, {"instances": rows.tolist()}, model_name=model)
        path = f"{http}/v1/models/{model}:predict"
        told["graph"] = await first.infer(path, {"instances": rows.tolist()}, is_graph_endpoint=True)
        told["grpc live"] = await by_grpc.is_server_live()
        told["grpc ready"] = await by_grpc.is_server_ready()
        told["grpc model"] = await by_grpc.is_model_ready(model)
        told["grpc infer"] = (await by_grpc.infer(request(is_binary=True))).outputs[0].as_numpy().tolist()
    await second.close()
    await first.close()
    return told


if __name__ == "__main__":
    http_port, grpc_port, *words = sys.argv[1:]
    print(json.dumps(asyncio.run(ask(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", *words))))
