"""Speaks HTTP with one engine. Every await has a deadline, and what is read is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

from kvmesh.errors import BodyTooLarge, InternalError, KvmeshError, Unavailable
from kvmesh.external.engine_protocol import (
    EngineInterface,
    EngineLoad,
    EngineModel,
    EventLines,
    error_of,
    load_of,
    model_of,
    shown,
)

MAX_BODY_BYTES = 4 << 20  # of anything but a stream
MAX_ERROR_BYTES = 64 << 10
SPARE_CONNECTIONS = 8


class EngineLost(Unavailable):
    """The connection to an engine broke or was refused, which is not the same as no answer in time. Peers see
    `unavailable`."""


class EngineClient:
    """The connections to one engine. Raises Unavailable where it cannot be reached, and what `error_of` names."""

    def __init__(self, url: str, *, api_key: str, timeout_s: float, max_running: int) -> None:
        self.url = url
        self._timeout_s = timeout_s
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=timeout_s, write=timeout_s, pool=timeout_s),
            limits=httpx.Limits(max_connections=max_running + SPARE_CONNECTIONS, max_keepalive_connections=32),
            trust_env=False,  # no proxy stands between a mesh and its engines
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def model(self, wanted: str) -> EngineModel:
        """Asks which model it serves; see `model_of`."""
        return model_of(await self._whole("GET", "/v1/models"), wanted)

    async def load(self, model: str) -> EngineLoad:
        """Reads its /metrics; see `load_of`."""
        return load_of((await self._whole("GET", "/metrics")).decode("utf-8", "replace"), model)

    async def interface(self) -> EngineInterface:
        """Finds out by which interface it takes token ids. An empty body is refused by one that knows the path, and
        costs no engine anything. Raises InternalError where it has neither."""
        closed: KvmeshError | None = None
        for one in EngineInterface:
            status, body = await self._ask("POST", one.value, b"{}")
            if status == 403:  # vLLM has /inference/v1/generate with --enable-scale-out alone
                closed = closed or error_of(status, body)
            elif status == 401 or status >= 500:
                raise error_of(status, body)
            elif status not in (404, 405):
                return one
        if closed is not None:
            raise closed
        paths = " nor ".join(one.value for one in EngineInterface)
        raise InternalError(f"the engine at {self.url} has neither {paths}: nothing that takes token ids")

    async def _whole(self, method: str, path: str) -> bytes:
        """Returns the body of an answer 200."""
        status, body = await self._ask(method, path, None)
        if status != 200:
            raise error_of(status, body)
        return body

    async def _ask(self, method: str, path: str, content: bytes | None) -> tuple[int, bytes]:
        headers = _JSON if content else {}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream(method, path, content=content, headers=headers) as answer,
            ):
                most = MAX_BODY_BYTES if answer.status_code == 200 else MAX_ERROR_BYTES
                return answer.status_code, await _bounded(answer, most)
        except TimeoutError:
            raise Unavailable(f"the engine at {self.url} did not answer {path} within {self._timeout_s:g} s") from None
        except httpx.HTTPError as err:
            raise self._lost(err) from None

    @contextlib.asynccontextmanager
    async def stream(self, interface: EngineInterface, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Asks for an answer; yields its events. Leaving the context closes the stream, and an engine that still
        generates stops. Whoever reads sets the deadlines."""
        try:
            async with self._http.stream("POST", interface.value, content=orjson.dumps(body), headers=_JSON) as answer:
                if answer.status_code != 200:
                    async with asyncio.timeout(self._timeout_s):
                        told = await _bounded(answer, MAX_ERROR_BYTES)
                    raise error_of(answer.status_code, told)
                yield self._events(answer)
        except httpx.HTTPError as err:
            raise self._lost(err) from None

    async def _events(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        lines = EventLines()
        async for data in answer.aiter_bytes():
            for event in lines.feed(data):
                yield event

    def _lost(self, err: httpx.HTTPError) -> Unavailable:
        if isinstance(err, httpx.TimeoutException):  # a connection that is not there yet may only be slow
            return Unavailable(f"the engine at {self.url} took no connection within {self._timeout_s:g} s")
        why = shown(str(err), quoted=False) or type(err).__name__
        return EngineLost(f"the engine at {self.url} cannot be reached: {type(err).__name__}: {why}")


_JSON = {"content-type": "application/json"}


async def _bounded(answer: httpx.Response, most: int) -> bytes:
    body = bytearray()
    async for data in answer.aiter_bytes():
        body += data
        if len(body) > most:
            raise BodyTooLarge(f"the engine's answer has more than {most} bytes")
    return bytes(body)
