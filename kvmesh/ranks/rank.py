"""`python -m kvmesh.ranks.rank FD [FD ...]` runs one rank process. It has torch, device pages, host segment and
transfer engine; a pool node's rank has only the last two. The first FD leads to the front (or to the rank host that
carries its frames), the others to ranks of the same instance on this machine.

The main thread alternates between commands of the front and engine steps; where there are several ranks, rank 0 leads
and the others follow (`kvmesh.ranks.lockstep`); where there are several data-parallel groups of ranks, each has a
leader, and all keep step (`kvmesh.ranks.wake`). It runs the decode batch by itself, step after step, and prefill steps
as the front sends them, in one pass with the batch's rows where there are any; the transfer engine's threads move bytes
beside it.

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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvmesh.drafts.step_share import DraftCosts
from kvmesh.errors import InternalError, KvmeshError, RanksLost
from kvmesh.loading import lasting_imports
from kvmesh.ranks import protocol as m
from kvmesh.ranks.ipc import RankPort
from kvmesh.ranks.lockstep import SPEAKERS, Follower, LockstepLeader, check
from kvmesh.ranks.network import find_interface
from kvmesh.ranks.rendezvous import StoreCaller
from kvmesh.ranks.transfer_metrics import stats_of
from kvmesh.ranks.turn_sockets import accept_followers, dial_leader
from kvmesh.ranks.wake import OtherLeaders, WakeRule, axes_of

if TYPE_CHECKING:
    from kvmesh.ranks.worker.pool_worker import StoreWorker
    from kvmesh.ranks.worker.worker import Worker

    AnyWorker = Worker | StoreWorker
from kvmesh.ranks.lockstep import LockstepTurns, Turn

# The sockets between the ranks of one instance: turns go from the leader to its followers.

READ_BYTES = 4096


class Followers:
    """Has the leader's ends of the sockets, by follower; none where it is alone. Raises InternalError when a follower
    takes nothing."""

    def __init__(self, socks: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._socks = socks
        self._timeout_s = timeout_s
        for sock in socks.values():
            sock.settimeout(timeout_s)

    def tell(self, turn: Turn | None) -> None:
        """Sends a turn to all followers."""
        if turn is None:
            return
        data = turn.encode()
        for rank, sock in self._socks.items():
            try:
                sock.sendall(data)
            except OSError as error:
                raise InternalError(f"rank {rank} does not listen: {error or type(error).__name__}") from None


class LeaderPort:
    """Is a follower's end of the socket to the leader. Raises InternalError when the leader is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._turns = LockstepTurns()
        self.fileno = sock.fileno()

    def turns(self) -> list[Turn]:
        """Returns the turns that have arrived; never waits."""
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise InternalError(f"rank 0 is gone: {error}") from None
        if not data:
            raise InternalError("rank 0 is gone")
        return self._turns.feed(data)


log = logging.getLogger("kvmesh.rank")

# Between layers only these are handled; the rest keeps its order for the gap between steps.
URGENT = (
    m.PushOpen,
    m.PushLease,
    m.PushCancel,
    m.PullOpen,
    m.PullCancel,
    m.Sum,
    m.WatchReads,
    m.UnwatchReads,
    m.TierPut,
    m.TierGet,
    m.TierProbe,
    m.TierRemove,
    m.OpenSegment,
    m.CloseSegment,
    m.OpenWindow,
    m.Fence,
    m.CompileGrammar,
    m.StoreAnswer,
    m.Ping,
)
MEETING_S = 600.0  # how long a rank on another host may take from its first collective to its first turn
HOUSEKEEPING_MS = 50
COPYING_MS = 1


