"""Traces: reading, prompts of equal prefixes, and the hit rate of a perfect cache against brute force."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.sim.workloads import trace
from kvmesh.sim.workloads.trace import Made, TokenMaker, TraceRequest, TraceShape

VOCAB = 2040


def line(**changes: Any) -> str:
    told = {"timestamp": 27, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7, 9]}
    return json.dumps({**told, **changes})


def request(ids: list[int], tokens: int, output: int = 1, at_ms: float = 0.0, index: int = 0) -> TraceRequest:
    return TraceRequest(index, at_ms, tokens, output, tuple(ids))


def test_a_line_is_read() -> None:
    assert trace.parse(line(), 3) == TraceRequest(3, 27.0, 1030, 5, (0, 7, 9))
    assert trace.parse(line(timestamp=27.5), 0).at_ms == 27.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "trace line 5: line='{': is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("[1]", "must be an object"),
        (line(timestamp=-1), "timestamp=-1: must be a number of at least 0"),
        (line(timestamp=float("nan")), "timestamp=nan"),
        (line(input_length=0), "input_length=0: must be a number of at least 1"),
        (line(input_length=True), "input_length=True"),
        (line(output_length="9"), "output_length='9'"),
        (line(output_length=None), "output_length=None"),
        (line(hash_ids=[0, "7", 9]), "hash_ids=[0, '7', 9]: must be a list of whole numbers"),
        (line(hash_ids=[0, 7, -9]), "hash_ids=[0, 7, -9]"),
        (line(hash_ids=[0, 7]), "2 ids do not fit input_length=1030 in blocks of 512; see --block-tokens"),
    ],
)
def test_a_bad_line_is_refused_by_line_field_and_value(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace.parse(text, 4)
    assert "trace line 5: " in caught.value.message
    assert words in caught.value.message


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join([line(timestamp=1), "", line(timestamp=2), line(timestamp=2)]))
    assert [(one.index, one.at_ms) for one in trace.read(file)] == [(0, 1), (2, 2), (3, 2)]
    file.write_text(line(timestamp=3) + "\n" + line(timestamp=2))
    with pytest.raises(ConfigError, match=r"trace line 2: timestamp=2: earlier than the line above"):
        list(trace.read(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        list(trace.read(file))
    with pytest.raises(ConfigError, match=r"trace='.*gone': No such file"):
        list(trace.read(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("from_s", "to_s", "count", "found"),
    [
        (0, None, None, [0, 1000, 1500, 2000]),
        (1, 2, None, [1000, 1500]),
        (1, None, 2, [1000, 1500]),
        (0, 0, None, []),
        (0, None, 0, []),
        (3, None, None, []),
    ],
)
def test_a_slice_by_time_and_count(from_s: float, to_s: float | None, count: int | None, found: list[int]) -> None:
    all_of_it = [request([1], 1, at_ms=at) for at in (0, 1000, 1500, 2000)]
    assert [one.at_ms for one in trace.between(all_of_it, from_s, to_s, count)] == found


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"scale": Fraction(1, 1024)}, "scale_tokens=1/1024: makes blocks of 0.5 tokens from 512"),
        ({"scale": Fraction(1, 3)}, "they must be whole"),
        ({"too_long": "drop"}, "too_long='drop': choose one of cut, skip"),
        ({"trace_block": 0}, "block_tokens=0"),
        ({"max_output": 0}, "max_output=0"),
    ],
)
def test_a_shape_that_cannot_be(shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TraceShape(**shape)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("tokens", "output", "scaled"),
    [
        (512, 500, (16, 16)),
        (1030, 1, (33, 1)),  # 6 tokens of a last block are less than one, and become one
        (1023, 33, (31, 2)),  # a last block never becomes a full one
        (1, 0, (1, 1)),
    ],
)
def test_scaled_lengths(tokens: int, output: int, scaled: tuple[int, int]) -> None:
    shape = TraceShape(scale=Fraction(1, 32))
    one = request([0] * -(-tokens // 512), tokens, output)
    assert (shape.prompt_tokens(one), shape.output_tokens(one)) == scaled


@pytest.mark.parametrize(
    ("too_long", "tokens", "output", "made"),
    [
        ("cut", 50, 50, (7, 50, 50)),
        ("cut", 51, 50, (6, 48, 50)),
        ("skip", 51, 50, None),
        ("cut", 50, 51, (7, 50, 50)),  # an answer may take half of the context
        ("cut", 5, 200, (1, 5, 50)),
        ("skip", 5, 200, None),
    ],
)
def test_what_exceeds_the_context(too_long: str, tokens: int, output: int, made: tuple[int, int, int] | None) -> None:
    shape = TraceShape(trace_block=8, context_tokens=100, too_long=too_long)
    found = trace.fit([request(list(range(-(-tokens // 8))), tokens, output)], shape)
    if made is None:
        assert (found.made, found.skipped, found.cut) == ([], 1, 0)
        return
    (one,) = found.made
    assert (len(one.hash_ids), one.prompt_tokens, one.output_tokens) == made
    assert (found.skipped, found.cut) == (0, (tokens, output) != (50, 50))


def test_a_context_that_holds_no_block_leaves_the_request_out() -> None:
    found = trace.fit([request([1, 2], 1000, 4)], TraceShape(context_tokens=100))
    assert (found.made, found.cut, found.skipped) == ([], 0, 1)


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts grown from a tree of chained ids, with blocks of 8 tokens; a partial block is a leaf."""
    ids: dict[tuple[int, ...], int] = {}
    found = []
    for index in range(draw(st.integers(1, 12))):
        path = draw(st.lists(st.integers(0, 2), max_size=5))
        rest = draw(st.integers(0 if path else 1, 7))
        chain = [ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path))]
        if rest:
            chain.append(ids.setdefault((*path, -rest), len(ids)))
        found.append(request(chain, len(path) * 8 + rest, index=index))
    return found


