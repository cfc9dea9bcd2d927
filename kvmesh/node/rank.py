"""One rank process: `python -m kvmesh.node.rank FD`. Torch, device pages, host segment, transfer engine; a pool node's
rank has only the last two.

The main thread alternates between commands of the front and engine steps. It runs the decode batch by itself, step
after step, and prefill steps as the front sends them, in one pass with the batch's rows where there are any; the
transfer engine's threads move bytes beside it.
Commands that must not wait for a step (landings, leases, pings, windows) are also taken between layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from kvmesh.node import messages as m
from kvmesh.node.ipc import RankPort
from kvmesh.node.transfer_metrics import stats_of
from kvmesh.rpc.errors import KvmeshError

if TYPE_CHECKING:
    from kvmesh.node.store_worker import StoreWorker
    from kvmesh.node.worker import Worker

    AnyWorker = Worker | StoreWorker

log = logging.getLogger("kvmesh.rank")

# Between layers only these are handled; the rest keeps its order for the gap between steps.
URGENT = (
    m.PushOpen,
    m.PushLease,
    m.PushCancel,
    m.PullOpen,
    m.PullCancel,
    m.Sum,
    m.TierPut,
    m.TierGet,
    m.TierProbe,
    m.TierRemove,
    m.OpenSegment,
    m.CloseSegment,
    m.OpenWindow,
    m.Fence,
    m.Ping,
)
HOUSEKEEPING_MS = 50


class RankLoop:
    """Commands in, steps run, events out."""

    def __init__(self, port: RankPort) -> None:
        self._port = port
        self._later: deque[m.ToRank] = deque()
        self._steps: deque[m.PrefillStep] = deque()
        self._worker: AnyWorker | None = None

    def run(self) -> None:
        first = self._port.receive(None)
        configure, self._later = first[0], deque(first[1:])
        if not isinstance(configure, m.Configure):
            raise SystemExit("the first message must be Configure")
        if not self._configure(configure):
            return
        assert self._worker is not None
        with contextlib.closing(self._worker) as worker:
            while True:
                self._take_commands(worker)
                worker.tick()
                worker.step(self._steps.popleft() if self._steps else None, self._take_urgent)

    def _configure(self, configure: m.Configure) -> bool:
        try:
            os.environ["OMP_NUM_THREADS"] = str(configure.threads)
            self._worker = self._make(configure)
        except KvmeshError as error:
            self._port.send(m.InitFailed(error.code, error.message))
            return False
        except Exception as error:
            log.exception("rank could not start")
            self._port.send(m.InitFailed("internal", f"{type(error).__name__}: {error}"))
            return False
        self._port.send(self._worker.ready())
        return True

    def _make(self, configure: m.Configure) -> AnyWorker:
        if not configure.model_path:
            from kvmesh.node.store_worker import StoreWorker

            return StoreWorker(configure, self._port.send)
        from kvmesh.node.worker import Worker  # torch loads here, after the thread cap

        return Worker(configure, self._port.send)

    def _take_commands(self, worker: AnyWorker) -> None:
        busy = bool(self._steps or self._later) or worker.has_work
        timeout = 0 if busy else (HOUSEKEEPING_MS if worker.needs_ticks else None)
        self._later.extend(self._port.receive(timeout))
        while self._later:
            self._handle(worker, self._later.popleft())

    def _take_urgent(self) -> None:
        """Between two layers of a step (never re-orders what is not urgent)."""
        worker = self._worker
        assert worker is not None
        for message in self._port.receive(0):
            if isinstance(message, URGENT):
                self._handle(worker, message)
            else:
                self._later.append(message)

    def _handle(self, worker: AnyWorker, message: m.ToRank) -> None:
        match message:
            case m.PrefillStep():
                self._steps.append(message)
            case m.Ping(nonce):
                self._port.send(m.Pong(nonce, time.process_time(), stats_of(worker.engine)))
                worker.tiers.report()
            case m.Shutdown():
                raise SystemExit(0)
            case _:
                worker.handle(message)


def _die_with_parent() -> None:
    """A killed front leaves no rank behind (Linux: PR_SET_PDEATHSIG = 1)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    _die_with_parent()
    # Ctrl-C reaches the whole terminal group; the front decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=os.environ.get("KVMESH_RANK_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s rank %(name)s %(message)s",
        stream=sys.stderr,
    )
    sock = socket.socket(fileno=int(sys.argv[1]))
    RankLoop(RankPort(sock)).run()


if __name__ == "__main__":
    main()
