"""Coupled instances in virtual time, with what gateways do before them. Conductors, where they decide, see engines of
others (external.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan

from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded
from kvmesh.services.conductor.domain import Refuse
from kvmesh.services.gateway.recovery import AttemptRecovery
from kvmesh.sim.config import SimConfig
from kvmesh.sim.coupled import Coupled, CoupledRow
from kvmesh.sim.engine_router import EngineRouter, PlainRouter
from kvmesh.sim.external import ConductorRouter
from kvmesh.sim.life import PATIENCE, elsewhere_s
from kvmesh.sim.loop import Loop
from kvmesh.sim.report.records import DONE, FAILED, REFUSED, MeshSample, PoolSample, Record, RetryWait
from kvmesh.sim.workloads.workload import SimRequest


class CoupledCluster:
    """`ended` is called once for every request that was `submit`ted."""

    def __init__(self, config: SimConfig, loop: Loop, ended: Callable[[Record], None]) -> None:
        self._config, self._loop, self._told = config, loop, ended
        self.instances = [
            Coupled(f"c{n}", spec, config, loop, self._done, self._failed) for n, spec in enumerate(config.coupled)
        ]
        self._named = {instance.name: instance for instance in self.instances}
        self.router: EngineRouter = (
            ConductorRouter(self.instances, config, loop)
            if config.routing.by_conductors
            else PlainRouter(self.instances, config.routing)
        )
        self._number = 0
        self.active = 0
        self.quiet = True  # nothing goes over wires

    def submit(self, request: SimRequest) -> None:
        """Lets a request arrive now."""
        self.active += 1
        self._number += 1
        record = Record.of(request, self._loop.now, self._config.max_output_tokens)
        self._ask(CoupledRow(self._number, request, record))

    def _ask(self, guest: CoupledRow) -> None:
        answer, record = self.router.place(guest), guest.record
        if isinstance(answer, Refuse):
            self._refused(guest, answer.error, answer.reason)
            return
        record.prefill = record.decode = answer.name
        if record.waits:
            *before, last = record.waits
            record.waits = (*before, replace(last, placed=True))
        self._loop.after(self._config.hop_s, lambda: self._reach(guest, answer))

    def _reach(self, guest: CoupledRow, engine: Coupled) -> None:
        error = self.router.reaches(guest, engine)
        if error is None:
            engine.arrive(guest)
            return
        guest.recovery = guest.recovery or AttemptRecovery(PATIENCE)
        try:
            delay_s = elsewhere_s(guest.recovery, error, engine.name, self._loop.now)
        except KvmeshError:
            self._refused(guest, error, "decode")
            return
        guest.avoid = tuple(dict.fromkeys((*guest.avoid, engine.name)))
        guest.attempt += 1
        self._loop.after(delay_s, lambda: self._ask(guest))

    def _refused(self, guest: CoupledRow, error: KvmeshError, reason: str) -> None:
        record = guest.record
        if isinstance(error, Overloaded):
            told_s = error.retry_after_ms / 1000
            record.waits = (*record.waits, RetryWait(told_s, nan))  # what it had to be is not reckoned of engines
            if record.retries < self._config.retries:
                record.retries += 1
                guest.attempt += 1
                guest.avoid, guest.recovery = (), None
                self._loop.after(told_s, lambda: self._ask(guest))
                return
        self._end(record, REFUSED, reason)

    def _done(self, guest: CoupledRow) -> None:
        self.router.leaves(guest, self._named[guest.record.decode], None)
        self._end(guest.record, DONE, "")

    def _failed(self, guest: CoupledRow, reason: str) -> None:
        self.router.leaves(guest, self._named[guest.record.decode], InvalidRequest(reason))
        self._end(guest.record, FAILED, reason)

    def _end(self, record: Record, outcome: str, reason: str) -> None:
        assert not record.outcome, f"{record.request_id} ends twice"
        self.active -= 1
        record.outcome, record.reason = outcome, reason
        self._told(record)

    def sample(self) -> MeshSample:
        """The pool, now. Its load is the share of pages in use."""
        pool = PoolSample(len(self.instances))
        for instance in self.instances:
            instance.add_to(pool)
        return MeshSample(self._loop.now, {"coupled": pool}, 0, self.active)

    def check_empty(self) -> None:
        """AssertionError unless everything came back: after the last request."""
        assert not self.active
        self.router.check_empty()
        for instance in self.instances:
            instance.check_empty()
