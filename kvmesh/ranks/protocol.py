"""The front process and its rank processes exchange these typed messages over a socketpair.

Frames are a u32 little-endian length and one msgpack-encoded tagged struct (msgspec). Times are CLOCK_MONOTONIC
nanoseconds, which all processes of a machine share; for a rank on another host its front translates them
(`kvmesh.ranks.clocks`). Token ids and offsets travel as plain ints here (both ends come from the same build).

`handle` names a request within the instance for both roles; handles are never reused.

`groups` are pages of a model that has several cache groups (`kvmesh.kvcache.cache_groups`), a GroupPages each; `pages`
is empty then. For a model with one group that keeps all, `groups` is empty.

The state machines of decode and prefill (`step(event, now) -> actions`) take and return these messages as they are, in
`FromRank` and `TellRank`, which name the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks.expert_metrics import ExpertStats
from kvmesh.ranks.transfer_metrics import TransferStats
from kvmesh.transfer import Carried, TrafficClass


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Is the base of all messages; the class name is the tag."""


# ── front → rank: pushes ──────────────────────────────────────────────────────────────────────────


class PushTarget(msgspec.Struct, frozen=True, array_like=True):
    """Says where one reader rank of a group wants its shards: at a byte offset in `segment` for each block of the
    prompt."""

    reader: int
    segment: str
    offsets: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()  # instead of `offsets`, where the model has several cache groups


class PushGroup(msgspec.Struct, frozen=True, array_like=True):
    """Describes a push between writer ranks and reader ranks that cut the model differently. This rank is `writer` and
    sends each of `targets` what `kvmesh.kvcache.groups.plan_group(writers, readers)` says, and an end mark even when
    that is nothing."""

    writer: int
    writers: tuple[ShardLayout, ...]
    readers: tuple[ShardLayout, ...]
    targets: tuple[PushTarget, ...]


class PushOpen(Message, frozen=True):
    """Orders a push, once the landing of the handoff is known: every block from `first_block` on, those whose pages are
    complete already at once, the others layer by layer as steps write them. `pages` are this instance's pages of the
    prompt's blocks, `offsets` the places in `segment` where whole shards of them land, unless there is a `group`. The
    rank stops posting at `lease_until_ns`; PushLease extends it."""

    handle: int
    handoff_epoch: int
    segment: str
    pages: tuple[int, ...]
    offsets: tuple[int, ...]
    first_block: int
    ready_tokens: int  # tokens whose KV was complete before the first step of this request
    prompt_tokens: int
    lease_until_ns: int
    group: PushGroup | None = None
    at_end: bool = False  # nothing before the whole prompt is computed
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups
    group_offsets: tuple[GroupPages, ...] = ()  # likewise, instead of `offsets`


class PushLease(Message, frozen=True):
    handle: int
    lease_until_ns: int


class PushCancel(Message, frozen=True):
    """Stops a push. The rank answers PushDrained once nothing of it is on the way, and also for an unknown handle."""

    handle: int


# ── rank → front: pushes ──────────────────────────────────────────────────────────────────────────


class PushProgress(Message, frozen=True):
    """Reports the bytes acknowledged by the target so far, at most once per handoff and 100 ms."""

    handle: int
    bytes_done: int


class PushDone(Message, frozen=True):
    """Everything is acknowledged and every end mark delivered. `busy_ns` is how long, between first post and last ack,
    bytes were on their way; in the rest of that time the push waited for layers to be computed."""

    handle: int
    handoff_epoch: int
    first_post_ns: int
    last_ack_ns: int
    bytes_done: int
    carried: Carried = Carried()
    busy_ns: int = 0


class PushFailed(Message, frozen=True):
    """Not all of it arrived (path broken, lease over, window closed). `drained` says that nothing is on the way. Times
    are 0 when nothing was posted, or acknowledged."""

    handle: int
    handoff_epoch: int
    cause: str
    drained: bool
    first_post_ns: int = 0
    last_ack_ns: int = 0
    bytes_done: int = 0
    carried: Carried = Carried()


class PushDrained(Message, frozen=True):
    """Answers PushCancel. Not `certain` means that a path broke before the target answered, so only the target's fence
    can tell."""

    handle: int
    certain: bool = True


# ── front → rank: the node store ──────────────────────────────────────────────────────────────────


class SealCopy(Message, frozen=True):
    """Copies device pages to host extents, for the node store. The answer is SealCopied; the front holds both until
    then. The copy may be done before a PrefillStep that was sent earlier, so only pages that PrefillStepDone has made
    complete may be named."""

    ticket: int
    pages: tuple[int, ...]
    extents: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups
    group_extents: tuple[GroupPages, ...] = ()  # likewise, instead of `extents`


