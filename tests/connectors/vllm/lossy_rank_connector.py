"""KvmeshConnector of which one rank cannot load, while there is a file that FAULT_FILE names. vLLM loads it by
`kv_connector_module_path`; all else is the product's. The file is JSON:

    rank    which rank fails; null: none
    block   what is from here on in an order is removed from the pool when that rank begins to load it; null: prefill
            refuses that rank's pushes, as it shows another ticket
    last    which rank tells the end of its load some steps after the other one
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmesh.connectors.vllm.book import LoadOrder
from kvmesh.connectors.vllm.connector import KvmeshConnector
from kvmesh.connectors.vllm.keys import part_key
from kvmesh.connectors.vllm.mover import LoadResults, PageMover
from kvmesh.connectors.vllm.push.arrivals import ReceivedPages
from kvmesh.connectors.vllm.push.receiver import PageReceiver
from kvmesh.connectors.vllm.push.worker import PushWorker

__all__ = ["KvmeshConnector"]

FAULT_FILE = Path(os.environ["FAULT_FILE"])
STEPS_APART = 3

_load, _prompt = PageMover.load, PageReceiver._prompt


def _fault() -> dict[str, Any]:
    return json.loads(FAULT_FILE.read_text()) if FAULT_FILE.exists() else {}


def _told(rank: int) -> Path:
    """Has a line for each load whose end a rank has told: where from, and how many pages have no content."""
    return FAULT_FILE.with_suffix(f".rank{rank}")


def _lossy_load(self: PageMover, order: LoadOrder) -> None:
    fault = _fault()
    if fault.get("rank") == self._rank and fault["block"] is not None:
        parts = len(self.parts)
        keys = order.keys[fault["block"] :]
        self._client.remove(*(part_key(key, self._rank, self._ranks, at, parts) for key in keys for at in range(parts)))
    _load(self, order)


def _refused_prompt(self: PageReceiver, source: Any) -> Any:
    prompt = _prompt(self, source)
    fault = _fault()
    if fault.get("rank") == self._rank and fault["block"] is None:
        prompt.ticket = bytes(len(prompt.ticket))
    return prompt


def _apart(
    poll: Callable[[Any], Any], rank_of: Callable[[Any], int], nothing: Any, source: str
) -> Callable[[Any], Any]:
    """Returns `poll`, whose result one rank has some steps after the other one. All ranks poll once a step."""
    polled = 0

    def apart(self: Any) -> Any:
        nonlocal polled
        fault, rank = _fault(), rank_of(self)
        if fault.get("last") == rank:
            polled += _told(1 - rank).exists()
            if polled <= STEPS_APART:
                return nothing
        over = poll(self)
        loads = getattr(over, "request_ids", None) or getattr(over, "orders", None)
        if fault and loads:
            polled = 0
            with _told(rank).open("a") as told:
                told.write(f"{source} {len(over.failed_pages)}\n")
        return over

    return apart


def _receiver_rank(self: PushWorker) -> int:
    assert self._receiver is not None
    return self._receiver._rank


PageMover.load = _lossy_load  # type: ignore[method-assign]
PageReceiver._prompt = _refused_prompt  # type: ignore[method-assign]
PageMover.poll = _apart(  # type: ignore[method-assign]
    PageMover.poll, lambda self: int(self._rank), LoadResults(), "pool"
)
PushWorker.poll = _apart(PushWorker.poll, _receiver_rank, ReceivedPages(), "push")  # type: ignore[method-assign]
