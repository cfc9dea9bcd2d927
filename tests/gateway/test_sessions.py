"""Sessions by themselves, where an end meets a beginning."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.rpc.pb import common_pb2, decode_pb2
from kvmesh.services.gateway.sessions import Sessions
from kvmesh.services.gateway.text.completion import Alternatives
from tests.gateway.conftest import seen
from tests.support.gateway.scripted import Decode, Run


class Listener:
    """A Sink that remembers how it ended."""

    def __init__(self) -> None:
        self.failed: KvmeshError | None = None

    def on_prefilled(
        self, cached_tokens: int, timings: common_pb2.StageTimings, scores: common_pb2.PromptLogprobs | None
    ) -> None: ...

    def on_token(self, token_id: int, token_index: int, logprobs: Alternatives | None) -> None: ...

    def on_finished(self, finished: decode_pb2.Finished) -> None: ...

    def on_failed(self, err: KvmeshError, *, at_decode: bool) -> None:
        self.failed = err


async def silent(run: Run) -> None:
    await asyncio.Event().wait()


async def test_who_waits_for_a_session_hears_of_the_end() -> None:
    mute = socket.create_server(("127.0.0.1", 0))
    host, port = mute.getsockname()
    sessions = Sessions("gateway-1", 1, timeout_s=30)
    ref = common_pb2.InstanceRef(instance_id="decode-0", incarnation=1, address=f"{host}:{port}")
    waiting = asyncio.create_task(sessions.get(ref))
    await seen(lambda: sessions._opening)
    await sessions.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await asyncio.wait_for(waiting, 30)
    mute.close()


async def test_closing_ends_a_session_that_another_has_replaced() -> None:
    """The instance was away for a moment and is back: its first session still has a request."""
    decode = Decode("decode-0", silent)
    await decode.start()
    sessions, listener = Sessions("gateway-1", 1, timeout_s=10), Listener()
    first = await sessions.get(decode.ref)
    first.start(listener, decode_pb2.StartRequest(request_id="r1"))
    await seen(lambda: decode.runs)
    sessions.keep_only(())
    second = await sessions.get(decode.ref)
    assert second is not first and first.error is None
    await sessions.close()
    assert isinstance(listener.failed, Unavailable)
    await asyncio.wait_for(decode.ended.wait(), 30)
    await decode.server.stop(0)
