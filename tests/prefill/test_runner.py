"""The runner around the real brain, with ranks that end at the worst moment."""

from __future__ import annotations

from kvmesh.kvcache.keys import pack_tokens
from kvmesh.node import messages as m
from kvmesh.node.segments import Segments
from kvmesh.rpc.pb import prefill_pb2 as pb
from services.prefill import events as ev
from services.prefill.report import Reporter
from services.prefill.runner import Runner
from tests.prefill.script import make_state


class Mortal:
    """A rank whose socket breaks under a PushCancel or PrefillStep, as RankClient.send notices it."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.dies = False
        self.dead = False

    def send(self, message: m.ToRank, /) -> None:
        if self.dies and not self.dead and isinstance(message, m.PushCancel | m.PrefillStep):
            self.dead = True
            assert self.runner is not None
            self.runner.feed(ev.RankLost(0, "rank 0 is gone"))


async def test_a_rank_that_is_lost_while_it_is_written_to() -> None:
    """The loss comes up inside of an event: it waits its turn, and every handoff still has one ending."""
    state, rank = make_state(), Mortal()
    reporter = Reporter(state, "prefill-1")
    runner = rank.runner = Runner(state, [rank], Segments([rank]), reporter, "f00d", lambda: None)
    stream = runner.open_stream([])
    for handle in (1, 2):
        start = pb.StartPrefill(handle=handle, request_id=f"r{handle}", model_fingerprint="f00d")
        start.token_ids, start.sampling.top_p = pack_tokens([1, 2, handle]), 1.0
        runner.take(stream, pb.HandoffRequest(start=start))
    assert not runner.idle.is_set()
    rank.dies = True
    runner.feed(ev.RanksSilent("rank 0 is silent"))
    assert rank.dead
    told = [(e.failed.handle, e.failed.error.code) for e in stream.outbox if e.HasField("failed")]
    assert sorted(told) == [(1, "handoff_lost"), (2, "handoff_lost")]
    assert runner.idle.is_set() and state.pool.free == state.pool.total
    runner.close_stream(stream)
    runner.close()