class LoadCopy(Message, frozen=True):
    """Copies sealed host extents to device pages. The answer is LoadCopied. The copy is done before any PrefillStep
    that is sent later, but not before other commands (PushOpen!): pages may be named as complete only once LoadCopied
    is here, or by that step."""

    ticket: int
    extents: tuple[int, ...]
    pages: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups
    group_extents: tuple[GroupPages, ...] = ()  # likewise, instead of `extents`


class PullOpen(Message, frozen=True):
    """Orders a READ of whole shards at `offsets` of `segment`, which is open already, to `landing`: offsets in this
    rank's own segment, in its host region. It runs beside the steps. The answer is always PullEnded; until then that
    memory belongs to the transfer engine. What is not here at `deadline_ns` is given up. `traffic_class` is a
    kvmesh.transfer.TrafficClass. With a `guard`, the u64 at `guard_offset` of `segment` is read last, and nothing
    counts as arrived unless it equals `guard`."""

    ticket: int
    segment: str
    offsets: tuple[int, ...]
    landing: tuple[int, ...]
    shard_bytes: int
    deadline_ns: int
    traffic_class: int = TrafficClass.PREFETCH
    sizes: tuple[int, ...] = ()
    guard: int = 0
    guard_offset: int = 0


class PullCancel(Message, frozen=True):
    """Stops a pull early; PullEnded says what arrived. Unknown tickets are ignored."""

    ticket: int


class Sum(Message, frozen=True):
    """Asks for xxh3_64 of each span of the rank's host region. The answer is Summed; until then nobody may write there.
    What has not begun at `deadline_ns` is given up."""

    ticket: int
    offsets: tuple[int, ...]  # in the rank's own segment
    sizes: tuple[int, ...]
    deadline_ns: int


class WatchReads(Message, frozen=True):
    """Counts what peers READ, from now on, of these ranges of the rank's own segment, until UnwatchReads with this
    ticket. Reads that pass over this process (shm, rdma) are not counted."""

    ticket: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class UnwatchReads(Message, frozen=True):
    """Ends a count. The answer is ReadsServed; unknown tickets are ignored."""

    ticket: int


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


class SealCopied(Message, frozen=True):
    """The blocks of a SealCopy are copied. `bad` are positions whose KV is not finite: they must not be sealed, as
    nobody could compute anything from them."""

    ticket: int
    start_ns: int
    end_ns: int
    bad: tuple[int, ...] = ()
    bad_groups: tuple[tuple[int, int], ...] = ()  # (group, position), of a SealCopy with `groups`


class LoadCopied(Message, frozen=True):
    ticket: int
    start_ns: int
    end_ns: int


class PullEnded(Message, frozen=True):
    """A pull has ended: no byte of it is on its way any more. `arrived` are positions of the PullOpen that are complete
    in their extents; `end_ns` is when the last byte was known to be here (the lease must still have held then)."""

    ticket: int
    arrived: tuple[int, ...]
    cause: str  # "" when all arrived
    bytes_done: int
    start_ns: int
    end_ns: int
    carried: Carried = Carried()


class ReadsServed(Message, frozen=True):
    """What was READ of the ranges of a WatchReads: so many requests and bytes, the first of which came at `start_ns`,
    and the last of which was sent at `end_ns`."""

    ticket: int
    reads: int
    nbytes: int
    start_ns: int
    end_ns: int


class Summed(Message, frozen=True):
    ticket: int
    sums: tuple[int, ...]  # empty: `cause` says why
    cause: str = ""


# A rank's tier has one *part* for each layout of shards that its node keeps (an instance has part 0), with one number
# in every tier. Keys travel packed, 16 bytes each.

# ── front → rank: tiers below DRAM ────────────────────────────────────────────────────────────────


class TierOpen(Message, frozen=True):
    """Orders to recover what lies at `path`, a URL or a folder in `Configure.ssd_path`, and to take puts from now on.
    TierChanged says what there is, then TierOpened answers. `identity` is what the blocks belong to beyond their keys;
    `room` the bytes of the largest block. `tier` is a kvmesh.kvcache.tiers.Tier; `below` is the tier that gets what
    this one evicts and was used `demote_uses` times (0: none). It must be opened before this one."""

    tier: int
    part: int
    path: str
    identity: str
    capacity_bytes: int
    room: int
    mixed: bool = False  # blocks have many sizes, which TierChanged gives
    below: int = 0
    demote_uses: int = 0


