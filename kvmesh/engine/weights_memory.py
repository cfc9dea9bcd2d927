"""A model's weights leave their memory and come back into the same tensors, so that a trainer has the memory meanwhile.

The storages behind the tensors are emptied, and filled again later. Whatever holds a tensor or a view of one has its
values again then, at other addresses: CUDA graphs, which hold addresses, are captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvmesh.engine.models.blocks import DecoderModel
from kvmesh.engine.weights_update import storage_id, tensors_of, updated_parts
from kvmesh.errors import InternalError


class WeightsMemory:
    """Has the memory of the weights of `model` and of an MTP `head`, if there is one. It must be made before anything
    else hangs on the layers.

    `apart` says that the weights are not in the host's own memory: then a copy of them there is kept where they are not
    dropped; else those stay where they are. An update (`WeightsUpdate`) writes all that is dropped; a head, which it
    does not write, is never dropped."""

    def __init__(self, model: DecoderModel, head: Any, apart: bool) -> None:
        self._apart = apart
        self._renewed = _storages(updated_parts(model))
        own = {storage_id(storage) for storage in self._renewed}
        self._others = [storage for storage in _storages([head]) if storage_id(storage) not in own]
        self._sizes = {storage_id(s): s.nbytes() for s in (*self._renewed, *self._others)}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._released = False
        self._dropped = False

    @property
    def released(self) -> bool:
        """Whether tensors of the model are without memory."""
        return self._released

    @torch.inference_mode()
    def save(self, keep: bool, between: Callable[[], None]) -> None:
        """Copies to the host what will be wanted again: all of it to `keep` the weights, else what no update writes.
        Nothing is released. `between` is called after each tensor. Raises RuntimeError where the host has no room."""
        if self._released or not self._apart:
            return
        try:
            for storage in (*self._others, *(self._renewed if keep else ())):
                copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
                copy.copy_(storage)
                self._copies[storage_id(storage)] = copy
                between()
        except BaseException:
            self._copies.clear()
            raise

    def forget(self) -> None:
        """Forgets what `save` copied: nothing will be released."""
        if not self._released:
            self._copies.clear()

    def release(self, keep: bool) -> int:
        """Gives memory back, after `save` was called alike; returns the bytes. Weights that were kept until now may be
        dropped so, too."""
        if not keep:
            for storage in self._renewed:
                self._copies.pop(storage_id(storage), None)
        given = [] if keep and not self._apart else [*self._renewed, *(self._others if self._apart else ())]
        freed: int = sum(storage.nbytes() for storage in given)
        for storage in given:
            storage.resize_(0)
        self._released = self._released or bool(given)
        self._dropped = self._dropped or not keep
        return freed

    @torch.inference_mode()
    def restore(self, between: Callable[[], None]) -> bool:
        """Gives all tensors memory, and their values where these were kept. Returns False where the weights were
        dropped: an update must write them before anything is computed."""
        if self._released:
            for storage in (*self._renewed, *self._others):
                size, copy = self._sizes[storage_id(storage)], self._copies.get(storage_id(storage))
                if storage.nbytes() != size:
                    storage.resize_(size)
                    if copy is not None:
                        storage.copy_(copy)
                    between()
            self._copies.clear()
            self._released = False
        return not self._dropped

    def written(self) -> None:
        """Notes that an update has written all that was dropped."""
        if self._released:
            raise InternalError("weights were written where there is no memory for them")
        self._dropped = False


def _storages(parts: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Returns the memory behind all tensors that `parts` reach, each piece once."""
    found: dict[int, torch.UntypedStorage] = {}
    for part in parts:
        for _, tensor in tensors_of(part):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found.setdefault(storage_id(storage), storage)
    return list(found.values())