@given(traces(), st.sampled_from([Fraction(1), Fraction(1, 2)]), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_equal_ids_are_equal_prefixes_and_nothing_else_is(
    requests: list[TraceRequest], scale: Fraction, seed: int
) -> None:
    shape = TraceShape(scale=scale, trace_block=8)
    maker = TokenMaker(VOCAB, seed)
    made = trace.fit(requests, shape).made
    prompts = [maker.prompt(one, shape.block) for one in made]
    assert [len(prompt) for prompt in prompts] == [one.prompt_tokens for one in made]
    assert all(VOCAB // 8 <= token < VOCAB - VOCAB // 8 for prompt in prompts for token in prompt)
    for a, p in zip(made, prompts, strict=True):
        for b, q in zip(made, prompts, strict=True):
            same = next((i for i, (x, y) in enumerate(zip(a.hash_ids, b.hash_ids, strict=False)) if x != y), None)
            same = min(len(a.hash_ids), len(b.hash_ids)) if same is None else same
            shared = min(same * shape.block, len(p), len(q))
            assert p[:shared] == q[:shared]
            at = same * shape.block
            if len(p) >= at + 3 and len(q) >= at + 3:  # long enough to spell their ids
                assert p[at : at + 3] != q[at : at + 3]


def test_tokens_depend_on_seed_and_id_alone() -> None:
    one = TokenMaker(VOCAB, 1)
    assert one.block(5, 16) == TokenMaker(VOCAB, 1).block(5, 16)
    assert one.block(5, 7) == one.block(5, 16)[:7]
    assert one.block(5, 16) != one.block(6, 16)
    assert one.block(5, 16) != TokenMaker(VOCAB, 2).block(5, 16)
    assert one.noise("a", 3) == one.noise("a", 9)[:3] != one.noise("b", 3)
    with pytest.raises(ConfigError, match="vocab=15"):
        TokenMaker(15)


@given(st.lists(st.integers(0, 2**31 - 1), unique=True, min_size=2, max_size=40))
def test_ids_are_spelled_by_the_first_three_tokens(ids: list[int]) -> None:
    maker = TokenMaker(VOCAB)
    assert len({tuple(maker.block(one, 3)) for one in ids}) == len(ids)


# ── the best that can be ──────────────────────────────────────────────────────────────────────────


def test_ideal_by_hand() -> None:
    prompts = [([0, 1, 2], 20), ([0, 1, 2], 20), ([0, 1, 3], 24), ([4], 3), ([4], 3)]
    found = trace.ideal(prompts, 8)
    assert (found.blocks, found.hit_blocks) == (11, 3 + 2 + 1)
    assert (found.tokens, found.hit_tokens) == (70, 20 + 16 + 3)
    assert found.by_blocks == 6 / 11
    assert trace.ideal([], 8).by_tokens == 0.0


@given(traces())
@settings(max_examples=60, deadline=None)
def test_ideal_equals_brute_force_over_tokens(requests: list[TraceRequest]) -> None:
    maker, shape = TokenMaker(VOCAB), TraceShape(trace_block=8)
    made = trace.fit(requests, shape).made
    before: set[tuple[int, ...]] = set()
    hits = 0
    for one in made:
        best = max((n for n in range(len(one.hash_ids) + 1) if one.hash_ids[:n] in before or not n), default=0)
        hits += min(best * 8, one.prompt_tokens)
        before |= {one.hash_ids[:n] for n in range(1, len(one.hash_ids) + 1)}
    assert trace.ideal([(one.hash_ids, one.prompt_tokens) for one in made], 8).hit_tokens == hits
    assert [len(maker.prompt(one, 8)) for one in made] == [one.prompt_tokens for one in made]


@given(traces(), st.sampled_from([2, 4, 8, 16]))
@settings(max_examples=60, deadline=None)
def test_reachable_equals_brute_force_over_token_prefixes(requests: list[TraceRequest], block: int) -> None:
    maker = TokenMaker(VOCAB)
    prompts = [maker.prompt(one, 8) for one in trace.fit(requests, TraceShape(trace_block=8)).made]
    hits, before = 0, set[tuple[int, ...]]()
    for prompt in prompts:
        usable = (len(prompt) - 1) // block
        hits += block * next((n for n in range(usable, 0, -1) if tuple(prompt[: n * block]) in before), 0)
        before |= {tuple(prompt[: n * block]) for n in range(1, len(prompt) // block + 1)}
    found = trace.reachable(prompts, block)
    assert (found.hit_tokens, found.tokens) == (hits, sum(map(len, prompts)))


def test_an_unscaled_line_keeps_its_lengths() -> None:
    (made,) = trace.fit([request([0, 7, 9], 1030, 5)], TraceShape()).made
    assert made == Made(request([0, 7, 9], 1030, 5), (0, 7, 9), 1030, 5)
