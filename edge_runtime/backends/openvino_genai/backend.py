"""OpenVINO GenAI: how a language model is loaded in its host, and how it is asked there.

Owns: the pipeline's settings, the size of its cache, reading back device and precision. writer.py has what is done with
it. Only `probe` and `load` import the library, without OpenVINO's conversion tools, which report to a web service.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from edge_runtime.backends.base import Bound, LoadOptions, Probe
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.model_files import check_ir_files
from edge_runtime.backends.openvino_genai import BACKEND
from edge_runtime.backends.openvino_genai.eyes import LANGUAGE_MODEL, NEEDED_GRAPHS, OTHER_GRAPHS, Eyes
from edge_runtime.backends.openvino_genai.writer import OWN, Writer, context_of, reason_of
from edge_runtime.errors import DecodeFailed, LoadFailed, RunFailed
from edge_runtime.language.messages import (
    LANGUAGE_SPEC,
    ORDERS,
    SEEING_STEP_SPEC,
    STEP_FORM,
    STEP_SPEC,
    Begin,
    StepEvents,
    encoded,
    orders_of,
)
from edge_runtime.language.parameters import Parameters
from edge_runtime.language.settings import LanguageSettings
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import Array, Tensors

BLOCK_TOKENS = 32
"""Of the library's cache on a CPU. Source: openvino.genai, block_size of scheduler_config, tried in the tests."""

OTHER_BLOCK_TOKENS = 16
"""On other devices."""

STREAM_TOKENS = 2048
"""For so many tokens of each stream the cache has room, where no setting says how large it is."""

_FILE_PROPERTIES = ("CONFIG_FILE", "PATH", "EXTENSION", "PLUGIN", "MODEL", "ADAPTER", "DIR")
"""Words of properties that name files or other models; a model's own `model.toml` may not set them."""

_CONSTANT = re.compile(rb'element_type="(\w+)"[^>]* size="(\d+)"')
"""The kind and the bytes of a constant in a graph's file."""

_PRECISIONS = {"i8": "int8", "u8": "int8", "i4": "int4", "u4": "int4"}

PLAIN_TOKENS = 16
"""Most tokens of a run in the model's own form: warm-up, golden inputs and self checks ask it, clients never."""


def import_genai() -> ModuleType:
    """Import the library. Raises BackendUnavailable."""
    return import_library("openvino_genai", BACKEND, without=("openvino.tools.ovc",))


def prepare_openvino_genai() -> None:
    """Import the library and map what a model on the CPU needs, so that forked processes share it; starts no thread."""
    openvino = Path(import_genai().openvino.__file__).parent
    for folder, name in (
        (openvino / "libs", "intel_cpu_plugin"),
        (openvino / "libs", "arm_cpu_plugin"),
        (openvino / "libs", "ir_frontend"),
        (openvino.parent / "openvino_tokenizers" / "lib", "tokenizers"),
    ):
        for file in folder.glob(f"libopenvino_{name}.so*"):
            with contextlib.suppress(OSError):  # a load says why
                ctypes.CDLL(str(file))


