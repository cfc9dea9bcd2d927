"""The events, actions and values of the conductor's brain. Times are in seconds, sizes in tokens, blocks or bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import NamedTuple

from kvmesh.clock import CaughtUp, Tick
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import TierUse
from kvmesh.services.conductor.costs.cache_cost import CacheCost, CardGroups


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """Whether an instance of this role computes prompts."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether an instance of this role decodes answers."""
        return self is not Role.PREFILL


class BlockKnowledge(Enum):
    """How well it is known which blocks an instance has."""

    ANNOUNCED = ""  # its node store says so
    FALLBACK = "fallback"  # an external engine; believed, from what was placed there
    EXACT = "exact"  # an external engine that reports them


Life = tuple[str, int]  # instance_id, incarnation


class Fetch(Enum):
    """When an instance fetches a prefix that others hold (and that is long enough to be weighed)."""

    CHEAPER = "cheaper"  # when its predicted TTFT is less than that of computing
    ALWAYS = "always"  # Algorithm 1 as printed
    NEVER = "never"  # every instance for itself, for comparison


@dataclass(frozen=True)
class Ref:
    """One incarnation of one instance."""

    instance_id: str
    address: str
    incarnation: int

    @cached_property
    def life(self) -> Life:
        """The instance's id and incarnation, without the address."""
        return self.instance_id, self.incarnation


@dataclass(frozen=True)
class Member:
    """The owner of a node store as the store master knows it: an instance, or a pool node without an engine."""

    ref: Ref
    node_id: str = ""


@dataclass(frozen=True)
class ModelCard:
    """What an instance serves, as it registered it."""

    name: str
    fingerprint: str
    block_tokens: int
    kv_dtype: str
    max_context_tokens: int  # 0: not told
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    weights_epoch: int
    cache_groups: CardGroups = ()  # (): one group that keeps all
    weights_path: str = ""  # where the weights of `weights_epoch` came from, if others can read it, too

    @cached_property
    def cost(self) -> CacheCost:
        """What its prefixes and handoffs weigh."""
        return CacheCost(self.block_tokens, self.kv_bytes_per_token, self.cache_groups)

    @cached_property
    def kv_identity(self) -> tuple[object, ...]:
        """Two instances can exchange KV only when these values are equal."""
        return self.fingerprint, self.block_tokens, self.kv_dtype, self.weights_epoch

    @cached_property
    def compute_identity(self) -> tuple[object, ...]:
        """Two instances take as long for the same work, on the same hardware, when these values are equal."""
        return self.fingerprint, self.block_tokens, self.kv_dtype


@dataclass(frozen=True, slots=True, order=True)
class NewestWeights:
    """Says which weights of a model are the newest, and where they came from; `path` "" is a trainer's memory, or not
    known."""

    epoch: int = 0
    path: str = ""


@dataclass(frozen=True)
class Load:
    """See `Load` in conductor.proto."""

    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    free_pages: int = 0
    context_tokens: int = 0
    free_extents: int = 0
    waiting_requests: int = 0
    store_blocks: int = 0
    store_capacity: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    pulled_bytes: int = 0

    @property
    def requests(self) -> int:
        """Requests that are there, in whatever state."""
        return self.queued_requests + self.running_requests + self.waiting_requests


@dataclass(frozen=True)
class PrefillSample:
    request_id: str
    computed_tokens: int
    cached_tokens: int
    duration_s: float
    transfer_bytes: int
    transfer_s: float
    pulled_tokens: int = 0
    pull_bytes: int = 0
    pull_s: float = 0.0
    steps: int = 1  # of the instance, from its first one to its last one
    beside_tokens: int = 0  # of other prompts, computed in these steps
    beside_pairs: int = 0  # and their pairs of attention (see cost.attention_pairs)
    chunks: int = 1  # of `steps`: those that it was part of itself


@dataclass(frozen=True)
class DecodeSample:
    batch: int
    context_tokens: int
    duration_s: float


class Outcome(Enum):
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # an instance is to blame
    REFUSED = "refused"  # not taken: nobody is


