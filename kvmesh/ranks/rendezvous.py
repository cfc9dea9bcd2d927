"""Where ranks on several hosts find each other: a store of keys behind their front.

Ranks ask over what leads to their front already, a socket pair or the authenticated stream to their host, so nobody
else can take part: torch's own store over TCP believes everybody. `RendezvousStore` is the front's end and
`StoreCaller` a rank's; `kvmesh.ranks.worker.rank_store` gives it torch's face.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from kvmesh.ranks import protocol as m
from kvmesh.ranks.ipc import RankPort

MOST_BYTES = 64 << 20  # of keys and values of one instance


class RendezvousStore:
    """Keeps the keys of one instance's ranks, at its front. `answer(rank, message)` sends to a rank."""

    def __init__(self, answer: Callable[[int, m.StoreAnswer], None]) -> None:
        self._answer = answer
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[int, m.StoreCall]] = []
        self._nbytes = 0

    def ask(self, rank: int, call: m.StoreCall) -> None:
        """Carries out a rank's call. The answer of one that waits for keys comes when they are there."""
        if not self._try(rank, call):
            self._waiting.append((rank, call))
            return
        if call.op in ("set", "add", "compare_set"):
            self._waiting = [(who, held) for who, held in self._waiting if not self._try(who, held)]

    def _try(self, rank: int, call: m.StoreCall) -> bool:
        """Answers a call; False where keys that it waits for are missing."""
        values, keys = self._values, call.keys
        found: tuple[bytes, ...] = ()
        error = ""
        match call.op:
            case "set":
                error = self._put(keys[0], call.values[0])
            case "get" | "wait":
                if any(key not in values for key in keys):
                    return False
                found = tuple(values[key] for key in keys) if call.op == "get" else ()
            case "add":
                try:
                    total = int(values.get(keys[0], b"0")) + call.number
                except ValueError:
                    error = f"{keys[0]!r} holds no number"
                else:
                    error, found = self._put(keys[0], str(total).encode()), (str(total).encode(),)
            case "compare_set":
                expected, desired = call.values
                if values.get(keys[0], b"") == expected:
                    error = self._put(keys[0], desired)
                found = (values.get(keys[0], expected),)
            case "check":
                found = (b"1",) if all(key in values for key in keys) else ()
            case "delete":
                found = (b"1",) if keys[0] in values else ()
                self._nbytes -= len(keys[0]) + len(values.pop(keys[0], b"")) if found else 0
            case "count":
                found = (str(len(values)).encode(),)
            case _:
                error = f"no operation is called {call.op!r}"
        self._answer(rank, m.StoreAnswer(call.ticket, found, error))
        return True

    def _put(self, key: str, value: bytes) -> str:
        before = len(key) + len(self._values[key]) if key in self._values else 0
        nbytes = self._nbytes - before + len(key) + len(value)
        if nbytes > MOST_BYTES:
            return f"{nbytes} bytes of keys and values, at most {MOST_BYTES} are kept"
        self._nbytes, self._values[key] = nbytes, value
        return ""


class StoreCaller:
    """Asks the front's store, from any thread of a rank. The main thread alone reads from `port`: while it waits for an
    answer, `others` gets the other messages that come; other threads wait until it has read theirs (`answered`)."""

    def __init__(self, port: RankPort, others: Callable[[Iterable[m.ToRank]], None]) -> None:
        self._port, self._others = port, others
        self._tickets = count(1)
        self._answers: dict[int, m.StoreAnswer] = {}
        self._news = threading.Condition()

    def call(
        self, op: str, keys: Sequence[str], values: Sequence[bytes] = (), number: int = 0, timeout_s: float = 60.0
    ) -> tuple[bytes, ...]:
        """Returns what the store answers. Raises TimeoutError when it does not in time, ValueError for what it
        refuses."""
        ticket = next(self._tickets)
        self._port.send(m.StoreCall(ticket, op, tuple(keys), tuple(values), number))
        end = time.monotonic() + timeout_s
        main = threading.current_thread() is threading.main_thread()
        while True:
            with self._news:
                answer = self._answers.pop(ticket, None)
                left = end - time.monotonic()
                if answer is None and left > 0 and not main:
                    self._news.wait(left)
                    continue
            if answer is not None:
                if answer.error:
                    raise ValueError(answer.error)
                return answer.values
            if left <= 0:
                raise TimeoutError(f"{op} of {', '.join(keys)[:200]}: not within {timeout_s:g} s")
            self._read(int(left * 1000) + 1)

    def _read(self, timeout_ms: int) -> None:
        rest: list[m.ToRank] = []
        for message in self._port.receive(timeout_ms):
            if isinstance(message, m.StoreAnswer):
                self.answered(message)
            elif isinstance(message, m.Shutdown):
                raise SystemExit(0)
            else:
                rest.append(message)
        self._others(rest)

    def answered(self, answer: m.StoreAnswer) -> None:
        """Takes an answer that the main thread has read."""
        with self._news:
            self._answers[answer.ticket] = answer
            self._news.notify_all()
