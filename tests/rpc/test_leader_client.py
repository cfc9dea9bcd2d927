"""Which of several masters to ask, against masters that lead, stand by, send us round, or are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cli.up.plan import Ports
from kvmesh.errors import (
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    KvmeshError,
    NotLeader,
    StaleTerm,
    Unavailable,
)
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import doors_pb2_grpc
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server
from kvmesh.rpc.terms import LeaderTerms
from kvmesh.storeclient.directory import Directory
from tests.support.fastpath_service import Swallows
from tests.support.services import until

STORE = pb.DESCRIPTOR.services_by_name["StoreMaster"]
A, B, C = "a:1", "b:1", "c:1"


def masters() -> LeaderTracker:
    return LeaderTracker(f"{A}, {B},{C},{A}")


@pytest.mark.parametrize("text", ["", " , "])
def test_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="store="):
        LeaderTracker(text)


def test_each_is_tried_once_before_a_pause() -> None:
    made = masters()
    asked = []
    for _ in range(2):
        pauses = []
        for _ in range(3):
            asked.append(made.current)
            pauses.append(made.failed())
        assert pauses == [False, False, True]
    assert asked == [A, B, C, A, B, C]


def test_a_success_stays_and_begins_a_new_round() -> None:
    made = masters()
    made.failed()
    made.succeeded(4)
    assert made.current == B and made.terms.highest == 4
    assert [made.failed(), made.failed(), made.failed()] == [False, False, True]


def test_who_stands_by_names_the_leader_wherever_it_is() -> None:
    made = masters()
    assert not made.redirected(C) and made.current == C
    made.succeeded(1)
    assert not made.redirected("other:9") and made.current == "other:9"
    made.failed()
    assert made.current in (A, B)


def test_two_that_name_each_other_do_not_send_us_round() -> None:
    made = masters()
    assert not made.redirected(B)
    assert not made.redirected(A) and made.current == C
    assert made.redirected(B), "all were asked"


def test_an_answer_of_yesterday_is_a_failure() -> None:
    terms = LeaderTerms()
    made, other = LeaderTracker(f"{A},{B}", terms), LeaderTracker(f"{A},{B}", terms)
    other.succeeded(7)
    with pytest.raises(StaleTerm, match=r"6.*7"):
        made.succeeded(6)
    assert made.current == B
    terms.check(7)
    with pytest.raises(StaleTerm):
        terms.check(6)


outcome = st.sampled_from(["fail", "ok", "unknown", A, B, C, "x:1", "y:1"])


@given(st.lists(outcome, max_size=60))
def test_nobody_is_forgotten(outcomes: list[str]) -> None:
    """Between two pauses or successes no address is asked twice, and before a pause every one of the list is asked."""
    made = masters()
    asked: list[str] = []
    for each in outcomes:
        assert made.current not in asked
        asked.append(made.current)
        if each == "ok":
            made.succeeded()
            asked.clear()
        elif made.failed() if each == "fail" else made.redirected("" if each == "unknown" else each):
            assert {A, B, C} <= set(asked)
            asked.clear()


class Servicer(pb_grpc.StoreMasterServicer):
    """Answers with a term, or raises."""

    def __init__(self, says: int | KvmeshError) -> None:
        self.says = says
        self.calls = 0

    async def GetStatus(self, request: pb.GetStoreStatusRequest, context: Any) -> pb.GetStoreStatusResponse:  # noqa: N802
        if isinstance(self.says, NotLeader):
            return pb.GetStoreStatusResponse(leader=self.says.leader)
        return pb.GetStoreStatusResponse(leading=True, blocks=7)

    async def Grant(self, request: pb.GrantRequest, context: Any) -> pb.GrantResponse:  # noqa: N802
        self.calls += 1
        if isinstance(self.says, KvmeshError):
            raise self.says
        return pb.GrantResponse(term=self.says)


@asynccontextmanager
async def listening(*servicers: Servicer) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        addresses = []
        for servicer in servicers:
            server = Server("127.0.0.1", 0)
            pb_grpc.add_StoreMasterServicer_to_server(servicer, server.grpc)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            addresses.append(server.address)
        yield addresses


async def grant(caller: LeaderClient, timeout_s: float = 10.0) -> int:
    answer: pb.GrantResponse = await caller.call("Grant", pb.GrantRequest(), timeout_s)
    return answer.term


async def test_a_call_finds_the_leader_past_the_dead_and_those_that_stand_by() -> None:
    leader, standby = Servicer(3), Servicer(0)
    dead = f"127.0.0.1:{Ports().take()}"
    async with listening(standby, leader) as (at_standby, at_leader):
        standby.says = NotLeader("not me", leader=at_leader)
        async with LeaderClient(STORE, LeaderTracker(f"{dead},{at_standby},{at_leader}")) as caller:
            assert await grant(caller) == 3
            assert caller.leaders.current == at_leader
            assert await grant(caller) == 3
            assert (standby.calls, leader.calls) == (1, 2)


async def test_the_status_that_a_client_reads_is_the_leaders_though_all_answer() -> None:
    leader, standby = Servicer(3), Servicer(0)
    async with listening(standby, leader) as addresses:
        standby.says = NotLeader("not me", leader=addresses[1])
        directory = Directory(",".join(addresses))
        assert (await directory.status(10.0)).blocks == 7
        leader.says = NotLeader("nor me")
        with pytest.raises((NotLeader, DeadlinePassed)):  # a slow machine's last call may end with the time
            await directory.status(0.4)
        await directory.close()


async def test_a_call_waits_while_nobody_leads_and_takes_no_answer_of_yesterday() -> None:
    one, other = Servicer(5), Servicer(NotLeader("nobody"))
    async with listening(one, other) as addresses, LeaderClient(STORE, LeaderTracker(",".join(addresses))) as caller:
        caller.leaders.terms.hear(6)
        with pytest.raises((StaleTerm, NotLeader, DeadlinePassed)):  # as above
            await grant(caller, 0.5)
        assert one.calls > 1 and other.calls > 1
        other.says = 6
        assert await grant(caller) == 6


async def test_the_leaders_own_refusal_is_passed_on_at_once() -> None:
    refusing = Servicer(InvalidRequest.of("count", 0, "is nothing"))
    async with listening(refusing) as [address], LeaderClient(STORE, LeaderTracker(address)) as caller:
        with pytest.raises(InvalidRequest, match="count"):
            await grant(caller)
        assert refusing.calls == 1


async def test_without_any_master_the_last_error_is_told_after_the_time_given() -> None:
    dead = Ports()
    async with LeaderClient(STORE, LeaderTracker(f"127.0.0.1:{dead.take()},127.0.0.1:{dead.take()}")) as caller:
        with pytest.raises(Unavailable):
            await grant(caller, 0.4)


async def test_a_fast_path_that_falls_silent_leaves_time_for_grpc_in_the_same_call() -> None:
    """As a firewall makes it that forgets idle connections: a look-up of a lone master on another host."""
    only, swallows = Servicer(3), Swallows()
    async with AsyncExitStack() as stack:
        server = Server("127.0.0.1", 0)
        pb_grpc.add_StoreMasterServicer_to_server(only, server.grpc)
        doors_pb2_grpc.add_DoorsServicer_to_server(swallows, server.grpc)
        listening = await asyncio.start_server(swallows.greet, "127.0.0.1", 0)
        stack.callback(listening.close)
        swallows.port = listening.sockets[0].getsockname()[1]
        await server.start()
        stack.push_async_callback(server.stop, 0)
        caller = await stack.enter_async_context(LeaderClient(STORE, LeaderTracker(server.address), ("Grant",)))

        async def by_fastpath() -> bool:
            return caller.via_fastpath or await grant(caller) == 0  # which looks for it, over gRPC meanwhile

        await until(by_fastpath)
        answered = only.calls
        assert await grant(caller, 4.0) == 3
        assert only.calls == answered + 1 and swallows.greeted == 1 and not caller.via_fastpath
