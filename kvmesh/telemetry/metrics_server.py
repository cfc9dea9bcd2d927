"""The HTTP server of a service's metrics port: `/metrics`, `/live` and `/ready`, from a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from kvmesh.rpc.errors import ConfigError
from kvmesh.telemetry import readiness

_TEXT = ("Content-Type", "text/plain; charset=utf-8")
_STATUS = {200: "200 OK", 503: "503 Service Unavailable"}
_CLOSE_S = 5.0


class _Quiet(WSGIRequestHandler):
    """Probes come every few seconds: no line each."""

    def log_message(self, format: str, *args: Any) -> None:  # the base class's own name
        return


def serve(host: str, port: int, registry: Any) -> tuple[int, Callable[[], None]]:
    """Listen; returns the bound port and what closes it. Every path that is no probe's shows `registry`.

    ConfigError naming the port when it is in use."""
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        probed = readiness.PROCESS.answer(environ["PATH_INFO"], time.monotonic())
        if probed is None:
            return cast(Iterable[bytes], metrics(environ, start))
        start(_STATUS[probed[0]], [_TEXT])  # a list of its own: the server adds to it
        return [probed[1].encode() + b"\n"]

    try:
        server = make_server(host, port, app, _server_class(host), handler_class=_Quiet)
    except OSError as err:
        why = "the port is in use" if err.errno == 98 else (err.strerror or str(err))
        raise ConfigError(f"metrics_port={port}: {why} on {host}", field="metrics_port") from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(_CLOSE_S)

    return int(server.server_port), close


def _server_class(host: str) -> type[ThreadingWSGIServer]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    class Server(ThreadingWSGIServer):
        address_family = family

    return Server
