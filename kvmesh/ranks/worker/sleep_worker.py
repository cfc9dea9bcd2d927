"""A rank's part in a sleep: it gives the memory of pages and weights back, and has it again when it is woken."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable

import torch

from kvmesh.engine.checkpoint import Checkpoint
from kvmesh.engine.runner import Runner
from kvmesh.errors import CheckpointError, InternalError, KvmeshError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import DeviceMemory
from kvmesh.transfer import TransferEngine

log = logging.getLogger("kvmesh.rank")


class SleepWorker:
    """Carries out PrepareSleep, FallAsleep and WakeUp on the rank's main thread. `busy` says whether a step or a push
    may still run, `settle` ends the copies that were asked for, `use_pages` has the runner compute over the pages that
    there are now, `checkpoint` is what the rank was started with and `reopen` opens it again."""

    def __init__(
        self,
        runner: Runner,
        memory: DeviceMemory,
        engine: TransferEngine,
        checkpoint: Checkpoint,
        reopen: Callable[[], Checkpoint],
        busy: Callable[[], bool],
        settle: Callable[[], None],
        use_pages: Callable[[], None],
        ready: Callable[[], m.Ready],
        send: Callable[[m.ToFront], None],
        between: Callable[[], None],
    ) -> None:
        self._runner, self._memory, self._engine = runner, memory, engine
        self._checkpoint, self._reopen = checkpoint, reopen
        self._busy, self._settle, self._use_pages, self._ready = busy, settle, use_pages, ready
        self._send, self._between = send, between
        self._prepared = False
        self.asleep = False

    def handle(self, message: m.PrepareSleep | m.FallAsleep | m.WakeUp) -> None:
        match message:
            case m.PrepareSleep(ticket, keep):
                self._send(m.SleepPrepared(ticket, self._try("prepare a sleep", lambda: self._prepare(keep))))
            case m.FallAsleep(ticket, keep):
                self._send(m.Asleep(ticket, *self._fall_asleep(keep)))
            case m.WakeUp(ticket):
                why_not = self._try("wake", self._wake)
                self._send(m.Awake(ticket, None if why_not else self._ready(), why_not))

    def _try(self, what: str, do: Callable[[], None]) -> str:
        """Returns why it could not be done; "" if it was."""
        try:
            do()
        except Exception as error:  # no room, most likely: whoever ordered it decides what comes next
            if not isinstance(error, KvmeshError):
                log.exception("the rank could not %s", what)
            return str(error) or type(error).__name__
        return ""

    def _prepare(self, keep: bool) -> None:
        if self.asleep or self._prepared:
            return
        if self._busy():
            raise InternalError("a request is in the batch, or a push under way")
        self._settle()
        self._runner.weights_memory.save(keep, self._between)
        try:
            self._memory.withdraw_pages(self._engine)
        except BaseException:
            self._runner.weights_memory.forget()
            raise
        self._prepared = True

    def _fall_asleep(self, keep: bool) -> tuple[int, int]:
        if not (self.asleep or self._prepared):
            raise InternalError("a sleep was ordered that was not prepared")
        pages = 0
        if not self.asleep:
            pages = self._memory.page_blocks.data.nbytes
            self._release_pages()
        weights = self._runner.weights_memory.release(keep)
        self._prepared, self.asleep = False, True
        self._give_back()
        log.info("asleep: %d MiB of pages and %d MiB of weights given back", pages >> 20, weights >> 20)
        return pages, weights

    def _release_pages(self) -> None:
        self._runner.leave_pages()
        self._memory.release_pages()

    def _wake(self) -> None:
        if self._prepared:  # another rank could not: what is registered no more is made anew
            self._release_pages()
            self._prepared, self.asleep = False, True
        if not self.asleep:
            return
        weights = self._runner.weights_memory
        try:
            if not weights.restore(self._between):
                self._read_weights()
            self._memory.restore_pages(self._engine)
            try:
                self._memory.page_blocks.data.zero_()  # a first write to shared memory costs a fault for each 4 KiB
                self._use_pages()
                self._memory.open_pages(self._engine)
            except BaseException:
                self._memory.withdraw_pages(self._engine)
                self._release_pages()
                raise
        finally:
            self._give_back()
        self.asleep = False

    def _read_weights(self) -> None:
        """Has the weights that the rank was started with again. Raises CheckpointError where they are others by now:
        the keys of blocks name them by their fingerprint."""
        with self._reopen() as source:
            hashed = source.begin_fingerprint()
            update = self._runner.new_weights(source)
            update.check()
            update.apply(self._between)
            hashed.result().check()
            if source.fingerprint != (served := self._checkpoint.fingerprint):
                text = f"{source.path}: has other weights ({source.fingerprint[:12]}) than are served ({served[:12]})"
                raise CheckpointError(text, field="model")
        self._runner.weights_memory.written()

    def _give_back(self) -> None:
        """Has torch and the C library give memory that nobody uses back to driver and kernel."""
        gc.collect()
        if self._memory.device.type == "cuda":
            torch.cuda.empty_cache()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
            trim(0)
