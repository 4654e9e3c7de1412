"""Writes the files that a page shows whole into it: `python -m tests.architecture.page_files` renews all pages.

A page names a file in a comment, `<!-- file: examples/a.py -->`, and a block of code follows. test_page_files.py holds
it.
"""

from __future__ import annotations

import re

from tests.architecture.source_tree import ROOT

PAGES = (ROOT / "docs" / "plugins.md",)

_SHOWN = re.compile(r"<!-- file: (\S+) -->\n```(\w+)\n.*?^```\n", re.DOTALL | re.MULTILINE)


def renewed(text: str) -> str:
    """A page as it should be."""

    def shown(found: re.Match[str]) -> str:
        return f"<!-- file: {found[1]} -->\n```{found[2]}\n{(ROOT / found[1]).read_text()}```\n"

    return _SHOWN.sub(shown, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text()))
