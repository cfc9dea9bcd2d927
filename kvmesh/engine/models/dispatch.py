"""Experts that lie over the ranks of several data-parallel groups: tokens go to the ranks that have their experts, and
the answers come back.

Ranks that share an MLP (`RankMesh.mlp`) have the same tokens, so none is sent between them: rank (dp, cp, tp) sends its
tokens along `dp` alone, to the ranks at its own place on the other axes, and computes what comes from there with the
experts and columns that it has. What comes back is a sum over the experts of those ranks; the sum over the MLP's ranks,
which a layer makes anyway, adds the others. Each pair of a token and a rank with an expert of it is sent once.

A `Dispatch` is the seam for kernels that do this faster: its two calls are those of DeepEP. `RaggedDispatch` sends what
there is, for which the host reads counts; `PaddedDispatch` sends as many rows from everywhere, and the host reads
nothing. `StepRounds` decides which of them a step takes, the same at all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from kvmesh.engine.axes import Axes
from kvmesh.engine.capture import bucket_for
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.models.experts import Experts
from kvmesh.engine.parallel import Group, RankMesh, share
from kvmesh.engine.weights import Weights

MOST_PADDED = 256  # tokens of a step at one rank, up to which dummy rows cost less than counts that the host reads


class Arrived(NamedTuple):
    """Has the rows that came to this rank, its own among them: `x [n, hidden_size]`, experts int64 and their weights
    float32 `[n, chosen]`, of which only this rank's experts count. `handle` is for `combine` alone."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    handle: Any


class Dispatch(Protocol):
    """Carries rows to the ranks of a group that have their experts. All ranks call it alike, those without a token
    too."""

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        """Sends each row of `x [T, hidden_size]` to every rank that has one of its experts: int64 `[T, chosen]`, with
        weights float32."""

    def combine(self, answers: torch.Tensor, arrived: Arrived) -> torch.Tensor:
        """Sends back the answers to the rows that arrived, float32 `[n, hidden_size]`. Returns their sums for this
        rank's own rows, float32 `[T, hidden_size]`, added in the order of the ranks."""


class StepRounds:
    """Keeps data-parallel ranks in step: each of their steps begins with a round, in which all take part. `count` are
    the rounds so far, `anyone` whether some rank had a token in the last one, `padded` the rows that `PaddedDispatch`
    sends in it (0: it is a step for `RaggedDispatch`). `sizes` are the rows, ascending, of decode steps that every rank
    has captured; `replayed` is which of these all replay now (0: they launch the step)."""

    def __init__(self, group: Group, device: torch.device, most_padded: int = MOST_PADDED) -> None:
        self.group, self.most_padded = group, most_padded
        self.count, self.anyone, self.padded, self.replayed = 0, False, 0, 0
        self.sizes: Sequence[int] = ()
        self._device = device

    def begin(self, tokens: int, replayable: bool) -> None:
        """Begins a step in which this rank has so many tokens, and says whether it could replay that. It waits for the
        other ranks: they replay only together, as exchanges are in the graphs."""
        mine = torch.tensor([tokens, 0 if replayable else 1], device=self._device)
        most, launched = self.group.all_max(mine).tolist()
        self.count += 1
        self.anyone = most > 0
        self.replayed = 0 if launched or not most else bucket_for(most, self.sizes) or 0
        self.padded = self.replayed or (most if most <= self.most_padded else 0)


class RaggedDispatch:
    """Sends exactly the rows that a rank has experts of. `owners` int64 `[experts]`: which rank of the group has each
    expert, `group.size` where it is none of them."""

    def __init__(self, group: Group, owners: torch.Tensor) -> None:
        self._group, self._owners = group, owners

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        size = self._group.size
        wanted = torch.zeros(len(x), size + 1, dtype=torch.bool, device=x.device)
        wanted.scatter_(1, self._owners[chosen], True)
        wanted = wanted[:, :size]
        counts = wanted.sum(0)
        rows = wanted.t().nonzero()[:, 1]  # by rank, and in the order of tokens
        each = [1] * size
        given = self._group.all_to_all(counts, each, each)
        sent, received = counts.tolist(), given.tolist()
        came = self._group.all_to_all(x[rows], sent, received)
        choices = self._group.all_to_all(_packed(chosen[rows], weights[rows]), sent, received)
        return Arrived(came, *_unpacked(choices), (len(x), rows, sent, received))

    def combine(self, answers: torch.Tensor, arrived: Arrived) -> torch.Tensor:
        tokens, rows, sent, received = arrived.handle
        back = self._group.all_to_all(answers, received, sent)
        out = answers.new_zeros(tokens, answers.shape[1])
        for own, part in zip(torch.split(rows, sent), torch.split(back, sent), strict=True):
            out.index_add_(0, own, part)  # one rank after another: a row has one answer of each
        return out


