"""How a queue pair ends: destroyed; or, when the driver fails, stopped, and destroyed later; or an error with a name.

destroy ─▶ destroyed                       nothing lands any more
   └ fails ─▶ ERR ─▶ stopped, kept         nothing lands any more; destroying is tried again at the next chance
               └ fails ─▶ device gone?     the kernel has destroyed all of it
                            └ no ─▶ TransferError: it may still land something; try again
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvmesh.errors import TransferError

log = logging.getLogger(__name__)

GONE_WITHIN_S = 0.5  # from the first call that a removed device refuses until the kernel is through with removing it
_LOOK_S = 0.002


class Made(Protocol):
    """pyverbs' QP: `close` destroys it, may be called again when that failed, and does nothing once it has worked."""

    qp_num: int

    def close(self) -> None: ...


class Endings:
    """Of one NIC's queue pairs. Thread-safe.

    `stop` modifies a queue pair to ERR (OSError), `is_gone` says whether the kernel has removed the device, `error` is
    what pyverbs raises.
    """

    def __init__(
        self, name: str, error: type[Exception], stop: Callable[[int], None], is_gone: Callable[[], bool]
    ) -> None:
        self.name = name
        self._error = error
        self._stop = stop
        self._is_gone = is_gone
        # Destroying waits until every event of the queue pair that was read is acknowledged, and pyverbs waits with
        # the GIL held: no event may be between the two while we are in there. Whoever reads events holds it, too.
        self.events_lock = threading.Lock()
        self._lock = threading.Lock()
        # What is not destroyed is kept here: pyverbs would try it by itself once nobody has it, without that lock.
        self._stopped: dict[Made, Callable[[], None]] = {}
        self._alive: set[Made] = set()

    def end(self, made: Made, pointer: int, freed: Callable[[], None]) -> None:
        """When it returns, the NIC neither reads nor writes memory for this queue pair; `freed` is called when it is
        destroyed, which may be later. TransferError when it can be neither destroyed nor stopped: call it again."""
        with self._lock:
            self._again()
            cause = self._destroy(made)
            if cause and self._stop_it(made, pointer, cause):
                self._stopped[made] = freed
            else:
                freed()
            self._alive.discard(made)

    def again(self) -> None:
        """Tries to destroy what could not be destroyed before."""
        if self._stopped or self._alive:
            with self._lock:
                self._again()

    # ── lock held ─────────────────────────────────────────────────────────────────────────────────

    def _again(self) -> None:
        self._alive = {made for made in self._alive if self._destroy(made)}
        ended = [made for made in self._stopped if not self._destroy(made) or self._is_gone()]
        for made in ended:
            self._stopped.pop(made)()

    def _destroy(self, made: Made) -> str:
        """ "" or why it failed."""
        with self.events_lock:
            try:
                made.close()
            except self._error as err:
                return str(err) or type(err).__name__
        return ""

    def _stop_it(self, made: Made, pointer: int, cause: str) -> bool:
        """False: the kernel has removed the device, and the queue pair with it. TransferError when it is alive."""
        try:
            self._stop(pointer)
        except OSError as err:
            removed = err.errno in (errno.EIO, errno.ENODEV)
            if self._gone_within(GONE_WITHIN_S if removed else 0.0):
                return False
            self._alive.add(made)
            raise TransferError(
                f"rdma: {self.name}: queue pair {made.qp_num} is not destroyed ({cause}) and not stopped ({err})",
                field="nics",
            ) from err
        log.warning("%s: queue pair %d is stopped, but not destroyed: %s", self.name, made.qp_num, cause)
        return True

    def _gone_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._is_gone():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True
