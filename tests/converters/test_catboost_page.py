"""The example of docs/python-models.md that serves a CatBoost model with embeddings answers as CatBoost does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.converters.sources import needs

PAGE = Path(__file__).parents[2] / "docs" / "python-models.md"


def test_the_pages_model_of_embeddings_answers_as_catboost(tmp_path: Path) -> None:
    catboost, pandas = needs("catboost", "pandas")
    random = np.random.default_rng(0)
    ages, cities = random.normal(40, 10, 200).astype(np.float32), random.choice(["Rome", "Oslo", "Lima"], 200)
    faces = random.normal(size=(200, 3)).astype(np.float32)
    rows = pandas.DataFrame({"age": ages, "city": cities, "face": faces.tolist()})
    labels = (ages > 40) + 2 * (faces[:, 0] > 0)
    model = catboost.CatBoostClassifier(iterations=5, verbose=0, allow_writing_files=False, thread_count=1)
    model.fit(rows, labels, cat_features=["city"], embedding_features=["face"]).save_model(str(tmp_path / "model.cbm"))
    block = re.search(r"^```python\n# models/faces/1/model\.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    page: dict[str, Any] = {}
    exec(block[1], page)
    city = np.array([[each.encode()] for each in cities], object)
    inputs = {"age": ages.reshape(-1, 1), "city": city, "face": faces}
    found = page["infer"](page["load"](tmp_path), inputs)["probabilities"]
    np.testing.assert_allclose(found, model.predict_proba(rows), atol=1e-6)
