"""This module keeps the data-parallel groups of one instance in step, and lets them sleep when none has work.

Each group of ranks has commands, rows and pages of its own, and a leader (`kvmesh.ranks.lockstep`). Where groups share
experts every step is a round of all groups (`kvmesh.engine.models.dispatch.StepRounds`): those without work serve the
others' tokens. A round tells all of them the same, whether any had work, so they go on, or fall asleep, together:

    group 0   Join 1 ── calls (5) ── round 5 ── round 6 ── round 7: nobody has work ── asleep
    group 1   asleep ── is called ── round 5 ── round 6 ── round 7: nobody has work ── asleep

A group that gets work while all are asleep calls the others into the next round. Calls of several groups into the same
round are one; a call that is taken after its round is of no use and does no harm. Who has called takes part, even if
its work is gone by then: the others are on their way.

`WakeRule` is pure; `OtherLeaders` carries its calls over sockets between the leaders.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmesh.engine.axes import Axes
from kvmesh.errors import InternalError
from kvmesh.ranks import protocol as m

WIRE = struct.Struct("<Q")  # the number of a round
READ_BYTES = 4096


def axes_of(configure: m.Configure) -> Axes:
    """Returns the axes of the instance's ranks; those of one place on `dp` are a group."""
    return Axes.parse(configure.mesh) if configure.mesh else Axes(tp=configure.world_size)


class RoundChoice(NamedTuple):
    """Says whether a group takes part in the next round now, and into which it calls the others first (0: none)."""

    run: bool
    call: int


class WakeRule:
    """Decides, for one group, when it takes part in a round. Rounds are counted from 1, alike in all groups."""

    def __init__(self) -> None:
        self._called = 0  # the last round that some group has called for

    def take(self, calls: Iterable[int]) -> None:
        """Takes calls of other groups, each the number of a round."""
        self._called = max(self._called, *calls, 0)

    def awake(self, done: int, anyone: bool) -> bool:
        """Whether this group takes part in the round after `done`, work or not; `anyone` says whether some group had
        work in that one."""
        return anyone or self._called > done

    def choose(self, done: int, anyone: bool, work: bool) -> RoundChoice:
        """Returns what to do after round `done`, with `work` of one's own or without."""
        if self.awake(done, anyone):
            return RoundChoice(True, 0)
        if not work:
            return RoundChoice(False, 0)
        self._called = done + 1
        return RoundChoice(True, self._called)


class OtherLeaders:
    """Has a leader's sockets to the leaders of the other groups. Raises InternalError when one of them is gone, or has
    taken no call for thousands of rounds."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = socks
        self._buffers = [b""] * len(socks)
        for sock in socks:
            sock.setblocking(False)

    @property
    def filenos(self) -> list[int]:
        return [sock.fileno() for sock in self._socks]

    def calls(self) -> list[int]:
        """Returns the calls that have arrived; never waits."""
        found: list[int] = []
        for at, sock in enumerate(self._socks):
            try:
                data = sock.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise InternalError(f"the leader of another data-parallel group is gone: {error}") from None
            if not data:
                raise InternalError("the leader of another data-parallel group is gone")
            data = self._buffers[at] + data
            whole = len(data) - len(data) % WIRE.size
            self._buffers[at] = data[whole:]
            found += [number for (number,) in WIRE.iter_unpack(data[:whole])]
        return found

    def call(self, number: int) -> None:
        """Calls all others into the round; 0 is none."""
        if not number:
            return
        for sock in self._socks:
            try:
                sock.sendall(WIRE.pack(number))
            except OSError as error:
                why = error or type(error).__name__
                raise InternalError(f"the leader of another data-parallel group does not listen: {why}") from None
