"""Tensor parallel: how the ranks of one instance share a model, and how they talk while a step runs.

Each rank holds whole heads of attention and a part of every MLP (Megatron's cut): matrices into heads and MLP are cut
along their output, those out of them along their input, so a layer needs one sum over the ranks after attention and one
after the MLP. Experts are cut as an MLP is, or dealt out whole (`cuts_experts_whole`). Norms and the embedding are
whole at every rank (a sum the less, for memory); the head is cut by vocabulary, and logits are gathered for the sampled
rows only: every rank then samples the same token from the same bytes. With more ranks than KV heads, ranks that share a
head are replicas of it.

`RankMesh` has the groups of ranks along the axes of `kvmesh.engine.axes`. A `Group` is one rank by itself and costs
nothing; a `ProcessGroup` is one of several, over torch.distributed (gloo on CPUs, NCCL on CUDA).
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from kvmesh.engine.axes import NAMES, Axes
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.errors import ConfigError, InternalError, RanksLost

CPU = torch.device("cpu")
MLP_AXES = (
    "cp",
    "tp",
)  # whose ranks share an MLP and the vocabulary: attention may be by context, the MLP is by columns


class Group:
    """Stands for ranks that compute something together, as one of them sees it. This one is alone: each call returns
    what it was given."""

    rank = 0
    size = 1
    capturable = True  # launches that call it can be captured as a CUDA graph

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, in place, with the same bytes at each."""
        return x

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        """Takes the greatest over all ranks, element by element, in place."""
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Joins `[rows, widths[rank]]` of each rank to `[rows, sum(widths)]`, in the order of the ranks."""
        return x

    def gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Joins `[counts[rank], ...]` of each rank to `[sum(counts), ...]`, in the order of the ranks."""
        return x

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Sums `[sum(counts), ...]` over all ranks and returns this rank's `[counts[rank], ...]` of it."""
        return x

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends the first `sent[0]` rows of `x` to rank 0, the next `sent[1]` to rank 1 and so on, and returns what the
        ranks sent here, `[sum(received), ...]`, in the order of the ranks."""
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Sends a tensor to rank `to` of the group, which calls `recv` with one of the same shape and dtype."""
        raise InternalError("a rank that is alone has nobody to send to")

    def begin_send(self, x: torch.Tensor, to: int) -> Callable[[], None]:
        """Sends as `send` does, without waiting: what it returns waits. Nobody may change `x` before."""
        raise InternalError("a rank that is alone has nobody to send to")

    def recv(self, x: torch.Tensor, sender: int) -> torch.Tensor:
        """Fills `x` with what rank `sender` of the group sends."""
        raise InternalError("a rank that is alone has nobody to receive from")

    def begin_recv(self, x: torch.Tensor, sender: int) -> Callable[[], None]:
        """Receives as `recv` does, without waiting: what it returns waits. Nobody may touch `x` before."""
        raise InternalError("a rank that is alone has nobody to receive from")

    def agree(self, well: bool) -> bool:
        """Returns whether all ranks say so. It waits for them."""
        return well


SOLO = Group()


