"""The prefill machine finds what is broken on purpose: each of these breaks one promise of the shared pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase as Stage
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvmesh.kvcache.sources import Pulled
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill.blocks import SharedBlocks
from kvmesh.services.prefill.handoff import PrefillHandoff
from kvmesh.services.prefill.handoff_table import HandoffTable
from kvmesh.services.prefill.planner import Wait
from tests.prefill.test_machine import Machine


def pushes_before_the_load(patch: pytest.MonkeyPatch) -> None:
    """The push is told that pages are complete which are only being loaded."""
    admit = HandoffTable.admit

    def broken(self: HandoffTable, handle: int) -> int | Wait:
        found = admit(self, handle)
        self.handoffs[handle].ready_tokens = self.handoffs[handle].cached_tokens
        return found

    patch.setattr(HandoffTable, "admit", broken)


def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A pull that does not end is waited for whatever its timeout."""

    def broken(self: SharedBlocks, h: PrefillHandoff, key: bytes | None = None) -> bool:
        return bool(h.pulls)

    patch.setattr(SharedBlocks, "waits", broken)


def seals_what_did_not_arrive(patch: pytest.MonkeyPatch) -> None:
    pulled = SharedBlocks.pulled

    def broken(self: SharedBlocks, result: Pulled) -> None:
        pulled(self, Pulled(result.ticket, tuple(range(9)), 0, 0))

    patch.setattr(SharedBlocks, "pulled", broken)


def forgets_what_it_pinned(patch: pytest.MonkeyPatch) -> None:
    leave = SharedBlocks.leave

    def broken(self: SharedBlocks, h: PrefillHandoff, *, cancel: bool) -> None:
        if cancel:
            h.pinned = []
        leave(self, h, cancel=cancel)

    patch.setattr(SharedBlocks, "leave", broken)


def seals_pages_that_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    seal = SharedBlocks.seal

    def broken(self: SharedBlocks, keys: tuple[bytes, ...], first: int, pages: Sequence[int]) -> None:
        before = set(self._seals)
        seal(self, keys, first, pages)
        for ticket in set(self._seals) - before:
            self._pool.release(self._seals[ticket].pages)
            self._seals[ticket].pages = ()

    patch.setattr(SharedBlocks, "seal", broken)


def seals_what_is_not_finite(patch: pytest.MonkeyPatch) -> None:
    sealed = SharedBlocks.sealed

    def broken(self: SharedBlocks, rank: int, copied: m.SealCopied) -> None:
        sealed(self, rank, m.SealCopied(copied.ticket, copied.start_ns, copied.end_ns))

    patch.setattr(SharedBlocks, "sealed", broken)


class Tight(Machine):
    """Few pages are soon given to somebody else: what is broken shows after fewer steps."""

    pages = 6


class Tightest(Machine):
    """... at once; but few prompts get so far that a seal is answered."""

    pages = 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "breakage",
    [
        pushes_before_the_load,
        waits_for_ever,
        seals_what_did_not_arrive,
        forgets_what_it_pinned,
        seals_pages_that_nobody_holds,
        seals_what_is_not_finite,
    ],
    ids=lambda breakage: breakage.__name__,
)
@pytest.mark.slow
def test_a_broken_brain_is_found(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    # Generation ends with the first example that finds it, as a rule within hundreds. Hypothesis draws on constants in
    # the sources too, so any change of them gives other examples, and now and then thousands are needed.
    tries = settings(
        max_examples=12_000, stateful_step_count=60, deadline=None, derandomize=True, database=None,
        phases=[Stage.generate], report_multiple_bugs=False, print_blob=False,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Tightest if breakage is seals_pages_that_nobody_holds else Tight, settings=tries)