@dataclass(frozen=True)
class RequestOutcome:
    """How a request ended, as decode saw it; see conductor.proto. Times are in seconds, 0 where there is none."""

    request_id: str
    attempt: int
    outcome: Outcome
    output_tokens: int = 0
    ttft_s: float = 0.0
    tbt_s: float = 0.0  # mean of the slowest tenth of its intervals
    mean_tbt_s: float = 0.0
    duration_s: float = 0.0
    error: str = ""
    blamed: str = ""


class Lane(Enum):
    INTERACTIVE = "interactive"
    BATCH = "batch"  # only what nobody else wants


class CordonState(Enum):
    OPEN = "open"
    CORDONED = "cordoned"  # no new work; what it holds stays
    DRAINING = "draining"  # ... and its last replicas move away


class InstanceAxes(NamedTuple):
    """Says how many ranks an instance has along each axis over which they share its model, and over which axes experts
    are dealt out."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    dcp: int = 1
    ep: tuple[str, ...] = ()


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Register:
    """`http_url` is the server that an external instance asks ("": kvmesh's own), `knowledge` says how well it is known
    what that engine holds."""

    ref: Ref
    role: Role
    node_id: str
    model: ModelCard
    capacity_blocks: int
    max_running: int
    local_prefill_tokens: int = 0  # see `RegisterInstanceRequest` in conductor.proto
    chunk_tokens: int = 0
    switchable: bool = False
    size_weight: float = 0.0  # of its queue
    tenant_fairness: bool = False  # in its queue
    axes: InstanceAxes = InstanceAxes()  # noqa: RUF009 - it is immutable
    http_url: str = ""
    knowledge: BlockKnowledge = BlockKnowledge.ANNOUNCED


@dataclass(frozen=True)
class Heartbeat:
    ref: Ref
    seq: int
    ready: bool
    load: Load
    not_ready_reason: str = ""
    prefill_samples: tuple[PrefillSample, ...] = ()
    decode_samples: tuple[DecodeSample, ...] = ()
    finished_request_ids: tuple[str, ...] = ()
    tiers: tuple[TierUse, ...] = ()
    outcomes: tuple[RequestOutcome, ...] = ()
    pace: int = 0  # the number of the pulse it goes by (see kvmesh/pacing.py); 0: it does not say
    by_door: bool = False  # past gRPC


@dataclass(frozen=True)
class Schedule:
    """One request to place. `keys` are those of its full prompt blocks, 16 bytes each, packed where they are many. An
    SLO of 0 stands for the default."""

    request_id: str
    attempt: int
    model: str
    prompt_tokens: int
    max_tokens: int
    keys: Sequence[bytes] = ()
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    avoid: frozenset[str] = frozenset()
    priority: int = 0  # smaller goes first
    lane: Lane = Lane.INTERACTIVE
    session: str = ""
    origin: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    endpoint: str = ""
    expected_output_tokens: int = 0  # of the whole answer
    answered_tokens: int = 0  # of `prompt_tokens`, the last: its answer so far; it was admitted then and goes on
    sibling_prefill: str = ""  # the prefill instance of the same request's first answer to the same prompt


@dataclass(frozen=True)
class RequestReleased:
    """A request is over that was placed at an engine which reports nothing of it itself; whoever asked for its
    placement says so. `served_by` is the instance that answered, "" when none did."""

    request_id: str
    served_by: str
    outcome: Outcome


@dataclass(frozen=True)
class MembersReset:
    """A snapshot of the store master's members. It follows the announcements of the same snapshot, and replaces all
    that was known before."""

    master_incarnation: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class MemberJoined:
    member: Member


@dataclass(frozen=True)
class MemberGone:
    """A member left or died, as `how` says."""

    life: Life
    how: str


@dataclass(frozen=True)
class Blocks:
    """An announcement of a node store, relayed by the master."""

    announcement: Announcement


@dataclass(frozen=True)
class StoreLost:
    """The master's stream broke: until the next MembersReset only heartbeats show who is alive."""


@dataclass(frozen=True)
class Cordon:
    """An operator keeps new work away from an instance. `kept` says that it was read from Redis, so that it holds
    whether or not the instance is known here."""

    instance_id: str
    state: CordonState
    reason: str = ""
    kept: bool = False


@dataclass(frozen=True)
class Lead:
    """This conductor orders replication and roles from now on, or (term 0) no longer."""

    term: int


@dataclass(frozen=True)
class OrderEnded:
    """What became of the order of that number. `error` is why it was not carried out, "" when it was. `held` is how
    many blocks of a `Replicate` its target has now."""

    number: int
    held: int = 0
    error: str = ""


@dataclass(frozen=True)
class RequestsHeld:
    """What a gateway holds while no instance is there: models, and how many requests of each."""

    requests: tuple[tuple[str, int], ...]


Event = (
    Register
    | Heartbeat
    | Schedule
    | RequestReleased
    | MembersReset
    | MemberJoined
    | MemberGone
    | Blocks
    | StoreLost
    | Cordon
    | Lead
    | OrderEnded
    | RequestsHeld
    | CaughtUp
    | Tick
)

# ── actions ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PredictedLife:
    """When a placement expects what, in seconds from the decision; see conductor.proto."""

    pull_start_s: float = 0.0
    fetched_s: float = 0.0
    prefill_start_s: float = 0.0
    prefill_end_s: float = 0.0
    first_token_s: float = 0.0
    end_s: float = 0.0
    output_tokens: int = 0

    @property
    def prefill_s(self) -> float:
        """The predicted seconds of computing what is not cached; a prefill queue may order requests by it."""
        return self.prefill_end_s - self.prefill_start_s


@dataclass(frozen=True)
class Placed:
    """The answer to Schedule. `terms` are the parts of the prediction in ms, for traces."""

    prefill: Ref
    decode: Ref
    ttft_s: float
    tbt_s: float
    cached_tokens: int
    terms: Mapping[str, float] = field(default_factory=dict)
    sources: bytes = b""  # one `BlockSource` per prompt block; empty: prefill pushes all
    pulls: tuple[PullRange, ...] = ()
    decode_pulls: tuple[PullRange, ...] = ()
    load_until: int | None = None  # see `Placement` in conductor.proto
    decode_load_until: int | None = None
    pull_after_s: float = 0.0
    life: PredictedLife = field(default_factory=PredictedLife)
    # What the client may expect: predictions (`life.prefill_end_s`, when it has the first token, and `tbt_s`) corrected
    # by how far the last ones were off. Nothing is decided by these.
    expected_ttft_s: float = 0.0
    expected_tbt_s: float = 0.0
    tbt_slo_s: float = 0.0  # decode's own check goes by these, see `Placement` in conductor.proto; 0: it does not ask
    held_tbt_s: float = 0.0


@dataclass(frozen=True)
class Refuse:
    """The answer to the event is this error. The `reason` of a refused Schedule is one of "ttft", "tbt", "impossible",
    "busy", "capacity", "no_instance", "unknown_model", "invalid"."""

    error: KvmeshError
    reason: str = ""
    least_s: float = 0.0  # where even an idle instance would miss the SLO: the least that one could meet; 0: some would


@dataclass(frozen=True)
class Measured:
    """A prefill was reported: what had been predicted for it, and what it took."""

    request_id: str
    predicted_s: float
    actual_s: float


@dataclass(frozen=True)
class OutOfStep:
    """An announcement of that store does not follow what is known of it, so the master's stream must start over."""

    store_id: str


@dataclass(frozen=True)
class SwitchRole:
    """An order: that instance takes another role. Only a leader's brain gives it. `OrderEnded` refers to `number`."""

    ref: Ref
    role: Role
    why: str
    number: int = 0


@dataclass(frozen=True)
class Replicate:
    """An order: `target` copies these blocks (of one chain, in its order) from `source`. Only a leader's brain gives
    it. `OrderEnded` refers to `number`."""

    keys: tuple[bytes, ...]
    source: Ref
    target: Ref
    why: str
    number: int = 0
    groups: bytes = b""  # masks of cache groups to copy, one a key; b"": the model has one


Action = Placed | Refuse | Measured | OutOfStep | SwitchRole | Replicate


class Source(IntEnum):
    """Mirrors `BlockSource` of conductor.proto."""

    PREFILL_PUSHES = 1
    AT_DECODE = 2
    DECODE_PULLS = 3
