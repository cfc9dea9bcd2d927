"""Any interleaving of decode, rank and time, of models with several cache groups: pages of every group have holders,
every object is what its key says, no page goes while a step or decode needs it, every handoff ends."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.support.prefill.grouped_world import ALL, CHUNK, WINDOW, GroupedWorld

pytestmark = pytest.mark.timeout(600)
TIMES = settings(max_examples=20, stateful_step_count=60, deadline=None)


class Windows(GroupedWorld):
    """As Gemma: half of the layers see a window."""

    groups = (ALL, WINDOW)
    pages, extents = (14, 8), (9, 7)


class WindowAlone(GroupedWorld):
    """As Mistral: no layer sees all."""

    groups = (WINDOW,)
    pages, extents = (9,), (8,)


class Chunks(GroupedWorld):
    """As Llama 4."""

    groups = (ALL, CHUNK)
    pages, extents = (14, 9), (9, 7)


TestStates = GroupedWorld.TestCase
TestStates.settings = TIMES
TestWindows = Windows.TestCase
TestWindows.settings = TIMES
TestWindowAlone = WindowAlone.TestCase
TestWindowAlone.settings = TIMES
TestChunks = Chunks.TestCase
TestChunks.settings = TIMES