class PaddedDispatch:
    """Sends `capacity()` rows of every rank to every rank, dummies among them, which choose `nobody`: an expert that no
    rank has. The host reads no values, so steps may be captured."""

    def __init__(self, group: Group, nobody: int, capacity: Callable[[], int]) -> None:
        self._group, self._nobody, self._capacity = group, nobody, capacity

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        tokens, capacity = len(x), self._capacity()
        counts, rest = [capacity] * self._group.size, (0, 0, 0, capacity - tokens)
        came = self._group.gather_rows(functional.pad(x, rest), counts)
        chosen = functional.pad(chosen, rest, value=self._nobody)
        choices = self._group.gather_rows(_packed(chosen, functional.pad(weights, rest)), counts)
        return Arrived(came, *_unpacked(choices), (tokens, counts))

    def combine(self, answers: torch.Tensor, arrived: Arrived) -> torch.Tensor:
        # Not `reduce_scatter`, whose order of additions depends on where in the batch a row is.
        tokens, counts = arrived.handle
        back = self._group.all_to_all(answers, counts, counts)
        return back.view(len(counts), -1, answers.shape[1])[:, :tokens].sum(0)


class ExchangedExperts:
    """Is the experts of one layer where they lie over several data-parallel ranks: `own` are this rank's. `rounds` is
    set by `share_rounds`."""

    def __init__(self, own: Experts, weights: Weights, experts: ExpertsConfig) -> None:
        mesh = weights.mesh
        group, device = mesh.group("dp"), weights.device
        owners = torch.tensor(owners_along_dp(experts.count, mesh.axes, mesh.rank), device=device)
        self.own, self.rounds = own, StepRounds(group, device)
        self._ragged: Dispatch = RaggedDispatch(group, owners)
        self._padded: Dispatch = PaddedDispatch(group, experts.count, lambda: self.rounds.padded)
        self._nothing = (
            torch.zeros(0, weights.config.hidden_size, dtype=weights.dtype, device=device),
            torch.zeros(0, experts.chosen, dtype=torch.int64, device=device),
            torch.zeros(0, experts.chosen, dtype=torch.float32, device=device),
        )

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dispatch = self._padded if self.rounds.padded else self._ragged
        arrived = dispatch.dispatch(x, chosen, weights)
        some = len(arrived.x) > 0
        answers = self.own(*arrived[:3]) if some else torch.zeros_like(arrived.x, dtype=torch.float32)
        return dispatch.combine(answers, arrived)

    def serve(self) -> None:
        """Answers the other ranks' tokens in a step in which this one has none."""
        self(*self._nothing)


def exchanged(own: Experts, weights: Weights) -> Experts:
    """Returns what a layer calls where `own` are this rank's experts."""
    experts = weights.config.experts
    assert experts is not None
    return ExchangedExperts(own, weights, experts) if exchanges(weights.mesh) else own


def exchanges(mesh: RankMesh) -> bool:
    """Returns whether the ranks' experts lie over several places on `dp`."""
    return "dp" in mesh.axes.ep and mesh.group("dp").size > 1


def share_rounds(blocks: Sequence[ExchangedExperts], mesh: RankMesh, device: torch.device) -> StepRounds | None:
    """Has all layers' experts take part in the same rounds. Returns these; None where no rank's experts lie over
    places. A stage of a pipeline whose layers have no experts takes part too: its leader sets the turns of all."""
    if not exchanges(mesh):
        return None
    rounds = StepRounds(mesh.group("dp"), device)
    for block in blocks:
        block.rounds = rounds
    return rounds


def owners_along_dp(experts: int, axes: Axes, rank: int) -> list[int]:
    """Returns for each expert at which place on `dp` it lies among the ranks that differ from `rank` there alone;
    `axes.dp` where it is at none of them."""
    owners = [axes.dp] * experts
    place = axes.place(rank)
    for dp in range(axes.dp):
        other = axes.rank(place._replace(dp=dp))
        for expert in share(experts, axes.peers(other, axes.ep).index(other), axes.experts):
            owners[expert] = dp
    return owners


def _packed(chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Joins experts and their weights to int32 `[n, 2 chosen]`, which is one exchange instead of two."""
    return torch.cat((chosen.int(), weights.contiguous().view(torch.int32)), 1)


def _unpacked(joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, weights = joined.chunk(2, 1)
    return chosen.long(), weights.contiguous().view(torch.float32)
