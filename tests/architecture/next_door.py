"""Modules that one neighbour alone imports, each with the reason to be a file of its own.

A file is merged with its only reader unless it is another noun. Read by figures.py; held complete by test_figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping

PROGRAM = "a program of its own: a child process runs it by its name"
LIBRARY = "imported late: its library is optional"

REASONS: Mapping[str, str] = {
    "edge_runtime.builds.build_store": "the thread that builds; promotions loads what it built",
    "edge_runtime.builds.conversions": "imported late: only where a file is converted",
    "edge_runtime.hosts.form_instance": "one form of a model as an instance; instance has the host of all",
    "edge_runtime.hosts.keeper": "imported late: only daemons with hosts need its thread",
    "edge_runtime.hosts.shared_child": "one process with many models; host_parent forks and reaps",
    "edge_runtime.triton.interface": "models import it by Triton's name",
    "edge_runtime.doors.http.joined": "a call as several requests, and their end; frontend has the way of one",
    "edge_runtime.openai.rerank": "another body and answer than embeddings has; protocol has the paths",
    "edge_runtime.tensorflow_serving.message": "pure: bodies as tensors, outputs as answers; protocol has the paths",
    "edge_runtime.torchserve.archives": "a thread and what it fetches; inference has the calls",
    "edge_runtime.torchserve.message": "pure: bodies and answers in TorchServe's words; inference has the paths",
    "edge_runtime.doors.mqtt.link": "threads and connections; mqtt_client has none",
    "edge_runtime.client.near_misses": "pure: the advice on tensors that do not fit",
    "edge_runtime.daemon.state_lock": "one daemon a state folder, held before anything else is made",
    "edge_runtime.plugin_trials": "imported late: only where plug-ins are in use",
    "edge_runtime.site.camera_child": PROGRAM,
    "edge_runtime.site.cameras": "pure: which camera a rule means; results has rules and their threads",
    "edge_runtime.site.drawing_child": PROGRAM,
    "edge_runtime.site.camera_source": "one of two sources of results: a camera's frames",
    "edge_runtime.site.drawn_pictures": "a thread of its own, only where a rule asks for pictures",
    "edge_runtime.site.folder_source": "one of two sources of results: files of a folder",
    "edge_runtime.frigate.boxes": "pure: a model's outputs as Frigate's rows",
    "edge_runtime.pipelines.chain": "one request's way through the steps; loading has a version's way to answer",
    "edge_runtime.pipelines.chain_steps": "who answers each step and what it costs; chain has one request's way",
    "edge_runtime.backends.onnx.traced_values": "the shapes and the cost of a graph's values; rule has the operators",
    "edge_runtime.pipelines.inline_chain": "another way to run a chain: all steps on the caller's thread",
    "edge_runtime.models.load_threads": "threads and what they loaded; placement has the order of a load's steps",
    "edge_runtime.pipelines.fit": "pure: whether the datatypes and shapes of steps fit",
    "edge_runtime.pipelines.loading": "found by its name, in the table of a folder's files",
    "edge_runtime.pipelines.upkeep": "when live pipelines are looked at again; loading makes one",
    "edge_runtime.triton.ensembles": "imported late: only where a config.pbtxt is an ensemble's",
    "edge_runtime.doors.mqtt.outbox": "queues that any thread posts to; mqtt_connection has one connection",
    "edge_runtime.doors.zmq.curve": "imported only where an endpoint has keys: PyNaCl is an extra",
    "edge_runtime.tracks.assignment": "pure: pairs of the largest weight, whatever is paired",
    "edge_runtime.tracks.motion": "pure: the arithmetic of a filter; tracker has the order of steps",
    "edge_runtime.tracks.watch": "pure: who is where and what happened; stage has how that looks in results",
    "edge_runtime.tuning.comparison": "how far a way's answers are from the plain model's",
    "edge_runtime.tuning.measurement": "the load on a daemon; tune has the order of steps",
    "edge_runtime.tuning.other_work": "the benchmark reads it too",
    "edge_runtime.tuning.samples": "the inputs that a tune asks with",
    "edge_runtime.updates.mirror": "the copies that a candidate runs; observation judges them",
    "edge_runtime.updates.observation": "the rule that judges a candidate; rollout has the order of steps",
    "edge_runtime.updates.worker": "the thread of updates; opening wires its parts to the core",
    "edge_runtime.updates.rollout": "one release; updater has one check of all",
    "edge_runtime_converters.boosted_steps": "two libraries' models as steps of a third's, which is read without them",
    "edge_runtime_converters.f16_from_onnx": PROGRAM,
    "edge_runtime_converters.importing.importers": "declarations: who lists importers imports no reader",
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
