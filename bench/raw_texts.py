"""Text classification in plain Python, with no server around it: the tokenizer, the raw run, a softmax and the label.

    python raw_texts.py '{"folder": …, "text": …, "layout": "callers", "in_flight": 16, "seconds": 3.0}'

Layouts: `callers` one session with intra-op 1, called by as many threads as there are cores, a text at a time; `batch`
one session with every core, which gets all texts that wait at once. A process of its own each time, as raw.py. Prints
one line of JSON: texts a second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

WARM_S = 0.3
PARTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, slots=True)
class TextRun:
    """What to measure: a folder as Hugging Face's exporters leave it, and the text that is asked."""

    folder: str
    text: str
    layout: Literal["callers", "batch"]
    in_flight: int
    seconds: float


def measure(run: TextRun) -> float:
    """Texts a second."""
    cores = len(os.sched_getaffinity(0))
    callers = cores if run.layout == "callers" else 1
    texts = [run.text] * (1 if run.layout == "callers" else run.in_flight)
    label = _labeller(Path(run.folder), threads=1 if run.layout == "callers" else cores)
    _called(label, texts, callers, WARM_S)
    return _called(label, texts, callers, run.seconds) * len(texts)


def _labeller(folder: Path, threads: int) -> Callable[[Sequence[str]], list[tuple[str, float]]]:
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding()
    labels = json.loads((folder / "config.json").read_text())["id2label"]

    def label(texts: Sequence[str]) -> list[tuple[str, float]]:
        read = tokenizer.encode_batch(list(texts))
        columns: list[list[Any]] = [[each.ids for each in read], [each.attention_mask for each in read]]
        columns.append([each.type_ids for each in read])
        (logits,) = session.run(
            None, {name: np.array(rows, np.int64) for name, rows in zip(PARTS, columns, strict=True)}
        )
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
        best = scores.argmax(axis=1)
        return [(labels[str(index)], float(row[index])) for index, row in zip(best, scores, strict=True)]

    return label


def _called(label: Callable[[Sequence[str]], object], texts: Sequence[str], callers: int, seconds: float) -> float:
    """Calls a second of so many threads."""
    counts = [0] * callers
    began_s = time.perf_counter()
    until_s = began_s + seconds

    def work(index: int) -> None:
        while time.perf_counter() < until_s:
            label(texts)
            counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(callers)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(counts) / (time.perf_counter() - began_s)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(json.dumps(measure(TextRun(**json.loads(sys.argv[1])))))
