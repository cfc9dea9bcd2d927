"""Qwen3-Next against transformers: one layer of gated DeltaNet, and the whole model in a runner over KV and states,
cold, in chunks, beside others in one step, launched ahead, resumed from a snapshot, and cut over two ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvmesh.engine.attention import delta
from kvmesh.engine.attention.delta import Runs, StateSlots
from kvmesh.engine.axes import Axes
from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampledToken, SampleParams
from kvmesh.engine.cache_memory import group_shapes
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.qwen3_next import DeltaNet
from kvmesh.engine.parallel import SOLO, Group, check_shares
from kvmesh.engine.runner import Runner, torch_dtype
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights
from kvmesh.errors import CheckpointError, ConfigError
from kvmesh.kvcache.cache_groups import CacheKind, object_shard
from tests.support.checkpoints import prompts
from tests.support.engine.given_mesh import GivenMesh, Together
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.reference import assert_as_close_as_reference, assert_matches_reference, reference_model

BLOCK, PAGES, SLOTS, ANSWER = 16, 24, 5, 12
CPU = torch.device("cpu")
FIRST, SECOND = prompts(2, 300, seed=11, low=83, high=84)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_next(tmp_path_factory.mktemp("qwen3_next"))


class Part(NamedTuple):
    """Tokens of one request in a step; its states lie in `slot`, and elsewhere in another slot of the other group."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int

    @property
    def groups(self) -> tuple[Sequence[int], ...]:
        return tuple(self.pages), (self.slot,), (SLOTS - 1 - self.slot,)


class Model:
    """A runner over memory that begins as NaN, pages and slots alike."""

    def __init__(self, path: Path, dtype: str = "float32", group: Group = SOLO) -> None:
        checkpoint = open_checkpoint(path)
        shapes = group_shapes(checkpoint.config, torch_dtype(dtype), BLOCK, group.rank, group.size)
        self.memory = [
            torch.full((count, *shape.layout.shape), torch.nan, dtype=shape.dtype)
            for shape, count in zip(shapes, (PAGES, SLOTS, SLOTS), strict=True)
        ]
        self.runner = Runner(checkpoint, dtype, "cpu", BLOCK, self.memory, GivenMesh(group))
        self.params = SampleParams(logprobs=checkpoint.config.vocab_size)

    def copy(self, source: int, target: int) -> None:
        self.runner.copy_slots(1, [source], [target])
        self.runner.copy_slots(2, [SLOTS - 1 - source], [SLOTS - 1 - target])

    def step(self, rows: Sequence[Part], chunks: Sequence[Part] = ()) -> list[SampledToken]:
        """The token after each part."""
        batch = DecodeBatch.of([DecodeInput(row.token_ids[0], row.start, (), self.params, row.groups) for row in rows])
        items = [PrefillInput(part.token_ids, part.start, sample=self.params, groups=part.groups) for part in chunks]
        first, chosen = self.runner.step(items, batch)
        return [*chosen.tokens(), *(token for token in first if token is not None)]

    def decode(self, last: int, position: int, pages: Sequence[int], slot: int, count: int) -> list[int]:
        tokens = [last]
        for at in range(position, position + count):
            tokens.append(self.step([Part(tokens[-1:], at, pages, slot)])[0].token_id)
        return tokens[1:]

    def answer(self, prompt: list[int], pages: Sequence[int], slot: int, chunks: Sequence[int] = ()) -> list[int]:
        at, first = 0, -1
        for length in (*chunks, len(prompt) - sum(chunks)):
            first = self.step((), [Part(prompt[at : at + length], at, pages, slot)])[0].token_id
            at += length
        return [first, *self.decode(first, len(prompt), pages, slot, ANSWER - 1)]


