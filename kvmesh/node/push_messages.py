"""What front and rank say about pushes: a rank's bytes on their way to a landing. Part of `kvmesh.node.messages`, which
everybody imports.
"""

from __future__ import annotations

import msgspec

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.node.store_messages import Message
from kvmesh.transfer import Carried

# ── front → rank ──────────────────────────────────────────────────────────────────────────────────


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


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


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