# The ranks of an instance on one machine stay on it. NCCL's calls return before they are done, so nobody hears in the
# middle of a step that another rank stays away: its watchdog then ends the process (SIGABRT), whose front tells of it.
# It would wait for a minute before that, to write what only a debugger reads.
SURROUNDINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class ProcessGroup(Group):
    """Is some ranks of a `RankMesh` over torch.distributed. It can be used once the mesh is connected. Over gloo every
    call raises RanksLost when another rank is dead or stays away for longer than the mesh's `timeout_s`; over NCCL
    those do that find the group broken when they begin, and who waits for a rank beyond `timeout_s` is ended by
    SIGABRT."""

    def __init__(self, members: Sequence[int], rank: int, device: torch.device) -> None:
        self.members = tuple(members)  # by their ranks in the mesh
        self.rank, self.size = self.members.index(rank), len(self.members)
        self._me, self._device = rank, device
        self.capturable = device.type == "cuda"  # NCCL's calls are launches, gloo's are the host's work
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._handle: Any = None

    def use(self, handle: Any) -> None:
        """Takes torch.distributed's own group of these ranks."""
        self._handle = handle

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            why = str(error).split(". ")[0]  # the rest is advice
            raise RanksLost(f"rank {self._me} lost the other ranks in a step: {why}") from None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        with self._together():
            self._distributed.all_reduce(x, group=self._handle)
        return x

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        with self._together():
            self._distributed.all_reduce(x, self._distributed.ReduceOp.MAX, group=self._handle)
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        widest = max(widths)
        x = functional.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x.contiguous()
        parts = [torch.empty_like(x) for _ in widths]
        with self._together():
            self._distributed.all_gather(parts, x, group=self._handle)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        most = max(counts)
        if not most:
            return x
        if len(x) < most:
            x = torch.cat((x, x.new_zeros(most - len(x), *x.shape[1:])))
        parts = [torch.empty_like(x) for _ in counts]
        with self._together():
            self._distributed.all_gather(parts, x.contiguous(), group=self._handle)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self._device.type == "cuda" and len(set(counts)) == 1:
            out = x.new_empty(counts[self.rank], *x.shape[1:])
            with self._together():
                self._distributed.reduce_scatter_tensor(out, x.contiguous(), group=self._handle)
            return out
        first = sum(counts[: self.rank])  # gloo has no other way
        return self.all_reduce(x)[first : first + counts[self.rank]]

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        with self._together():
            self._distributed.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=self._handle)
        return out

    def send(self, x: torch.Tensor, to: int) -> None:
        with self._together():
            self._distributed.send(x.contiguous(), self.members[to], group=self._handle)

    def begin_send(self, x: torch.Tensor, to: int) -> Callable[[], None]:
        with self._together():
            return self._waits(self._distributed.isend(x.contiguous(), self.members[to], group=self._handle))

    def begin_recv(self, x: torch.Tensor, sender: int) -> Callable[[], None]:
        with self._together():
            return self._waits(self._distributed.irecv(x, self.members[sender], group=self._handle))

    def _waits(self, work: Any) -> Callable[[], None]:
        def wait() -> None:
            with self._together():
                work.wait()

        return wait

    def recv(self, x: torch.Tensor, sender: int) -> torch.Tensor:
        with self._together():
            self._distributed.recv(x, self.members[sender], group=self._handle)
        return x

    def agree(self, well: bool) -> bool:
        return not self.all_reduce(torch.tensor([0 if well else 1], device=self._device)).item()


class RankMesh:
    """Has all ranks of one instance as one of them sees it, and the groups that they form along their axes. One that
    is connected through `file` is of one machine: the file is empty or not there before the first rank comes, and
    belongs to whoever named it. With a `store` (torch.distributed's) ranks are on several hosts and compute over
    `interface` of this one."""

    def __init__(
        self,
        axes: Axes,
        rank: int,
        file: str = "",
        device: torch.device = CPU,
        timeout_s: float = 60.0,
        store: Any = None,
        interface: str = "",
    ) -> None:
        self.axes, self.rank, self.place = axes, rank, axes.place(rank)
        self._file, self._device, self._timeout = file, device, timedelta(seconds=timeout_s)
        self._store, self._interface = store, interface
        self._groups: dict[tuple[int, ...], Group] = {}
        self.tp = self.group("tp")  # shares heads
        self.mlp = self.group(*MLP_AXES)  # shares MLPs, the vocabulary, and experts cut by columns
        self.ep = self.group(*axes.ep)  # shares experts that lie whole
        self.world = self.group(*NAMES)

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for those of its place on `dp`."""
        return self.rank % self.axes.replica == self.axes.speaker

    def group(self, *over: str) -> Group:
        """Returns this rank's group along the axes: the same object for the same ranks."""
        return self._of(self.axes.peers(self.rank, over))

    def _of(self, members: tuple[int, ...]) -> Group:
        if len(members) == 1:
            return SOLO
        if members not in self._groups:
            self._groups[members] = ProcessGroup(members, self.rank, self._device)
        return self._groups[members]

    def connect(self, patience_s: float) -> None:
        """Waits until every rank has come as far as this, up to `patience_s` (one may load for long), and meets
        them."""
        if self.axes.world == 1:
            return
        for name, value in SURROUNDINGS.items():
            if self._interface and name.endswith("_SOCKET_IFNAME"):
                os.environ[name] = self._interface  # declared or found: what the process was started with knew neither
            else:
                os.environ.setdefault(name, value)
        distributed: Any = importlib.import_module("torch.distributed")
        on_gpu = self._device.type == "cuda"
        try:
            store = self._store or distributed.FileStore(self._file, self.axes.world)
            store.set(f"here/{self.rank}", "")
            store.wait([f"here/{rank}" for rank in range(self.axes.world)], timedelta(seconds=patience_s))
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.axes.world,
                timeout=self._timeout,
                device_id=self._device if on_gpu else None,  # NCCL meets now, not in the first step
            )
            self._meet(distributed)
        except RuntimeError as error:
            raise RanksLost(f"rank {self.rank} did not meet the other ranks: {error}") from None

    def _meet(self, distributed: Any) -> None:
        """Makes the groups: every rank makes all of them, its own or not, in one order."""
        everyone = tuple(range(self.axes.world))
        for members in all_groups(self.axes):
            handle = None if members == everyone else distributed.new_group(members, timeout=self._timeout)
            mine = self._of(members) if self.rank in members else None  # one may be asked for after this
            if isinstance(mine, ProcessGroup):
                mine.use(handle)

    def close(self) -> None:
        """Lets go of the other ranks; it may be called twice."""
        if self.axes.world > 1:
            distributed: Any = importlib.import_module("torch.distributed")
            if distributed.is_initialized():
                distributed.destroy_process_group()


