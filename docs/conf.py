"""The site of the documents, built by `make docs` with Sphinx and MyST from the repository's root.

The root is the source folder, so the links of README and of each folder's own README hold on the site as they do in the
repository. Every warning is an error: a link to a page, heading or file that is not there ends the build.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

project = "edge-runtime"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "deploy/**.md", "cross/*.md", "demo/*.md", "device_profiles/*.md"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "fixed_sidebar": True, "font_family": "system-ui, sans-serif"}
html_show_copyright = False
html_copy_source = False
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
# Headings get the anchors that GitHub gives them.
myst_heading_anchors = 3
# Plain text, and TOML with `…` for what is left out, are not code of a language.
suppress_warnings = ["misc.highlighting_failure"]

SECTIONS = {
    "Use it": "docs/models docs/serve docs/python-models docs/pipelines docs/inside docs/pictures docs/text docs/sound "
    "docs/language docs/sequences docs/clients docs/shared-memory docs/http docs/page docs/from-triton "
    "docs/from-torchserve docs/mqtt docs/cameras docs/tracks docs/frigate docs/updates docs/convert docs/import "
    "docs/tune docs/heat docs/plugins docs/install docs/gpu docs/scale",
    "Look it up": "docs/numbers docs/rules docs/errors docs/configuration docs/glossary device_profiles/README",
    "Run a fleet": "docs/fleet docs/provisioning docs/tracing deploy/runbook deploy/broker/README "
    "deploy/repository/README deploy/apt/README deploy/engines/README deploy/monitoring/README "
    "deploy/provisioning/README deploy/containers/README deploy/kserve/README",
    "Change it": "docs/architecture CONTRIBUTING cross/README demo/README CHANGELOG",
}
"""The pages in reading order, by the sidebar's headings. A page that is missing here is an error, too."""


def setup(app: Any) -> None:
    """Give the README the sidebar's table of contents, and the site an index.html."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _write_index)


def _add_contents(_app: Any, name: str, source: list[str]) -> None:
    if name == root_doc:
        for title, pages in SECTIONS.items():
            lines = "\n".join(pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n"


def _write_index(app: Any, _error: Exception | None) -> None:
    page = f'<!DOCTYPE html><title>{project}</title><meta http-equiv="refresh" content="0; url={root_doc}.html">'
    Path(app.outdir, "index.html").write_text(page, encoding="utf-8")
