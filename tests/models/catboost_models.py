"""CatBoost's files: their beginning, which says what features they have, and a small real one with words."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def cbm_head(categories: int = 0, texts: int = 0, vectors: int = 0) -> bytes:
    """The beginning of a .cbm: its two tables and the lengths of its lists of features, as a flatbuffer. No model."""
    core_fields = struct.pack("<4H", 8, 8, 0, 4)
    core = struct.pack("<iI", 8, 48)
    places = {4: 4, 12: 8, 18: 12}
    tree_fields = struct.pack("<21H2x", 42, 16, *(places.get(field, 0) for field in range(19)))
    trees = struct.pack("<i3I", 44, 12, 12, 12)
    made = struct.pack("<I", 12) + core_fields + core + tree_fields + trees
    made += struct.pack("<3I", categories, texts, vectors)
    return b"CBM1" + struct.pack("<I", len(made)) + made


def words(folder: Path) -> Path:
    """Write `model.cbm`: two classes by a number, a category and a text. Needs catboost and pandas."""
    import catboost
    import pandas as pd

    chance = np.random.default_rng(0)
    rows = pd.DataFrame({
        "age": chance.normal(40, 10, 100).astype(np.float32),
        "city": chance.choice(["Rome", "Oslo", "Lima"], 100),
        "said": [" ".join(chance.choice(["good", "bad", "fine"], 4)) for _ in range(100)],
    })  # fmt: skip
    model = catboost.CatBoostClassifier(
        iterations=4, depth=3, verbose=0, thread_count=1, allow_writing_files=False, random_seed=1
    )
    model.fit(rows, (rows["age"] > 40) ^ (rows["city"] == "Oslo"), cat_features=["city"], text_features=["said"])
    model.save_model(str(folder / "model.cbm"))
    return folder / "model.cbm"