class TierPut(Message, frozen=True):
    """Stores blocks: key i is the `sizes[i]` bytes at `offsets[i]` of this rank's segment, in its host region. The
    answer is TierDone; until then nobody may change or free that memory. `uses` says how often each was used lately
    (0..15)."""

    ticket: int
    tier: int
    part: int
    keys: bytes
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    uses: bytes = b""


class TierGet(Message, frozen=True):
    """Reads blocks into extents of `room` bytes at `offsets`. The answer is TierDone; until then that memory is the
    tier's. What has not begun at `deadline_ns` is given up."""

    ticket: int
    tier: int
    part: int
    keys: bytes
    offsets: tuple[int, ...]
    room: int
    deadline_ns: int


class TierRemove(Message, frozen=True):
    """Removes blocks, also for after a restart. The answer is TierDone: all positions, or none (then it must be sent
    again). Whatever was stored before is reported by a TierChanged that comes first."""

    ticket: int
    tier: int
    part: int
    keys: bytes


class TierUsed(Message, frozen=True):
    """Blocks of this tier were used in memory, so often lately (`uses`: 0..15 of each). There is no answer."""

    tier: int
    part: int
    keys: bytes
    uses: bytes


class TierProbe(Message, frozen=True):
    """Reads this block without giving it to anybody, to see whether the tier answers. The answer is TierDone: position
    0, or none."""

    ticket: int
    tier: int
    part: int
    key: bytes


# ── rank → front: tiers below DRAM ────────────────────────────────────────────────────────────────


class TierOpened(Message, frozen=True):
    """Answers TierOpen. `why_not` says what is wrong with the folder; "" means that the tier is in use. `medium` means
    that its disk is at fault, and not what is configured."""

    tier: int
    part: int
    why_not: str = ""
    medium: bool = False


class TierDone(Message, frozen=True):
    """Answers an operation on a tier. `done` are the positions that succeeded; `sizes` the bytes of each of those (gets
    and puts)."""

    ticket: int
    done: tuple[int, ...]
    sizes: tuple[int, ...]
    start_ns: int
    end_ns: int


class TierChanged(Message, frozen=True):
    """Tells how the keys that this rank's part holds have changed: first `removed` are removed, then `sealed` added."""

    tier: int
    part: int
    sealed: bytes
    removed: bytes
    sizes: tuple[int, ...] = ()  # bytes of what is sealed, where blocks differ in size


class TierMoving(Message, frozen=True):
    """These blocks are on their way into this tier from the one above, which may drop them from now on. `over` means
    that they have arrived (a TierChanged came first), or never will."""

    tier: int
    part: int
    keys: bytes
    over: bool = False


class TierStats(Message, frozen=True):
    """Reports the state of a part now, and counts since the start."""

    tier: int
    part: int
    capacity_bytes: int
    used_bytes: int
    blocks: int
    hits: int
    misses: int
    written_bytes: int
    read_bytes: int
    evicted: int
    io_errors: int  # calls of disk or store that failed, without those below
    damaged: int  # blocks whose bytes were not those written; never given out
    full: int  # writes that a full disk refused
    why_not: str = ""  # slower than it could be, or refusing puts for now
    demoted: int = 0  # blocks that came from the tier above
    dropped: int = 0  # blocks that were to come from the tier above, and did not


# The pair of `life` (an incarnation) and `serial` names one sealing for ever: an extent that is sealed again has
# another.


class WarmRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one sealed block: `nbytes` at `offset` of the rank's host region, entered in slot `slot` of the rank's
    table."""

    slot: int
    offset: int
    nbytes: int
    life: int
    serial: int


# ── front → rank: memory that outlives them ───────────────────────────────────────────────────────


class WarmSum(Message, frozen=True):
    """These blocks were sealed: their checksums are to be written down, when there is time. There is no answer. A block
    may be dropped and its extent be written again meanwhile: then the checksum belongs to a sealing that is over, and
    nobody will ask for it."""

    rows: tuple[WarmRow, ...]


class WarmVerify(Message, frozen=True):
    """Asks whether the bytes have the checksums that were written down for these sealings of an earlier incarnation.
    The answers are several WarmVerified. What is not looked at by `deadline_ns` is not verified. Nobody writes there
    meanwhile."""

    rows: tuple[WarmRow, ...]
    deadline_ns: int


# ── rank → front: memory that outlives them ───────────────────────────────────────────────────────


class WarmVerified(Message, frozen=True):
    """Of `slots`, those in `good` have the bytes that were sealed; `damaged` is how many of the others have a checksum
    and other bytes (the rest were not finished in time, or have none)."""

    slots: tuple[int, ...]
    good: tuple[int, ...]
    damaged: int = 0


# ── front → rank: life ────────────────────────────────────────────────────────────────────────────


class Configure(Message, frozen=True):
    """Is the first message. The rank answers Ready or InitFailed. `model_path` "" is a rank without an engine (a pool
    node's): it has `memory_bytes` of host segment that others read and that takes pulls, nothing else."""

    instance_id: str
    incarnation: int
    rank: int
    world_size: int
    model_path: str
    dtype: str  # "float32" | "bfloat16" | "float16" | "auto"
    device: str  # "cpu" | "cuda" | "cuda:1": this rank's own
    block_tokens: int
    num_pages: int  # device pages; 0 = as many as `memory_bytes` holds; both 0 = as many as fit
    num_extents: int  # host extents for landing and swap
    memory_bytes: int
    threads: int  # torch intra-op threads
    max_context_tokens: int  # 0 = the model's
    transports: tuple[str, ...]  # in order of preference: ("shm", "tcp"); or ("auto",)
    fault: str = ""  # JSON for the fault transport; "" = none (tests)
    host: str = "127.0.0.1"  # the tcp transport listens here
    advertise_host: str = ""  # what peers dial; "" = host
    leave_host: bool = True  # bytes may go to other hosts unencrypted
    tls: dict[str, str] = msgspec.field(default_factory=dict)  # EngineConfig's tls_*; empty: tcp goes plain
    nics: tuple[str, ...] = ()  # that transports may use; () = as they choose
    topology: str = ""  # JSON or file of it; "" = found in /sys
    # Further fields of EngineConfig.
    rdma: dict[str, int | tuple[str, ...]] = msgspec.field(default_factory=dict)
    ssd_path: str = ""  # folder of the SSD tier, in which TierOpen names one; "" = none
    warm_segment: str = ""  # folder of memory that the next incarnation finds; "" = none
    warm_lease_ms: int = 0  # the longest lease that this incarnation gives
    cuda_graphs: bool = True
    async_steps: str = "auto"  # "auto" | "on" | "off"
    experts_cut: str = "auto"  # "auto" | "columns" | "whole": how ranks share experts (kvmesh.engine.parallel)
    group_file: str = ""  # where the ranks of this instance meet; "" = there is only one
    group_timeout_ms: int = 0  # longest wait of one rank for another
    # Of an instance on several hosts, whose ranks meet in the store behind the front (ADR 0044).
    rank_network: str = ""  # interface or network that its ranks compute over; "" = the way to `rank_route`
    rank_route: str = ""  # a host that another part of the instance is on; "" = all are on this one
    elsewhere: tuple[int, ...] = ()  # ranks that are on other hosts than rank 0
    secret: bytes = b""  # that followers on other hosts show rank 0
    cache_dir: str = ""  # where digests of weights are kept when the model's folder cannot be written; "" = the user's
    weights_epoch: int = 0  # the operator's number of weights that change under one fingerprint
    room_bytes: int = 0  # of the host's memory for weights and pages, where pages are as many as fit; 0 = a share
    device_instances: int = 0  # instances that share this GPU, or, where `room_bytes` is 0, the host; 0 = not known
    # Sizes of a step by the key of the service's configuration; 0 = by device, not there = the role has no such size.
    steps: dict[str, int] = msgspec.field(default_factory=dict)
    # Whether a model that has several cache groups, or one that does not keep all, is served group by group: Ready says
    # its `groups`, and every message that names pages or extents must name them by group.
    cache_groups: bool = False
    speculate: str = "off"  # which drafts are verified (kvmesh.ranks.speculation)
    max_draft_tokens: int = 0
    draft_model: str = ""  # the folder of the draft model; "" = none drafts
    rollout_folders: tuple[str, ...] = ()  # below which new weights may lie; () = the parent of the model's folder
    rollout_trainers: tuple[str, ...] = ()  # hosts and networks of trainers; () = this host, under TLS any
    mesh: str = ""  # the axes of the `world_size` ranks as `kvmesh.engine.axes.Axes.parse` reads them


class OpenSegment(Message, frozen=True):
    descriptor: bytes


class CloseSegment(Message, frozen=True):
    """Nobody here writes to this segment any more: its connections and maps are closed (a dead peer's memory with
    them)."""

    name: str


class StoreAnswer(Message, frozen=True):
    """Answers StoreCall."""

    ticket: int
    values: tuple[bytes, ...] = ()
    error: str = ""


class Ping(Message, frozen=True):
    nonce: int


class Shutdown(Message, frozen=True):
    pass


# ── a profile ─────────────────────────────────────────────────────────────────────────────────────


class Profile(Message, frozen=True):
    """Time the next `steps` steps by function. Answer Profiled: once they have run, or at `deadline_ns`
    (CLOCK_MONOTONIC) with those that have. Every rank of an instance times the same steps."""

    ticket: int
    steps: int
    deadline_ns: int


class ProfileStop(Message, frozen=True):
    """Nobody waits for this profile any more: it ends with what it has. Unknown tickets are ignored."""

    ticket: int


class ProfiledStep(msgspec.Struct, frozen=True, array_like=True):
    """One step that was timed. Times are nanoseconds since 1970, as those of spans."""

    start_ns: int
    end_ns: int
    rows: int
    context_tokens: int  # that the rows' tokens stand behind
    prefill_tokens: int


class ProfiledFunction(msgspec.Struct, frozen=True, array_like=True):
    """What all the steps together spent in one function of the model, and what they moved and multiplied there, by
    shape (kvmesh.engine.work)."""

    name: str
    busy_ns: int
    weight_bytes: int
    kv_read_bytes: int
    kv_written_bytes: int
    activation_bytes: int
    products: int


class ProfiledPieces(msgspec.Struct, frozen=True, array_like=True):
    """When which function, or kernel, ran: piece i is `names[which[i]]`, `starts_ns[i]` after the first step began, for
    `took_ns[i]`. A long profile leaves its last pieces out: `left_out`."""

    names: tuple[str, ...]
    which: tuple[int, ...]
    starts_ns: tuple[int, ...]
    took_ns: tuple[int, ...]
    left_out: int = 0


class ProfiledExperts(msgspec.Struct, frozen=True, array_like=True):
    """For how many tokens of the steps each expert of a layer was chosen."""

    layer: int
    tokens: tuple[int, ...]


class Profiled(Message, frozen=True):
    """`why_not`: "" or why there are no times. The limits are what a copy and a matrix product reached on this rank's
    device; 0: not measured."""

    ticket: int
    device: str = ""
    layers: int = 0
    steps: tuple[ProfiledStep, ...] = ()
    functions: tuple[ProfiledFunction, ...] = ()
    pieces: ProfiledPieces | None = None
    bytes_per_s: float = 0.0
    products_per_s: float = 0.0
    why_not: str = ""
    experts: tuple[ProfiledExperts, ...] = ()


# ── weights that change ───────────────────────────────────────────────────────────────────────────


class RemoteTensor(msgspec.Struct, frozen=True, array_like=True):
    """Says where a trainer has one tensor: at `offset` of its segment, whole and contiguous."""

    name: str
    dtype: str  # as in safetensors: "F32", "BF16", "F16", "F64"
    shape: tuple[int, ...]
    offset: int


class PrepareWeights(Message, frozen=True):
    """Opens other weights and checks that this rank can take its part of them; nothing changes yet. They are a folder
    at `path`, or a prefix of object storage, or lie in a trainer's segment. The answer is WeightsPrepared."""

    ticket: int
    path: str = ""
    segment: bytes = b""  # SegmentDescriptor.encode()
    tensors: tuple[RemoteTensor, ...] = ()
    within_s: float = 600.0


class ApplyWeights(Message, frozen=True):
    """Takes the weights that were prepared, in place. No request is in any batch meanwhile. The answer is
    WeightsApplied."""

    ticket: int
    within_s: float = 600.0


class DropWeights(Message, frozen=True):
    """Closes weights that were prepared and will not be taken."""

    ticket: int


class WeightsPrepared(Message, frozen=True):
    """`why_not` "": ApplyWeights can follow; else `code` names the error (kvmesh.errors). `versions` names those of
    what was opened where it has some, as objects do."""

    ticket: int
    why_not: str = ""
    code: str = ""
    field: str = ""
    versions: str = ""


class WeightsApplied(Message, frozen=True):
    """`nbytes` were written into the model. `why_not` other than "": reading ended in the middle, and the rank has some
    of the old weights and some of the new ones."""

    ticket: int
    nbytes: int
    start_ns: int
    end_ns: int
    why_not: str = ""


# ── sleep ─────────────────────────────────────────────────────────────────────────────────────────


class PrepareSleep(Message, frozen=True):
    """Ends the registration of pages and, with `keep`, copies the weights to the host, where they are not there
    anyway. No request is here, and no copy is asked for any more. The answer is SleepPrepared; FallAsleep or WakeUp
    follows."""

    ticket: int
    keep: bool  # the weights; else they are dropped


class FallAsleep(Message, frozen=True):
    """Gives the memory of pages and weights back. The answer is Asleep. It may be sent again without `keep`."""

    ticket: int
    keep: bool


class WakeUp(Message, frozen=True):
    """Makes pages anew and has the weights again: those that were kept, those of an update since, or the checkpoint's.
    The answer is Awake, also of a rank that is awake."""

    ticket: int


class SleepPrepared(Message, frozen=True):
    """`why_not` other than "": this rank cannot sleep, and has changed nothing."""

    ticket: int
    why_not: str = ""


class Asleep(Message, frozen=True):
    """Tells how many bytes were given back; of weights those that the device had."""

    ticket: int
    page_bytes: int
    weight_bytes: int


# ── front → rank: prefill ─────────────────────────────────────────────────────────────────────────


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    temperature: float
    top_p: float
    top_k: int
    seed: int
    logprobs: int = -1  # -1 none; n >= 0: the sampled token's and n alternatives
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    answered: int = 0  # how many of the prompt's last tokens an earlier attempt of the request has generated
    grammar: str = ""  # what every token must keep to, in llguidance's own form; "": none
    may_end: bool = True  # False: a grammar's answer ends only where nothing else is possible
    prompt_logprobs: int = -1  # -1 none; n >= 0: those of the prompt's tokens and of n alternatives to each


class TokenHistory(msgspec.Struct, frozen=True, array_like=True):
    """Has the packed token ids that penalties and grammars look at. `prompt` is empty where only the answer counts."""

    prompt: bytes
    answer: bytes


class PrefillItem(msgspec.Struct, frozen=True, array_like=True):
    """Orders to compute tokens [start, start + len(token_ids)) of one request, with their KV into `pages`.

    `pages[i]` holds tokens [i*block_tokens, (i+1)*block_tokens); `pages` cover everything up to the end of this chunk,
    and tokens before `start` are there already. `sample` asks for the token after the last one. Without `push` the KV
    stays in these pages, and no PushOpen follows.
    """

    handle: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sample: Sampling | None
    push: bool = True
    history: TokenHistory | None = None  # of the whole prompt, with `sample`
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups
    # n >= 0: log-probabilities of the tokens after those of the chunk, and of n alternatives to each, are wanted.
    scores: int = -1
    next_token: int = -1  # the prompt's first one after the chunk, with `scores`; -1: there is none


class PrefillStep(Message, frozen=True):
    step_id: int
    items: tuple[PrefillItem, ...]


class CompileGrammar(Message, frozen=True):
    """Compiles the grammar of a request that was admitted, beside the steps. The answer is GrammarCompiled; before that
    of every rank, no PrefillItem with `sample` and no Join that has this grammar is sent."""

    handle: int
    grammar: str


# ── front → rank: decode ──────────────────────────────────────────────────────────────────────────


class OpenWindow(Message, frozen=True):
    """Allows `peer` to write whole blocks at these segment offsets in this epoch. The answer is WindowOpened. The
    writer must not be told the landing before that: its writes could come before the window is open, and be refused."""

    peer: str
    handoff_epoch: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...] = ()  # of each offset; (): a block of this rank each


