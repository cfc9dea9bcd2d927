"""Tensor parallel: how the ranks of one instance share a model, and how they talk while a step runs.

Each rank holds whole heads of attention and a part of every MLP (Megatron's cut): matrices into heads and MLP are cut
along their output, those out of them along their input, so a layer needs one sum over the ranks after attention and one
after the MLP. Experts are cut as an MLP is, or dealt out whole (`cuts_experts_whole`). Norms and the embedding are
whole at every rank (a sum the less, for memory); the head is cut by vocabulary, and logits are gathered for the sampled
rows only: every rank then samples the same token from the same bytes. With more ranks than KV heads, ranks that share a
head are replicas of it.

`Group` is one rank by itself and costs nothing; `ProcessGroup` is one of several, over torch.distributed (gloo on CPUs,
NCCL on CUDA).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.errors import ConfigError


class Group:
    """Stands for the ranks that compute one model together, as one of them sees it. This one is alone."""

    rank = 0
    size = 1
    capturable = True  # launches that call it can be captured as a CUDA graph

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, in place, with the same bytes at each."""
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Joins `[rows, widths[rank]]` of each rank to `[rows, sum(widths)]`, in the order of the ranks."""
        return x

    def agree(self, well: bool) -> bool:
        """Returns whether all ranks say so. It waits for them."""
        return well

    def connect(self, patience_s: float) -> None:
        """Meet the other ranks."""

    def close(self) -> None:
        """Lets go of the other ranks; it may be called twice."""


SOLO = Group()


class RanksLost(RuntimeError):
    """Another rank died or did not come in time: this one is in the middle of a step that nobody can finish."""


# An instance's ranks are processes of one machine. NCCL's calls return before they are done, so nobody hears in the
# middle of a step that another rank stays away: its watchdog then ends the process (SIGABRT), whose front tells of it.
# It would wait for a minute before that, to write what only a debugger reads.
SURROUNDINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class ProcessGroup(Group):
    """Over torch.distributed's default group, which the ranks of one machine make through `file`: it must not exist
    before the first of them comes, and belongs to whoever made its folder. `connect` before the first call. Over gloo
    every call raises RanksLost when another rank is dead or stays away for longer than `timeout_s`; over NCCL those do
    that find the group broken when they begin, and who waits for a rank beyond `timeout_s` is ended by SIGABRT."""

    def __init__(self, rank: int, size: int, file: str, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._file, self._device = file, device
        self.capturable = device.type == "cuda"  # NCCL's calls are launches, gloo's are the host's work
        self._timeout = timedelta(seconds=timeout_s)
        self._distributed: Any = importlib.import_module("torch.distributed")

    def connect(self, patience_s: float) -> None:
        """Wait until every rank has come as far as this, up to `patience_s` (one may load for long), and meet them."""
        for name, value in SURROUNDINGS.items():
            os.environ.setdefault(name, value)
        distributed = self._distributed
        on_gpu = self._device.type == "cuda"
        try:
            store = distributed.FileStore(self._file, self.size)
            store.set(f"here/{self.rank}", "")
            store.wait([f"here/{rank}" for rank in range(self.size)], timedelta(seconds=patience_s))
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=self._timeout,
                device_id=self._device if on_gpu else None,  # NCCL meets now, not in the first step
            )
        except RuntimeError as error:
            raise RanksLost(f"rank {self.rank} did not meet the other ranks: {error}") from None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self._distributed.all_reduce(x)
        except RuntimeError as error:
            raise self._lost(error) from None
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        widest = max(widths)
        x = functional.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x.contiguous()
        parts = [torch.empty_like(x) for _ in widths]
        try:
            self._distributed.all_gather(parts, x)
        except RuntimeError as error:
            raise self._lost(error) from None
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def agree(self, well: bool) -> bool:
        return not self.all_reduce(torch.tensor([0 if well else 1], device=self._device)).item()

    def _lost(self, error: RuntimeError) -> RanksLost:
        why = str(error).split(". ")[0]  # the rest is advice
        return RanksLost(f"rank {self.rank} lost the other ranks in a step: {why}")

    def close(self) -> None:
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group()


# ── who has what ──────────────────────────────────────────────────────────────────────────────────


def check_shares(config: ModelConfig, size: int) -> None:
    """Raises ConfigError unless `size` ranks can share this model."""
    heads, kv, inner, experts = config.heads, config.kv_heads, config.intermediate_size, config.experts
    why = ""
    if size < 1:
        why = "at least 1"
    elif heads % size:
        why = f"must divide num_attention_heads={heads}"
    elif kv % size and size % kv:
        why = f"must divide num_key_value_heads={kv} or be a multiple of it"
    elif inner % size:
        why = f"must divide intermediate_size={inner}"
    elif experts is not None and experts.shared_inner % size:
        why = f"must divide the shared expert's {experts.shared_inner} columns"
    elif experts is not None and experts.inner % size and experts.count < size:
        why = f"must divide moe_intermediate_size={experts.inner}, or be at most the {experts.count} experts"
    elif config.delta is not None and config.delta.key_heads % size:
        why = f"must divide linear_num_key_heads={config.delta.key_heads}"
    elif config.vocab_size < size:
        why = f"more than vocab_size={config.vocab_size}"
    if why:
        raise ConfigError(f"tensor_parallel={size}: {why}", field="tensor_parallel")


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


def expert_share(experts: ExpertsConfig, group: Group, cut: ExpertsCut) -> ExpertShare:
    """Returns what this rank has of the experts. Raises ConfigError as `cuts_experts_whole` does."""
    if cuts_experts_whole(experts, group.size, cut):
        return ExpertShare(share(experts.count, group.rank, group.size), range(experts.inner))
    return ExpertShare(range(experts.count), share(experts.inner, group.rank, group.size))


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """Returns the configuration of the model as the blocks of one of `size` ranks see it: its own heads, KV heads and
    part of the MLP; of experts that ranks have whole, the columns that it has of each on average. Raises ConfigError as
    `check_shares` does."""
    check_shares(config, size)
    if size == 1:
        return config
    experts, delta = config.experts, config.delta
    return replace(
        config,
        heads=config.heads // size,
        kv_heads=max(config.kv_heads // size, 1),
        intermediate_size=config.intermediate_size // size,
        experts=None
        if experts is None
        else replace(experts, inner=-(-experts.inner // size), shared_inner=experts.shared_inner // size),
        delta=None
        if delta is None
        else replace(delta, key_heads=delta.key_heads // size, value_heads=delta.value_heads // size),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Says how the ranks share a matrix (or several, joined along their output). `sections` lie side by side along
    `axis` (0 the output, 1 the input), each of so many units of so many rows or columns; a rank has its share of the
    units of each section. So queries, keys and values may lie in three matrices or in one."""

    axis: Literal[0, 1]
    sections: tuple[tuple[int, int], ...]  # (units, size of a unit)

    def spans(self, group: Group) -> list[range]:
        """Returns the rank's rows or columns, ascending."""
        spans, base = [], 0
        for units, size in self.sections:
            own = share(units, group.rank, group.size)
            spans.append(range(base + own.start * size, base + own.stop * size))
            base += units * size
        return spans
