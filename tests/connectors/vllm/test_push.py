"""Pages from one worker to another through windows, byte for byte; and workers that die and freeze in the middle."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvmesh.connectors.vllm.book import HandoffOrders, HoldOrder, ReceiveOrder
from kvmesh.connectors.vllm.mover import Pages
from kvmesh.connectors.vllm.push.arrivals import ReceivedPages
from kvmesh.connectors.vllm.push.receiver import NOT_PUSHED
from kvmesh.connectors.vllm.push.worker import PushWorker
from kvmesh.connectors.vllm.remote import PushRank, RemotePrefill
from kvmesh.errors import ConfigError, InvalidRequest, PermissionDenied, ProtocolMismatch
from kvmesh.rpc import security
from kvmesh.rpc.authorisation import ALL_IDENTITIES, CallerRole, Identity
from kvmesh.rpc.certificates import make_role_certificates
from kvmesh.rpc.pb import vllm_pb2 as pb
from kvmesh.rpc.pb import vllm_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION
from kvmesh.rpc.status import from_rpc_error
from tests.connectors.vllm.push_process import BLOCKS, BYTES, LAYERS, LAYOUT, TICKET, config, pages, source
from tests.support.paths import ROOT

WAIT_S = 60.0
ALL = tuple(range(BLOCKS))


@contextlib.contextmanager
def sender(own: list[Pages], transport: str = "tcp", **more: Any) -> Iterator[PushWorker]:
    made = PushWorker(own, 0, LAYOUT, config(transport, **more), receives=False)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def receiver(own: list[Pages], transport: str = "tcp", **more: Any) -> Iterator[PushWorker]:
    made = PushWorker(own, 0, LAYOUT, config(transport, **more), sends=False)
    try:
        yield made
    finally:
        made.close()


def hold(worker: PushWorker, blocks: tuple[int, ...] = ALL, name: str = "r") -> None:
    worker.carry_out(HandoffOrders(holds=(HoldOrder(name, TICKET, blocks),)))


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (told := found()):
        assert time.monotonic() < end, f"not within {WAIT_S} s"
        time.sleep(0.002)
    return told


def received(worker: PushWorker) -> ReceivedPages:
    found: list[ReceivedPages] = []

    def over() -> bool:
        found.append(worker.poll())
        return bool(found[-1].orders)

    until(over)
    return found[-1]


def take(worker: PushWorker, where: RemotePrefill, targets: tuple[int, ...], first: int = 0) -> ReceivedPages:
    worker.receive(ReceiveOrder("d", where, first, targets))
    return received(worker)


def check_pushed(prefill: PushWorker, decode: PushWorker, mine: list[Pages], theirs: list[Pages]) -> None:
    """A staging takes five blocks, so they come in several windows; the first two are at the decode side already."""
    before = [layer.copy() for layer in theirs]
    targets = tuple(BLOCKS - 1 - at for at in range(BLOCKS - 6))
    hold(prefill)
    over = take(decode, source(prefill.place), targets, first=2)
    assert not over.failed_pages and not over.late
    assert until(lambda: decode.windows_of(prefill.place.engine) == 0)
    for layer in range(LAYERS):
        assert np.array_equal(theirs[layer][list(targets)], mine[layer][2 : BLOCKS - 4])
        assert np.array_equal(theirs[layer][:6], before[layer][:6])
    assert until(prefill.freed) == {"r"}
    counts, told = prefill.take_counts(), decode.take_counts()
    assert counts["blocks_pushed"] == told["blocks_received"] == BLOCKS - 6 and counts["pushes"] > 1
    assert told["bytes_received"] == (BLOCKS - 6) * LAYERS * BYTES and counts["holds_lapsed"] == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_what_one_holds_another_receives(transport: str) -> None:
    mine, theirs = pages(1), pages(2)
    with sender(mine, transport) as prefill, receiver(theirs, transport) as decode:
        check_pushed(prefill, decode, mine, theirs)


def test_pages_of_a_decode_that_never_comes_are_given_back() -> None:
    with sender(pages(1), hold_ms=150) as prefill, receiver(pages(2)) as decode:
        hold(prefill)
        assert prefill.held == 1
        assert until(prefill.freed) == {"r"}
        assert prefill.held == 0 and prefill.take_counts() == {"holds_ended": 1, "holds_lapsed": 1}
        over = take(decode, source(prefill.place), (4, 5))
        assert over.failed_pages == {4, 5} and not over.late  # it is told so, and does not wait


def test_who_asks_before_the_pages_are_held_waits() -> None:
    mine, theirs = pages(1), pages(2)
    with sender(mine) as prefill, receiver(theirs) as decode:
        decode.receive(ReceiveOrder("d", source(prefill.place), 0, (7,)))
        assert not decode.poll().orders
        hold(prefill, (3,))
        assert not received(decode).failed_pages and np.array_equal(theirs[0][7], mine[0][3])


def test_a_load_that_is_aborted_is_over_at_once() -> None:
    with sender(pages(1)) as prefill, receiver(pages(2), push_timeout_ms=600_000) as decode:
        decode.receive(ReceiveOrder("d", source(prefill.place), 0, (7,)))
        decode.cancel({"d"})
        assert received(decode).failed_pages == {7}
        assert until(lambda: decode.windows_of(prefill.place.engine) == 0)
        hold(prefill, (3,), "other")  # the thread is free again
        assert not take(decode, source(prefill.place, request_id="other"), (8,)).failed_pages


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticket": "ff" * 16},
        {"engine": "vllm:0:1:before"},
        {"blocks": BLOCKS + 1},
        {"address": "127.0.0.1:9"},
    ],
)
def test_what_cannot_be_pushed_is_computed_without_waiting(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says so, with the setting that may be wrong: the address is a loopback one."""
    with sender(pages(1)) as prefill, receiver(pages(2)) as decode:
        hold(prefill)
        place = prefill.place
        place = PushRank(wrong.get("address", place.address), wrong.get("engine", place.engine))
        where = source(place, ticket=wrong.get("ticket", TICKET.hex()))
        over = take(decode, where, ALL, first=wrong.get("blocks", BLOCKS) - BLOCKS)
        assert BLOCKS - 1 in over.failed_pages and not over.late
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "vllm.kvmesh"]
    assert NOT_PUSHED in warning and f"of engine prefill at {place.address} (" in warning
    assert "an engine on another one needs host, or advertise_host" in warning