class OpenVinoGenaiBackend:
    """Runs a language model as `optimum-cli export openvino` writes it, on the CPU, always in a host.

    One whose graph is LANGUAGE_MODEL sees pictures, too.
    """

    declaration = BACKEND

    def probe(self) -> Probe:
        """Find the library."""

        def find() -> tuple[str, tuple[str, ...]]:
            return import_genai().get_version(), ("CPU",)

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> LanguageInstance:
        """Compile a model, and make its cache. Raises LoadFailed, BackendUnavailable."""
        folder = artifact.parent
        sees = artifact.name == LANGUAGE_MODEL
        graphs = (artifact.name, *BACKEND.beside, *(NEEDED_GRAPHS if sees else ()))
        graphs += tuple(name for name in OTHER_GRAPHS if sees and (folder / name).exists())
        files = [check_ir_files(folder / name) for name in graphs]
        precision = _precision_of(artifact, options)
        library = import_genai()
        table = msgspec.convert(msgspec.to_builtins(options.language or {}), LanguageSettings)
        context = context_of(folder)
        device = (options.device or "CPU").upper()
        block_tokens = BLOCK_TOKENS if device == "CPU" else OTHER_BLOCK_TOKENS
        needed = table.max_streams * -(-min(STREAM_TOKENS, context or STREAM_TOKENS) // block_tokens)
        properties = _properties(options)
        eyes = Eyes() if sees else None

        def writer_of(blocks: int) -> Writer:
            scheduler = library.SchedulerConfig()
            scheduler.num_kv_blocks = blocks
            scheduler.max_num_batched_tokens = max(table.prefill_tokens, table.max_streams)
            scheduler.max_num_seqs = table.max_streams
            scheduler.dynamic_split_fuse = True
            scheduler.enable_prefix_caching = table.prefix_caching
            return Writer(
                library,
                lambda: library.ContinuousBatchingPipeline(str(folder), scheduler, device, properties),
                folder=folder,
                context=context or blocks * block_tokens,
                prefill_tokens=scheduler.max_num_batched_tokens,
                streams=table.max_streams,
                block_tokens=block_tokens,
                blocks=blocks,
                max_tokens=table.max_tokens,
                grammar_bytes=table.grammars_mb << 20,
                eyes=eyes,
            )

        growth = watch_growth(sum(each.total_bytes for each in files))
        try:
            writer = writer_of(needed)
            memory_bytes = growth()
            # The cache is made with the first step, and only then is it known what a block of it takes.
            cache_bytes = writer.warm_up()
            if table.kv_cache_mb is not None and (blocks := _blocks(table, cache_bytes // needed)) != needed:
                writer.close()
                writer = writer_of(blocks)
                cache_bytes = writer.warm_up()
        except DecodeFailed as error:
            raise LoadFailed(f"generation_config.json: {error.message}") from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise LoadFailed(f"OpenVINO GenAI cannot load {artifact.name}: {reason_of(error)}") from error
        memory_bytes += cache_bytes
        if eyes is not None:  # what looking takes was allocated with the first pictures
            memory_bytes = max(memory_bytes, growth())
        return LanguageInstance(writer, device, precision, memory_bytes)


def _properties(options: LoadOptions) -> dict[str, Any]:
    """The library's properties. Raises LoadFailed for one that it would read a file for."""
    named = next((key for key in options.extra if any(word in key.upper() for word in _FILE_PROPERTIES)), None)
    if named is not None:
        raise LoadFailed(f"property {named!r} names a file, which a model's options may not do")
    found: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads, "ENABLE_CPU_PINNING": False}
    if options.precision not in ("", "int8"):
        found["INFERENCE_PRECISION_HINT"] = options.precision
    return found | dict(options.extra)


def _blocks(table: LanguageSettings, block_bytes: int) -> int:
    """How many blocks of the cache fit. Raises LoadFailed: none."""
    limit = (table.kv_cache_mb or 0) << 20
    if limit < 2 * block_bytes:
        raise LoadFailed(
            f"kv_cache_mb = {table.kv_cache_mb} holds no two blocks of {block_bytes} bytes; give it "
            f"{-(-2 * block_bytes >> 20) or 1} at least"
        )
    return limit // block_bytes


def _precision_of(artifact: Path, options: LoadOptions) -> str:
    """The precision that most of the weights are stored in. Raises LoadFailed: int8 is wanted, and they are not."""
    stored: Counter[str] = Counter()
    with artifact.open("rb") as file:
        for kind, size in _CONSTANT.findall(file.read()):
            stored[kind.decode()] += int(size)
    found = _PRECISIONS.get(most := max(stored, default="", key=stored.__getitem__), most)
    if options.precision == "int8" and found != "int8":
        raise LoadFailed(f"precision int8 was asked for, and the weights of {artifact.name} are {found}; leave it out")
    return found


class LanguageInstance:
    """A loaded language model: in its own form an answer a run, in STEP_FORM a step of all answers a run."""

    backend = BACKEND.name
    spec = LANGUAGE_SPEC
    concurrency = 1

    def __init__(self, writer: Writer, device: str, precision: str, memory_bytes: int) -> None:
        self.device = device
        self.precision = precision
        self.memory_bytes = memory_bytes
        self.step_form = StepForm(writer)
        self._writer: Writer | None = writer

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Write one answer, greedily, of at most PLAIN_TOKENS. Raises RunFailed, and the caller's faults."""
        if self._writer is None:
            raise RunFailed("the instance is closed")
        text = inputs["text"][0]
        begin = Begin(
            OWN,
            text if isinstance(text, bytes) else text.encode(),
            None,
            Parameters(max_tokens=PLAIN_TOKENS, temperature=0.0, seed=0),
        )
        written, last = self._writer.write(begin)
        values: dict[str, Array] = {
            "text": np.array([written.encode()], object),
            "finish_reason": np.array([last.finish_reason.encode()], object),
            "usage": np.array([last.prompt_tokens, last.completion_tokens, 0], np.int32),  # the same each time
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

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.spec = SEEING_STEP_SPEC if writer.eyes is not None else STEP_SPEC
        self._sees: tuple[Array, ...] = (np.array([b""], object),) if writer.eyes is not None else ()

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Make a step. Raises RunFailed: the orders cannot be read."""
        del outputs
        try:
            orders = orders_of(inputs[ORDERS][0])
        except msgspec.MsgspecError as error:
            raise RunFailed(f"{ORDERS}: {error}") from None
        events: StepEvents = self.writer.step(orders)
        return [np.array([encoded(events)], object), *self._sees]
