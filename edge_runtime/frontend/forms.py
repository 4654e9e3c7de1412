"""The two forms a request comes in and is answered in: frames with a msgpack header, and one JSON frame.

Owns: what differs between them, and nothing else; infer_frontend.py treats both alike, over whichever
transport they came. Pure. Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.scheduling.queue import Answer
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.tensors import Array, array_to_wire
from edge_runtime.wire import codec


class Form(Protocol):
    """One request in its own form, and how to answer it in the same."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def arrays(self, plan: RequestPlan) -> list[Array]:
        """Its inputs in the model's order. Raises TensorMismatch."""
        ...

    def answer(self, plan: RequestPlan, answer: Answer) -> tuple[Any, ...]:
        """Frames of an answer."""
        ...

    def refusal(self, error: EdgeRuntimeError) -> tuple[Any, ...]:
        """Frames of a refusal or failure."""
        ...

    def result(self, result: Any) -> tuple[Any, ...]:
        """Frames of the answer to an op other than infer."""
        ...


class Frames:
    """A request of several frames; `tensors` are its tensor frames, uncopied or as bytes."""

    __slots__ = ("request_id", "tensors")

    def __init__(self, request_id: bytes, tensors: Sequence[Any] = ()) -> None:
        self.request_id = request_id
        self.tensors = tensors

    @property
    def nbytes(self) -> int:
        """See Form."""
        return sum(len(frame) for frame in self.tensors)

    def arrays(self, plan: RequestPlan) -> list[Array]:
        """See Form. The arrays are views of the frames."""
        plan.check_frames([len(frame) for frame in self.tensors])
        return plan.arrays(self.tensors)

    def answer(self, plan: RequestPlan, answer: Answer) -> tuple[Any, ...]:
        """See Form."""
        selected = plan.select(answer.outputs)
        timing = timing_fields(answer) if plan.wants_timing else None
        return (plan.answer_header(selected, timing), self.request_id, *(array_to_wire(array) for array in selected))

    def refusal(self, error: EdgeRuntimeError) -> tuple[Any, ...]:
        """See Form."""
        return (codec.pack_error(error), self.request_id)

    def result(self, result: Any) -> tuple[Any, ...]:
        """See Form."""
        return (codec.pack_result(result), self.request_id)


class Json:
    """A request of one JSON frame."""

    __slots__ = ("_arrays", "_request_id")

    def __init__(self, request_id: Any, arrays: Sequence[Array] = ()) -> None:
        self._request_id = request_id
        self._arrays = arrays

    @property
    def nbytes(self) -> int:
        """See Form."""
        return sum(array.nbytes for array in self._arrays)

    def arrays(self, plan: RequestPlan) -> list[Array]:
        """See Form."""
        return [self._arrays[index] for index in plan.order]

    def answer(self, plan: RequestPlan, answer: Answer) -> tuple[Any, ...]:
        """See Form."""
        selected = plan.select(answer.outputs)
        headers = plan.tensor_headers([array.shape for array in selected])
        timing = timing_fields(answer) if plan.wants_timing else None
        servable = plan.servable
        outputs = list(zip(headers, selected, strict=True))
        return (codec.pack_json_answer(self._request_id, servable.model, servable.number, outputs, timing),)

    def refusal(self, error: EdgeRuntimeError) -> tuple[Any, ...]:
        """See Form."""
        return (codec.pack_json_error(self._request_id, error),)

    def result(self, result: Any) -> tuple[Any, ...]:
        """See Form."""
        return (codec.pack_json_result(self._request_id, result),)


class Remembered:
    """A form whose refusal, when worth another try, lets the same request come again."""

    def __init__(self, form: Form, forget: Callable[[], None]) -> None:
        self._form = form
        self._forget = forget
        self.nbytes = form.nbytes

    def arrays(self, plan: RequestPlan) -> list[Array]:
        """See Form."""
        return self._form.arrays(plan)

    def answer(self, plan: RequestPlan, answer: Answer) -> tuple[Any, ...]:
        """See Form."""
        return self._form.answer(plan, answer)

    def refusal(self, error: EdgeRuntimeError) -> tuple[Any, ...]:
        """See Form."""
        if error.retryable:
            self._forget()
        return self._form.refusal(error)

    def result(self, result: Any) -> tuple[Any, ...]:
        """See Form."""
        return self._form.result(result)


def timing_fields(answer: Answer) -> dict[str, float]:
    """The `timing` map of a reply (wire v1)."""
    return {
        "queue_ms": round(answer.queue_s * 1e3, 3),
        "run_ms": round(answer.run_s * 1e3, 3),
        "batch_rows": answer.batch_rows,
    }
