"""What a prefill brain of a model with several cache groups decides, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvmesh.blockservice.removals import NotHere
from kvmesh.kvcache.cache_groups import CacheGroup, GroupPages, is_single
from kvmesh.kvcache.sources import Pulled, PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import grouped_landing_fault
from kvmesh.services.prefill.prompt_pages import PageRules
from kvmesh.services.prefill.report import Reporter
from kvmesh.services.prefill.state import PrefillState
from kvmesh.telemetry import names
from tests.support.prefill.grouped_world import ALL, BLOCK, CHUNK, STATE, WINDOW, grouped_state
from tests.support.prefill.script import BOOT_NS, prompt


def begin(handle: int, text: str, **fields: object) -> ev.Start:
    tokens, keys = prompt(text, BLOCK)
    known = {"pulls": ()} | fields
    return ev.Start(handle, 1, f"r{handle}", tokens, keys, m.Sampling(0, 1, 0, 0), **known)  # type: ignore[arg-type]


class Played:
    """A brain whose one rank answers at once, and decode that lands at once."""

    def __init__(self, groups: Sequence[CacheGroup], pages: Sequence[int], extents: Sequence[int]) -> None:
        self.state: PrefillState = grouped_state(groups, pages, extents)
        self.steps: list[m.PrefillItem] = []
        self.seals: list[m.SealCopy] = []
        self.loads: list[m.LoadCopy] = []
        self.jobs: list[ev.FetchBlocks] = []
        self.pushes: list[m.PushOpen] = []
        self.ended: list[ev.HandoffEnded] = []
        self.failed: list[ev.SendFailed] = []
        self.answers = True  # to seals

    @property
    def store(self):  # type: ignore[no-untyped-def]
        assert self.state.grouped is not None
        return self.state.grouped.blocks.store

    def spans(self) -> list[tuple[int, int]]:
        """The tokens of the steps since the last call."""
        found = [(item.start, item.start + len(item.token_ids)) for item in self.steps]
        self.steps.clear()
        return found

    def feed(self, event: ev.Event) -> None:
        todo = [event]
        while todo:
            for action in self.state.step(todo.pop(0), BOOT_NS):
                todo += self.answer(action)
        self.state.check_integrity()

    def answer(self, action: ev.Action) -> list[ev.Event]:
        match action:
            case m.TellRank(_, m.PrefillStep() as step):
                self.steps += step.items
                sampled = tuple(m.Sampled(item.handle, 7) for item in step.items if item.sample)
                return [m.FromRank(0, m.PrefillStepDone(step.step_id, BOOT_NS, BOOT_NS, sampled))]
            case m.TellRank(_, m.SealCopy() as copy):
                self.seals.append(copy)
                return [m.FromRank(0, m.SealCopied(copy.ticket, BOOT_NS, BOOT_NS))] if self.answers else []
            case m.TellRank(_, m.LoadCopy() as copy):
                self.loads.append(copy)
                return [m.FromRank(0, m.LoadCopied(copy.ticket, BOOT_NS, BOOT_NS))]
            case m.TellRank(_, m.PushOpen() as push):
                self.pushes.append(push)
                return [m.FromRank(0, m.PushDone(push.handle, push.handoff_epoch, BOOT_NS, BOOT_NS, 1))]
            case ev.SendFirstToken(handle):
                assert self.state.grouped is not None
                memory = self.state.grouped.handoffs[handle].memory
                assert memory is not None
                kept = enumerate(memory.kept)
                named = tuple(GroupPages(g, at.start, tuple(range(len(at)))) for g, at in kept if at)
                return [ev.Landing(handle, 7, 1000, (ev.RankLanding(0, "d", (), 0, named),))]
            case ev.FetchBlocks():
                self.jobs.append(action)
            case ev.HandoffEnded():
                self.ended.append(action)
            case ev.SendFailed():
                self.failed.append(action)
        return []


def test_a_window_gives_pages_back_and_keeps_what_decode_needs() -> None:
    played = Played((ALL, WINDOW), (8, 8), (0, 0))
    played.feed(begin(1, "abcdefgh"))  # 32 tokens in 4 chunks; the window of 6 sees blocks 6 and 7 after them
    tables = [next(one for one in item.groups if one.group == 1) for item in played.steps]
    assert [(one.first, len(one.ids)) for one in tables] == [(0, 2), (0, 4), (0, 6), (2, 6)]
    (push,) = played.pushes
    assert [(one.group, one.first, len(one.ids)) for one in push.groups] == [(0, 0, 8), (1, 6, 2)]
    assert not push.pages and not push.offsets and len(played.ended) == 1


def test_a_prompt_that_never_fits_is_refused_and_names_the_group() -> None:
    played = Played((ALL, WINDOW), (8, 4), (0, 0))
    played.feed(begin(1, "abcdefgh"))
    assert "cache group window" in played.failed[0].error.message


def test_chunks_end_on_the_grid_and_at_the_last_full_block_and_leave_snapshots_there() -> None:
    played = Played((ALL, STATE), (8, 4), (8, 4))
    played.feed(begin(1, "abcde+1"))
    slots = [next(one.ids for one in item.groups if one.group == 1) for item in played.steps]
    assert played.spans() == [(0, 8), (8, 16), (16, 20), (20, 21)]
    assert [len(ids) for ids in slots] == [2, 2, 2, 1] and len({ids[0] for ids in slots}) == 1
    keys = prompt("abcde", BLOCK)[1]
    assert list(played.store.masks(keys)) == [1, 3, 1, 3, 3]


@pytest.mark.parametrize(
    ("text", "first", "again"),
    [
        ("+3", [(0, 3)], [(0, 3)]),  # no full block
        ("a", [(0, 4)], [(0, 4)]),  # the block of the last token is computed
        ("a+1", [(0, 4), (4, 5)], [(4, 5)]),
        ("ab", [(0, 4), (4, 8)], [(4, 8)]),
        ("ab+1", [(0, 8), (8, 9)], [(8, 9)]),  # on the grid
        ("abc+2", [(0, 8), (8, 12), (12, 14)], [(12, 14)]),
        ("abcd", [(0, 8), (8, 12), (12, 16)], [(12, 16)]),
    ],
)
def test_a_repeated_prompt_hits_all_but_its_last_block(
    text: str, first: list[tuple[int, int]], again: list[tuple[int, int]]
) -> None:
    played = Played((ALL, STATE), (8, 4), (8, 4))
    played.feed(begin(1, text))
    assert played.spans() == first
    played.feed(begin(2, text))
    assert played.spans() == again
    assert played.ended[1].found.cached_tokens == again[0][0]


def test_the_next_turn_hits_what_the_last_one_computed() -> None:
    played = Played((ALL, STATE), (10, 4), (10, 4))
    played.feed(begin(1, "abc+2"))
    assert played.spans()
    played.feed(begin(2, "abcdefg+1"))
    assert played.spans() == [(12, 16), (16, 24), (24, 28), (28, 29)]


def test_where_prompts_part_the_second_one_leaves_a_snapshot() -> None:
    """The third one finds what is common to them."""
    played = Played((ALL, STATE), (16, 5), (16, 8))
    played.feed(begin(1, "abcde+1"))
    assert played.spans()
    played.feed(begin(2, "abcfg+1"))
    assert played.spans() == [(8, 12), (12, 16), (16, 20), (20, 21)]
    played.feed(begin(3, "abchi+1"))
    assert played.spans() == [(12, 16), (16, 20), (20, 21)]


def test_who_has_no_room_for_states_does_not_cut_for_them() -> None:
    played = Played((ALL, STATE), (8, 4), (8, 0))
    played.feed(begin(1, "abc+2"))
    assert played.spans() == [(0, 8), (8, 14)]


def test_the_gauges_tell_the_groups_apart() -> None:
    played = Played((ALL, STATE), (8, 4), (8, 4))
    played.feed(begin(1, "abc+2"))
    Reporter(played.state, "p").beat()
    found = {
        (group, state): names.PREFILL_PAGES.labels(state=state, group=group)._value.get()
        for group in ("all", "state")
        for state in ("total", "free", "cached")
    }
    assert found == dict(zip(found, (8, 5, 3, 4, 4, 0), strict=True))


def test_a_twin_waits_for_the_snapshot_at_the_last_full_block() -> None:
    played = Played((ALL, STATE), (12, 4), (8, 4))
    played.answers = False
    for handle in (1, 2):
        played.feed(begin(handle, "abc+2"))
    assert played.spans() == [(0, 8), (8, 12), (12, 14)]
    for copy in list(played.seals):
        played.feed(m.FromRank(0, m.SealCopied(copy.ticket, BOOT_NS, BOOT_NS)))
    assert played.spans() == [(12, 14)]


def test_what_is_removed_while_it_is_computed_leaves_no_snapshot() -> None:
    played = Played((ALL, STATE), (12, 3), (8, 4))
    played.answers = False  # the chunk behind the second snapshot waits for a slot
    played.feed(begin(1, "abcde+1"))
    keys = prompt("abcde", BLOCK)[1]
    played.feed(NotHere(frozenset({keys[4]})))
    played.answers = True
    for copy in list(played.seals):
        played.feed(m.FromRank(0, m.SealCopied(copy.ticket, BOOT_NS, BOOT_NS)))
    assert list(played.store.masks(keys)) == [1, 3, 1, 3, 0]


def test_a_snapshot_that_is_still_copied_holds_up_that_prompt_alone() -> None:
    played = Played((ALL, STATE), (12, 3), (8, 4))
    played.answers = False
    played.feed(begin(1, "abcdefgh"))
    assert len(played.steps) == 2, "both spare slots are with seals"
    for copy in list(played.seals):
        played.feed(m.FromRank(0, m.SealCopied(copy.ticket, BOOT_NS, BOOT_NS)))
    assert len(played.steps) == 4


def test_a_hit_is_of_the_union_of_pages_and_extents() -> None:
    played = Played((ALL, WINDOW, STATE), (10, 8, 4), (8, 8, 4))
    played.feed(begin(1, "abcd+1"))
    table = played.state.grouped
    assert table is not None
    table.cache.evict(1, 8)  # the window's pages go, its extents stay
    played.steps.clear()
    played.feed(begin(2, "abcd+2"))
    (load,) = played.loads
    assert [(one.group, one.first, len(one.ids)) for one in load.groups] == [(1, 2, 2), (2, 3, 1)]
    assert [item.start for item in played.steps] == [16]
    assert played.ended[1].found.device_tokens == 16


def test_a_state_that_is_missing_makes_a_hit_shorter_and_is_named() -> None:
    played = Played((ALL, STATE), (10, 4), (8, 4))
    played.feed(begin(1, "abcd+1"))
    played.store.stores[1].remove([b"abcd"])
    played.feed(begin(2, "abcd+2"))
    found = played.ended[1].found
    assert (found.cached_tokens, found.short, found.short_blocks) == (8, (1,), 2)


def test_a_pull_asks_for_what_the_hit_needs_alone() -> None:
    played = Played((ALL, WINDOW, STATE), (10, 8, 4), (8, 8, 4))
    played.feed(begin(1, "abcd+1", pulls=(PullRange("A", "A:1", 1, 0, 4),)))
    (fetch,) = played.jobs
    assert list(fetch.job.groups) == [1, 1, 3, 7]
    played.feed(Pulled(fetch.job.ticket, (0, 1, 2, 3), 9, 0, groups=bytes([1, 1, 3, 3])))
    assert [item.start for item in played.steps] == [0, 8, 16], "without the state nothing is of use"
    assert played.ended[0].found.short == (2,)


def test_a_holder_without_a_group_is_not_asked_for_it() -> None:
    played = Played((ALL, STATE), (10, 4), (8, 4))
    played.feed(begin(1, "abcd+1", pulls=(PullRange("A", "A:1", 1, 0, 4, groups=1),)))
    assert not played.jobs and [item.start for item in played.steps] == [0, 8, 16]


def test_a_prompt_that_ends_behind_a_snapshot_is_pulled_up_to_it() -> None:
    """Who names blocks and no groups has what a prefix of them needs: the state behind the last one."""
    played = Played((ALL, STATE), (10, 4), (8, 4))
    played.feed(begin(1, "abcde+1", pulls=(PullRange("A", "A:1", 1, 0, 5),)))
    (fetch,) = played.jobs
    assert list(fetch.job.groups) == [1, 1, 1, 1, 3]


class OfGroups:
    """A lower tier that has every block, and of those in `states` the state, too."""

    def __init__(self, states: Sequence[int]) -> None:
        self.states = states

    def holds(self, key: bytes) -> bool:
        return True

    def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
        own = ("own", "own:1", 1)
        return tuple(PullRange(*own, at, 1, Tier.SSD, 3 if at in self.states else 1) for at in range(len(keys)))

    def note(self, keys: Sequence[bytes]) -> None:
        pass


def test_a_lower_tier_is_asked_up_to_the_last_state_that_it_has() -> None:
    played = Played((ALL, STATE), (10, 4), (8, 4))
    played.state.lower = OfGroups([1])
    played.feed(begin(1, "abcde+1"))
    (fetch,) = played.jobs
    assert list(fetch.job.groups) == [1, 3]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (((0, 0, 3), (1, 1, 2)), ""),
        (((0, 2, 1),), ""),
        (((1, 1, 2),), "nothing of group 0"),
        (((0, 0, 2), (1, 1, 2)), "of group 0"),
        (((0, 0, 3), (1, 0, 3)), "of group 1"),
        (((1, 1, 2), (0, 0, 3)), "it names groups"),
        (((0, 0, 3), (2, 2, 1)), "it names groups"),
    ],
)
def test_landings_are_checked(named: Sequence[tuple[int, int, int]], why: str) -> None:
    groups = tuple(GroupPages(group, first, tuple(range(count))) for group, first, count in named)
    landing = ev.Landing(1, 7, 1000, (ev.RankLanding(0, "d", (), 0, groups),))
    assert why in grouped_landing_fault(landing, (range(3), range(1, 3)), 1)
    assert bool(why) == bool(grouped_landing_fault(landing, (range(3), range(1, 3)), 1))
    other = replace(landing.ranks[0], rank=1, groups=groups[:1])
    assert "there are 1" in grouped_landing_fault(replace(landing, ranks=(landing.ranks[0], other)), (range(3),), 1)


@pytest.mark.parametrize("group", [WINDOW, CHUNK], ids=lambda one: one.name)
def test_no_prompt_ever_has_more_pages_than_it_claims(group: CacheGroup) -> None:
    """Against the blocks that chunks in flight see, token by token."""
    rules = PageRules((group,), BLOCK, 16)
    for tokens in range(1, 90):
        kept = set(rules.kept(0, tokens))
        for start in range(0, tokens, BLOCK):
            end = min(start + 16, tokens)
            live = set(range(rules.seen(0, start).start, -(-end // BLOCK))) | kept
            assert len(live) <= rules.claim(0, tokens)


def test_one_group_that_keeps_all_is_single() -> None:
    assert is_single((ALL,)) and not is_single((WINDOW,))
