"""SteadyBlockMap says what BlockMap says, at every moment, however little is swept."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement, snapshot_parts
from kvmesh.kvcache.block_map import BlockMap, Verdict
from kvmesh.kvcache.steady_map import SteadyBlockMap

KEYS = [bytes([i]) * 16 for i in range(12)]
STORES = ["a", "b", "c"]

key_sets = st.lists(st.sampled_from(KEYS), max_size=6).map(tuple)
announcements = st.builds(
    Announcement,
    store_id=st.sampled_from(STORES),
    incarnation=st.integers(1, 2),
    seq=st.integers(0, 6),
    sealed=key_sets,
    removed=key_sets,
    snapshot=st.just(False),
) | st.builds(
    Announcement,
    store_id=st.sampled_from(STORES),
    incarnation=st.integers(1, 2),
    seq=st.integers(0, 6),
    sealed=key_sets,
    snapshot=st.just(True),
    part=st.integers(0, 2),
    more=st.booleans(),
)
drops = st.tuples(st.sampled_from(STORES), st.sampled_from([None, 1, 2]))
sweeps = st.integers(0, 5)


@settings(max_examples=300)
@given(st.lists(announcements | drops | sweeps, max_size=40))
def test_equals_the_plain_map_after_every_step(steps: list[object]) -> None:
    plain, steady = BlockMap(), SteadyBlockMap()
    for step in steps:
        match step:
            case Announcement():
                assert steady.apply(step) is plain.apply(step)
            case (store_id, incarnation):
                assert steady.drop(store_id, incarnation) == plain.drop(store_id, incarnation)
            case int():
                steady.sweep(step)
        _same(plain, steady)
    while steady.sweep(3):
        pass
    _same(plain, steady)
    for store_id in STORES:  # staged parts are the only hidden content left
        plain.drop(store_id)
        steady.drop(store_id)
    while steady.sweep(100):
        pass
    assert steady.unswept == 0
    assert len(steady) == len(plain) == 0
    assert steady._masks == {}
    steady.check_integrity()


def _same(plain: BlockMap, steady: SteadyBlockMap) -> None:
    steady.check_integrity()
    everyone = 0
    for store_id in STORES:
        assert sorted(steady.keys_of(store_id)) == sorted(plain.keys_of(store_id))
        assert (steady.seq(store_id), steady.count(store_id)) == (plain.seq(store_id), plain.count(store_id))
        assert steady.incarnation(store_id) == plain.incarnation(store_id)
        slot = steady.slot(store_id)
        assert (slot is None) == (plain.slot(store_id) is None)
        everyone |= 0 if slot is None else 1 << slot
        assert set(steady.held(store_id, steady.log_of(store_id))) == set(plain.keys_of(store_id))
    assert steady.replicas == plain.replicas
    assert len(steady) >= len(plain)
    for key in KEYS:
        assert sorted(steady.holders(key)) == sorted(plain.holders(key))
        assert steady.mask(key) & ~everyone == 0
    leading = {steady.store_of(slot): n for slot, n in steady.match(KEYS, (1 << 64) - 1).items()}
    assert leading == {plain.store_of(slot): n for slot, n in plain.match(KEYS, (1 << 64) - 1).items()}


def test_what_is_dropped_vanishes_at_once_and_is_cleared_in_slices() -> None:
    steady = SteadyBlockMap()
    keys = [i.to_bytes(16, "big") for i in range(1000)]
    for part in snapshot_parts("a", 1, 1, keys, 300):
        verdict = steady.apply(part)
    assert verdict is Verdict.APPLIED
    assert steady.replicas == len(steady) == 1000
    steady.drop("a")
    assert steady.holders(keys[0]) == []
    assert steady.replicas == len(steady) == 0
    assert steady.unswept == 1000
    assert steady.sweep(400)
    assert steady.unswept == 600
    assert steady.sweep(599)
    assert not steady.sweep(1)
    assert steady.unswept == 0
    steady.check_integrity()
    assert steady.apply(Announcement("b", 1, 1, (keys[3],))) is Verdict.APPLIED
    assert steady.slot("b") == 0  # its slot is free again
