"""Texts to labels through a model that declares its tokenizer, beside the same in plain Python."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from bench.makers import BenchModel
from bench.raw_texts import TextRun
from bench.scenarios import HERE, Bench
from bench.servers import BenchError
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.wire.codec import pack_request
from tests.models import bert_models

IN_FLIGHT = 16
SIZE = bert_models.Size(hidden=256, layers=4)
"""About 3 ms for the text on one core, as a distilled model of sentences."""

TEXT = (
    "the film was long and not very good , but anna liked the old house at the river , the cold morning and the train"
)


def text(bench: Bench) -> None:
    """One text of 30 tokens, again and again, 16 in flight: tokenise, run, label."""
    folder = bert_models.classifier(bench.children.folder / "classifier", size=SIZE)
    model = BenchModel("classifier", folder / "model.onnx", (1,), 3)
    daemon, request = bench.daemon(model), _request(bench.children.folder / "text.request")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, daemon.models / model.name / "1" / name)
    daemon.start_and_settle(request)
    for number in bench.rounds("text"):
        ways = {
            "ours": lambda: bench.rate(daemon.endpoint, request, IN_FLIGHT).rate,
            "plain": lambda: max(_plain(folder, layout, bench.seconds) for layout in ("callers", "batch")),
        }
        rates = {way: ways[way]() for way in sorted(ways, reverse=bool(number % 2))}
        bench.figures.add("text.16.ratio", rates["ours"] / rates["plain"])
        bench.figures.add("text.16.rate", rates["ours"])
        bench.figures.add("text.16.plain_rate", rates["plain"])
    daemon.stop()


SCENARIOS = {"text": text}


# ---- private --------------------------------------------------------------------------------------------------------


def _request(path: Path) -> Path:
    """The frames of one request for one text, in load.c's file format."""
    header = pack_request(RequestHeader(model="classifier", inputs=(TensorHeader("text", "BYTES", (1,)),)))
    data = TEXT.encode()
    with path.open("wb") as file:
        for frame in (header, bytes(8), struct.pack("<I", len(data)) + data):
            file.write(struct.pack("I", len(frame)) + frame)
    return path


def _plain(folder: Path, layout: str, seconds: float) -> float:
    """Texts a second of a plain process. Raises BenchError."""
    run = TextRun(str(folder), TEXT, layout, IN_FLIGHT, seconds)  # type: ignore[arg-type]
    found = subprocess.run(
        [sys.executable, str(HERE / "raw_texts.py"), json.dumps(asdict(run))],
        capture_output=True, text=True, timeout=60 + 4 * seconds, check=False,
    )  # fmt: skip
    if found.returncode:
        raise BenchError(f"plain texts, {layout}: {found.stderr.strip()[-500:]}")
    return float(json.loads(found.stdout))
