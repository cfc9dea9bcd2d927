"""What a prefill instance reads out of its own lower tier, and what it is told not to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvmesh.instance.served_weights import ServedWeights
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill import wire
from tests.support.prefill.script import BOOT_NS, make_state, prompt


class Below:
    """An SSD with some blocks."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    def holds(self, key: bytes) -> bool:
        return key in self._keys

    def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
        return (PullRange("me", "me:1", 1, 0, len(keys), Tier.SSD),)

    def note(self, keys: Sequence[bytes]) -> None:
        pass


@pytest.mark.parametrize(
    ("until", "hinted", "read"),
    [(None, 0, [0, 1, 2, 3]), (2, 0, [0, 1]), (0, 0, []), (9, 0, [0, 1, 2, 3]), (0, 3, [0, 1, 2]), (1, 3, [0, 1, 2])],
)
def test_its_own_tier_is_read_up_to_where_it_pays(until: int | None, hinted: int, read: list[int]) -> None:
    """What others have in memory it fetches from them in any case."""
    state = make_state(extents=16)
    tokens, keys = prompt("abcd+2", 4)
    state.lower = Below(keys)
    hints = (PullRange("other", "other:1", 1, 0, hinted),) if hinted else ()
    start = ev.Start(1, 1, "r", tokens, keys, m.Sampling(0.0, 1.0, 0, 0), pulls=hints, load_until=until)
    jobs = [action.job for action in state.step(start, BOOT_NS) if isinstance(action, ev.FetchBlocks)]
    assert [list(job.blocks) for job in jobs] == ([read] if read else [])


def test_no_opinion_is_not_the_first_block() -> None:
    asked = pb.StartPrefill(block_keys=bytes(16), token_ids=bytes(8))
    asked.sampling.top_p = 1.0
    assert wire.start_in(asked, 1, 1, ServedWeights(""), "me", 0, "", 512).load_until is None
    asked.load_until = 0
    assert wire.start_in(asked, 1, 1, ServedWeights(""), "me", 0, "", 512).load_until == 0
