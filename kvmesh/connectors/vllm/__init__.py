"""KvmeshConnector: vLLM keeps prefixes in kvmesh's Store (docs/howto/vllm-connector.md, docs/adr/0059-*.md).

    scheduler   RequestBook decides what to look up, load and save; HeldLookups asks the store master beside it
    worker      PageMover loads into pages between steps and saves out of them, by threads of its own

Only `connector` imports vllm; it is imported when somebody asks for the class, so all else is used and tested without.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KvmeshConnector":
        from kvmesh.connectors.vllm.connector import KvmeshConnector

        return KvmeshConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
