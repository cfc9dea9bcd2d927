"""What one external instance has at its engine, and what it has measured: loads, samples and outcomes for conductors.
Pure: times are arguments, in nanoseconds of CLOCK_MONOTONIC.

A TTFT teaches how long a prompt takes only where the engine had nothing to do before it: no prompt of ours or, as far
as its /metrics told last, of others was waiting when it began, and none came before its first token. Times between
tokens are told as one sample a heartbeat, of the tokens that came while no prompt was being computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, Overloaded, RequestCancelled
from kvmesh.external.engine_protocol import EngineLoad
from kvmesh.rpc.pb import conductor_pb2 as pb

MAX_TOLD = 4096  # outcomes and samples that no heartbeat has taken yet
FEWEST_TOKENS = 4  # of a sample of times between tokens
_NOBODYS = (Overloaded, DeadlinePassed, InvalidRequest)


@dataclass(slots=True)
class EngineRequest:
    """One request at the engine. `cached_tokens` is believed until the engine tells."""

    request_id: str
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    received_ns: int
    alone: bool = False  # the engine computed nothing before it
    first_ns: int = 0
    last_ns: int = 0
    made: int = 0
    gaps_ns: list[int] = field(default_factory=list)  # the last ones, each of one token

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that the engine computes."""
        return max(1, self.prompt_tokens - self.cached_tokens)


MAX_GAPS = 1024  # of one answer


