"""The axes along which the ranks of one instance share a model: arithmetic of ranks, without torch.

Slowest first: `dp` copies of everything below, of which each computes rows of its own; `pp` stages of layers; `cp`
ranks that share the tokens of a context; `tp` ranks that share heads, MLPs and the vocabulary. Rank r stands at

    r = ((dp * size_pp + pp) * size_cp + cp) * size_tp + tp

Two further names do not add ranks, they say what those there are share: `ep`, over which axes a layer's experts are
dealt out whole, and `dcp`, how many neighbouring ranks of `tp`, which have the same KV heads, keep every `dcp`-th piece
of a context in place of all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from kvmesh.errors import ConfigError

NAMES = ("dp", "pp", "cp", "tp")  # slowest first
EXPERT_AXES = ("dp", "cp", "tp")  # those that experts may be dealt out over: a stage has its own layers' experts
MOST_RANKS = 1024  # of one instance


class RankPlace(NamedTuple):
    """Says where a rank stands on each axis."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Axes:
    """How many ranks there are along each axis. `ep` names axes in the order of `EXPERT_AXES`; with none of them
    experts are cut as `experts_cut` says, over the ranks that share an MLP. `interleave` is the number of tokens that
    lie together at one rank of `cp` or `dcp` before the next has its turn; 0: a rank's part of a block, the only one
    that instances are served with. Raises ConfigError where this cannot be."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: tuple[str, ...] = ()
    dcp: int = 1
    interleave: int = 0

    def __post_init__(self) -> None:
        for name in (*NAMES, "dcp"):
            size = getattr(self, name)
            if not 1 <= size <= MOST_RANKS:
                raise ConfigError(f"mesh: {name}={size} must lie in 1..{MOST_RANKS}", field=name)
        if self.world > MOST_RANKS:
            raise ConfigError(
                f"mesh: {self} has {self.world} ranks, at most {MOST_RANKS} are one instance", field="mesh"
            )
        if self.tp % self.dcp:
            raise ConfigError(f"mesh: dcp={self.dcp} must divide tp={self.tp}", field="dcp")
        if tuple(name for name in EXPERT_AXES if name in self.ep) != self.ep:
            raise ConfigError(
                f"mesh: ep={'+'.join(self.ep)} must name some of {', '.join(EXPERT_AXES)}, in this order", field="ep"
            )
        if self.interleave < 0:
            raise ConfigError(f"mesh: interleave={self.interleave} must not be negative", field="interleave")

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Returns the axes that `text` names, as in "pp=4,tp=2" or "dp=8,ep=dp" ("ep=dp+tp" names two). Raises
        ConfigError, field "mesh", for anything else."""
        given: dict[str, int | tuple[str, ...]] = {}
        for piece in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = piece.partition("=")
            if name not in {one.name for one in fields(cls)}:
                known = ", ".join(one.name for one in fields(cls))
                raise ConfigError(f"mesh={text!r}: no axis is called {name!r}; there are {known}", field="mesh")
            if name in given:
                raise ConfigError(f"mesh={text!r}: {name} is named twice", field="mesh")
            if name == "ep":
                named = value.split("+")
                given[name] = known_axes = tuple(axis for axis in EXPERT_AXES if axis in named)
                if sorted(known_axes) != sorted(named):
                    raise ConfigError(
                        f"mesh={text!r}: ep={value} must join some of {', '.join(EXPERT_AXES)} by +", field="mesh"
                    )
            elif value.isascii() and value.isdigit() and len(value) < 6:
                given[name] = int(value)
            else:
                raise ConfigError(f"mesh={text!r}: {name}={value!r} is not a number of ranks", field="mesh")
        return cls(**given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Returns what `parse` reads; "" of one rank."""
        parts = [f"{name}={getattr(self, name)}" for name in NAMES if getattr(self, name) != 1]
        if self.ep:
            parts.append(f"ep={'+'.join(self.ep)}")
        if self.dcp != 1:
            parts.append(f"dcp={self.dcp}")
        if self.interleave:
            parts.append(f"interleave={self.interleave}")
        return ",".join(parts)

    @classmethod
    def of_settings(cls, text: str, tensor_parallel: int, mesh_key: str, tp_key: str) -> Axes:
        """Returns the axes that settings name: by a text, or by its short form for `tp` alone. Raises ConfigError for a
        text that is none, for two that differ, and for axes that no instance has yet."""
        try:
            axes = cls.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{mesh_key}={text!r}: {error.message.partition(': ')[2]}", field=mesh_key) from None
        if not text:
            return cls(tp=tensor_parallel)
        if tensor_parallel not in (1, axes.tp):
            why = f"{mesh_key}={text!r} has tp={axes.tp}: say it there"
            raise ConfigError(f"{tp_key}={tensor_parallel}: {why}", field=tp_key)
        if axes.interleave:
            why = "an instance keeps what a rank has of a block in one piece: leave interleave out"
            raise ConfigError(f"{mesh_key}={text!r}: {why}", field=mesh_key)
        return axes

    def check_blocks(self, block_tokens: int) -> None:
        """Raises ConfigError unless the ranks that share contexts can have equal parts of a block's tokens."""
        if block_tokens % self.turns:
            names = " times ".join(f"{name}={size}" for name in ("cp", "dcp") if (size := getattr(self, name)) > 1)
            raise ConfigError(f"{names}: must divide block_tokens={block_tokens}", field="mesh")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def turns(self) -> int:
        """The number of ranks that share the tokens of each context."""
        return self.cp * self.dcp

    @property
    def mlp(self) -> int:
        """The number of ranks that share an MLP: while attention is shared by context, the MLP is by columns."""
        return self.cp * self.tp

    @property
    def experts(self) -> int:
        """The number of ranks that experts are dealt out over, 1 without `ep`."""
        return math.prod(getattr(self, name) for name in self.ep)

    @property
    def replica(self) -> int:
        """The number of ranks of one place on `dp`, which are neighbours and make the same steps."""
        return self.world // self.dp

    def place(self, rank: int) -> RankPlace:
        """Returns where `rank` stands. Raises IndexError where there is no such rank."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside 0..{self.world - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return RankPlace(dp, pp, cp, tp)

    def rank(self, place: RankPlace) -> int:
        """Returns the rank that stands there."""
        return ((place.dp * self.pp + place.pp) * self.cp + place.cp) * self.tp + place.tp

    @property
    def speaker(self) -> int:
        """The rank that speaks for all of the first place on `dp`: the first of those that sample, which are the last
        stage's. What it has done with a step is behind every other rank's last access to that step's pages."""
        return (self.pp - 1) * self.cp * self.tp

    def peers(self, rank: int, over: Iterable[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` at most along these axes, itself among them, ascending; "dcp" is
        the part of `tp` that shares a context with it."""
        own, names = self.place(rank), set(over)
        unknown = names - {*NAMES, "dcp"}
        if unknown:
            raise IndexError(f"no axes {sorted(unknown)}")
        wide = self.tp if "tp" in names else self.dcp if "dcp" in names else 1  # neighbours on the axis tp
        found = []
        for other in range(self.world):
            there = self.place(other)
            same = all(getattr(there, name) == getattr(own, name) for name in ("dp", "pp", "cp") if name not in names)
            if same and there.tp // wide == own.tp // wide:
                found.append(other)
        return tuple(found)

    def groups(self, over: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of ranks along these axes; every rank is in one of them."""
        names = tuple(over)
        return tuple(dict.fromkeys(self.peers(rank, names) for rank in range(self.world)))
