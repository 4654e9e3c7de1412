"""A request for inference of the Open Inference Protocol, read from the plain fields that its JSON or protobuf has.

Owns: the meaning of the fields `id`, `parameters`, `inputs` and `outputs`, and their bounds. Knows no model and no
bytes. Pure. Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_runtime.config.settings import LOWEST_PRIORITY
from edge_runtime.doors.open_inference import oip
from edge_runtime.doors.open_inference.named_regions import RegionPart
from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.messages import RAW, RequestHeader, TensorHeader
from edge_runtime.tensors import DATATYPES
from edge_runtime.wire.codec import (
    MAX_DIMENSION,
    MAX_HEADER_ITEMS,
    MAX_ID_BYTES,
    MAX_VERSION,
    sequence_step,
    short,
    tensor_header,
    typed,
)


@dataclass(frozen=True, slots=True)
class OipRequest:
    """A request for inference, read and checked as far as no model is needed.

    id: as sent, None where it was not. input_sizes: for each input, its bytes behind the JSON head; None: its data is
    in the head, or in a region. input_regions: for each input. classes: how many, of each output that is wanted as
    classes. binary: outputs that say whether they are wanted in binary form; binary_default: of the others.
    """

    header: RequestHeader
    id: str | None
    input_sizes: tuple[int | None, ...]
    input_regions: tuple[RegionPart | None, ...]
    output_regions: Mapping[str, RegionPart]
    classes: Mapping[str, int]
    binary: Mapping[str, bool]
    binary_default: bool

    @property
    def is_plain_json(self) -> bool:
        """Whether each output is wanted whole, as JSON."""
        names = self.header.outputs
        is_binary = self.binary_default if names is None else any(map(self.is_binary, names))
        return not is_binary and not self.classes and not self.output_regions

    def is_binary(self, output: str) -> bool:
        """Whether an output is wanted in binary form."""
        return self.binary.get(output, self.binary_default)


def infer_header(
    model: str, version: str | int | None, fields: Mapping[str, Any], *, timeout_ms: float | None = None
) -> OipRequest:
    """Read a request for inference from the decoded JSON or protobuf: id, parameters, inputs and outputs.

    version: as in the path, None or "" for the daemon's choice. timeout_ms: the transport's own; the
    smallest counts. Unknown parameters are the model's, if it reads any. Raises DecodeFailed, TensorMismatch.
    """
    parameters = typed(fields, "parameters", dict, {})
    inputs, sizes, regions = [], [], []
    for item in _tensors(fields, "inputs"):
        own = typed(item, "parameters", dict, {})
        inputs.append(_input(item))
        sizes.append(whole_number(own, oip.BINARY_SIZE))
        regions.append(_region_part(own))
    names: list[str] = []
    output_regions: dict[str, RegionPart] = {}
    classes: dict[str, int] = {}
    binary: dict[str, bool] = {}
    for item in _tensors(fields, "outputs"):
        name = item.get("name")
        if not isinstance(name, str):
            raise DecodeFailed(f"outputs: got name {short(name)}, wanted text")
        if name in names:
            raise DecodeFailed(f"output {short(name)} already exists in request; name each once")
        names.append(name)
        own = typed(item, "parameters", dict, {})
        if not own:
            continue
        if oip.BINARY_OUTPUT in own:
            binary[name] = typed(own, oip.BINARY_OUTPUT, bool, False)
        if count := whole_number(own, oip.CLASSES):
            classes[name] = count
        if part := _region_part(own):
            if name in classes:
                raise DecodeFailed(f"output {short(name)}: got {oip.CLASSES} and {oip.REGION}; wanted one of them")
            output_regions[name] = part
    typed(parameters, RAW, bool, None)
    level = whole_number(parameters, oip.PRIORITY) or 0
    header = RequestHeader(
        model=model,
        version=version_number(version),
        inputs=tuple(inputs),
        parameters={
            key: value
            for key, value in parameters.items()
            if isinstance(value, str | int | float) and key not in oip.PROTOCOLS_OWN
        },
        outputs=tuple(names) or None,
        timeout_ms=_timeout_ms(parameters, timeout_ms),
        queue_timeout_ms=(whole_number(parameters, oip.TIMEOUT_US) or 0) / 1e3 or None,
        priority=min(level, LOWEST_PRIORITY),
        level=level,
        timing=typed(parameters, oip.TIMING, bool, False),
        sequence=sequence_step(parameters, oip.SEQUENCE),
    )
    return OipRequest(
        header,
        _request_id(fields),
        tuple(sizes),
        tuple(regions),
        output_regions,
        classes,
        binary,
        typed(parameters, oip.BINARY_OUTPUTS, bool, False),
    )


def version_number(text: str | int | None) -> int | None:
    """A version as the protocol writes it, in decimal digits; None where there is none. Raises DecodeFailed."""
    if text is None or text == "":
        return None
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= len(str(MAX_VERSION)):
        text = int(text)
    if isinstance(text, str | bool) or not 1 <= text <= MAX_VERSION:
        raise DecodeFailed(f"version: got {short(text)}, wanted a positive integer in digits, or none for the newest")
    return text


def whole_number(parameters: Mapping[str, Any], key: str) -> int | None:
    """A parameter that is a whole number of 0 or more; None where it is absent. Raises DecodeFailed."""
    value: int | None = typed(parameters, key, int, None)
    if value is not None and not 0 <= value <= MAX_DIMENSION:
        if key == oip.PRIORITY and value > 0:
            return MAX_DIMENSION
        raise DecodeFailed(f"{key}: got {short(value)}, wanted a whole number of 0 or more")
    return value


# ---- private --------------------------------------------------------------------------------------------------------


def _tensors(fields: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = typed(fields, key, list, [])
    if len(items) > MAX_HEADER_ITEMS:
        raise DecodeFailed(f"{key}: got {len(items)}, wanted at most {MAX_HEADER_ITEMS}")
    for item in items:
        if not isinstance(item, dict):
            raise DecodeFailed(f"{key}: got {short(item)}, wanted an object with a name")
    return items


def _input(item: Mapping[str, Any]) -> TensorHeader:
    tensor = tensor_header({key: item.get(key) for key in ("name", "datatype", "shape")})
    if tensor.datatype not in DATATYPES:
        name, kind, wanted = short(tensor.name), short(tensor.datatype), ", ".join(DATATYPES)
        raise TensorMismatch(f"input {name}: datatype {kind} is unknown; wanted one of {wanted}")
    return tensor


def _region_part(parameters: Mapping[str, Any]) -> RegionPart | None:
    if not parameters:
        return None
    region: str | None = typed(parameters, oip.REGION, str, None)
    for key, fault in (
        (oip.REGION_SIZE, "Integer overflow detected: byte_size"),
        (oip.REGION_OFFSET, "Invalid offset"),
    ):
        if isinstance(value := parameters.get(key), int) and value > MAX_DIMENSION:
            raise TensorMismatch(f"{fault} for shared memory region: {short(region)}: {key} is {value}")
    nbytes, offset = whole_number(parameters, oip.REGION_SIZE), whole_number(parameters, oip.REGION_OFFSET)
    if (region is None) != (nbytes is None):
        raise DecodeFailed(f"got one of {oip.REGION} and {oip.REGION_SIZE}; a tensor in shared memory has both")
    return RegionPart(region, offset or 0, nbytes) if region is not None and nbytes is not None else None


def _timeout_ms(parameters: Mapping[str, Any], timeout_ms: float | None) -> float | None:
    """The smaller of the transport's timeout and `timeout_ms`."""
    found = [] if timeout_ms is None else [timeout_ms]
    own = parameters.get(oip.TIMEOUT_MS)
    if own is not None:
        if isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own <= MAX_DIMENSION:
            raise DecodeFailed(f"{oip.TIMEOUT_MS}: got {short(own)}, wanted milliseconds, 0 or more")
        found.append(float(own))
    return min(found, default=None)


def _request_id(fields: Mapping[str, Any]) -> str | None:
    request_id: str | None = typed(fields, "id", str, None)
    if request_id is not None and len(request_id) > MAX_ID_BYTES * 4:
        raise DecodeFailed(f"id: got {len(request_id)} characters, wanted at most {MAX_ID_BYTES * 4}")
    return request_id or None  # as Triton, which takes an empty one for none
