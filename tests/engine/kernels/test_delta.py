"""Gated DeltaNet's kernels against the torch forms: rows and chunks of one step, in place by slot."""

from __future__ import annotations

import pytest
import torch

from kvmesh.engine.attention import delta
from kvmesh.engine.attention.delta import Runs, StateSlots
from tests.support.engine.delta_oracle import DeltaCase

CASE, ODD = DeltaCase(), DeltaCase(key_heads=1, repeats=3, key_dim=16, value_dim=7, kernel=2)


@pytest.mark.parametrize(
    ("case", "lengths"),
    [(CASE, [1, 1, 1]), (CASE._replace(key_heads=1), [1, 34, 3]), (ODD, [1, 1, 1]), (ODD, [17, 16])],
    ids=str,
)
def test_a_step_equals_torch(case: DeltaCase, lengths: list[int], device: torch.device) -> None:
    from kvmesh.engine.kernels import delta as kernels

    inputs = case.inputs(sum(lengths), 4)
    states, known = (part.to(device) for part in case.states(5, 4))
    wanted_states, wanted_known = states.clone(), known.clone()
    slots, runs = torch.tensor([3, 0, 4][: len(lengths)], device=device), Runs(lengths, device)
    x, weight, log_decay, rate = (part.to(device) for part in inputs[:4])

    mixed = kernels.convolve(x, weight, known, slots, runs.table, runs.of_token)
    wanted = delta.torch_convolve(x, weight, StateSlots(wanted_known, slots), runs)
    torch.testing.assert_close(mixed, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(known, wanted_known)

    out = kernels.delta_rule(mixed, log_decay, rate, states, slots, runs.table, runs.rows)
    wanted = delta.torch_delta_rule(mixed, log_decay, rate, StateSlots(wanted_states, slots), runs)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(states, wanted_states, rtol=1e-4, atol=2e-5)


def test_states_that_lie_apart(device: torch.device) -> None:
    """A layer's states of a slot are a part of the slot: others' stay."""
    from kvmesh.engine.kernels import delta as kernels

    case, lengths = CASE._replace(key_heads=1), [1, 18]
    x, weight, log_decay, rate = (part.to(device) for part in case.inputs(sum(lengths), 6)[:4])
    slots, runs = torch.tensor([1, 2], device=device), Runs(lengths, device)
    wide_states, wide_known = (torch.stack((part, part + 1), 1).to(device) for part in case.states(4, 6))
    before = wide_states.clone(), wide_known.clone()
    states, known = wide_states[:, 1], wide_known[:, 1]
    mixed = kernels.convolve(x, weight, known, slots, runs.table, runs.of_token)
    kernels.delta_rule(mixed, log_decay, rate, states, slots, runs.table, runs.rows)
    for now, old in zip((wide_states, wide_known), before, strict=True):
        assert torch.equal(now[:, 0], old[:, 0]) and torch.equal(now[[0, 3]], old[[0, 3]])
        assert not torch.equal(now[1:3, 1], old[1:3, 1])
