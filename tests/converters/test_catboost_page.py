"""The example of docs/python-models.md that serves a CatBoost model with categories answers as CatBoost does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.onnx_from_catboost import convert
from tests.converters.sources import needs

PAGE = Path(__file__).parents[2] / "docs" / "python-models.md"


def test_the_pages_model_of_categories_answers_as_catboost_and_its_refusal_names_the_page(tmp_path: Path) -> None:
    (catboost,) = needs("catboost")
    random = np.random.default_rng(0)
    ages, cities = random.normal(40, 10, 200).astype(np.float32), random.choice(["Rome", "Oslo", "Lima"], 200)
    rows = [[float(age), str(city)] for age, city in zip(ages, cities, strict=True)]
    labels = (ages > 40) + 2 * (cities == "Oslo")
    model = catboost.CatBoostClassifier(iterations=5, verbose=0, allow_writing_files=False, thread_count=1)
    model.fit(rows, labels, cat_features=[1]).save_model(str(tmp_path / "model.cbm"))
    with pytest.raises(ConversionFailed, match="Categories of CatBoost"):
        convert(tmp_path / "model.cbm", tmp_path / "model.onnx", {})
    block = re.search(r"^```python\n# models/rates/1/model\.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    page: dict[str, Any] = {}
    exec(block[1], page)
    inputs = {"age": ages.reshape(-1, 1), "city": np.array([[each.encode()] for each in cities], object)}
    found = page["infer"](page["load"](tmp_path), inputs)["probabilities"]
    np.testing.assert_allclose(found, model.predict_proba(rows), atol=1e-6)
