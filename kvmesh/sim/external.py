"""Conductors before engines of others, in virtual time: what `kvmesh serve external` is beside each coupled instance.

What an instance keeps of its engine and tells of it are the product's own books (`kvmesh.external`), fed with what it
would see: requests that begin and end, tokens as they come, /metrics now and then. Heartbeats pass through the messages
that go over the wire. Cached tokens of a prompt are believed: a stream of vLLM tells them at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from kvmesh.errors import KvmeshError, Overloaded
from kvmesh.external.config import ExternalConfig
from kvmesh.external.engine_blocks import EngineBlocks
from kvmesh.external.engine_book import EngineBook, EngineRequest
from kvmesh.external.engine_protocol import EngineLoad
from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.keys import EXTERNAL
from kvmesh.services.conductor.domain import BlockKnowledge, ModelCard, Ref, Refuse, Register, Role
from kvmesh.services.conductor.mapping import heartbeat_in, ref_out
from kvmesh.sim.brains import MODEL, Brains, schedule_of
from kvmesh.sim.config import Routing, SimConfig
from kvmesh.sim.coupled import Coupled, CoupledRow
from kvmesh.sim.loop import Loop, ScheduledCall
from kvmesh.sim.node import ADDRESS, INCARNATION

POLL_S = ExternalConfig.poll_ms / 1000
ANNOUNCED_KEYS = 2_048  # in one heartbeat (external/instance.py)
URGE_GAP_S = 0.02  # between two heartbeats, at least (membership/registrar.py)
RETRY_AFTER_MS = 100  # of an instance that is full


class SimulatedExternal:
    """The external instance of one engine."""

    def __init__(self, engine: Coupled, config: SimConfig, loop: Loop, brains: Brains) -> None:
        self.engine = engine
        self._config, self._loop, self._brains = config, loop, brains
        self.ref = Ref(engine.name, ADDRESS, INCARNATION)
        self.book = EngineBook(engine.name)
        self.blocks = EngineBlocks(engine.pool.total)
        self._announcer = Announcer(engine.name, INCARNATION, self.blocks.changes(), max_keys=ANNOUNCED_KEYS)
        self._asked: dict[CoupledRow, EngineRequest] = {}
        self._beats = 0
        self._beaten_s = -inf
        self._timer: ScheduledCall | None = None
        self.exact = config.routing is Routing.CONDUCTOR_EXACT
        engine.stepped = self._catch_up
        if self.exact:
            self.blocks.report(())
            engine.kept, engine.cache.on_gone = self._kept, self.blocks.drop

    def registration(self) -> Register:
        """Returns what conductors are told of it."""
        return Register(
            self.ref,
            Role.BOTH,
            self.ref.instance_id,
            ModelCard(MODEL, EXTERNAL + MODEL, self._config.block_tokens, "", 0, 1, (), 0, 0),
            self.engine.pool.total,
            self._config.max_running,
            http_url=f"http://{self.ref.instance_id}",
            knowledge=BlockKnowledge.EXACT if self.exact else BlockKnowledge.FALLBACK,
        )

    def start(self, share: float) -> None:
        """Begins to beat and to poll. `share` of an interval goes by before the second time: not all began at once."""
        self._poll(share)
        self._beat(share)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def begin(self, guest: CoupledRow) -> KvmeshError | None:
        """Takes a request to the engine; returns the error of one that is refused."""
        record, request, most = guest.record, guest.request, self._config.max_running
        if self.book.live >= most:
            why = f"external instance {self.ref.instance_id} has max_running={most} requests"
            error = Overloaded(why, retry_after_ms=RETRY_AFTER_MS)
            self.book.refused(record.request_id, guest.attempt, error)
            return error
        self._catch_up()
        size = self._config.block_tokens
        cached = min(self.blocks.cached(request.keys), (request.input_tokens - 1) // size) * size
        asked = EngineRequest(record.request_id, guest.attempt, request.input_tokens, cached, self._now_ns)
        self._asked[guest] = asked
        self.book.begin(asked)
        self._urge_if_first()
        return None

    def end(self, guest: CoupledRow, error: KvmeshError | None) -> None:
        """Notes that its answer has ended."""
        self._catch_up()
        if error is None:
            keys = (*guest.request.keys, *guest.request.answer_keys)
            self.blocks.used(keys[: guest.context // self._config.block_tokens])  # an answer may have been cut
        self.book.end(self._asked.pop(guest), error, self._now_ns)
        self._urge_if_first()

    def _catch_up(self) -> None:
        """Notes the tokens that have come, those last that end the wait for a prompt: till then it was computed."""
        first: list[CoupledRow] = []
        for guest, asked in self._asked.items():
            if not asked.made:
                first.append(guest)
            else:
                self._take(guest, asked)
        for guest in first:
            asked = self._asked[guest]
            self._take(guest, asked)
            if asked.made:
                self.blocks.used(guest.request.keys)

    def _take(self, guest: CoupledRow, asked: EngineRequest) -> None:
        for count, at_s in self.engine.rows.made_since(guest, guest.record.output_tokens - asked.made):
            self.book.tokens(asked, count, round(at_s * 1e9))

    def _kept(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.hold(key)

    @property
    def _now_ns(self) -> int:
        return round(self._loop.now * 1e9)

    # ── what it says, and asks ───────────────────────────────────────────────────────────────────

    def _poll(self, share: float = 1.0) -> None:
        engine = self.engine
        load = EngineLoad(engine.waiting, engine.running, engine.used / engine.pool.total)
        self.book.polled(load)
        self._loop.after(share * self.book.poll_again_s(POLL_S), self._poll)

    def _urge_if_first(self) -> None:
        """A beat soon after an idle engine gets work, or a busy one loses some."""
        if self.book.live <= 1:
            self._beat_at(self._beaten_s + URGE_GAP_S)

    def _beat_at(self, when_s: float) -> None:
        if self._timer is not None:
            if self._timer.at_s <= max(when_s, self._loop.now):
                return
            self._timer.cancel()
        self._timer = self._loop.at(when_s, self._beat)

    def _beat(self, share: float = 1.0) -> None:
        self._catch_up()
        self._beats += 1
        told = self.book.report(self.engine.pool.total, len(self.blocks))
        told.instance.CopyFrom(ref_out(self.ref))
        told.seq, told.ready = self._beats, True
        beat = heartbeat_in(told)
        if self._beats == 1:
            prefills, rows = self._brains.profiles(self.engine.spec)
            beat = replace(beat, prefill_samples=prefills, decode_samples=rows)
        self._brains.hear(beat)
        self._beaten_s, self._timer = self._loop.now, None
        self._beat_at(self._loop.now + share * self._config.heartbeat_s)
        if (word := self._announcer.next()) is not None:
            self._announcer.acked(self._brains.announce(word))
            if word.more:
                self._beat_at(self._beaten_s + URGE_GAP_S)

    def check_empty(self) -> None:
        """Raises AssertionError unless all requests have left."""
        assert not self._asked and not self.book.live, f"{self.ref.instance_id}: requests are in its book"


class ConductorRouter:
    """An EngineRouter that has conductors choose."""

    def __init__(self, engines: Sequence[Coupled], config: SimConfig, loop: Loop) -> None:
        self._config = config
        self.brains = Brains(config, loop, lambda action: None)
        self.externals = {engine.name: SimulatedExternal(engine, config, loop, self.brains) for engine in engines}
        self.brains.start((), [one.registration() for one in self.externals.values()])
        for n, one in enumerate(self.externals.values()):
            one.start((n + 1) / len(engines))

    def place(self, guest: CoupledRow) -> Coupled | Refuse:
        record = guest.record
        answer = self.brains.schedule(
            schedule_of(guest.request, record.request_id, guest.attempt, self._config, guest.avoid)
        )
        if isinstance(answer, Refuse):
            return answer
        record.predicted_ttft_s, record.predicted_tbt_s = answer.expected_ttft_s, answer.expected_tbt_s
        return self.externals[answer.decode.instance_id].engine

    def reaches(self, guest: CoupledRow, engine: Coupled) -> KvmeshError | None:
        return self.externals[engine.name].begin(guest)

    def leaves(self, guest: CoupledRow, engine: Coupled, error: KvmeshError | None) -> None:
        self.externals[engine.name].end(guest, error)

    def check_empty(self) -> None:
        for one in self.externals.values():
            one.check_empty()