class Fence(Message, frozen=True):
    """Closes the window. The answer is Fenced, when no byte of it can land any more."""

    peer: str
    handoff_epoch: int


class CopyIn(Message, frozen=True):
    """Copies host extents to device pages (load after landing, or swap-in). The answer is Copied."""

    handle: int
    extents: tuple[int, ...]
    pages: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups
    group_extents: tuple[GroupPages, ...] = ()  # likewise, instead of `extents`


class CopyOut(Message, frozen=True):
    """Copies device pages to host extents (preemption). The answer is Copied."""

    handle: int
    pages: tuple[int, ...]
    extents: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups
    group_extents: tuple[GroupPages, ...] = ()  # likewise, instead of `extents`


class Join(Message, frozen=True):
    """Puts a request into the running batch. `context_tokens` tokens of KV lie in `pages`; `next_token` (index
    `token_index` of the answer) is sampled but its KV is not yet computed. The rank runs the request every step until a
    finish or Leave, and stalls it (skips it, reports Stalled once) while `pages` lack room for the next token."""

    handle: int
    pages: tuple[int, ...]
    context_tokens: int
    next_token: int
    token_index: int
    max_tokens: int  # of the answer
    min_tokens: int
    stop_token_ids: tuple[int, ...]  # EOS included unless ignore_eos
    sampling: Sampling
    history: TokenHistory | None = None  # up to `next_token`; None: nothing asks for it
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups
    said: TokenHistory | None = None  # up to `next_token`, for drafts; None: it gets none


