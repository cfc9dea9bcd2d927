"""A mesh whose ranks are threads of one process, over groups in memory: for whole models in a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kvmesh.engine.axes import Axes
from kvmesh.engine.parallel import SOLO, Group, RankMesh

Answer = TypeVar("Answer")
PATIENCE_S = 60


class Meeting:
    """Where the ranks of one group exchange tensors: each brings a list, one entry for each rank."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[Sequence[torch.Tensor]] = [()] * size


class ThreadGroup(Group):
    capturable = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.brought)

    def exchange(self, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gives `sent[i]` to rank i; returns what each rank gave to this one, as it was then."""
        self.meeting.brought[self.rank] = [x.clone() for x in sent]
        self.meeting.barrier.wait(PATIENCE_S)
        got = [brought[self.rank] for brought in self.meeting.brought]
        self.meeting.barrier.wait(PATIENCE_S)
        return got

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange([x] * self.size)).sum(0))

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange([x] * self.size)).amax(0))

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        assert x.shape[-1] == widths[self.rank]
        return torch.cat(self.exchange([x] * self.size), -1)

    def gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(x) == counts[self.rank]
        return torch.cat(self.exchange([x] * self.size))

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return torch.stack(self.exchange(torch.split(x, list(counts)))).sum(0)

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        got = self.exchange(torch.split(x, list(sent)))
        assert [len(part) for part in got] == list(received)
        return torch.cat(got)

    def agree(self, well: bool) -> bool:
        return not self.all_reduce(torch.tensor([0 if well else 1])).item()


class ThreadedMesh(RankMesh):
    """One rank's view; `meetings` is shared by all ranks."""

    def __init__(self, axes: Axes, rank: int, meetings: dict[tuple[int, ...], Meeting], lock: threading.Lock) -> None:
        self._meetings, self._lock = meetings, lock
        super().__init__(axes, rank)

    def group(self, *over: str) -> Group:
        members = self.axes.peers(self.rank, over)
        if len(members) == 1:
            return SOLO
        if members not in self._groups:
            with self._lock:
                meeting = self._meetings.setdefault(members, Meeting(len(members)))
            self._groups[members] = ThreadGroup(meeting, members.index(self.rank))
        return self._groups[members]


def over_threads(axes: Axes, work: Callable[[RankMesh], Answer]) -> list[Answer]:
    """Returns what `work` answers at each rank of a mesh of threads. A rank that raises breaks the others' waits."""
    meetings: dict[tuple[int, ...], Meeting] = {}
    lock = threading.Lock()

    def run(rank: int) -> Answer:
        try:
            return work(ThreadedMesh(axes, rank, meetings, lock))
        except BaseException:
            for meeting in list(meetings.values()):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(axes.world) as pool:
        futures = [pool.submit(run, rank) for rank in range(axes.world)]
        failed = [error for error in (future.exception() for future in futures) if error is not None]
        for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
