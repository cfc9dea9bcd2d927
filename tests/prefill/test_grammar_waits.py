"""A prompt with a grammar is computed once every rank has compiled it; the others are not held up."""

from __future__ import annotations

from kvmesh.errors import GrammarFailed, InvalidRequest
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.state import PrefillState
from tests.support.prefill.script import BOOT_NS, make_state, prompt

COMPILE = m.CompileGrammar(1, "g")


def start(handle: int, grammar: str = "") -> ev.Start:
    tokens, keys = prompt("ab"[handle - 1] + "+2", 4)
    return ev.Start(handle, 1, f"r{handle}", tokens, keys, m.Sampling(0.0, 1.0, 0, 0, grammar=grammar))


def steps(actions: list[ev.Action]) -> list[m.PrefillStep]:
    """Those that rank 0 is told."""
    told = (a.message for a in actions if isinstance(a, m.TellRank) and a.rank == 0)
    return [message for message in told if isinstance(message, m.PrefillStep)]


def compiled(state: PrefillState, rank: int, why_not: str = "") -> list[ev.Action]:
    return state.step(m.FromRank(rank, m.GrammarCompiled(1, why_not)), BOOT_NS)


def test_it_waits_for_every_rank_and_nobody_waits_for_it() -> None:
    state = make_state(ranks=2)
    orders = state.step(start(1, "g"), BOOT_NS)
    assert orders == [m.TellRank(0, COMPILE), m.TellRank(1, COMPILE)]
    [other] = steps(state.step(start(2), BOOT_NS))
    assert [item.handle for item in other.items] == [2], "a prompt behind it in the queue goes first"
    assert not steps(compiled(state, 1))
    [own] = steps(compiled(state, 0))
    [item] = own.items
    assert item.handle == 1 and item.sample is not None and item.sample.grammar == "g"
    assert item.history == m.TokenHistory(b"", b""), "no token of the prompt is the answer's"


def test_what_does_not_compile_ends_its_request_alone_with_the_reason() -> None:
    state = make_state(ranks=2)
    state.step(start(1, "g"), BOOT_NS)
    [failed] = [a for a in compiled(state, 1, "grammar: no rule") if isinstance(a, ev.SendFailed)]
    assert type(failed.error) is InvalidRequest and failed.error.field == "grammar" and failed.drained
    assert not compiled(state, 0, "grammar: no rule") and not state.handoffs
    assert steps(state.step(start(2), BOOT_NS))
    state.check_integrity()


def test_its_error_is_named() -> None:
    state = make_state()
    state.step(start(1, "g"), BOOT_NS)
    compiled(state, 0)
    told = state.step(m.FromRank(0, m.RankError((1,), "prefill step: grammar: too much", "grammar_failed")), BOOT_NS)
    [failed] = [a for a in told if isinstance(a, ev.SendFailed)]
    assert type(failed.error) is GrammarFailed and not failed.error.retryable and "too much" in failed.error.message