class Grant(Message, frozen=True):
    handle: int
    pages: tuple[int, ...]  # appended
    groups: tuple[GroupPages, ...] = ()  # instead of `pages`, where the model has several cache groups


class DropPages(Message, frozen=True):
    """Takes the pages of blocks before `first` from a request in one cache group: no token from now on sees them. They
    are given to nobody else before the next step is collected, as the one that runs may read them."""

    handle: int
    group: int
    first: int


class Leave(Message, frozen=True):
    """Takes a request out of the batch. The answer is Left: from then on no step touches its pages. A token that it
    gets in a step that was running may come before."""

    handle: int


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


class GroupMemory(msgspec.Struct, frozen=True, array_like=True):
    """Says what a rank keeps of one cache group: its cut of a block, and where pages and extents of it lie in the
    segment, as in Ready."""

    shard: ShardLayout
    num_pages: int
    num_extents: int
    page_base_offset: int
    extent_base_offset: int
    layout: str = ""  # what the shard holds, as Ready's `layout`, for this group alone


class Ready(Message, frozen=True):
    engine_name: str  # name of its transfer engine: the peer name that targets see
    descriptor: bytes  # SegmentDescriptor.encode()
    model_name: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    kv_bytes_per_token: int
    num_pages: int
    num_extents: int
    shard_bytes: int  # one block of this rank
    page_base_offset: int  # page p's shard begins at page_base_offset + p * shard_bytes in the segment
    extent_base_offset: int  # extents likewise; pages land directly only when `direct_landing`
    direct_landing: bool
    load_ms: int
    layout: str = ""  # what a shard of this rank holds, for people and for equality; "" without an engine
    shard: ShardLayout | None = None  # this rank's part of each block; None without an engine
    host_bytes: int = 0  # bytes of the host region
    warm_segment: bytes = b""  # names the host region's memory, if it outlives this process
    warm_until_ns: int = 0  # until when readers of an earlier incarnation may still read that memory; 0: it is new
    transports: str = ""  # for people: which transports its engine uses, and why not the others
    dtype: str = ""  # that it computes in
    steps: dict[str, int] = msgspec.field(default_factory=dict)  # Configure's, chosen
    settings: str = ""  # for people: what was chosen and why
    # Of each cache group, by number, that this rank has layers of; (): the model has one group that keeps all.
    groups: tuple[GroupMemory, ...] = ()
    # Products of a prompt's token, and of a pair of a query and a token that it sees, in all layers of the model: what
    # chunks cost relative to each other. 0, 0: not known.
    token_products: float = 0.0
    pair_products: float = 0.0


