"""What samples tell of the steps of a prompt: how many, and what else was computed in them."""

from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.compute_progress import ComputeProgress
from kvmesh.services.prefill.planner import Chunk
from tests.support.prefill.script import make_state


def test_a_chunk_looks_at_all_before_it() -> None:
    whole = ComputeProgress().plus([Chunk(1, 0, 100, True)])
    halves = ComputeProgress().plus([Chunk(1, 0, 60, False)]).plus([Chunk(1, 60, 100, True)])
    assert (whole.tokens, whole.double_pairs) == (halves.tokens, halves.double_pairs) == (100, 10_000)
    assert (whole.steps, halves.steps) == (1, 2)
    assert halves.since(whole) == ComputeProgress(1, 0, 0)


BLOCK = 4


def start(handle: int, tokens: int) -> ev.Start:
    sampling = m.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
    keys = tuple(f"{handle}-{i}".encode() for i in range(tokens // BLOCK))
    return ev.Start(handle, 1, f"r{handle}", (1,) * tokens, keys, sampling, adopt=True)


def test_prompts_of_one_step_and_chunks_between_others() -> None:
    """Two short prompts share a step; a long one takes several, with steps of others between."""
    state = make_state(block=BLOCK, chunk=8, batch=16, long=8, pages=64, context=1000)
    ends: dict[int, ev.HandoffEnded] = {}
    steps: list[m.PrefillStep] = []

    def take(actions: list[ev.Action]) -> None:
        ends.update({a.handle: a for a in actions if isinstance(a, ev.HandoffEnded)})
        steps.extend(a.message for a in actions if isinstance(a, m.TellRank) and isinstance(a.message, m.PrefillStep))

    long = 3 * state.config.plan.prefill_chunk_tokens
    for handle, tokens in ((1, 3), (2, 2), (3, long), (4, 1)):
        take(state.step(start(handle, tokens), handle))
    now, chunks = 10, []
    while steps:
        step = steps.pop(0)
        chunks.append({item.handle: len(item.token_ids) for item in step.items})
        sampled = tuple(m.Sampled(item.handle, 7) for item in step.items if item.sample)
        take(state.step(m.FromRank(0, m.PrefillStepDone(step.step_id, now, now + 5, sampled)), now + 5))
        now += 10
    assert set(ends) == {1, 2, 3, 4}, chunks
    for handle, end in ends.items():
        own = [at for at, part in enumerate(chunks) if handle in part]
        meanwhile = chunks[own[0] : own[-1] + 1]
        assert (end.chunks, end.meanwhile.steps) == (len(own), len(meanwhile))
        assert end.meanwhile.tokens == sum(sum(part.values()) for part in meanwhile)
        assert end.meanwhile.tokens >= end.computed_tokens
    assert ends[3].meanwhile.steps >= 3
