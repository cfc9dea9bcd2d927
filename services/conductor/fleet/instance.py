"""What the conductor knows of one incarnation of one instance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvmesh.kvcache.tiers import TierUse
from kvmesh.pacing import MembershipLease
from kvmesh.services.conductor.admission.margins import Margins
from kvmesh.services.conductor.costs.equals import Equals
from kvmesh.services.conductor.costs.first_guess import first_decode_step, first_prefill
from kvmesh.services.conductor.costs.models import DecodeModel, PrefillModel, PullModel, TransferModel
from kvmesh.services.conductor.domain import InstanceAxes, Load, ModelCard, Ref, Register, Role
from kvmesh.services.conductor.loads.queues import PrefillQueue, RunningBatch

MAX_KNOWN_SAMPLES = 2048
CHUNK_TOKENS = 512  # of an instance that does not tell


class Instance:
    """One incarnation of one instance. It is mutable and owned by ConductorState. `slot` is its bit among pending
    blocks."""

    def __init__(
        self,
        registered: Register,
        slot: int,
        fits: ModelFits,
        lease: MembershipLease,
        now: float,
        confidence: float = 0.0,
    ) -> None:
        self.ref: Ref = registered.ref
        self.node_id = registered.node_id
        self.model: ModelCard = registered.model
        self.capacity_blocks = registered.capacity_blocks
        self.max_running = registered.max_running
        self.queue = PrefillQueue(now)
        self.become(registered)
        self.slot = slot
        self.lease = lease
        self.last_seen = now
        self.last_seq = 0
        self.ready = False
        self.not_ready_reason = "no heartbeat yet"
        self.load = Load()
        self.batch = RunningBatch()
        # It is what its equals are, until it shows otherwise.
        name = self.ref.instance_id
        self.axes = registered.axes
        self.prefill = PrefillModel(shared=fits.prefill(self.axes), name=name)
        self.decode = DecodeModel(shared=fits.decode(self.axes), name=name)
        self.transfer = TransferModel(shared=fits.transfer, name=name)
        self.pull = PullModel(shared=fits.pull, name=name)
        self.fits = fits
        self.margins = Margins(confidence)
        self.tiers: tuple[TierUse, ...] = ()  # below its memory, as last told
        self._sampled, self._outcomes = _Once(), _Once()

    def leave(self) -> None:
        """Removes the instance, which is gone, from the models that it shares with its equals."""
        for model in (self.prefill, self.decode, self.transfer, self.pull):
            model.leave()

    def blocks_for(self, tokens: int) -> int:
        """Returns how many blocks hold so many tokens; the last may be partial."""
        return -(-tokens // self.model.block_tokens)

    def become(self, registered: Register) -> None:
        """Takes another role in the same incarnation. Load, models and what was placed there stay."""
        self.role: Role = registered.role
        self.local_prefill_tokens = registered.local_prefill_tokens
        self.chunk_tokens = registered.chunk_tokens or CHUNK_TOKENS
        # Whether prompts and rows share its steps: its `Load` then tells of rows what is running.
        self.mixes = registered.chunk_tokens > 0 or self.role is Role.BOTH or self.local_prefill_tokens > 0
        self.switchable = registered.switchable
        self.http_url, self.knowledge = registered.http_url, registered.knowledge
        self.queue.size_weight = registered.size_weight
        self.queue.fair = registered.tenant_fairness

    @property
    def alone_tokens(self) -> float:
        """How many uncached tokens of a prompt it computes for a request of its own batch."""
        if self.role is Role.BOTH:
            return float("inf")
        return self.local_prefill_tokens if self.role is Role.DECODE else 0

    @property
    def external(self) -> bool:
        """Whether an engine that is not kvmesh's own does its work. It gives and takes no KV: no instance is paired
        with it, nor fetches from it."""
        return self.http_url != ""

    @property
    def pools(self) -> tuple[tuple[object, ...], ...]:
        """The pools that it works in: its model's prefill, its decode."""
        works = (("prefill", self.role.prefills), ("decode", self.role.decodes))
        return tuple((self.model.name, self.model.kv_identity, name) for name, there in works if there)

    def chunks(self, tokens: int) -> int:
        """Returns how many steps a prompt with so many tokens to compute takes part in."""
        return max(1, -(-tokens // self.chunk_tokens))

    def step_share(self, tokens: int, prefill_s: float) -> float:
        """Returns which part of the seconds that a whole chunk takes one step of such a prompt takes, at most 1."""
        whole_s: float = self.prefill.predict(self.chunk_tokens, 0)
        return min(1.0, prefill_s / self.chunks(tokens) / whole_s) if whole_s > 0 else 1.0

    def can_prefill(self, prompt_tokens: int) -> bool:
        """Says whether a prompt of that length fits when nothing else is there."""
        limit = self.model.max_context_tokens
        return self.blocks_for(prompt_tokens) <= self.capacity_blocks and (not limit or prompt_tokens < limit)

    def can_decode(self, prompt_tokens: int) -> bool:
        """Says whether such a prompt and one token of its answer fit."""
        limit = self.model.max_context_tokens
        return self.blocks_for(prompt_tokens + 1) <= self.capacity_blocks and (not limit or prompt_tokens < limit)

    def seconds_per_token(self) -> float:
        """The marginal prefill time in seconds, for tokens whose requests are unknown."""
        return (self.prefill.predict(1024, 0) - self.prefill.predict(1, 0)) / 1023

    def first_sample_of(self, request_id: str) -> bool:
        """Says whether this is the first sample of that request; unacknowledged samples are sent again."""
        return self._sampled.first(request_id)

    def first_outcome_of(self, request_id: str, attempt: int) -> bool:
        """Says whether this is the first outcome of that attempt."""
        return self._outcomes.first(f"{attempt} {request_id}")


class _Once:
    """Remembers which of the last MAX_KNOWN_SAMPLES names have come."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()

    def first(self, name: str) -> bool:
        """Says whether the name comes for the first time."""
        if name in self._known:
            return False
        self._known[name] = None
        if len(self._known) > MAX_KNOWN_SAMPLES:
            self._known.popitem(last=False)
        return True


class ModelFits:
    """The cost models that all instances of one model and KV layout share; each instance has its departure
    (equals.py). How long computing takes only those share whose ranks lie along the same axes."""

    def __init__(self) -> None:
        self._prefill: dict[InstanceAxes, PrefillModel] = {}
        self._decode: dict[InstanceAxes, DecodeModel] = {}
        self.transfer = TransferModel()
        self.pull = PullModel()

    def prefill(self, axes: InstanceAxes) -> PrefillModel:
        """Returns what instances with these axes share."""
        return self._prefill.setdefault(axes, PrefillModel(first_prefill(axes)))

    @property
    def known_prefill(self) -> PrefillModel:
        """Returns the model that was measured most."""
        return max(self._prefill.values(), key=lambda model: len(model.fit))

    def decode(self, axes: InstanceAxes) -> DecodeModel:
        """Returns what instances with these axes share."""
        return self._decode.setdefault(axes, DecodeModel(first_decode_step(axes)))

    def _equals(self) -> Iterator[Equals]:
        models = (*self._prefill.values(), *self._decode.values(), self.transfer, self.pull)
        return (model.equals for model in models)

    def fade(self, now: float) -> None:
        """Lets departures fade up to `now`."""
        for equals in self._equals():
            equals.fade(now)

    def changed(self) -> dict[str, None]:
        """Returns the names of instances whose predictions have changed since the last call."""
        return dict.fromkeys(name for equals in self._equals() for name in equals.changed())
