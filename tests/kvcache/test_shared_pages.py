"""Pages that rows share: under every order of landings, ends and preemptions each row reads its own prompt, a page goes
back with its last holder and not before, and a broken count shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvmesh.kvcache import shared_pages
from kvmesh.kvcache.page_pool import PagePool

TEXTS, BLOCKS, PAGES = 3, 4, 12


def named(text: int, blocks: int) -> list[bytes]:
    """Keys of a prompt; texts 1 and 2 begin alike."""
    return [f"{text if block or text == 0 else 1}.{block}".encode() for block in range(blocks)]


class Rows(RuleBasedStateMachine):
    """Rows with prompts of full blocks and one page to write to. `memory` is what lies in each page."""

    shared_pages_class = shared_pages.SharedPages

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.shared = self.shared_pages_class(self.pool)
        self.memory: dict[int, bytes] = {}
        self.rows: dict[int, tuple[list[bytes], list[int]]] = {}
        self.landing: set[int] = set()
        self.numbers = 0

    @rule(text=st.integers(0, TEXTS - 1), blocks=st.integers(1, BLOCKS), copies=st.integers(1, 3))
    def begins(self, text: int, blocks: int, copies: int) -> None:
        for _ in range(copies):
            keys = named(text, blocks)
            found = self.shared.count(keys)
            if self.pool.free < blocks - found + 1:
                return
            self.numbers += 1
            pages = [*self.shared.take(self.numbers, keys[:found]), *self.pool.allocate(blocks - found + 1)]
            self.memory.update(dict.fromkeys(pages[found:], b"landing"))
            self.rows[self.numbers] = keys, pages
            self.landing.add(self.numbers)

    @precondition(lambda self: self.landing)
    @rule(data=st.data())
    def has_landed(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.landing)))
        self.landing.discard(row)
        keys, pages = self.rows[row]
        for key, page in zip(keys, pages, strict=False):
            if self.memory[page] == b"landing":
                self.memory[page] = key
        self.shared.enter(row, keys, pages[: len(keys)])
        self.memory[pages[-1]] = f"answer {row}".encode()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def ends_or_is_preempted(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        _, pages = self.rows.pop(row)
        self.landing.discard(row)
        self.shared.release(row, pages)
        for page in pages:
            if not self.pool.refcount(page):
                self.memory[page] = b"free"

    @rule(text=st.integers(0, TEXTS - 1), first=st.integers(0, BLOCKS))
    def are_removed(self, text: int, first: int) -> None:
        self.shared.forget(named(text, BLOCKS)[first:])

    @rule(pages=st.sets(st.integers(0, PAGES - 1), max_size=3))
    def are_in_doubt(self, pages: set[int]) -> None:
        self.shared.distrust(pages)

    @invariant()
    def every_row_reads_its_own(self) -> None:
        held = [0] * PAGES
        for row, (keys, pages) in self.rows.items():
            for page in pages:
                held[page] += 1
            lies = [self.memory[page] for page in pages]
            if row not in self.landing:
                assert lies == [*keys, f"answer {row}".encode()]
            else:
                assert all(found in (key, b"landing") for found, key in zip(lies, keys, strict=False))
        assert held == self.pool.refcounts(range(PAGES))
        self.shared.check_integrity()

    def teardown(self) -> None:
        for row, (_, pages) in self.rows.items():
            self.shared.release(row, pages)
        assert self.pool.free == PAGES and not len(self.shared)


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_every_row_reads_its_own_prompt_and_every_page_comes_back() -> None:
    run_state_machine_as_test(Rows, settings=SETTINGS)


class GivesBackWhatASiblingHolds(shared_pages.SharedPages):
    """A row that ends gives a page back, though a sibling holds it."""

    def release(self, holder: int, pages: Sequence[int]) -> None:
        more = [page for page in pages if len(self._holders.get(page, ())) > 1]
        super().release(holder, pages)
        self._pool.release(more)


class TakesWithoutAReference(shared_pages.SharedPages):
    def take(self, holder: int, keys: Sequence[bytes]) -> list[int]:
        pages = super().take(holder, keys)
        self._pool.release(pages)
        return pages


class FindsWhatIsFree(shared_pages.SharedPages):
    """A page can be found after its last holder gave it back."""

    def release(self, holder: int, pages: Sequence[int]) -> None:
        self._pool.release(pages)


class CountsTwice(shared_pages.SharedPages):
    """Whoever takes a page and then enters it counts as two holders."""

    def enter(self, holder: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        super().enter(holder, keys, pages)
        super().enter(-holder, keys, pages)


@pytest.mark.parametrize(
    "broken",
    [GivesBackWhatASiblingHolds, TakesWithoutAReference, FindsWhatIsFree, CountsTwice],
    ids=lambda c: c.__name__,
)
def test_a_broken_count_is_found(broken: type[shared_pages.SharedPages]) -> None:
    class Broken(Rows):
        shared_pages_class = broken

    with pytest.raises(Exception, match=r"holders|nobody holds|assert|shared|free"):
        run_state_machine_as_test(
            Broken,
            settings=settings(
                SETTINGS, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False
            ),
        )
