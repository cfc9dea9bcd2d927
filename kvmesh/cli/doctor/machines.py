"""Whether a model fits this machine and those that lend ranks to its mesh, and along which axes (`doctor --model`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.cli.doctor.findings import Finding
from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError
from kvmesh.ranks.sizing import CPU_SHARE, CUDA_SHARE
from kvmesh.rpc.pb import ranks_pb2

GB = 1e9
LEAST_ROOM = 0.05  # of a rank's memory must be left for KV
MOST_MACHINES = 64


def size(nbytes: float) -> str:
    """ "14.2 GB", "312 MB": 10^9 and 10^6 bytes."""
    return f"{nbytes / GB:,.1f} GB" if nbytes >= GB else f"{nbytes / 1e6:,.1f} MB"


def about(count: int) -> int:
    """Two digits of a number that is known no better."""
    return round(count, 2 - len(str(count)))


@dataclass(frozen=True, slots=True)
class RankMachine:
    """A machine that ranks can be on. `memory`: bytes of each GPU; without GPUs (`gpus` 0) of the machine in all."""

    name: str
    gpus: int
    memory: int
    about: str = ""

    @property
    def text(self) -> str:
        """What it has, for people."""
        if not self.gpus:
            return f"no GPU, {size(self.memory)} of memory are available"
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} of {self.memory / GB:.0f} GB"


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model asks of memory: bytes of weights as stored, and of a token's KV at each of so many `tp` ranks."""

    weights: int
    kv_per_rank: Callable[[int], int]
    check: Callable[[Axes], None]  # raises ConfigError where ranks cannot share it along these axes


@dataclass(frozen=True, slots=True)
class MachineFit:
    """A cut of a model over machines; bytes of weights and room of a rank, tokens of KV of the instance."""

    axes: Axes
    weights: float
    room: float
    tokens: int


def lenders(hosts: Sequence[ranks_pb2.RankHostState]) -> list[RankMachine]:
    """Returns the machines of those that lend ranks."""
    found = []
    for one in hosts:
        uses = [f"{use.instance_id} ({len(use.ranks)})" for use in one.uses]
        about = f"lends ranks at {one.instance.address}" + (f", now to {', '.join(uses)}" if uses else "")
        found.append(RankMachine(one.node_id, one.gpus, one.memory_bytes, about))
    return found


def cuts(machines: int, each: int) -> Iterator[Axes]:
    """Yields axes of one instance with `each` ranks on each of so many machines, the usual ones first: what goes
    between machines is the least where stages are there and tensors within."""
    world = machines * each
    texts = [f"pp={machines},tp={each}"] if machines > 1 and each > 1 else []
    for text in (*texts, f"tp={world}", f"pp={world}"):
        yield Axes.parse(text)


def fit(machines: Sequence[RankMachine], needs: ModelNeeds) -> tuple[MachineFit | None, str]:
    """Returns the cut with the fewest ranks that fits all of `machines` together, or None and why none does. Pure."""
    gpus = min(one.gpus for one in machines)
    memory = min(one.memory for one in machines) * (CUDA_SHARE if gpus else CPU_SHARE)
    why = ""
    for each in [n for n in (1, 2, 4, 8, 16) if n < gpus] + [max(gpus, 1)]:
        room = memory if gpus else memory / each
        weights = needs.weights / (each * len(machines))
        if weights > room * (1 - LEAST_ROOM):
            why = f"{size(weights)} of weights a rank, which may take {size(room)}"
            continue
        for axes in cuts(len(machines), each):
            try:
                needs.check(axes)
                kv = needs.kv_per_rank(axes.tp) / axes.pp
            except ConfigError as error:
                why = error.message
                continue
            share = 1.0 if gpus else 0.5  # a CPU rank keeps a host segment beside its pages
            return MachineFit(axes, weights, room, int((room - weights) * share / max(kv, 1))), ""
    return None, why


def findings(path: str, machines: Sequence[RankMachine]) -> list[Finding]:
    """Says which machines there are, this one first, and what fits the first, the first two and so on. Raises
    CheckpointError."""
    from kvmesh.engine.checkpoint import open_checkpoint
    from kvmesh.engine.parallel import check_shares
    from kvmesh.engine.stages import check_stages
    from kvmesh.sim.hardware.shapes import shape_of

    checkpoint = open_checkpoint(path)
    shape, dtype = shape_of(path), checkpoint.config.dtype

    def check(axes: Axes) -> None:
        check_shares(checkpoint.config, axes)
        check_stages(checkpoint.config, axes)

    needs = ModelNeeds(checkpoint.nbytes, lambda tp: shape.kv_bytes_per_rank(tp, dtype), check)
    found = [
        Finding(one.name, "ok", one.text + (f"; {one.about}" if one.about else "")) for one in machines[:MOST_MACHINES]
    ]
    found.append(Finding("weights", "ok", f"{size(needs.weights)} as stored ({dtype})"))
    return found + verdicts(machines[:MOST_MACHINES], needs)


def verdicts(machines: Sequence[RankMachine], needs: ModelNeeds) -> list[Finding]:
    """Says for one machine, two, and so on whether the model fits, and how an instance is started there. Pure."""
    found, fits = [], False
    for count in range(1, len(machines) + 1):
        what = "on this machine" if count == 1 else f"on {count} machines"
        cut, why = fit(machines[:count], needs)
        if cut is None:
            found.append(Finding(what, "warn", f"does not fit: {why}"))
            continue
        fits = True
        ranks = cut.axes.world
        flags = f"--decode-mesh {cut.axes}" if ranks > 1 else "no option is needed"
        flags += f" --decode-hosts {count}" if count > 1 else ""
        text = f"{ranks} rank{'s' if ranks > 1 else ''}: weights are {size(cut.weights)} of the {size(cut.room)} that "
        text += f"{'it' if ranks == 1 else 'each'} may take, the rest holds about {about(cut.tokens):,} tokens of KV"
        text += f" ({flags})"
        found.append(Finding(what, "ok", text))
    if not fits:
        more = next((n for n in range(len(machines) + 1, MOST_MACHINES + 1) if fit([machines[0]] * n, needs)[0]), 0)
        todo = "use a smaller model, or machines with more memory"
        if more:
            others = "another one" if more == 2 else f"{more - 1} others"
            todo = f"{more} machines like this one would do: kvmesh up --join ... --as ranks on {others}"
        found[-1] = Finding(found[-1].what, "warn", found[-1].found, todo=todo)
    return found
