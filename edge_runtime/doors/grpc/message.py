"""Messages of the Open Inference Protocol over gRPC: requests read, answers written.

Owns: protobuf's bytes where every request passes. A request whose head came before is cut without being decoded, an
answer is put together from bytes. All else uses the classes of doors/grpc/protobuf_messages.py. Pure. Thread: any.

By protobuf's classes alone (6.33, upb) a request of 64 bytes takes as long, 2 to 3 µs, its answer twice as long (2 µs),
and a request of 600 KB 50 to 58 µs in place of 5: they copy each tensor twice, where a cut one is a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edge_runtime.doors.grpc.protobuf_messages import InferRequest, InferResponse
from edge_runtime.doors.open_inference.oip import ANSWER
from edge_runtime.doors.open_inference.operations import OpenInference
from edge_runtime.doors.open_inference.request import OipRequest, infer_header
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import TensorHeader
from edge_runtime.protobufs import parameter, plain, read
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.replies import timing_fields
from edge_runtime.request.request import Request
from edge_runtime.tensors import DATATYPES, Array, Buffer, array_to_wire, element_count
from edge_runtime.wire import json_codec

ID, RAW_INPUT = 0x1A, 0x3A
"""Tags of `id` and `raw_input_contents` in ModelInferRequest: the fields in which requests with one head differ."""

RAW_OUTPUT = b"\x32"
"""Tag of `raw_output_contents` in ModelInferResponse."""

LENGTH_DELIMITED = 2
"""The kind of protobuf field that begins with its length; all fields of ModelInferRequest are of it."""

MAX_VARINT_BYTES = 5
"""Most bytes of a length; messages are shorter than 2 GiB."""

MOST_FIELDS = 64
"""Most fields of a request that is cut; one with more is decoded."""

ENABLE_FINAL, FINAL = "triton_enable_empty_final_response", "triton_final_response"
"""A request's parameter that asks for the mark of the last answer on a stream, and the answer's that is it."""

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""The field of typed contents for each datatype; FP16 and BF16 have none."""


class CutRequest(NamedTuple):
    """A request's bytes, cut. head: all but its id (as field, empty where it has none) and its raw tensors."""

    head: bytes
    id: bytes
    tensors: list[Any]


class ReadRequest(NamedTuple):
    """A decoded request. tensors: as frames, or arrays of the header's shapes where contents are typed."""

    oip: OipRequest
    tensors: Sequence[Any]
    wants_final: bool


def cut_request(data: bytes | memoryview) -> CutRequest | None:
    """Cut a request without decoding it; None for one that is decoded: odd fields, or tensors before other fields.

    The tensors of a view are views.
    """
    size, position, head_end = len(data), 0, -1
    id_start = id_end = 0
    tensors: list[Any] = []
    for _ in range(MOST_FIELDS):
        if position + 1 >= size:
            break
        tag, length = data[position], data[position + 1]
        start = position + 2
        if length & 0x80:
            length, start = _long_varint(data, position + 1)
        end = start + length
        if tag & 0x87 != LENGTH_DELIMITED or end > size:
            return None
        if tag == RAW_INPUT:
            if head_end < 0:
                head_end = position
            tensors.append(data[start:end])
        elif head_end >= 0:
            return None
        elif tag == ID:
            # Repeated as it is: protobuf has to look whether an id that is not ASCII is text at all.
            if id_end or not bytes(data[position:end]).isascii():
                return None
            id_start, id_end = position, end
        position = end
    if position != size:
        return None
    if head_end < 0:
        head_end = size
    if type(data) is not bytes:
        return CutRequest(bytes(data[:id_start]) + bytes(data[id_end:head_end]), bytes(data[id_start:id_end]), tensors)
    return CutRequest(data[:id_start] + data[id_end:head_end], data[id_start:id_end], tensors)


class LargeTensor(NamedTuple):
    """The only tensor of a request that has not come whole. head: as in CutRequest; begin: where it begins in that."""

    head: bytes
    begin: int
    nbytes: int


