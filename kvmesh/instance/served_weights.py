"""Which weights an instance computes with, the check that a request was made for them (with other weights its block
keys would name other KV), and how they change: at all ranks or at none."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.errors import (
    BY_CODE,
    FailedWeights,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    WeightsChanged,
)
from kvmesh.instance.asked_ranks import AskedRanks
from kvmesh.kvcache.keys import MAX_WEIGHTS_EPOCH, check_epoch
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient

log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 1 << 20
MAX_TENSORS = 200_000
MAX_PATH = 4096
MAX_NAME, MAX_DTYPE, MAX_DIMS = 512, 16, 8  # of a trainer's tensor


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Identifies the weights of an instance. `epoch` is 0 for those of its checkpoint, else the id that an operator or
    a trainer gave them."""

    fingerprint: str
    epoch: int = 0

    def check(self, fingerprint: str, epoch: int) -> None:
        """Raises ModelNotFound, naming field and value, for a request that was made for another model, and
        WeightsChanged for one that was made for another epoch of this one's weights."""
        if fingerprint != self.fingerprint:
            text = f"model_fingerprint={fingerprint[:12]!r}: this instance serves {self.fingerprint[:12]!r}"
            raise ModelNotFound(text, field="model_fingerprint")
        if epoch != self.epoch:
            text = f"weights_epoch={epoch}: this instance serves epoch {self.epoch} of {fingerprint[:12]!r}"
            raise WeightsChanged(text, field="weights_epoch")


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Says where other weights are: at `path`, which is a folder that every host of the instance's ranks sees or a
    prefix of object storage ("s3://bucket/prefix"), or in the segment of a running trainer."""

    epoch: int
    path: str = ""
    segment: bytes = b""
    tensors: tuple[m.RemoteTensor, ...] = ()

    def check(self, served: int) -> None:
        """Raises InvalidRequest unless these can follow epoch `served`. Epochs grow, so that none is used twice."""
        if not served < self.epoch <= MAX_WEIGHTS_EPOCH:
            why = f"must be greater than {served}, which is served: an epoch names the weights of one update, for ever"
            raise InvalidRequest.of("epoch", self.epoch, why)
        if bool(self.path) == bool(self.segment):
            raise InvalidRequest.of("path", self.path, "either a folder, or a trainer's segment and tensors")
        if self.segment and not self.tensors:
            raise InvalidRequest.of("tensors", (), "a trainer's segment names its tensors")
        for field, value, most in (("path", self.path, MAX_PATH), ("segment", self.segment, MAX_SEGMENT_BYTES)):
            if len(value) > most:
                raise InvalidRequest.of(field, f"{len(value)} long", f"at most {most}")
        if len(self.tensors) > MAX_TENSORS:
            raise InvalidRequest.of("tensors", f"{len(self.tensors)} tensors", f"at most {MAX_TENSORS}")
        for at, one in enumerate(self.tensors):
            if len(one.name) > MAX_NAME or len(one.dtype) > MAX_DTYPE or len(one.shape) > MAX_DIMS:
                sizes = f"{len(one.name)}, {len(one.dtype)} and {len(one.shape)}"
                why = f"a name, a dtype and a shape of at most {MAX_NAME}, {MAX_DTYPE} and {MAX_DIMS}"
                raise InvalidRequest.of(f"tensors.{at}", sizes, why)


@dataclass(frozen=True, slots=True)
class WeightsTaken:
    """What an update took: bytes that all ranks together wrote, and seconds from the order to the last rank's answer,
    of which `apply_s` were spent writing (the longest of any rank)."""

    nbytes: int
    seconds: float
    apply_s: float


class LiveWeights(AskedRanks[m.WeightsPrepared | m.WeightsApplied]):
    """Changes the weights of an instance, one update at a time. All methods belong to the event loop.

    First every rank opens the new weights and checks them; only when all can does any change. A rank that ends in
    between ends the instance. Where a rank could not read on, `torn` says so: nothing is computed with a mixture, and
    the next update that succeeds mends it."""

    answers = (m.WeightsPrepared, m.WeightsApplied)
    late = "the weights were not there in time"

    def __init__(self, ranks: Sequence[RankClient], epoch: int) -> None:
        super().__init__(ranks)
        self.epoch = epoch
        self.path = ""  # where the weights came from, if an instance that starts anew can read it, too
        self.torn = ""
        self._highest = epoch  # that was ever begun

    @property
    def changing(self) -> bool:
        """Whether an update is under way."""
        return self.asking

    async def update(self, new: NewWeights, deadline_s: float) -> WeightsTaken:
        """Takes other weights; no request may be in the instance. Raises InvalidRequest or CheckpointError where they
        cannot be taken, Overloaded while another update runs, DeadlinePassed, Unavailable when a rank is lost; then the
        old ones are still served. Raises FailedWeights when the instance has neither whole."""
        if self.changing:
            raise Overloaded("epoch: another update of the weights is under way", retry_after_ms=1000)
        new.check(self._highest)
        check_epoch(new.epoch, self._highest, time.time_ns())
        ticket, start = self._next_ticket(), time.monotonic()
        until = start + deadline_s
        prepare = m.PrepareWeights(ticket, new.path, new.segment, new.tensors, deadline_s)
        try:
            prepared = await self._ask(prepare, ticket, until)
            for rank, answer in enumerate(prepared):
                assert isinstance(answer, m.WeightsPrepared)
                if answer.why_not:
                    kind = BY_CODE.get(answer.code, InvalidRequest)
                    raise kind(f"{answer.why_not} (rank {rank})", field=answer.field or "weights")
            if len({answer.versions for answer in prepared if isinstance(answer, m.WeightsPrepared)}) > 1:
                raise InvalidRequest.of("path", new.path, "has changed while the ranks opened it")
        except BaseException:
            for one in self._ranks:
                one.send(m.DropWeights(ticket))
            raise
        self._highest = new.epoch
        self.torn = f"the weights of epoch {new.epoch} are not whole"
        apply = m.ApplyWeights(ticket, max(0.1, until - time.monotonic()))
        applied = await self._ask(apply, ticket, until)
        nbytes, apply_ns = 0, 0
        for rank, done in enumerate(applied):
            assert isinstance(done, m.WeightsApplied)
            if done.why_not:
                self.torn = f"rank {rank} did not get all weights of epoch {new.epoch}: {done.why_not}"
                raise FailedWeights(self.torn, field="epoch")
            nbytes, apply_ns = nbytes + done.nbytes, max(apply_ns, done.end_ns - done.start_ns)
        self.epoch, self.path, self.torn = new.epoch, new.path, ""
        taken = WeightsTaken(nbytes, time.monotonic() - start, apply_ns / 1e9)
        log.info("weights of epoch %d: %d bytes in %.2f s", new.epoch, nbytes, taken.seconds)
        return taken
