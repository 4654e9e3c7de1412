"""TorchServe's workflow archives (`.war`): a chain of models with handlers becomes a pipeline; any other says why not.

Owns: what a workflow's manifest and specification mean. Its functions are code, never run here nor taken; its models
are archives of the store beside it, which torchserve.py reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.importing.plan import Piece, PlannedModel, key_lines, model_name
from edge_runtime_converters.importing.source_folder import SourceFolder

WORKFLOW_MANIFEST = "WAR-INF/MANIFEST.json"

_ADVICE = "write it as pipeline.toml (docs/pipelines.md)"


class _Workflow(Struct, frozen=True, rename="camel"):
    workflow_name: str
    spec_file: str


class _Manifest(Struct, frozen=True):
    """`WAR-INF/MANIFEST.json`, as torch-workflow-archiver writes it."""

    workflow: _Workflow


def planned_workflow(opened: SourceFolder, handlers: Mapping[str, str]) -> PlannedModel:
    """The pipeline that a workflow becomes. handlers: by archive, the model whose handler answers in a host.

    Raises ConversionFailed: why it is none, and what to do.
    """
    path = opened.root / WORKFLOW_MANIFEST
    if not path.is_file():
        raise ConversionFailed(f"holds no {WORKFLOW_MANIFEST}; make it with torch-workflow-archiver")
    workflow = opened.json_as(path, _Manifest).workflow
    spec: dict[str, Any] = opened.yaml_as(opened.inside(workflow.spec_file), dict[str, Any])
    models, dag = spec.get("models"), spec.get("dag")
    if not isinstance(models, dict) or not isinstance(dag, dict):
        raise ConversionFailed(f"{workflow.spec_file}: wanted the tables models and dag")
    archives = {
        str(name): str(each["url"]) for name, each in models.items() if isinstance(each, dict) and "url" in each
    }
    steps = [_model_of(node, archives, handlers) for node in _chain(workflow.spec_file, dag, archives)]
    lines = [f"# Imported from TorchServe, the workflow {model_name(workflow.workflow_name)}."]
    before = {"body": "input.body", "request": "input.request"}
    for number, model in enumerate(steps, start=1):
        lines += ["", "[[step]]", *key_lines({"name": f"step_{number}", "model": model, "inputs": before})]
        # A handler's response headers become the next handler's request headers: it names no parts.
        before = {"body": f"step_{number}.answer", "request": f"step_{number}.response"}
    lines += ["", "[output]", *key_lines({"answer": before["body"], "response": before["request"]})]
    return PlannedModel(
        name=model_name(workflow.workflow_name),
        was="TorchServe workflow",
        pieces=(Piece(place="pipeline.toml", text="\n".join(lines) + "\n"),),
        needs=tuple(dict.fromkeys(steps)),
        notes=(
            "retries and time-outs of its nodes have no meaning here: the request has one deadline for all of them",
        ),
    )


# ---- private --------------------------------------------------------------------------------------------------------


def _chain(spec_file: str, dag: Mapping[Any, Any], archives: Mapping[str, str]) -> list[str]:
    """The nodes of a graph in their order. Raises ConversionFailed: it is not a chain of models."""
    after: dict[str, str] = {}
    for name, following in dag.items():
        node, nodes = str(name), [str(each) for each in following] if isinstance(following, list) else [str(following)]
        if len(nodes) != 1:
            raise ConversionFailed(f"{spec_file}: {node[:80]} leads to {len(nodes)} nodes, and not to one; {_ADVICE}")
        after[node] = nodes[0]
    for node in (*after, *after.values()):
        if node not in archives:
            raise ConversionFailed(
                f"{spec_file}: {node[:80]} is a function of the workflow's own handler, which is code; {_ADVICE}, "
                "with a Python step in its place"
            )
    starts = [node for node in after if node not in after.values()]
    if not after and len(archives) == 1:
        return list(archives)
    if len(starts) != 1 or len(set(after.values())) != len(after):
        raise ConversionFailed(f"{spec_file}: its nodes are not a chain from one beginning to one end; {_ADVICE}")
    found = starts
    while found[-1] in after:
        found = [*found, after[found[-1]]]
    if len(found) != len(after) + 1:
        raise ConversionFailed(f"{spec_file}: its nodes lead in a circle")
    return found


def _model_of(node: str, archives: Mapping[str, str], handlers: Mapping[str, str]) -> str:
    url = archives[node]
    if "/" in url or "\\" in url:
        _refuse(node, url, "is not beside the workflow: nothing is fetched; copy it there, and name the file alone")
    if url not in handlers:
        _refuse(node, url, f"is not there, was not taken, or is served without its handler; {_ADVICE}")
    return handlers[url]


def _refuse(node: str, url: str, why: str) -> NoReturn:
    raise ConversionFailed(f"{node[:80]}: {url[:200]} {why}")