def test_strangers_get_one_clear_error() -> None:
    with sender(pages(1)) as prefill, grpc.insecure_channel(prefill.place.address) as channel:
        hold(prefill)
        stub = vllm_pb2_grpc.PagePushStub(channel)
        prompt = pb.HeldPrompt(engine=prefill.place.engine, request_id="r", ticket=TICKET)
        good = {
            "protocol_version": PROTOCOL_VERSION,
            "prompt": prompt,
            "layout": LAYOUT,
            "block_bytes": BYTES * LAYERS,
            "segment": b"?",
            "offsets": [0],
        }
        for change, text in (
            ({"protocol_version": 0}, "protocol_version=0"),
            ({"layout": "x"}, "another layout"),
            ({"block_bytes": 1}, "block_bytes=1: a block has 200000 bytes here"),
            ({"offsets": []}, "offsets=0"),
            ({}, "descriptor of 1 bytes is malformed"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Push(pb.PushPagesRequest(**{**good, **change}), timeout=WAIT_S)
            assert text in from_rpc_error(caught.value).message
        with pytest.raises(grpc.RpcError) as caught:
            stub.Release(pb.ReleasePagesRequest(protocol_version=PROTOCOL_VERSION, prompt=pb.HeldPrompt()))
        assert "is not here any more" in from_rpc_error(caught.value).message
        assert prefill.held == 1


def test_random_bytes_end_in_named_errors() -> None:
    draw = random.Random(1)
    with sender(pages(1)) as prefill, grpc.insecure_channel(prefill.place.address) as channel:
        for method in ("Push", "Release") * 20:
            call = channel.unary_unary(f"/kvmesh.v1.PagePush/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(draw.randbytes(draw.randrange(200)), timeout=WAIT_S)
            assert type(from_rpc_error(caught.value)) in (InvalidRequest, ProtocolMismatch)


def test_a_staging_holds_a_block() -> None:
    with pytest.raises(ConfigError, match="push_staging_mb=1: is too little: a block has 200,000 bytes"):
        PushWorker(pages(1), 0, LAYOUT, config("tcp", push_threads=16))


def test_over_tls_clients_push_and_others_may_not(tmp_path: Path) -> None:
    client, other = Identity(CallerRole.CLIENT, "*"), Identity(CallerRole.GATEWAY, "*")
    made = make_role_certificates(tmp_path, {"client": (client,), "other": (other,), "all": ALL_IDENTITIES})
    mine, theirs = pages(1), pages(2)
    before = security.use(security.Security.load(made["client"].files))
    try:
        with sender(mine) as prefill, receiver(theirs) as decode:
            hold(prefill)
            assert not take(decode, source(prefill.place), ALL).failed_pages
            assert all(np.array_equal(theirs[at], mine[at]) for at in range(LAYERS))
            hold(prefill)
            tls = security.Security.load(made["other"].files).channel_credentials()
            assert tls is not None
            with grpc.secure_channel(prefill.place.address, tls) as channel, pytest.raises(grpc.RpcError) as caught:
                vllm_pb2_grpc.PagePushStub(channel).Release(pb.ReleasePagesRequest(), timeout=WAIT_S)
            assert isinstance(from_rpc_error(caught.value), PermissionDenied)
    finally:
        security.use(before)


# ── processes that strike themselves in the middle of a push ─────────────────────────────────────────


class PushProcess:
    """Is `push_process`; its owner kills it."""

    def __init__(self, role: str, number: int, copies: int, transport: str, *more: str) -> None:
        argv = [sys.executable, "-m", "tests.connectors.vllm.push_process", role, str(number), str(copies), transport]
        self.process = subprocess.Popen(
            [*argv, *more], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def __enter__(self) -> PushProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_that_is_struck_in_mid_push(number: int, transport: str) -> None:
    """It has pushed two windows of five blocks, and read two blocks of the third. What came is right, what did not is
    told; and when it goes on, none of its bytes lands in pages that somebody else has by then."""
    mine, theirs = pages(1), pages(2)
    with (
        PushProcess("send", number, 12, transport) as child,
        receiver(theirs, transport, push_timeout_ms=4_000) as decode,
    ):
        where = RemotePrefill.of(child.line())
        over = take(decode, where, ALL)
        assert over.failed_pages == frozenset(ALL[10:])
        assert over.late == ({"d"} if number == signal.SIGSTOP else frozenset())
        assert until(lambda: decode.windows_of(where.ranks[0].engine) == 0)
        for layer in range(LAYERS):
            assert np.array_equal(theirs[layer][:10], mine[layer][:10])
        if number == signal.SIGKILL:
            return
        for layer in range(LAYERS):  # vLLM has given the pages to others
            theirs[layer][10:] = 7
        child.process.send_signal(signal.SIGCONT)
        counts: Counter[str] = Counter()
        while counts["pushes"] + counts["pushes_failed"] < 3:  # the window may have been open a moment longer
            counts.update(child.line())
        assert take(decode, where, (0,)).failed_pages == {0}  # released; and the thread is through with the third
        assert all((theirs[layer][10:] == 7).all() for layer in range(LAYERS))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_that_is_struck_in_mid_push(number: int) -> None:
    """Prefill gives the pages back after their time, and serves the next one."""
    mine, theirs = pages(1), pages(2)
    with sender(mine, hold_ms=4_000) as prefill:
        where = source(prefill.place)
        with PushProcess("receive", number, 7, "tcp", json.dumps(where.params())) as child:
            child.line()  # it asks already
            hold(prefill)
            assert until(prefill.freed) == {"r"}
            counts = prefill.take_counts()
            assert counts["holds_lapsed"] == 1 and counts["blocks_pushed"] >= 10
        hold(prefill)
        with receiver(theirs) as decode:
            assert not take(decode, where, ALL).failed_pages
