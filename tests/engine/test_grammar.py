"""Rows with a grammar: masks against every token tried one by one, choices against float logits masked by hand, the
same masks wherever an answer is cut, faults that are a row's own."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from kvmesh import grammar_limits
from kvmesh.engine.batch import DecodeBatch, SampleParams
from kvmesh.engine.runner import DecodeInput, PrefillInput
from kvmesh.engine.sampler import Sampler
from kvmesh.engine.sampling import grammar as grammar_module
from kvmesh.engine.sampling.grammar import AnswerGrammar, GrammarCompiler, MaskMaker, mask_words
from kvmesh.engine.sampling.history import History
from kvmesh.errors import InvalidRequest, NonFiniteLogits
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import oracle

VOCAB, WORDS = 340, 330  # the embedding has more rows than the tokenizer has tokens
EOS = (257, 258)
A = 64  # the token "a", before the other letters
PERSON = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
ANY_JSON = LLMatcher.grammar_from_json_schema({"type": "object"})
WORD = LLMatcher.grammar_from_regex("(yes|no|maybe)")
OPEN = LLMatcher.grammar_from_regex("[a-f]+")  # may end after each letter, or never
FORCED = LLMatcher.grammar_from_regex("abc")
GRAMMARS = {"person": PERSON, "json": ANY_JSON, "word": WORD, "open": OPEN, "forced": FORCED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("grammar") / "m", vocab_size=WORDS, seed=3)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": list(EOS)}))
    return path


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder, VOCAB, EOS)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> LLTokenizer:
    return LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=list(EOS))


def allowed_by_trial(tokenizer: LLTokenizer, grammar: str, answer: Sequence[int]) -> list[int]:
    """Every token of the vocabulary is tried by itself, by a matcher that has seen nothing else. Where the next bytes
    are forced, they are to be said as the tokenizer would; where nothing can follow, an end token does."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert matcher.consume_tokens(list(answer))
    if matcher.is_stopped():
        return list(EOS)
    if forced := matcher.compute_ff_tokens():
        return forced[:1]
    return [token for token in range(VOCAB) if matcher.validate_tokens([token]) == 1]


def mask_of(grammar: AnswerGrammar) -> list[int]:
    made = MaskMaker().begin([grammar], VOCAB)()
    assert not made.failed, made.failed
    return np.flatnonzero(np.unpackbits(made.bits[0].view(np.uint8), bitorder="little")).tolist()


def walk(tokenizer: LLTokenizer, grammar: str, seed: int, most: int = 40) -> list[int]:
    """An answer that the grammar allows, at random, to its end or so many tokens."""
    rng, answer = random.Random(seed), list[int]()
    while len(answer) < most and (not answer or answer[-1] not in EOS):
        answer.append(rng.choice(allowed_by_trial(tokenizer, grammar, answer)))
    return answer


# ── masks ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_at_every_cut_are_those_of_every_token_tried(
    name: str, compiler: GrammarCompiler, tokenizer: LLTokenizer
) -> None:
    """One that followed the answer, and one that was made anew with the tokens so far: wherever a row goes."""
    text = GRAMMARS[name]
    for seed in range(3):
        answer = walk(tokenizer, text, seed, 20)
        followed = compiler.begin(text, ())
        for cut in range(len(answer)):
            expected = allowed_by_trial(tokenizer, text, answer[:cut])
            assert mask_of(followed) == expected == mask_of(compiler.begin(text, answer[:cut])), (seed, cut)
            assert max(expected) < WORDS, "an embedding row without a token is never allowed"
            followed.add(answer[cut])


def test_a_complete_grammar_allows_every_end_token_and_nothing_else(compiler: GrammarCompiler) -> None:
    done = compiler.begin(WORD, ())
    tokens = LLTokenizer((compiler._path).read_text(), n_vocab=VOCAB, eos_token=list(EOS)).tokenize_str("maybe")
    for token in tokens:
        assert token in mask_of(done)
        done.add(token)
    assert mask_of(done) == list(EOS)


def test_a_row_that_may_not_end_ends_where_nothing_else_is_possible(
    compiler: GrammarCompiler, tokenizer: LLTokenizer
) -> None:
    [a] = tokenizer.tokenize_str("a")
    assert set(EOS) < set(mask_of(compiler.begin(OPEN, [a])))
    unending = compiler.begin(OPEN, [a], may_end=False)
    assert not set(EOS) & set(mask_of(unending)) and a in mask_of(unending)
    assert mask_of(compiler.begin(WORD, tokenizer.tokenize_str("no"), may_end=False)) == list(EOS)


