"""Gated DeltaNet (arXiv 2412.06464): attention over a state of constant size in place of all earlier keys and values.

A head's state S is a matrix [key dim, value dim], float32. A token with query q, key k, value v, decay a and rate b
makes of it

    S' = a S,    S = S' + k (b (v - kᵀ S'))ᵀ,    and answers qᵀ S

where q and k are unit vectors, q is divided by the root of its size, and a comes as its logarithm, which is not
positive. Before that, queries, keys and values of a step go through a causal convolution over the last tokens, each
channel by itself, and through silu.

Shapes: T tokens of the step; K key heads of key dim, V value heads of value dim, V / K of them for each key head; W
channels of a key head: its query, its key, the values of its value heads (`DeltaConfig.width`). States are changed in
place, by slot; which tokens of the step are of which slot say `Runs`. Arithmetic is float32; answers are rounded once
to the dtype of x.

C++ on CPUs that have the operators, Triton on GPUs, torch elsewhere: the torch forms below are both the oracle and what
runs anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional

from kvmesh.engine.cache_memory import StateMemory, StateStep
from kvmesh.engine.kernels import kernels_for
from kvmesh.engine.ops import on_native

CHUNK = 64  # tokens whose products are made together
NORM_EPS = 1e-6


class Runs:
    """Says which tokens of a step are of which sequence: sequence i has `lengths[i]` tokens behind those of sequence
    i - 1. The first `rows` sequences have one token each. `table` int32 `[sequences, 2]` holds first token and length,
    `of_token` int32 `[T]` each token's sequence, on the device."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = np.array(lengths, np.int32)
        table = np.stack((np.cumsum(counts, dtype=np.int32) - counts, counts), 1)
        longer = np.flatnonzero(counts != 1)
        self.rows = int(longer[0]) if len(longer) else len(counts)
        self.spans: list[tuple[int, int]] = [(first, length) for first, length in table[self.rows :].tolist()]
        self.table = torch.from_numpy(table).to(device, non_blocking=True)
        of_token = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.of_token = torch.from_numpy(of_token).to(device, non_blocking=True)


class DeltaInputs(NamedTuple):
    """Is what a layer's attention is given: `x [T, K, W]` before the convolution, its `weight [kernel, K, W]`,
    logarithms of decays and rates `[T, V]`, these three float32."""

    x: torch.Tensor
    weight: torch.Tensor
    log_decay: torch.Tensor
    rate: torch.Tensor
    key_dim: int


class StateSlots(NamedTuple):
    """Is one layer's part of a cache group of states, `memory [slots, planes, heads, dim]` with any stride between
    slots, and the slot of each sequence of the step, int64 `[sequences]` on the device, each once."""

    memory: torch.Tensor
    slots: torch.Tensor


class DeltaStates:
    """Is the `StateBackend` of a model's layers of gated DeltaNet: `memory` has the group of the rule's states, then
    that of the convolution's inputs (`DeltaConfig.cache_groups`), of the same layers."""

    def __init__(self, memory: StateMemory) -> None:
        self.memory, self.device = memory, memory.tensors[0].device
        self.places = {layer: place for place, layer in enumerate(memory.groups[0].layers)}

    def plan(self, step: StateStep) -> DeltaPlan:
        """Plans one step. Slots of sequences that begin are made empty."""
        for number, slots in zip(self.memory.numbers, step.slots, strict=True):
            if fresh := [slot for slot, start in zip(slots, step.starts, strict=True) if not start]:
                self.memory.zero(number, fresh)
        return DeltaPlan(self, step)


