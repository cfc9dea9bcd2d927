"""A device that is not there: tensors whose values lie on the CPU and which nobody may look at from the host.

Inside `Apart()`, `DEVICE` takes part in torch like a GPU. An operation that would make the host wait for a GPU raises
`Waits`: reading a value, a size that depends on values, an index by a mask, a copy from memory that is not pinned or
that blocks. So does one that mixes tensors of host and device. Copies from pinned memory are made when the device's
next operation is, or when an event says so: as late as a GPU may make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("lazy")  # a type that this torch knows, and has no code for
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten.unique_consecutive,
    aten._unique2,
    aten.repeat_interleave,
    aten.bincount,
}
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Waits(AssertionError):
    """The host would wait for the device here."""


class Remote(torch.Tensor):
    """Is a tensor of the device; `values` are on the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Remote:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=DEVICE
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Waits(f"{func} of a tensor of the device outside of it")


def values_of(tree: Any) -> Any:
    """Returns the same with tensors of the device replaced by their values."""
    return tree_map(lambda x: x.values if isinstance(x, Remote) else x, tree)


class Apart(TorchDispatchMode):
    """Runs what torch does, on both sides. `reads` counts how often `reading` allowed the host to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.copies = 0
        self._reading = False
        self._pinned: set[int] = set()
        self._pending: list[Callable[[], Any]] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Allows one read."""
        self._reading, self.reads = True, self.reads + 1
        try:
            yield
        finally:
            self._reading = False

    def flush(self, count: int | None = None) -> None:
        """Makes the first `count` of the copies that are pending (None: all)."""
        count = len(self._pending) if count is None else count
        due, self._pending = self._pending[:count], self._pending[count:]
        for copy in due:
            copy()

    def event(self) -> Event:
        """Is torch.cuda.Event."""
        return Event(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:  # in inference mode, an operation that consists of others comes as one
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        packet, target = func.overloadpacket, kwargs.get("device")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        remote = any(isinstance(x, Remote) for x in tensors)
        if packet is aten._to_copy and target is not None:
            if target == DEVICE and not remote:
                self._check_sent(func, tensors[0], kwargs.get("non_blocking", False))
            elif target != DEVICE and remote:
                if not self._reading:
                    raise Waits(f"{func} to the host")
                self.flush()
                return func(*values_of(args), **values_of(kwargs))
        elif packet is aten.copy_ and remote:
            into, source = args[:2]
            if not isinstance(into, Remote):
                raise Waits(f"{func} to the host")
            if not isinstance(source, Remote):
                self._check_sent(func, source, kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
                self._pending.append(lambda: into.values.copy_(source))
                self.copies += 1
                return into
        elif kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            self._pinned.add(made.untyped_storage().data_ptr())
            return made
        if not remote and target != DEVICE:
            return func(*args, **kwargs)
        self._check(func, packet, tensors, args)
        aliases = [one.alias_info for one in func._schema.returns]
        if remote and not (aliases and aliases[0] is not None and not aliases[0].is_write):  # a view reads nothing
            self.flush()
        if target == DEVICE:
            kwargs["device"] = torch.device("cpu")
        known = {id(x.values): x for x in tensors if isinstance(x, Remote)}

        def on_device(x: Any) -> Any:
            return known[id(x)] if id(x) in known else Remote(x) if isinstance(x, torch.Tensor) else x

        return tree_map(on_device, func(*values_of(args), **values_of(kwargs)))

    def _check_sent(self, func: Any, source: torch.Tensor, non_blocking: bool) -> None:
        if not non_blocking or source.untyped_storage().data_ptr() not in self._pinned:
            raise Waits(f"{func} to the device: blocking, or not from pinned memory")

    def _check(self, func: Any, packet: Any, tensors: list[torch.Tensor], args: Any) -> None:
        if packet in WAITS:
            raise Waits(f"{func} needs values on the host")
        if packet in BY_INDEX and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            raise Waits(f"{func} by a mask needs a count on the host")
        if any(not isinstance(x, Remote) and x.dim() for x in tensors):
            raise Waits(f"{func} mixes tensors of host and device")


class Event:
    """Stands for a CUDA event on the one stream of the device."""

    def __init__(self, mode: Apart) -> None:
        self._mode, self._copies = mode, 0

    def record(self) -> None:
        self._copies = self._mode.copies

    def synchronize(self) -> None:
        made = self._mode.copies - len(self._mode._pending)
        self._mode.flush(max(0, self._copies - made))