def test_tokens_equal_transformers(path: Path) -> None:
    model = Model(path)
    cold = model.answer(FIRST, range(6), 3)
    assert_matches_reference(path, FIRST, cold)
    assert model.answer(FIRST, range(6, 12), 1, chunks=(1, 7, 33, 2)) == cold
    assert model.answer(FIRST, range(6), 1) == cold  # in a slot and pages that others have left


def test_one_goes_on_beside_chunks_of_another_from_a_snapshot(path: Path) -> None:
    """The snapshot lies in the middle of a block, and its source goes on with other tokens."""
    model, own, pages = Model(path), range(6), range(6, 12)
    model.step((), [Part(FIRST[:70], 0, own, 0)])
    model.copy(0, 4)
    model.step((), [Part(SECOND[:5], 70, own, 0)])
    at, tokens = 0, FIRST[70:]
    while len(tokens) < 13 + ANSWER or at < len(SECOND):
        place = min(70 + at // 4, 69 + len(tokens))
        chunk = [Part(SECOND[at : at + 4], at, pages, 2)] if at < len(SECOND) else []
        told = model.step([Part([tokens[place - 70]], place, own, 4)], chunk)
        if place == 69 + len(tokens):
            tokens.append(told[0].token_id)
        at += 4
        if chunk:
            last = told[-1].token_id
        else:
            break
    assert_matches_reference(path, FIRST, tokens[13:])
    assert_matches_reference(path, SECOND, [last, *model.decode(last, len(SECOND), pages, 2, ANSWER - 1)])


def test_steps_launched_ahead(path: Path) -> None:
    model = Model(path)
    cold = model.answer(FIRST, range(6), 3)
    [first] = model.step((), [Part(FIRST, 0, range(6, 12), 1)])
    assert first.token_id == cold[0]
    part, before, told = Part((), 0, range(6, 12), 1), None, [first.token_id]
    row = torch.zeros(1, dtype=torch.int64).numpy()
    for step in range(ANSWER - 1):
        batch = DecodeBatch.of([DecodeInput(cold[0], len(FIRST) + step, (), SampleParams(), part.groups)])
        launched = model.runner.launch(batch) if before is None else model.runner.launch(batch, before, row)
        if before is not None:
            told.extend(before.result().token_ids.tolist())
        before = launched
    assert before is not None
    assert [*told, *before.result().token_ids.tolist()] == cold


@pytest.mark.parametrize("lost", ["state", "inputs", "a token late"])
def test_a_wrong_state_shows(path: Path, lost: str) -> None:
    model, pages = Model(path), range(6)
    first = model.step((), [Part(FIRST, 0, pages, 0)])[0].token_id
    if lost == "state":
        model.runner.zero_slots(1, [0])
    elif lost == "inputs":
        model.runner.zero_slots(2, [SLOTS - 1])
    else:
        model.step([Part([first], len(FIRST), pages, 0)])
    with pytest.raises(AssertionError, match="reference chooses"):
        assert_matches_reference(path, FIRST, [first, *model.decode(first, len(FIRST), pages, 0, ANSWER - 1)])


def test_bfloat16_is_as_close_as_transformers(tmp_path: Path) -> None:
    path = make_qwen3_next(tmp_path, torch.bfloat16, seed=3, gain=2.0)
    model = Model(path, "bfloat16")
    [tokens] = prompts(1, 300, seed=13, low=96, high=97)
    told = model.step((), [Part(tokens[:72], 0, range(7), 0)])
    for at, token in enumerate(tokens[72:], 72):
        told += model.step([Part([token], at, range(7), 0)])
    assert_as_close_as_reference(path, [(tokens, 72, [dict(token.top) for token in told])])


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


def test_two_ranks_answer_as_transformers_does(path: Path) -> None:
    """Each has half of the heads and of their states: one run of heads of what one rank alone has."""
    parts, barrier = [None, None], threading.Barrier(2)

    def rank(number: int) -> tuple[list[int], list[torch.Tensor]]:
        model = Model(path, group=Together(number, parts, barrier))
        told = model.answer(FIRST, range(6), 3, chunks=(1, 7, 33, 2))
        return told, [model.memory[1][3], model.memory[2][SLOTS - 1 - 3]]

    with ThreadPoolExecutor(2) as pool:
        (first, own), (second, others) = pool.map(rank, range(2))
    assert first == second
    assert_matches_reference(path, FIRST, first)
    alone = Model(path)
    alone.answer(FIRST, range(6), 3)
    for some, more, both in zip(own, others, (alone.memory[1][3], alone.memory[2][SLOTS - 1 - 3]), strict=True):
        torch.testing.assert_close(torch.cat((some, more), 2), both, rtol=1e-3, atol=1e-4)
    with pytest.raises(ConfigError, match="tensor_parallel=4: must divide linear_num_key_heads=2"):
        check_shares(open_checkpoint(path).config, Axes(tp=4))


@pytest.mark.parametrize("change", [{}, {"full_attention_interval": 2, "partial_rotary_factor": 0.5}], ids=str)
def test_a_config_is_read_as_transformers_reads_it(change: dict[str, Any]) -> None:
    """What the file leaves out, too."""
    from transformers import Qwen3NextConfig

    theirs = Qwen3NextConfig(vocab_size=331, num_hidden_layers=8, **change)
    sizes = {key: getattr(theirs, key) for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    raw = {"architectures": ["Qwen3NextForCausalLM"], "vocab_size": 331, "num_hidden_layers": 8} | sizes | change
    for given in (raw, {**theirs.to_dict(), "architectures": raw["architectures"]}):
        own = ModelConfig.from_hf(given)
        delta_sizes, experts = own.delta, own.experts
        assert delta_sizes is not None and experts is not None
        linear = [name == "linear_attention" for name in theirs.layer_types]
        assert [layer in delta_sizes.layers for layer in range(8)] == linear
        assert (delta_sizes.key_heads, delta_sizes.value_heads) == (16, 32)
        assert (delta_sizes.key_dim, delta_sizes.value_dim, delta_sizes.kernel) == (128, 128, 4)
        assert (own.head_dim, own.kv_heads, own.heads) == (256, 2, 16)
        assert own.rope.partial == theirs.rope_parameters["partial_rotary_factor"]
        assert own.rope.theta == theirs.rope_parameters["rope_theta"]
        assert (experts.count, experts.chosen, experts.inner, experts.shared_inner) == (512, 10, 512, 512)
        assert own.canonical() == ModelConfig.from_hf(raw).canonical()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("linear_num_value_heads", 24),
        ("linear_conv_kernel_dim", 1),
        ("layer_types", ["full_attention"] * 8),
        ("layer_types", ["sliding_attention"] * 8),
        ("layer_types", ["linear_attention", "full_attention"]),
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused(key: str, value: object) -> None:
    raw = {"architectures": ["Qwen3NextForCausalLM"], "vocab_size": 331, "num_hidden_layers": 8, "hidden_size": 64}
    raw |= {"intermediate_size": 96, "num_attention_heads": 4, key: value}
    with pytest.raises(CheckpointError, match=f"config.json: {key}="):
        ModelConfig.from_hf(raw)


def test_cache_groups(path: Path) -> None:
    """KV of the layers that have it, and two states of a slot each; sizes by hand."""
    config = open_checkpoint(path).config
    kept, states, known = config.cache_groups
    assert (kept.kind, kept.layers) == (CacheKind.ALL, (2, 5))
    assert config.kv_elements_per_token == 2 * 2 * 2 * 16
    for group, shape in ((states, (4, 1, 4, 1, 24 * 16)), (known, (4, 3, 2, 1, 2 * 24 + 2 * 16))):
        assert (group.kind, group.layers) == (CacheKind.STATE, (0, 1, 3, 4))
        assert object_shard(group, BLOCK, 4).shape == shape
    assert states.layout.dtype == "float32" and not known.layout.dtype
