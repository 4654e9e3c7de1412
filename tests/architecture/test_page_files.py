"""A page that shows a file whole shows it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.page_files import PAGES, renewed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_each_file_that_it_names_as_it_is(page: Path) -> None:
    text = page.read_text()
    assert "<!-- file: " in text
    assert renewed(text) == text, "python -m tests.architecture.page_files renews it"
