"""The scheduler's side, against a scheduler that hypothesis drives: what is loaded is held, what is saved is computed,
no request is asked about for ever, and nothing is kept of those that have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.connectors.vllm.book import FRESH_S, RequestBook, Scheduled
from kvmesh.kvcache.keys import Namespace, chain, split

BLOCK = 4
SPACE = Namespace(fingerprint="ab", kv_dtype="auto")
LOOKUP_S, PAUSE_S = 0.3, 5.0


def keys_of(tokens: list[int]) -> list[bytes]:
    return split(chain(SPACE, tokens, BLOCK))


def book(**more: bool) -> RequestBook:
    return RequestBook(BLOCK, lookup_s=LOOKUP_S, pause_s=PAUSE_S, **more)


def looked_up(made: RequestBook, tokens: list[int], held: bytes, *, local: int = 0, now: float = 0.0) -> int | None:
    """Adds a request "r", and returns what can be loaded once its lookup is answered."""
    made.add("r", SPACE, len(tokens))
    match = made.match("r", tokens, local, now)
    assert match.tokens is None and list(match.ask) == keys_of(tokens[: len(tokens) - 1])
    made.found("r", held, now)
    return made.match("r", tokens, local, now).tokens


def test_a_prefix_is_loaded_and_the_rest_is_saved() -> None:
    made, tokens = book(), list(range(18))
    assert looked_up(made, tokens, b"\1\1\0\1") == 8
    made.allocated("r", [70, 71, 72, 73, 74], 8)
    made.allocated("r", [70, 71, 72, 73, 74], 0)  # vLLM calls again when more pages are there
    loads, saves = made.step([])
    assert [(one.block_ids, list(one.keys)) for one in loads] == [((70, 71), keys_of(tokens)[:2])] and not saves
    made.received(["r"], set(), False, 1.0)
    loads, (save,) = made.step([Scheduled("r", tokens, 18, [70, 71, 72, 73, 74])])
    assert not loads and (save.block_ids, list(save.keys)) == ((72,), [keys_of(tokens)[2]])


def test_at_least_one_token_is_computed() -> None:
    assert looked_up(book(), list(range(8)), b"\1") == 4  # not 8: the next token is sampled from the last one


def test_what_vllm_has_itself_is_not_loaded() -> None:
    made = book()
    assert looked_up(made, list(range(18)), b"\0\1\1\1", local=4) == 12
    made.allocated("r", [1, 2, 3, 4], 12)
    assert made.step([])[0][0].block_ids == (2, 3, 4)


def test_a_hit_that_has_a_gap_ends_there() -> None:
    assert looked_up(book(), list(range(18)), b"\0\1\1\1") == 0


def test_a_lookup_that_takes_long_is_a_miss_and_the_next_one_waits() -> None:
    made, tokens = book(), list(range(18))
    made.add("r", SPACE, 18)
    assert made.match("r", tokens, 0, 0.0).ask
    assert made.match("r", tokens, 0, 0.29) == made.match("r", tokens, 0, 0.2)
    assert made.match("r", tokens, 0, 0.3).tokens == 0 and made.late_lookups == 1
    made.found("r", b"\1\1\1\1", 0.4)  # late: nobody waits for it
    assert made.match("r", tokens, 0, 0.5).tokens == 0
    made.add("s", SPACE, 18)
    assert made.match("s", tokens, 0, 0.3 + PAUSE_S - 0.1).tokens == 0
    assert made.match("s", tokens, 0, 0.3 + PAUSE_S).tokens is None


def test_what_failed_to_load_is_computed_and_saved_and_not_loaded_again() -> None:
    made, tokens = book(), list(range(18))
    assert looked_up(made, tokens, b"\1\1\1\1") == 16
    made.allocated("r", [5, 6, 7, 8], 16)
    made.step([])
    made.received(["r"], {7, 99}, False, 0.0)
    assert made.match("r", tokens, 0, 0.0).tokens == 0
    (save,) = made.step([Scheduled("r", tokens, 18, [5, 6, 7, 8, 9])])[1]
    assert save.block_ids == (7, 8)


def test_ranks_end_a_load_in_steps_of_their_own_and_what_any_of_them_lacks_is_computed() -> None:
    made, tokens = book(), list(range(18))
    assert looked_up(made, tokens, b"\1\1\1\1") == 16
    made.allocated("r", [5, 6, 7, 8], 16)
    made.step([])
    made.received([], {7, 99}, True, 0.0)  # one rank's load is over, the other's is not
    made.received(["r"], {8}, False, 1.0)
    assert made.match("r", tokens, 0, 1.0).tokens == 0
    (save,) = made.step([Scheduled("r", tokens, 18, [5, 6, 7, 8, 9])])[1]
    assert save.block_ids == (7, 8)
    made.add("s", SPACE, 18)
    assert made.match("s", tokens, 0, PAUSE_S - 0.1).tokens == 0  # what ran out of time is known from the first rank
    assert made.match("s", tokens, 0, PAUSE_S).tokens is None


def test_after_a_load_that_ran_out_of_time_nobody_looks_up_for_a_while() -> None:
    made, tokens = book(), list(range(18))
    assert looked_up(made, tokens, b"\1\1\1\1") == 16
    made.received(["r"], set(), True, 1.0)
    made.add("s", SPACE, 18)
    assert made.match("s", tokens, 0, 5.9).tokens == 0
    assert made.match("s", tokens, 0, 6.0).tokens is None


def test_a_found_prefix_is_asked_for_again_when_it_is_old() -> None:
    made, tokens = book(), list(range(18))
    assert looked_up(made, tokens, b"\1\1\1\1") == 16
    assert made.match("r", tokens, 0, FRESH_S - 0.1).tokens == 16
    assert made.match("r", tokens, 0, FRESH_S).tokens is None


def test_answers_are_saved_unless_prompts_alone_are_wanted() -> None:
    for decoded, expected in ((True, (1, 2)), (False, (1,))):
        made, tokens = book(save_decoded=decoded), list(range(6))
        made.add("r", SPACE, 6)
        saved = made.step([Scheduled("r", tokens, 6, [1, 2])])[1]
        saved += made.step([Scheduled("r", [*tokens, 9, 9, 9], 8, [1, 2, 3])])[1]
        assert tuple(page for order in saved for page in order.block_ids) == expected


def test_tokens_that_are_not_known_yet_are_saved_later() -> None:
    """Drafts, and tokens that are still being sampled, are computed before anybody knows whether they stay."""
    made = book()
    made.add("r", SPACE, 6)
    assert [one.block_ids for one in made.step([Scheduled("r", list(range(6)), 9, [1, 2, 3])])[1]] == [(1,)]
    assert [one.block_ids for one in made.step([Scheduled("r", list(range(8)), 10, [1, 2, 3])])[1]] == [(2,)]


def test_roles_load_or_save_alone() -> None:
    made, tokens = book(loads=False), list(range(18))
    made.add("r", SPACE, 18)
    assert made.match("r", tokens, 0, 0.0).tokens == 0
    made = book(saves=False)
    made.add("r", SPACE, 18)
    assert made.step([Scheduled("r", tokens, 18, [1, 2, 3, 4, 5])]) == ([], [])


def test_what_was_cleared_is_neither_loaded_nor_saved() -> None:
    made, tokens = book(), list(range(18))
    assert looked_up(made, tokens, b"\1\1\1\1") == 16
    made.clear()
    assert made.match("r", tokens, 0, 0.0).tokens == 0
    assert made.step([Scheduled("r", tokens, 18, [1, 2, 3, 4, 5])]) == ([], [])


# ── any order of events ──────────────────────────────────────────────────────────────────────────────


@dataclass
class Vllm:
    """What vLLM knows of one request."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    external: int = 0
    waiting: bool = True
    loading: bool = False
    failed: bool = False  # a load of it did
    asked: float = 0.0  # when the last lookup was ordered
    found: float | None = None  # when one was answered last, and for how many blocks
    held: int = 0


