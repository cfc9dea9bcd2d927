"""KvmeshConnector whose worker freezes itself in the middle of a push, once, when the file that STRIKE_FILE names is
there. vLLM loads it by `kv_connector_module_path`; all else is the product's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from kvmesh.connectors.vllm.connector import KvmeshConnector
from kvmesh.connectors.vllm.push.staging import WorkerPages

__all__ = ["KvmeshConnector"]

STRIKE_FILE = Path(os.environ["STRIKE_FILE"])
COPIES = 9  # of the push's blocks; eight fit into one window

_copy_out = WorkerPages.copy_out
_copied = 0


def _striking(self: WorkerPages, page: int, block: Any) -> None:
    global _copied
    _copy_out(self, page, block)
    if STRIKE_FILE.exists():
        _copied += 1
        if _copied == COPIES:
            STRIKE_FILE.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)


WorkerPages.copy_out = _striking  # type: ignore[method-assign]