class EngineBook:
    """The requests of one external instance. `instance_id` is to blame for what its engine fails."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._waiting: set[int] = set()  # ids of requests without their first token
        self._live: dict[int, EngineRequest] = {}
        self._engine = EngineLoad()
        self._foreign = (0, 0)  # requests of others there: running, waiting
        self._prefills: deque[pb.PrefillSample] = deque(maxlen=MAX_TOLD)
        self._finished: deque[str] = deque(maxlen=MAX_TOLD)
        self._outcomes: deque[pb.RequestOutcome] = deque(maxlen=MAX_TOLD)
        self._gaps: deque[tuple[int, int]] = deque(maxlen=MAX_GAPS)  # (ns, tokens), since the last sample
        self._prompt_tokens = self._hit_tokens = 0

    @property
    def live(self) -> int:
        """Requests that are at the engine."""
        return len(self._live)

    @property
    def running(self) -> int:
        """Requests of ours that have their first token."""
        return len(self._live) - len(self._waiting)

    @property
    def others(self) -> int:
        """Requests that the engine has from others, as it told last."""
        return sum(self._foreign)

    def free_blocks(self, capacity: int) -> int:
        """Returns how many of so many blocks are in no use, as the engine told last."""
        return max(0, capacity - round(self._engine.used_share * capacity))

    def polled(self, load: EngineLoad) -> None:
        """Takes what the engine has said of its load. What our own requests do not explain is others'."""
        self._engine = load
        running = max(0, load.running - self.live)
        waiting = max(0, load.running + load.waiting - self.live - running)
        self._foreign = running, waiting

    def poll_again_s(self, usual_s: float) -> float:
        """Returns when to ask the engine again. Of others' requests nothing else tells the end, and the next turn of a
        conversation, which wants to go where the last one was, must not find that one's load there."""
        return usual_s / 5 if self.others else usual_s

    def begin(self, request: EngineRequest) -> None:
        """A request goes to the engine."""
        request.alone = not self._waiting and not self._engine.waiting
        for other in self._waiting:
            self._live[other].alone = False
        self._live[id(request)] = request
        self._waiting.add(id(request))

    def tokens(self, request: EngineRequest, count: int, now: int) -> None:
        """So many further tokens of its answer have come at once."""
        if not count:
            return
        if not request.first_ns:
            self._first(request, now)
        else:
            gap = max(0, now - request.last_ns) // count
            request.gaps_ns.extend([gap] * count)
            del request.gaps_ns[:-MAX_GAPS]
            if not self._waiting:
                self._gaps.append((gap, count))
        request.last_ns = now
        request.made += count

    def _first(self, request: EngineRequest, now: int) -> None:
        request.first_ns = now
        self._waiting.discard(id(request))
        self._prompt_tokens += request.prompt_tokens
        self._hit_tokens += request.cached_tokens
        # Without a time it teaches nothing, and still says that the prompt is computed.
        alone = request.alone
        self._prefills.append(
            pb.PrefillSample(
                request_id=request.request_id,
                computed_tokens=request.computed_tokens if alone else 0,
                cached_tokens=request.cached_tokens,
                duration_us=max(1, (now - request.received_ns) // 1000) if alone else 0,
            )
        )

    def end(self, request: EngineRequest, error: KvmeshError | None, now: int) -> None:
        """It has left the engine, with an error or at its answer's end."""
        self._live.pop(id(request), None)
        self._waiting.discard(id(request))
        self._finished.append(request.request_id)
        gaps = sorted(request.gaps_ns, reverse=True)
        slowest = gaps[: -(-len(gaps) // 10)]
        kind, blamed = self._judge(error)
        self._outcomes.append(
            pb.RequestOutcome(
                request_id=request.request_id,
                attempt=request.attempt,
                outcome=kind,
                error=error.code if error is not None else "",
                blamed=blamed,
                output_tokens=request.made,
                ttft_us=(request.first_ns - request.received_ns) // 1000 if request.first_ns else 0,
                tbt_us=sum(slowest) // len(slowest) // 1000 if slowest else 0,
                mean_tbt_us=sum(gaps) // len(gaps) // 1000 if gaps else 0,
                duration_us=max(0, now - request.received_ns) // 1000,
            )
        )

    def refused(self, request_id: str, attempt: int, error: KvmeshError) -> None:
        """A request did not get to the engine."""
        kind = pb.OUTCOME_CANCELLED if isinstance(error, RequestCancelled) else pb.OUTCOME_REFUSED
        self._finished.append(request_id)
        self._outcomes.append(pb.RequestOutcome(request_id=request_id, attempt=attempt, outcome=kind, error=error.code))

    def _judge(self, error: KvmeshError | None) -> tuple[pb.Outcome.ValueType, str]:
        if error is None:
            return pb.OUTCOME_DONE, ""
        if isinstance(error, RequestCancelled):
            return pb.OUTCOME_CANCELLED, ""
        if isinstance(error, _NOBODYS):
            return pb.OUTCOME_REFUSED, ""
        return pb.OUTCOME_FAILED, self._instance_id

    def report(self, capacity: int, believed: int) -> pb.HeartbeatRequest:
        """Returns the next heartbeat. `capacity` is how many blocks the engine has, `believed` how many of them are
        believed to hold a prefix."""
        beat, live = pb.HeartbeatRequest(), self._live.values()
        foreign_running, foreign_waiting = self._foreign
        context = sum(one.prompt_tokens + one.made for one in live if one.first_ns)
        mean = sum(one.prompt_tokens for one in live) // len(live) if live else 0
        load = beat.load
        load.queued_requests = len(self._waiting) + foreign_waiting
        load.queued_tokens = sum(one.computed_tokens for one in live if not one.first_ns) + foreign_waiting * mean
        load.running_requests = self.running + foreign_running
        load.context_tokens = context + foreign_running * mean
        load.free_pages = self.free_blocks(capacity)
        load.store_blocks, load.store_capacity = believed, capacity
        load.prompt_tokens, load.device_hit_tokens = self._prompt_tokens, self._hit_tokens
        if sum(count for _, count in self._gaps) >= FEWEST_TOKENS and load.running_requests:
            # The median: one hiccup of a network or a busy machine is no step of the engine.
            each = sorted(gap for gap, count in self._gaps for _ in range(count))
            took_us = max(1, each[len(each) // 2] // 1000)
            beat.decode_samples.add(
                batch=load.running_requests, context_tokens=load.context_tokens, duration_us=took_us
            )
            self._gaps.clear()
        beat.prefill_samples.extend(self._prefills)
        beat.finished_request_ids.extend(self._finished)
        beat.outcomes.extend(self._outcomes)
        for told in (self._prefills, self._finished, self._outcomes):
            told.clear()
        return beat
