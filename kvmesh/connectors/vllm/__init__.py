"""KvmeshConnector: vLLM keeps prefixes in kvmesh's Store, and prefill engines push prompts to decode engines
(docs/howto/vllm-connector.md, docs/adr/0059-*.md, docs/adr/0063-*.md).

    scheduler   RequestBook decides what to look up, load, save and hand over; HeldLookups asks the master beside it
    worker      PageMover loads into pages between steps and saves out of them, by threads of its own
                PushWorker holds pages (HeldPages), pushes (PageSender) and receives (PageArrivals, PageReceiver)

Only `connector` imports vllm; it is imported when somebody asks for the class, so all else is used and tested without.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KvmeshConnector":
        from kvmesh.connectors.vllm.connector import KvmeshConnector

        return KvmeshConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