class Awake(Message, frozen=True):
    """Answers WakeUp: `ready` says where pages are now. None: the rank still sleeps, and `why_not` says why."""

    ticket: int
    ready: Ready | None
    why_not: str = ""


class InitFailed(Message, frozen=True):
    code: str
    message: str


class StoreCall(Message, frozen=True):
    """Asks the front's store in which ranks on several hosts meet (kvmesh.ranks.rendezvous); the answer is
    StoreAnswer. `op` is "set", "get" (once all keys are there), "wait", "add", "compare_set", "check", "delete" or
    "count"."""

    ticket: int
    op: str
    keys: tuple[str, ...]
    values: tuple[bytes, ...] = ()
    number: int = 0


class RankFailed(Message, frozen=True):
    """Is the last message of a rank that ends without being asked to, and gives the reason."""

    message: str


class Pong(Message, frozen=True):
    nonce: int
    cpu_seconds: float
    transfer: TransferStats | None = None
    experts: ExpertStats | None = None  # of rank 0, where the model has any


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    handle: int
    token_id: int
    logprobs: Logprobs | None = None


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Holds log-probabilities of a prompt's tokens, of all but the first, packed little-endian: for each token its own
    and those of the n best, float32; its rank, u32; and the ids of the n best, u32."""

    logprobs: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""

    @classmethod
    def joined(cls, parts: Sequence[PromptScores]) -> PromptScores:
        """Returns those of a prompt from those of its chunks, in order."""
        columns = ("logprobs", "ranks", "top_ids")
        return cls(*(b"".join(getattr(part, name) for part in parts) for name in columns))


class PrefillStepDone(Message, frozen=True):
    """Reports a step. `scores` are by handle, of chunks that asked for them; rank 0 alone tells them. A stage of a
    pipeline says from when it had what the stage before it sent until when it had computed its own layers; 0: there is
    one stage."""

    step_id: int
    start_ns: int
    end_ns: int
    sampled: tuple[Sampled, ...]
    scores: tuple[tuple[int, PromptScores], ...] = ()
    busy_from_ns: int = 0
    busy_until_ns: int = 0


class WindowOpened(Message, frozen=True):
    peer: str
    handoff_epoch: int


class FillEnded(Message, frozen=True):
    """The end mark of this writer has come: all its bytes of the epoch have landed here."""

    peer: str
    handoff_epoch: int


class Fenced(Message, frozen=True):
    """No byte of this peer's writes under that epoch can land any more: `TransferEngine.fence` has returned."""

    peer: str
    handoff_epoch: int


