"""States that OpenVINO's own graphs keep (ReadValue, Assign), opened as inputs and outputs of the graph.

Owns: the change of a graph that was read, before it is compiled. An infer request would keep one state for all its
runs; as tensors, the states of many sequences run together. Thread: the loader's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import OwnState

PREFIX_IN, PREFIX_OUT = "state/", "next/"


def open_states(library: ModuleType, core: Any, model: Any) -> tuple[OwnState, ...]:
    """Put an input in place of each state that the graph reads, and an output of each that it assigns.

    Raises LoadFailed: one is read or assigned more than once, or its beginning cannot be computed.
    """
    from openvino import opset13

    found = []
    for variable in model.get_variables():
        name: str = variable.info.variable_id
        reads, assigns = (_of(model, kind, name) for kind in ("ReadValue", "Assign"))
        if len(reads) != 1 or len(assigns) != 1:
            raise LoadFailed(
                f"its state {name!r} is read {len(reads)} and assigned {len(assigns)} times; wanted once each"
            )
        read, assign = reads[0], assigns[0]
        partial = read.get_output_partial_shape(0)
        if partial.rank.is_dynamic:
            raise LoadFailed(f"its state {name!r} leaves open how many axes it has")
        initial = _initial(library, core, model, read, name)
        given = opset13.parameter(partial, read.get_output_element_type(0), name=PREFIX_IN + name)
        given.output(0).get_tensor().set_names({PREFIX_IN + name})
        # A tensor of its own: what is assigned may be an output, too.
        following = opset13.convert(assign.input_value(0), read.get_output_element_type(0).get_type_name())
        following.output(0).get_tensor().set_names({PREFIX_OUT + name})
        read.output(0).replace(given.output(0))
        model.remove_sink(assign)
        model.remove_variable(variable)
        model.add_parameters([given])
        model.add_results([opset13.result(following.output(0))])
        found.append(OwnState(PREFIX_IN + name, PREFIX_OUT + name, initial.shape, initial.tobytes()))
    model.validate_nodes_and_infer_types()
    return tuple(found)


def _of(model: Any, kind: str, name: str) -> list[Any]:
    """Return the nodes of a graph that read or assign a state."""
    nodes = [*model.get_ordered_ops(), *model.get_sinks()]
    by_name = {each.get_name(): each for each in nodes if each.get_type_name() == kind}
    return [each for each in by_name.values() if each.get_attributes()["variable_id"] == name]


def _initial(library: ModuleType, core: Any, model: Any, read: Any, name: str) -> Any:
    """Return a state at the beginning of a sequence, of one row: as the graph says it, else zeros."""
    if not read.get_input_size():
        shape = [1 if each.is_dynamic else each.get_length() for each in read.get_output_partial_shape(0)]
        return np.zeros(shape, read.get_output_element_type(0).to_dtype())
    try:
        compiled = core.compile_model(library.Model([read.input_value(0)], model.get_parameters(), name), "CPU")
        sent = [
            np.zeros(
                [1 if each.is_dynamic else each.get_length() for each in port.get_partial_shape()],
                port.get_element_type().to_dtype(),
            )
            for port in compiled.inputs
        ]
        return compiled.create_infer_request().infer(sent)[0].copy()
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoadFailed(f"the beginning of its state {name!r} cannot be computed: {error}") from error
