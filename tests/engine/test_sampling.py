"""All processors together against the oracle, rows against themselves alone, histories, preemption, resumed answers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.batch import SampleParams
from kvmesh.engine.runner import DecodeInput, PrefillInput
from kvmesh.engine.sampler import Sampler, _Batch
from kvmesh.engine.sampling import adjust, filters
from kvmesh.engine.sampling.history import History
from kvmesh.errors import InternalError, NonFiniteLogits
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.engine import oracle
from tests.support.engine.stepper import Stepper

VOCAB = 61
NEEDS_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


@dataclass
class Row:
    """One request: its parameters, what was said, and logits that depend on nothing but how long its answer is."""

    params: SampleParams
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def alone(self) -> Row:
        """Another life of it, from here on."""
        params = replace(self.params, history=History(self.prompt, self.answer))
        return replace(self, params=params, answer=list(self.answer))

    @property
    def now(self) -> torch.Tensor:
        return self.logits[self.params.token_index]

    def take(self, token_id: int) -> None:
        self.answer.append(token_id)
        self.params.token_index += 1

    @property
    def expected(self) -> int:
        x = oracle.adjusted(self.now.double().tolist(), self.params, self.prompt, self.answer)
        return oracle.token(x, self.params)


def row(rng: random.Random, steps: int, *, ties: bool = False) -> Row:
    """Half of all processors off, half anywhere in their range, its ends included."""

    def some(off: float, low: float, high: float) -> float:
        return rng.choice([off, off, low, high, rng.uniform(low, high), rng.uniform(low, high)])

    biased = rng.sample(range(VOCAB), rng.choice([0, 0, 1, 5, VOCAB]))
    params = SampleParams(
        temperature=some(0.0, 0.1, 2.0),
        top_p=some(1.0, 1e-6, 1.0),
        top_k=rng.choice([0, 0, 1, 2, 9, 40, VOCAB, 1000]),
        seed=rng.getrandbits(64),
        min_p=some(0.0, 0.0, 1.0),
        presence_penalty=some(0.0, -2.0, 2.0),
        frequency_penalty=some(0.0, -2.0, 2.0),
        repetition_penalty=some(1.0, 0.5, 3.0),
        logit_bias=tuple((token, rng.choice([-100.0, 100.0, rng.uniform(-3, 3)])) for token in biased),
        answered=rng.choice([0, 0, 7]),
    )
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 30, 200]))]
    params.history = History(prompt)
    logits = torch.randn(steps, VOCAB, generator=torch.Generator().manual_seed(rng.getrandbits(32))) * 3
    return Row(params, prompt, logits=logits.round() if ties else logits)


def advance(sampler: Sampler, rows: list[Row], device: str = "cpu") -> list[int]:
    logits = torch.stack([r.now for r in rows]).to(device)
    before = logits.clone()
    tokens = [one.token_id for one in sampler.sample(logits, [r.params for r in rows])]
    assert torch.equal(logits, before), "logits stay as they are"
    return tokens


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), candidates=st.sampled_from([1, 4, 128]), ties=st.booleans(), sort=st.booleans())
def test_a_batch_against_the_oracle_and_against_each_row_alone(
    device: str, seed: int, candidates: int, ties: bool, sort: bool
) -> None:
    """Twelve steps; rows join and leave in between, so lists are kept, grown and made anew; blocks of few rows."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "CANDIDATES", candidates)
        if sort:  # as other devices do it
            patch.setattr(filters, "_by_histogram", filters._by_sort)
        bits = rng.choice([filters.BUCKET_BITS, 22, 24])  # coarse: many tokens share a bucket
        patch.setattr(filters, "BUCKET_BITS", bits)
        patch.setattr(filters, "BUCKETS", (0x3F800000 >> bits) + 1)
        patch.setattr(adjust, "ROOM", 2)
        patch.setattr("kvmesh.engine.sampler.BLOCK_BYTES", 8 * VOCAB * rng.choice([1, 2, 100]))
        sampler = Sampler(torch.device(device))
        rows = [row(rng, 12, ties=ties) for _ in range(rng.randrange(1, 7))]
        for step in range(12):
            if step in (4, 9):
                rng.shuffle(rows)
                rows = rows[: rng.randrange(1, len(rows) + 1)] + [row(rng, 12, ties=ties) for _ in range(2)]
            going = [r for r in rows if r.params.token_index < 12]
            alone = [advance(Sampler(), [r.alone()])[0] for r in going]
            expected = [r.expected for r in going]
            tokens = advance(sampler, going, device)
            assert tokens == expected == alone, [r.params for r in going]
            for r, token_id in zip(going, tokens, strict=True):
                r.take(token_id)
    for r in rows:
        assert r.params.history is not None
        ids, counts = r.params.history.table()
        assert ids.tolist() == sorted({*r.prompt, *r.answer})
        assert counts.tolist() == [r.answer.count(token_id) for token_id in ids]


def test_a_step_that_goes_on_looks_at_no_row_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    class Counted(_Batch):
        def __init__(self, *args: Any) -> None:
            nonlocal made
            made += 1
            super().__init__(*args)

    monkeypatch.setattr("kvmesh.engine.sampler._Batch", Counted)
    rng, sampler = random.Random(1), Sampler()
    rows = [row(rng, 9) for _ in range(4)]
    for count, batches in ((4, 1), (4, 1), (4, 1), (3, 2), (3, 2), (4, 3)):
        for r, token_id in zip(rows[:count], advance(sampler, rows[:count]), strict=True):
            r.take(token_id)
        assert made == batches
    twin = copy.copy(rows[0].params)
    sampler.sample(torch.stack([r.now for r in rows]), [twin, *(r.params for r in rows[1:])])
    assert made == 4, "equal parameters are another row all the same"


