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

    `load_s(name)` is the predicted load there. For prefill it is seconds of queued work before a new prompt; for decode
    it is the TBT with this request in the batch plus the seconds that it would wait for room. `requests(name)` counts
    the requests there. `cached_tokens(name)` is how many leading tokens of this prompt lie in the memory of that
    instance. All three include what was placed since the last heartbeat, and are computed when they are called.
    """

    half: str
    names: Sequence[str]
    load_s: Callable[[str], float]
    requests: Callable[[str], int]
    cached_tokens: Callable[[str], int]


class Choices(ABC):
    """What one request can be answered with. `now` is the conductor's clock in seconds. Policies take chance from `rng`
    alone, so that a recorded decision can be made again."""

    now: float
    rng: random.Random

    @property
    @abstractmethod
    def prefills(self) -> Pool:
        """The instances that may compute the prompt, at least one."""

    @abstractmethod
    def decodes(self, prefill: str) -> Pool:
        """Returns the instances that may decode what `prefill` computed; with none, `prefill` keeps the request. Raises
        KeyError where `prefill` is not in `prefills`."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The request goes to these two instances, which are the same one where it keeps the request."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Weigh:
    """The cost of each candidate decides. `fetch` says whether candidates may fetch prefixes from others, as the
    setting says."""

    fetch: bool = True


class PlacementPolicy(ABC):
    """Decides where a request runs. The conductor makes one object of the class at its start, without arguments, and
    calls it from one thread; the object's state must stay bounded. When a policy raises or answers with what was not
    offered, that is logged and the request is weighed."""

    @abstractmethod
    def choose(self, request: Schedule, choices: Choices) -> Pick | Weigh:
        """Answers `request`, which must not be changed, within microseconds, because every decision of the mesh waits
        for it."""


class PickingPolicy(PlacementPolicy):
    """A policy that picks one instance for each half, first the one that computes the prompt."""

    @abstractmethod
    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        """Returns one of `pool.names`; there is at least one."""

    def choose(self, request: Schedule, choices: Choices) -> Pick:
        """Picks a prefill instance, then a decode instance unless the first one keeps the request."""
        prefill = self.pick(request, choices.prefills, choices.rng)
        decodes = choices.decodes(prefill)
        return Pick(prefill, self.pick(request, decodes, choices.rng) if decodes.names else prefill)
