"""The Triton backend under the runner, in the interpreter: tables, plans and what a replayed step is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvmesh.engine import capture
from kvmesh.engine.attention import choice
from kvmesh.engine.attention.backend import StepPlan
from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.rope import Rotation
from kvmesh.engine.runner import DecodeInput, PrefillInput, Runner, SampleParams
from kvmesh.errors import InternalError
from tests.support.checkpoints import prompts
from tests.support.engine.recorded import RerunCapture
from tests.support.engine.stepper import Stepper
from tests.support.reference import assert_matches_reference

Zoo = Callable[[str], Path]
MODEL = "llama-gqa4-llama3"


@pytest.fixture
def stepper(zoo: Zoo, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Stepper:
    del device  # skips where there is no triton
    from kvmesh.engine.attention import triton_backend

    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/gpu does this with the whole engine")
    monkeypatch.setattr(triton_backend, "PROCESSORS", 1)  # the interpreter runs one program after the other
    monkeypatch.setitem(choice.BACKENDS, "cpu", triton_backend.TritonAttention)
    made = Stepper(zoo(MODEL), num_pages=24)
    assert isinstance(made.runner.attention, triton_backend.TritonAttention)
    return made


@pytest.mark.slow
def test_tokens_equal_the_reference_while_rows_come_and_go(stepper: Stepper, zoo: Zoo) -> None:
    path = zoo(MODEL)
    asked = prompts(2, 500, seed=4, low=17, high=24)
    rows: list[DecodeInput] = []
    answers: list[list[int]] = []
    for at, prompt in enumerate(asked):
        pages = stepper.take(len(prompt) + 8)
        first = stepper.prefill(prompt, pages, chunks=(7,) if at else ())
        last, filled = divmod(len(prompt), stepper.layout.block_tokens)
        tail = stepper.pages[pages[last], :, :, :, filled:]
        assert tail.numel() and not tail.any(), "pages are pushed whole: what another request left must not go along"
        # Room as it is granted: one page at first, the list a new tuple whenever it grows.
        rows.append(DecodeInput(first, len(prompt), pages, SampleParams()))
        answers.append([first])
        for answer, more in zip(answers, stepper.decode(rows, 2), strict=True):
            answer.extend(more)
    rows.reverse()  # every row of the tables is somebody else's now
    for answer, more in zip(reversed(answers), stepper.decode(rows, 1), strict=True):
        answer.extend(more)
    for prompt, answer in zip(asked, answers, strict=True):
        assert_matches_reference(path, prompt, answer)


@pytest.mark.slow
def test_rows_that_stand_for_nobody_change_nothing(stepper: Stepper) -> None:
    """What a graph replays: tables filled up to a bucket."""
    from kvmesh.engine.attention.triton_backend import DecodePlan, DecodeTables, TritonAttention

    backend = stepper.runner.attention
    assert isinstance(backend, TritonAttention)
    tables = DecodeTables(backend, 4, 6)
    prompt = prompts(1, 500, seed=5, low=20, high=21)[0]
    pages = stepper.take(40)
    first = stepper.prefill(prompt, pages)
    wanted = logits(stepper.runner, backend.plan_decode([pages], [len(prompt)]), [first])
    tables.fill([pages, pages], [3, 5], [1, 2])  # an earlier, larger step leaves its rows behind
    tables.fill([pages], [len(prompt)], [first], padded_rows=4)
    before = stepper.pages.clone()
    plan = DecodePlan(backend, tables, 4, replayed=True)
    got = logits(stepper.runner, plan, plan.token_ids.tolist())
    torch.testing.assert_close(got[:1], wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stepper.pages, before, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert got.isfinite().all()


def logits(runner: Runner, plan: StepPlan, tokens: list[int]) -> torch.Tensor:
    def attend(layer: int, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        plan.rotate_and_write(layer, qkv, rotation)
        return plan.attend(layer, qkv)

    with torch.inference_mode():
        return runner.model.logits(runner.model.hidden(torch.tensor(tokens), plan.positions, attend))


@pytest.mark.slow
def test_replayed_steps_equal_launched_ones(stepper: Stepper, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps as graphs, and steps of chunks beside rows by pieces; the graphs' work is done again where a GPU
    would replay it."""
    runner = stepper.runner
    monkeypatch.setattr(capture, "CudaCapture", lambda device: RerunCapture())
    with torch.inference_mode():
        runner._capture(max_rows=4, max_tokens=16)
    assert runner.graphs is not None and runner.pieces is not None
    assert (runner.graphs.sizes, runner.pieces.sizes) == ((1, 2, 4), (32,))
    assert (runner.graphs.failed, runner.pieces.failed) == ("", "")
    path = zoo(MODEL)
    asked = prompts(3, 500, seed=6, low=17, high=24)
    pages = [stepper.take(len(prompt) + 8) for prompt in asked]
    answers = [[stepper.prefill(prompt, own)] for prompt, own in zip(asked[:2], pages, strict=False)]
    rows = [
        DecodeInput(answer[0], len(prompt), own, SampleParams())
        for answer, prompt, own in zip(answers, asked, pages, strict=False)
    ]
    chunk = PrefillInput(asked[2][:12], 0, pages[2])
    _, chosen = runner.step([chunk], DecodeBatch.of(rows))  # 14 of the 32 tokens that the bucket has
    for row, answer, token in zip(rows, answers, chosen.token_ids.tolist(), strict=True):
        answer.append(token)
        row.token_id, row.position = token, row.position + 1
    for answer, more in zip(answers, stepper.decode(rows, 2), strict=True):
        answer.extend(more)
    answers.append([stepper.prefill(asked[2], pages[2], start=12)])
    for prompt, answer in zip(asked, answers, strict=True):
        assert_matches_reference(path, prompt, answer)


