"""Says in vLLM's own log what did not move and why: a failure that lasts must not look like a pool that is empty."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from kvmesh.errors import KvmeshError

log = logging.getLogger("vllm.kvmesh")  # vLLM's own handlers show it

AGAIN_S = 60.0


@dataclass(slots=True)
class _Told:
    at: float
    since: int = 0  # failures that were not told


def with_store(error: KvmeshError, store: str) -> str:
    """Returns why a whole call to the pool failed, which is mostly that no master answers, with the setting to look
    at."""
    return f"{error.message}; store={store!r} in kv_connector_extra_config"


class FailureLog:
    """Logs failures as warnings: the first one of a kind, and then one in AGAIN_S, with how many there were meanwhile.
    Its methods are thread-safe. `kind` is one of few texts, as each is remembered."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}
        self._lock = threading.Lock()

    def tell(self, kind: str, why: str, now: float) -> None:
        """Logs a failure unless one of its kind was logged a moment ago."""
        with self._lock:
            told = self._told.get(kind)
            if told is not None and now - told.at < AGAIN_S:
                told.since += 1
                return
            since = told.since if told is not None else 0
            self._told[kind] = _Told(now)
        more = f" ({since} more since the last time this was said)" if since else ""
        log.warning("KvmeshConnector: %s: %s%s", kind, why, more)
