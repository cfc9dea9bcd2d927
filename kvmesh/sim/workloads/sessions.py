"""Agents: sessions whose next turn comes when the last answer has been read, with a prompt that holds all before it.

A session's first prompt is a system prompt, that all sessions of its application share, and what is asked. Every later
one is the prompt before it, its answer, and what is asked now. Everything but the moments follows from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise

from kvmesh.errors import ConfigError
from kvmesh.sim.workloads.synthetic import LengthDistribution, check_lengths
from kvmesh.sim.workloads.workload import SimRequest, key

MAX_REQUESTS = 10_000_000
_STRIDE = 1 << 64  # of segments in key numbers: offsets lie below


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """What is asked. Seconds, tokens; ConfigError names field and value."""

    sessions: int = 24
    turns: int = 7
    start_s: float = 10.0  # sessions begin evenly within so long
    think_s: float = 2.0  # from an answer's end to the next turn: half to one and a half times as long
    block_tokens: int = 512
    applications: int = 4  # system prompts
    system: LengthDistribution = field(default_factory=lambda: LengthDistribution(1_000, 0.0))
    user: LengthDistribution = field(default_factory=lambda: LengthDistribution(300, 0.5, 8_000))
    output: LengthDistribution = field(default_factory=lambda: LengthDistribution(200, 0.5, 4_000))

    def __post_init__(self) -> None:
        """Everything that cannot be."""
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, LengthDistribution):
                check_lengths(one.name, value)
                continue
            least = 0 if one.name in ("start_s", "think_s") else 1
            if not least <= value < math.inf:
                raise ConfigError(f"{one.name}={value:g}: must be at least {least}", field=one.name)
        if self.sessions * self.turns > MAX_REQUESTS:
            shown = f"{self.sessions}x{self.turns}"
            raise ConfigError(f"sessions={shown}: must be at most {MAX_REQUESTS:,} requests", field="sessions")


class SessionClients:
    """See `workload.Clients`. Requests bear the number of their session times `turns`, and that of their turn."""

    def __init__(self, config: SessionConfig, seed: int = 0) -> None:
        self._config, self._seed = config, seed

    def first(self) -> Iterator[SimRequest]:
        """The first turns, evenly apart."""
        config = self._config
        for number in range(config.sessions):
            yield self._turn(number, 0, number * config.start_s / config.sessions)

    def after(self, index: int, now: float, *, done: bool) -> SimRequest | None:
        """The next turn of the session, when its user has thought; None: it was the last, or has no answer."""
        number, turn = divmod(index, self._config.turns)
        if turn + 1 == self._config.turns or not done:
            return None
        think_s = self._config.think_s * (0.5 + self._random("think", number, turn).random())
        return self._turn(number, turn + 1, now + think_s)

    def _random(self, what: str, *numbers: int) -> random.Random:
        return random.Random(f"{self._seed}:{what}:{numbers}")

    def _turn(self, number: int, turn: int, at_s: float) -> SimRequest:
        config, block = self._config, self._config.block_tokens
        application = number % config.applications
        lengths = [config.system.draw(self._random("system", application))]  # of all that was said, piece by piece
        for at in range(turn + 1):
            lengths.append(config.user.draw(self._random("user", number, at)))
            lengths.append(config.output.draw(self._random("output", number, at)))
        ends = list(accumulate(lengths))
        prompt, whole = ends[-2], ends[-1]
        # The last token of an answer is never computed.
        chain = self._keys(number, application, ends, whole - 1)
        left = ends[-4] // block * block if turn else 0
        return SimRequest(
            number * config.turns + turn,
            at_s,
            prompt,
            lengths[-1],
            chain[: prompt // block],
            session=f"s{number}",
            tenant=f"app{application}",
            answer_keys=chain[prompt // block :] if turn + 1 < config.turns else (),
            left_tokens=left,
        )

    def _keys(self, number: int, application: int, ends: list[int], length: int) -> tuple[bytes, ...]:
        """Of the full blocks of the first `length` tokens. A block is known by the piece in which it ends and where."""
        block, found = self._config.block_tokens, list[bytes]()
        for piece, (start, stop) in enumerate(pairwise((0, *ends))):
            # System prompts have the first numbers; else a session's own.
            segment = application if piece == 0 else self._config.applications + (number << 20) + piece
            first = -(-(start + 1) // block) * block
            found += [key(segment * _STRIDE + end - start) for end in range(first, min(stop, length) + 1, block)]
        return tuple(found)