# Along which axes ranks meet. A group of ranks that is not among these cannot be used.
MEETINGS = (("tp",), ("dcp",), ("cp",), ("pp",), ("dp",), MLP_AXES, ("cp", "dcp"), NAMES)


def all_groups(axes: Axes) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of more than one rank that an instance's ranks form, in one order, each once."""
    found = (members for over in (*MEETINGS, axes.ep, ("dp", *axes.ep)) for members in axes.groups(over))
    return tuple(dict.fromkeys(members for members in found if len(members) > 1))


ALONE = RankMesh(Axes(), 0)


# ── who has what ──────────────────────────────────────────────────────────────────────────────────


def check_shares(config: ModelConfig, axes: Axes) -> None:
    """Raises ConfigError unless ranks along these axes can share this model."""
    size, heads, kv, experts = axes.tp, config.heads, config.kv_heads, config.experts
    why = ""
    if heads % size:
        why = f"must divide num_attention_heads={heads}"
    elif kv % size and size % kv:
        why = f"must divide num_key_value_heads={kv} or be a multiple of it"
    elif config.delta is not None and config.delta.key_heads % size:
        why = f"must divide linear_num_key_heads={config.delta.key_heads}"
    if why:
        raise ConfigError(f"tensor_parallel={size}: {why}", field="tensor_parallel")
    _check_mlp(config, axes)
    _check_context(config, axes)
    copies = size if config.latent is not None else size // min(kv, size)
    if copies % axes.dcp:
        raise ConfigError(
            f"dcp={axes.dcp}: must divide the {copies} of tp={size} ranks that have the same KV heads", field="dcp"
        )
    if axes.pp > config.layers:
        raise ConfigError(f"pp={axes.pp}: more stages than the model's {config.layers} layers", field="pp")
    if axes.ep and experts is None:
        raise ConfigError(f"ep={'+'.join(axes.ep)}: {config.architecture} has no experts", field="ep")
    if experts is not None and axes.experts > experts.count:
        raise ConfigError(f"ep={'+'.join(axes.ep)}: {axes.experts} ranks for {experts.count} experts", field="ep")
    if axes.ep and experts is not None and experts.inner % (same := _same_experts(axes)):
        raise ConfigError(
            f"ep={'+'.join(axes.ep)}: the {same} ranks that have the same experts must divide "
            f"moe_intermediate_size={experts.inner}",
            field="ep",
        )


def _same_experts(axes: Axes) -> int:
    """Returns how many ranks that share an MLP have the same experts, where these lie whole: each has columns."""
    return math.prod(getattr(axes, axis) for axis in MLP_AXES if axis not in axes.ep)


def _check_context(config: ModelConfig, axes: Axes) -> None:
    """Raises ConfigError where ranks are to share the tokens of contexts that layers see only a part of."""
    if axes.cp * axes.dcp == 1:
        return
    field = "cp" if axes.cp > 1 else "dcp"
    if config.delta is not None:
        raise ConfigError(f"{field}={getattr(axes, field)}: layers with states have no context to share", field=field)
    if any(config.windows) or any(config.chunks):
        raise ConfigError(
            f"{field}={getattr(axes, field)}: layers with a window or chunks are not shared by context", field=field
        )


def _check_mlp(config: ModelConfig, axes: Axes) -> None:
    """Raises ConfigError unless the ranks that share an MLP can do so."""
    size, inner, experts = axes.mlp, config.intermediate_size, config.experts
    why = ""
    if inner % size:
        why = f"must divide intermediate_size={inner}"
    elif experts is not None and experts.shared_inner % size:
        why = f"must divide the shared expert's {experts.shared_inner} columns"
    elif experts is not None and not axes.ep and experts.inner % size and experts.count < size:
        why = f"must divide moe_intermediate_size={experts.inner}, or be at most the {experts.count} experts"
    elif config.vocab_size < size:
        why = f"more than vocab_size={config.vocab_size}"
    if why and axes.cp == 1:
        raise ConfigError(f"tensor_parallel={size}: {why}", field="tensor_parallel")
    if why:
        raise ConfigError(f"cp={axes.cp} times tp={axes.tp} ranks share an MLP: {size} {why}", field="cp")


