"""What the front process and its rank processes say to each other: typed messages over a socketpair.

Frames are a u32 little-endian length and one msgpack-encoded tagged struct (msgspec). Times are CLOCK_MONOTONIC
nanoseconds, which all processes of a machine share. Token ids and offsets travel as plain ints here (one
machine, one version: both ends come from the same build).

`handle` names a request within the instance for both roles; handles are never reused.

The machines of decode and prefill (`step(event, now) -> actions`) take and return these messages as they are, in
`FromRank` and `TellRank`, which say whose they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks.transfer_metrics import TransferStats
from kvmesh.transfer import Carried, TrafficClass


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class name is the tag."""


# ── front → rank: pushes ──────────────────────────────────────────────────────────────────────────


class PushTarget(msgspec.Struct, frozen=True, array_like=True):
    """Where one reader rank of a group wants its shards: an offset in `segment` for each block of the prompt."""

    reader: int
    segment: str
    offsets: tuple[int, ...]


class PushGroup(msgspec.Struct, frozen=True, array_like=True):
    """Writer ranks and reader ranks that cut the model differently: this rank is `writer` and sends each of `targets`
    what `kvmesh.kvcache.groups.plan_group(writers, readers)` says, and an end mark, also when it says nothing."""

    writer: int
    writers: tuple[ShardLayout, ...]
    readers: tuple[ShardLayout, ...]
    targets: tuple[PushTarget, ...]


class PushOpen(Message, frozen=True):
    """Landing of one handoff is known: push every block from `first_block` on, those whose pages are
    already complete (`ready_blocks` from the front) at once, the others layer by layer as steps write them.
    `pages` are this instance's pages of the prompt's blocks, `offsets` their landing in `segment`, whole shards, unless
    there is a `group`. Stop posting at `lease_until_ns` less the margin; PushLease extends it."""

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


class PushLease(Message, frozen=True):
    handle: int
    lease_until_ns: int


class PushCancel(Message, frozen=True):
    """Stop posting; answer PushDrained once nothing of it is on the way (also when unknown)."""

    handle: int


# ── rank → front: pushes ──────────────────────────────────────────────────────────────────────────


class PushProgress(Message, frozen=True):
    """At most one per handoff and 100 ms: bytes acknowledged by the target so far."""

    handle: int
    bytes_done: int


class PushDone(Message, frozen=True):
    """Everything acknowledged and every end mark delivered. `busy_ns`: what of the time between first post and last ack
    had bytes on their way; the rest of it waited for layers to be computed."""

    handle: int
    handoff_epoch: int
    first_post_ns: int
    last_ack_ns: int
    bytes_done: int
    carried: Carried = Carried()
    busy_ns: int = 0


class PushFailed(Message, frozen=True):
    """Not all of it arrived (path broken, lease over, window closed). `drained`: nothing is on the way. Times are 0
    when nothing was posted, or acknowledged."""

    handle: int
    handoff_epoch: int
    cause: str
    drained: bool
    first_post_ns: int = 0
    last_ack_ns: int = 0
    bytes_done: int = 0
    carried: Carried = Carried()


class PushDrained(Message, frozen=True):
    """Answer to PushCancel. Not `certain`: a path broke before the target answered; let the target fence it."""

    handle: int
    certain: bool = True


# ── front → rank: the node store ──────────────────────────────────────────────────────────────────


class SealCopy(Message, frozen=True):
    """Device pages → host extents, for the node store. Answer SealCopied; the front holds both until then. It may be
    done before a PrefillStep that was sent earlier: name only pages that PrefillStepDone has made complete."""

    ticket: int
    pages: tuple[int, ...]
    extents: tuple[int, ...]


class LoadCopy(Message, frozen=True):
    """Sealed host extents → device pages. Answer LoadCopied. Done before any PrefillStep that is sent later, but not
    before other commands (PushOpen!): pages may be named as complete only once LoadCopied is here, or by that step."""

    ticket: int
    extents: tuple[int, ...]
    pages: tuple[int, ...]


class PullOpen(Message, frozen=True):
    """READ whole shards at `offsets` of `segment` (open already) to `landing`: offsets in this rank's own segment, in
    its host region. Off the step's path. Answer PullEnded, always; until then that memory belongs to the transfer
    engine. What is not here at `deadline_ns` is given up. `traffic_class` is a kvmesh.transfer.TrafficClass."""

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
    """Stop early; PullEnded says what arrived. Unknown tickets are ignored."""

    ticket: int


