"""This module has the inputs and outputs of a decode instance's brain. Its shell (core.py) has no other way to reach
it."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.blockservice.removals import NotHere
from kvmesh.clock import Tick
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks.protocol import FromRank, TellRank
from kvmesh.services.decode import events as e
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import RankShape

# The peer of requests whose prompts are computed in this very instance.
OWN_PEER = 0

# ── in ────────────────────────────────────────────────────────────────────────────────────────────
# Further inputs are `FromRank`; `Pulled`, after which no byte of that pull can land any more; and `NotHere`, which
# names blocks that are being removed from this node's store in this very turn of the event loop.


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The gateway's stream broke or ended: nobody reads its answers any more."""

    session: int
    cause: str


@dataclass(frozen=True, slots=True)
class Admit:
    """A request arrives. `peer` is the number of the handoff stream to its prefill instance."""

    session: int
    slot: int
    peer: int
    spec: e.Spec
    received_ns: int


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """A request did not pass its checks: its slot gets the error."""

    session: int
    slot: int
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class CancelSlot:
    session: int
    slot: int
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class AddCredit:
    session: int
    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PeerReady:
    """A handoff stream is up. Each of `writers` is a rank of this instance and the transfer engine name of the rank of
    that instance which sends to it."""

    peer: int
    writers: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class PeerGone:
    peer: int
    cause: str


@dataclass(frozen=True, slots=True)
class FromPrefill:
    peer: int
    handle: int
    event: e.Event


@dataclass(frozen=True, slots=True)
class CloseDoor:
    """Refuses new requests with this error from now on; None takes them again."""

    error: KvmeshError | None


@dataclass(frozen=True, slots=True)
class EndAll:
    """Ends every request with this error, because the instance stops or a rank died. Memory comes back as ever, when no
    hand is on it. `lost` says that the ranks' memory is gone, and with it all that the node store held. `part` says
    that running requests end once the step that runs is over, and that blocks are sealed still, with what lies after
    the last full one where that is worth something. `goes_on` says that the instance takes requests again later."""

    error: KvmeshError
    lost: bool = False
    part: bool = False
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class PagesMoved:
    """The ranks' pages and extents lie at these places now. There is no request, and nothing is in any page."""

    ranks: tuple[RankShape, ...]


Input = (
    SessionOpened | SessionClosed | Admit | RefuseRequest | CancelSlot | AddCredit | PeerReady | PeerGone | FromPrefill
    | FromRank | Tick | CloseDoor | EndAll | PagesMoved | Pulled | NotHere
)  # fmt: skip

# ── out ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pull:
    """Orders a pull of blocks for this request; `Pulled` is its one answer."""

    job: PullJob
    request: Handoff


@dataclass(frozen=True, slots=True)
class Flush:
    """Says that the session's outbox has something to send."""

    session: int


@dataclass(frozen=True, slots=True)
class Over:
    """The client has been told its end: a complete answer, or an error."""

    request: Handoff
    end: e.Reason | KvmeshError


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not admitted; its gateway has been told."""

    spec: e.Spec
    error: KvmeshError


Output = TellRank | e.AskPrefill | e.ToPrefill | Pull | Flush | Over | Refused
