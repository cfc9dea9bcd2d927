"""How a queue pair ends when the driver fails, without a driver. `inside/test_ends.py` has what a fence makes of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer.transports.rdma import gids, queue_pair
from kvmesh.transfer.transports.rdma.device import Endings
from tests.rdma.test_pure import Deaf, FakeNic


class DriverFailed(Exception):
    """Stands for PyverbsRDMAError."""


class Made:
    """Stands for pyverbs' QP, of a driver that fails as often as it is told to."""

    def __init__(self, failures: int) -> None:
        self.qp_num, self.failures = 17, failures

    def close(self) -> None:
        if self.failures:
            self.failures -= 1
            raise DriverFailed("busy")


class Ends:
    """Endings over a driver whose `stop` fails with `code`, and what they did."""

    def __init__(self, code: int = 0, *, gone_after: int = 1 << 30) -> None:
        self.code, self.looks, self.gone_after = code, 0, gone_after
        self.stopped: list[int] = []
        self.freed = 0
        self.of = Endings("fake0", DriverFailed, self.stop, self.is_gone)

    def stop(self, pointer: int) -> None:
        if self.code:
            raise OSError(self.code, "injected")
        self.stopped.append(pointer)

    def is_gone(self) -> bool:
        self.looks += 1
        return self.looks > self.gone_after

    def end(self, made: Made) -> None:
        def freed() -> None:
            self.freed += 1

        self.of.end(made, 0xA, freed)


def test_a_queue_pair_that_is_not_destroyed_is_stopped_and_destroyed_later() -> None:
    ends = Ends()
    ends.end(Made(0))
    assert (ends.stopped, ends.freed) == ([], 1)
    ends.end(Made(2))
    assert (ends.stopped, ends.freed) == ([0xA], 1)
    ends.of.again()
    assert ends.freed == 1
    ends.end(Made(0))  # its end is another's chance
    assert (ends.stopped, ends.freed) == ([0xA], 3)


def test_a_queue_pair_that_lives_on_is_an_error_each_time() -> None:
    ends, made = Ends(errno.EINVAL), Made(5)
    for failures in (4, 2):  # each time it is tried first as one of those that failed, but for the first
        with pytest.raises(TransferError, match=r"fake0: queue pair 17 is not destroyed .busy. and not stopped"):
            ends.end(made)
        assert (made.failures, ends.freed) == (failures, 0)
    ends.of.again()
    ends.code = 0
    ends.end(made)
    assert (ends.freed, ends.stopped) == (1, [])  # the sixth try


def test_with_its_device_a_queue_pair_is_gone() -> None:
    ends = Ends(errno.EIO, gone_after=3)
    ends.end(Made(1 << 30))
    assert ends.freed == 1


def test_a_device_is_known_by_more_than_its_name(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "mlx5_1").mkdir()
    inode = (tmp_path / "mlx5_0").stat().st_ino
    (tmp_path / "mlx5_0").rename(tmp_path / "renamed")
    assert not gids.is_gone(inode, tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "renamed").rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    assert gids.is_gone(inode, tmp_path)


class HalfNic(FakeNic):
    """Destroys a queue pair in so many tries."""

    tries = 1

    def destroy_queue_pair(self, *args: object) -> None:
        self.tries -= 1
        if self.tries > 0:
            raise TransferError("not yet", field="nics")


def test_close_is_repeatable_until_it_has_worked() -> None:
    nic = HalfNic()
    nic.tries = 3
    pair = queue_pair.QueuePair(nic, 16, 0, Deaf())  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(TransferError, match="not yet"):
            pair.close()
        assert pair.closed
    pair.close()
    pair.close()
    assert nic.tries == 0
