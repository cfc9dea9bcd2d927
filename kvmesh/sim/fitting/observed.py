"""What a decision log tells of a live mesh: its instances, what was asked of it, how that went, and all samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import (
    DecodeSample,
    Heartbeat,
    Outcome,
    PrefillSample,
    Register,
    RequestOutcome,
    Schedule,
)
from kvmesh.services.conductor.records import journal
from kvmesh.services.conductor.settings import Settings
from kvmesh.sim.workloads.workload import SimRequest


@dataclass
class Observed:
    """One life of a conductor, from `since_s` seconds after its start on. Only what was told of requests that were
    asked for from then on counts among `prefills`; of decode steps, those that were reported from then on."""

    settings: Settings
    started_at: float
    since_s: float
    instances: dict[str, Register] = field(default_factory=dict)
    store_blocks: dict[str, int] = field(default_factory=dict)  # capacity of each instance's node store
    asked: dict[str, tuple[float, Schedule]] = field(default_factory=dict)  # by request_id: when, and what
    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)
    prefills: dict[str, PrefillSample] = field(default_factory=dict)
    rows: list[DecodeSample] = field(default_factory=list)

    def done(self) -> list[str]:
        """Requests that ended well, in the order in which they were asked for."""
        good = {name for name, one in self.outcomes.items() if one.outcome is Outcome.DONE}
        return [name for name in self.asked if name in good]

    def requests(self) -> list[SimRequest]:
        """Those, as a simulation takes them: the first one at 0, answers as long as they were."""
        found = []
        names = self.done()
        first = self.asked[names[0]][0] if names else 0.0
        for index, name in enumerate(names):
            at, told = self.asked[name]
            found.append(
                SimRequest(
                    index,
                    at - first,
                    told.prompt_tokens,
                    max(1, self.outcomes[name].output_tokens),
                    tuple(told.keys),
                    session=told.session,
                    origin=told.origin,
                    tenant=told.tenant,
                    lane=told.lane,
                    priority=told.priority,
                    ttft_slo_s=told.ttft_slo_s,
                    tbt_slo_s=told.tbt_slo_s,
                )
            )
        return found


def pooled(runs: Sequence[Observed]) -> Observed:
    """Several runs of the same mesh as one, for fits: all samples and outcomes. Each run's arrivals are by its own
    conductor, so `requests` is of no use here. One run or more; ConfigError: the same one twice."""
    found = replace(runs[0], asked={}, outcomes={}, prefills={}, rows=[])
    for one in runs:
        if strange := found.outcomes.keys() & one.outcomes.keys():
            raise ConfigError(f"decision log: request {min(strange)} is in two of them", field="decisions")
        found.asked |= one.asked
        found.outcomes |= one.outcomes
        found.prefills |= one.prefills
        found.rows += one.rows
    return found


def observe(lines: Iterable[bytes], since_s: float = 0.0) -> Observed:
    """A decision log, read once. ConfigError: it is none, a line of it is broken (but for the last one), or nothing is
    in it."""
    rest = iter(lines)
    first = next(rest, None)
    if first is None:
        raise ConfigError("decision log: is empty", field="decisions")
    header = journal.header_of(first)
    found = Observed(header.settings, header.started_at, since_s)
    for number, raw in enumerate(rest, 2):
        if not raw.endswith(b"\n"):
            break
        line = journal.line_of(raw, number)
        if line is not None:
            _take(found, line)
    return found


def _take(found: Observed, line: journal.JournalLine) -> None:
    event, late = line.event, line.at - found.started_at >= found.since_s
    if isinstance(event, Register):
        found.instances[event.ref.instance_id] = event
    elif isinstance(event, Schedule):
        if late and line.answer is not None and "placed" in line.answer:
            found.asked.setdefault(event.request_id, (line.at, event))
    elif isinstance(event, Heartbeat):
        name, capacity = event.ref.instance_id, event.load.store_capacity
        found.store_blocks[name] = max(capacity, found.store_blocks.get(name, 0))
        for sample in event.prefill_samples:
            if sample.request_id in found.asked:
                found.prefills[sample.request_id] = sample
        for outcome in event.outcomes:
            if outcome.request_id in found.asked:
                found.outcomes[outcome.request_id] = outcome
        if late:
            found.rows += event.decode_samples