def test_a_grammar_is_compiled_once_and_the_oldest_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "KEPT_GRAMMARS", 2)
    compiler = GrammarCompiler(folder, VOCAB, EOS)
    first = compiler.compile(WORD)
    assert compiler.compile(WORD) is first
    compiler.compile(OPEN), compiler.compile(WORD), compiler.compile(FORCED)
    assert len(compiler._kept) == 2 and compiler.compile(WORD) is first
    assert compiler._bytes == sum(size for size, _ in compiler._kept.values())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no grammar {{{", "Expected"),
        (LLMatcher.grammar_from_json_schema({"allOf": [{"type": "integer"}, {"type": "string"}]}), "Unsatisfiable"),
    ],
)
def test_what_does_not_compile_is_an_invalid_request(text: str, why: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        compiler.compile(text).result(20)
    assert caught.value.field == "grammar" and "\n" not in caught.value.message and len(caught.value.message) < 400


def test_a_grammar_that_is_too_large_is_an_invalid_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_limits, "GRAMMAR_SYMBOLS", 10)
    with pytest.raises(InvalidRequest, match="grammar: "):
        GrammarCompiler(folder, VOCAB, EOS).compile(ANY_JSON).result(20)


def test_a_folder_without_a_tokenizer_or_a_model_without_an_end_refuses_grammars(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json cannot be read"):
        GrammarCompiler(tmp_path, VOCAB, EOS).compile(WORD).result(20)
    with pytest.raises(InvalidRequest, match="no end token"):
        GrammarCompiler(folder, VOCAB, ()).compile(WORD).result(20)


# ── choices ──────────────────────────────────────────────────────────────────────────────────────

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05, "logprobs": 3},
    {"logit_bias": ((A, 5.0), (257, -100.0)), "logprobs": 1},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.3},
]


def expected_token(x: torch.Tensor, p: SampleParams, allowed: Sequence[int] | None, answer: Sequence[int]) -> int:
    """The reference: float logits, -inf where the mask says no, then the sampler's definition."""
    masked = x.double().clone()
    if allowed is not None:
        masked[[token for token in range(VOCAB) if token not in set(allowed)]] = -torch.inf
    return oracle.token(oracle.adjusted(masked.tolist(), p, (), answer), p)


@pytest.mark.parametrize("way", ["choose", "launch", "apart"])
def test_tokens_are_those_of_logits_masked_by_hand(way: str, compiler: GrammarCompiler, tokenizer: LLTokenizer) -> None:
    """Rows with and without a grammar, in any order, greedy and drawn; each step's tokens go into the next."""
    names = [None, *GRAMMARS, None]
    rows: list[tuple[SampleParams, str | None, list[int]]] = []
    for at, (kind, name) in enumerate(itertools.product(KINDS, names)):
        p = SampleParams(seed=at, **kind)
        p.history = History() if p.penalised else None
        p.grammar = compiler.begin(GRAMMARS[name], ()) if name else None
        rows.append((p, GRAMMARS[name] if name else None, []))
    random.Random(1).shuffle(rows)
    sampler = Sampler()
    made = torch.Generator().manual_seed(5)
    for _ in range(8):
        logits = torch.randn(len(rows), VOCAB, generator=made) * 3
        logits[::3, ::2] = logits[::3, ::2].round()  # ties
        params = [p for p, _, _ in rows]
        expected = [
            expected_token(x, p, allowed_by_trial(tokenizer, text, answer) if text else None, answer)
            for x, (p, text, answer) in zip(logits, rows, strict=True)
        ]
        before = logits.clone()
        indices = np.array([p.token_index for p in params], np.int64)
        ready = sampler.prepare(params, indices, VOCAB, apart=way == "apart")
        chosen = sampler.choose(logits, ready) if way == "choose" else sampler.launch(logits, ready).result()
        assert chosen.token_ids.tolist() == expected
        assert torch.equal(logits, before)
        for row, token in chosen.scored.items():
            raw = logits[row].log_softmax(-1)
            assert token.logprob == pytest.approx(float(raw[token.token_id]), abs=1e-5), "log-probabilities are raw"
        for (p, _, answer), token_id in zip(rows, expected, strict=True):
            p.token_index += 1
            answer.append(token_id)
        rows = [one for one in rows if not (one[1] and one[2][-1] in EOS)]


def test_a_forced_token_is_not_drawn(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    from kvmesh.engine import sampler as sampler_module

    draw = sampler_module._draw
    monkeypatch.setattr(sampler_module, "_draw", lambda w, noise: (drawn.append(len(w)), draw(w, noise))[1])
    text = LLMatcher.grammar_from_regex("zq[a-c]")
    params = [SampleParams(temperature=1.0, grammar=compiler.begin(text, ())) for _ in range(2)]
    sampler, logits = Sampler(), torch.randn(2, VOCAB)
    tokens = [[token.token_id for token in sampler.sample(logits, params)] for _ in range(3)]
    assert tokens[0][0] == tokens[0][1] and tokens[1][0] == tokens[1][1]
    assert len(drawn) == 2, "only the third token is drawn, by either row"


def test_what_is_allowed_is_chosen_even_where_the_model_gives_it_nothing(compiler: GrammarCompiler) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, A : A + 6] = -torch.inf
    params = [SampleParams(temperature=t, grammar=compiler.begin(OPEN, ())) for t in (0.0, 1.0)]
    allowed = mask_of(compiler.begin(OPEN, ()))
    assert all(token.token_id in allowed for token in Sampler().sample(logits, params))


