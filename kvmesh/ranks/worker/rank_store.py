"""The store behind the front, as torch.distributed's groups want it (ADR 0044)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import distributed

from kvmesh.ranks.rendezvous import StoreCaller

PATIENCE = timedelta(seconds=300)


class RankStore(distributed.Store):  # type: ignore[misc,name-defined,unused-ignore]
    """Is a `torch.distributed.Store` in Python. torch keeps the C++ half of it alone: whoever makes one keeps it for as
    long as its groups live. Its calls raise RuntimeError where they fail, as torch's own stores do."""

    def __init__(self, caller: StoreCaller) -> None:
        super().__init__()
        self._caller = caller

    def _call(
        self,
        op: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        number: int = 0,
        patience: timedelta = PATIENCE,
    ) -> tuple[bytes, ...]:
        try:
            return self._caller.call(op, keys, values, number, patience.total_seconds())
        except (TimeoutError, ValueError) as error:
            raise RuntimeError(f"the front's store: {error}") from None

    def set(self, key: str, value: bytes | str) -> None:
        self._call("set", (key,), (_bytes(value),))

    def get(self, key: str) -> bytes:
        return self._call("get", (key,))[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", (key,), number=amount)[0])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._call("compare_set", (key,), (_bytes(expected), _bytes(desired)))[0]

    def wait(self, keys: Sequence[str], timeout: timedelta = PATIENCE) -> None:
        self._call("wait", keys, patience=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", (key,)))

    def num_keys(self) -> int:
        return int(self._call("count", ())[0])


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