class Sum(Message, frozen=True):
    """xxh3_64 of each span of our host region. Answer Summed; until then nobody may write there. What has not begun at
    `deadline_ns` is given up: nobody waits for it any more."""

    ticket: int
    offsets: tuple[int, ...]  # in our own segment
    sizes: tuple[int, ...]
    deadline_ns: int


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


class SealCopied(Message, frozen=True):
    """`bad`: positions whose KV is not finite. They are not to be sealed: whoever used them could compute nothing."""

    ticket: int
    start_ns: int
    end_ns: int
    bad: tuple[int, ...] = ()


class LoadCopied(Message, frozen=True):
    ticket: int
    start_ns: int
    end_ns: int


class PullEnded(Message, frozen=True):
    """`arrived`: positions of the PullOpen that are complete in their extents; `end_ns` is when the last byte was known
    to be here (the lease must still have held then). No byte of this pull is on its way any more."""

    ticket: int
    arrived: tuple[int, ...]
    cause: str  # "" when all arrived
    bytes_done: int
    start_ns: int
    end_ns: int
    carried: Carried = Carried()


class Summed(Message, frozen=True):
    ticket: int
    sums: tuple[int, ...]  # (): `cause` says why not
    cause: str = ""


# A rank's tier has one *part* for each layout of shards that its node keeps (an instance has part 0), with one number
# in every tier. Keys travel packed, 16 bytes each.

# ── front → rank: tiers below DRAM ────────────────────────────────────────────────────────────────


class TierOpen(Message, frozen=True):
    """Recover what lies at `path` and take puts from now on. TierChanged says what there is, then TierOpened answers.
    `identity`: what the blocks belong to beyond their keys; `room`: bytes of the largest. `tier` is a
    kvmesh.kvcache.tiers.Tier; `below`: the one that gets what this one evicts and was used `demote_uses` times, 0:
    none. That one is opened first."""

    tier: int
    part: int
    path: str
    identity: str
    capacity_bytes: int
    room: int
    mixed: bool = False  # blocks of many sizes: TierChanged tells them
    below: int = 0
    demote_uses: int = 0


class TierPut(Message, frozen=True):
    """Store blocks: key i is the `sizes[i]` bytes at `offsets[i]` of this rank's segment, in its host region. Answer
    TierDone; until then nobody may change or free that memory. `uses`: how often each was used lately (0..15)."""

    ticket: int
    tier: int
    part: int
    keys: bytes
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    uses: bytes = b""


class TierGet(Message, frozen=True):
    """Read blocks into extents of `room` bytes at `offsets`. Answer TierDone; until then that memory is the tier's.
    What has not begun at `deadline_ns` is given up."""

    ticket: int
    tier: int
    part: int
    keys: bytes
    offsets: tuple[int, ...]
    room: int
    deadline_ns: int


class TierRemove(Message, frozen=True):
    """None of these is found from now on, nor after a restart. Answer TierDone: all positions, or none (say it again).
    Whatever was stored before is told by a TierChanged that comes first."""

    ticket: int
    tier: int
    part: int
    keys: bytes


class TierUsed(Message, frozen=True):
    """Blocks of this tier were used in memory, so often lately (`uses`: 0..15 of each). No answer."""

    tier: int
    part: int
    keys: bytes
    uses: bytes


class TierProbe(Message, frozen=True):
    """Read this block, for nobody: does the tier answer? TierDone: position 0, or none."""

    ticket: int
    tier: int
    part: int
    key: bytes


# ── rank → front: tiers below DRAM ────────────────────────────────────────────────────────────────


class TierOpened(Message, frozen=True):
    """`why_not` "": it is in use; else what is wrong with the folder."""

    tier: int
    part: int
    why_not: str = ""


class TierDone(Message, frozen=True):
    """`done`: positions of the operation that succeeded; `sizes`: bytes of each of those (gets and puts)."""

    ticket: int
    done: tuple[int, ...]
    sizes: tuple[int, ...]
    start_ns: int
    end_ns: int


class TierChanged(Message, frozen=True):
    """How the keys that this rank's part holds have changed: first remove, then add."""

    tier: int
    part: int
    sealed: bytes
    removed: bytes
    sizes: tuple[int, ...] = ()  # of what is sealed, when they differ


