"""The two state machines of a push, with an adversary between them: pages, staging and windows are memory whose writers
are watched. Broken machines are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvmesh.connectors.vllm.book import HoldOrder, ReceiveOrder
from kvmesh.connectors.vllm.push.arrivals import PageArrivals, PushRound, RoundState
from kvmesh.connectors.vllm.push.holds import HeldPages, HoldState
from kvmesh.connectors.vllm.remote import PushRank, RemotePrefill
from kvmesh.errors import HandoffLost, InvalidRequest, KvmeshError, PermissionDenied

HOLD_S, TIMEOUT_S = 10.0, 4.0
TICKET = b"t" * 16
STAGINGS = 3
HOW = [(whole, again) for whole in (True, False) for again in (True, False)]  # bytes of a push arrive
MOST = 4_000  # walks after which a broken machine must have been found


def source(name: str, blocks: int) -> RemotePrefill:
    return RemotePrefill(
        engine_id=f"p{int(name[1:]) % 2}",
        request_id=name,
        ticket=TICKET.hex(),
        tokens=blocks * 4,
        digest="0" * 64,
        block_tokens=4,
        layout="l",
        ranks=(PushRank("127.0.0.1:1", "p0"),),
    )


@dataclass(eq=False)
class Writing:
    """Is one push on its way: prefill has claimed pages, then copied them, and what it writes lands now or late."""

    round: PushRound
    pages: tuple[int, ...]
    copied: list[Any] | None = None  # what it read out of the pages


@dataclass
class Waiting:
    """Is one request at the decode engine, with the pages that it waits for."""

    name: str
    pages: tuple[int, ...]
    since: float
    aborted: bool = False


@dataclass(eq=False)
class Staging:
    round: PushRound | None = None
    content: list[Any] = field(default_factory=lambda: [None] * 2)


class World:
    """Prefill's pages and decode's, two stagings, and pushes that are slow, lost, late, or doubled. `step` takes one of
    the things that may happen next."""

    def __init__(self, held: type[HeldPages] = HeldPages, arrivals: type[PageArrivals] = PageArrivals) -> None:
        self.now, self.count = 0.0, 0
        self.prefill = held(HOLD_S)
        self.decode = arrivals(TIMEOUT_S, blocks=2, threads=STAGINGS)
        self.owner: dict[int, str | None] = dict.fromkeys(range(6))  # of prefill's pages
        self.own_pages: dict[str, tuple[int, ...]] = {}
        self.until: dict[str, float] = {}
        self.targets: dict[int, str | None] = dict.fromkeys(range(100, 106))  # decode's pages
        self.content: dict[int, Any] = {}
        self.waiting: dict[str, Waiting] = {}
        self.stagings = [Staging() for _ in range(STAGINGS)]
        self.windows: dict[int, int] = {}  # epoch → staging: open ones
        self.fenced: set[int] = set()
        self.writings: list[Writing] = []

    def step(self, choice: int, detail: int) -> None:
        """Has one of the things happen that can happen now, as two numbers choose."""
        can: list[tuple[Callable[[Any], None], Sequence[Any]]] = [
            (self.computes, [blocks for blocks in (1, 3) if len(self.free(self.owner)) >= blocks]),
            (self.begins_to_push, self.at(RoundState.WINDOW)),
            (self.reads_its_pages, [one for one in self.writings if one.copied is None]),
            (self.bytes_arrive, [(one, *how) for one in self.writings if one.copied is not None for how in HOW]),
            (self.is_released, sorted(self.until)),
            (self.waits_for_a_prompt, sorted(self.own_pages)[-3:]),
            (self.a_thread_is_free, [at for at, one in enumerate(self.stagings) if one.round is None]),
            (self.a_call_ends_in_an_error, self.at(RoundState.WINDOW)),
            (self.a_window_is_fenced, self.at(RoundState.FENCING)),
            (self.a_copy_ends, self.at(RoundState.COPYING)),
            (self.is_aborted, sorted(self.waiting)),
            (self.passes, (0.1, 1.0, 5.0, 11.0)),
        ]
        able = [(act, given) for act, given in can if given]
        act, given = able[choice % len(able)]
        act(given[detail % len(given)])
        self.vllm_steps()

    @staticmethod
    def free(pages: dict[int, str | None]) -> list[int]:
        return [page for page, owner in pages.items() if owner is None]

    def at(self, state: RoundState) -> list[int]:
        return [at for at, one in enumerate(self.stagings) if one.round is not None and one.round.state is state]

    def round_at(self, at: int) -> PushRound:
        found = self.stagings[at].round
        assert found is not None
        return found

    # ── prefill ──────────────────────────────────────────────────────────────────────────────────

    def computes(self, blocks: int) -> None:
        self.count += 1
        name, pages = f"r{self.count}", tuple(self.free(self.owner)[:blocks])
        self.owner.update(dict.fromkeys(pages, name))
        self.own_pages[name] = pages
        self.prefill.hold(HoldOrder(name, TICKET, pages), self.now)
        self.until[name] = self.now + HOLD_S

    def begins_to_push(self, at: int) -> None:
        round_ = self.round_at(at)
        wanted = round_.order.source.request_id, TICKET, round_.first, len(round_.pages)
        try:
            self.writings.append(Writing(round_, self.prefill.claim(*wanted, self.now)))
        except HandoffLost:
            self.decode.answered(round_, False)

    def reads_its_pages(self, one: Writing) -> None:
        name = one.round.order.source.request_id
        assert all(self.owner[page] == name for page in one.pages), "pages were freed while a push read them"
        one.copied = [(name, self.own_pages[name].index(page)) for page in one.pages]
        self.prefill.done(name)

    def bytes_arrive(self, what: tuple[Writing, bool, bool]) -> None:
        """Bytes land, if the window lets them. `whole`: prefill says so; `again`: they were sent twice."""
        one, whole, again = what
        assert one.copied is not None
        staging = self.windows.get(one.round.epoch)
        if staging is not None:
            for at, block in enumerate(one.copied if whole else one.copied[:1]):
                self.stagings[staging].content[at] = block
            if whole and one.round.state is RoundState.WINDOW:
                self.decode.answered(one.round, True)
        if not again:
            self.writings.remove(one)

    def is_released(self, name: str) -> None:
        self.prefill.release(name, TICKET)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────

    def waits_for_a_prompt(self, name: str) -> None:
        blocks, free = len(self.own_pages[name]), self.free(self.targets)
        if len(free) < blocks:
            return
        self.count += 1
        one = Waiting(f"d{self.count}", tuple(free[:blocks]), self.now)
        for page in one.pages:
            self.targets[page], self.content[page] = one.name, None
        self.waiting[one.name] = one
        self.decode.order(ReceiveOrder(one.name, source(name, blocks), 0, one.pages), self.now)

    def a_thread_is_free(self, at: int) -> None:
        round_ = self.decode.take(self.now)
        if round_ is not None:
            assert round_.epoch not in self.fenced and round_.epoch not in self.windows, "an epoch came twice"
            self.stagings[at].round = round_
            self.windows[round_.epoch] = at
            engines = [one.round.order.source.engine_id for one in self.stagings if one.round is not None]
            assert engines.count(round_.order.source.engine_id) < STAGINGS, "one engine has all threads"

    def a_call_ends_in_an_error(self, at: int) -> None:
        self.decode.answered(self.round_at(at), False)

    def a_window_is_fenced(self, at: int) -> None:
        round_ = self.round_at(at)
        del self.windows[round_.epoch]
        self.fenced.add(round_.epoch)
        if not self.decode.fenced(round_):
            self.stagings[at].round = None

    def a_copy_ends(self, at: int) -> None:
        round_ = self.round_at(at)
        assert round_.epoch not in self.windows, "a page was copied out of an open window"
        for slot, page in enumerate(round_.pages):
            assert self.targets[page] == round_.order.request_id, "a late copy went into somebody else's page"
            self.content[page] = self.stagings[at].content[slot]
        self.stagings[at].round = None
        self.decode.copied(round_)

    def is_aborted(self, name: str) -> None:
        self.waiting[name].aborted = True
        self.decode.cancel([name])

    def passes(self, seconds: float) -> None:
        self.now += seconds

    # ── what both engines do in each step ────────────────────────────────────────────────────────

    def vllm_steps(self) -> None:
        for name in self.prefill.freed(self.now):
            del self.until[name]
            for page in self.own_pages[name]:
                self.owner[page] = None
        reading = {one.round.order.source.request_id for one in self.writings if one.copied is None}
        for name, until in self.until.items():
            assert self.now < until or name in reading, "pages are kept for ever"
        over = self.decode.poll(self.now)
        for order in over.orders:
            request = self.waiting.pop(order.request_id)
            for block, page in enumerate(request.pages):
                if page not in over.failed_pages and not request.aborted:
                    wanted = (order.source.request_id, block)
                    assert self.content[page] == wanted, "a page that came has another block's content"
                self.targets[page] = None
        copying = {self.round_at(at).order.request_id for at in self.at(RoundState.COPYING)}
        for request in self.waiting.values():
            waits = self.now < request.since + TIMEOUT_S and not request.aborted
            assert waits or request.name in copying, "a load was waited for beyond its time"


def walk(world: World, path: bytes) -> None:
    for at in range(0, len(path), 2):
        world.step(path[at], path[at + 1])


@settings(max_examples=250, deadline=None)
@given(st.binary(min_size=160, max_size=160))
def test_every_page_has_one_writer_and_the_right_content(path: bytes) -> None:
    walk(World(), path)


class FreesWhileReading(HeldPages):
    def freed(self, now: float) -> set[str]:
        for hold in self._holds.values():
            hold.reading = 0
        return super().freed(now)


class HoldsForEver(HeldPages):
    def freed(self, now: float) -> set[str]:
        return super().freed(0.0)


class CopiesWhatIsOver(PageArrivals):
    def _is_over(self, arrival: Any) -> bool:
        return False


class CopiesWhatDidNotLand(PageArrivals):
    def answered(self, round_: PushRound, landed: bool) -> None:
        super().answered(round_, True)


class EndsDuringCopies(PageArrivals):
    def _ends(self, one: Any, now: float) -> bool:
        return bool(one.cancelled or now >= one.deadline or (not one.running and not one.waiting))


class WaitsForItsWriter(PageArrivals):
    def _ends(self, one: Any, now: float) -> bool:
        return not one.running and super()._ends(one, now)


class TrustsBeforeTheFence(PageArrivals):
    """Copies as soon as the writer has answered: a window that is open lets the next bytes land meanwhile."""

    def answered(self, round_: PushRound, landed: bool) -> None:
        super().answered(round_, landed)
        if landed:
            self.fenced(round_)


class UsesAnEpochTwice(PageArrivals):
    def take(self, now: float) -> PushRound | None:
        self._epoch = 0
        return super().take(now)


class LendsAllThreads(PageArrivals):
    def __init__(self, timeout_s: float, blocks: int, threads: int) -> None:
        super().__init__(timeout_s, blocks, threads + 1)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (FreesWhileReading, "freed while a push read"),
        (HoldsForEver, "kept for ever"),
        (CopiesWhatIsOver, "somebody else's page"),
        (CopiesWhatDidNotLand, "another block's content"),
        (EndsDuringCopies, "somebody else's page|another block's content"),
        (WaitsForItsWriter, "beyond its time"),
        (TrustsBeforeTheFence, "out of an open window|one engine has all threads"),  # its thread is lent twice, too
        (UsesAnEpochTwice, "came twice"),
        (LendsAllThreads, "one engine has all threads"),
    ],
)
def test_a_broken_machine_is_found(broken: Any, message: str) -> None:
    parts = {"held" if issubclass(broken, HeldPages) else "arrivals": broken}

    @settings(max_examples=MOST, deadline=None, database=None, phases=(Phase.generate,))
    @given(st.binary(min_size=160, max_size=160))
    def find(path: bytes) -> None:
        walk(World(**parts), path)

    with pytest.raises((AssertionError, KeyError), match=message):
        find()


class LeakyFence(World):
    """Lets bytes of a window land that was fenced."""

    leaks: dict[int, int]

    def a_window_is_fenced(self, at: int) -> None:
        self.leaks = {**getattr(self, "leaks", {}), self.round_at(at).epoch: at}
        super().a_window_is_fenced(at)

    def bytes_arrive(self, what: tuple[Writing, bool, bool]) -> None:
        windows = self.windows
        self.windows = getattr(self, "leaks", {}) | windows
        super().bytes_arrive(what)
        self.windows = windows


def late_push(world: World) -> None:
    """Two prompts go through one staging, and bytes of the first come once more when the second has landed."""
    for _ in range(2):
        world.computes(1)
    for name in ("r1", "r2"):
        world.waits_for_a_prompt(name)
    world.a_thread_is_free(0)
    world.begins_to_push(0)
    late = world.writings[0]
    world.reads_its_pages(late)
    world.bytes_arrive((late, True, True))
    world.a_window_is_fenced(0)
    world.a_copy_ends(0)
    world.a_thread_is_free(0)
    world.begins_to_push(0)
    world.reads_its_pages(world.writings[1])
    world.bytes_arrive((world.writings[1], True, True))
    world.bytes_arrive((late, True, False))
    world.a_window_is_fenced(0)
    world.a_copy_ends(0)
    world.vllm_steps()
    assert not world.waiting


def test_a_push_that_lands_behind_the_fence_is_found() -> None:
    late_push(World())
    with pytest.raises(AssertionError, match="another block's content"):
        late_push(LeakyFence())


# ── what the walks do not reach ──────────────────────────────────────────────────────────────────────


def test_only_who_was_told_the_ticket_gets_pages() -> None:
    held = HeldPages(HOLD_S)
    held.hold(HoldOrder("r", TICKET, (3, 4)), 0.0)
    with pytest.raises(PermissionDenied, match="not its ticket"):
        held.claim("r", b"x" * 16, 0, 1, 0.0)
    with pytest.raises(PermissionDenied):
        held.release("r", b"")
    for first, count in ((0, 3), (2, 1), (0, 0)):
        with pytest.raises(InvalidRequest, match="the prompt has 2 blocks"):
            held.claim("r", TICKET, first, count, 0.0)
    assert held.freed(HOLD_S - 0.1) == set() and held.claim("r", TICKET, 1, 1, 0.0) == (4,)


def test_a_prompt_that_ended_is_known_and_one_that_was_never_held_is_not() -> None:
    held = HeldPages(HOLD_S)
    assert held.state("r") is HoldState.UNKNOWN and not held.release("r", TICKET)
    held.hold(HoldOrder("r", TICKET, (3,)), 0.0)
    assert held.state("r") is HoldState.HELD
    assert held.release("r", TICKET) and held.state("r") is HoldState.ENDED
    with pytest.raises(KvmeshError, match="not held any more"):
        held.claim("r", TICKET, 0, 1, 0.0)
    assert held.freed(0.0) == {"r"} and held.freed(0.0) == set() and held.lapsed == 0
    assert held.state("r") is HoldState.ENDED and len(held) == 0
    held.hold(HoldOrder("late", TICKET, (3,)), 0.0)
    assert held.freed(HOLD_S) == {"late"} and held.lapsed == 1


def test_what_comes_after_a_lost_block_is_not_asked_for() -> None:
    arrivals = PageArrivals(TIMEOUT_S, blocks=1, threads=1)
    arrivals.order(ReceiveOrder("d", source("r1", 3), 0, (1, 2, 3)), 0.0)
    first = arrivals.take(0.0)
    assert first is not None and first.first == 0
    arrivals.answered(first, False)
    assert not arrivals.fenced(first) and arrivals.take(0.0) is None
    over = arrivals.poll(0.0)
    assert over.failed_pages == {1, 2, 3} and not over.late and len(arrivals) == 0


def test_an_engine_that_was_never_asked_is_not_late() -> None:
    arrivals = PageArrivals(TIMEOUT_S, blocks=1, threads=1)
    for name, page in (("1", 1), ("2", 2)):
        arrivals.order(ReceiveOrder(f"d{name}", source(f"r{name}", 1), 0, (page,)), 0.0)
    assert arrivals.take(0.0) is not None
    over = arrivals.poll(TIMEOUT_S)
    assert over.failed_pages == {1, 2} and over.late == {"d1"}
