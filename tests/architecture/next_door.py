"""Modules that one neighbour alone imports, each with the reason to be a file of its own.

A file is merged with its only reader unless it is another noun. Read by figures.py; held complete by test_figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping

PROGRAM = "a program of its own: a child process runs it by its name"
LIBRARY = "imported late: its library is optional"

REASONS: Mapping[str, str] = {
    "edge_runtime.backends.host_keeper": "imported late: only daemons with hosts need its thread",
    "edge_runtime.backends.host_runner": "one runner and its slot; host_instance has a host's slots and deaths",
    "edge_runtime.backends.host_shared": "one process with many models; host_parent forks and reaps",
    "edge_runtime.backends.onnx_rule": "the table of operators that may run inside, which docs/inside.md leads to",
    "edge_runtime.backends.steps_instance": "imported late: only hosts of models with steps need it",
    "edge_runtime.backends.tensorrt_instance": "one run on the GPU; tensorrt_backend loads engines",
    "edge_runtime.backends.triton_interface": "models import it by Triton's name",
    "edge_runtime.backends.triton_python": "imported late: only models of Triton's python backend need it",
    "edge_runtime.cli.repo_verbs": LIBRARY,
    "edge_runtime.client.grpc_link": LIBRARY,
    "edge_runtime.client.http_link": "imported late: only clients that connect by http:// need it",
    "edge_runtime.client.mqtt_link": "threads and connections; mqtt_client has none",
    "edge_runtime.client.near_misses": "pure: the advice on tensors that do not fit",
    "edge_runtime.daemon.state_lock": "one daemon a state folder, held before anything else is made",
    "edge_runtime.daemon.torchserve_archives": "a thread of its own, only while an archive is fetched",
    "edge_runtime.fleet.camera_child": PROGRAM,
    "edge_runtime.fleet.camera_source": "one of two sources of results: a camera's frames",
    "edge_runtime.fleet.drawn_pictures": "a thread of its own, only where a rule asks for pictures",
    "edge_runtime.fleet.folder_source": "one of two sources of results: files of a folder",
    "edge_runtime.frontend.frigate_boxes": "pure: a model's outputs as Frigate's rows",
    "edge_runtime.serving.chain_steps": "who answers each step and what it costs; chain has one request's way",
    "edge_runtime.serving.engine_builds": "imported late: engines as a kind of build, as conversions.py has the other",
    "edge_runtime.serving.inline_chain": "another way to run a chain: all steps on the caller's thread",
    "edge_runtime.serving.load_threads": "threads and what they loaded; placement has the order of a load's steps",
    "edge_runtime.serving.pipeline_fit": "pure: whether the datatypes and shapes of steps fit",
    "edge_runtime.serving.request_runs": "runs of models that see each request by itself",
    "edge_runtime.transports.mqtt_outbox": "queues that any thread posts to; mqtt_connection has one connection",
    "edge_runtime.transports.zmtp_curve": "imported only where an endpoint has keys: PyNaCl is an extra",
    "edge_runtime.tuning.comparison": "how far a way's answers are from the plain model's",
    "edge_runtime.tuning.measurement": "the load on a daemon; tune has the order of steps",
    "edge_runtime.tuning.other_work": "the benchmark reads it too",
    "edge_runtime.tuning.samples": "the inputs that a tune asks with",
    "edge_runtime.update.observation": "the rule that judges a candidate; rollout has the order of steps",
    "edge_runtime.update.rollout": "one release; updater has one check of all",
    "edge_runtime_converters.boosted_steps": "two libraries' models as steps of a third's, which is read without them",
    "edge_runtime_converters.f16_from_onnx": PROGRAM,
    "edge_runtime_converters.importing.onnx_interface": "a child process runs it: who writes models reads no graph",
    "edge_runtime_converters.importing.optimum_exports": "a reader, found by its name as the others are",
    "edge_runtime_converters.importing.reading": "a child process runs it, and sees nothing but the source",
    "edge_runtime_converters.importing.torchserve_workflows": "several archives in a chain; torchserve has one",
    "edge_runtime_converters.int8_from_onnx": PROGRAM,
    "edge_runtime_converters.onnx_from_keras": PROGRAM,
    "edge_runtime_converters.ort_from_onnx": PROGRAM,
    "edge_runtime_converters.sklearn_columns": "what a model of columns is asked with, apart from how it is written",
    "edge_runtime_converters.skops_files": "the rule for what a file may restore, read as a whole by who attacks it",
    "edge_runtime_converters.tensorrt_from_onnx": PROGRAM,
    "edge_runtime_converters.tree_rows": "which rows reach both sides of a tree's splits",
}