def test_a_failed_step_is_in_no_history() -> None:
    rng, sampler = random.Random(2), Sampler()
    rows = [row(rng, 9) for _ in range(3)]
    logits = torch.stack([r.now for r in rows])
    logits[1, 5] = torch.nan
    with pytest.raises(NonFiniteLogits) as caught:
        sampler.sample(logits, [r.params for r in rows])
    assert caught.value.rows == (1,)
    for r in rows:
        assert r.params.history is not None
        assert r.params.history.table()[1].sum() == 0
    rest = [rows[0], rows[2]]
    assert advance(sampler, rest) == [r.expected for r in rest]


def test_what_no_caller_may_do_is_named() -> None:
    for params, words in (
        (SampleParams(frequency_penalty=0.5), "penalties need a history"),
        (SampleParams(logit_bias=((3, 1.0), (3, 2.0))), "names a token twice"),
    ):
        with pytest.raises(InternalError, match=words):
            Sampler().sample(torch.randn(1, VOCAB), [params])


def test_logprobs_are_those_before_bias_and_penalties() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    raw = logits.log_softmax(-1)
    params = SampleParams(logprobs=2, logit_bias=((9, 100.0),), presence_penalty=2.0, history=History(answer=[1, 2]))
    plain, biased = Sampler().sample(logits, [SampleParams(logprobs=2), params])
    assert biased.token_id == 9
    assert biased.logprob == pytest.approx(float(raw[1, 9]), abs=1e-6)
    for one, of in ((plain, raw[0]), (biased, raw[1])):
        best = of.topk(2)
        assert [token_id for token_id, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-6)


# ── through the engine ────────────────────────────────────────────────────────────────────────────

PROMPT = [5, 9, 9, 30, 31, 7, 5]
PENALISED: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": PENALISED,
    "drawn": PENALISED | {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01, "seed": 11},
}


def go_on(stepper: Stepper, said: list[int], pages: tuple[int, ...], params: SampleParams, count: int) -> list[int]:
    """Compute `said` but its last token, and then `count` tokens, one step each."""
    stepper.runner.prefill([PrefillInput(said[:-1], 0, pages)])
    step, made = DecodeInput(said[-1], len(said) - 1, pages, params), []
    for _ in range(count):
        [token] = stepper.runner.decode([step])
        made.append(token.token_id)
        step.token_id, step.position = token.token_id, step.position + 1
        params.token_index += 1
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_survive_preemption_and_another_instance(zoo: Callable[[str], Path], kind: str) -> None:
    """One answer undisturbed; the same one in a row that leaves with its history and joins again; and as a prompt that
    ends with the answer's first tokens."""
    path = zoo("qwen3-gqa1-tied")
    settings_ = KINDS[kind]
    [whole] = LocalEngine(path, num_pages=8).generate([PROMPT], GenerateParams(max_tokens=20, **settings_))
    [plain] = LocalEngine(path, num_pages=8).generate(
        [PROMPT], GenerateParams(max_tokens=20, **{k: v for k, v in settings_.items() if k not in PENALISED})
    )
    assert whole.token_ids != plain.token_ids, "penalties matter here"
    stepper = Stepper(path)
    pages = stepper.take(64)
    made = whole.token_ids[:1]
    for _ in range(3):  # each time as a new row, with what its join tells
        params = SampleParams(**settings_, token_index=len(made), history=History(PROMPT, made))
        made += go_on(stepper, PROMPT + made, pages, params, 4)
    assert made == whole.token_ids[:13]
    elsewhere = SampleParams(**settings_, answered=13, history=History(PROMPT, made))
    prompt = PROMPT + made
    [first] = stepper.runner.prefill([PrefillInput(prompt, 0, pages, elsewhere)])
    assert first is not None
    params = SampleParams(**settings_, answered=13, token_index=1, history=History(PROMPT, [*made, first.token_id]))
    made += [first.token_id, *go_on(stepper, [*prompt, first.token_id], pages, params, 6)]
    assert made == whole.token_ids


def test_bias_decides_and_penalties_forbid_what_was_said(zoo: Callable[[str], Path]) -> None:
    """A bias of 100 forces, one of -100 forbids; what the prompt said is penalised from the first token on."""
    engine = LocalEngine(zoo("qwen3-gqa1-tied"), num_pages=8)

    def answer(**more: Any) -> list[int]:
        [one] = engine.generate([PROMPT], GenerateParams(max_tokens=12, **more))
        return one.token_ids

    plain = answer()
    assert answer(logit_bias=((77, 100.0),)) == [77] * 12
    assert plain[0] not in answer(logit_bias=((plain[0], -100.0),))
    forced = answer(logit_bias=tuple((token, 80.0) for token in range(100, 112)), repetition_penalty=10.0)
    assert sorted(forced) == list(range(100, 112)), "each of the equally favoured once"
    favoured = tuple((token, 80.0) for token in (5, 9, 40))
    assert answer(logit_bias=favoured, repetition_penalty=10.0)[0] == 40, "5 and 9 are in the prompt"