def find_tensor(first: bytes, length: int) -> LargeTensor | None:
    """The tensor that a request ends with, from its first bytes; None where these do not show it. length: of it all."""
    position, id_start, id_end = 0, 0, 0
    while position + 1 < len(first):
        tag, size, start = first[position], first[position + 1], position + 2
        if size & 0x80:
            if position + 1 + MAX_VARINT_BYTES > len(first):
                break
            size, start = _long_varint(first, position + 1)
        if tag == RAW_INPUT:
            head = first[:id_start] + first[id_end:position]
            return LargeTensor(head, start, size) if start + size == length else None
        if tag & 0x87 != LENGTH_DELIMITED or start + size > len(first):
            break
        if tag == ID:
            id_start, id_end = position, start + size
        position = start + size
    return None


def _long_varint(data: bytes | memoryview, start: int) -> tuple[int, int]:
    """A length, and where it ends; one that no message has where the bytes are none."""
    number = 0
    for index, byte in enumerate(data[start : start + MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return number, start + index + 1
    return len(data), start


def read_request(data: bytes) -> ReadRequest:
    """Decode a request. Raises DecodeFailed, TensorMismatch, Unsupported."""
    message = read(InferRequest, data)
    parameters = {key: parameter(value) for key, value in message.parameters.items()}
    inputs = [
        {
            "name": each.name,
            "datatype": each.datatype,
            "shape": list(each.shape),
            "parameters": {key: parameter(value) for key, value in each.parameters.items()},
        }
        for each in message.inputs
    ]
    fields = {"parameters": parameters, "inputs": inputs, "outputs": [plain(each) for each in message.outputs]}
    if message.id:
        fields["id"] = message.id
    oip = infer_header(message.model_name, message.model_version, fields)
    return ReadRequest(oip, _tensors(message, oip), parameters.get(ENABLE_FINAL) is True)


def _tensors(message: Any, oip: OipRequest) -> list[Any]:
    """The tensors that the message holds, in the order of its inputs that lie in no region."""
    held = [
        (header, item.contents if item.HasField("contents") else None)
        for header, item, region in zip(oip.header.inputs, message.inputs, oip.input_regions, strict=True)
        if region is None
    ]
    raw = message.raw_input_contents
    if not raw:
        return [_typed(header, contents) for header, contents in held]
    if len(raw) != len(held):
        raise TensorMismatch(f"raw_input_contents has {len(raw)} tensors for {len(held)} inputs")
    for header, contents in held:
        if contents is not None:
            raise DecodeFailed(f"input {header.name!r}: got contents beside raw_input_contents; wanted one of both")
    return list(raw)


def _typed(header: TensorHeader, contents: Any) -> Array:
    """An input from its typed contents. Raises TensorMismatch."""
    field = CONTENTS.get(header.datatype)
    if field is None:
        raise TensorMismatch(f"input {header.name!r}: {header.datatype} has no typed contents; use raw_input_contents")
    values = getattr(contents, field) if contents is not None else ()
    wanted = element_count(header.shape)
    if len(values) != wanted:
        raise TensorMismatch(
            f"input {header.name!r}: got {len(values)} elements in {field}, "
            f"wanted {wanted} for shape {list(header.shape)}, or its bytes in raw_input_contents"
        )
    dtype = DATATYPES[header.datatype].dtype
    array: Array = np.empty(wanted, dtype)
    if dtype.kind in "iu" and dtype.itemsize < 4:
        whole = np.array(values, np.int64)
        limits = np.iinfo(np.dtype(dtype.str))
        if wanted and not limits.min <= int(whole.min()) <= int(whole.max()) <= limits.max:
            raise TensorMismatch(f"input {header.name!r}: {field} has a number that is not a {header.datatype}")
        array[:] = whole
    else:
        array[:] = values
    try:
        return array.reshape(header.shape)
    except ValueError as error:
        raise TensorMismatch(f"input {header.name!r}: no array has the shape {list(header.shape)}: {error}") from None


# ---- answers --------------------------------------------------------------------------------------------------------


class GrpcEncoding:
    """An answer as the bytes of a ModelInferResponse; a refusal as the error itself, which becomes a status.

    The id of a reply is a request's field `id` as its bytes, tag included, which an answer repeats.
    """

    def user_id(self, request_id: bytes) -> str:
        """The id as text."""
        text: str = InferRequest.FromString(request_id).id if request_id else ""
        return text

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """The outputs that its plan selects."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        head = _parameters(request, selected) + answer_head(plan, [array.shape for array in selected])
        return (answer_bytes(head, request_id, [array_to_wire(array) for array in selected]),)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:  # noqa: ARG002 (as the protocol)
        """The error."""
        return (error,)

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:  # noqa: ARG002 (as the protocol)
        """The result of a call."""
        return (result,)


class ExtendedEncoding(GrpcEncoding):
    """The same where a request asks for classes, or names shared memory."""

    def __init__(self, protocol: OpenInference, asked: OipRequest) -> None:
        self._protocol = protocol
        self._asked = asked

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """The outputs that it asks for. One that lies in shared memory has an empty tensor, as with Triton."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        outputs = self._protocol.outputs(self._asked, plan, selected)
        head = _parameters(request, selected) + _head(plan, [header for header, _ in outputs])
        return (answer_bytes(head, request_id, [b"" if each is None else array_to_wire(each) for _, each in outputs]),)


PROTOBUF = GrpcEncoding()


def answer_head(plan: RequestPlan, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """An answer's fields but its id and tensors."""
    return _head(plan, plan.tensor_headers(shapes))


def empty_answer(plan: RequestPlan, request_id: bytes) -> bytes:
    """An answer without tensors."""
    return _head(plan, ()) + request_id


def _head(plan: RequestPlan, outputs: Sequence[TensorHeader]) -> bytes:
    servable = plan.servable
    message = InferResponse(model_name=servable.model, model_version=str(servable.number))
    for header in outputs:
        message.outputs.add(name=header.name, datatype=header.datatype, shape=header.shape)
    made: bytes = message.SerializeToString()
    return made


def _parameters(request: Request, selected: Sequence[Array]) -> bytes:
    """The answer's parameters: times, where they are asked for, and its outputs in words, as JSON."""
    plan: RequestPlan = request.plan
    words = plan.words(selected)
    told: dict[str, dict[str, Any]] = {}
    if plan.wants_timing:
        times = timing_fields(request)
        told["batch_rows"] = {"int64_param": times.pop("batch_rows")}
        told |= {name: {"double_param": value} for name, value in times.items()}
    if words is not None:
        told[ANSWER] = {"string_param": json_codec.dumps(words).decode()}
    if not told:
        return b""
    made: bytes = InferResponse(parameters=told).SerializeToString()
    return made


def answer_bytes(head: bytes, request_id: bytes, tensors: Sequence[Buffer]) -> bytes:
    """A whole answer. request_id: as in CutRequest; protobuf reads fields in any order."""
    parts: list[Buffer] = [head, request_id]
    for tensor in tensors:
        parts += (RAW_OUTPUT, varint(memoryview(tensor).nbytes), tensor)
    return b"".join(parts)


def id_field(text: str | None) -> bytes:
    """A request's id as CutRequest has it."""
    return field(ID, text.encode()) if text else b""


def field(tag: int, data: bytes) -> bytes:
    """A field of protobuf that has its length before it."""
    return bytes((tag,)) + varint(len(data)) + data


def varint(number: int) -> bytes:
    """A length as protobuf writes it."""
    if number < 0x80:
        return bytes((number,))
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


CODE = "edge-runtime-code"
"""Trailing metadata of a refusal: its code in errors.py, which is finer than gRPC's statuses; on a stream a parameter
of its message."""

FINAL_MARK = InferResponse(parameters={FINAL: {"bool_param": True}}).SerializeToString()
"""Behind an answer it says that no other follows."""


def stream_answer(answer: bytes) -> bytes:
    """An answer as a message of a stream."""
    return field(0x12, answer)


def stream_error(error: EdgeRuntimeError, request_id: bytes, *, has_code: bool = False) -> bytes:
    """An error as a message of a stream, with the id of its request. has_code: and its code, as a parameter."""
    code = field(0x22, field(0x0A, CODE.encode()) + field(0x12, field(0x1A, error.code.encode()))) if has_code else b""
    return field(0x0A, error.message.encode()) + field(0x12, request_id + code)
