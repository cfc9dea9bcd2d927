"""Times steps of this rank by function when the front asks for it, and leaves no trace of itself in the steps after."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvmesh.engine.batch import DecodeBatch, PrefillInput
from kvmesh.engine.matrix import PackedMatrix
from kvmesh.engine.ops import on_native
from kvmesh.engine.parallel import share, share_of
from kvmesh.engine.runner import Runner
from kvmesh.engine.timing import FunctionClock, Piece, Replacements, attach, busy_by_function, kernels_in, pieces_of
from kvmesh.engine.work import FUNCTIONS, HOST, REST, FunctionWork, StepShape, of_stage, summed, work_of
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.steps import Steps

log = logging.getLogger("kvmesh.rank")

MOST_PIECES = 60_000  # that an answer tells one by one; their times are counted all the same
MEASURE_S = 0.05  # for each of the two limits
LEAST_CALLS = 4  # of which the fastest counts
COPY_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
SQUARE = {"cpu": 1024, "cuda": 8192}  # the side of the matrices that are multiplied


class StepProfiler:
    """Times one profile after another: a step's start and end, its shape and its functions. While none runs, nothing of
    it is called in a step. All methods run on the rank's main thread."""

    def __init__(self, steps: Steps, runner: Runner, send: Callable[[m.ToFront], None]) -> None:
        self._steps = steps
        self._runner = runner
        self._send = send
        self._last = runner.stage_layers.stop == runner.config.layers  # which samples
        self._asked: m.Profile | None = None
        self._parts = Replacements()
        self._clock = FunctionClock()
        self._kernels: Any = None  # torch's profiler, on a CUDA device
        self._offset_ns = 0  # from the clock of pieces to the time since 1970
        self._shapes: list[StepShape] = []
        self._done: list[m.ProfiledStep] = []
        self._counted: list[list[int]] = []  # of each expert, where the profile begins

    @property
    def active(self) -> bool:
        return self._asked is not None

    def begin(self, asked: m.Profile) -> None:
        """Times steps from the next one on. What another profile has so far is told first."""
        self._end()
        self._asked = asked
        self._clock, self._parts = FunctionClock(), Replacements()
        self._shapes, self._done = [], []
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        counts = self._runner.expert_counts
        self._counted = [] if counts is None else counts.table.tolist()
        try:
            if self._runner.device.type == "cuda":
                self._kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._kernels.start()
            else:
                attach(self._runner, self._clock, self._parts)
            self._steps.settle()
            self._parts.put(self._steps, "begin", None)  # every step is waited for
            self._parts.put(self._steps, "run", self._timed_run(self._steps.run))
            self._parts.put(self._runner, "step", self._seen_step(self._runner.step))
        except Exception as error:  # a rank serves on, whatever its profile meets
            log.exception("no profile")
            self._end(f"{type(error).__name__}: {error}")

    def stop(self, ticket: int) -> None:
        """Ends that profile, if it runs."""
        if self._asked is not None and self._asked.ticket == ticket:
            self._end()

    def check_deadline(self) -> None:
        """Ends a profile whose deadline has come."""
        if self._asked is not None and time.monotonic_ns() >= self._asked.deadline_ns:
            self._end()

    # ── while it runs ────────────────────────────────────────────────────────────────────────────

    def _timed_run(self, run: Callable[..., None]) -> Callable[..., None]:
        def timed(prefill: m.PrefillStep | None, between_layers: Callable[[], None], *told: Any) -> None:
            computed, timed_before = len(self._shapes), len(self._clock.pieces)
            start = time.perf_counter_ns()
            run(prefill, between_layers, *told)
            end = time.perf_counter_ns()
            shapes = self._shapes[computed:]
            if not shapes:  # nothing was computed, or it failed
                del self._clock.pieces[timed_before:]
                return
            self._done.append(
                m.ProfiledStep(
                    start + self._offset_ns,
                    end + self._offset_ns,
                    sum(len(shape.positions) for shape in shapes),
                    sum(sum(shape.positions) for shape in shapes),
                    sum(length for shape in shapes for _, length in shape.chunks),
                )
            )
            if self._asked is not None and len(self._done) >= self._asked.steps:
                self._end()

        return timed

    def _seen_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def seen(items: Sequence[PrefillInput], rows: DecodeBatch, *told: Any, **named: Any) -> Any:
            answer = step(items, rows, *told, **named)
            chunks = tuple((item.start, len(item.token_ids)) for item in items)
            sampled = len(rows.positions) + sum(item.sample is not None for item in items) if self._last else 0
            self._shapes.append(StepShape(tuple(rows.positions.tolist()), chunks, sampled))
            return answer

        return seen

    # ── its end ──────────────────────────────────────────────────────────────────────────────────

    def _end(self, why_not: str = "") -> None:
        """Puts everything back and answers, if a profile runs."""
        asked, self._asked = self._asked, None
        self._parts.undo()
        kernels, self._kernels = self._kernels, None
        if asked is None:
            return
        answer = m.Profiled(asked.ticket, why_not=why_not)
        try:
            traced = stopped(kernels) if kernels is not None else None
            if not why_not:
                answer = self._answer(asked.ticket, traced)
        except Exception as error:
            log.exception("no profile")
            answer = m.Profiled(asked.ticket, why_not=f"{type(error).__name__}: {error}")
        self._send(answer)

    def _answer(self, ticket: int, traced: dict[str, Any] | None) -> m.Profiled:
        if not self._done:
            return m.Profiled(ticket)
        runner, device = self._runner, self._runner.device
        spans = [(step.start_ns, step.end_ns) for step in self._done]
        if traced is None:
            offset = self._offset_ns
            pieces = [Piece(f, n, start + offset, end + offset) for f, n, start, end in self._clock.pieces]
        else:
            pieces = pieces_of(kernels_in(traced), spans)
            if not pieces:
                return m.Profiled(ticket, why_not="torch's profiler saw no kernel: it needs CUPTI (cuda-cupti)")
        busy = busy_by_function(pieces, sum(end - start for start, end in spans))
        own, group = of_stage(share_of(runner.config, runner.mesh.axes), runner.stage_layers), runner.mesh.mlp
        words = len(share(own.vocab_size, group.rank, group.size))
        size = runner.layout.itemsize
        work = summed(work_of(own, size, shape, ranks=group.size, words=words) for shape in self._shapes)
        if runner.stage_layers.start:
            del work["embedding"]  # the first stage has it
        bytes_per_s, products_per_s = limits(device, runner.attention.dtype)
        return m.Profiled(
            ticket,
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
            own.layers,
            tuple(self._done),
            tuple(_function(name, busy, work) for name in FUNCTIONS if busy.get(name) or name in work),
            _told(pieces, spans[0][0]),
            bytes_per_s,
            products_per_s,
            experts=self._experts(),
        )

    def _experts(self) -> tuple[m.ProfiledExperts, ...]:
        """Tells what the steps chose."""
        counts = self._runner.expert_counts
        if counts is None:
            return ()
        pairs = zip(counts.layers, counts.table.tolist(), self._counted, strict=True)
        return tuple(
            m.ProfiledExperts(layer, tuple(now - then for now, then in zip(after, before, strict=True)))
            for layer, after, before in pairs
        )


