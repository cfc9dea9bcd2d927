"""Copies states between the slots of requests, around the steps that change them in place.

A cached snapshot is never stepped on: a chunk that goes on from one has it copied into its own slot first, and what is
to be kept after a chunk is copied out behind it. A row's state is copied to the row's second slot whenever its tokens
are whole blocks, so that the second slot has the state at the last of the row's full blocks when it is out of the
batch: before the step that goes beyond that border, which may be in vain, or once the last step that has the row is
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvmesh.engine.batch import Column
from kvmesh.engine.cache_memory import is_state
from kvmesh.engine.runner import Runner
from kvmesh.kvcache.cache_groups import CacheGroup
from kvmesh.ranks.worker.tables import SNAPSHOT, SOURCE, STATE, role

Roles = Sequence[tuple[int, ...]]  # of one request: the slots of each STATE group's state, by role


class KeptStates(NamedTuple):
    """Holds copies of states, of each STATE group those in its `slots`."""

    slots: list[list[int]]
    copies: list[torch.Tensor]


class Snapshots:
    """Copies states for a runner over the memory of `groups`. What a step writes must have been launched before."""

    def __init__(self, runner: Runner, groups: Sequence[CacheGroup], block_tokens: int) -> None:
        self._runner = runner
        self._numbers = [number for number, group in enumerate(groups) if is_state(group)]
        self._block_tokens = block_tokens

    def __bool__(self) -> bool:
        """Whether there are states at all."""
        return bool(self._numbers)

    def load(self, requests: Sequence[Roles]) -> None:
        """Copies the source of each request that has one into its slot."""
        self._copy(requests, SOURCE, STATE)

    def save(self, requests: Sequence[Roles]) -> None:
        """Copies the state of each request that has a slot for its snapshot into that."""
        self._copy(requests, STATE, SNAPSHOT)

    def save_at_borders(self, tokens: Column, rows: Sequence[Roles]) -> None:
        """Saves the states of those rows whose `tokens`, int64 `[rows]`, are whole blocks."""
        self.save([rows[at] for at in np.flatnonzero(tokens % self._block_tokens == 0).tolist()])

    def keep(self, requests: Sequence[Roles]) -> KeptStates | None:
        """Copies the states of requests aside, for `put_back`; None where there are none."""
        if not self._numbers or not requests:
            return None
        slots = [[role(roles[at], STATE) for roles in requests] for at in range(len(self._numbers))]
        return KeptStates(slots, self._runner.keep_states(slots))

    def put_back(self, kept: KeptStates, which: Sequence[int]) -> None:
        """Makes the states of those of the requests what they were."""
        self._runner.put_back_states(kept.slots, kept.copies, which)

    def _copy(self, requests: Sequence[Roles], source: int, target: int) -> None:
        for at, number in enumerate(self._numbers):
            both = [(role(roles[at], source), role(roles[at], target)) for roles in requests]
            if both := [(one, other) for one, other in both if one >= 0 and other >= 0]:
                sources, targets = zip(*both, strict=True)
                self._runner.copy_slots(number, sources, targets)
