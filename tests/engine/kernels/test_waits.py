"""A step's sampling waits for the device once: to read what was chosen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvmesh.engine import sampler as sampler_module
from kvmesh.engine import upload as upload_module
from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampledToken, SampleParams
from kvmesh.engine.sampler import Sampler
from kvmesh.engine.sampling import adjust
from kvmesh.engine.sampling.history import History
from kvmesh.engine.upload import Upload
from kvmesh.errors import NonFiniteLogits
from tests.support.engine.apart import DEVICE, Apart, Remote, Waits, values_of
from tests.support.engine.interpreter import few_parts
from tests.support.engine.stepper import Stepper

VOCAB = 301
OnDevice = Callable[[torch.Tensor], torch.Tensor]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_k": {"temperature": 1.2, "top_k": 20},
    "far top_k": {"temperature": 1.2, "top_k": 200},
    "top_p": {"temperature": 2.0, "top_p": 0.95},
    "both": {"temperature": 1.0, "top_k": 150, "top_p": 0.9, "min_p": 0.001},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "penalties and top_p": {"temperature": 1.0, "presence_penalty": 1.0, "top_p": 0.8, "logit_bias": ((7, 2.0),)},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
}


def rows_of(kinds: list[str]) -> list[SampleParams]:
    made = [SampleParams(seed=seed, **ASKED[kind]) for seed, kind in enumerate(kinds)]
    return [replace(p, history=History([1, 2, 7], [3, 3])) if p.penalised else p for p in made]


class Launches:
    """Launches a kernel of Triton's interpreter on the values."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: self._kernel[grid](*values_of(args), **named)


@pytest.fixture
def watched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    """A device that raises where the host would wait for it; only `read_back` may."""
    if device.type == "cuda":
        pytest.skip("kernels are compiled here: the real device is watched instead")
    from kvmesh.engine.kernels import sample

    few_parts(monkeypatch)
    for name in ("_sum", "_pick", "_spread", "_narrow", "_finish"):
        monkeypatch.setattr(sample, name, Launches(getattr(sample, name)))
    monkeypatch.setattr(sampler_module, "kernels_for", lambda kind, _: sample if kind == DEVICE.type else None)
    mode, read_back = Apart(), sampler_module.read_back

    def read(tensor: torch.Tensor) -> Any:
        with mode.reading():
            return read_back(tensor)

    monkeypatch.setattr(sampler_module, "read_back", read)
    monkeypatch.setattr(upload_module.torch.cuda, "Event", mode.event)
    with mode:
        yield mode


def steps(kinds: list[str], device: torch.device, on_device: OnDevice) -> list[list[SampledToken]]:
    """Two steps of one batch, then one of it in another order."""
    rows, chooser, made = rows_of(kinds), Sampler(device), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adjust, "ROOM", 1)  # lists grow in between
        for step in range(3):
            rows = rows[::-1] if step == 2 else rows
            logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(step)) * 3
            ready = chooser.prepare(rows, np.full(len(rows), step), VOCAB)
            made.append(chooser.choose(on_device(logits), ready).tokens())
    return made


@pytest.mark.parametrize(
    "kinds", [["greedy"], ["temperature"], ["far top_k"], ["penalties"], list(ASKED)], ids=lambda kinds: "+".join(kinds)
)
def test_sampling_waits_once_a_step_and_answers_as_a_cpu(kinds: list[str], watched: Apart) -> None:
    tokens = steps(kinds, DEVICE, lambda logits: Remote(logits.contiguous()))
    assert watched.reads == 3, "one read a step"
    assert watched.copies <= 3, "at most one copy a step"
    assert tokens == steps(kinds, torch.device("cpu"), lambda logits: logits)