def _function(name: str, busy: dict[str, int], work: dict[str, FunctionWork]) -> m.ProfiledFunction:
    did = work.get(name, FunctionWork())
    moved = (did.weights, did.kv_read, did.kv_written, did.activations)
    return m.ProfiledFunction(name, busy.get(name, 0), *moved, did.products)


def _told(pieces: Sequence[Piece], since_ns: int) -> m.ProfiledPieces:
    shown = [piece for piece in pieces if piece.function not in (HOST, REST)]
    kept = shown[:MOST_PIECES]
    numbers: dict[str, int] = {}
    which = tuple(
        numbers.setdefault(p.function if p.name == p.function else f"{p.function}: {p.name}", len(numbers))
        for p in kept
    )
    starts = tuple(p.start_ns - since_ns for p in kept)
    took = tuple(p.end_ns - p.start_ns for p in kept)
    return m.ProfiledPieces(tuple(numbers), which, starts, took, len(shown) - len(kept))


def stopped(profiler: Any) -> dict[str, Any]:
    """Ends torch's profiler; returns the Chrome trace of what it saw."""
    profiler.stop()
    with TemporaryDirectory(prefix="kvmesh-profile-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
        return trace


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def limits(device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_S) -> tuple[float, float]:
    """Measures bytes a second of a copy (read and written) and floating-point operations a second of a matrix product
    in this dtype, the best of what fits in so many seconds each; 0 where there is no memory for it."""
    found = []
    for measure in (_copying, _multiplying):
        try:
            found.append(measure(device, dtype, seconds))
        except RuntimeError as error:
            log.warning("a limit of %s is not known: %s", device, str(error).partition("\n")[0])
            found.append(0.0)
    return found[0], found[1]


def _copying(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device, seconds)


def _multiplying(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    side = SQUARE[device.type]
    x = torch.randn(side, side, device=device).to(dtype)
    calls: list[Callable[[], object]] = [lambda: x @ x]
    if dtype is torch.bfloat16 and on_native(x):  # the product that the engine itself uses
        packed = PackedMatrix.of([x])
        calls.append(lambda: packed.multiply(x))
    return 2 * side**3 / min(_best(call, device, seconds) for call in calls)


def _best(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of at least LEAST_CALLS calls; the first one is not counted."""
    _finished(call, device)
    until, best, calls = time.perf_counter() + seconds, float("inf"), 0
    while calls < LEAST_CALLS or time.perf_counter() < until:
        calls += 1
        started = time.perf_counter()
        _finished(call, device)
        best = min(best, time.perf_counter() - started)
    return best


def _finished(call: Callable[[], object], device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
