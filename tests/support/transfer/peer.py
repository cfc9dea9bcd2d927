"""A transfer engine in a process of its own, told what to do over a pipe.

The processes are forked from one that has imported the engine (`python -m tests.support.transfer.peer FD`)."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvmesh.errors import TransferError
from kvmesh.transfer import (
    EngineConfig,
    Notification,
    Opcode,
    Range,
    TransferEngine,
    TransferRequest,
    TransferState,
    TransferStatus,
)
from kvmesh.transfer.api import BatchId, Region
from tests.support.forking import Forker, Message, fork_others, forking_process

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_REC, MS_SLAVE, MNT_DETACH = 1 << 14, 1 << 19, 2
Copy = tuple[int, int, int]  # offset in the local region, offset in the remote segment, length


def pattern(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


class Actor:
    """What a test can ask for, in this process or in another one."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.notified: list[Notification] = []
        self.engine = TransferEngine(name, config, on_notify=self.notified.append)
        self.region: Region | None = None
        self._flood: threading.Thread | None = None
        self._flood_result: list[TransferStatus] = []

    def allocate(self, nbytes: int, seed: int | None = None) -> int:
        """Its base offset."""
        self.region = region = self.engine.allocate(nbytes, "cpu:0")
        if seed is not None:
            assert region.memory is not None
            region.memory[:nbytes] = pattern(seed, nbytes)
        return region.base_offset

    def descriptor(self) -> bytes:
        return self.engine.local_descriptor().encode()

    def open(self, descriptor: bytes) -> str:
        return self.engine.open_segment(descriptor)

    def start(self, opcode: str, segment: str, copies: Sequence[Copy], epoch: int = 0) -> BatchId:
        assert self.region is not None
        batch = self.engine.allocate_batch(len(copies))
        self.engine.submit(
            batch,
            [
                TransferRequest(Opcode(opcode), self.region.address + near, segment, far, length, epoch)
                for near, far, length in copies
            ],
        )
        return batch

    def finish(self, batch: BatchId, timeout_s: float = 60.0) -> list[TransferStatus]:
        assert self.engine.wait_sync(batch, timeout_s), self.engine.statuses(batch)
        statuses = self.engine.statuses(batch)
        self.engine.free_batch(batch)
        return statuses

    def transfer(self, opcode: str, segment: str, copies: Sequence[Copy], epoch: int = 0) -> list[TransferStatus]:
        return self.finish(self.start(opcode, segment, copies, epoch))

    def flood(self, opcode: str, segment: str, copies: Sequence[Copy], epoch: int) -> None:
        """Repeats a transfer until one fails; `flood_result` waits for that."""

        def run() -> None:
            while True:
                try:
                    statuses = self.transfer(opcode, segment, copies, epoch)
                except TransferError as err:  # the engine was closed
                    self._flood_result = [TransferStatus(TransferState.FAILED, 0, str(err))]
                    return
                failed = [s for s in statuses if s.state.value != "completed"]
                if failed:
                    self._flood_result = failed
                    return

        self._flood = threading.Thread(target=run, daemon=True)
        self._flood.start()

    def flood_result(self) -> list[TransferStatus]:
        assert self._flood is not None
        self._flood.join(30)
        assert not self._flood.is_alive()
        return self._flood_result

    def flood_over(self) -> bool:
        return self._flood is not None and not self._flood.is_alive()

    def window(self, peer: str, epoch: int, ranges: Sequence[tuple[int, int]]) -> None:
        self.engine.open_window(peer, epoch, [Range(o, n) for o, n in ranges])

    def fence(self, peer: str, epoch: int) -> None:
        self.engine.fence(peer, epoch)

    def notify(self, segment: str, epoch: int, payload: bytes) -> TransferStatus:
        done = threading.Event()
        result: list[TransferStatus] = []

        def on_done(status: TransferStatus) -> None:
            result.append(status)
            done.set()

        self.engine.notify(segment, epoch, payload, on_done=on_done)
        assert done.wait(20)
        return result[0]

    def counter(self, what: str) -> int:
        return self.engine.counters().get(what, 0)

    def read(self, offset: int, nbytes: int) -> bytes:
        assert self.region is not None
        assert self.region.memory is not None
        return bytes(self.region.memory[offset : offset + nbytes])

    def close(self) -> None:
        self.engine.close()


@cache
def forker() -> Forker:
    """Started when it is first asked for; it ends with this process."""
    kept = contextlib.ExitStack()
    atexit.register(kept.close)
    return Forker(kept.enter_context(forking_process("tests.support.transfer.peer")))


class Peer:
    """An Actor of the given kind in a process of its own; attribute access calls it there."""

    def __init__(
        self, name: str, config: EngineConfig, kind: type[Actor] = Actor, network: str = "", unshare: int = 0
    ) -> None:
        """`network`: the name of a network namespace that it is in; `unshare`: what namespaces are its own, as the
        system call takes them."""
        mine, its = socket.socketpair()
        told = {"module": kind.__module__, "kind": kind.__name__, "network": network, "unshare": unshare}
        with its:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = forker().fork({**told, "env": env}, [1, 2, its.fileno()])
        self.name = name
        self._pipe = Connection(mine.detach())
        self._pipe.send((name, config))

    def __getattr__(self, method: str) -> Any:
        def call(*args: object, **kwargs: object) -> Any:
            self._pipe.send((method, args, kwargs))
            assert self._pipe.poll(60), f"{method} does not answer"
            ok, value = self._pipe.recv()
            if not ok:
                raise AssertionError(f"{self.name}.{method}: {value}")
            return value

        return call

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        self._pipe.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


def serve(kind: type[Actor], fd: int) -> None:
    """Does what the pipe says, until it is closed."""
    pipe = Connection(fd)
    name, config = pipe.recv()
    actor = kind(name, config)
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, getattr(actor, method)(*args, **kwargs)))
        except Exception as err:
            pipe.send((False, repr(err)))
    actor.close()


def run(told: Message, filenos: list[int]) -> None:
    """Is a peer."""
    (fd,) = filenos
    if told["network"]:
        enter_network(told["network"])
    call("unshare", told["unshare"])
    serve(getattr(importlib.import_module(told["module"]), told["kind"]), fd)


def call(function: str, *words: Any) -> None:
    """A function of libc that answers 0 when it has done its work."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*words) != 0:
        raise OSError(ctypes.get_errno(), f"{function} of {words}")


def enter_network(name: str) -> None:
    """As `ip netns exec` does it, with a /sys that shows the devices there."""
    with open(f"/run/netns/{name}") as network:
        call("setns", network.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)
    call("mount", b"", b"/", b"none", MS_SLAVE | MS_REC, None)
    with contextlib.suppress(OSError):  # there may be none
        call("umount2", b"/sys", MNT_DETACH)
    call("mount", name.encode(), b"/sys", b"sysfs", 0, None)


def main() -> None:
    importlib.import_module("kvmesh.transfer.engine")
    sys.modules.setdefault("tests.support.transfer.peer", sys.modules["__main__"])  # it is imported already
    fork_others(socket.socket(fileno=int(sys.argv[1])), run)


if __name__ == "__main__":
    main()
