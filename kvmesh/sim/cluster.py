"""Prefill and decode apart, in virtual time: what gateway, wires and store master do between the brains."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.kvcache.keys import Keys
from kvmesh.rpc.errors import Overloaded
from kvmesh.sim.brains import MODEL, Brains
from kvmesh.sim.config import SimConfig, WireChange
from kvmesh.sim.decoder import Decoder
from kvmesh.sim.host import Machine
from kvmesh.sim.life import Life
from kvmesh.sim.links import Links
from kvmesh.sim.loop import Loop
from kvmesh.sim.node import Node
from kvmesh.sim.orders import Orders
from kvmesh.sim.prefiller import Prefiller
from kvmesh.sim.pulls import Puller
from kvmesh.sim.pushes import Pushes
from kvmesh.sim.records import REFUSED, PoolSample, Record, Sample
from kvmesh.sim.workload import SimRequest
from services.conductor.domain import (
    DecodeSample,
    Load,
    PrefillSample,
    Refuse,
    RequestOutcome,
    Role,
    Schedule,
    SwitchRole,
)


class Cluster:
    """One mesh. `ended` is called once for every request that was `submit`ted."""

    def __init__(self, config: SimConfig, loop: Loop, ended: Callable[[Record], None]) -> None:
        self.config = config
        self._loop, self._ended = loop, ended
        self._handles = 0
        self.active = 0
        self.brains = Brains(config, loop, lambda action: self._orders.carry_out(action))
        links = Links(loop)
        self.machine = None if config.host is None else Machine(loop, config.host, config.seed)
        self.nodes: dict[str, Node] = {}
        puller = Puller(links, self.nodes, config.pull_timeout_s)
        for change in config.wires:
            loop.at(change.at_s, lambda change=change: self._rewire(links, change))  # type: ignore[misc]
        self._pushes = Pushes(links, config.layers, self._pushed)
        self.prefills: dict[str, Prefiller] = {}
        self.decodes: dict[str, Decoder] = {}
        self._puller = puller
        self._orders = Orders(self.nodes, puller, self.brains.order_ended, self._switch)
        self.roles: dict[str, Role] = {}
        self._switching: dict[str, SwitchRole] = {}
        for letter, role, specs in (("p", Role.PREFILL, config.prefill), ("d", Role.DECODE, config.decode)):
            for n, spec in enumerate(specs):
                name = f"{letter}{n}"
                self.nodes[name] = Node(name, spec, config, loop, self.brains.announce, self.machine)
                self._become(name, role)
        self.brains.start(list(self.nodes.values()), list(self.roles.values()))
        for n, name in enumerate(self.nodes):
            self.brains.profile(self.nodes[name], self.roles[name], self._load(name))
            # They did not all start at once.
            loop.after(config.heartbeat_s * (n + 1) / len(self.nodes), lambda name=name: self._beat(name))  # type: ignore[misc]

    def _become(self, name: str, role: Role) -> None:
        self.roles[name] = role
        node = self.nodes[name]
        if role is Role.PREFILL and name not in self.prefills:
            self.prefills[name] = Prefiller(node, self.config, self._loop, self._puller, self._pushes, self)
        if role is Role.DECODE and name not in self.decodes:
            self.decodes[name] = Decoder(node, self.config, self._loop, self._puller, self)

    def _rewire(self, links: Links, change: WireChange) -> None:
        for name in change.nodes or self.nodes:
            node = self.nodes[name]
            for link in (node.tx, node.rx):
                links.resize(link, change.share * node.spec.nic_bytes_per_s)

    # ── one request ──────────────────────────────────────────────────────────────────────────────

    def submit(self, request: SimRequest) -> None:
        """It arrives now."""
        self._handles += 1
        self.active += 1
        record = Record.of(request, self._loop.now, self.config.max_output_tokens)
        life = Life(self._handles, request, record)
        if self.machine is not None:
            self.machine.enter(lambda: self._schedule(life))
        else:
            self._schedule(life)

    def _schedule(self, life: Life) -> None:
        request = life.request
        answer = self.brains.schedule(
            Schedule(
                life.name,
                life.attempt,
                MODEL,
                life.tokens,
                self.config.told_max_tokens,
                Keys.of(request.keys),
                request.ttft_slo_s,
                request.tbt_slo_s,
                priority=request.priority,
                lane=request.lane,
                session=request.session,
                origin=request.origin,
                tenant=request.tenant,
            )
        )
        if isinstance(answer, Refuse):
            self._refused(life, answer)
            return
        life.placed = answer
        life.record.prefill, life.record.decode = answer.prefill.instance_id, answer.decode.instance_id
        life.record.predicted_ttft_s, life.record.predicted_tbt_s = answer.life.prefill_end_s, answer.tbt_s
        life.prefiller, life.decoder = self.prefills[life.record.prefill], self.decodes[life.record.decode]
        self._loop.after(self.config.hop_s, lambda: self._start(life))

    def _refused(self, life: Life, refuse: Refuse) -> None:
        if life.record.retries < self.config.retries and isinstance(refuse.error, Overloaded):
            life.record.retries += 1
            life.attempt += 1
            self._loop.after(refuse.error.retry_after_ms / 1000, lambda: self._schedule(life))
            return
        self._end(life, REFUSED, refuse.reason)

    def _start(self, life: Life) -> None:
        assert life.prefiller is not None and life.decoder is not None and life.placed is not None
        if not life.decoder.admit(life):
            life.decoder.turned_away(life)
            self._end(life, REFUSED, "decode")
            return
        life.prefiller.expect(life, life.placed.pull_after_s)

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
        record.first_token_s = self._loop.now
        record.ttft_s = record.first_token_s - record.at_s
        if record.output_tokens == 1:
            self._pushes.stop(life)
            life.decoder.first_token(life)
            life.prefiller.leave(life)

    def _pushed(self, life: Life) -> None:
        assert life.prefiller is not None and life.decoder is not None
        life.record.kv_end_s = self._loop.now
        life.prefiller.leave(life)
        decoder = life.decoder
        if self.machine is not None:
            self.machine.handoff(lambda: decoder.filled(life))
        else:
            decoder.filled(life)

    def ended(self, life: Life, outcome: str, reason: str) -> None:
        """Decode is through with it."""
        self._end(life, outcome, reason)

    def _end(self, life: Life, outcome: str, reason: str) -> None:
        assert not life.ended, f"{life.name} ends twice"
        life.ended = True
        self.active -= 1
        life.record.outcome, life.record.reason = outcome, reason
        self._ended(life.record)

    # ── heartbeats, orders, samples ──────────────────────────────────────────────────────────────

    def _load(self, name: str) -> Load:
        return self.prefills[name].load() if self.roles[name] is Role.PREFILL else self.decodes[name].load()

    def _beat(self, name: str) -> None:
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
            self.brains.register(self.nodes[name], self.roles[name])
        told = {"prefills": prefills, "rows": rows, "finished": finished, "outcomes": outcomes}
        self.brains.beat(self.nodes[name], self._load(name), why_not_ready=why_not, **told)  # type: ignore[arg-type]
        self._loop.after(self.config.heartbeat_s, lambda: self._beat(name))

    def _switch(self, order: SwitchRole) -> str:
        """It takes nothing new; what it has, it ends, and then it is the other."""
        name = order.ref.instance_id
        if order.role is Role.BOTH or name in self._switching or self.roles[name] is order.role:
            return f"{name} cannot become {order.role.value} now"
        self._switching[name] = order
        return ""

    def _drains(self, name: str) -> str:
        """Why it cannot change its role yet."""
        held = any(name in pool and pool[name].lives for pool in (self.prefills, self.decodes))
        return f"ends what it has to become {self._switching[name].role.value}" if held else ""

    def sample(self) -> Sample:
        """The pools, now."""
        views = {view.ref.instance_id: view for view in self.brains.states[0].views(self._loop.now)}
        counts = list(self.roles.values())
        pools = {role.value: PoolSample(counts.count(role)) for role in (Role.PREFILL, Role.DECODE)}
        settings = self.config.conductor
        for name, role in self.roles.items():
            view, node = views[name], self.nodes[name]
            share = view.queue_s / settings.slo_ttft_s if role is Role.PREFILL else view.tbt_s / settings.slo_tbt_s
            add_load(pools[role.value], self._load(name), node.spec.kv_tokens // self.config.block_tokens, share)
        wires = round(sum(node.tx.sent for node in self.nodes.values()))
        return Sample(self._loop.now, pools, wires, self.active)

    @property
    def quiet(self) -> bool:
        """Whether no byte is on its way."""
        pulls = [p.pulls for p in self.prefills.values()] + [d.pulls for d in self.decodes.values()]
        return not self._orders.pulls and not any(pulls)

    def check_empty(self) -> None:
        """AssertionError unless everything came back: after the last request."""
        assert not self.active
        for prefiller in self.prefills.values():
            prefiller.check_empty()
        for decoder in self.decodes.values():
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
