"""A rank's part in a change of weights: it opens them, checks that it can take its part, and takes it when all can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvmesh.engine.runner import Runner
from kvmesh.engine.tensor_sources import RemoteSource, TensorSource
from kvmesh.engine.weights_update import WeightsUpdate
from kvmesh.errors import InternalError, KvmeshError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.weights_sources import ObjectTensors, WeightsLimits, open_source
from kvmesh.transfer import TransferEngine

log = logging.getLogger("kvmesh.rank")


class WeightsWorker:
    """Carries out PrepareWeights, ApplyWeights and DropWeights on the rank's main thread. `busy` says whether a step
    may still run; `between` is called after each layer."""

    def __init__(
        self,
        runner: Runner,
        engine: TransferEngine,
        limits: WeightsLimits,
        busy: Callable[[], bool],
        send: Callable[[m.ToFront], None],
        between: Callable[[], None],
    ) -> None:
        self._runner, self._engine, self._limits = runner, engine, limits
        self._busy, self._send, self._between = busy, send, between
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
                    versions = self._source.versions if isinstance(self._source, ObjectTensors) else ""
                    self._send(m.WeightsPrepared(message.ticket, versions=versions))
            case m.ApplyWeights(ticket, within_s):
                if isinstance(self._source, RemoteSource):
                    self._source.until = time.monotonic() + within_s
                self._apply(ticket)
            case m.DropWeights(ticket):
                if ticket == self._ticket:
                    self.close()

    def _prepare(self, message: m.PrepareWeights) -> None:
        config = self._runner.config
        self._source = open_source(message, config, self._engine, self._limits)
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
            if isinstance(self._source, RemoteSource):
                log.info("new weights: %d bytes read, %d written", self._source.nbytes_read, moved)
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