# ── faults ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["choose", "launch", "apart"])
def test_a_grammar_that_fails_ends_its_row_alone(way: str, compiler: GrammarCompiler) -> None:
    left = compiler.begin(WORD, [A, A, A])  # no grammar of this has said that
    params = [
        SampleParams(),
        SampleParams(grammar=left),
        SampleParams(temperature=1.0, grammar=compiler.begin(OPEN, ())),
    ]
    sampler, logits = Sampler(), torch.randn(3, VOCAB)
    indices = np.zeros(3, np.int64)
    ready = sampler.prepare(params, indices, VOCAB, apart=way == "apart")
    chosen = sampler.choose(logits, ready) if way == "choose" else sampler.launch(logits, ready).result()
    good, bad, other = chosen.tokens()
    assert bad.token_id == -1 and bad.fault.startswith("grammar: ")
    assert good.token_id == int(logits[0].argmax()) and other.token_id >= 0 and not good.fault + other.fault


def test_a_limit_that_is_reached_is_named(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_limits, "STEP_ITEMS", 3)
    text = LLMatcher.grammar_from_lark('start: (a | b)*\na: "x" start?\nb: "x" "y"? start?')
    [token] = Sampler().sample(torch.randn(1, VOCAB), [SampleParams(grammar=compiler.begin(text, ()))])
    assert token.token_id == -1 and "grammar: " in token.fault


def test_logits_that_are_not_finite_change_nothing(compiler: GrammarCompiler, tokenizer: LLTokenizer) -> None:
    params = [SampleParams(grammar=compiler.begin(PERSON, ())), SampleParams()]
    logits = torch.randn(2, VOCAB)
    bad = logits.clone()
    bad[1, 3] = torch.nan
    sampler = Sampler()
    with pytest.raises(NonFiniteLogits) as caught:
        sampler.sample(bad, params)
    assert caught.value.rows == (1,)
    first, _ = sampler.sample(logits, params)
    assert first.token_id in allowed_by_trial(tokenizer, PERSON, ())


# ── the engine ───────────────────────────────────────────────────────────────────────────────────


def text_of(tokenizer: LLTokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode_str([token for token in tokens if token not in EOS])


def test_answers_of_a_model_validate_from_the_first_token(folder: Path) -> None:
    engine = LocalEngine(folder, block_tokens=8)
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=list(EOS))
    for temperature in (0.0, 1.0):
        params = GenerateParams(
            max_tokens=80, temperature=temperature, seed=4, grammar=PERSON, stop_token_ids=frozenset(EOS)
        )
        for answer in engine.generate([[1, 2, 3], [5, 6, 7, 8]], params):
            assert answer.finish == "stop"
            person = json.loads(text_of(tokenizer, answer.token_ids))
            assert set(person) == {"name", "age"} and len(person["name"]) <= 6 and person["age"] <= 99


def test_a_prompt_goes_on_from_any_cut_of_its_answer(folder: Path) -> None:
    """As prompts do that a failure or a preemption moved: `answered` of the last tokens are the answer's."""
    engine = LocalEngine(folder, block_tokens=8)
    compiler, prompt = GrammarCompiler(folder, engine.config.vocab_size, EOS), [1, 2, 3]
    params = GenerateParams(max_tokens=60, temperature=1.0, seed=4, grammar=PERSON, stop_token_ids=frozenset(EOS))
    [answer] = engine.generate([prompt], params)
    for cut in range(len(answer.token_ids)):
        said = answer.token_ids[:cut]
        sample = SampleParams(temperature=1.0, seed=4, answered=cut, grammar=compiler.begin(PERSON, said))
        item = PrefillInput([*prompt, *said], 0, list(range(20)), sample)
        [first] = engine.runner.prefill([item])
        assert first is not None and first.token_id == answer.token_ids[cut], cut


def test_decode_rows_and_prompts_with_a_grammar_share_a_step(folder: Path) -> None:
    engine = LocalEngine(folder, block_tokens=8)
    compiler = GrammarCompiler(folder, engine.config.vocab_size, EOS)
    row = DecodeInput(9, 0, [0], SampleParams(grammar=compiler.begin(FORCED, [])))
    free = replace(row, pages=[1], sample=SampleParams())
    failing = PrefillInput([1], 0, [2], SampleParams(grammar=compiler.begin(WORD, [120, 120])))
    item = PrefillInput([1, 2], 0, [3], SampleParams(grammar=compiler.begin(OPEN, [])))
    first, chosen = engine.runner.step([failing, item], DecodeBatch.of([row, free]))
    assert first[0] is not None and first[0].token_id == -1 and first[0].fault
    assert first[1] is not None and first[1].token_id >= 0 and not first[1].fault
    assert min(chosen.token_ids.tolist()) >= 0 and len(chosen.token_ids) == 2 and not chosen.scored


def test_masks_have_a_bit_for_each_token() -> None:
    assert [mask_words(vocab) for vocab in (1, 32, 33, 151936)] == [1, 1, 2, 4748]
