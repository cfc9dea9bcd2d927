"""End marks of one link: each waits for the writes of its epoch that were submitted before it. Pure bookkeeping; the
sender's lock is held around every call."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.transfer.api import TransferState, TransferStatus
from kvmesh.transfer.batch import AfterUnlock, RequestGroup

MAX_SPOILED_EPOCHS = 4096
MAX_CLOSED = 64


@dataclass(eq=False, slots=True)
class EndMark:
    """A notification that waits for the writes of its epoch. It is sent as a frame once all of them with a lower serial
    are final."""

    serial: int
    epoch: int
    payload: bytes
    on_done: Callable[[TransferStatus], None] | None
    deadline: float

    def end(self, state: TransferState, cause: str, after: AfterUnlock) -> None:
        """Reports the outcome to `on_done`, once; later calls do nothing."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            status = TransferStatus(state, len(self.payload) if state is TransferState.COMPLETED else 0, cause)
            after.callbacks.append(lambda: on_done(status))


@dataclass(eq=False, slots=True)
class _Epoch:
    groups: OrderedDict[int, None] = field(default_factory=OrderedDict)  # write groups that are not final, oldest first
    notices: deque[EndMark] = field(default_factory=deque)  # oldest first


@dataclass(eq=False, slots=True)
class Epochs:
    """The write groups and end marks of one link, by epoch. `spoiled` maps an epoch in which a write did not complete
    to the cause; such an epoch gets no end mark."""

    spoiled: dict[int, str] = field(default_factory=dict)
    _open: dict[int, _Epoch] = field(default_factory=dict)

    def began(self, group: RequestGroup) -> None:
        self._open.setdefault(group.epoch, _Epoch()).groups[group.serial] = None

    def ended(self, group: RequestGroup) -> list[EndMark]:
        """Notes that a group is final, and returns the end marks that wait for nothing any more."""
        epoch = self._open[group.epoch]
        del epoch.groups[group.serial]
        oldest = next(iter(epoch.groups), None)
        ready = []
        while epoch.notices and (oldest is None or epoch.notices[0].serial < oldest):
            ready.append(epoch.notices.popleft())
        if oldest is None:
            del self._open[group.epoch]
        return ready

    def add(self, notice: EndMark) -> bool:
        """Queues an end mark. Returns False when there is nothing that it must wait for."""
        epoch = self._open.get(notice.epoch)
        if epoch is None:
            return False
        epoch.notices.append(notice)
        return True

    def spoil(self, epoch: int, cause: str) -> None:
        if epoch not in self.spoiled:
            if len(self.spoiled) >= MAX_SPOILED_EPOCHS:
                self.spoiled.pop(next(iter(self.spoiled)))
            self.spoiled[epoch] = cause

    def close(self, cause: str) -> None:
        """Marks every epoch with unfinished writes as spoiled, so that none gets an end mark if the segment is opened
        again."""
        for epoch in self._open:
            self.spoil(epoch, cause)

    def why_spoiled(self, epoch: int) -> str:
        """Returns why the epoch gets no end mark, or ""."""
        cause = self.spoiled.get(epoch)
        return "" if cause is None else f"an earlier write of this epoch failed: {cause}"


class Closed:
    """The spoiled epochs of recently closed segments, by the segment's token."""

    def __init__(self) -> None:
        self._spoiled: OrderedDict[str, dict[int, str]] = OrderedDict()

    def keep(self, token: str, spoiled: dict[int, str]) -> None:
        if spoiled:
            self._spoiled[token] = spoiled
            if len(self._spoiled) > MAX_CLOSED:
                self._spoiled.popitem(last=False)

    def take(self, token: str) -> dict[int, str]:
        return self._spoiled.pop(token, {})
