"""A real Envoy as a process, with the configuration of compose/envoy/picker.yaml on free ports."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.paths import ROOT
from tests.support.services import until

CONFIG = ROOT / "compose" / "envoy" / "picker.yaml"
PROGRAM = "ENVOY_BINARY"  # the variable that names it
READY_S = 60.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


class Envoy:
    """Owns the process; `kill` and `start` may be called again and again."""

    def __init__(self, folder: Path, picker: str, endpoints: Sequence[str], body_mode: str) -> None:
        self.port = free_port()
        config = yaml.safe_load(CONFIG.read_text())
        resources = config["static_resources"]
        (listener,) = resources["listeners"]
        listener["address"] = _address(f"127.0.0.1:{self.port}")
        clusters = {one["name"]: one["load_assignment"]["endpoints"][0] for one in resources["clusters"]}
        clusters["picker"]["lb_endpoints"] = [{"endpoint": {"address": _address(picker)}}]
        clusters["models"]["lb_endpoints"] = [{"endpoint": {"address": _address(one)}} for one in endpoints]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"][0]["typed_config"]["processing_mode"]["request_body_mode"] = body_mode
        if body_mode != "FULL_DUPLEX_STREAMED":
            manager["http_filters"][0]["typed_config"]["processing_mode"]["request_trailer_mode"] = "SKIP"
        self._config = folder / "envoy.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self.log = folder / "envoy.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Envoy:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Starts it and waits until a request passes."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                os.environ[PROGRAM], "-c", str(self._config), "--use-dynamic-base-id", "--concurrency", "1",
                "-l", "warning", stdout=log, stderr=log,
            )  # fmt: skip

        async def passes() -> bool:
            assert self._process is not None and self._process.returncode is None, self.log.read_text()[-4000:]
            async with httpx.AsyncClient() as client:
                try:
                    return (await client.get(f"{self.url}/v1/models", timeout=5)).status_code == 200
                except httpx.HTTPError:
                    return False

        await until(passes, READY_S)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