def test_a_row_that_is_refused_leaves_the_tables_as_they_were(stepper: Stepper) -> None:
    backend = stepper.runner.attention
    backend.plan_decode([(1, 2), (3, 4)], [20, 20])
    for pages, positions in (
        ([(1, 2), (3,)], [20, 16]),
        ([(5, 2), (3, 24)], [20, 20]),
        ([(1, 2), ()], [20, 0]),
        ([(1, 2), (-1,)], [20, 0]),
    ):
        with pytest.raises(InternalError, match="page"):
            backend.plan_decode(pages, positions)
    plan = backend.plan_decode([(1, 2), (3, 4)], [20, 20])
    assert plan.tables.table.device[:2, :2].tolist() == [[1, 2], [3, 4]]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_groups_answer_what_one_tensor_answers(stepper: Stepper, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's layers in two tensors, windows with holes: launched steps, replayed ones, and chunks by pieces."""
    del stepper  # sets up the interpreter
    from tests.support.engine.grouped_stepper import Twins

    monkeypatch.setattr(capture, "CudaCapture", lambda device: RerunCapture())
    twins = Twins(zoo("gemma2"), "float32", 16, 8, tails=False)
    long, short = (prompts(1, twins.config.vocab_size, seed=n, low=n, high=n + 1)[0] for n in (36, 7))
    first, second = twins.request(long), twins.request(short)
    twins.step(chunks=[(first, 24)])
    twins.step(chunks=[(first, 12), (second, 7)])
    twins.step([first, second])
    for runner in (twins.whole, twins.grouped):
        with torch.inference_mode():
            runner._capture(max_rows=2, max_tokens=8)
        assert runner.graphs is not None and runner.graphs.sizes == (1, 2) and not runner.graphs.failed
    twins.step([second, first])
    twins.step([first])
    third = twins.request(short[:6])
    twins.step([first], [(third, 6)])
    assert -1 in first.groups[1] and len(first.told) == 5


def test_buckets(device: torch.device) -> None:
    del device  # skips where there is no triton
    from kvmesh.engine.capture import bucket_for
    from kvmesh.engine.graphs import buckets

    assert buckets(1) == (1,) and buckets(12) == (1, 2, 4, 8, 12)
    assert buckets(256) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256)
    sizes = buckets(12)
    assert [bucket_for(rows, sizes) for rows in (1, 2, 3, 9, 12, 13)] == [1, 2, 4, 12, 12, None]
    assert bucket_for(1, ()) is None
