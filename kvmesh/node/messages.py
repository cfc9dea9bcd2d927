"""What the front process and its rank processes say to each other: typed messages over a socketpair.

Frames are a u32 little-endian length and one msgpack-encoded tagged struct (msgspec). Times are CLOCK_MONOTONIC
nanoseconds, which all processes of a machine share. Token ids and offsets travel as plain ints here (one
machine, one version: both ends come from the same build).

`handle` names a request within the instance for both roles; handles are never reused.
"""

from __future__ import annotations

import msgspec

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.node.push_messages import PushCancel as PushCancel
from kvmesh.node.push_messages import PushDone as PushDone
from kvmesh.node.push_messages import PushDrained as PushDrained
from kvmesh.node.push_messages import PushFailed as PushFailed
from kvmesh.node.push_messages import PushGroup as PushGroup
from kvmesh.node.push_messages import PushLease as PushLease
from kvmesh.node.push_messages import PushOpen as PushOpen
from kvmesh.node.push_messages import PushProgress as PushProgress
from kvmesh.node.push_messages import PushTarget as PushTarget
from kvmesh.node.store_messages import LoadCopied as LoadCopied
from kvmesh.node.store_messages import LoadCopy as LoadCopy
from kvmesh.node.store_messages import Message as Message
from kvmesh.node.store_messages import PullCancel as PullCancel
from kvmesh.node.store_messages import PullEnded as PullEnded
from kvmesh.node.store_messages import PullOpen as PullOpen
from kvmesh.node.store_messages import SealCopied as SealCopied
from kvmesh.node.store_messages import SealCopy as SealCopy
from kvmesh.node.store_messages import Sum as Sum
from kvmesh.node.store_messages import Summed as Summed
from kvmesh.node.tier_messages import TierChanged as TierChanged
from kvmesh.node.tier_messages import TierDone as TierDone
from kvmesh.node.tier_messages import TierGet as TierGet
from kvmesh.node.tier_messages import TierMoving as TierMoving
from kvmesh.node.tier_messages import TierOpen as TierOpen
from kvmesh.node.tier_messages import TierOpened as TierOpened
from kvmesh.node.tier_messages import TierProbe as TierProbe
from kvmesh.node.tier_messages import TierPut as TierPut
from kvmesh.node.tier_messages import TierRemove as TierRemove
from kvmesh.node.tier_messages import TierStats as TierStats
from kvmesh.node.tier_messages import TierUsed as TierUsed
from kvmesh.node.transfer_metrics import TransferStats
from kvmesh.node.warm_messages import WarmRow as WarmRow
from kvmesh.node.warm_messages import WarmSum as WarmSum
from kvmesh.node.warm_messages import WarmVerified as WarmVerified
from kvmesh.node.warm_messages import WarmVerify as WarmVerify

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
    transports: tuple[str, ...]  # in order of preference: ("shm", "tcp")
    fault: str = ""  # JSON for the fault transport; "" = none (tests)
    host: str = "127.0.0.1"  # the tcp transport listens here
    advertise_host: str = ""  # what peers dial; "" = host
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
)


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
)
