"""Times the functions of a model while it runs: on a CPU by a clock around each of them, on a GPU by its kernels.

The model's code knows nothing of it. `attach` puts a timed stand-in in the place of each part of a runner's model, and
`Replacements.undo` puts the parts back: a step that is not timed executes nothing of this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvmesh.engine.models.blocks import MLP, Attention, RMSNorm
from kvmesh.engine.models.moe import MoE
from kvmesh.engine.work import HOST, IN_LAYER, REST

if TYPE_CHECKING:
    from kvmesh.engine.attention.backend import StepPlan
    from kvmesh.engine.runner import Runner

GRAPH_PARTS = ("kernel", "gpu_memcpy", "gpu_memset")  # of torch's trace: what ran on the device


class Piece(NamedTuple):
    """A time that one function (or kernel) took, in nanoseconds of the clock that measured it."""

    function: str
    name: str
    start_ns: int
    end_ns: int


class FunctionClock:
    """Measures functions that call each other: time belongs to the innermost, so pieces never overlap."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.pieces: list[Piece] = []
        self._clock = clock
        self._running: list[str] = []
        self._since = 0

    def around(self, function: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call` with its time put down to `function`."""

        def timed(*args: Any, **named: Any) -> Any:
            self._turn()
            self._running.append(function)
            try:
                return call(*args, **named)
            finally:
                self._turn()
                self._running.pop()

        return timed

    def _turn(self) -> None:
        """The time from the last call on belongs to the function that has been running since."""
        now = self._clock()
        if self._running and now > self._since:
            function = self._running[-1]
            self.pieces.append(Piece(function, function, self._since, now))
        self._since = now


class TimedPart:
    """Stands for one part of a model, and has its calls timed."""

    def __init__(self, clock: FunctionClock, function: str, part: Any) -> None:
        self._call = clock.around(function, part)
        self._part = part
        for name in ("add_to", "add_and_norm", "of_sum"):
            if hasattr(part, name):
                setattr(self, name, clock.around(function, getattr(part, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class TimedPlan:
    """Is another plan, whose rotations, writes and attention are timed: a CPU's, which does one after the other."""

    def __init__(self, clock: FunctionClock, plan: StepPlan) -> None:
        self._plan = plan
        self.write = clock.around("write", plan.write)
        self.attend = clock.around("attention", plan.attend)
        # As the plan does it, with writes that are timed for themselves.
        self.rotate_and_write = clock.around("rotary", partial(type(plan).rotate_and_write, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


class Replacements:
    """Attributes of objects that were given other values, and how to undo that."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Lets the attribute be `value` until `undo`."""
        own = vars(owner)
        if name in own:
            before = own[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:  # a method: the class has it
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Puts everything back, the latest first; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


def attach(runner: Runner, clock: FunctionClock, parts: Replacements) -> None:
    """Has every function of the runner's model measured by `clock`, until `parts.undo`."""
    model = runner.model
    for layer in model.layers:
        for name, part in list(vars(layer).items()):
            if isinstance(part, RMSNorm):
                parts.put(layer, name, TimedPart(clock, "norm", part))
            elif isinstance(part, MLP | MoE):
                parts.put(layer, name, TimedPart(clock, "mlp", part))
            elif isinstance(part, Attention):
                parts.put(part, "qkv", TimedPart(clock, "projections", part.qkv))
                parts.put(part, "out", TimedPart(clock, "projections", part.out))
    parts.put(model, "layer", clock.around(HOST, model.layer))
    parts.put(model, "hidden", clock.around("embedding", model.hidden))
    parts.put(model, "logits", clock.around("head", model.logits))
    if runner.mesh.tp.size > 1:
        parts.put(runner.mesh.tp, "all_reduce", clock.around("collectives", runner.mesh.tp.all_reduce))
    plan_mixed = runner.attention.plan_mixed
    parts.put(runner.attention, "plan_mixed", lambda *args: TimedPlan(clock, plan_mixed(*args)))
    sampler = runner._sampler
    for name in ("prepare", "choose"):
        parts.put(sampler, name, clock.around("sampling", getattr(sampler, name)))


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────

# What kernels of `kvmesh.engine.kernels` do. Matrix products have names that tell nothing: which function one belongs
# to follows from these, before and after it. So it needs no mark inside a step, and holds for CUDA graphs, too.
KERNELS = {
    "_rms_norm": "norm",
    "_add_rms_norm": "norm",
    "_rotate_and_write": "write",
    "_attend": "attention",
    "_join": "attention",
    "_gated": "mlp",
    "_sum": "sampling",
    "_pick": "sampling",
    "_spread": "sampling",
    "_narrow": "sampling",
    "_finish": "sampling",
}


def functions_of(kernels: Sequence[str]) -> list[str]:
    """Returns the function of each kernel of one step, in the order in which they ran."""
    marks = [KERNELS.get(name) for name in kernels]
    following: list[str | None] = [None] * len(marks)
    for at in range(len(marks) - 2, -1, -1):
        following[at] = marks[at + 1] or following[at + 1]
    found, before = [], None
    for name, mark, after in zip(kernels, marks, following, strict=True):
        if name.startswith("nccl"):
            found.append("collectives")
            continue
        found.append(mark or _between(before, after))
        before = mark or before
    return found


def _between(before: str | None, after: str | None) -> str:
    """The function of a kernel whose name tells nothing, by the last and the next one whose names do."""
    if before is None:
        return "embedding"
    if before == "sampling":
        return "sampling"
    if after == "write":
        return "projections"
    if before == "norm":
        return {"mlp": "mlp", "norm": "norm"}.get(after or "", "head")
    return {"write": "attention", "attention": "projections", "mlp": "mlp"}[before]


def kernels_in(trace: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Returns name, start and end (nanoseconds since 1970) of what ran on the device's busiest stream, in order, from
    the Chrome trace that torch's profiler writes."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    streams: dict[Any, list[tuple[str, int, int]]] = {}
    for event in trace.get("traceEvents", ()):
        if event.get("cat") in GRAPH_PARTS and event.get("ph") == "X":
            start = base + round(float(event["ts"]) * 1000)
            found = (str(event["name"]), start, start + round(float(event.get("dur", 0)) * 1000))
            streams.setdefault(event.get("tid"), []).append(found)
    busiest = max(streams.values(), key=len, default=[])
    return sorted(busiest, key=lambda kernel: kernel[1])


def pieces_of(kernels: Sequence[tuple[str, int, int]], steps: Sequence[tuple[int, int]]) -> list[Piece]:
    """Returns the kernels that began within the steps (start and end of each, ascending) as pieces. The device's pauses
    between them are pieces, too: a layer's, or the step's where what follows is outside the layers."""
    found = []
    for start, end in steps:
        own = [kernel for kernel in kernels if start <= kernel[1] < end]
        free = start
        for (name, begun, over), function in zip(own, functions_of([kernel[0] for kernel in own]), strict=True):
            if begun > free:
                pause = HOST if function in IN_LAYER else REST
                found.append(Piece(pause, pause, free, begun))
            found.append(Piece(function, name, max(begun, free), max(over, free)))
            free = max(free, over)
    return found


def busy_by_function(pieces: Iterable[Piece], steps_ns: int) -> dict[str, int]:
    """Returns the nanoseconds of each function; REST gets what is left of the steps' time."""
    busy: dict[str, int] = {}
    for piece in pieces:
        busy[piece.function] = busy.get(piece.function, 0) + piece.end_ns - piece.start_ns
    left = steps_ns - sum(busy.values())
    busy[REST] = busy.get(REST, 0) + max(left, 0)
    return busy
