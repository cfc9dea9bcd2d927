"""What a placement policy is, and all that it sees: docs/howto/add-a-placement-policy.md adds one. Pure.

A policy answers one request with a `Pick`, two instances by name, or with `Weigh`: then the cost of every candidate
decides, as Algorithm 1 of the Mooncake paper has it. What is predicted for instances that were picked is what weighing
them would predict, and by that the request is refused where it would be. An instance that was picked uses the prefix
that it has itself: nothing is fetched from others.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.services.conductor.domain import Schedule as Schedule


@dataclass(frozen=True, slots=True)
class Pool:
    """The instances that one half of a request may go to, by `instance_id`. `half` is "prefill" or "decode".

    `load_s(name)` is the load that is predicted there: seconds of queued work before a new prompt; or the TBT with this
    request in the batch, and what it would wait for room. `requests(name)` counts the requests that are there.
    `cached_tokens(name)` says how many leading tokens of this prompt lie in the memory of that instance.
    All three count what was placed since the last heartbeat; they are computed when they are asked for."""

    half: str
    names: Sequence[str]
    load_s: Callable[[str], float]
    requests: Callable[[str], int]
    cached_tokens: Callable[[str], int]


class Choices(ABC):
    """What one request can be answered with. `now` is the conductor's clock in seconds. Chance comes from `rng` alone,
    so that a recorded decision can be made again."""

    now: float
    rng: random.Random

    @property
    @abstractmethod
    def prefills(self) -> Pool:
        """The instances that may compute the prompt, at least one."""

    @abstractmethod
    def decodes(self, prefill: str) -> Pool:
        """The instances that may decode what `prefill` computed; none: it keeps the request. Raises KeyError where
        `prefill` is none of `prefills`."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The request goes to these two instances; both are the same one where it keeps the request."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Weigh:
    """The cost of each candidate decides. `fetch`: whether it may fetch prefixes from others, as the setting says."""

    fetch: bool = True


class PlacementPolicy(ABC):
    """Decides who gets a request. The conductor makes one object of the class, without arguments, when it starts, and
    asks it from one thread; what the object remembers must stay bounded. A policy that raises, or answers with what
    was not offered, is logged, and that request is weighed."""

    @abstractmethod
    def choose(self, request: Schedule, choices: Choices) -> Pick | Weigh:
        """Answers `request`, which is not to be changed, in microseconds: every decision of the mesh waits."""


class PickingPolicy(PlacementPolicy):
    """A policy that picks the instance of each half by itself, first the one that computes the prompt."""

    @abstractmethod
    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        """Returns one of `pool.names`; there is at least one."""

    def choose(self, request: Schedule, choices: Choices) -> Pick:
        """Picks a prefill instance, then a decode instance unless the first one keeps the request."""
        prefill = self.pick(request, choices.prefills, choices.rng)
        decodes = choices.decodes(prefill)
        return Pick(prefill, self.pick(request, decodes, choices.rng) if decodes.names else prefill)
