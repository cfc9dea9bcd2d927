"""What a simulation tells of each request and, now and then, of its pools. Virtual seconds from the simulation's start
unless said; `nan` where a request never came so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, nan

from kvmesh.services.conductor.domain import Lane
from kvmesh.sim.workloads.workload import SimRequest

DONE, REFUSED, FAILED = "done", "refused", "failed"
GRAIN_S = 0.1  # waits below this count as this: no client's clock is finer
RIGHT_WITHIN = 2.0  # a factor
ASIDE = {"column": False}  # of a field that no table of requests shows


@dataclass(frozen=True, slots=True)
class RetryWait:
    """What one refusal told its client. Seconds from the refusal on; `right_s` is what it had to be told, as far as
    anybody could know then (see retries.py), nan where that cannot be said."""

    told_s: float
    right_s: float
    placed: bool = False  # when it came again, as it was told

    @property
    def ratio(self) -> float:
        """How many times too long it was (under 1: too short); nan where that cannot be said."""
        return max(GRAIN_S, self.told_s) / max(GRAIN_S, self.right_s) if isfinite(self.right_s) else nan

    @property
    def is_right(self) -> bool:
        """Whether it was told what it had to be, within a factor."""
        return 1 / RIGHT_WITHIN <= self.ratio <= RIGHT_WITHIN


@dataclass(slots=True)
class Record:
    """One request, from its arrival to its one end."""

    index: int
    request_id: str
    at_s: float  # it arrived
    input_tokens: int
    output_tokens: int  # asked for; a request that is done has made so many
    lane: Lane = Lane.INTERACTIVE
    outcome: str = ""  # DONE, REFUSED (nothing was computed) or FAILED
    reason: str = ""  # of a refusal ("ttft", "tbt", ...: see `conductor.domain.Refuse`) or a failure
    prefill: str = ""  # instances
    decode: str = ""
    cached_tokens: int = 0  # of the input, not computed; those that were fetched included
    pulled_tokens: int = 0  # fetched from other nodes or read out of lower tiers
    queue_s: float = nan  # from arrival to the first step that computes it, a duration
    prefill_start_s: float = nan
    prefill_end_s: float = nan
    kv_end_s: float = nan  # the last byte of its KV is at decode
    first_token_s: float = nan
    finish_s: float = nan
    ttft_s: float = nan  # a duration
    tbt_s: float = nan  # mean of the longest 10% of its token intervals (at least one); nan: it has none
    mean_tbt_s: float = nan
    predicted_ttft_s: float = nan
    predicted_tbt_s: float = nan
    prefill_gpu_s: float = 0.0  # its share of the steps that computed its prompt
    retries: int = 0
    session: str = ""
    origin: str = ""
    tenant: str = ""
    ttft_slo_s: float = 0.0  # 0: the conductor's default
    tbt_slo_s: float = 0.0
    # no columns of a table
    waits: tuple[RetryWait, ...] = field(default=(), metadata=ASIDE)
    left_tokens: int = field(default=0, metadata=ASIDE)  # of the input: see `SimRequest`

    @staticmethod
    def of(request: SimRequest, now: float, max_output_tokens: int = 0) -> Record:
        """Of a request that arrives now; its answer is cut to `max_output_tokens`, 0: it is not."""
        output = max(1, request.output_tokens)
        return Record(
            request.index,
            f"r{request.index}",
            now,
            request.input_tokens,
            min(output, max_output_tokens) if max_output_tokens else output,
            request.lane,
            session=request.session,
            origin=request.origin,
            tenant=request.tenant,
            ttft_slo_s=request.ttft_slo_s,
            tbt_slo_s=request.tbt_slo_s,
            left_tokens=request.left_tokens,
        )


@dataclass(slots=True)
class PoolSample:
    """One pool ("prefill", "decode" or "coupled") at one moment, sums over its instances but for the loads."""

    instances: int = 0
    queued: int = 0  # requests that wait
    running: int = 0
    queued_tokens: int = 0  # prompt tokens still to compute
    context_tokens: int = 0  # of running rows
    used_blocks: int = 0  # pages and landings in use
    stored_blocks: int = 0  # in the node stores' memory
    load: float = 0.0  # mean over instances of predicted TTFT (prefill) or TBT (decode) over its SLO
    max_load: float = 0.0


@dataclass(slots=True)
class MeshSample:
    """The state of all pools at one moment."""

    at_s: float
    pools: dict[str, PoolSample] = field(default_factory=dict)
    wire_bytes: int = 0  # sent over NICs since the start
    active: int = 0  # requests that have arrived and not ended