class RankLoop:
    """Takes commands, runs steps, sends events. `peers` are a leader's sockets to its followers, and behind them those
    to the leaders of other data-parallel groups; or a follower's one to its leader."""

    def __init__(self, port: RankPort, peers: Sequence[socket.socket] = ()) -> None:
        self._port = port
        self._peers = peers
        self._commands: LockstepLeader | Follower = LockstepLeader()
        self._steps: deque[tuple[m.PrefillStep, int]] = deque()  # with how many loads were asked for before it
        self._worker: AnyWorker | None = None
        self._wake = WakeRule()
        self._store: StoreCaller | None = None  # where ranks on several hosts meet

    def run(self) -> None:
        first = self._port.receive(None)
        configure = first[0]
        if not isinstance(configure, m.Configure):
            raise SystemExit("the first message must be Configure")
        replica = axes_of(configure).replica
        if configure.rank % replica:
            self._commands = Follower()
        self._commands.arrived(first[1:])
        if not self._configure(configure):
            return
        assert self._worker is not None
        with contextlib.closing(self._worker) as worker:
            try:
                timeout_s = configure.group_timeout_ms / 1000
                socks = self._turn_sockets(configure, replica, timeout_s)
                if isinstance(self._commands, Follower):
                    self._follow(worker, self._commands, LeaderPort(socks[0]), timeout_s)
                else:
                    others = OtherLeaders(self._peers[len(socks) - len(configure.elsewhere) :])
                    self._lead(worker, self._commands, Followers(socks, timeout_s), others)
            except Exception as error:
                known = isinstance(error, KvmeshError | RanksLost)
                log.error("rank %d gives up: %s", configure.rank, error, exc_info=not known)
                self._port.send(m.RankFailed(f"gave up: {error}"))
                raise SystemExit(1) from None

    def _turn_sockets(self, configure: m.Configure, replica: int, timeout_s: float) -> dict[int, socket.socket]:
        """Returns the sockets between leader and followers, by the rank at the other end: those that the process was
        started with, and connections to ranks on other hosts."""
        if configure.rank % replica:
            if configure.rank not in configure.elsewhere:
                return {0: self._peers[0]}
            assert self._store is not None
            return {0: dial_leader(self._store, configure.secret, configure.rank, MEETING_S, timeout_s)}
        group = range(configure.rank + 1, configure.rank + replica)
        here = [rank for rank in group if rank not in configure.elsewhere]
        socks = dict(zip(here, self._peers, strict=False))  # behind them are those to other leaders
        if configure.elsewhere:
            assert self._store is not None
            address = find_interface(configure.rank_network, configure.rank_route).address
            secret, ranks = configure.secret, configure.elsewhere
            socks |= accept_followers(self._store, address, secret, ranks, MEETING_S, timeout_s)
        return socks

    def _lead(self, worker: AnyWorker, commands: LockstepLeader, followers: Followers, others: OtherLeaders) -> None:
        """Runs steps as commands come; the followers are told what each step is made of. Raises InternalError when
        the leader of another data-parallel group is gone."""
        for fileno in others.filenos:
            self._port.watch(fileno)
        while True:
            busy = commands.waiting or self._due(worker) or worker.wants_step or worker.has_chores
            busy = busy or self._wake.awake(*worker.rounds)
            commands.arrived(self._port.receive(self._patience(worker, busy)))
            self._wake.take(others.calls())
            while (message := commands.next()) is not None:
                self._handle(worker, message)
            worker.tick()
            due = self._due(worker)
            run = due or worker.wants_step
            if worker.keeps_rounds:
                run, call = self._wake.choose(*worker.rounds, run)
                others.call(call)
            costs = worker.draft_costs
            followers.tell(commands.turn(run, due, self._step_id, worker.rows, costs))
            if run:
                self._step(worker, due, costs)

    def _follow(self, worker: AnyWorker, commands: Follower, leader: LeaderPort, timeout_s: float) -> None:
        """Runs the leader's steps. Raises InternalError when the leader is gone, or commands that it has applied do not
        arrive."""
        self._port.watch(leader.fileno)
        late_at = 0.0  # when a command that the leader has already is late; 0: none is missing
        while True:
            for message in self._port.receive(self._patience(worker, worker.has_chores, late_at)):
                if isinstance(message, m.Ping | m.Shutdown | m.StoreAnswer):  # these do not wait for the leader
                    self._handle(worker, message)
                else:
                    commands.arrived((message,))
            commands.take_turns(leader.turns())
            done = False
            while not done:
                while (command := commands.next()) is not None:
                    self._handle(worker, command)
                worker.tick()
                turn = commands.turn(self._due(worker))
                if turn is not None:
                    check(turn, self._step_id, worker.rows)
                    if turn.run:
                        self._step(worker, turn.due, DraftCosts(turn.verified_ppm, turn.drafted_ppm))
                done = turn is None
            now = time.monotonic()
            if not commands.behind:
                late_at = 0.0
            elif not late_at:
                late_at = now + timeout_s
            elif now > late_at:
                raise InternalError(f"commands that rank 0 has did not come within {timeout_s:.0f} s")

    @staticmethod
    def _patience(worker: AnyWorker, busy: bool, late_at: float = 0.0) -> int | None:
        """Returns how long to wait for a command in ms; None for ever."""
        if busy:
            return 0
        if worker.copying:
            return COPYING_MS
        if late_at or worker.needs_ticks:
            return HOUSEKEEPING_MS
        return None

    @property
    def _step_id(self) -> int:
        return self._steps[0][0].step_id if self._steps else 0

    def _due(self, worker: AnyWorker) -> bool:
        """Whether there is a PrefillStep and all loads before it are done. Until then rows step without it."""
        return bool(self._steps) and worker.loaded(self._steps[0][1])

    def _step(self, worker: AnyWorker, due: bool, costs: DraftCosts) -> None:
        worker.step(self._steps.popleft()[0] if due else None, self._take_urgent, costs)

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
            with lasting_imports():
                from kvmesh.ranks.worker.pool_worker import StoreWorker

            return StoreWorker(configure, self._port.send)
        with lasting_imports():
            from kvmesh.ranks.worker.worker import Worker  # torch loads here, after the thread cap

        axes = axes_of(configure)
        speaks = configure.rank % axes.replica == axes.speaker
        if configure.rank_route:
            self._store = StoreCaller(self._port, self._commands.arrived)
        send = self._port.send if speaks else self._send_unless_alike
        return Worker(configure, send, self._store, self._take_urgent)

    def _send_unless_alike(self, message: m.ToFront) -> None:
        if not isinstance(message, SPEAKERS):
            self._port.send(message)

    def _take_urgent(self) -> None:
        """Takes urgent commands between two layers of a step; the others keep their order."""
        worker = self._worker
        assert worker is not None
        for message in self._port.receive(0):
            if isinstance(message, URGENT):
                self._handle(worker, message)
            else:
                self._commands.arrived((message,))

    def _handle(self, worker: AnyWorker, message: m.ToRank) -> None:
        match message:
            case m.PrefillStep():
                self._steps.append((message, worker.loads))
            case m.Ping(nonce):
                self._port.send(m.Pong(nonce, time.process_time(), stats_of(worker.engine), worker.expert_stats))
                worker.tiers.report()
            case m.StoreAnswer():
                if self._store is not None:
                    self._store.answered(message)
            case m.Shutdown():
                raise SystemExit(0)
            case _:
                worker.handle(message)


def _die_with_parent() -> None:
    """Makes the kernel kill this process when the front dies (Linux: PR_SET_PDEATHSIG = 1)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    _die_with_parent()
    # Ctrl-C reaches the whole terminal group, systemd's SIGTERM the whole unit; the front decides when its ranks end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=os.environ.get("KVMESH_RANK_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s rank %(name)s %(message)s",
        stream=sys.stderr,
    )
    sock, *peers = (socket.socket(fileno=int(fileno)) for fileno in sys.argv[1:])
    RankLoop(RankPort(sock), peers).run()


if __name__ == "__main__":
    main()
