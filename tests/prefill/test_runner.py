"""The runner around the real brain, with ranks that end at the worst moment."""

from __future__ import annotations

from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.report import Reporter
from kvmesh.services.prefill.runner import PrefillRunner
from tests.support.prefill.script import make_state


class Mortal:
    """A rank whose socket breaks under a PushCancel or PrefillStep, as RankClient.send notices it."""

    def __init__(self) -> None:
        self.runner: PrefillRunner | None = None
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
    runner = rank.runner = PrefillRunner(
        state, [rank], PeerSegments([rank]), reporter, ServedWeights("f00d"), lambda: None
    )
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


class Others:
    """Takes messages for a rank and pull jobs, and keeps them."""

    def __init__(self) -> None:
        self.messages: list[m.ToRank] = []
        self.jobs: list[PullJob] = []
        self.cancelled: list[int] = []

    def send(self, message: m.ToRank, /) -> None:
        self.messages.append(message)

    def pull(self, job: PullJob, /) -> None:
        self.jobs.append(job)

    def cancel_pull(self, ticket: int, /) -> None:
        self.cancelled.append(ticket)


def hinted(handle: int, keys: bytes, *holders: str) -> pb.StartPrefill:
    """A prompt of three blocks of 4 tokens and one more token; each holder has all of them."""
    start = pb.StartPrefill(handle=handle, request_id=f"r{handle}", model_fingerprint="f00d", block_keys=keys)
    start.token_ids, start.sampling.top_p = pack_tokens([1] * 13), 1.0
    for name in holders:
        ref = pb_common.InstanceRef(instance_id=name, address="10.0.0.1:7", incarnation=5)
        start.pulls.add(holder=ref, first_block=0, blocks=3)
    return start


async def test_pulls_go_out_and_what_they_bring_is_reported() -> None:
    state, others = make_state(extents=8), Others()
    reporter = Reporter(state, "prefill-1")
    runner = PrefillRunner(state, [others], PeerSegments([others]), reporter, ServedWeights("f00d"), lambda: None)
    runner.puller = others
    stream = runner.open_stream([])
    keys = bytes(range(48))
    # Hints that name this instance itself are left out.
    runner.take(stream, pb.HandoffRequest(start=hinted(1, keys, "prefill-1", "prefill-2")))
    [job] = others.jobs
    assert [(r.instance_id, r.address, r.incarnation) for r in job.ranges] == [("prefill-2", "10.0.0.1:7", 5)]
    assert job.keys == (keys[:16], keys[16:32], keys[32:]) and job.timeout_ms == 200
    assert reporter.pools(streams=1).pulls == 1 and reporter.pools(streams=1).store_writing == 3
    assert reporter.beat().load.queued_tokens == 1, "what is on its way need not be computed"

    runner.pulled(Pulled(job.ticket, (0, 1), 640, 1000, "evicted"))
    load, step = others.messages
    assert isinstance(load, m.LoadCopy) and isinstance(step, m.PrefillStep)
    runner.rank_said(0, m.LoadCopied(load.ticket, 1, 2))
    runner.rank_said(0, m.PrefillStepDone(step.step_id, 3, 4, (m.Sampled(1, 42),)))
    [first] = [e.first_token for e in stream.outbox if e.HasField("first_token")]
    assert (first.cached_tokens, first.timings.pulled_tokens, first.timings.pull_bytes) == (8, 8, 640)
    runner.take(stream, pb.HandoffRequest(cancel=pb.CancelHandoff(handle=1)))
    runner.rank_said(0, m.PushDrained(1))
    assert runner.idle.is_set()
    told = reporter.beat().load
    assert (told.prompt_tokens, told.device_hit_tokens, told.host_hit_tokens, told.remote_hit_tokens) == (13, 0, 0, 8)
    assert (told.pulled_bytes, told.store_blocks, told.store_capacity, told.free_extents) == (640, 2, 8, 7)

    other_keys = bytes(range(48, 96))
    runner.take(stream, pb.HandoffRequest(start=hinted(2, other_keys, "prefill-2")))
    runner.take(stream, pb.HandoffRequest(cancel=pb.CancelHandoff(handle=2)))
    assert others.cancelled == [others.jobs[1].ticket]
    runner.pulled(Pulled(others.jobs[1].ticket, (), 0, 1000, "cancelled"))
    assert reporter.pools(streams=1).pulls == 0
    runner.close_stream(stream)
    runner.close()
