"""grpcio's asyncio server, which answers every call with the same bytes: what a gRPC door on it could do.

python grpc_echo.py HOST:PORT FILE        FILE: one whole message
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc.aio

NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class EchoHandler(grpc.GenericRpcHandler):
    """Takes every method, with messages as bytes."""

    def __init__(self, answer: bytes) -> None:
        async def echo(request: bytes, context: object) -> bytes:
            del request, context
            return answer

        self._handler = grpc.unary_unary_rpc_method_handler(echo)

    def service(self, call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the one handler."""
        del call_details
        return self._handler


async def serve(address: str, answer: bytes) -> None:
    """Answer until the process is ended."""
    server = grpc.aio.server(options=NO_LIMIT)
    server.add_generic_rpc_handlers((EchoHandler(answer),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]).read_bytes()))