class Driven(RuleBasedStateMachine):
    """A scheduler with two prompts that begin alike, a pool that has some blocks, lookups that come when they come."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now, self.count = book(), 0.0, 0
        self.requests: dict[str, Vllm] = {}
        self.asked: dict[str, tuple[bytes, ...]] = {}
        self.pool: set[bytes] = set()
        self.content: dict[int, bytes] = {}  # page → key of what it has
        self.free = list(range(1000))

    def some(self, data: st.DataObject, **state: bool) -> str | None:
        names = [name for name, one in self.requests.items() if all(getattr(one, k) == v for k, v in state.items())]
        return data.draw(st.sampled_from(names)) if names else None

    @precondition(lambda self: len(self.requests) < 4)
    @rule(length=st.integers(1, 22), kind=st.integers(0, 1))
    def arrives(self, length: int, kind: int) -> None:
        self.count += 1
        tokens = [at if at < 10 else at + kind for at in range(length)]
        self.requests[f"r{self.count}"] = Vllm(tokens)
        self.book.add(f"r{self.count}", SPACE, length)

    @rule(data=st.data(), local=st.integers(0, 3))
    def tries(self, data: st.DataObject, local: int) -> None:
        name = self.some(data, waiting=True, loading=False)
        if name is None:
            return
        one = self.requests[name]
        if one.computed:  # loaded: vLLM does not match again
            self.start(one)
            return
        local = min(local, (len(one.tokens) - 1) // BLOCK)
        match = self.book.match(name, one.tokens, local * BLOCK, self.now)
        if match.ask:
            old = one.found is None or self.now - one.found >= FRESH_S
            assert old or 0 < one.held < len(match.ask), "asked again for what is known"
            self.asked[name], one.asked = match.ask, self.now
        if match.tokens is None:
            assert self.now - one.asked < LOOKUP_S, "waits for ever"
            return
        keys = keys_of(one.tokens)
        one.pages = [self.free.pop() for _ in range(-(-len(one.tokens) // BLOCK) + 2)]
        for at in range(local):
            self.content[one.pages[at]] = keys[at]
        one.computed = local * BLOCK + match.tokens
        assert one.computed < len(one.tokens) and match.tokens % BLOCK == 0
        assert not (one.failed and match.tokens), "loaded again after a load that failed"
        self.book.allocated(name, one.pages, match.tokens)
        if match.tokens:
            one.loading = True
        else:
            self.start(one)

    def start(self, one: Vllm) -> None:
        one.waiting = False

    @rule(data=st.data(), fails=st.booleans())
    def looks_up(self, data: st.DataObject, fails: bool) -> None:
        if self.asked:
            name = data.draw(st.sampled_from(sorted(self.asked)))
            keys = self.asked.pop(name)
            one = self.requests[name]
            one.found, one.held = self.now, 0 if fails else len(keys)
            self.book.found(name, b"" if fails else bytes(key in self.pool for key in keys), self.now)

    @rule(data=st.data(), sampled=st.integers(0, 3))
    def steps(self, data: st.DataObject, sampled: int) -> None:
        scheduled = []
        for name, one in self.requests.items():
            if not one.waiting:
                one.computed = min(len(one.tokens), one.computed + data.draw(st.integers(1, 9)))
                keys = keys_of(one.tokens)
                for at in range(min(one.computed // BLOCK, len(one.pages))):
                    self.content.setdefault(one.pages[at], keys[at])
                scheduled.append(Scheduled(name, list(one.tokens), one.computed, list(one.pages)))
        loads, saves = self.book.step(scheduled)
        for load in loads:
            one = self.requests[load.request_id]
            expected = keys_of(one.tokens)
            assert [expected[one.pages.index(page)] for page in load.block_ids] == list(load.keys)
            lost = set() if data.draw(st.booleans()) else {load.block_ids[-1]}
            lost |= {page for page, key in zip(load.block_ids, load.keys, strict=True) if key not in self.pool}
            for page, key in zip(load.block_ids, load.keys, strict=True):
                if page not in lost:
                    self.content[page] = key
            first = set(data.draw(st.lists(st.sampled_from(sorted(lost))))) if lost else set()
            if data.draw(st.booleans()):  # a rank tells what it lacks in a step before the last one's
                self.book.received([], first, data.draw(st.booleans()), self.now)
                self.book.received([load.request_id], lost - first, data.draw(st.booleans()), self.now)
            else:
                self.book.received([load.request_id], lost, data.draw(st.booleans()), self.now)
            one.loading, one.failed = False, one.failed or bool(lost)
            bad = [one.pages.index(page) for page in lost]
            one.computed = min([one.computed, *(at * BLOCK for at in bad)])
            if not one.computed:
                one.pages = []
        for save in saves:
            for page, key in zip(save.block_ids, save.keys, strict=True):
                assert self.content[page] == key, "a page was saved under another key than its content's"
                self.pool.add(key)
        for one in self.requests.values():
            if not one.waiting and one.computed == len(one.tokens):
                one.tokens += [7] * sampled

    @rule(data=st.data())
    def preempts(self, data: st.DataObject) -> None:
        name = self.some(data, waiting=False)
        if name is not None:
            one = self.requests[name]
            one.pages, one.computed, one.waiting = [], 0, True

    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        name = self.some(data, loading=False)  # vLLM keeps the pages of one that loads until it was received
        if name is not None:
            del self.requests[name]
            self.asked.pop(name, None)
            self.book.finish(name)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 6.0]))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def evicts(self, data: st.DataObject) -> None:
        if self.pool:
            self.pool.discard(data.draw(st.sampled_from(sorted(self.pool))))

    @invariant()
    def keeps_no_more_than_vllm(self) -> None:
        assert len(self.book) == len(self.requests)


TestDriven = Driven.TestCase
TestDriven.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
