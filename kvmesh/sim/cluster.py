"""Prefill and decode apart, in virtual time: what gateway, wires and store master do between the brains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from math import inf, nan

from kvmesh.errors import KvmeshError, Overloaded
from kvmesh.kvcache.sources import PullRange
from kvmesh.services.conductor.domain import (
    Action,
    DecodeSample,
    Load,
    OrderEnded,
    PrefillSample,
    Refuse,
    Replicate,
    RequestOutcome,
    Role,
    SwitchRole,
)
from kvmesh.services.gateway.recovery import AttemptRecovery
from kvmesh.sim.brains import Brains, schedule_of
from kvmesh.sim.changes import ChangeNoticed, FreezePhase, KillEvent, LeaveEvent, noticed
from kvmesh.sim.config import SimConfig, WireChange
from kvmesh.sim.decoder import Decoder
from kvmesh.sim.hardware.times import NodeSpec
from kvmesh.sim.host import Machine
from kvmesh.sim.life import PATIENCE, Life, elsewhere_s
from kvmesh.sim.links import Links
from kvmesh.sim.loop import Loop
from kvmesh.sim.node import ADDRESS, Node
from kvmesh.sim.prefiller import Prefiller
from kvmesh.sim.report.records import FAILED, REFUSED, MeshSample, PoolSample, Record
from kvmesh.sim.transfers import Puller, Pushes, TransferJob
from kvmesh.sim.workloads.retries import WaitingClients
from kvmesh.sim.workloads.workload import SimRequest

# What a leading conductor orders, carried out: copies of hot blocks, and roles.


class Orders:
    """`ended` tells the leader; `switch` begins to change a role and returns why it cannot."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        puller: Puller,
        ended: Callable[[OrderEnded], None],
        switch: Callable[[SwitchRole], str],
    ) -> None:
        self._nodes, self._puller, self._ended, self._switch = nodes, puller, ended, switch
        self.pulls = 0  # under way

    def carry_out(self, order: Action) -> None:
        """Anything else than an order is passed over."""
        match order:
            case Replicate():
                self._replicate(order)
            case SwitchRole():
                if error := self._switch(order):
                    self._ended(OrderEnded(order.number, error=error))

    def _replicate(self, order: Replicate) -> None:
        """The target pulls what it lacks, as nodes do: nobody writes into another's store."""
        target = self._nodes[order.target.instance_id]
        if target.dead or target.ref != order.target:
            self._ended(OrderEnded(order.number, error=f"{order.target.instance_id} is gone"))
            return
        target.note(order.keys, order.groups)
        begun = zip(order.keys, target.store.begin(order.keys), strict=True)
        wanted = [(at, key) for at, (key, extent) in enumerate(begun) if extent is not None]
        ref = order.source.instance_id, ADDRESS, order.source.incarnation
        sources, at = [], 0
        for mask, some in groupby(order.groups or bytes(len(order.keys))):
            count = len(list(some))
            sources.append(PullRange(*ref, at, count, groups=mask))
            at += count

        def over(pull: TransferJob) -> None:
            self.pulls -= 1
            if target.dead:
                return
            pull.keep(target.store)
            self._ended(OrderEnded(order.number, target.store.peek(order.keys)))

        self.pulls += 1
        self._puller.pull(target, wanted, sources, over)


STILL = 1e-9  # of what a NIC carries: nothing, for links that must carry something
ASK_AGAIN_S = 0.25


