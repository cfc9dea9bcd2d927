"""Ranks and services of tests are forked from one process that has imported all they need, torch among it: each would
else take seconds of CPU to come up. They are children of who asks for them, as if it had started them.

Where services are forked, each instance's front gets a process of its own that ranks are forked from. What tests start
by a command (`kvmesh up`) comes up as in the product, and so does a rank whose environment must be its own from its
first instruction (`streaming`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import psutil

from kvmesh.cli.up import mesh
from kvmesh.ranks import client
from tests.support.forking import DEATH_SIGNAL, FORKING, Forker, Message, fork_others, forking_process, prctl, sockets

COLD, COLD_SERVICE = client.start_process, mesh.start_service
SERVE = ["-m", "kvmesh.cli", "serve"]
FRONTS = {"prefill", "decode", "coupled", "ranks"}  # services that start ranks


def children(pid: int | None = None) -> list[psutil.Process]:
    """Processes that this one (or `pid`) has started: all its children but those from which others are forked."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() != FORKING:
                found.append(child)
    return found


@contextlib.contextmanager
def warm_ranks() -> Iterator[None]:
    """Meanwhile ranks of this process are forked."""
    with _forker("ranks") as forker:
        client.start_process = forker.rank
        try:
            yield
        finally:
            client.start_process = COLD


@contextlib.contextmanager
def warm_services() -> Iterator[None]:
    """Meanwhile services that a `Mesh` of this process starts are forked, and so are their ranks."""
    with _forker("services") as forker:
        mesh.start_service = forker.service
        try:
            yield
        finally:
            mesh.start_service = COLD_SERVICE


@contextlib.contextmanager
def _forker(what: str) -> Iterator[_Forker]:
    with forking_process("tests.support.warm_processes", what) as sock:
        yield _Forker(sock)


class _Forker(Forker):
    def rank(self, filenos: Sequence[int], env: Mapping[str, str]) -> client.RankProcess:
        """As `kvmesh.ranks.client.start_process`."""
        if client.TUNABLES in env:
            return COLD(filenos, env)
        return self.fork({"env": dict(env)}, [1, 2, *filenos])

    def service(self, argv: Sequence[str], env: Mapping[str, str], out: IO[bytes]) -> mesh.ServiceProcess:
        """As `kvmesh.cli.up.mesh.start_service`."""
        if list(argv[1:4]) != SERVE:  # Redis
            return COLD_SERVICE(argv, env, out)
        return self.fork({"env": dict(env), "argv": list(argv[3:])}, [out.fileno(), out.fileno()])


# ── the process that forks ───────────────────────────────────────────────────────────────────────────────


def main() -> None:
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    what, fileno = sys.argv[1:]
    sock = socket.socket(fileno=int(fileno))
    gc.disable()
    import kvmesh.ranks.worker.pool_worker
    import kvmesh.ranks.worker.worker  # noqa: F401

    if what == "services":
        _import_services()
    gc.freeze()
    gc.enable()
    fork_others(sock, _run)


def _import_services() -> None:
    import kvmesh.cli.app
    import kvmesh.rpc.pb
    from kvmesh.cli.serve import SERVICES

    for service in SERVICES.values():
        importlib.import_module(service.main)
    for module in pkgutil.iter_modules(kvmesh.rpc.pb.__path__, "kvmesh.rpc.pb."):
        importlib.import_module(module.name)


def _run(told: Message, filenos: list[int]) -> None:
    if "argv" in told:
        _service(told["argv"])
    else:
        _rank(filenos)


def _rank(filenos: Sequence[int]) -> None:
    from kvmesh.ranks import rank

    sys.argv = ["rank", *map(str, filenos)]
    rank.main()


def _service(argv: list[str]) -> None:
    from kvmesh.cli import app

    os.setpgid(0, 0)
    if argv[1] in FRONTS:
        ours, theirs = sockets()
        if os.fork() == 0:
            try:
                ours.close()
                prctl(DEATH_SIGNAL, signal.SIGKILL)
                fork_others(theirs, _run)
            finally:
                os._exit(0)
        theirs.close()
        client.start_process = _Forker(ours).rank
    sys.argv = ["kvmesh", *argv]
    app.main()


if __name__ == "__main__":
    main()
