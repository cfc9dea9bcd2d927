"""How long a GroupWrite had bytes on its way: the gaps between its layers are not the wire's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmesh.transfer import Carried
from kvmesh.transfer.api import TransferState, TransferStatus
from kvmesh.transfer.groups import GroupWrite


class Engine:
    """Batches end when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[int, Callable[[], None]] = {}
        self.made = 0

    def allocate_batch(self, n: int) -> int:
        self.made += 1
        return self.made

    def submit(self, batch: int, requests: Any) -> None:
        assert requests

    def on_done(self, batch: int, callback: Callable[[], None]) -> None:
        self.ends[batch] = callback

    def statuses(self, batch: int) -> list[TransferStatus]:
        return [TransferStatus(TransferState.COMPLETED, 1)]

    def carried(self, batch: int) -> Carried:
        return Carried()

    def free_batch(self, batch: int) -> None:
        del self.ends[batch]


def test_time_between_layers_is_not_busy() -> None:
    engine, now = Engine(), [0]
    write = GroupWrite(engine, 1, ["there"], lambda: None, clock_ns=lambda: now[0])  # type: ignore[arg-type]

    def at(ns: int, do: Callable[[], None]) -> None:
        now[0] = ns
        do()

    at(100, lambda: write.write("there", [(0, 0, 64)]))
    at(110, lambda: engine.ends[1]())
    at(500, lambda: write.write("there", [(0, 0, 64)]))  # a layer was computed meanwhile
    at(505, lambda: write.write("there", [(0, 0, 64)]))  # two on their way: counted once
    at(520, lambda: engine.ends[2]())
    at(530, lambda: engine.ends[3]())
    assert (write.first_post_ns, write.last_ack_ns, write.busy_ns) == (100, 530, 10 + 30)
    assert write.bytes_done == 3 * 64
