"""Messages of the control connection between an opener and a target. Keys travel here and nowhere else.

    opener                                            target
      Hello (wire.Hello) ─────────────────────────────▶  as on tcp: the Welcome confirms that superseded connections'
      ◀───────────────────────────────── Welcome         queue pairs are destroyed
      Connect(NICs, QP number, ...) ──────────────────▶  makes its queue pair
      ◀─────── Connected(QP number, generation, mailbox)
      AskKeys(base) ──────────────────────────────────▶
      ◀──────────────── KeysAre(address, rkey by NIC)
      AdmitEpoch(epoch) ──────────────────────────────▶  a window is open?
      ◀──── Admitted(admission, generation, ranges)
      ═════════ one-sided WRITE and READ ═════════════▶  (the target's CPU sees nothing)
      ◀──────────────── Revoke(epoch, admission)         a fence asks first
      Released(epoch, admission) ─────────────────────▶  after READs that flushed it: nothing is on its way
      ◀────────────── GenerationFenced(generation)       no answer in time: all queue pairs of us are destroyed
      Reset(QP number) ───────────────────────────────▶  destroys its queue pair
      ◀─────────────────────────────────── ResetDone

An admission holds for queue pairs of its own generation only. A fence that destroys queue pairs begins another
generation, so no admission that was given before it can be used on a queue pair that was made after it.

On the stream each message is its length (u32) and msgpack, an array that begins with the message's number.
"""

from __future__ import annotations

import struct

import msgspec

from kvmesh.transfer.transports.wire import UNREADABLE, ProtocolBroken

MAX_MESSAGE_BYTES = 16 << 20
LENGTH = struct.Struct("<I")

# A notification in a mailbox: seq, epoch, serial, admission released, bytes of payload
LETTER = struct.Struct("<QQQQI")
LETTER_BYTES = 4096  # the largest payload that goes there
SLOT_BYTES = 4096 + 64
SLOTS = 16


class Connect(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Asks the target for a queue pair. `name` is the opener's NIC; `to` and `to_gid` are the target's NIC and
    its GID."""

    seq: int
    name: str
    to: str
    to_gid: str
    qp_num: int
    psn: int
    gid: str
    lid: int
    mtu: int
    reads: int


class Connected(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to Connect. With a `cause`: `retry` says that a fence came between and the same may succeed now,
    `down` that the NIC cannot be used for now."""

    seq: int
    cause: str = ""
    retry: bool = False
    qp_num: int = 0
    psn: int = 0
    lid: int = 0
    mtu: int = 0
    reads: int = 0
    generation: int = 0
    mailbox: int = 0
    mailbox_key: int = 0


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Asks the target to destroy its queue pair that was connected to `qp_num` of the opener's NIC `name`."""

    seq: int
    name: str
    qp_num: int


class ResetDone(msgspec.Struct, frozen=True, array_like=True, tag=4):
    seq: int


class AdmitEpoch(msgspec.Struct, frozen=True, array_like=True, tag=5):
    seq: int
    epoch: int


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The answer to Admit; `admission` 0 means refused."""

    seq: int
    admission: int = 0
    generation: int = 0
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag=7):
    epoch: int
    admission: int


class Released(msgspec.Struct, frozen=True, array_like=True, tag=8):
    epoch: int
    admission: int


class GenerationFenced(msgspec.Struct, frozen=True, array_like=True, tag=9):
    generation: int


class AskKeys(msgspec.Struct, frozen=True, array_like=True, tag=10):
    seq: int
    base: int


class KeysAre(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The answer to Keys; `length` 0 means that there is no such region."""

    seq: int
    address: int = 0
    length: int = 0
    rkeys: dict[str, int] = {}


class Notify(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A notification whose payload is too large for the mailbox."""

    seq: int
    epoch: int
    serial: int
    admission: int
    payload: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The answer to a notification or Checksum. `code` is an index of `wire.CAUSES`, `sums` are the checksums."""

    seq: int
    code: int = 0
    sums: tuple[int, ...] = ()


class Checksum(msgspec.Struct, frozen=True, array_like=True, tag=14):
    seq: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The bytes of an epoch's writes that completed since the last such message, for `landed_bytes`."""

    epoch: int
    nbytes: int


Asked = Connect | Reset | AdmitEpoch | Released | AskKeys | Notify | Checksum | Landed
Told = Connected | ResetDone | Admitted | Revoke | GenerationFenced | KeysAre | Answer
_encoder = msgspec.msgpack.Encoder()
_asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_told: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


def encode(message: Asked | Told) -> bytes:
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


def decode_asked(data: bytes | memoryview) -> Asked:
    """Decodes an opener's message. Raises ProtocolBroken when it is malformed."""
    try:
        return _asked.decode(data)
    except UNREADABLE as err:
        raise ProtocolBroken(f"message: {err}") from err


def decode_told(data: bytes | memoryview) -> Told:
    """Decodes a target's message. Raises ProtocolBroken when it is malformed."""
    try:
        return _told.decode(data)
    except UNREADABLE as err:
        raise ProtocolBroken(f"message: {err}") from err


def mtu_code(nbytes: int) -> int:
    """Returns the verbs' number of an MTU (1 for 256 ... 5 for 4096 bytes); 0 bytes means the largest."""
    return (nbytes or 4096).bit_length() - 8