def share(units: int, rank: int, size: int) -> range:
    """Returns which of so many units the rank has: as even as they go, the same unit at neighbouring ranks where
    there are fewer."""
    first = units * rank // size
    return range(first, max(units * (rank + 1) // size, first + 1))


ExpertsCut = Literal["auto", "columns", "whole"]
LEAST_COLUMNS = (
    64  # of an expert at a rank: a kernel's tile has so many (kernels.experts), two panels of a CPU's weights
)


def cuts_experts_whole(experts: ExpertsConfig, size: int, cut: ExpertsCut) -> bool:
    """Returns whether each of `size` ranks has some experts whole, rather than some columns of every expert. Columns
    give all ranks equal work whatever a router chooses; with "auto" experts stay whole only where columns do not
    divide, or a rank's would not fill a tile. Raises ConfigError where so many ranks cannot have them as `cut` says.
    """
    even, enough = experts.inner % size == 0, experts.count >= size
    if cut == "auto":
        cut = "whole" if enough and (not even or experts.inner // size < LEAST_COLUMNS) else "columns"
    why = ""
    if cut == "columns" and not even:
        why = f"tensor_parallel={size} must divide moe_intermediate_size={experts.inner}"
    elif cut == "whole" and not enough:
        why = f"tensor_parallel={size} must be at most the {experts.count} experts"
    if why:
        raise ConfigError(f"experts_cut={cut!r}: {why}", field="experts_cut")
    return cut == "whole" and size > 1


class ExpertShare(NamedTuple):
    """Says what a rank has of a layer's experts: which of them, and which columns of each."""

    experts: range
    columns: range


def expert_share(experts: ExpertsConfig, mesh: RankMesh, cut: ExpertsCut) -> ExpertShare:
    """Returns what this rank has of the experts: whole ones over the axes of `ep` and columns over what other ranks
    share an MLP (`check_shares`), or, without `ep`, as `cut` says. Raises ConfigError as `cuts_experts_whole` does."""
    group = mesh.mlp
    if mesh.axes.ep:
        rest = mesh.group(*(axis for axis in MLP_AXES if axis not in mesh.axes.ep))
        return ExpertShare(share(experts.count, mesh.ep.rank, mesh.ep.size), share(experts.inner, rest.rank, rest.size))
    if cuts_experts_whole(experts, group.size, cut):
        return ExpertShare(share(experts.count, group.rank, group.size), range(experts.inner))
    return ExpertShare(range(experts.count), share(experts.inner, group.rank, group.size))


def share_of(config: ModelConfig, axes: Axes) -> ModelConfig:
    """Returns the configuration of the model as the blocks of one rank see it: its own heads, KV heads and part of the
    MLP; of experts that ranks have whole, the columns that it has of each on average. Layers are the whole model's.
    Raises ConfigError as `check_shares` does."""
    check_shares(config, axes)
    size, mlp = axes.tp, axes.mlp
    if mlp == 1 and axes.experts == 1:
        return config
    experts, delta = config.experts, config.delta
    dealt = axes.experts * _same_experts(axes) if axes.ep else mlp
    return replace(
        config,
        heads=config.heads // size,
        kv_heads=max(config.kv_heads // size, 1),
        intermediate_size=config.intermediate_size // mlp,
        experts=None
        if experts is None
        else replace(experts, inner=-(-experts.inner // dealt), shared_inner=experts.shared_inner // mlp),
        delta=None
        if delta is None
        else replace(delta, key_heads=delta.key_heads // size, value_heads=delta.value_heads // size),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Says how the ranks along the axes `over` share a matrix (or several, joined along their output). `sections` lie
    side by side along `axis` (0 the output, 1 the input), each of so many units of so many rows or columns; a rank has
    its share of the units of each section. So queries, keys and values may lie in three matrices or in one."""

    axis: Literal[0, 1]
    sections: tuple[tuple[int, int], ...]  # (units, size of a unit)
    over: tuple[str, ...] = ("tp",)

    def spans(self, group: Group) -> list[range]:
        """Returns the rank's rows or columns, ascending."""
        spans, base = [], 0
        for units, size in self.sections:
            own = share(units, group.rank, group.size)
            spans.append(range(base + own.start * size, base + own.stop * size))
            base += units * size
        return spans
