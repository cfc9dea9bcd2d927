"""What a CUDA graph does, on a CPU: operations are recorded with the very tensors and numbers that they had, and are
done again on these. So a replay sees neither a number of the host that has changed since nor a tensor that was made
anew, and what the operations made (a graph's pool, which other graphs overwrite) is poisoned between two replays.

Kernels of Triton's interpreter are no operations of torch: they are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISON = 0x7E  # four of them are 8e37, two a large bfloat16, eight an id that no embedding has


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, torch.Tensor] = {}  # by storage; kept, so that no address is given out twice
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._known |= {storage(tensor) for tensor in tensors_in((args, kwargs))} - self.made.keys()
        answer = func(*args, **kwargs)
        for tensor in tensors_in(answer):
            if storage(tensor) not in self._known:
                self.made.setdefault(storage(tensor), tensor)
        self.calls.append((func, args, kwargs, answer))
        return answer


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedCapture:
    """Is a `Capture` of operations on a CPU, which does them once while it records. `refuse(work's number)` tells which
    records then fail."""

    def __init__(self, refuse: Callable[[int], bool] = lambda number: False) -> None:
        self._refuse = refuse
        self._records = 0
        self._pool: list[torch.Tensor] = []  # what any record made
        self.replays = 0

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self._records += 1
        recorder = _Recorder()
        with recorder:
            work()
        if self._refuse(self._records):
            raise RuntimeError(f"record {self._records} is refused\nwith a second line")
        calls = recorder.calls
        self._pool += recorder.made.values()

        @torch.inference_mode()
        def replay() -> None:
            self.replays += 1
            for tensor in self._pool:
                tensor.untyped_storage().fill_(POISON)  # type: ignore[no-untyped-call]
            for func, args, kwargs, answer in calls:
                again = func(*args, **kwargs)
                for leaf in tree_leaves(again):
                    if isinstance(leaf, torch.ScriptObject) and hasattr(leaf, "wait"):
                        leaf.wait()  # a sum over ranks
                for old, new in zip(tensors_in(answer), tensors_in(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay

    def end(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._pool)


class RerunCapture:
    """Is a `Capture` that records nothing and does the work again, for kernels that are no operations of torch."""

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def end(self) -> int:
        return 0