class TierMoving(Message, frozen=True):
    """These are on their way into this tier from the one above, which may let go of them from now on; `over`: they have
    arrived (a TierChanged came first), or never will."""

    tier: int
    part: int
    keys: bytes
    over: bool = False


class TierStats(Message, frozen=True):
    """Now, and counts since the start."""

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
    failed: int  # I/O errors and damaged blocks
    why_not: str = ""  # slower than it could be, or refusing puts for now
    demoted: int = 0  # blocks that came from the tier above
    dropped: int = 0  # ... that were to come, and did not


# `life` and `serial` name one sealing, for ever: the same extent sealed again has another pair.


class WarmRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sealed block: `nbytes` at `offset` of the rank's host region, which stand in slot `slot` of its table."""

    slot: int
    offset: int
    nbytes: int
    life: int
    serial: int


# ── front → rank: memory that outlives them ───────────────────────────────────────────────────────


class WarmSum(Message, frozen=True):
    """These were sealed: put the sums of their bytes down, when there is time. No answer. A block may go and its extent
    be written again meanwhile: a sum of what is there then is of a sealing that is over, and nobody will ask for it."""

    rows: tuple[WarmRow, ...]


class WarmVerify(Message, frozen=True):
    """Do the bytes have the sums that were put down for these sealings of an earlier life? Answered by WarmVerified,
    bit by bit. What is not looked at by `deadline_ns` is not verified. Nobody writes there meanwhile."""

    rows: tuple[WarmRow, ...]
    deadline_ns: int


# ── rank → front: memory that outlives them ───────────────────────────────────────────────────────


class WarmVerified(Message, frozen=True):
    """Of `slots`, those in `good` have the bytes that were sealed."""

    slots: tuple[int, ...]
    good: tuple[int, ...]


# ── front → rank: life ────────────────────────────────────────────────────────────────────────────


class Configure(Message, frozen=True):
    """First message. The rank answers Ready or InitFailed. `model_path` "": a rank without an engine (a pool node's):
    `memory_bytes` of host segment that others read and that takes pulls, nothing else."""

    instance_id: str
    incarnation: int
    rank: int
    world_size: int
    model_path: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    device: str  # "cpu" | "cuda" | "cuda:1": this rank's own
    block_tokens: int
    num_pages: int  # device pages; 0 = as many as `memory_bytes` holds
    num_extents: int  # host extents for landing and swap
    memory_bytes: int
    threads: int  # torch intra-op threads
    max_context_tokens: int  # 0 = the model's
    transports: tuple[str, ...]  # in order of preference: ("shm", "tcp"); or ("auto",)
    fault: str = ""  # JSON for the fault transport; "" = none (tests)
    host: str = "127.0.0.1"  # the tcp transport listens here
    advertise_host: str = ""  # what peers dial; "" = host
    leave_host: bool = True  # transports ("auto",) may carry bytes to other hosts, unencrypted
    nics: tuple[str, ...] = ()  # that transports may use; () = as they choose
    topology: str = ""  # JSON or file of it; "" = found in /sys
    # Further fields of EngineConfig.
    rdma: dict[str, int | tuple[str, ...]] = msgspec.field(default_factory=dict)
    warm_segment: str = ""  # folder of memory that the next life finds; "" = none
    warm_lease_ms: int = 0  # the longest lease that this life gives
    cuda_graphs: bool = True
    group_file: str = ""  # where the ranks of this instance meet; "" = there is only one
    group_timeout_ms: int = 0  # longest wait of one rank for another
    cache_dir: str = ""  # where digests of weights are kept when the model's folder cannot be written; "" = the user's
    weights_epoch: int = 0  # of weights that an operator changes under one fingerprint


class OpenSegment(Message, frozen=True):
    descriptor: bytes


class CloseSegment(Message, frozen=True):
    """Nobody here writes to it any more: its connections and maps go (a dead peer's memory with them)."""

    name: str


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
    answered: int = 0  # of the prompt's last tokens, made by an earlier life of the request


class TokenHistory(msgspec.Struct, frozen=True, array_like=True):
    """What penalties look at: packed token ids. `prompt` is empty where only the answer counts."""

    prompt: bytes
    answer: bytes


