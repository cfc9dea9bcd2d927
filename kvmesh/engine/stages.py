"""Pipeline stages: which layers of the model one rank has, and what crosses the borders between stages.

Stage s has a run of layers. Of each step it receives what stage s - 1 made of all tokens, `[T, hidden_size]` (the
residual: what the next layer's norm makes of it, that layer's stage computes), and sends on what its own layers make
of it. The first stage has the embedding, the last one the norm and the head: it alone samples.

A stage does not wait for the one behind it: what it sends may be on its way while it computes the next step, so that
chunk k of a prompt is at stage s while chunk k + 1 is at stage s - 1. Only tokens of decode rows go back, from the last
stage to all others, where a row needs its last token before it can go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvmesh.engine.axes import Axes
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.parallel import RankMesh, share
from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import CacheGroup, is_single

# Steps whose answers may be on their way to the next stage: their memory is held until it has taken them.
MOST_SENT = 2


def stage_layers(config: ModelConfig, axes: Axes, rank: int) -> range:
    """Returns the layers of the model that a rank has. Raises ConfigError where there are more stages than layers."""
    if axes.pp > config.layers:
        raise ConfigError(f"pp={axes.pp}: more stages than the model's {config.layers} layers", field="pp")
    return share(config.layers, axes.place(rank).pp, axes.pp)


def stage_groups(groups: Sequence[CacheGroup], layers: range) -> tuple[CacheGroup, ...]:
    """Returns the cache groups as a stage with these layers sees them: layers count from its first. Raises ConfigError
    where the stage has no layer of a group: every rank keeps a part of every group."""
    found = []
    for group in groups:
        own = tuple(layer - layers.start for layer in group.layers if layer in layers)
        if not own:
            raise ConfigError(
                f"pp: a stage with layers {layers.start}..{layers.stop - 1} has none of cache group {group.name}, of "
                "which every rank keeps a part: fewer stages are needed",
                field="pp",
            )
        found.append(replace(group, layers=own) if own != group.layers else group)
    return tuple(found)


def check_stages(config: ModelConfig, axes: Axes) -> None:
    """Raises ConfigError unless a service can have such stages: as many layers in each, since a block has one size at
    every rank, and the same layers of each cache group."""
    if config.layers % axes.pp:
        raise ConfigError(f"pp={axes.pp}: must divide the model's {config.layers} layers", field="mesh")
    if axes.pp > 1 and not is_single(config.cache_groups):
        cuts = [stage_groups(config.cache_groups, share(config.layers, pp, axes.pp)) for pp in range(axes.pp)]
        for group, *others in zip(*cuts, strict=True):
            if any(len(other.layers) != len(group.layers) for other in others):
                raise ConfigError(
                    f"pp={axes.pp}: the stages have not as many layers of cache group {group.name} each", field="mesh"
                )


class BusyTime(NamedTuple):
    """Says from when a stage had what it computes in a step, until when it had computed it (CLOCK_MONOTONIC, ns)."""

    from_ns: int
    until_ns: int


class StageClock:
    """Measures when a stage begins and ends what it computes in a step, without what it waits for other stages. On a
    CUDA device, whose work is launched ahead, events in its stream tell; they are read once the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[Any] = []  # where the step begins, has come, and is computed
        self._marks = [0, 0, 0]

    def mark(self, place: int) -> None:
        """Notes that the step begins (0), that what the stage before sent has come (1), or that the stage's layers are
        computed (2)."""
        now = time.monotonic_ns()
        self._marks[place:] = [now] * (3 - place)
        if self._cuda:
            if not self._events:
                event: Any = torch.cuda.Event
                self._events = [event(enable_timing=True) for _ in self._marks]
            for event in self._events[place:]:
                event.record()

    def busy(self, end_ns: int) -> BusyTime:
        """Returns the times of the step, which ended at `end_ns`."""
        begun, came, computed = self._marks
        if self._events and self._events[2].query():
            start, received, done = self._events
            came = begun + round(start.elapsed_time(received) * 1e6)
            computed = max(came, begun + round(start.elapsed_time(done) * 1e6))
        return BusyTime(min(came, end_ns), min(computed, end_ns) if computed > came else end_ns)


class Stage:
    """Is the stage of one rank: `first` and `last` say whether it begins or ends the pipeline."""

    def __init__(self, mesh: RankMesh, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._hidden, self._dtype, self._device = mesh.group("pp"), hidden_size, dtype, device
        self.first, self.last = self._group.rank == 0, self._group.rank == self._group.size - 1
        self.alone = self._group.size == 1
        self._sent: deque[Callable[[], None]] = deque()
        self._clock = StageClock(device)

    def begin(self) -> None:
        """Begins a step."""
        if not self.alone:
            self._clock.mark(0)

    def busy(self, end_ns: int) -> BusyTime:
        """Returns when this stage computed in the step that ended at `end_ns`; zeros where there is one stage."""
        return BusyTime(0, 0) if self.alone else self._clock.busy(end_ns)

    def receive(self, tokens: int) -> torch.Tensor:
        """Returns the residual of so many tokens, once the stage before has it. Raises RanksLost."""
        hidden = torch.empty(tokens, self._hidden, dtype=self._dtype, device=self._device)
        self._group.recv(hidden, self._group.rank - 1)
        self._clock.mark(1)
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Gives the residual to the next stage, and waits only while that has not taken what it was given `MOST_SENT`
        steps ago. Nobody may change `hidden` any more. Raises RanksLost."""
        self._clock.mark(2)
        while len(self._sent) >= MOST_SENT:
            self._sent.popleft()()
        self._sent.append(self._group.begin_send(hidden, self._group.rank + 1))

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Gives int64 `tokens [rows]` to all stages before, which have asked for them by `await_tokens` before this one
        computed the step. Raises RanksLost."""
        for stage in range(self._group.size - 1):
            self._group.send(tokens, stage)

    def await_tokens(self, rows: int) -> Callable[[], torch.Tensor]:
        """Returns what waits for the tokens of the last stage, int64 `[rows]`. Raises RanksLost, then too."""
        tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
        wait = self._group.begin_recv(tokens, self._group.size - 1)

        def result() -> torch.Tensor:
            wait()
            return tokens

        return result
