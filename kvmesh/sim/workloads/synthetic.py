"""Requests that nobody sent: sessions over prefix trees, Poisson or Gamma arrivals. Everything follows from the seed.

A session belongs to an application. Its prompts begin with the application's system prompt, then with one node after
the other of a tree below it (documents, tools, examples: which child, is drawn by Zipf's law), then with what was said
in the session so far, and end with what is said now. So prompts share prefixes at every depth: all of an application,
those of a subtree, the turns of one session.

An arrival continues the session that has been ready longest (its think time is over); where none is, a new one begins.
Arrivals are therefore exactly the process that is asked for, and what is held is bounded by those who think.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Lane
from kvmesh.sim.workloads.workload import SimRequest, key

MAX_TOKENS = 1 << 30
_STRIDE = 1 << 64  # of node numbers in key numbers: offsets lie below


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Tokens, log-normal with this mean; `spread` is the standard deviation of their logarithm, 0: always the mean.
    Never under 1 nor over `most`."""

    mean: float
    spread: float = 1.0
    most: int = 128_000

    def draw(self, source: random.Random) -> int:
        """One of them."""
        middle = math.log(self.mean) - self.spread**2 / 2
        drawn = math.exp(middle + self.spread * source.gauss(0.0, 1.0)) if self.spread else self.mean
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What is made. ConfigError names field and value."""

    requests: int = 10_000  # 0: without end
    rate: float = 1.0  # requests a second
    # Coefficient of variation of the time between arrivals: 1 Poisson, over it Gamma in bursts, 0 evenly apart.
    burstiness: float = 1.0
    block_tokens: int = 512
    applications: int = 20  # system prompts
    zipf: float = 1.0  # their popularity, and that of children: rank^-zipf; 0: all alike
    system: LengthDistribution = field(default_factory=lambda: LengthDistribution(2_000, 1.0, 32_000))
    depth: int = 1  # levels of the tree below a system prompt
    branching: int = 200  # children of a node
    node: LengthDistribution = field(default_factory=lambda: LengthDistribution(4_000, 1.0, 64_000))
    turns: float = 3.0  # of a session, mean (geometric)
    think_s: float = 30.0  # between turns at least, mean (exponential)
    user: LengthDistribution = field(default_factory=lambda: LengthDistribution(500, 1.2, 32_000))  # what a turn adds
    output: LengthDistribution = field(default_factory=lambda: LengthDistribution(250, 1.0, 8_000))
    max_input: int = 128_000  # a session whose next prompt would be longer is over; prompts are cut to it
    batch_share: float = 0.0  # of the sessions in the batch lane
    origins: int = 1  # places that sessions come from

    def __post_init__(self) -> None:
        """Everything that cannot be."""
        least = {"requests": 0, "depth": 0, "zipf": 0, "think_s": 0, "batch_share": 0, "burstiness": 0}
        over = ("rate",)
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, LengthDistribution):
                check_lengths(name, value)
            elif name in over and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value:g}: must be over 0", field=name)
            elif not least.get(name, 0 if name in over else 1) <= value < math.inf:
                raise ConfigError(f"{name}={value:g}: must be at least {least.get(name, 1)}", field=name)
        if self.batch_share > 1:
            raise ConfigError(f"batch_share={self.batch_share:g}: must be between 0 and 1", field="batch_share")
        if max(self.applications, self.branching) > 1_000_000:
            raise ConfigError("applications, branching: must be at most 1,000,000", field="applications")


def check_lengths(name: str, lengths: LengthDistribution) -> None:
    """ConfigError names what cannot be."""
    if not 1 <= lengths.mean <= MAX_TOKENS or not 0 <= lengths.spread <= 5 or not 1 <= lengths.most <= MAX_TOKENS:
        shown = f"{lengths.mean:g}:{lengths.spread:g}:{lengths.most}"
        raise ConfigError(f"{name}={shown}: must be a mean of at least 1, a spread in 0..5, a bound", field=name)


@dataclass(slots=True)
class _Segment:
    """A piece of prompt: whatever bears this number here has these tokens, and the same ones before it."""

    number: int
    tokens: int


@dataclass(slots=True)
class _Session:
    number: int
    application: int
    lane: Lane
    origin: int
    path: list[_Segment]  # all that is said so far
    turns: int  # left


def synthetic(config: SyntheticConfig, seed: int = 0) -> Iterator[SimRequest]:
    """The requests of a seed, in the order of their arrival: the first n of them are the same whatever
    `config.requests` is."""
    maker = _Maker(config, seed)
    thinking: list[tuple[float, int, _Session]] = []  # ready at, order
    at_s, index = 0.0, 0
    while not config.requests or index < config.requests:
        at_s += maker.gap_s()
        ready = thinking and thinking[0][0] <= at_s
        session = heapq.heappop(thinking)[2] if ready else maker.session()
        yield maker.turn(session, index, at_s)
        if session.turns > 0 and maker.tokens(session) < config.max_input:
            heapq.heappush(thinking, (at_s + maker.think_s(), index, session))
        index += 1


class _Maker:
    """Draws all there is from one seed; nodes of the trees by their own, so that a tree is the same in every run."""

    def __init__(self, config: SyntheticConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._random = random.Random(f"{seed}:arrivals")
        self._sessions = 0
        self._unique = 0
        self._applications = _zipf(config.applications, config.zipf)
        self._children = _zipf(config.branching, config.zipf)

    def gap_s(self) -> float:
        """Until the next arrival: Gamma with mean 1 / rate and this coefficient of variation; 1 is Poisson."""
        if not self._config.burstiness:
            return 1 / self._config.rate
        shape = self._config.burstiness**-2
        return self._random.gammavariate(shape, 1 / (shape * self._config.rate))

    def think_s(self) -> float:
        return self._random.expovariate(1 / self._config.think_s) if self._config.think_s else 0.0

    def tokens(self, session: _Session) -> int:
        return sum(one.tokens for one in session.path)

    def session(self) -> _Session:
        """A new one, before its first turn."""
        config, source = self._config, self._random
        self._sessions += 1
        application = _draw(self._applications, source)
        name = f"{application}"
        path = [self._tree_node(name, config.system)]
        for _ in range(config.depth):
            name += f".{_draw(self._children, source)}"
            path.append(self._tree_node(name, config.node))
        lane = Lane.BATCH if source.random() < config.batch_share else Lane.INTERACTIVE
        more = 1 - 1 / config.turns  # of a further turn
        turns = 1 + (int(math.log(1 - source.random()) / math.log(more)) if more > 0 else 0)
        return _Session(self._sessions, application, lane, source.randrange(config.origins), path, turns)

    def _tree_node(self, name: str, lengths: LengthDistribution) -> _Segment:
        source = random.Random(f"{self._seed}:node:{name}")
        return _Segment(source.getrandbits(63) << 1, lengths.draw(source))

    def _own(self, tokens: int) -> _Segment:
        """Said once, in one session. Odd numbers, tree nodes have even ones."""
        self._unique += 1
        return _Segment(self._unique << 1 | 1, tokens)

    def turn(self, session: _Session, index: int, at_s: float) -> SimRequest:
        """The next one of it; its answer joins what was said."""
        config = self._config
        session.turns -= 1
        session.path.append(self._own(config.user.draw(self._random)))
        length = min(config.max_input, self.tokens(session))
        output = config.output.draw(self._random)
        keys = _keys(session.path, length, config.block_tokens)
        session.path.append(self._own(output))
        return SimRequest(
            index,
            at_s,
            length,
            output,
            keys,
            session=f"s{session.number}",
            origin=f"o{session.origin}",
            tenant=f"app{session.application}",
            lane=session.lane,
        )


def _keys(path: Sequence[_Segment], length: int, block: int) -> tuple[bytes, ...]:
    """A block is known by the segment in which it ends and where: what comes before that is always the same."""
    found: list[bytes] = []
    start, end = 0, block
    for segment in path:
        stop = min(start + segment.tokens, length)
        base = segment.number * _STRIDE
        while end <= stop:
            found.append(key(base + end - start))
            end += block
        start += segment.tokens
    return tuple(found)


def _zipf(count: int, power: float) -> list[float]:
    """Cumulative shares of ranks 1 to `count`."""
    sums = list(accumulate(rank**-power for rank in range(1, count + 1)))
    return [one / sums[-1] for one in sums]


def _draw(cumulative: Sequence[float], source: random.Random) -> int:
    return min(bisect_right(cumulative, source.random()), len(cumulative) - 1)