@pytest.mark.parametrize("kernels", [True, False])
def test_rows_that_are_not_finite_are_named_by_the_one_read(
    kernels: bool, watched: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their log-probabilities are asked for, too: of whatever token they were given."""
    if not kernels:
        monkeypatch.setattr(sampler_module, "kernels_for", lambda *_: None)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1, 5], logits[2], logits[3, 0] = torch.nan, -torch.inf, torch.inf
    rows, chooser = rows_of(["logprobs"] * 5), Sampler(DEVICE)
    with pytest.raises(NonFiniteLogits) as caught, np.errstate(all="ignore"):
        chooser.sample(Remote(logits), rows)
    assert (caught.value.rows, watched.reads) == ((1, 2, 3), 1)


class OneLayer:
    """Stands for a model: what a step looks up in it by the tokens that it was given, and nothing else."""

    def __init__(self, on_device: OnDevice, vocab: int, copies: Callable[[], int]) -> None:
        made = torch.Generator().manual_seed(5)
        self._embedding = on_device(torch.randn(vocab, 16, generator=made))
        self._head = on_device(torch.randn(16, vocab, generator=made))
        self._copies = copies
        self.sent: list[int] = []  # copies that were under way when the step began

    def hidden(self, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        self.sent.append(self._copies())
        return self._embedding[tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._head


def test_a_step_of_rows_and_chunks_is_one_copy_before_the_model_and_one_read(
    zoo: Callable[[str], Path], watched: Apart
) -> None:
    """Attention's own inputs are not looked at here: its plan is none."""

    def answers(device: torch.device, on_device: OnDevice) -> tuple[Any, OneLayer]:
        runner = Stepper(zoo("qwen3-gqa1-tied")).runner
        model = OneLayer(on_device, runner.config.vocab_size, lambda: watched.copies)
        runner.model, runner._sampler, runner.device = model, Sampler(device), device  # type: ignore[assignment]
        runner.attention = SimpleNamespace(plan_mixed=lambda *_: SimpleNamespace(positions=None, own=None))  # type: ignore
        rows = [DecodeInput(7 + i, 3, (0,), p) for i, p in enumerate(rows_of(["top_p", "greedy", "logprobs"]))]
        items = [PrefillInput([4, 5, 6], 0, (0,), rows_of(["both"])[0]), PrefillInput([8, 9], 0, (0,))]
        steps = [(items, rows), (items[1:], rows), ([], rows), (items[1:], [])]
        return [runner.step(chunks, DecodeBatch.of(these)) for chunks, these in steps], model

    there, model = answers(DEVICE, Remote)
    assert model.sent == [1, 2, 3, 4], "one copy a step, before the model runs"
    assert (watched.reads, watched.copies) == (3, 4), "a step that samples nothing reads nothing"
    here, _ = answers(torch.device("cpu"), lambda tensor: tensor)
    for (first, chosen), (first_here, chosen_here) in zip(there, here, strict=True):
        assert (first, chosen.tokens()) == (first_here, chosen_here.tokens())


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [*([kind] for kind in ASKED), list(ASKED)], ids=lambda kinds: "+".join(kinds))
def test_a_gpu_says_the_same(kinds: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        pytest.skip("no CUDA device: torch for CUDA and an NVIDIA GPU watch the real one (docs/reports/cuda.md)")
    read_back = sampler_module.read_back

    def read(tensor: torch.Tensor) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read_back(tensor)
        finally:
            if tensor.is_cuda:  # the CPU's steps, too, come by here, when nothing is watched any more
                torch.cuda.set_sync_debug_mode("error")

    def moved(logits: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("default")
        there = logits.to(device)
        torch.cuda.set_sync_debug_mode("error")
        return there

    monkeypatch.setattr(sampler_module, "read_back", read)
    try:
        chosen = steps(kinds, device, moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = steps(kinds, torch.device("cpu"), lambda logits: logits)
    assert [[one.token_id for one in step] for step in chosen] == [[one.token_id for one in step] for step in expected]


def test_what_waits_is_noticed(watched: Apart) -> None:
    x = Remote(torch.arange(6.0))
    waits: list[Callable[[], Any]] = [
        x.tolist,
        x.cpu,
        lambda: x[0].item(),
        lambda: bool(x[0] > 1),
        lambda: x[x > 2],
        lambda: (x > 2).nonzero(),
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: torch.ones(2).to(DEVICE, non_blocking=True),
        lambda: x[torch.tensor([1, 2])],
        lambda: x.masked_select(x > 2),
        lambda: x + torch.ones(6),
    ]
    for wait in waits:
        with pytest.raises((Waits, NotImplementedError, RuntimeError)):
            wait()
    assert watched.reads == 0
    assert values_of(x.add(1).sum() * 2) == 42, "what does not wait is computed"


def test_a_buffer_is_written_again_when_its_copy_is_made(watched: Apart) -> None:
    """Many sends before the device has made any copy; arrays of all dtypes, of no elements, larger than the buffer."""
    del watched
    rng, upload = random.Random(3), Upload(DEVICE)
    pairs = []
    for turn in range(9):
        arrays = [
            np.full(rng.randrange(9), turn, np.int64),
            np.array([[turn]]) > 3,
            np.full((2, upload_module.ROOM // 8 if turn == 4 else 3), turn / 7),
            np.empty(0, np.int32),
        ]
        pairs += zip([a.copy() for a in arrays], upload.send(arrays), strict=True)
        for array in arrays:
            array.fill(0)
    for array, tensor in pairs:
        assert tensor.shape == array.shape
        assert np.array_equal(values_of(tensor.clone()).numpy(), array)