class Copied(Message, frozen=True):
    handle: int
    into_pages: bool
    start_ns: int
    end_ns: int


class Token(msgspec.Struct, frozen=True, array_like=True):
    handle: int
    token_id: int
    token_index: int
    finish: int  # 0 goes on, 1 stop, 2 length: the rank has taken it out of the batch (but see `held` of the step)
    logprobs: Logprobs | None = None


class DecodeStepDone(Message, frozen=True):
    """Reports what a step has made. `held` are handles of tokens with a finish whose pages the next step, which is
    running already, has as well: Left follows when it is over. `since_ns`: when the tokens before these were made,
    where that was not in the last step, as rows of a pipeline take turns by micro-batches; 0: it was, or there were
    none. `batch` and `context_tokens` are of all micro-batches."""

    start_ns: int
    end_ns: int
    batch: int
    context_tokens: int
    tokens: tuple[Token, ...]
    prefill_tokens: int = 0  # of prompts, computed in the same step
    held: tuple[int, ...] = ()
    since_ns: int = 0
    # Of each drafter by name: how many tokens this step has computed as its drafts, and how many of them were kept.
    drafts: tuple[tuple[str, int, int], ...] = ()


class Stalled(Message, frozen=True):
    """The request needs another page before it can go on."""

    handle: int


class Left(Message, frozen=True):
    handle: int


class RankError(Message, frozen=True):
    """A step failed. `handles` were in it and are out of every batch; the rank goes on. `code` names the error
    (kvmesh.errors) where it is the requests' own, and nothing is wrong with what was computed."""

    handles: tuple[int, ...]
    message: str
    code: str = ""


class GrammarCompiled(Message, frozen=True):
    """Answers CompileGrammar. `why_not` "": it did compile."""

    handle: int
    why_not: str = ""


ToRank = (
    Configure
    | OpenSegment
    | CloseSegment
    | StoreAnswer
    | Ping
    | Shutdown
    | PrefillStep
    | PushOpen
    | PushLease
    | PushCancel
    | OpenWindow
    | Fence
    | CopyIn
    | CopyOut
    | CompileGrammar
    | Join
    | Grant
    | DropPages
    | Leave
    | SealCopy
    | LoadCopy
    | PullOpen
    | PullCancel
    | Sum
    | WatchReads
    | UnwatchReads
    | TierOpen
    | TierPut
    | TierGet
    | TierProbe
    | TierUsed
    | TierRemove
    | WarmSum
    | WarmVerify
    | Profile
    | ProfileStop
    | PrepareWeights
    | ApplyWeights
    | DropWeights
    | PrepareSleep
    | FallAsleep
    | WakeUp
)

ToFront = (
    Ready
    | InitFailed
    | StoreCall
    | RankFailed
    | Pong
    | PrefillStepDone
    | PushProgress
    | PushDone
    | PushFailed
    | PushDrained
    | WindowOpened
    | FillEnded
    | Fenced
    | Copied
    | DecodeStepDone
    | Stalled
    | Left
    | RankError
    | GrammarCompiled
    | SealCopied
    | LoadCopied
    | PullEnded
    | Summed
    | ReadsServed
    | TierOpened
    | TierMoving
    | TierDone
    | TierChanged
    | TierStats
    | WarmVerified
    | Profiled
    | WeightsPrepared
    | WeightsApplied
    | SleepPrepared
    | Asleep
    | Awake
)


# ── events and actions of the state machines ──────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FromRank:
    """Is an event of a state machine: one of its ranks sent this message. Messages of a rank come in order, each
    once."""

    rank: int
    message: ToFront


@dataclass(frozen=True, slots=True)
class TellRank:
    """Is an action of a state machine: this message is to be sent to one rank."""

    rank: int
    message: ToRank
