"""What `kvmesh up` says of ranks on several machines while it runs: where an instance waits for machines that lend
ranks, who has come and gone; on a machine that lends, whose ranks run there and how they ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.markup import escape

from kvmesh.cli import probe
from kvmesh.cli.instances import ranks_text
from kvmesh.cli.up.mesh import Mesh, ProcessState
from kvmesh.cli.up.settings import INSTANCES, MeshSettings
from kvmesh.rpc.pb import ranks_pb2

LOOK_S = 1.0
WAITS = "waits for rank hosts"  # in the log of an instance (kvmesh.instance.rank_lending)
UNHEARD_MS = 5_000  # of a mesh that says nothing


def machines_wanted(settings: MeshSettings) -> int:
    """How many further machines the instances of this one need at least: several instances may share them on CPUs."""
    return max((settings.hosts(one) - 1 for one in INSTANCES if settings.count(one)), default=0)


@dataclass
class BorrowedRanks:
    """What was said of machines that lend ranks to this mesh. `join`: the command for one."""

    wanted: int
    join: str
    _known: dict[str, tuple[str, str]] = field(default_factory=dict)  # of the machine and address, by its name
    _asked: bool = False

    def lines(self, hosts: Sequence[ranks_pb2.RankHostState]) -> list[str]:
        """Returns what is new, a line each. Pure but for what it remembers."""
        found = {one.instance.instance_id: (one.node_id, one.instance.address) for one in hosts}
        lines = [
            f"[green]✓[/] {escape(node)} lends ranks ({address})"
            for name, (node, address) in found.items()
            if name not in self._known
        ]
        lines += [
            f"[red]✗[/] {escape(node)} ({address}) lends no ranks any more: it has stopped, or cannot be reached"
            for name, (node, address) in self._known.items()
            if name not in found
        ]
        lacks, lacked = self.wanted - len(found), self.wanted - len(self._known)
        if lacks > 0 and (not self._asked or lacks > lacked):
            more = "1 more machine" if lacks == 1 else f"{lacks} more machines"
            lines.append(f"[yellow]Ranks wait for {more}.[/] Run there:\n  {escape(self.join)}")
        self._asked, self._known = True, found
        return lines


@dataclass
class LentRanks:
    """What was said of the ranks that this machine runs for others. `mesh`: its conductors."""

    mesh: str
    _runs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _ends: int = 0
    _registered: bool | None = None

    def lines(self, status: ranks_pb2.GetRankHostStatusResponse) -> list[str]:
        """Returns what is new in a rank host's status, a line each. Pure but for what it remembers."""
        lines = []
        new = status.ends - self._ends
        for end in status.ended[-new:] if new > 0 else ():
            what = f"{ranks_text(end.ranks)} of {escape(end.instance_id)}"
            lines.append(f"[red]✗[/] {what} ended here: {escape(end.cause)}")
            self._runs.pop(end.instance_id, None)
        runs = {use.instance_id: tuple(use.ranks) for use in status.host.uses}
        lines += [
            f"[green]✓[/] {escape(name)} runs {ranks_text(ranks)} here"
            for name, ranks in runs.items()
            if self._runs.get(name) != ranks
        ]
        self._runs, self._ends = runs, status.ends
        if status.registered:
            if self._registered is False:
                lines.append(f"[green]✓[/] the mesh of {self.mesh} answers again")
            self._registered = True
        elif status.unheard_ms > UNHEARD_MS and self._registered is not False:
            self._registered = False
            lines.append(
                f"[yellow]![/] the mesh of {self.mesh} does not answer: has it stopped? This machine lends its ranks "
                "again as soon as it is back; Ctrl-C ends it"
            )
        return lines


class RankHostWatch:
    """Asks again and again, in a thread of its own, and says what is new. A context."""

    def __init__(self, mesh: Mesh, say: Callable[[str], None], join: str) -> None:
        self._mesh, self._say = mesh, say
        settings = mesh.settings
        self._lent = LentRanks(",".join(settings.joined.conductors)) if settings.lends and settings.joined else None
        self._borrowed = BorrowedRanks(machines_wanted(settings), join)
        self._why: dict[str, str] = {}  # what was said of an instance that waits
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank hosts", daemon=True)
        self._wanted = self._lent is not None or self._borrowed.wanted > 0

    def __enter__(self) -> RankHostWatch:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.silence()
        if self._wanted:
            self._thread.join()

    def silence(self) -> None:
        """Says nothing more."""
        self._over.set()

    def _run(self) -> None:
        settings, tls = self._mesh.settings, self._mesh.security
        masters = settings.joined.masters if settings.joined else self._addresses("store")
        while not self._over.is_set():
            lines: list[str] = []
            if self._lent is not None:
                status = probe.rank_host(self._addresses("ranks")[0], tls=tls)
                lines = self._lent.lines(status) if status is not None else []
            else:
                hosts = probe.rank_hosts(masters, tls=tls)
                lines = self._borrowed.lines(hosts) if hosts is not None else []
                lines += self._waits(len(hosts or ()))
            for line in lines:
                if not self._over.is_set():
                    self._say(line)
            self._over.wait(LOOK_S)

    def _waits(self, hosts: int) -> list[str]:
        """Says why an instance still waits, as its log does, where that is not for want of machines."""
        lines = []
        for one in self._mesh.processes.values():
            if hosts < self._borrowed.wanted or one.state is not ProcessState.STARTING:
                continue
            why = one.last_words.partition(WAITS)[2].partition(": ")[2]
            if ";" in why and why != self._why.get(one.name):
                self._why[one.name] = why
                lines.append(f"[yellow]![/] {one.name} waits for ranks: {escape(why)}")
        return lines

    def _addresses(self, service: str) -> tuple[str, ...]:
        return tuple(one.spec.address for one in self._mesh.processes.values() if one.spec.service == service)
