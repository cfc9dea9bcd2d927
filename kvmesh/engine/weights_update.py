"""Other weights for a model that is loaded: in place, layer by layer, each rank its own part of them.

A layer is built anew from the new weights, by the very code that built the one in use, and then copied tensor by tensor
into that one's memory. So every family, cut and packed form is updated without code of its own, addresses stay as they
are (CUDA graphs hold them), and no more than one layer, or the embedding and the head, is there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import DecoderModel
from kvmesh.engine.parallel import Group, RankMesh
from kvmesh.engine.stages import Stage
from kvmesh.engine.tensors import HEAD
from kvmesh.engine.weights import Weights
from kvmesh.errors import InvalidRequest

# Parts of a model that hold no weights of it: what they reach is shared with everything else.
NO_WEIGHTS = (Group, RankMesh, Stage, ModelConfig, Weights)


class LayerWeights(Weights):
    """Reads one layer's weights, or with `layer` None what is in no layer: embedding, last norm and head."""

    def __init__(self, weights: Weights, layer: int | None) -> None:
        super().__init__(weights.checkpoint, weights.dtype, weights.device, weights.mesh, weights.experts_cut)
        self.reads_ends = layer is None
        self._layer = layer

    @property
    def layers(self) -> range:
        return super().layers[:0] if self._layer is None else range(self._layer, self._layer + 1)


Build = Callable[[Weights], DecoderModel]


class WeightsUpdate:
    """Updates `model`, whose parts `build` makes of weights. `check` refuses what cannot be; after that `apply` fails
    only when the weights cannot be read, and then leaves a mixture that must not compute."""

    def __init__(self, model: DecoderModel, weights: Weights, build: Build) -> None:
        self._model, self._weights, self._build = model, weights, build

    @torch.inference_mode()
    def check(self) -> None:
        """Raises InvalidRequest where the embedding is the head in one of the two and not in the other: every name,
        shape and dtype has been checked before (`checkpoint.open_weights`)."""
        if HEAD not in self._weights or not self._weights.config.tie_word_embeddings:
            return  # the head is its own, here and there; or the new embedding, which goes wherever the served head is
        new = self._build(LayerWeights(self._weights, None))
        ours, theirs = (list(_aliases(_ends(model)).values()) for model in (self._model, new))
        if ours != theirs:
            text = "the new weights have a head of their own where the served ones have the embedding"
            raise InvalidRequest(f"tie_word_embeddings: {text}", field="tie_word_embeddings")

    @torch.inference_mode()
    def apply(self, between: Callable[[], None]) -> int:
        """Takes the new weights; `between` is called after each layer. Returns the bytes that have been written."""
        moved = 0
        for at, index in enumerate(self._weights.layers):
            new = self._build(LayerWeights(self._weights, index))
            moved += copy_tensors(self._model.layers[at], new.layers[0])
            del new
            between()
        moved += copy_tensors(_ends(self._model), _ends(self._build(LayerWeights(self._weights, None))))
        if self._weights.device.type == "cuda":
            torch.cuda.synchronize(self._weights.device)
        return moved


def updated_parts(model: DecoderModel) -> list[Any]:
    """Returns the parts of a model whose tensors an update writes, all of them."""
    return [*model.layers, _ends(model)]


def storage_id(storage: torch.UntypedStorage) -> int:
    """Returns what is equal for all tensors that lie in one piece of memory, also while that is released."""
    found: int = storage._cdata
    return found


def _ends(model: DecoderModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ("embed", "norm", "head") if hasattr(model, name)}


def copy_tensors(old: Any, new: Any) -> int:
    """Copies all tensors of `new` into those of `old`, which has one of the same shape and dtype at each place. Returns
    the bytes. Raises InvalidRequest naming the place where it does not."""
    mine, moved, done = dict(tensors_of(old)), 0, set[int]()
    # A view of a whole tensor that was copied has its values already.
    for place, tensor in sorted(tensors_of(new), key=lambda found: -found[1].numel()):
        target = mine.get(place)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            was = None if target is None else f"{target.dtype} {list(target.shape)}"
            raise InvalidRequest.of(place, was, f"the new weights have {tensor.dtype} {list(tensor.shape)} there")
        storage = target.untyped_storage()
        if storage_id(storage) in done:
            continue
        target.copy_(tensor)
        moved += tensor.numel() * tensor.itemsize
        if target.numel() * target.itemsize == storage.nbytes():
            done.add(storage_id(storage))
    return moved


def tensors_of(thing: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor that a part of a model reaches, each once under each object that has it, by its place."""
    seen: set[int] = set()

    def walk(thing: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(thing, torch.Tensor):
            yield place, thing
            return
        if isinstance(thing, NO_WEIGHTS) or id(thing) in seen:
            return
        items: Any = ()
        if isinstance(thing, Mapping):
            items = thing.items()
        elif isinstance(thing, Sequence) and not isinstance(thing, str | bytes | range):
            items = enumerate(thing)
        elif type(thing).__module__.startswith("kvmesh.engine.") and hasattr(thing, "__dict__"):
            items = vars(thing).items()
        if items:
            seen.add(id(thing))
        for name, part in items:
            yield from walk(part, f"{place}.{name}" if place else str(name))

    return walk(thing, "")


def _aliases(thing: Any) -> dict[str, str]:
    """Returns of each tensor's place the first one that has the same memory."""
    first: dict[int, str] = {}
    return {place: first.setdefault(storage_id(t.untyped_storage()), place) for place, t in tensors_of(thing)}
