"""What decode's own lower tiers have of a prompt: it reads that where prefill's push would not be sooner."""

from __future__ import annotations

import dataclasses

import pytest

from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor.domain import Placed, PrefillSample, Source
from kvmesh.services.conductor.mapping import placement_out
from kvmesh.services.conductor.prefixes.fetch_plan import tier_life
from tests.conductor.prefixes.test_tiers import FAST, SLOW, seal, tell
from tests.support.conductor.brain import BLOCK, IDLE, Brain
from tests.support.conductor.sharing import BYTES, LONG, X, mesh, monotone

WIRE = 1e6  # bytes a second to decode: slower than any disk


def slow_wires(brain: Brain, rate: float = WIRE) -> None:
    """Handoffs of p0 have gone so slowly that it shows."""
    for n in range(40):
        sample = PrefillSample(f"w{n}", 16, 0, 0.01, 10 * BYTES, 10 * BYTES / rate, 0, 0, 0.0)
        brain.beat("p0", prefill_samples=(sample,))


def queued(brain: Brain, tokens: int) -> float:
    """p0 has so much to do first; for how many seconds."""
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=tokens))
    return float(brain.view("p0").queue_s)


def own(placed: Placed, name: str = "d0") -> list[tuple[int, int, Tier]]:
    return [(r.first_block, r.blocks, r.tier) for r in placed.decode_pulls if r.instance_id == name]


def test_what_decode_has_on_ssd_need_not_be_pushed() -> None:
    plain = mesh(1)
    slow_wires(plain)
    pushed = plain.placed(LONG, keys=X)
    brain = mesh(1)
    slow_wires(brain)
    seal(brain, "d0", X)
    tell(brain, "d0", FAST)
    placed = brain.placed(LONG, keys=X)
    assert (own(placed), placed.decode_load_until) == ([(0, 64, Tier.SSD)], None)
    assert placed.sources == bytes([Source.DECODE_PULLS]) * 64 + bytes([Source.PREFILL_PUSHES])
    assert placed.terms["decode_load_ms"] == pytest.approx(1000 * (FAST[0] + 64 * BYTES / FAST[1]))
    assert placed.terms["transfer_tail_ms"] < pushed.terms["transfer_tail_ms"] / 10
    assert placed.ttft_s < pushed.ttft_s and placed.prefill == pushed.prefill
    out = placement_out(placed)
    assert not out.HasField("decode_load_until") and out.decode_pulls[0].holder.address == "d0:1"


def test_a_slow_device_is_left_alone_and_decode_is_told_so() -> None:
    """Decode reads what it has by itself, and its landing would wait for it."""
    plain = mesh(1).placed(LONG, keys=X)
    brain = mesh(1)
    seal(brain, "d0", X)
    tell(brain, "d0", SLOW)
    placed = brain.placed(LONG, keys=X)
    assert (own(placed), placed.decode_load_until, placed.sources) == ([], 0, b"")
    assert placed.ttft_s == plain.ttft_s and placed.terms["decode_load_ms"] == 0
    out = placement_out(placed)
    assert out.HasField("decode_load_until") and out.decode_load_until == 0


def test_reading_hides_behind_the_queue_and_no_further() -> None:
    brain = mesh(1)
    seal(brain, "d0", X)
    tell(brain, "d0", (1e-9, 8 * BYTES))  # eight blocks a second
    queue_s = queued(brain, 20_000)
    assert 1 < queue_s < 7
    placed = brain.placed(LONG, keys=X)
    blocks = placed.decode_load_until
    assert blocks == int(queue_s * 8) and own(placed) == [(0, blocks, Tier.SSD)]
    assert placed.terms["decode_load_ms"] <= placed.terms["queue_ms"]
    assert monotone(placed.sources)


def test_behind_memory_and_behind_what_decode_pulls() -> None:
    brain = mesh(1, pools=1)
    slow_wires(brain)
    brain.seal("d0", X[:8])
    brain.seal("pool0", X[:24])
    seal(brain, "d0", X[4:64])
    tell(brain, "d0", FAST)
    placed = brain.placed(LONG, keys=X)
    assert own(placed)[-1][0] + own(placed)[-1][1] == 64
    covered = [block for r in placed.decode_pulls for block in range(r.first_block, r.first_block + r.blocks)]
    assert covered == list(range(8, 64)), "each block once, none that is there already"
    assert placed.sources[:8] == bytes([Source.AT_DECODE]) * 8 and monotone(placed.sources)


def test_one_disk_serves_one_after_the_other_until_it_is_known_to_be_done() -> None:
    brain = mesh(1)
    brain.seal("p0", X)  # prefill asks nobody
    seal(brain, "d0", X)
    tell(brain, "d0", FAST)
    first = brain.placed(LONG, keys=X, request_id="one").terms["decode_load_ms"]
    assert brain.state._ledger.outgoing.ahead(tier_life(("d0", 1), Tier.SSD)) == 64 * BYTES
    second = brain.placed(LONG, keys=X, request_id="two").terms["decode_load_ms"]
    assert second == pytest.approx(first + 1000 * 64 * BYTES / FAST[1])
    brain.tick(60.0)
    assert len(brain.state._ledger.outgoing) == 0


def test_it_may_not_break_the_slo() -> None:
    compute_s = mesh(1).placed(LONG, keys=X).ttft_s
    for seconds, limit in ((compute_s * 0.5, None), (compute_s * 1.1, 0)):
        brain = mesh(1)
        seal(brain, "d0", X)
        tell(brain, "d0", (seconds, 1e12))
        placed = brain.placed(LONG, keys=X, ttft_slo_s=compute_s * 1.02)
        assert placed.decode_load_until == limit
        assert placed.ttft_s <= compute_s * 1.02


def test_the_last_token_is_never_read() -> None:
    """Prefill computes it in any case."""
    brain = mesh(1)
    seal(brain, "d0", X)
    tell(brain, "d0", FAST)
    assert own(brain.placed(64 * BLOCK, keys=X)) == [(0, 63, Tier.SSD)]