class Cluster:
    """One mesh. `ended` is called once for every request that was `submit`ted."""

    def __init__(self, config: SimConfig, loop: Loop, ended: Callable[[Record], None]) -> None:
        self.config = config
        self._loop, self._ended = loop, ended
        self._changes = config.changes
        self._handles = 0
        self.active = 0
        self.brains = Brains(config, loop, lambda action: self._orders.carry_out(action))
        self._links = links = Links(loop)
        self.machine = None if config.host is None else Machine(loop, config.host, config.seed)
        self.nodes: dict[str, Node] = {}
        puller = Puller(links, self.nodes, config.pull_timeout_s)
        for change in config.wires:
            loop.at(change.at_s, partial(self._rewire, change))
        self._pushes = Pushes(links, config.layers, self._pushed)
        self.prefills: dict[str, Prefiller] = {}
        self.decodes: dict[str, Decoder] = {}
        self._puller = puller
        self._orders = Orders(self.nodes, puller, self.brains.order_ended, self._switch)
        self.roles: dict[str, Role] = {}
        self._switching: dict[str, SwitchRole] = {}
        self._leaving: set[str] = set()
        self.placements: list[tuple[float, str, str]] = []  # when, prefill, decode; where instances change
        self._specs: dict[str, tuple[NodeSpec, Role]] = {}
        for letter, role, specs in (("p", Role.PREFILL, config.prefill), ("d", Role.DECODE, config.decode)):
            for n, spec in enumerate(specs):
                name = f"{letter}{n}"
                self._specs[name] = spec, role
                if name not in config.joins_late:
                    self._make(name)
        self.clients = WaitingClients(self.prefills, config.conductor.slo_ttft_s, config.hop_s)
        self.brains.start(
            self.nodes.values(), [self.brains.registration(self.nodes[name], role) for name, role in self.roles.items()]
        )
        for n, name in enumerate(self.nodes):
            self.brains.profile(self.nodes[name], self.roles[name], self._load(name))
            # They did not all start at once.
            loop.after(config.heartbeat_s * (n + 1) / len(self.nodes), partial(self._beat, self.nodes[name]))
        self._plan_changes()

    def _make(self, name: str) -> None:
        """A process of that name begins."""
        spec, role = self._specs[name]
        before = self.nodes.get(name)
        incarnation = 1 if before is None else before.incarnation + 1
        self.nodes[name] = Node(name, spec, self.config, self._loop, self.brains.announce, self.machine, incarnation)
        self.prefills.pop(name, None)
        self.decodes.pop(name, None)
        self._become(name, role)

    def _become(self, name: str, role: Role) -> None:
        self.roles[name] = role
        node = self.nodes[name]
        if role is Role.PREFILL and name not in self.prefills:
            self.prefills[name] = Prefiller(node, self.config, self._loop, self._puller, self._pushes, self)
        if role is Role.DECODE and name not in self.decodes:
            self.decodes[name] = Decoder(node, self.config, self._loop, self._puller, self)

    def _rewire(self, change: WireChange) -> None:
        for name in change.nodes or self.nodes:
            if name in self.nodes:
                self._wired(self.nodes[name], change.share)

    def _wired(self, node: Node, share: float) -> None:
        for link in (node.tx, node.rx):
            self._links.resize(link, share * node.spec.nic_bytes_per_s)

    # ── one request ──────────────────────────────────────────────────────────────────────────────

    def submit(self, request: SimRequest) -> None:
        """Lets a request arrive now."""
        self._handles += 1
        self.active += 1
        record = Record.of(request, self._loop.now, self.config.max_output_tokens)
        life = Life(self._handles, request, record)
        if self.machine is not None:
            self.machine.enter(lambda: self._schedule(life))
        else:
            self._schedule(life)

    def _schedule(self, life: Life, avoid: tuple[str, ...] = (), since_s: float = nan) -> None:
        """`avoid`: whom an attempt before it has lost; `since_s`: since when it is without an instance."""
        answer = self.brains.schedule(
            schedule_of(life.request, life.name, life.attempt, self.config, avoid, life.made_before)
        )
        if isinstance(answer, Refuse):
            self._refused(life, answer, since_s)
            return
        life.placed = answer
        life.record.prefill, life.record.decode = answer.prefill.instance_id, answer.decode.instance_id
        life.record.predicted_ttft_s, life.record.predicted_tbt_s = answer.expected_ttft_s, answer.expected_tbt_s
        if self._changes:
            self.placements.append((self._loop.now, life.record.prefill, life.record.decode))
        life.prefiller, life.decoder = self.prefills[life.record.prefill], self.decodes[life.record.decode]
        self.clients.placed(life)
        self._loop.after(self.config.hop_s, lambda: self._start(life))

    def _refused(self, life: Life, refuse: Refuse, since_s: float) -> None:
        record, error, now = life.record, refuse.error, self._loop.now
        since_s = now if math.isnan(since_s) else since_s
        if refuse.reason == "no_instance" and self._changes and now < since_s + self.config.patience_s:
            self._loop.after(ASK_AGAIN_S, lambda: self._schedule(life, since_s=since_s))
            return
        if isinstance(error, Overloaded):
            told_s = error.retry_after_ms / 1000
            self.clients.refused(life, refuse.reason, told_s, now)
            if record.retries < self.config.retries:
                record.retries += 1
                life.attempt += 1
                self.clients.waits(life)
                self._loop.after(told_s, lambda: self._come_again(life))
                return
        self._end(life, FAILED if life.made_before else REFUSED, refuse.reason)

    def _come_again(self, life: Life) -> None:
        life.avoid, life.recovery = (), None
        self.clients.comes(life)
        self._schedule(life)

    def _start(self, life: Life) -> None:
        assert life.prefiller is not None and life.decoder is not None and life.placed is not None
        self.clients.arrives(life)
        if life.lost:
            return
        for at, ref in ((life.prefiller, life.placed.prefill), (life.decoder, life.placed.decode)):
            if at.dead or at.node.ref != ref:  # nobody answers there
                self._lose(life, ref.instance_id)
                return
        error = life.decoder.admit(life)
        if error is not None:
            self._turned_away(life, error)
            return
        life.prefiller.expect(life, life.placed.pull_after_s)

    def _turned_away(self, life: Life, error: KvmeshError) -> None:
        """Decode has refused what the conductor placed there: the gateway has it placed anew, elsewhere, as long as its
        patience goes."""
        assert life.placed is not None
        name = life.placed.decode.instance_id
        life.recovery = life.recovery or AttemptRecovery(PATIENCE)
        try:
            delay_s = elsewhere_s(life.recovery, error, name, self._loop.now)
        except KvmeshError:
            self._refused(life, Refuse(error, "decode"), nan)
            return
        life.avoid = tuple(dict.fromkeys((*life.avoid, name)))
        life.attempt += 1
        self._loop.after(delay_s, lambda: self._schedule(life, life.avoid))

    # ── what instances say ───────────────────────────────────────────────────────────────────────

    def begun(self, life: Life) -> None:
        """Its prompt is being computed."""
        assert life.decoder is not None
        life.decoder.want_landing(life)

    def lands(self, life: Life, at_decode: int) -> None:
        """Decode has room for its KV."""
        assert life.prefiller is not None and life.decoder is not None
        at_decode_tokens = at_decode * self.config.block_tokens
        self._pushes.landing(life, life.prefiller.node, life.decoder.node, at_decode_tokens)

    def prefilled(self, life: Life) -> None:
        """Its first token goes to the client, whether or not its KV is at decode."""
        assert life.prefiller is not None and life.decoder is not None
        record = life.record
        life.first_s = self._loop.now
        if not life.made_before:
            record.first_token_s = life.first_s
            record.ttft_s = record.first_token_s - record.at_s
        if life.left == 1:
            self._pushes.stop(life)
            life.decoder.first_token(life)
            life.prefiller.leave(life)

    def _pushed(self, life: Life) -> None:
        assert life.prefiller is not None and life.decoder is not None
        if life.lost:
            return
        life.record.kv_end_s = self._loop.now
        life.prefiller.leave(life)
        decoder = life.decoder
        if self.machine is not None:
            self.machine.handoff(lambda: None if life.lost else decoder.filled(life))
        else:
            decoder.filled(life)

    def ended(self, life: Life, outcome: str, reason: str) -> None:
        """Decode is through with it."""
        self._end(life, outcome, reason)

    def _end(self, life: Life, outcome: str, reason: str) -> None:
        assert not life.ended, f"{life.name} ends twice"
        life.ended = True
        self.clients.ended(life)
        self.active -= 1
        life.record.outcome, life.record.reason = outcome, reason
        self._ended(life.record)

    # ── instances that change, come and go ───────────────────────────────────────────────────────

    def _plan_changes(self) -> None:
        config, at = self.config, self._loop.at
        for freeze in config.freeze:
            at(freeze.from_s, partial(self._freeze, freeze))
        for kill in config.kill:
            at(kill.at_s, partial(self._kill, kill))
        for join in config.join:
            at(join.at_s, partial(self._join, join.node))
        for leave in config.leave:
            at(leave.at_s, partial(self._leave, leave))

    def _freeze(self, phase: FreezePhase) -> None:
        node = self.nodes.get(phase.node)
        if node is None or node.dead:
            return
        self._wired(node, STILL)
        self._loop.at(phase.until_s, lambda: None if node.dead else self._wired(node, 1.0))
        given_up_s = phase.from_s + self.config.lost_after_s
        if given_up_s < phase.until_s:
            self._loop.at(given_up_s, lambda: self._lose_all(node))

    def _lose_all(self, node: Node) -> None:
        """Has everybody with a request at `node`, which answers nobody any more, give that up."""
        if node.dead:
            return
        for pool in (self.prefills, self.decodes):
            at = pool.get(node.name)
            for life in list(at.lives.values()) if at is not None else ():
                self._lose(life, node.name)

    def _kill(self, event: KillEvent) -> None:
        node = self.nodes.get(event.node)
        if node is not None and not node.dead:
            self._die(node, "died")
        if event.back_s < inf:
            self._loop.after(event.back_s, lambda: self._join(event.node))

    def _leave(self, event: LeaveEvent) -> None:
        self._leaving.add(event.node)

    def _join(self, name: str) -> None:
        before = self.nodes.get(name)
        if before is not None and not before.dead:
            return
        self._make(name)
        node = self.nodes[name]
        self.brains.joined(node, self.roles[name])
        self.brains.profile(node, self.roles[name], self._load(name))
        self._loop.after(self.config.heartbeat_s, partial(self._beat, node))

    def _die(self, node: Node, how: str) -> None:
        """Its process ends. Its streams end at once; the store master misses it after a lease."""
        name = node.name
        node.die()
        self._switching.pop(name, None)
        self._leaving.discard(name)
        del self.roles[name]
        self._puller.lose(node)
        for pool in (self.prefills, self.decodes):
            if name in pool:
                for life in pool[name].die():
                    self._lose(life, name)
        notice_s = 0.0 if how == "left" else self.config.conductor.lease_s
        self._loop.after(notice_s, lambda: self.brains.gone(node.ref.life, how))

    def _lose(self, life: Life, blamed: str) -> None:
        """An instance that has it is gone: what is elsewhere of it is given up, and another attempt goes on with what
        its client has."""
        assert life.prefiller is not None and life.decoder is not None
        if life.lost or life.ended:
            return
        made = life.made_before + life.decoder.made(life)
        life.lost = True
        self._pushes.stop(life)
        life.prefiller.withdraw(life)
        life.decoder.withdraw(life, blamed)
        self._handles += 1
        again = Life(self._handles, life.request, life.record, made)
        again.attempt = life.attempt + 1
        again.repeats = 0 if made > life.made_before else life.repeats + 1
        wait_s = ASK_AGAIN_S if again.repeats > 1 else self.config.hop_s
        self._loop.after(wait_s, lambda: self._schedule(again, (blamed,)))

    def changes_noticed(self) -> list[ChangeNoticed]:
        """How placements followed what happened to instances, in the order of the configuration."""
        config, now, found = self.config, self._loop.now, list[ChangeNoticed]()
        events: list[tuple[str, str, float, float, float]] = [  # what, node, from, until, times
            *(("slow", one.node, one.from_s, min(now, one.until_s), one.times) for one in config.slow),
            *(("frozen", one.node, one.from_s, one.until_s, inf) for one in config.freeze),
            *(("killed", one.node, one.at_s, min(now, one.at_s + one.back_s), inf) for one in config.kill),
            *(("left", one.node, one.at_s, now, inf) for one in config.leave),
            *(("joined", one.node, 0.0, one.at_s, inf) for one in config.join),
        ]
        for what, node, from_s, until_s, times in events:
            count = len(config.prefill if node[0] == "p" else config.decode)
            placed = [(at, p if node[0] == "p" else d) for at, p, d in self.placements]
            able = 1 / times / (count - 1 + 1 / times)
            found.append(noticed(what, node, from_s, until_s, able, 1 / count, placed, now))
        return found

    # ── heartbeats, orders, samples ──────────────────────────────────────────────────────────────

    def _load(self, name: str) -> Load:
        return self.prefills[name].load() if self.roles[name] is Role.PREFILL else self.decodes[name].load()

    def _beat(self, node: Node) -> None:
        name = node.name
        if node.dead:
            return
        if node.clock is not None and (thaws_s := node.clock.thaws_s(self._loop.now)) > self._loop.now:
            self._loop.at(thaws_s, partial(self._beat, node))
            return
        prefiller, decoder = self.prefills.get(name), self.decodes.get(name)
        prefills: tuple[PrefillSample, ...] = ()
        rows: tuple[DecodeSample, ...] = ()
        outcomes: tuple[RequestOutcome, ...] = ()
        finished: tuple[str, ...] = ()
        if prefiller is not None:
            prefills, finished = prefiller.report()
        if decoder is not None:
            decoder.knock()  # leases of others at its store may have ended
            rows, left, outcomes = decoder.report()
            finished += left
        why_not = ""
        if name in self._switching and not (why_not := self._drains(name)):
            self._become(name, self._switching.pop(name).role)
            self.brains.register(self.brains.registration(self.nodes[name], self.roles[name]))
        if name in self._leaving:
            why_not = "is leaving"
        told = {"prefills": prefills, "rows": rows, "finished": finished, "outcomes": outcomes}
        self.brains.beat(self.nodes[name], self._load(name), why_not_ready=why_not, **told)  # type: ignore[arg-type]
        if name in self._leaving and not self._holds(name):
            self._die(node, "left")
            return
        self._loop.after(self.config.heartbeat_s, partial(self._beat, node))

    def _switch(self, order: SwitchRole) -> str:
        """Switches a role: the instance takes nothing new, ends what it has, and then begins in the other role."""
        name = order.ref.instance_id
        if name not in self.roles or name in self._leaving:
            return f"{name} is gone"
        if order.role is Role.BOTH or name in self._switching or self.roles[name] is order.role:
            return f"{name} cannot become {order.role.value} now"
        self._switching[name] = order
        return ""

    def _drains(self, name: str) -> str:
        """Why it cannot change its role yet."""
        return f"ends what it has to become {self._switching[name].role.value}" if self._holds(name) else ""

    def _holds(self, name: str) -> bool:
        return any(name in pool and pool[name].lives for pool in (self.prefills, self.decodes))

    def sample(self) -> MeshSample:
        """The pools, now."""
        views = {view.ref.instance_id: view for view in self.brains.states[0].views(self._loop.now)}
        counts = list(self.roles.values())
        pools = {role.value: PoolSample(counts.count(role)) for role in (Role.PREFILL, Role.DECODE)}
        settings = self.config.conductor
        for name, role in self.roles.items():
            view, node = views.get(name), self.nodes[name]
            if view is None:  # it was silent for so long
                continue
            share = view.queue_s / settings.slo_ttft_s if role is Role.PREFILL else view.tbt_s / settings.slo_tbt_s
            add_load(pools[role.value], self._load(name), node.spec.kv_tokens // self.config.block_tokens, share)
        wires = round(sum(node.tx.sent for node in self.nodes.values()))
        return MeshSample(self._loop.now, pools, wires, self.active)

    @property
    def quiet(self) -> bool:
        """Whether no byte is on its way, and nobody works for requests that are gone."""
        pulls = [p.pulls for p in self.prefills.values() if not p.dead]
        pulls += [d.pulls for d in self.decodes.values() if not d.dead]
        if self._changes:  # some may be at work for requests that were given up there
            pulls += [len(p.lives) for p in self.prefills.values() if not p.dead]
            pulls += [d.unwanted for d in self.decodes.values() if not d.dead]
        return not self._orders.pulls and not any(pulls)

    def check_empty(self) -> None:
        """AssertionError unless everything came back: after the last request."""
        assert not self.active
        for prefiller in self.prefills.values():
            if not prefiller.dead:
                prefiller.check_empty()
        for decoder in self.decodes.values():
            if not decoder.dead:
                decoder.check_empty()


def add_load(pool: PoolSample, load: Load, pages: int, share: float) -> None:
    """One instance more in the sums; `share`: its load."""
    pool.queued += load.queued_requests + load.waiting_requests
    pool.running += load.running_requests
    pool.queued_tokens += load.queued_tokens
    pool.context_tokens += load.context_tokens
    pool.used_blocks += pages - load.free_pages + load.store_capacity - load.free_extents
    pool.stored_blocks += load.store_blocks
    pool.load += share / pool.instances
    pool.max_load = max(pool.max_load, share)
