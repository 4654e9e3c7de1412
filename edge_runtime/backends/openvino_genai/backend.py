"""OpenVINO GenAI: how a language model is loaded in its host, and how it is asked there.

Owns: the pipeline's settings, the size of its cache, reading back device and precision. writer.py has what is done with
it. Only `probe` and `load` import the library, without OpenVINO's conversion tools, which report to a web service.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from edge_runtime.backends.base import Bound, LoadOptions, Probe
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.openvino_genai import BACKEND
from edge_runtime.backends.openvino_genai.writer import Writer, context_of
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.language.messages import (
    LANGUAGE_SPEC,
    ORDERS,
    STEP_FORM,
    STEP_SPEC,
    Begin,
    Orders,
    StepEvents,
    encoded,
    error_of,
    orders_of,
)
from edge_runtime.language.parameters import Parameters
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import Array, Tensors

BLOCK_TOKENS = 32
"""Of the library's cache on a CPU. Source: openvino.genai, block_size of scheduler_config, tried in the tests."""

STREAM_TOKENS = 2048
"""For so many tokens of each stream the cache has room, where no setting says how large it is."""

PLAIN_TOKENS = 16
"""Most tokens of a run in the model's own form: warm-up, golden inputs and self checks ask it, clients never."""


def import_genai() -> ModuleType:
    """Import the library. Raises BackendUnavailable."""
    return import_library("openvino_genai", BACKEND, without=("openvino.tools.ovc",))


def prepare_openvino_genai() -> None:
    """Import the library, so that forked processes share it; starts no thread."""
    import_genai()


class OpenVinoGenaiBackend:
    """Runs a language model as `optimum-cli export openvino` writes it, on the CPU, always in a host."""

    declaration = BACKEND

    def probe(self) -> Probe:
        """Find the library."""

        def find() -> tuple[str, tuple[str, ...]]:
            return import_genai().get_version(), ("CPU",)

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> LanguageInstance:
        """Compile a model, and make its cache. Raises LoadFailed, BackendUnavailable."""
        library = import_genai()
        folder = artifact.parent
        table: Any = options.language or {}
        streams, prefill = table.get("max_streams", 8), table.get("prefill_tokens", 128)
        context = context_of(folder)
        blocks = -(-STREAM_TOKENS // BLOCK_TOKENS) * streams
        scheduler = library.SchedulerConfig()
        scheduler.num_kv_blocks = blocks
        scheduler.max_num_batched_tokens = max(prefill, streams)
        scheduler.max_num_seqs = streams
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = table.get("prefix_caching", True)
        properties = {"INFERENCE_NUM_THREADS": options.threads, "ENABLE_CPU_PINNING": False, **options.extra}

        def make() -> Any:
            return library.ContinuousBatchingPipeline(str(folder), scheduler, options.device or "CPU", properties)

        growth = watch_growth(sum(file.stat().st_size for file in folder.glob("*.bin")))
        try:
            writer = Writer(
                library,
                make,
                context=context or blocks * BLOCK_TOKENS,
                prefill_tokens=scheduler.max_num_batched_tokens,
                block_tokens=BLOCK_TOKENS,
                blocks=blocks,
                max_tokens=table.get("max_tokens"),
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise LoadFailed(f"OpenVINO GenAI cannot load {artifact.name}: {error}"[:600]) from error
        return LanguageInstance(writer, options.device or "CPU", growth())


class LanguageInstance:
    """A loaded language model: in its own form an answer a run, in STEP_FORM a step of all answers a run."""

    backend = BACKEND.name
    spec = LANGUAGE_SPEC
    concurrency = 1
    precision = ""

    def __init__(self, writer: Writer, device: str, memory_bytes: int) -> None:
        self.device = device
        self.memory_bytes = memory_bytes
        self.step_form = StepForm(writer)
        self._writer: Writer | None = writer

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Write one answer, greedily, of at most PLAIN_TOKENS. Raises RunFailed, and the caller's faults."""
        if self._writer is None:
            raise RunFailed("the instance is closed")
        given = {name: inputs[name][0] if name in inputs else b"" for name in ("text", "chat")}
        text = given["text"]
        begin = Begin(
            0,
            text if isinstance(text, bytes) else text.encode(),
            None,
            Parameters(max_tokens=PLAIN_TOKENS, temperature=0.0, seed=0),
        )
        written, last = "", None
        orders = Orders((begin,))
        while last is None:
            for event in self._writer.step(orders).events:
                if event.code:
                    raise error_of(event)
                written += event.text
                last = event if event.is_last else None
            orders = Orders(live=(0,))
        values: dict[str, Array] = {
            "text": np.array([written.encode()], object),
            "finish_reason": np.array([last.finish_reason.encode()], object),
            "usage": np.array([last.prompt_tokens, last.completion_tokens, last.cached_tokens], np.int32),
            "tool_calls": np.array([msgspec.json.encode(last.tool_calls)], object),
            "logprobs": np.array([b"[]"], object),
        }
        names = outputs if outputs is not None else [each.name for each in self.spec.outputs]
        return [values[name] for name in names]

    def bind(self, max_rows: int) -> Bound | None:
        """Return None: text has no fixed size."""
        del max_rows
        return None

    def close(self) -> None:
        """Drop the writer."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class StepForm:
    """The form in which the daemon asks for a step."""

    form = STEP_FORM
    spec = STEP_SPEC

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Make a step. Raises RunFailed: the orders cannot be read."""
        del outputs
        try:
            orders = orders_of(inputs[ORDERS][0])
        except msgspec.MsgspecError as error:
            raise RunFailed(f"{ORDERS}: {error}") from None
        events: StepEvents = self._writer.step(orders)
        return [np.array([encoded(events)], object)]
