"""A rank's part in a change of weights: it opens them, checks that it can take its part, and takes it when all can."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvmesh.engine.checkpoint import ITEMSIZE, TensorInfo, check_tensors, open_weights
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.runner import Runner
from kvmesh.engine.tensors import canonical_name
from kvmesh.engine.weights_update import TensorSource, WeightsUpdate
from kvmesh.errors import CheckpointError, InternalError, InvalidRequest, KvmeshError, TransferError
from kvmesh.ranks import protocol as m
from kvmesh.transfer import Opcode, SegmentDescriptor, TransferEngine, TransferRequest, TransferState

log = logging.getLogger("kvmesh.rank")

BOUNCE_BYTES = 64 << 20
READ_TIMEOUT_S = 60.0  # for one piece of at most BOUNCE_BYTES


class TrainerTensors:
    """Reads tensors out of a running trainer's segment (a TensorSource). Raises CheckpointError for tensors that are
    not those of the model, InvalidRequest for sizes that cannot be, TransferError when the trainer is out of reach."""

    def __init__(self, engine: TransferEngine, message: m.PrepareWeights, config: ModelConfig) -> None:
        found = {}
        for one in message.tensors:
            if one.dtype not in ITEMSIZE or any(dim < 1 for dim in one.shape):
                why = f"shape {list(one.shape)} of one of {', '.join(ITEMSIZE)}"
                raise InvalidRequest.of(f"tensors.{one.name}", f"{one.dtype} {list(one.shape)}", why)
            nbytes = math.prod(one.shape) * ITEMSIZE[one.dtype]
            name = canonical_name(config, one.name)
            found[name] = TensorInfo(name, one.dtype, one.shape, Path("trainer"), one.offset, nbytes)
        self.config = config
        self.mtp: Mapping[str, TensorInfo] = {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: found[name] for name in check_tensors(config, found, "the trainer's tensors")
        }
        self._engine = engine
        descriptor = SegmentDescriptor.decode(message.segment)
        if _is_known(engine, descriptor.name):  # a trainer's must not stand for a peer's, to which KV goes
            raise InvalidRequest.of("segment", descriptor.name[:80], "another segment of this name is in use here")
        largest = max(info.nbytes for info in self.tensors.values())
        self._bounce = engine.allocate(min(BOUNCE_BYTES, largest))
        try:
            self._segment = engine.open_segment(descriptor)
        except BaseException:
            engine.unregister_memory(self._bounce)
            raise

    def check_mtp(self) -> None:
        raise CheckpointError(
            "a trainer's tensors are those of the model alone, without an MTP head", field="speculate"
        )

    def info(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def raw(self, name: str) -> memoryview:
        info, bounce = self.tensors[name], self._bounce
        assert bounce.memory is not None
        read = memoryview(bytearray(info.nbytes))
        for at in range(0, info.nbytes, bounce.length):
            size = min(bounce.length, info.nbytes - at)
            self._read(info.offset + at, size)
            read[at : at + size] = bounce.memory[:size]
        return read

    def _read(self, offset: int, size: int) -> None:
        """Reads a piece into the bounce buffer. Raises TransferError."""
        engine = self._engine
        batch = engine.allocate_batch(1)
        try:
            engine.submit(batch, [TransferRequest(Opcode.READ, self._bounce.address, self._segment, offset, size)])
            if not engine.wait_sync(batch, READ_TIMEOUT_S):
                engine.cancel(batch)
                raise TransferError(f"{self._segment} has not sent {size} bytes within {READ_TIMEOUT_S:.0f} s")
            status = engine.status(batch, 0)
            if status.state is not TransferState.COMPLETED:
                raise TransferError(f"{self._segment}: reading {size} bytes: {status.cause or status.state.value}")
        finally:
            engine.free_batch(batch)

    def release(self, name: str) -> None:
        """Nothing is kept here: what was read lives as long as its views."""

    def close(self) -> None:
        self._engine.close_segment(self._segment)
        self._engine.unregister_memory(self._bounce)


def _is_known(engine: TransferEngine, name: str) -> bool:
    """Says whether `name` is that of this engine's own segment, or of one that is open."""
    if name == engine.local_descriptor().name:
        return True
    try:
        engine.rails(name)
    except TransferError:
        return False
    return True


class WeightsWorker:
    """Carries out PrepareWeights, ApplyWeights and DropWeights on the rank's main thread. `busy` says whether a step
    may still run; `between` is called after each layer."""

    def __init__(
        self,
        runner: Runner,
        engine: TransferEngine,
        busy: Callable[[], bool],
        send: Callable[[m.ToFront], None],
        between: Callable[[], None],
    ) -> None:
        self._runner, self._engine, self._busy, self._send, self._between = runner, engine, busy, send, between
        self._ticket = 0
        self._source: TensorSource | None = None
        self._update: WeightsUpdate | None = None

    def handle(self, message: m.PrepareWeights | m.ApplyWeights | m.DropWeights) -> None:
        match message:
            case m.PrepareWeights():
                self.close()
                try:
                    self._prepare(message)
                except Exception as error:  # whatever a folder or a trainer's tensors hold, the old weights serve on
                    self.close()
                    known = error if isinstance(error, KvmeshError) else None
                    if known is None:
                        log.exception("new weights cannot be opened")
                        known = InternalError(f"new weights cannot be opened: {error or type(error).__name__}")
                    self._send(m.WeightsPrepared(message.ticket, known.message, known.code, known.field or ""))
                else:
                    self._send(m.WeightsPrepared(message.ticket))
            case m.ApplyWeights(ticket):
                self._apply(ticket)
            case m.DropWeights(ticket):
                if ticket == self._ticket:
                    self.close()

    def _prepare(self, message: m.PrepareWeights) -> None:
        config = self._runner.config
        if message.segment:
            self._source = TrainerTensors(self._engine, message, config)
        else:
            self._source = open_weights(message.path, config, config.max_context_tokens)
        self._update = self._runner.new_weights(self._source)
        self._update.check()
        self._ticket = message.ticket

    def _apply(self, ticket: int) -> None:
        start = time.monotonic_ns()
        moved, why_not = 0, ""
        try:
            if self._update is None or ticket != self._ticket:
                raise InternalError(f"weights {ticket} were not prepared here")
            if self._busy():
                raise InternalError("a request is in the batch")
            memory = self._runner.weights_memory
            memory.restore(self._between)  # where they were released in a sleep
            moved = self._update.apply(self._between)
            memory.written()
        except Exception as error:
            if not isinstance(error, KvmeshError):
                log.exception("taking new weights failed")
            why_not = str(error) or type(error).__name__
        self.close()
        self._send(m.WeightsApplied(ticket, moved, start, time.monotonic_ns(), why_not))

    def close(self) -> None:
        """Lets the weights go that were prepared."""
        source, self._source, self._update, self._ticket = self._source, None, None, 0
        if source is not None:
            source.close()
