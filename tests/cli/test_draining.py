"""`kvmesh cordon --drain`: how far it is, that it ends, and that nothing is called drained which is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvmesh.cli import cordon, draining
from kvmesh.cli.app import app
from kvmesh.cli.draining import DrainEnd, DrainLook, end_of
from kvmesh.errors import Unavailable, UnknownInstance
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.rpc.status import abort
from tests.conductor.peers.test_leadership import conductor, config
from tests.conductor.test_service import beat
from tests.support.store.mesh import joining


def watching(*looks: DrainLook, timeout_s: float = 60.0) -> tuple[str, list[str]]:
    """The last line, and those before it; time passes in looks alone."""
    left, now, told = list(looks), [0.0], []

    async def look() -> DrainLook:
        return left.pop(0) if len(left) > 1 else left[0]

    async def pause(seconds: float) -> None:
        now[0] += seconds

    try:
        line = asyncio.run(draining.watch("p0", look, told.append, timeout_s, clock=lambda: now[0], pause=pause))
    except Unavailable as error:
        return f"error: {error.message}", told
    return line, told


BUSY = DrainLook(2, 31, takers=1)
FULL = DrainLook(0, 31, why_not="no other pool node has room or answers", takers=1)


def test_it_shows_what_is_left_and_ends_when_nothing_is() -> None:
    done = DrainLook(0, 0, 31, "", True, 1)
    line, told = watching(DrainLook(2, minded=False), BUSY, DrainLook(1, 20, 11, "", takers=1), done)
    assert line == "drained: p0 holds nothing that is not elsewhere; stop it"
    assert told == [
        "p0: 2 requests and blocks not counted yet",
        "p0: 2 requests and 31 blocks that no other has",
        "p0: 1 request and 20 blocks that no other has, 11 moved",
    ]


@pytest.mark.parametrize(
    ("looks", "error", "lines"),
    [
        (
            [FULL],
            "error: p0 is not drained after 2 s: 0 requests and 31 blocks that no other has: no other pool node has "
            "room or answers; the drain goes on, `kvmesh uncordon p0` ends it",
            4,
        ),
        (
            [BUSY, DrainLook(0, 31, why_not="nobody", takers=0)],
            "error: p0 has no request left, but 31 blocks are nowhere else and there is no pool node to take them: ",
            1,
        ),
        (
            [BUSY, DrainLook(1, minded=False)],
            "error: p0 is not drained: somebody has taken the drain back while 1 request and",
            1,
        ),
        (
            [BUSY, DrainLook(gone=True)],
            "error: p0 has left the mesh before it was drained: it had 2 requests and 31 blocks that no other has",
            1,
        ),
    ],
)
def test_what_is_not_drained_is_an_error_that_says_what_is_lost(looks: list[DrainLook], error: str, lines: int) -> None:
    line, told = watching(*looks, timeout_s=2.0)
    assert line.startswith(error)
    assert len(told) == lines


looks = st.builds(
    DrainLook,
    requests=st.integers(0, 2),
    blocks=st.one_of(st.none(), st.integers(0, 3)),
    why_not=st.sampled_from(("", "no room")),
    drained=st.booleans(),
    takers=st.one_of(st.none(), st.integers(0, 1)),
    minded=st.sampled_from((True, True, False, None)),
    gone=st.booleans(),
)


@given(looks, st.booleans())
def test_only_what_does_nothing_and_holds_nothing_alone_is_drained(look: DrainLook, began: bool) -> None:
    end = end_of(look, began)
    if end is DrainEnd.DRAINED:
        assert not look.requests and look.drained and look.minded and not look.gone
    if end is DrainEnd.NO_TAKER:
        assert not look.requests and look.blocks and look.takers == 0
    if look.minded is False and not began and not look.gone:
        assert end is None, "some conductor has yet to hear of it"


def test_requests_are_those_that_run_and_those_that_conductors_have_sent() -> None:
    def told(pending: int, **load: int) -> dict[str, Any]:
        return {"pending_requests": pending, "load": load}

    assert draining.requests_of([], {}) == 0
    assert draining.requests_of([told(0, queued_requests=1, running_requests=2, waiting_requests=3)], {}) == 6
    assert draining.requests_of([told(4, running_requests=2), told(3, running_requests=2)], {}) == 7
    assert draining.requests_of([told(0)], {"handoffs": 2, "pages_free": 9}) == 2


# ── with a conductor and a master ─────────────────────────────────────────────────────────────────


class Master(store_pb2_grpc.StoreMasterServicer):
    """A store master that leads and answers Drain as it is told to."""

    def __init__(self) -> None:
        self.answer: store_pb2.DrainResponse | None = store_pb2.DrainResponse()
        self.members = [joining("p0").member]
        self.asked: list[bool] = []

    async def Drain(self, request: store_pb2.DrainRequest, context: Any) -> store_pb2.DrainResponse:  # noqa: N802
        self.asked.append(request.cancel)
        if self.answer is None:
            await abort(context, UnknownInstance("instance_id='p0': is no member", field="instance_id"))
        assert self.answer is not None
        return self.answer

    async def ListMembers(self, request: Any, context: Any) -> store_pb2.ListMembersResponse:  # noqa: N802
        return store_pb2.ListMembersResponse(members=self.members)


@asynccontextmanager
async def master() -> AsyncIterator[tuple[Master, str]]:
    server, servicer = grpc.aio.server(), Master()
    store_pb2_grpc.add_StoreMasterServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer, address
    await server.stop(None)


async def test_looks_ask_conductors_and_the_master_that_these_name() -> None:
    async with master() as (store, address), conductor(config(None, store=address)) as one:
        await one.serve("p0", "p0.dp1", "d0")  # two places of one instance
        conductors = (one.service.address,)
        async with draining.looking("p0", conductors, "") as look:
            assert await look() == DrainLook(minded=False), "nobody has said that it drains"
            assert store.asked == [], "asking would begin it"
            drain = pb.CordonRequest(instance_id="p0", state=pb.CORDON_STATE_DRAINING)
            await cordon.tell(conductors, drain)
            await one.stub.Heartbeat(beat("p0", seq=2, queued_requests=2), timeout=10)
            await one.stub.Heartbeat(beat("p0.dp1", seq=2, queued_requests=1), timeout=10)
            store.answer = store_pb2.DrainResponse(sole_blocks=5, moved=2, why_not="full")
            assert await look() == DrainLook(3, 10, 4, "full", False, 0)
            for place in ("p0", "p0.dp1"):
                await one.stub.Heartbeat(beat(place, seq=3), timeout=10)
            store.answer, store.members = store_pb2.DrainResponse(done=True, moved=7), [joining("p0").member]
            store.members.append(joining("pool").member)
            store.members[-1].role = 4  # type: ignore[assignment]
            seen = await look()
            assert (seen.requests, seen.drained, seen.takers) == (0, True, 1)
            assert end_of(seen, began=True) is DrainEnd.DRAINED
            store.answer = None
            assert (await look()).gone
            await cordon.tell(conductors, pb.CordonRequest(instance_id="p0"))
            asked = len(store.asked)
            assert (await look()).minded is False and len(store.asked) == asked, "taken back: it is not begun again"
        async with draining.looking("p9", conductors, "") as look:
            assert (await look()).gone
        async with draining.looking("p0", ("127.0.0.1:1",), "") as look:
            assert await look() == DrainLook(why_not="no conductor answers", minded=None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(cordon, "_say", lambda *args: calls.append(args) or "open")
    monkeypatch.setattr(cordon, "_whom", lambda conductor, run_dir: (("127.0.0.1:1",), ""))
    return calls


def test_a_script_that_does_not_ask_for_it_waits_for_nothing(said: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "looking", lambda *args: pytest.fail("it waits"))
    cases = [("cordon", "--drain"), ("cordon", "--drain", "--no-wait"), ("cordon", "--wait"), ("drain", "--no-wait")]
    for command, *args in cases:
        done = CliRunner().invoke(app, [command, "p0", *args])
        assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1)


@pytest.mark.parametrize(
    ("look", "code", "shown"),
    [
        (DrainLook(0, 0, drained=True), 0, "drained: p0 holds nothing that is not elsewhere; stop it"),
        (FULL, 1, "p0 is not drained after 0.1 s"),
        (KeyboardInterrupt(), 130, "the drain of p0 goes on without this command"),
    ],
)
def test_the_command_ends_with_what_came_of_it(
    said: list[Any], monkeypatch: pytest.MonkeyPatch, look: Any, code: int, shown: str
) -> None:
    @asynccontextmanager
    async def looking(*args: Any) -> AsyncIterator[Any]:
        async def once() -> DrainLook:
            if isinstance(look, BaseException):
                raise look
            found: DrainLook = look
            return found

        yield once

    monkeypatch.setattr(draining, "looking", looking)
    for command in (["cordon", "p0", "--drain"], ["drain", "p0"]):
        done = CliRunner().invoke(app, [*command, "--wait", "--timeout", "0.1"])
        assert done.exit_code == code
        assert shown in done.output
        assert done.stdout.startswith("p0: draining (was open)\n")
    assert [one[:2] for one in said] == [("p0", 2)] * 2, "each begins the drain once, and never ends it"
