"""Steps by pieces say what launched steps say, whatever they are composed of; ranks capture the same or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.axes import Axes
from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampledToken, SampleParams
from kvmesh.engine.capture import bucket_for, capture_sizes
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.parallel import SOLO, Group, RankMesh
from kvmesh.engine.pieces import LEAST_TOKENS, MOST_PIECES, MOST_TOKENS, PieceGraphs, piece_sizes, token_buckets
from tests.support.checkpoints import prompts
from tests.support.engine.rank_processes import run_ranks
from tests.support.engine.recorded import RecordedCapture
from tests.support.engine.stepper import Stepper
from tests.support.reference import assert_matches_reference

Zoo = Callable[[str], Path]
SIZES = (4, 8, 24)
# One rope and two, norms after sums, biases, norms of heads, a head that is the embedding.
FAMILIES = ("llama-gqa7-linear", "qwen2", "qwen3-gqa1-tied", "gemma3")
WANTED = SampleParams(logprobs=5)


def use_pieces(stepper: Stepper, sizes: Sequence[int] = SIZES, capture: RecordedCapture | None = None) -> PieceGraphs:
    runner = stepper.runner
    with torch.inference_mode():
        runner.pieces = PieceGraphs(runner.model, runner.attention, tuple(sizes), capture or RecordedCapture())
    return runner.pieces


# ── whole steps ───────────────────────────────────────────────────────────────────────────────────


class Go(NamedTuple):
    """A request goes on by so many tokens in a step: as a chunk, or by one as a row of the batch."""

    request: int
    tokens: int
    row: bool


REQUESTS, LONGEST = 4, 60
GOES = st.builds(Go, st.integers(0, REQUESTS - 1), st.integers(1, 14), st.booleans())
COMPOSED = st.lists(st.lists(GOES, min_size=1, max_size=REQUESTS, unique_by=lambda go: go.request), max_size=7)


class Pair:
    """Two runners over pages of their own, one of which computes by pieces; both get the same tokens."""

    def __init__(self, path: Path) -> None:
        self.steppers = [Stepper(path, num_pages=REQUESTS * 4) for _ in range(2)]
        self.pieces = use_pieces(self.steppers[0])
        self.text = prompts(REQUESTS, 300, seed=9, low=LONGEST, high=LONGEST + 1)

    def run(self, steps: Sequence[Sequence[Go]]) -> None:
        """Asserts that both say the same and leave the same KV, slots that nobody wrote included."""
        pages = [tuple(range(4 * i, 4 * i + 4))[::-1] for i in range(REQUESTS)]
        at = [0] * REQUESTS
        for stepper in self.steppers:
            stepper.memory[:] = b"\xff" * len(stepper.memory)
        for step in steps:
            items, rows = [], []
            for go in step:
                i, tokens = go.request, 1 if go.row else min(go.tokens, LONGEST - at[go.request])
                if at[i] + tokens > LONGEST or not tokens:
                    continue
                if go.row:
                    rows.append(DecodeInput(self.text[i][at[i]], at[i], pages[i], WANTED))
                else:
                    items.append(PrefillInput(self.text[i][at[i] : at[i] + tokens], at[i], pages[i], WANTED))
                at[i] += tokens
            layers: list[list[int]] = [[], []]
            first, second = (
                stepper.runner.step(items, DecodeBatch.of(rows), seen.append)
                for stepper, seen in zip(self.steppers, layers, strict=True)
            )
            assert layers[0] == layers[1]
            for by_pieces, launched in zip(told(*first), told(*second), strict=True):
                assert by_pieces == pytest.approx(launched, abs=1e-4)
            a, b = (stepper.pages for stepper in self.steppers)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def told(first: Sequence[SampledToken | None], chosen: object) -> list[list[float]]:
    tokens = [*first, *chosen.tokens()]  # type: ignore[attr-defined]
    return [[p for _, p in token.top] for token in tokens if token is not None]


@pytest.fixture(scope="module")
def pairs(zoo: Zoo) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = Pair(zoo(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
@given(steps=COMPOSED)
@settings(max_examples=12)
def test_steps_by_pieces_equal_launched_ones(pairs: Callable[[str], Pair], name: str, steps: list[list[Go]]) -> None:
    pairs(name).run(steps)


MIXED = [[Go(0, 7, False), Go(1, 3, False)], [Go(1, 1, True), Go(2, 14, False)], [Go(0, 5, False)], [Go(2, 1, True)]]


def broken(pieces: PieceGraphs, how: str) -> None:
    """Makes one mistake that a step by pieces can have."""
    replays = {size: list(own) for size, own in pieces._pieces.items()}
    if how == "positions of an earlier step":
        pieces._positions = pieces._positions.clone()
    elif how == "attention of an earlier step":
        pieces._attended = pieces._attended.clone()
    elif how == "a piece too few":
        replays = {size: [*own[:-2], own[-1], own[-1]] for size, own in replays.items()}
    elif how == "a bucket that is too small":
        replays[8] = replays[4]
    elif how == "rows of nobody write KV":
        hidden, filler = pieces.hidden, torch.full((1,), 5)

        def more(tokens, positions, attend):  # type: ignore[no-untyped-def]
            answer = hidden(torch.cat((tokens, filler)), torch.cat((positions, positions[-1:] + 1)), attend)
            return None if answer is None else answer[:-1]

        pieces.hidden = more  # type: ignore[method-assign]
    pieces._pieces = replays


@pytest.mark.parametrize(
    "how",
    [
        "positions of an earlier step",
        "attention of an earlier step",
        "a piece too few",
        "a bucket that is too small",
        "rows of nobody write KV",
    ],
)
def test_mistakes_of_pieces_show(zoo: Zoo, how: str) -> None:
    pair = Pair(zoo("llama-gqa7-linear"))
    pair.run(MIXED)
    broken(pair.pieces, how)
    with pytest.raises(RuntimeError if how == "rows of nobody write KV" else AssertionError):
        pair.run(MIXED)


def test_greedy_tokens_equal_the_reference(zoo: Zoo) -> None:
    """Chunks within buckets and beyond them, which are launched."""
    stepper = Stepper(zoo("gemma3"))
    capture = RecordedCapture()
    pieces = use_pieces(stepper, (8, 32), capture)
    assert (pieces.sizes, pieces.failed, pieces.count) == ((8, 32), "", 2 * (stepper.checkpoint.config.layers + 1))
    [prompt] = prompts(1, 300, seed=2, low=83, high=84)
    assert_matches_reference(zoo("gemma3"), prompt, stepper.answer(prompt, 12, chunks=(3, 30, 40)))
    steps = 3 + 11  # chunks of 3, 30 and 10, and tokens after the first
    assert capture.replays == steps * (stepper.checkpoint.config.layers + 1)


# ── capture ───────────────────────────────────────────────────────────────────────────────────────


def test_a_record_keeps_the_numbers_and_tensors_that_it_had() -> None:
    """The capture of these tests is as strict as a graph: else they show nothing."""
    capture, factor = RecordedCapture(), [2.0]
    source, target, other = torch.ones(3), torch.zeros(3), [torch.ones(3)]
    with torch.inference_mode():
        replay = capture.record(lambda: target.copy_(source * factor[0] + other[0]))  # type: ignore[arg-type]
        kept: list[torch.Tensor] = []
        makes = capture.record(lambda: kept.append(source + 1))
        uses = capture.record(lambda: target.copy_(kept[0]))  # type: ignore[arg-type]
    source.fill_(5)
    factor[0], other[0] = 7.0, torch.full((3,), 100.0)
    replay()
    assert target.tolist() == [11.0] * 3
    makes()
    uses()  # another record's tensor, in a pool that is written over
    assert (target > 1e30).all()


class Ranks(Group):
    """Two ranks, of which the other says what it is told to."""

    size = 2

    def __init__(self, others: Sequence[bool]) -> None:
        self._others = iter(others)

    def agree(self, well: bool) -> bool:
        return next(self._others) and well


def test_sizes_are_captured_largest_first_until_one_fails() -> None:
    seen: list[int] = []

    def works(size: int) -> list[Callable[[], None]]:
        return [lambda: seen.append(size)] * 2

    done, failed = capture_sizes("a step of {}", (1, 2, 3), works, RecordedCapture(), SOLO)
    assert (sorted(done), failed, seen[:6:2]) == ([1, 2, 3], "", [3, 3, 2])
    done, failed = capture_sizes("a step of {}", (1, 2, 3), works, RecordedCapture(lambda n: n == 4), SOLO)
    assert (sorted(done), failed) == ([3], "a step of 2 could not be captured: record 4 is refused")
    done, failed = capture_sizes("a step of {}", (1, 2, 3), works, RecordedCapture(), Ranks([True, True, False]))
    assert (sorted(done), failed) == ([2, 3], "a step of 1 could not be captured: another rank failed")


def test_a_failed_warm_up_ends_a_group_and_not_a_rank_alone() -> None:
    """The others of the group wait in a sum to which this rank never comes."""

    def works(size: int) -> list[Callable[[], None]]:
        raise RuntimeError(f"no memory for {size}")

    done, failed = capture_sizes("a step of {}", (1, 2), works, RecordedCapture(), SOLO)
    assert (dict(done), failed) == ({}, "a step of 2 could not be captured: no memory for 2")
    with pytest.raises(RuntimeError, match="no memory for 2"):
        capture_sizes("a step of {}", (1, 2), works, RecordedCapture(), Ranks([]))


def test_without_pieces_steps_are_launched(zoo: Zoo) -> None:
    stepper = Stepper(zoo("qwen3-gqa1-tied"))
    pieces = use_pieces(stepper, capture=RecordedCapture(lambda number: True))
    assert (pieces.sizes, pieces.count) == ((), 0) and "24 tokens in pieces could not be captured" in pieces.failed
    [prompt] = prompts(1, 300, seed=3, low=20, high=21)
    assert_matches_reference(zoo("qwen3-gqa1-tied"), prompt, stepper.answer(prompt, 4))


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────


def test_token_buckets_waste_an_eighth() -> None:
    sizes = token_buckets(MOST_TOKENS)
    assert len(sizes) == 32 and sizes[-1] == MOST_TOKENS
    for count in range(1, MOST_TOKENS + 1):
        size = bucket_for(count, sizes)
        assert size is not None and size - count < max(32, count / 8)
    assert token_buckets(1) == (32,) and token_buckets(100) == (32, 64, 96, 128)
    assert token_buckets(10**6) == sizes


def own(**shape: int) -> ModelConfig:
    base = {"vocab_size": 331, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    return ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **base, **shape})


def test_pieces_reach_to_where_launches_are_hidden_and_are_bounded() -> None:
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
    assert piece_sizes(own(**llama), None)[-1] == 832
    assert piece_sizes(own(**llama), 300)[-1] == 320
    wide = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126}
    assert piece_sizes(own(**wide), None)[-1] == LEAST_TOKENS
    small = llama | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 100}
    sizes = piece_sizes(own(**small), None)
    assert sizes[-1] == MOST_TOKENS and len(sizes) * 101 <= MOST_PIECES


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


def rank_main(rank: int, folder: Path, path: Path) -> None:
    torch.set_num_threads(1)
    mesh = RankMesh(Axes(tp=2), rank, str(folder / "meet"), timeout_s=20)
    mesh.connect(60)
    assert not mesh.tp.capturable, "over gloo nothing is captured by itself"
    stepper = Stepper(path, mesh=mesh)
    layers = stepper.checkpoint.config.layers
    # Rank 1 fails in the last piece of the smallest size: on a CPU a record does its work, sums of all ranks too.
    capture = RecordedCapture(lambda number: rank == 1 and number == 3 * (layers + 1))
    pieces = use_pieces(stepper, capture=capture)
    [prompt] = prompts(1, 300, seed=4, low=31, high=32)
    answer = stepper.answer(prompt, 6, chunks=(20,))
    torch.save((pieces.sizes, pieces.failed, capture.replays, answer), folder / f"{rank}.pt")
    mesh.close()


@pytest.mark.slow
def test_ranks_capture_the_same_sizes_and_sum_in_replays(zoo: Zoo, tmp_path: Path) -> None:
    path = zoo("llama-gqa4-llama3")
    run_ranks(rank_main, (tmp_path, path), 2)
    told = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert [sizes for sizes, *_ in told] == [(8, 24)] * 2
    assert "another rank failed" in told[0][1] and "is refused" in told[1][1]
    assert told[0][2:] == told[1][2:] and told[0][2] > 0
    [prompt] = prompts(1, 300, seed=4, low=31, high=32)
    assert_matches_reference(path, prompt, told[0][3])
