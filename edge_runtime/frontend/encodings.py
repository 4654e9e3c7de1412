"""The two encodings of replies, the same as of their requests: frames with a msgpack header, and one JSON frame.

Owns: the difference between them; infer_frontend.py treats both alike, over every transport. Pure. Thread: any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from edge_runtime.answers import PICTURE_SIZE, answer_fields
from edge_runtime.errors import EdgeRuntimeError, TensorMismatch
from edge_runtime.scheduling.request import Request
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.tensors import Array, Buffer, array_to_wire
from edge_runtime.wire import codec, json_codec

COPIED_BYTES = 4096
"""A smaller output is copied into its frame: the views that `array_to_wire` makes of one cost more than the copy."""


class Encoding(Protocol):
    """How replies are written: each method returns all frames of one."""

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """The outputs that a request's plan selects."""
        ...

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:
        """A refusal or failure."""
        ...

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:
        """The result of an op other than infer."""
        ...


class FramesEncoding:
    """A msgpack header, the id (bytes), and one frame an output that is not written to shared memory."""

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """Frames of the outputs that its plan selects. Raises TensorMismatch where one is larger than its place."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        timing = timing_fields(request) if plan.wants_timing else None
        header = plan.answer_header(selected, timing)
        if request.destinations:
            return (header, request_id, *_frames_but_destinations(plan, selected, request.destinations))
        return (header, request_id, *[frame_of(array) for array in selected])

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:
        """Frames of an error."""
        return (codec.pack_error(error), request_id)

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:
        """Frames of an op's result."""
        return (codec.pack_result(result), request_id)


class JsonEncoding:
    """One JSON frame, with the id (text, a number or None) inside."""

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """Frames of the outputs that its plan selects."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        headers = plan.tensor_headers([array.shape for array in selected])
        timing = timing_fields(request) if plan.wants_timing else None
        servable = plan.servable
        outputs = list(zip(headers, selected, strict=True))
        words = plan.words(selected)
        more = None if words is None else {"answer": words}
        return (json_codec.pack_json_answer(request_id, servable.model, servable.number, outputs, timing, more=more),)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:
        """Frames of an error."""
        return (json_codec.pack_json_error(request_id, error),)

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:
        """Frames of an op's result."""
        return (json_codec.pack_json_result(request_id, result),)


class JsonPictureEncoding(JsonEncoding):
    """The same for a request that sent pictures: its answer in words, without tensors, but for bare outputs (`raw`)."""

    def __init__(self, *, as_list: bool) -> None:
        """as_list: answer under `answers`, however many there are."""
        self._as_list = as_list

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """Frames of what its outputs say."""
        fields = picture_fields(request, as_list=self._as_list)
        if fields is None:
            return super().answer(request, request_id)
        timing = {"timing": timing_fields(request)} if request.plan.wants_timing else {}
        return (json_codec.dumps({"id": request_id, **fields, **timing}),)


def picture_fields(request: Request, *, as_list: bool) -> dict[str, Any] | None:
    """The answer to pictures in JSON, but its id and timing; None where bare outputs were asked for.

    Outputs of a model that declares none of them stand beside, as tensors.
    """
    plan: RequestPlan = request.plan
    servable = plan.servable
    selected = plan.select(request.outputs)
    answers = plan.answers(selected)
    if answers is None:
        return None
    fields: dict[str, Any] = {"model_name": servable.model, "model_version": str(servable.number)}
    fields |= answer_fields(answers, as_list=as_list)
    if servable.steps is not None and not servable.steps.outputs:
        headers = plan.tensor_headers([array.shape for array in selected])
        outputs = [
            (header, array) for header, array in zip(headers, selected, strict=True) if header.name != PICTURE_SIZE
        ]
        fields["outputs"] = json_codec.outputs_to_json(outputs)
    return fields


def json_answers(plan: RequestPlan) -> json_codec.JsonAnswers | None:
    """What writes the answers of a plan's bursts; None where it makes none."""
    if plan.inline is None:
        return None
    return json_codec.JsonAnswers(plan.servable.model, plan.servable.number, plan.tensor_headers(plan.inline.shapes))


def _frames_but_destinations(
    plan: RequestPlan, selected: Sequence[Array], destinations: Sequence[Array | None]
) -> Iterator[Buffer]:
    """Write outputs to their places in shared memory; give the frames of the others."""
    for index, array, destination in zip(plan.outputs, selected, destinations, strict=True):
        data = frame_of(array)
        if destination is None:
            yield data
            continue
        nbytes = memoryview(data).nbytes
        if nbytes > destination.nbytes:
            name = plan.servable.spec.outputs[index].name
            raise TensorMismatch(f"output {name!r} is {nbytes} bytes, its place has {destination.nbytes}")
        destination[:nbytes] = np.frombuffer(data, np.uint8)


def frame_of(array: Array) -> Buffer:
    """The bytes of an output on the wire."""
    if array.nbytes < COPIED_BYTES and array.dtype.kind in "fiu" and array.dtype.isnative:
        return array.tobytes()
    return array_to_wire(array)


FRAMES: Encoding = FramesEncoding()
JSON: Encoding = JsonEncoding()
_PICTURE, _PICTURES = JsonPictureEncoding(as_list=False), JsonPictureEncoding(as_list=True)


def json_encoding(pictures: json_codec.Pictures | None) -> Encoding:
    """How a JSON request is answered."""
    if pictures is None:
        return JSON
    return _PICTURES if pictures.as_list else _PICTURE


def timing_fields(request: Request) -> dict[str, float]:
    """The `timing` map of a reply (wire v1)."""
    return {
        "queue_ms": round(request.queue_s * 1e3, 3),
        "run_ms": round(request.run_s * 1e3, 3),
        "batch_rows": request.batch_rows,
    }
