"""Qwen3-Next against transformers: one layer of gated DeltaNet, and the whole model over KV and states, cold, in
chunks, beside others in one step, and resumed from a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvmesh.engine.attention import delta
from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.delta import DeltaInputs, Runs, StateSlots
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.models.qwen3_next import DeltaNet, build
from kvmesh.engine.parallel import SOLO, Group, share_of
from kvmesh.engine.rope import Rotation
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights
from kvmesh.kvcache.cache_groups import CacheKind, object_shard
from tests.support.checkpoints import prompts
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.reference import assert_as_close_as_reference, assert_matches_reference, reference_model

BLOCK, PAGES, SLOTS, ANSWER = 16, 24, 5, 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_next(tmp_path_factory.mktemp("qwen3_next"))


class Part(NamedTuple):
    """Tokens of one request in a step."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int


class Model:
    """The model over memory of its cache groups, which begins as NaN where KV lies and where slots are nobody's."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, group: Group = SOLO) -> None:
        checkpoint = open_checkpoint(path)
        self.config = checkpoint.config
        own = share_of(self.config, group.size)
        kept, states, known = own.cache_groups
        self.kept = kept.layers
        with torch.inference_mode():
            self.model = build(own, Weights(checkpoint, dtype, CPU, group))

        def memory(of: int, count: int, kind: torch.dtype) -> torch.Tensor:
            layout = object_shard(own.cache_groups[of], BLOCK, 1)
            return torch.full((count, *layout.shape), torch.nan, dtype=kind)

        specs = [own.attention[layer] for layer in kept.layers]
        self.attention = TorchAttention(memory(0, PAGES, dtype), own.heads, specs)
        self.states, self.known = memory(1, SLOTS, torch.float32), memory(2, SLOTS, dtype)
        self.places = {layer: place for place, layer in enumerate(states.layers)}
        assert states.layers == known.layers

    def zero(self, slot: int) -> None:
        for memory in (self.states, self.known):
            memory[slot] = 0

    def copy(self, source: int, target: int) -> None:
        for memory in (self.states, self.known):
            memory[target] = memory[source]

    @torch.inference_mode()
    def step(self, parts: Sequence[Part]) -> torch.Tensor:
        """Logits after each token of the step; parts of one token come first, as rows."""
        rows = [part for part in parts if len(part.token_ids) == 1]
        spans = [TokenSpan(part.start, len(part.token_ids), part.pages) for part in parts[len(rows) :]]
        plan = self.attention.plan_mixed([row.pages for row in rows], np.array([row.start for row in rows]), spans)
        runs = Runs([len(part.token_ids) for part in parts], CPU)
        slots = torch.tensor([part.slot for part in parts])

        def attend(layer: int, given: object, rotation: Rotation | None) -> torch.Tensor:
            if isinstance(given, DeltaInputs):
                states, known = (memory[:, self.places[layer], :, :, 0] for memory in (self.states, self.known))
                return delta.attend_state(given, StateSlots(states, slots), StateSlots(known, slots), runs)
            assert isinstance(given, torch.Tensor) and rotation is not None
            plan.rotate_and_write(self.kept.index(layer), given, rotation)
            return plan.attend(self.kept.index(layer), given)

        tokens = torch.tensor([token for part in parts for token in part.token_ids])
        return self.model.logits(self.model.hidden(tokens, plan.positions, attend))

    def decode(self, last: int, position: int, pages: Sequence[int], slot: int, count: int) -> list[int]:
        tokens = [last]
        for at in range(position, position + count):
            tokens.append(int(self.step([Part(tokens[-1:], at, pages, slot)])[-1].argmax()))
        return tokens[1:]

    def answer(self, prompt: list[int], pages: Sequence[int], slot: int, chunks: Sequence[int] = ()) -> list[int]:
        self.zero(slot)
        at = 0
        for length in (*chunks, len(prompt) - sum(chunks)):
            logits = self.step([Part(prompt[at : at + length], at, pages, slot)])
            at += length
        first = int(logits[-1].argmax())
        return [first, *self.decode(first, len(prompt), pages, slot, ANSWER - 1)]


def test_tokens_equal_transformers(path: Path) -> None:
    model = Model(path)
    first, second = prompts(2, 300, seed=11, low=83, high=84)
    cold = model.answer(first, range(6), 3)
    assert_matches_reference(path, first, cold)
    assert model.answer(first, range(6, 12), 1, chunks=(1, 7, 33, 2)) == cold

    # One decodes beside another's chunks, and begins from a snapshot taken in the middle of a block.
    model.answer(first[:70], range(12, 18), 0)
    model.zero(0)
    model.step([Part(first[:70], 0, range(12, 18), 0)])
    model.copy(0, 4)
    model.step([Part(second[:5], 70, range(12, 18), 0)])  # the snapshot is no view of the slot
    model.zero(2)
    answers, tokens, at = [], first[70:], 0
    pages = range(18, 24)
    for place, token in enumerate(tokens):
        chunk = second[at : at + 6]
        parts = [Part([token], 70 + place, range(12, 18), 4)] + [Part(chunk, at, pages, 2)] * bool(chunk)
        logits = model.step(parts)
        at += len(chunk)
    answers.append(int(logits[0].argmax()))
    assert [*answers, *model.decode(answers[0], len(first), range(12, 18), 4, ANSWER - 1)] == cold
    while at < len(second):
        logits = model.step([Part(second[at : at + 6], at, pages, 2)])
        at += len(second[at : at + 6])
    token = int(logits[-1].argmax())
    assert_matches_reference(path, second, [token, *model.decode(token, len(second), pages, 2, ANSWER - 1)])


@pytest.mark.parametrize("lost", ["state", "inputs", "snapshot one token late"])
def test_a_wrong_state_shows(path: Path, lost: str) -> None:
    model = Model(path)
    [prompt] = prompts(1, 300, seed=12, low=83, high=84)
    pages = range(6)
    model.zero(0)
    logits = model.step([Part(prompt, 0, pages, 0)])
    first = int(logits[-1].argmax())
    if lost == "state":
        model.states[0] = 0
    elif lost == "inputs":
        model.known[0] = 0
    else:
        model.step([Part([first], len(prompt), pages, 0)])
    with pytest.raises(AssertionError, match="reference chooses"):
        assert_matches_reference(path, prompt, [first, *model.decode(first, len(prompt), pages, 0, ANSWER - 1)])


def test_bfloat16_is_as_close_as_transformers(tmp_path: Path) -> None:
    path = make_qwen3_next(tmp_path, torch.bfloat16, seed=3, gain=2.0)
    model = Model(path, torch.bfloat16)
    [tokens] = prompts(1, 300, seed=13, low=96, high=97)
    model.zero(0)
    logits = [model.step([Part(tokens[:72], 0, range(7), 0)])[-1:]]
    logits += [model.step([Part([token], at, range(7), 0)]) for at, token in enumerate(tokens[72:], 72)]
    told = [dict(enumerate(row.log_softmax(-1).tolist())) for row in torch.cat(logits)]
    assert_as_close_as_reference(path, [(tokens, 72, told)])


@pytest.mark.parametrize("heads", [(2, 4), (1, 3), (2, 2)])
def test_a_layer_equals_transformers(tmp_path: Path, heads: tuple[int, int]) -> None:
    keys, values = heads
    sizes = {"linear_num_key_heads": keys, "linear_num_value_heads": values, "num_hidden_layers": 3}
    path = make_qwen3_next(tmp_path, seed=5, **sizes)
    checkpoint = open_checkpoint(path)
    own = checkpoint.config.delta
    assert own is not None
    layer = DeltaNet(checkpoint.config, Weights(checkpoint, torch.float32, CPU), layer_prefix(0) + "linear_attn.")
    x = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = reference_model(str(path)).model.layers[0].linear_attn(x)
        inputs, gate = layer.project(x.flatten(0, 1))
        slots = torch.tensor([1, 0])
        states = StateSlots(torch.zeros(2, 1, values, own.key_dim * own.value_dim), slots)
        known = StateSlots(torch.zeros(2, 3, keys, own.width), slots)
        answer = layer.gated(delta.attend_state(inputs, states, known, Runs([70, 70], CPU)), gate)
        torch.testing.assert_close(layer.out(answer).view(x.shape), wanted, rtol=1e-4, atol=2e-5)


def test_cache_groups(path: Path) -> None:
    """KV of the layers that have it, and two states of a slot each; of the model as it is served, sizes by hand."""
    kept, states, known = open_checkpoint(path).config.cache_groups
    assert (kept.kind, kept.layers) == (CacheKind.ALL, (2, 5))
    for group, shape in ((states, (4, 1, 4, 1, 24 * 16)), (known, (4, 3, 2, 1, 2 * 24 + 2 * 16))):
        assert (group.kind, group.layers) == (CacheKind.STATE, (0, 1, 3, 4))
        assert object_shard(group, BLOCK, 4).shape == shape
    assert states.layout.dtype == "float32" and not known.layout.dtype
