"""The prefill machine finds what is broken on purpose: each of these breaks one promise of the shared pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase as Stage
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvmesh.kvcache.sources import Pulled
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.blocks import SharedBlocks
from kvmesh.services.prefill.handoff import PrefillHandoff
from kvmesh.services.prefill.handoff_table import HandoffTable
from kvmesh.services.prefill.planner import Wait
from tests.prefill.test_machine import Machine
from tests.support.prefill.pool_model import PATIENCE_MS


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


@pytest.mark.slow
def test_a_broken_brain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seals_what_did_not_arrive(monkeypatch)
    # Generation ends with the first example that finds it, as a rule within a hundred.
    tries = settings(
        max_examples=2_000, stateful_step_count=60, deadline=None, derandomize=True, database=None,
        phases=[Stage.generate], report_multiple_bugs=False, print_blob=False,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Tight, settings=tries)


# ── what chance finds late: interleavings that show it ───────────────────────────────────────────────


class Told(Machine):
    """The machine, told what to do; everything is checked after every step."""

    pages = 4

    def comes(self, blocks: str, hints: list[tuple[int, int]] | None = None) -> int:
        self.start(blocks=blocks, more=1, stream=1, deadline_ms=0, priority=0, hints=hints or [], later_ms=0)
        self.check_all()
        return len(self.lives)

    def check_all(self) -> None:
        self.references_are_holders()
        self.blocks_are_what_their_keys_say()
        self.nobody_waits_for_a_pull_that_is_over()

    def pulled(self) -> None:
        for job in list(self.jobs.values()):
            self.end_pull(job, list(range(len(job.keys))))
        self.check_all()

    def goes_right(self, *, copies: bool = True) -> None:
        """Until nothing is left to do, or nothing but the copies that the rank has not begun."""
        while True:
            if self.outbox:
                self.rank_is_heard()
            elif self.next_step() and (copies or not isinstance(self.inbox[0], m.SealCopy)):
                self.run_step([])
            elif self.inbox and copies:
                self.rank_copies()
            elif self.begun():
                self.landing(self.begun()[0], 5_000, False)
            elif self.pushes:
                self.push(next(iter(self.pushes)), "done")
            else:
                return
            self.check_all()


def lands_while_its_blocks_are_loaded(told: Told) -> None:
    handle = told.comes("aa", [(0, 2)])
    told.pulled()
    told.landing(handle, 5_000, False)
    told.goes_right()


def is_cancelled_while_it_waits_with_blocks(told: Told) -> None:
    told.comes("aa")  # has the pages
    handle = told.comes("bb", [(0, 2)])
    told.pulled()
    told.step(ev.HandoffCancelled(handle, "not wanted"))
    told.check_all()
    told.goes_right()
    told.check_all()


def is_patient(told: Told) -> None:
    handle = told.comes("aa", [(0, 2)])
    told.time_passes(PATIENCE_MS)
    told.goes_right()
    assert told.lives[handle].ended is not None
    told.pulled()


def another_comes_while_blocks_are_sealed(told: Told) -> None:
    told.comes("aa")
    told.goes_right(copies=False)
    assert told.copies
    told.comes("bb")
    told.goes_right()


def many_are_sealed(told: Told) -> None:
    """One of their last blocks is not finite."""
    for blocks in ("a", "b", "aa", "ab", "ba", "bb"):
        told.comes(blocks)
        told.goes_right()


@pytest.mark.parametrize(
    ("breakage", "interleaving"),
    [
        (waits_for_ever, is_patient),
        (pushes_before_the_load, lands_while_its_blocks_are_loaded),
        (forgets_what_it_pinned, is_cancelled_while_it_waits_with_blocks),
        (seals_pages_that_nobody_holds, another_comes_while_blocks_are_sealed),
        (seals_what_is_not_finite, many_are_sealed),
    ],
    ids=lambda value: value.__name__,
)
def test_the_machine_notices_what_is_broken(
    breakage: Callable[[pytest.MonkeyPatch], None],
    interleaving: Callable[[Told], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    interleaving(told)
    told.teardown()
    breakage(monkeypatch)
    with pytest.raises(AssertionError):
        interleaving(Told())
