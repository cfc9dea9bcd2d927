"""One request on its way through the mesh: what is known of it at each place. Made on arrival, gone with its end."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from kvmesh.errors import KvmeshError
from kvmesh.services.conductor.domain import Placed
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.recovery import AttemptRecovery, Failure
from kvmesh.services.prefill.compute_progress import ComputeProgress
from kvmesh.sim.links import Flow
from kvmesh.sim.report.records import Record
from kvmesh.sim.workloads.workload import SimRequest

if TYPE_CHECKING:
    from kvmesh.sim.decoder import Decoder
    from kvmesh.sim.prefiller import Prefiller


PATIENCE = GatewayConfig().patience


def elsewhere_s(recovery: AttemptRecovery, error: KvmeshError, name: str, now: float) -> float:
    """Returns how long a gateway waits before it has a request placed elsewhere, which the instance `name` has turned
    away. Raises the error that the client gets, where its patience has ended."""
    failure = Failure(error, name, answered=0, fresh=0, delivered=False, taken=True)
    return recovery.failed(failure, now, chance=1.0).delay_s


class Life:
    """`handle`: from 1 on, by arrival. Times in seconds of the loop."""

    __slots__ = (
        "admitted_s",
        "attempt",
        "avoid",
        "bytes_per_token",
        "cached_blocks",
        "chunks",
        "computed",
        "decode_pulls",
        "decoder",
        "done_before",
        "ended",
        "expected_rest",
        "extents",
        "first_s",
        "first_step_s",
        "flow",
        "handle",
        "held",
        "last_step_s",
        "left_prefill",
        "lost",
        "made_before",
        "meanwhile",
        "over",
        "pages",
        "pinned",
        "placed",
        "planned_to",
        "prefiller",
        "promised_from",
        "pull_bytes",
        "pull_s",
        "pulled_keys",
        "pulls",
        "push_bytes",
        "record",
        "recovery",
        "repeats",
        "request",
        "sent_to",
        "tokens",
        "waits_until_s",
    )  # fmt: skip

    def __init__(self, handle: int, request: SimRequest, record: Record, made_before: int = 0) -> None:
        """`made_before`: tokens of the answer that attempts before this one have brought: part of the prompt now."""
        self.handle = handle
        self.request = request
        self.record = record
        self.tokens = request.input_tokens + made_before  # of the prompt
        self.made_before = made_before
        self.attempt = 0
        self.avoid: tuple[str, ...] = ()  # instances that have refused it since its client asked
        self.recovery: AttemptRecovery | None = None  # of that
        self.repeats = 0  # attempts just before this one that brought no token
        self.lost = False  # an instance that had it is gone: another attempt has taken its place
        self.placed: Placed | None = None
        self.prefiller: Prefiller | None = None
        self.decoder: Decoder | None = None
        self.ended = False  # the client has its one end
        self.first_s = nan  # the first token of this attempt
        # at prefill
        self.waits_until_s = 0.0  # nobody waits longer for pulls
        self.pulls = 0  # under way that it waits for
        self.planned_to = 0  # the block that its prefix reaches when a pull that is still to begin is over; 0: none is
        self.pinned: list[int] = []  # extents that arrived for it
        self.pulled_keys: set[bytes] = set()
        self.pull_bytes = 0
        self.pull_s = 0.0
        self.expected_rest = 0  # tokens to compute, as last looked up
        self.cached_blocks = 0
        self.promised_from = 0  # the block from which on others wait for what it computes
        self.pages = 0
        self.first_step_s = self.last_step_s = -1.0
        self.chunks = 0
        self.done_before: ComputeProgress | None = None  # by the instance, before its first step
        self.meanwhile = ComputeProgress()  # by the instance, from its first step to its last one
        self.left_prefill = False
        # on the wires
        self.flow: Flow | None = None
        self.computed = 0  # tokens of the prompt whose KV is in pages here
        self.sent_to = 0  # tokens of the prompt that were fed to the flow, or that decode has
        self.bytes_per_token: float = 0
        self.push_bytes = 0
        self.over = False  # all is computed
        # at decode
        self.admitted_s = 0.0
        self.decode_pulls = False  # it fetches blocks of the prompt for the landing
        self.held: list[int] = []  # extents of its store's blocks that lead the prompt
        self.extents: list[int] = []  # of the landing, behind those

    @property
    def left(self) -> int:
        """Tokens of the answer that this attempt has to make."""
        return self.record.output_tokens - self.made_before

    @property
    def order(self) -> tuple[int, int]:
        """Its place in decode's queue: by priority, then by arrival."""
        return self.request.priority, self.handle

    @property
    def name(self) -> str:
        """Its request id, by which conductors know it."""
        return self.record.request_id
