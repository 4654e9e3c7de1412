"""Writes transformers_numbers.json: how `transformers` itself reads the 200 texts of these tests, and what follows.

    pip install transformers onnxruntime numpy
    python -m tests.contract.text.transformers_numbers

Its own tokenizer of BERT's kind encodes each text, cut at 64 tokens; the model's raw run and a softmax give the scores.
The tests hold the served model to these numbers, and need neither `transformers` nor a network.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.models import bert_models

PAGE = Path(__file__).with_name("transformers_numbers.json")
COUNT = 200


def main() -> None:
    """Write the page."""
    import numpy as np
    import onnxruntime
    import transformers

    with tempfile.TemporaryDirectory() as name:
        folder = bert_models.classifier(Path(name))
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        run = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"]).run
        rows: list[dict[str, Any]] = []
        for text in bert_models.texts(COUNT):
            read = tokenizer(text, truncation=True, return_tensors="np")
            (logits,) = run(None, {key: np.asarray(each, np.int64) for key, each in read.items()})
            scores = bert_models.softmax(logits[0])
            rows.append({"ids": read["input_ids"][0].tolist(), "scores": [round(float(each), 6) for each in scores]})
    said = [json.dumps(row, separators=(",", ":")) for row in rows]
    head = f'{{"transformers": "{transformers.__version__}", "tokenizer": "{type(tokenizer).__name__}", "rows": [\n'
    PAGE.write_text(head + ",\n".join(said) + "\n]}\n")


if __name__ == "__main__":
    main()
