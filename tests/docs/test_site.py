"""The site: it is built without a warning and without anything from the network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//|@import\s+url\(["']?http"""
)


@pytest.mark.long  # CI builds it by `make docs`, where a warning is an error
@pytest.mark.timeout(300)
def test_the_site_is_built_clean_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason="`make docs` installs what the site is built with")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 60
    loud = [page.name for page in [*pages, *tmp_path.rglob("*.css")] if LOADED.search(page.read_text(encoding="utf-8"))]
    assert not loud
