"""The code of docs/howto/store-client.md, run as it stands there."""

from __future__ import annotations

import asyncio
import inspect
import re

import pytest

from tests.support.paths import ROOT
from tests.support.threads import in_thread

GUIDE = ROOT / "docs" / "howto" / "store-client.md"
CODE = re.compile(r"<!-- runs: (\w+) -->\n```python\n(.*?)```", re.DOTALL)


def test_every_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    found = dict(CODE.findall(text))
    assert len(found) == text.count("```python") >= 4, "an example that no test runs"
    with in_thread("a") as store:
        for name, code in found.items():
            space: dict[str, object] = {}
            exec(compile(code, f"{GUIDE.name}: {name}", "exec"), space)
            example = space[name]
            assert callable(example)
            words = [store.address, "machine-a"][: len(inspect.signature(example).parameters)]
            made = example(*words)
            if inspect.iscoroutine(made):
                asyncio.run(made)
    assert "('a',) ()" in capsys.readouterr().out, "who has acknowledged the removal"
