"""Coupled instances behind a plain router: what disaggregation is compared with, on as many devices."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.sim.config import Routing, SimConfig
from kvmesh.sim.coupled import Coupled, CoupledRow
from kvmesh.sim.loop import Loop
from kvmesh.sim.report.records import DONE, FAILED, PoolSample, Record, Sample
from kvmesh.sim.workloads.workload import SimRequest


class CoupledCluster:
    """`ended` is called once for every request that was `submit`ted."""

    def __init__(self, config: SimConfig, loop: Loop, ended: Callable[[Record], None]) -> None:
        self._config, self._loop, self._told = config, loop, ended
        self.instances = [
            Coupled(f"c{n}", spec, config, loop, self._done, self._failed) for n, spec in enumerate(config.coupled)
        ]
        self._number = 0
        self._turn = -1
        self.active = 0
        self.quiet = True  # nothing goes over wires

    def submit(self, request: SimRequest) -> None:
        """It arrives now."""
        self.active += 1
        self._number += 1
        instance = self._choose()
        record = Record.of(request, self._loop.now, self._config.max_output_tokens)
        record.prefill = record.decode = instance.name
        guest = CoupledRow(self._number, request, record)
        self._loop.after(self._config.hop_s, lambda: instance.arrive(guest))

    def _choose(self) -> Coupled:
        """Those that are as good take turns."""
        count = len(self.instances)
        turns = range(self._turn + 1, self._turn + 1 + count)
        self._turn = turns[0]
        if self._config.routing is Routing.LEAST_LOADED:
            self._turn = min(turns, key=lambda n: self.instances[n % count].live)
        self._turn %= count
        return self.instances[self._turn]

    def _done(self, guest: CoupledRow) -> None:
        self._end(guest.record, DONE, "")

    def _failed(self, guest: CoupledRow, reason: str) -> None:
        self._end(guest.record, FAILED, reason)

    def _end(self, record: Record, outcome: str, reason: str) -> None:
        assert not record.outcome, f"{record.request_id} ends twice"
        self.active -= 1
        record.outcome, record.reason = outcome, reason
        self._told(record)

    def sample(self) -> Sample:
        """The pool, now. Its load is the share of pages in use."""
        pool = PoolSample(len(self.instances))
        for instance in self.instances:
            instance.add_to(pool)
        return Sample(self._loop.now, {"coupled": pool}, 0, self.active)

    def check_empty(self) -> None:
        """AssertionError unless everything came back: after the last request."""
        assert not self.active
        for instance in self.instances:
            instance.check_empty()
