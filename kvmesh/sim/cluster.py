"""Prefill and decode apart, in virtual time: what gateway, wires and store master do between the brains."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.rpc.errors import Overloaded
from kvmesh.sim.brains import MODEL, Brains
from kvmesh.sim.config import SimConfig
from kvmesh.sim.decoder import Decoder
from kvmesh.sim.life import Life
from kvmesh.sim.links import Links
from kvmesh.sim.loop import Loop
from kvmesh.sim.node import Node
from kvmesh.sim.prefiller import Prefiller
from kvmesh.sim.pulls import Puller
from kvmesh.sim.pushes import Pushes
from kvmesh.sim.records import DONE, FAILED, REFUSED, PoolSample, Record, Sample
from kvmesh.sim.workload import SimRequest
from services.conductor.domain import Action, Load, Refuse, Role, Schedule


class Cluster:
    """One mesh. `ended` is called once for every request that was `submit`ted."""

    def __init__(self, config: SimConfig, loop: Loop, ended: Callable[[Record], None]) -> None:
        self.config = config
        self._loop, self._ended = loop, ended
        self._handles = 0
        self.active = 0
        self.brains = Brains(config, loop, self._carry_out)
        links = Links(loop)
        self.nodes: dict[str, Node] = {}
        puller = Puller(links, self.nodes, config.pull_timeout_s)
        self._pushes = Pushes(links, config.layers, self._pushed)
        self.prefills: dict[str, Prefiller] = {}
        self.decodes: dict[str, Decoder] = {}
        for n, spec in enumerate(config.prefill):
            node = self._node(f"p{n}", Node(f"p{n}", spec, config, loop, self.brains.announce))
            self.prefills[node.name] = Prefiller(node, config, loop, puller, self._pushes, self)
        for n, spec in enumerate(config.decode):
            node = self._node(f"d{n}", Node(f"d{n}", spec, config, loop, self.brains.announce))
            self.decodes[node.name] = Decoder(node, config, loop, puller, self)
        roles = [Role.PREFILL if name in self.prefills else Role.DECODE for name in self.nodes]
        self.brains.start(list(self.nodes.values()), roles)
        for n, (node, role) in enumerate(zip(self.nodes.values(), roles, strict=True)):
            self.brains.profile(node, role, self._load(node.name))
            # They did not all start at once.
            loop.after(config.heartbeat_s * (n + 1) / len(roles), lambda name=node.name: self._beat(name))  # type: ignore[misc]

    def _node(self, name: str, node: Node) -> Node:
        self.nodes[name] = node
        return node

    # ── one request ──────────────────────────────────────────────────────────────────────────────

    def submit(self, request: SimRequest) -> None:
        """It arrives now."""
        self._handles += 1
        self.active += 1
        record = Record.of(request, self._loop.now, self.config.max_output_tokens)
        self._schedule(Life(self._handles, request, record))

    def _schedule(self, life: Life) -> None:
        request = life.request
        answer = self.brains.schedule(
            Schedule(
                life.name,
                life.attempt,
                MODEL,
                life.tokens,
                self.config.told_max_tokens,
                request.keys,
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
        life.record.predicted_ttft_s, life.record.predicted_tbt_s = answer.ttft_s, answer.tbt_s
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
        life.decoder.filled(life)

    def answered(self, life: Life) -> None:
        """All its tokens were made."""
        self._end(life, DONE, "")

    def failed(self, life: Life, reason: str) -> None:
        """An instance gives it up."""
        self._end(life, FAILED, reason)

    def _end(self, life: Life, outcome: str, reason: str) -> None:
        assert not life.ended, f"{life.name} ends twice"
        life.ended = True
        self.active -= 1
        life.record.outcome, life.record.reason = outcome, reason
        self._ended(life.record)

    # ── heartbeats, orders, samples ──────────────────────────────────────────────────────────────

    def _load(self, name: str) -> Load:
        prefiller = self.prefills.get(name)
        return prefiller.load() if prefiller is not None else self.decodes[name].load()

    def _beat(self, name: str) -> None:
        node, prefiller, decoder = self.nodes[name], self.prefills.get(name), self.decodes.get(name)
        if prefiller is not None:
            samples, finished = prefiller.report()
            self.brains.beat(node, prefiller.load(), prefills=samples, finished=finished, tiers=node.uses())
        elif decoder is not None:
            decoder.knock()
            rows, finished, outcomes = decoder.report()
            self.brains.beat(node, decoder.load(), rows=rows, finished=finished, outcomes=outcomes, tiers=node.uses())
        self._loop.after(self.config.heartbeat_s, lambda: self._beat(name))

    def _carry_out(self, order: Action) -> None:
        """What a leading conductor orders."""

    def sample(self) -> Sample:
        """The pools, now."""
        views = {view.ref.instance_id: view for view in self.brains.states[0].views(self._loop.now)}
        prefill, decode = PoolSample(len(self.prefills)), PoolSample(len(self.decodes))
        settings = self.config.conductor
        for name, prefiller in self.prefills.items():
            load = prefiller.load()
            add_load(prefill, load, prefiller.pages, views[name].queue_s / settings.slo_ttft_s)
        for name, decoder in self.decodes.items():
            load = decoder.load()
            add_load(decode, load, decoder.pages, views[name].tbt_s / settings.slo_tbt_s)
        wires = round(sum(node.tx.sent for node in self.nodes.values()))
        return Sample(self._loop.now, {"prefill": prefill, "decode": decode}, wires, self.active)

    @property
    def quiet(self) -> bool:
        """Whether no byte is on its way."""
        return not any(p.pulls for p in self.prefills.values()) and not any(d.pulls for d in self.decodes.values())

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