class DeltaPlan:
    """Computes the layers for one step."""

    def __init__(self, owner: DeltaStates, step: StateStep) -> None:
        self._owner, self._runs = owner, Runs(step.lengths, owner.device)
        columns = torch.tensor(step.slots, dtype=torch.int64)
        self._slots = columns.to(owner.device, non_blocking=True)

    def attend_state(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        """As of `StatePlan`."""
        place = self._owner.places[layer]
        states, known = (
            StateSlots(tensor[:, place, :, :, 0], slots)
            for tensor, slots in zip(self._owner.memory.tensors, self._slots, strict=True)
        )
        return attend_state(inputs, states, known, self._runs)


def attend_state(inputs: DeltaInputs, states: StateSlots, known: StateSlots, runs: Runs) -> torch.Tensor:
    """Attends for one layer: returns the heads' answers, `[T, V * value dim]`, and moves the rule's `states` (`[slots,
    1, V, key dim * value dim]`, float32) and the convolution's inputs, `known` (`[slots, kernel - 1, K, W]`), on by
    the step's tokens. A sequence that begins has zeros in its slots."""
    slots, _, heads, size = states.memory.shape
    matrices = states.memory[:, 0].view(slots, heads, inputs.key_dim, size // inputs.key_dim)
    mixed = convolve(inputs.x, inputs.weight, known, runs)
    return delta_rule(mixed, inputs.log_decay, inputs.rate, StateSlots(matrices, states.slots), runs).flatten(1)


def convolve(x: torch.Tensor, weight: torch.Tensor, known: StateSlots, runs: Runs) -> torch.Tensor:
    """Computes `x [T, K, W]` (any stride between tokens and heads) → silu of its causal convolution with the
    float32 `weight [kernel, K, W]`, whose last row is of the token itself: `[T, K, W]`. `known.memory [slots, kernel -
    1, K, W]` holds the last inputs before the step, the oldest first, and after it those of the step."""
    if on_native(x):
        mixed: torch.Tensor = torch.ops.kvmesh.delta_convolve.default(x, weight, known.memory, known.slots, runs.table)
        return mixed
    if kernels := kernels_for(x.device.type, "delta"):
        return cast(torch.Tensor, kernels.convolve(x, weight, *known, runs.table, runs.of_token))
    return torch_convolve(x, weight, known, runs)


def torch_convolve(x: torch.Tensor, weight: torch.Tensor, known: StateSlots, runs: Runs) -> torch.Tensor:
    """Does what `convolve` does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps, rows, (memory, slots) = weight, runs.rows, known
    if rows:
        window = torch.cat((memory[slots[:rows]], x[:rows, None]), 1)
        out[:rows] = functional.silu((window.float() * taps).sum(1))
        memory[slots[:rows]] = window[:, 1:]
    for (first, length), slot in zip(runs.spans, slots[rows:].tolist(), strict=True):
        window = torch.cat((memory[slot], x[first : first + length]))
        total = window[:length].float() * taps[0]
        for back in range(1, len(taps)):
            total.addcmul_(window[back : back + length].float(), taps[back])
        out[first : first + length] = functional.silu(total)
        memory[slot] = window[length:]
    return out


def delta_rule(
    x: torch.Tensor, log_decay: torch.Tensor, rate: torch.Tensor, states: StateSlots, runs: Runs
) -> torch.Tensor:
    """Applies the rule to the tokens of `x [T, K, W]` (what `convolve` answers) with `log_decay` and `rate`, float32
    `[T, V]`. Returns `[T, V, value dim]`; `states.memory [slots, V, key dim, value dim]`, float32."""
    if on_native(x):
        out: torch.Tensor = torch.ops.kvmesh.delta_rule.default(x, log_decay, rate, *states, runs.table)
        return out
    if kernels := kernels_for(x.device.type, "delta"):
        return cast(torch.Tensor, kernels.delta_rule(x, log_decay, rate, *states, runs.table, runs.rows))
    return torch_delta_rule(x, log_decay, rate, states, runs)


def torch_delta_rule(
    x: torch.Tensor, log_decay: torch.Tensor, rate: torch.Tensor, states: StateSlots, runs: Runs
) -> torch.Tensor:
    """Does what `delta_rule` does."""
    memory, slots = states
    q, k, v = heads_of(x, *memory.shape[2:])
    out, rows = v.new_empty(v.shape), runs.rows
    if rows:
        part = slice(0, rows)
        state = memory[slots[part]]
        out[part] = recurrent_step(state, q[part], k[part], v[part], log_decay[part], rate[part])
        memory[slots[part]] = state
    for (first, length), slot in zip(runs.spans, slots[rows:].tolist(), strict=True):
        part = slice(first, first + length)
        out[part] = chunked(memory[slot], q[part], k[part], v[part], log_decay[part], rate[part])
    return out.to(x.dtype)


def heads_of(x: torch.Tensor, key_dim: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Takes `x [T, K, W]` apart: queries, keys (both `[T, K, key dim]`, of unit length, queries scaled) and values `[T,
    V, value dim]`, float32."""
    q, k, v = torch.split(x.float(), [key_dim, key_dim, x.shape[2] - 2 * key_dim], -1)
    q, k = (part * (part.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for part in (q, k))
    return q * key_dim**-0.5, k, v.reshape(len(x), -1, value_dim)


def recurrent_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
) -> torch.Tensor:
    """Computes one token of each row: `state [rows, V, key dim, value dim]` is changed in place, q and k `[rows, K, key
    dim]`, v `[rows, V, value dim]`, the others `[rows, V]`. Returns `[rows, V, value dim]`."""
    repeats = state.shape[1] // k.shape[1]
    q, k = (part.repeat_interleave(repeats, 1) for part in (q, k))
    state *= log_decay.exp()[..., None, None]
    told = (k[..., None, :] @ state).squeeze(-2)  # what the state has for the key already
    state += k[..., :, None] * ((v - told) * rate[..., None])[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2)


def chunked(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
) -> torch.Tensor:
    """Computes the tokens of one run by matrix products over chunks: `state [V, key dim, value dim]` is changed in
    place, shapes of the others are of `recurrent_step` with tokens for rows.

    In a chunk with decays a_1, a_2, ... from its first token on, G_i = a_1 ... a_i, token i writes d_i = b_i (v_i - G_i
    Sᵀ k_i - sum over j < i of G_i / G_j (k_i · k_j) d_j) along its key: a triangular system, since S is the same for
    all of the chunk. Its right side splits into what v says and what S says, so only S passes from chunk to chunk."""
    length, heads = v.shape[:2]
    repeats, padding = heads // k.shape[1], -length % CHUNK
    # Tokens that pad the last chunk have no decay, no rate and no key: they leave the state as it is.
    q, k, v = (functional.pad(part, (0, 0, 0, 0, 0, padding)) for part in (q, k, v))
    log_decay, rate = (functional.pad(part, (0, 0, 0, padding)) for part in (log_decay, rate))
    q, k = (part.repeat_interleave(repeats, 1) for part in (q, k))
    shape = heads, (length + padding) // CHUNK, CHUNK
    q, k, v = (part.transpose(0, 1).reshape(*shape, -1) for part in (q, k, v))  # [V, chunks, CHUNK, dim]
    sums = log_decay.t().reshape(shape).cumsum(-1)
    rate = rate.t().reshape(*shape, 1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()  # G_i / G_j for j <= i
    since = sums.exp()[..., None]
    system = (k * rate) @ k.transpose(-1, -2) * between
    right = torch.cat((v * rate, k * rate * since), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, told = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    among = q @ k.transpose(-1, -2) * between
    asked, kept = q * since, k * (sums[..., -1:] - sums).exp()[..., None]
    out = torch.empty_like(v)
    for chunk in range(v.shape[1]):
        written = own[:, chunk] - told[:, chunk] @ state
        out[:, chunk] = asked[:, chunk] @ state + among[:, chunk] @ written
        state *= since[:, chunk, -1:]
        state += kept[:, chunk].transpose(-1, -2) @ written
    return out.flatten(1, 2)[:, :length].transpose(0, 1)
