"""The docs as a site: `make docs`. Pages are plain Markdown that reads as well in the repository; what only the site
needs is here: its table of contents, and links that leave docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

project = "kvmesh"
html_title = "kvmesh"
extensions = ["myst_parser"]
exclude_patterns: list[str] = []
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions: list[str] = []
suppress_warnings = [
    "myst.header",  # a decision begins with its number
    "misc.highlighting_failure",  # `json` blocks with "..." in them
]
highlight_language = "text"
smartquotes = False  # two dashes are a flag

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False

HERE = Path(__file__).resolve().parent
TREE = {
    "Start": ["quickstart", "concepts", "architecture"],
    "How to": ["howto/index", "howto/*"],
    "Operate": ["operate/index", "operate/troubleshooting", "operate/from-vllm", "operate/*"],
    "Internals": [
        "internals/index",
        "internals/scheduler",
        "internals/handoff",
        "transfer",
        "internals/store",
        "internals/tiers",
        "internals/engine",
        "internals/rpc",
        "internals/*",
    ],
    "Reference": [
        "reference/index",
        "reference/cli",
        "reference/config",
        "reference/metrics",
        "reference/api",
        "reference/*",
    ],
    "Reports": ["reports/index", "conductor-speed", "reports/*"],
    "Decisions": ["adr/index", "adr/*"],
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def entries(patterns: list[str]) -> list[str]:
    """Page names in order, each once; a pattern stands for what no earlier entry named."""
    found: list[str] = []
    for pattern in patterns:
        names = sorted(path.relative_to(HERE).with_suffix("").as_posix() for path in HERE.glob(f"{pattern}.md"))
        found += [name for name in names if name not in found]
    return found


def contents() -> str:
    """The site's table of contents, for the end of the first page."""
    parts = []
    for caption, patterns in TREE.items():
        names = "\n".join(f"/{name}" for name in entries(patterns))
        parts.append(f"```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {caption}\n\n{names}\n```")
    return "\n\n".join(parts)


def at_home(page: Path, text: str) -> str:
    """Links to files outside docs/ become their names: the site does not hold them."""

    def plain(link: re.Match[str]) -> str:
        picture, words, target = link[1], link[2], link[3]
        path = target.partition("#")[0]
        if picture or not path or "://" in target or target.startswith("mailto:"):
            return link[0]
        at = Path(os.path.normpath(page.parent / path))
        if at.is_dir() and at.is_relative_to(HERE):
            return words
        if at.is_relative_to(HERE):
            return link[0]
        name = os.path.relpath(at, HERE.parent)
        return words if name in words else f"{words} (`{name}`)"

    return LINK.sub(plain, text)


def read(app: Any, name: str, source: list[str]) -> None:
    source[0] = at_home(HERE / f"{name}.md", source[0])
    if name == "index":
        source[0] += "\n\n" + contents() + "\n"


def setup(app: Any) -> None:
    app.connect("source-read", read)
