"""Steps with drafts by Triton's kernels in the interpreter: the tokens are those that torch makes one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.engine import capture
from kvmesh.engine.attention import choice
from kvmesh.engine.cpu import native
from tests.engine import test_drafts
from tests.engine.test_drafts import One, alone, drafted
from tests.support.engine.recorded import RerunCapture

Zoo = Callable[[str], Path]


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        ("gpt_oss", False),
        pytest.param("gpt_oss", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", True, marks=pytest.mark.slow),
    ],
)
def test_drafts_make_the_tokens_of_rows_without(
    zoo: Zoo, kind: str, graphs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one row and of six beside each other. Of steps that are replayed a program takes four rows of a
    request, and the graphs are those of drafts."""
    from kvmesh.engine.attention import triton_backend, triton_latent

    if device.type == "cuda":
        pytest.skip("on a GPU tests/gpu does this with the whole engine")
    monkeypatch.setattr(test_drafts, "LONG", 8)
    monkeypatch.setattr(native, "loaded", lambda: False)
    prompt = [9, 8, 7, 9, 8, 11]
    truth = alone(One(zoo(kind), 16), prompt, {})
    monkeypatch.setattr(triton_backend, "PROCESSORS", 1)  # the interpreter runs one program after the other
    monkeypatch.setitem(choice.BACKENDS, "cpu", triton_backend.TritonAttention)
    monkeypatch.setitem(choice.LATENT_BACKENDS, "cpu", triton_latent.TritonLatent)
    one = One(zoo(kind), 16)
    one.pages[20:] = 0  # of the row that nobody began
    attention: Any = one.runner.attention
    filled: list[int] = []
    fill = triton_backend.DecodeTables.fill

    def noted(tables: Any, *args: Any, **named: Any) -> None:
        fill(tables, *args, **named)
        filled.append(tables.queries)

    monkeypatch.setattr(triton_backend.DecodeTables, "fill", noted)
    if graphs:
        monkeypatch.setattr(capture, "CudaCapture", lambda device: RerunCapture())
        with torch.inference_mode():
            one.runner._capture(max_rows=2, max_tokens=0, max_drafts=3)
        assert one.runner.graphs is not None and not one.runner.graphs.failed
        assert (one.runner.graphs.sizes, one.runner.graphs.drafted_sizes) == ((1, 2), (2, 4, 8))
        monkeypatch.setattr(attention, "plan_drafts", None)  # no step is launched
        filled.clear()
    assert drafted(one, prompt, {}, truth, (5, 0)) == truth
    assert set(filled) == {4 if graphs else 8}, "each step has a draft"
