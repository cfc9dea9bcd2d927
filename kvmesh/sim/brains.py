"""The conductors of a simulation: the service's own brains, told what services would tell them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvmesh.clock import Tick
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.keys import Keys
from kvmesh.services.conductor.domain import (
    Action,
    Blocks,
    DecodeSample,
    Heartbeat,
    Lead,
    Life,
    Load,
    Member,
    MemberGone,
    MemberJoined,
    MembersReset,
    ModelCard,
    OrderEnded,
    OutOfStep,
    Placed,
    PrefillSample,
    Refuse,
    Register,
    RequestOutcome,
    Role,
    Schedule,
)
from kvmesh.services.conductor.state import ConductorState
from kvmesh.sim.config import SimConfig
from kvmesh.sim.hardware.times import NodeSpec
from kvmesh.sim.loop import Loop
from kvmesh.sim.node import Node
from kvmesh.sim.workloads.workload import SimRequest

MODEL = "sim"
# Where a profiling run looks: chunks behind nothing and behind some, small and large batches.
PROFILED_PREFILLS = ((256, 0), (1024, 0), (4096, 0), (8192, 0), (16384, 0), (1024, 8192), (4096, 16384), (32768, 0))
PROFILED_ROWS = (
    (1, 2048),
    (4, 16384),
    (8, 65536),
    (16, 65536),
    (32, 262144),
    (64, 262144),
    (64, 786432),
    (128, 524288),
)


def schedule_of(
    request: SimRequest,
    name: str,
    attempt: int,
    config: SimConfig,
    avoid: Iterable[str] = (),
    answered_tokens: int = 0,
) -> Schedule:
    """Returns what a gateway asks a conductor for one attempt at a request of this name. `avoid` names whom attempts
    before it have lost, `answered_tokens` is what they have brought of the answer."""
    return Schedule(
        name,
        attempt,
        MODEL,
        request.input_tokens + answered_tokens,
        config.told_max_tokens,
        Keys.of(request.keys),
        request.ttft_slo_s,
        request.tbt_slo_s,
        priority=request.priority,
        lane=request.lane,
        session=request.session,
        origin=request.origin,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight,
        avoid=frozenset(avoid),
        answered_tokens=answered_tokens,
    )


class Brains:
    """All conductors of a simulation: each hears every heartbeat and announcement, and requests go round."""

    def __init__(self, config: SimConfig, loop: Loop, order: Callable[[Action], None]) -> None:
        """`order` carries out what a leading conductor orders."""
        self._config, self._loop, self._order = config, loop, order
        self.states = [
            ConductorState(replace(config.conductor, max_explained=0), random.Random(f"{config.seed}:{n}"), loop.now)
            for n in range(config.conductors)
        ]
        self._kept = {f"d{n}" for n in range(config.kept_decodes)}
        self._turn = 0
        self._seqs: dict[str, int] = {}

    def start(self, nodes: Iterable[Node], instances: Iterable[Register]) -> None:
        """The nodes are members, and the instances register: theirs, and those of engines that have no node."""
        members = tuple(Member(node.ref, node.name) for node in nodes)
        now = self._loop.now
        for state in self.states:
            state.step(MembersReset(1, members), now)
        for instance in instances:
            self.register(instance)
        if self._config.orders:
            self.states[0].step(Lead(1), now)
        self._loop.after(self._config.tick_s, self._tick)

    def joined(self, node: Node, role: Role) -> None:
        """A newcomer, perhaps under the name of one that is gone."""
        for state in self.states:
            state.step(MemberJoined(Member(node.ref, node.name)), self._loop.now)
        self.register(self.registration(node, role))

    def gone(self, life: Life, how: str) -> None:
        """The store master says so."""
        for state in self.states:
            state.step(MemberGone(life, how), self._loop.now)

    def registration(self, node: Node, role: Role) -> Register:
        """Returns what conductors are told of a node in this role."""
        config, spec = self._config, node.spec
        kept = node.cost.groups
        card = ModelCard(MODEL, MODEL, config.block_tokens, "", 0, 1, (), spec.kv_bytes_per_token, 0, kept)
        pages = spec.kv_tokens // config.block_tokens
        return Register(
            node.ref,
            role,
            node.name,
            card,
            pages,
            config.max_running,
            switchable=config.orders and node.name not in self._kept,
            size_weight=config.size_weight if role.prefills else 0.0,
            tenant_fairness=config.tenant_fairness and role is Role.PREFILL,
        )

    def register(self, event: Register) -> None:
        """Registers an instance with every conductor."""
        for state in self.states:
            for action in state.step(event, self._loop.now):
                assert not isinstance(action, Refuse), action

    def profile(self, node: Node, role: Role, load: Load) -> None:
        """What a profiling run of this hardware has measured comes with its first heartbeat."""
        prefills, rows = self.profiles(node.spec)
        self.beat(node, load, prefills=prefills if role.prefills else (), rows=rows if role.decodes else ())

    def profiles(self, spec: NodeSpec) -> tuple[tuple[PrefillSample, ...], tuple[DecodeSample, ...]]:
        """Returns what a profiling run measures, nothing where there was none."""
        if not self._config.profiled:
            return (), ()
        prefills = tuple(
            PrefillSample(f"profile-{new}-{cached}", new, cached, spec.times.prefill_s([(new, cached)]), 0, 0.0)
            for new, cached in PROFILED_PREFILLS
        )
        return prefills, tuple(DecodeSample(n, tokens, spec.token_s(n, tokens)) for n, tokens in PROFILED_ROWS)

    def beat(
        self,
        node: Node,
        load: Load,
        *,
        prefills: tuple[PrefillSample, ...] = (),
        rows: tuple[DecodeSample, ...] = (),
        finished: tuple[str, ...] = (),
        outcomes: tuple[RequestOutcome, ...] = (),
        why_not_ready: str = "",
    ) -> None:
        """A heartbeat of an instance."""
        seq = self._seqs[node.name] = self._seqs.get(node.name, 0) + 1
        beat = Heartbeat(
            node.ref,
            seq,
            ready=not why_not_ready,
            load=load,
            not_ready_reason=why_not_ready,
            prefill_samples=prefills,
            decode_samples=rows,
            finished_request_ids=finished,
            tiers=node.uses(),
            outcomes=outcomes,
        )
        self.hear(beat)

    def hear(self, beat: Heartbeat) -> None:
        """Every conductor hears a heartbeat."""
        for state in self.states:
            state.step(beat, self._loop.now)

    def announce(self, announcement: Announcement) -> bool:
        """What a node store says; whether a snapshot is wanted instead."""
        event, now = Blocks(announcement), self._loop.now
        actions = [action for state in self.states for action in state.step(event, now)]  # all of them hear it
        return any(isinstance(action, OutOfStep) for action in actions)

    def schedule(self, request: Schedule) -> Placed | Refuse:
        """The next conductor's answer."""
        state = self.states[self._turn]
        self._turn = (self._turn + 1) % len(self.states)
        return _answer(state.step(request, self._loop.now))

    def order_ended(self, event: OrderEnded) -> None:
        """What became of an order: the leader hears it."""
        self.states[0].step(event, self._loop.now)

    def _tick(self) -> None:
        for state in self.states:
            for action in state.step(Tick(), self._loop.now):
                self._order(action)
        self._loop.after(self._config.tick_s, self._tick)


def _answer(actions: Iterable[Action]) -> Placed | Refuse:
    for action in actions:
        match action:
            case Placed() | Refuse():
                return action
    raise AssertionError("a request has no answer")
