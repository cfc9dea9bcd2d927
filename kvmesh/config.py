"""Service configuration base; the loader joins it (see docs/structures.md)."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What every service can be told."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=0, metadata={"help": "gRPC port; 0 picks a free one."})
    metrics_port: int = field(default=0, metadata={"help": "Prometheus port; 0 picks a free one."})
    node_id: str = field(default_factory=socket.gethostname, metadata={"help": "Name of this machine."})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error."})
    trace_dir: str = field(default="", metadata={"help": "Folder for spans as JSON lines; empty: none."})
    otlp_endpoint: str = field(default="", metadata={"help": "OTLP gRPC collector, e.g. http://127.0.0.1:4317."})
    ready_file: str = field(default="", metadata={"help": "Written as JSON once the service accepts calls."})
