"""One simulation from its first request to its last: a plain function of a configuration and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvmesh.errors import ConfigError
from kvmesh.loading import rare_collections
from kvmesh.sim.cluster import Cluster
from kvmesh.sim.config import MeshMode, SimConfig
from kvmesh.sim.coupled_cluster import CoupledCluster
from kvmesh.sim.host import Watch
from kvmesh.sim.loop import Loop
from kvmesh.sim.report.records import DONE, MeshSample, Record
from kvmesh.sim.report.summary import Summary
from kvmesh.sim.workloads.workload import Clients, SimRequest

PROGRESS_EVERY = 100  # requests
COLLECT_EVERY = 100_000  # objects made more than gone, of those that may lie in cycles


class System(Protocol):
    """What serves the requests."""

    def submit(self, request: SimRequest) -> None: ...

    def sample(self) -> MeshSample: ...

    @property
    def quiet(self) -> bool:
        """Whether no byte is on its way."""

    def check_empty(self) -> None: ...


def run(
    config: SimConfig,
    requests: Iterable[SimRequest] | Clients,
    *,
    sink: Callable[[Record], None] = lambda record: None,
    samples: Callable[[MeshSample], None] = lambda sample: None,
    progress: Callable[[float, int], None] = lambda at_s, done: None,
    steps: Watch | None = None,
    last: Callable[[System], None] = lambda system: None,
) -> Summary:
    """Serve `requests` (in the order of their times; taken one at a time) to the end of each, and what their clients
    ask then, where `requests` are `Clients`. `sink` gets every record
    when its request ends, `samples` the pools now and then, `progress` virtual seconds and requests done, `steps` every
    step of instances that share a host, `last` what served them, at the end. The same configuration and requests give
    the same result. Memory: of the requests under way alone.

    ConfigError: what cannot be simulated, or a request earlier than the one before it."""
    one = _Run(config, requests, sink, samples, progress)
    if steps is not None and isinstance(one.system, Cluster) and one.system.machine is not None:
        one.system.machine.watch = steps
    with rare_collections(COLLECT_EVERY):
        summary = one.go()
    last(one.system)
    return summary


class _Run:
    def __init__(
        self,
        config: SimConfig,
        requests: Iterable[SimRequest] | Clients,
        sink: Callable[[Record], None],
        samples: Callable[[MeshSample], None],
        progress: Callable[[float, int], None],
    ) -> None:
        self._config, self._sink, self._samples, self._progress = config, sink, samples, progress
        self._clients = None if isinstance(requests, Iterable) else requests
        self._requests = iter(requests) if isinstance(requests, Iterable) else requests.first()
        self._loop = Loop()
        self._arrived = self._done = 0
        self._last_s = 0.0
        self._all = False
        self.summary = Summary(ttft_slo_s=config.conductor.slo_ttft_s)
        make = Cluster if config.mode is MeshMode.DISAGGREGATED else CoupledCluster
        self.system: System = make(config, self._loop, self._ended)

    def go(self) -> Summary:
        self._next()
        self._loop.after(0.0, self._sample)
        self._loop.run(lambda: self._all and self._done == self._arrived and self.system.quiet)
        self.system.check_empty()
        self._progress(self._loop.now, self._done)
        return self.summary

    def _next(self) -> None:
        """The next request is taken when the one before has arrived."""
        request = next(self._requests, None)
        if request is None:
            self._all = True
            return
        if request.at_s < self._last_s:
            why = f"earlier than the one before, {self._last_s}"
            raise ConfigError(f"request {request.index}: at_s={request.at_s}: {why}", field="at_s")
        self._last_s = request.at_s
        self._arrived += 1
        self._loop.at(request.at_s, lambda: self._arrive(request))

    def _arrive(self, request: SimRequest) -> None:
        self.system.submit(request)
        self._next()

    def _ended(self, record: Record) -> None:
        self._done += 1
        self.summary.add(record)
        self._sink(record)
        if self._clients is not None:
            request = self._clients.after(record.index, self._loop.now, done=record.outcome == DONE)
            if request is not None:
                self._arrived += 1
                self._loop.at(request.at_s, lambda: self.system.submit(request))
        if not self._done % PROGRESS_EVERY:
            self._progress(self._loop.now, self._done)

    def _sample(self) -> None:
        sample = self.system.sample()
        self.summary.sample(sample)
        self._samples(sample)
        self._loop.after(self._config.sample_s, self._sample)
