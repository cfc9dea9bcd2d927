"""The store behind a front in which ranks on several hosts meet, and the sockets of their turns."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

from kvmesh.errors import InternalError
from kvmesh.ranks import protocol as m
from kvmesh.ranks import rendezvous
from kvmesh.ranks.ipc import RankFrames, RankPort, frame
from kvmesh.ranks.rendezvous import RendezvousStore, StoreCaller
from kvmesh.ranks.turn_sockets import GREETING, KEY, SECRET_BYTES, accept_followers, dial_leader

SECRET = bytes(range(SECRET_BYTES))


class Asked:
    """The front's store and what it has answered."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, m.StoreAnswer]] = []
        self.store = RendezvousStore(lambda rank, answer: self.answers.append((rank, answer)))

    def ask(self, rank: int, ticket: int, op: str, *keys: str, values: tuple[bytes, ...] = (), number: int = 0) -> None:
        self.store.ask(rank, m.StoreCall(ticket, op, keys, values, number))


def test_who_waits_is_answered_when_the_last_key_is_there() -> None:
    asked = Asked()
    asked.ask(0, 1, "get", "a", "b")
    asked.ask(1, 1, "wait", "b")
    asked.ask(1, 2, "set", "a", values=(b"x",))
    assert asked.answers == [(1, m.StoreAnswer(2))]
    asked.ask(0, 2, "set", "b", values=(b"y",))
    assert asked.answers[1:] == [(0, m.StoreAnswer(2)), (0, m.StoreAnswer(1, (b"x", b"y"))), (1, m.StoreAnswer(1))]


def test_numbers_conditions_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    asked.ask(0, 1, "add", "n", number=2)
    asked.ask(1, 1, "add", "n", number=3)
    asked.ask(1, 2, "compare_set", "n", values=(b"4", b"9"))
    asked.ask(1, 3, "compare_set", "n", values=(b"5", b"9"))
    asked.ask(1, 4, "check", "n", "m")
    asked.ask(1, 5, "count")
    asked.ask(1, 6, "delete", "n")
    asked.ask(1, 7, "delete", "n")
    found = [answer.values for _, answer in asked.answers]
    assert found == [(b"2",), (b"5",), (b"5",), (b"9",), (), (b"1",), (b"1",), ()]
    monkeypatch.setattr(rendezvous, "MOST_BYTES", 10)
    asked.ask(0, 2, "set", "key", values=(b"12345678",))
    asked.ask(0, 3, "fly", "key")
    assert [answer.error for _, answer in asked.answers[-2:]] == [
        "11 bytes of keys and values, at most 10 are kept",
        "no operation is called 'fly'",
    ]


class Front:
    """Answers the ranks of one instance, each over a socket."""

    def __init__(self, stack: ExitStack) -> None:
        self._socks: list[socket.socket] = []
        self._lock = threading.Lock()
        self._store = RendezvousStore(lambda rank, answer: self._socks[rank].sendall(frame(answer)))
        self._stack = stack

    def port(self) -> RankPort:
        ours, theirs = socket.socketpair()
        self._socks.append(ours)
        self._stack.callback(theirs.close)
        threading.Thread(target=self._serve, args=(len(self._socks) - 1, ours), daemon=True).start()
        return RankPort(theirs)

    def _serve(self, rank: int, sock: socket.socket) -> None:
        frames = RankFrames(m.ToFront)
        with sock:
            while data := sock.recv(1 << 16):
                for call in frames.feed(data):
                    with self._lock:
                        self._store.ask(rank, call)

    def say(self, rank: int, message: m.ToRank) -> None:
        self._socks[rank].sendall(frame(message))


@pytest.fixture
def front() -> Iterator[Front]:
    with ExitStack() as stack:
        yield Front(stack)


def test_a_rank_asks_from_any_thread_and_other_messages_are_kept(front: Front) -> None:
    kept: list[m.ToRank] = []
    caller = StoreCaller(front.port(), kept.extend)
    front.say(0, m.Ping(3))
    caller.call("set", ("a",), (b"1",))
    assert kept == [m.Ping(3)]
    found: list[tuple[bytes, ...]] = []
    other = threading.Thread(target=lambda: found.append(caller.call("get", ("a",))))
    other.start()
    while not found:
        with pytest.raises(TimeoutError, match="get of never: not within"):
            caller.call("get", ("never",), timeout_s=0.05)  # the main thread reads for both
    other.join()
    assert found == [(b"1",)]


def test_torch_takes_it_for_a_store(front: Front) -> None:
    from torch.distributed.distributed_c10d import PrefixStore

    from kvmesh.ranks.worker.rank_store import RankStore

    one = RankStore(StoreCaller(front.port(), lambda _: None))
    two = RankStore(StoreCaller(front.port(), lambda _: None))
    PrefixStore("x", one).set("a", "1")
    assert PrefixStore("x", two).get("a") == b"1"
    assert (two.add("n", 3), one.add("n", 1), one.check(["n"]), one.check(["m"])) == (3, 4, True, False)
    with pytest.raises(RuntimeError, match=r"not within 0\.05 s"):
        PrefixStore("x", one).wait(["b"], timedelta(seconds=0.05))


def test_turns_are_taken_from_who_knows_the_secret(front: Front) -> None:
    leader = StoreCaller(front.port(), lambda _: None)
    follower = StoreCaller(front.port(), lambda _: None)
    came: list[socket.socket] = []

    def come() -> None:
        address, _, port = follower.call("get", (KEY,))[0].decode().rpartition(" ")
        with socket.create_connection((address, int(port))) as stranger:
            stranger.sendall(GREETING.pack(bytes(SECRET_BYTES), 2))
            assert stranger.recv(1) == b""
        came.append(dial_leader(follower, SECRET, 2, 5, 5))

    # A thread that is not the main one waits for the main one to read: here the leader's main thread reads its own.
    reader = threading.Thread(target=lambda: follower_reads(follower, came), daemon=True)
    dialling = threading.Thread(target=come)
    reader.start()
    dialling.start()
    with accept_followers(leader, "127.0.0.1", SECRET, [2], 10, 5)[2] as sock:
        dialling.join()
        sock.sendall(b"turn")
        assert came[0].recv(4) == b"turn"
        came[0].close()
    with pytest.raises(InternalError, match="rank 3 did not come to rank 0 within 0 s"):
        accept_followers(leader, "127.0.0.1", SECRET, [3], 0.05, 5)


def follower_reads(caller: StoreCaller, until: list[socket.socket]) -> None:
    """Stands for the main thread of the follower's process."""
    while not until:
        caller._read(20)
