"""From CPU per event to a deployment: what each service takes at a rate, what saturates first, and where. Pure.

CPU of a service = base + a * requests + b * blocks + c * tokens + d * heartbeats + e * announcements, as solved from
measured windows (sizing_costs.py), of conductor and store master with calls in flight all the time. Conductor and store
master are one process with one core each (one event loop holds the interpreter); gateways are as many as are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.sizing_costs import WIRE, Costs
from kvmesh.pacing import BUSY_S, BY_DOOR, IDLE_S, IDLE_SHARE, stretched_s
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.store.config import StoreConfig

CHUNK_TOKENS = 512  # of a prefill step, by default
GATEWAY_SHARE = 0.7  # of a core: what a gateway is filled to
MOST_PER_S = 1e6  # requests: no search goes further
MOST_INSTANCES = 10**6  # likewise


@dataclass(frozen=True, slots=True)
class Workload:
    """Means of a trace, and what the instances are taken to do. `prefill_per_s`: prompt tokens a second of one prefill
    instance; `tbt_s`: between tokens of an answer. Nothing is cached: every prompt block is sealed twice and evicted
    twice, which is the dear case."""

    prompt_tokens: float = 12_035
    answer_tokens: float = 343
    prefill_per_s: float = 15_000
    tbt_s: float = 0.03


@dataclass(frozen=True, slots=True)
class Setup:
    """What a person sets. Intervals in seconds: an instance's heartbeats at each conductor and at the store master, and
    its announcements at most; all grow with the instances, so that no more than `beats`, `store_beats` and `words` come
    in a second (0: they do not grow)."""

    name: str
    block: int = 64
    beat_s: float = 0.2
    store_beat_s: float = 0.5
    announce_s: float = 0.05
    conductors: int = 1
    beats: float = ConductorConfig.heartbeats_per_s
    store_beats: float = StoreConfig.heartbeats_per_s
    words: float = StoreConfig.announcements_per_s

    def paced(self, instances: int) -> Setup:
        """As the services make of it with so many instances, one store each."""
        gap_s = stretched_s(BUSY_S, self.words, instances)
        return replace(
            self,
            beat_s=stretched_s(self.beat_s, self.beats, BY_DOOR * instances),
            store_beat_s=stretched_s(self.store_beat_s, self.store_beats, BY_DOOR * instances),
            announce_s=self.announce_s if gap_s <= BUSY_S else max(self.announce_s, gap_s),
        )

    def idle_s(self, instances: int) -> float:
        """Between two announcements of a store with nothing to tell."""
        return max(self.announce_s, stretched_s(IDLE_S, self.words * IDLE_SHARE, instances))


@dataclass(frozen=True, slots=True)
class Point:
    """A deployment at a rate. Cores of one conductor, of the store master, of all gateways (`gateways` of them), and of
    one front each; `bytes_per_s`: of heartbeats, announcements and placements, all together."""

    requests_per_s: float
    conductor: float
    store: float
    gateways: int
    gateway: float
    prefill: float
    decode: float
    bytes_per_s: float
    announcements_per_s: float


@dataclass(frozen=True, slots=True)
class Told:
    """Announcements a second of all instances; `relayed`: those with something in them, which conductors hear of."""

    all: float
    relayed: float


def announcements(instances: int, setup: Setup, work: Workload, rate: float) -> Told:
    """Half of the instances prefill, half decode."""
    setup = setup.paced(instances)
    half = instances / 2
    most, least = 1 / setup.announce_s, 1 / setup.idle_s(instances)
    # A prompt is announced as its chunks are done, an answer as its blocks fill; what falls into one interval is one.
    prefill_s = work.prompt_tokens / work.prefill_per_s
    a_prompt = max(1.0, min(prefill_s / setup.announce_s, work.prompt_tokens / CHUNK_TOKENS))
    an_answer = 1 + work.answer_tokens / setup.block
    wanted = [min(most, rate / half * each) for each in (a_prompt, an_answer)]
    return Told(half * sum(max(least, each) for each in wanted), half * sum(wanted))


def spread_over(gateways: int, running: float) -> float:
    """Messages a token, where the tokens of one step of `running` requests go to so many gateways at random: 1 is one
    message for each token."""
    if running <= 1 or gateways < 1:
        return 1.0
    return float(gateways * (1 - (1 - 1 / gateways) ** running) / running)


def at(costs: Costs, instances: int, setup: Setup, work: Workload, rate: float) -> Point:
    """What everything takes at `rate` requests a second."""
    setup = setup.paced(instances)
    half, blocks = instances / 2, work.prompt_tokens // setup.block
    told = announcements(instances, setup, work, rate)
    beats, store_beats = instances / setup.beat_s, instances / setup.store_beat_s
    keys = rate * 4 * (blocks + work.answer_tokens / setup.block)  # sealed by two, evicted by two
    conductor, store, wire = costs.full["conductor"], costs.full["store"], costs.fleet[WIRE]
    share = rate / setup.conductors
    gateways, messages = _gateways(costs, half, setup, work, rate, blocks)
    placing = share * (conductor["requests"] + conductor["blocks"] * blocks)
    hearing = conductor["conductor_beats"] * beats + conductor["relayed"] * told.relayed + conductor["keys"] * keys
    knowing = store["store_beats"] * store_beats + store["announcements"] * told.all + store["keys"] * keys
    sent = wire["conductor_beats"] * beats * setup.conductors + wire["store_beats"] * store_beats
    sent += wire["announcements"] * told.all + wire["keys"] * keys
    fronts = {
        role: _front(costs, role, setup, told.all / instances)
        + rate / half * _request_s(costs, role, work, blocks, messages)
        for role in ("prefill", "decode")
    }
    return Point(
        requests_per_s=rate,
        conductor=conductor["seconds"] + hearing + placing,
        store=store["seconds"] + knowing,
        gateways=gateways,
        gateway=rate * gateway_s(costs, work, blocks, messages),
        **fronts,
        bytes_per_s=sent + rate * (wire["requests"] + wire["blocks"] * blocks),
        announcements_per_s=told.all,
    )


def gateway_s(costs: Costs, work: Workload, blocks: float, messages: float) -> float:
    """CPU seconds of a gateway for one request over REST with a text prompt; `messages` a token."""
    of = costs.live["gateway, rest"]
    prompt = of["prompt_tokens_rest"] * work.prompt_tokens + of["blocks_rest"] * blocks
    return of["requests_rest"] + prompt + work.answer_tokens * (of["tokens_rest"] + messages * of["steps_rest"])


def _request_s(costs: Costs, role: str, work: Workload, blocks: float, messages: float) -> float:
    of = costs.live[role]
    chunks = work.prompt_tokens / CHUNK_TOKENS
    answer = work.answer_tokens * (of["tokens"] + messages * of["steps"])
    return of["requests"] + of["blocks"] * blocks + of["chunks"] * chunks + answer


def _front(costs: Costs, role: str, setup: Setup, announced: float) -> float:
    """Cores of a front for heartbeats and `announced` announcements a second alone."""
    of = costs.live[role]
    beats = of["own_conductor_beats"] * setup.conductors / setup.beat_s + of["own_store_beats"] / setup.store_beat_s
    return of["seconds"] + beats + of["own_announcements"] * announced


def _gateways(costs: Costs, half: float, setup: Setup, work: Workload, rate: float, blocks: float) -> tuple[int, float]:
    """How many, and messages a token then: more gateways are told by more messages, so it takes some rounds."""
    running = rate / half * work.answer_tokens * work.tbt_s
    gateways = 1
    while True:
        messages = spread_over(gateways, running)
        needed = max(1, math.ceil(rate * gateway_s(costs, work, blocks, messages) / GATEWAY_SHARE))
        if needed <= gateways:
            return gateways, messages
        gateways = needed


def saturates(costs: Costs, instances: int, setup: Setup, work: Workload, service: str) -> float:
    """Requests a second at which one process of `service` ("conductor", "store") takes a core; 0: it does at rest."""

    def cores(rate: float) -> float:
        return float(getattr(at(costs, instances, setup, work, rate), service))

    return _where(cores, MOST_PER_S)


def most_instances(costs: Costs, setup: Setup, service: str) -> int:
    """Instances at rest whose heartbeats and announcements fill a core of `service`; MOST_INSTANCES: they never do."""

    def cores(instances: float) -> float:
        return float(getattr(at(costs, max(2, int(instances)), setup, Workload(), 0.0), service))

    return int(_where(cores, MOST_INSTANCES))


def _where(cores: Callable[[float], float], most: float) -> float:
    """Where a rising function passes 1; 0: it begins above, `most`: it does not get there."""
    if cores(0.0) >= 1:
        return 0.0
    low, high = 0.0, most
    if cores(high) < 1:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cores(middle) < 1 else (low, middle)
    return low


def engines(instances: int, work: Workload) -> float:
    """Requests a second that half of the instances prefill, by `prefill_per_s`."""
    return instances / 2 * work.prefill_per_s / work.prompt_tokens
