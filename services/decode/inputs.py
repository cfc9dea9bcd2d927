"""What goes into the instance's brain and what comes out of it. The shell (core.py) speaks only these."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.blockservice.removals import NotHere
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks.protocol import FromRank, TellRank
from kvmesh.rpc.brain_shell import Tick
from kvmesh.services.decode import events as e
from kvmesh.services.decode.handoff import Handoff

# The peer of requests whose prompts are computed in this very instance.
OWN_PEER = 0

# ── in ────────────────────────────────────────────────────────────────────────────────────────────
# Beside these: `FromRank`; `Pulled`, after which no byte of that pull can land any more; and `NotHere`, blocks that are
# being removed from this node's store, everywhere in it, in this very turn.


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The gateway's stream broke or ended: nobody reads its answers."""

    session: int
    cause: str


@dataclass(frozen=True, slots=True)
class Admit:
    """A request arrives. `peer` names the handoff stream to its prefill instance."""

    session: int
    slot: int
    peer: int
    spec: e.Spec
    received_ns: int


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """A request that does not even parse: its slot gets the error."""

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
    """A handoff stream is up; `writers` are (rank of ours, transfer engine name of a rank of that instance which sends
    to it)."""

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
    """Refuse new requests with this error from now on; None: take them again."""

    error: KvmeshError | None


@dataclass(frozen=True, slots=True)
class EndAll:
    """End every request with this error (we stop, or a rank died); memory comes back as ever, hand by hand. `lost`:
    the rank's memory is gone, and with it all that the node store held."""

    error: KvmeshError
    lost: bool = False


Input = (
    SessionOpened | SessionClosed | Admit | RefuseRequest | CancelSlot | AddCredit | PeerReady | PeerGone | FromPrefill
    | FromRank | Tick | CloseDoor | EndAll | Pulled | NotHere
)  # fmt: skip

# ── out ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pull:
    """Fetch blocks for this request; `Pulled` is its one answer."""

    job: PullJob
    request: Handoff


@dataclass(frozen=True, slots=True)
class Flush:
    """The session's outbox has something to send."""

    session: int


@dataclass(frozen=True, slots=True)
class Over:
    """The client has its end: a complete answer, or an error."""

    request: Handoff
    end: e.Reason | KvmeshError


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was not admitted; its gateway has been told."""

    spec: e.Spec
    error: KvmeshError


Output = TellRank | e.AskPrefill | e.ToPrefill | Pull | Flush | Over | Refused
