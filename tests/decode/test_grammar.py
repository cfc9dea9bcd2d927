"""A request with a grammar at decode: compiled at its admission, in no batch before every rank has it, its answer's
tokens with every Join, and errors of its own."""

from __future__ import annotations

import pytest

from kvmesh.errors import GrammarFailed, InternalError, InvalidRequest
from kvmesh.instance.sampling import history_of, sampling_of
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2
from kvmesh.rpc.protocol import MAX_GRAMMAR_BYTES
from kvmesh.services.decode import events as e
from kvmesh.services.decode.events import Phase
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import Limits, RankShape, Shape

RANKS = tuple(RankShape(segment=f"s{r}", shard_bytes=1, page_base_offset=0, extent_base_offset=0) for r in range(2))
SHAPE = Shape(block_tokens=16, num_pages=64, num_extents=8, direct_landing=True, max_context_tokens=1000, ranks=RANKS)
PROMPT = tuple(range(10))


def begun(answered: int = 0) -> Handoff:
    sampling = m.Sampling(0.0, 1.0, 0, 0, grammar="g", answered=answered)
    spec = e.Spec(
        request_id="r",
        prompt_tokens=10,
        max_tokens=50,
        deadline_ns=1 << 60,
        sampling=sampling,
        said=pack_tokens(PROMPT),
    )
    h = Handoff(1, spec, Limits(), SHAPE)
    h.adopts = True
    orders = [a for a in h.begin(1) if isinstance(a, m.TellRank)]
    assert orders == [m.TellRank(rank, m.CompileGrammar(1, "g")) for rank in (0, 1)]
    h.step(e.BeginFill(1), 2)
    return h


def joins(actions: list[e.Action]) -> list[m.Join]:
    return [a.message for a in actions if isinstance(a, m.TellRank) and isinstance(a.message, m.Join)]


def compiled(h: Handoff, rank: int, why_not: str = "") -> list[e.Action]:
    return h.step(m.FromRank(rank, m.GrammarCompiled(1, why_not)), 3)


def test_it_is_ready_when_the_last_rank_has_compiled() -> None:
    h = begun()
    h.step(e.Adopted(e.FirstToken(7, None, 0), (0,)), 4)
    compiled(h, 1)
    assert h.phase is Phase.LOADING
    compiled(h, 0)
    assert h.phase is Phase.READY


@pytest.mark.parametrize("answered", [0, 3])
def test_every_join_has_the_answers_tokens(answered: int) -> None:
    """Those of an earlier attempt, which end the prompt, are the answer's; those made here follow them."""
    h = begun(answered)
    compiled(h, 0), compiled(h, 1)
    h.step(e.Adopted(e.FirstToken(7, None, 0), (0,)), 4)
    [join, _] = joins(h.step(e.Seat(), 5))
    assert join.history == m.TokenHistory(b"", pack_tokens([*PROMPT[10 - answered :], 7]))
    assert h.token(8, 1, 6) and h.token(9, 2, 7)
    h.step(e.Preempt([3]), 8)
    h.step(m.FromRank(0, m.Left(1)), 9)
    for rank in (0, 1):
        h.step(m.FromRank(rank, m.Copied(1, False, 9, 9)), 9)
    h.step(e.LoadExtents([5]), 10)
    again = [a for rank in (0, 1) for a in h.step(m.FromRank(rank, m.Copied(1, True, 11, 11)), 11)]
    assert joins(again)[0].history == m.TokenHistory(b"", pack_tokens([*PROMPT[10 - answered :], 7, 8, 9]))


def test_what_does_not_compile_is_the_clients_error() -> None:
    h = begun()
    [fail] = [a for a in compiled(h, 0, "grammar: no rule") if isinstance(a, e.EmitFail)]
    assert type(fail.error) is InvalidRequest and fail.error.field == "grammar"
    assert not [a for a in compiled(h, 1, "grammar: no rule") if isinstance(a, e.EmitFail)], "it ends once"


@pytest.mark.parametrize(("code", "kind"), [("grammar_failed", GrammarFailed), ("", InternalError)])
def test_a_fault_of_the_grammar_is_named_and_blocks_are_kept(code: str, kind: type[Exception]) -> None:
    h = begun()
    compiled(h, 0), compiled(h, 1)
    h.step(e.Adopted(e.FirstToken(7, None, 0), (0,)), 4)
    h.step(e.Seat(), 5)
    told = h.step(m.FromRank(0, m.RankError((1,), "decode step: grammar: x", code)), 6)
    [fail] = [a for a in told if isinstance(a, e.EmitFail)]
    assert type(fail.error) is kind and h.failed is not bool(code)


def test_the_grammar_and_its_end_are_told_to_the_ranks() -> None:
    wanted = common_pb2.SamplingParams(top_p=1.0, grammar="g", ignore_eos=True, answered_tokens=2)
    told = sampling_of(wanted, 10, 100)
    assert (told.grammar, told.may_end, told.answered) == ("g", False, 2)
    assert history_of(told, PROMPT, [5]) == m.TokenHistory(b"", pack_tokens([8, 9, 5]))
    assert sampling_of(common_pb2.SamplingParams(top_p=1.0, grammar="g"), 10, 100).may_end
    for text in ("x" * (MAX_GRAMMAR_BYTES + 1), "é" * (MAX_GRAMMAR_BYTES // 2 + 1)):
        with pytest.raises(InvalidRequest, match="grammar="):
            sampling_of(common_pb2.SamplingParams(top_p=1.0, grammar=text), 10, 100)
