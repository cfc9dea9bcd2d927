"""Generated pages say what the code says."""

from __future__ import annotations

import pytest

from scripts import gen_reference


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {
        path.relative_to(gen_reference.ROOT / "docs").as_posix(): text for path, text in gen_reference.pages().items()
    }


@pytest.mark.parametrize("name", sorted(gen_reference.PAGES))
def test_a_generated_page_is_up_to_date(pages: dict[str, str], name: str) -> None:
    written = (gen_reference.ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == pages[name], "run: python -m scripts.gen_reference"


def test_the_pages_hold_what_they_are_for(pages: dict[str, str]) -> None:
    """An empty loop would make pages that are up to date and say nothing."""
    assert "| `--coupled-tp N` |" in pages["reference/cli.md"] and "## kvmesh explain" in pages["reference/cli.md"]
    assert "| `metrics_port` | `0` |" in pages["reference/config.md"]
    assert "| `kvmesh_gateway_ttft_seconds` | histogram |" in pages["reference/metrics.md"]
    for text in ("`POST /v1/chat/completions`", "| `functions` | `[]` |", "`put_many("):
        assert text in pages["reference/api.md"], text
    assert "| `Overloaded` | `overloaded` | 429 | RESOURCE_EXHAUSTED | yes |" in pages["reference/api.md"]
    assert "(0001-end-mark-after-acknowledgement.md)" in pages["adr/index.md"]
    assert all(len(text.splitlines()) > 100 for name, text in pages.items() if name.startswith("reference/"))
