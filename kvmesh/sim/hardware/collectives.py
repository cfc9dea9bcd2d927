"""What ranks that share a model take to talk to each other: alpha-beta, so latency + bytes / bandwidth, inside a node
and between nodes apart. Seconds and bytes.

A group of n ranks lies on k nodes, m = n / k on each. What all of a group need crosses nodes once a node: each rank
sends its m-th part over its own share of the NICs (hierarchical collectives, as NCCL's and Horovod's).

    all-gather, reduce-scatter   (m-1)/m · B / link  +  (k-1)/k · B/m / nic              + latencies     (Thakur 2005)
    all-reduce                   one of each: twice the bytes                            + latencies
    all-to-all of tokens         max(to other ranks / link, to other nodes / nic)        + latencies     (DeepEP)
    message                      bytes / (link or nic)                                   + latency
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvmesh.sim.hardware.hardware import GPUS_OF_A_NODE, Hardware


class MeshAxes(Protocol):
    """The parallel axes of an instance, as `kvmesh.engine.axes.Axes` names them; the slowest is dp, then pp, cp, tp."""

    @property
    def dp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def ep(self) -> tuple[str, ...]: ...
    @property
    def dcp(self) -> int: ...


NAMES = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True, slots=True)
class RankSpan:
    """So many ranks of a group, on so many nodes."""

    ranks: int
    nodes: int = 1

    @property
    def of_node(self) -> float:
        """Ranks of the group on one node."""
        return self.ranks / self.nodes


def span(axes: MeshAxes, over: Iterable[str], node: int = GPUS_OF_A_NODE) -> RankSpan:
    """Returns the groups of ranks that differ along `over` alone ("dcp" is the part of tp that shares a context), with
    the nodes of the one that lies on the most; rank r is on node r // `node`."""
    names = tuple(over)
    sizes = {name: getattr(axes, name) for name in NAMES}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(axes.dp * axes.pp * axes.cp * axes.tp):
        rest, place = rank, {}
        for name in reversed(NAMES):
            rest, place[name] = divmod(rest, sizes[name])
        if "dcp" in names:
            place["tp"] //= axes.dcp
        groups.setdefault(tuple(place[name] for name in NAMES if name not in names), []).append(rank)
    return RankSpan(
        len(next(iter(groups.values()))), max(len({rank // node for rank in one}) for one in groups.values())
    )


def stages_apart(axes: MeshAxes, node: int = GPUS_OF_A_NODE) -> bool:
    """Whether some rank lies on another node than that of the next stage which takes its activations."""
    inner = axes.cp * axes.tp
    stage = axes.pp * inner
    return any(
        rank // node != (rank + inner) // node
        for copy in range(axes.dp)
        for rank in range(copy * stage, (copy + 1) * stage - inner)
    )


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links of one GPU: bytes a second one way to the others of its node and, its share, to other nodes."""

    link: float
    nic: float
    tokens_nic: float  # ... that an all-to-all of tokens reaches
    reduce_s: float
    network_reduce_s: float
    all_to_all_latency_s: float
    network_all_to_all_s: float
    send_latency_s: float

    @classmethod
    def of(cls, gpu: Hardware, node: int = GPUS_OF_A_NODE) -> Fabric:
        """Returns the links of a GPU by its datasheet and `Efficiency`."""
        reached, nic = gpu.efficiency, gpu.node_nic_bytes_per_s / node
        return cls(
            gpu.link_bytes_per_s * reached.all_reduce,
            nic * reached.network,
            nic * reached.all_to_all,
            reached.all_reduce_s,
            reached.network_reduce_s,
            reached.all_to_all_s,
            reached.network_all_to_all_s,
            reached.send_s,
        )

    def gather_s(self, nbytes: float, group: RankSpan) -> float:
        """Returns the seconds until all ranks have `nbytes`, of which each has an equal part; of a reduce-scatter of so
        many bytes at each rank, too."""
        if group.ranks < 2:
            return 0.0
        return self._shared_s(nbytes, group) + self._latency_s(group)

    def reduce_s_of(self, nbytes: float, group: RankSpan) -> float:
        """Returns the seconds of an all-reduce of `nbytes` at each rank."""
        if group.ranks < 2:
            return 0.0
        return 2 * self._shared_s(nbytes, group) + self._latency_s(group)

    def _shared_s(self, nbytes: float, group: RankSpan) -> float:
        of_node, nodes = group.of_node, group.nodes
        return nbytes * max(0.0, of_node - 1) / of_node / self.link + nbytes * (nodes - 1) / nodes / of_node / self.nic

    def _latency_s(self, group: RankSpan) -> float:
        return self.reduce_s + (self.network_reduce_s if group.nodes > 1 else 0.0)

    def all_to_all_s(
        self, tokens: float, token_bytes: float, copies: int, group: RankSpan, most_nodes: float = math.inf
    ) -> float:
        """Returns the seconds in which each rank sends `tokens` tokens, each to those ranks where any of `copies`
        choices falls, evenly among all. A token crosses to another node once, whatever is chosen there, and goes to no
        more than `most_nodes` nodes (group-limited routing)."""
        if group.ranks < 2:
            return 0.0
        ranks = reached(group.ranks, copies) * (group.ranks - 1) / group.ranks
        nodes = min(most_nodes, reached(group.nodes, copies)) * (group.nodes - 1) / group.nodes
        nbytes = tokens * token_bytes
        latency_s = self.all_to_all_latency_s + (self.network_all_to_all_s if group.nodes > 1 else 0.0)
        return max(nbytes * ranks / self.link, nbytes * nodes / self.tokens_nic) + latency_s

    def send_s(self, nbytes: float, *, apart: bool) -> float:
        """Returns the seconds of a message to a rank of the same node or, `apart`, of another one."""
        return nbytes / (self.nic if apart else self.link) + self.send_latency_s


def reached(places: int, choices: int) -> float:
    """Returns at how many of `places` equal places at least one of so many even choices is expected."""
    return places * (1 - (1 - 1 / places) ** choices)