class PrefillItem(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens [start, start + len(token_ids)) of one request, KV into `pages`.

    `pages[i]` holds tokens [i*block_tokens, (i+1)*block_tokens) and covers everything up to the end of this
    chunk; tokens before `start` are already there. `sample` asks for the token after the last one. Not `push`: its KV
    stays in these pages, no PushOpen follows."""

    handle: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sample: Sampling | None
    push: bool = True
    history: TokenHistory | None = None  # of the whole prompt, with `sample`


class PrefillStep(Message, frozen=True):
    step_id: int
    items: tuple[PrefillItem, ...]


# ── front → rank: decode ──────────────────────────────────────────────────────────────────────────


class OpenWindow(Message, frozen=True):
    """Invite `peer` to write whole blocks at these segment offsets in this epoch. Answer WindowOpened: a landing
    told to the writer before that could be written to before the window is there, and be refused."""

    peer: str
    handoff_epoch: int
    offsets: tuple[int, ...]


class Fence(Message, frozen=True):
    """Close the window; answer Fenced when no byte of it can land any more."""

    peer: str
    handoff_epoch: int


class CopyIn(Message, frozen=True):
    """Host extents → device pages (load after landing, or swap-in). Answer Copied."""

    handle: int
    extents: tuple[int, ...]
    pages: tuple[int, ...]


class CopyOut(Message, frozen=True):
    """Device pages → host extents (preemption). Answer Copied."""

    handle: int
    pages: tuple[int, ...]
    extents: tuple[int, ...]


class Join(Message, frozen=True):
    """Put a request into the running batch. `context_tokens` tokens of KV lie in `pages`; `next_token` (index
    `token_index` of the answer) is sampled but its KV is not yet computed. The rank runs it every step until a
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
    history: TokenHistory | None = None  # up to `next_token`; None: no penalty asks for it


class Grant(Message, frozen=True):
    handle: int
    pages: tuple[int, ...]  # appended


class Leave(Message, frozen=True):
    """Take it out of the batch; answer Left: from then on no step touches its pages."""

    handle: int


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


class Ready(Message, frozen=True):
    engine_name: str  # of its transfer engine: the peer name that targets see
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
    host_bytes: int = 0  # of the host region
    warm_segment: bytes = b""  # names the host region's memory, if it outlives this process
    warm_until_ns: int = 0  # ... of an earlier life, whose readers may still read until then
    transports: str = ""  # which its transfer engine uses and why not the others, for people


class InitFailed(Message, frozen=True):
    code: str
    message: str


class RankFailed(Message, frozen=True):
    """Last words: why this process ends, though nobody asked it to."""

    message: str


class Pong(Message, frozen=True):
    nonce: int
    cpu_seconds: float
    transfer: TransferStats | None = None


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    handle: int
    token_id: int
    logprobs: Logprobs | None = None


class PrefillStepDone(Message, frozen=True):
    step_id: int
    start_ns: int
    end_ns: int
    sampled: tuple[Sampled, ...]


class WindowOpened(Message, frozen=True):
    peer: str
    handoff_epoch: int


class FillEnded(Message, frozen=True):
    """End mark of this writer: all its bytes of the epoch have landed here."""

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
    finish: int  # 0 goes on, 1 stop, 2 length: the rank has taken it out of the batch
    logprobs: Logprobs | None = None


class DecodeStepDone(Message, frozen=True):
    start_ns: int
    end_ns: int
    batch: int
    context_tokens: int
    tokens: tuple[Token, ...]
    prefill_tokens: int = 0  # of prompts, computed in the same step


class Stalled(Message, frozen=True):
    """The request needs another page before it can go on."""

    handle: int


class Left(Message, frozen=True):
    handle: int


class RankError(Message, frozen=True):
    """A step failed. `handles` were in it and are out of every batch; the rank goes on."""

    handles: tuple[int, ...]
    message: str


ToRank = (
    Configure
    | OpenSegment
    | CloseSegment
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
    | Join
    | Grant
    | Leave
    | SealCopy
    | LoadCopy
    | PullOpen
    | PullCancel
    | Sum
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
)

ToFront = (
    Ready
    | InitFailed
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
    | SealCopied
    | LoadCopied
    | PullEnded
    | Summed
    | TierOpened
    | TierMoving
    | TierDone
    | TierChanged
    | TierStats
    | WarmVerified
    | Profiled
)


# ── what a machine hears and says ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FromRank:
    """An event of a machine: one of its ranks said this. In order, once."""

    rank: int
    message: ToFront


@dataclass(frozen=True, slots=True)
class TellRank:
    """An action of a machine: send this to one rank."""

    rank: int
    message: ToRank
