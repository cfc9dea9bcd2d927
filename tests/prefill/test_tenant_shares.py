"""Which tenant's prompts go next: shares by weight, nobody waits for ever, nothing stands still, one tenant as ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.prefill.planner import Chunk, PlanConfig, Planner
from kvmesh.services.prefill.tenant_shares import MAX_COUNTERS, TenantShares

BLOCK, CHUNK, BATCH = 16, 128, 256
SIZES = st.lists(st.integers(20, 2000), min_size=1, max_size=6)
TENANTS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), SIZES), min_size=2, max_size=4)


class Instance:
    """A planner whose prompts are never cached, and get their pages at once."""

    def __init__(self, size_weight: float = 0.0) -> None:
        self.planner = Planner(
            PlanConfig(
                block_tokens=BLOCK,
                prefill_chunk_tokens=CHUNK,
                max_batch_tokens=BATCH,
                long_prompt_tokens=CHUNK,
                size_weight=size_weight,
            )
        )
        self.sizes: dict[int, int] = {}
        self.served: dict[str, int] = defaultdict(int)
        self.owner: dict[int, str] = {}
        self.ended: list[int] = []

    def add(self, tenant: str, tokens: int, weight: float = 1.0, *, priority: int = 0, hint: int = 0) -> int:
        handle = len(self.sizes) + 1
        self.sizes[handle], self.owner[handle] = tokens, tenant
        self.planner.waiting.add(
            handle, priority, handle, tokens * 1000, tenant=tenant, weight=weight, tokens=hint or tokens
        )
        return handle

    def step(self) -> list[Chunk]:
        chunks = self.planner.next_step(lambda handle: self.sizes[handle], lambda handle: 0, self.sizes.__getitem__)
        for chunk in chunks:
            self.served[self.owner[chunk.handle]] += chunk.end - chunk.start
            if chunk.last:
                self.ended.append(chunk.handle)
        return chunks


def endless(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


@settings(max_examples=30, deadline=None)
@given(TENANTS, st.sampled_from([0.0, 2.0]))
def test_shares_follow_weights(tenants: list[tuple[float, list[int]]], size_weight: float) -> None:
    """Tenants of which more always waits than a step computes are within one largest prompt (what cannot be
    interrupted) and one step of each other, over their weights, at any time: so shares converge, and nobody waits for
    ever."""
    at = Instance(size_weight)
    feeds = {f"t{n}": endless(sizes) for n, (_, sizes) in enumerate(tenants)}
    weights = {f"t{n}": weight for n, (weight, _) in enumerate(tenants)}
    largest = max(max(sizes) for _, sizes in tenants)
    bound = 2 * (largest + BATCH) / min(weights.values())
    come = dict.fromkeys(feeds, 0)
    for _ in range(80):
        for who, feed in feeds.items():
            while come[who] - at.served[who] < 2 * BATCH + largest:
                at.add(who, size := next(feed), weights[who])
                come[who] += size
        assert at.step(), "work is there, and none is done"
        counters = [at.served[who] / weights[who] for who in weights]
        assert max(counters) - min(counters) <= bound, (counters, bound)


def test_a_greedy_tenant_does_not_hold_up_a_modest_one() -> None:
    """300 long prompts wait; a short one of another tenant is in one of the next two steps, and so is each
    that follows it."""
    at = Instance()
    for _ in range(300):
        at.add("greedy", 1000)
    at.step()
    for _ in range(10):
        modest = at.add("modest", 40)
        assert modest in [chunk.handle for chunk in (*at.step(), *at.step())]
    long = at.add("modest", 1000)  # behind the one that has begun, and before all that wait
    steps = 0
    while long not in at.ended:
        at.step()
        steps += 1
    assert steps <= 2 * 1000 / CHUNK + 2


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(-2, 2), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([0.0, 2.0]),
)
def test_one_tenant_is_served_as_without_tenants(jobs: list[tuple[int, int, bool]], size_weight: float) -> None:
    one, none = Instance(size_weight), Instance(size_weight)
    for tokens, priority, step in jobs:
        one.add("alone", tokens, 3.0, priority=priority, hint=7)
        none.add("", tokens, priority=priority)
        if step:
            assert one.step() == none.step()
    while chunks := one.step():
        assert chunks == none.step()
    assert not none.step()


def test_urgent_ones_go_first_whosever_they_are() -> None:
    at = Instance()
    lane = [at.add("a", 200, priority=20) for _ in range(3)]
    usual = [at.add("b", 200) for _ in range(3)]
    while at.step():
        pass
    assert at.ended == usual + lane


def counters(shares: TenantShares) -> Callable[[str], float]:
    return lambda tenant: shares.counter(tenant).served


def test_silence_is_no_credit_and_debts_stay() -> None:
    shares = TenantShares()
    served = counters(shares)
    shares.enter(1, "a")
    shares.charge(1, 1000)
    shares.enter(2, "b")  # while a is there
    assert served("b") == served("a") == 1000
    shares.charge(2, 5000)
    shares.leave(2)
    shares.enter(3, "b")
    assert served("b") == 6000
    for handle in (1, 3, 3):
        shares.leave(handle)
    shares.enter(4, "b")  # nobody was there
    assert served("b") == 0 and not shares.several


def test_what_is_remembered_is_bounded() -> None:
    shares = TenantShares()
    shares.enter(1, "always")
    for handle in range(2, 3 * MAX_COUNTERS):
        shares.enter(handle, f"t{handle}")
        shares.charge(handle, handle)
        shares.leave(handle)
        assert len(shares._tenants) <= MAX_COUNTERS + 2
