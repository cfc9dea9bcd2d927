"""`kvmesh profile`: where the time of an instance's steps goes, by function of the model, and how near to the machine's
limits that is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors, wide_enough
from kvmesh.cli.instances import call_instance, host_port
from kvmesh.cli.store.target import patiently, size
from kvmesh.cli.trace import read_spans
from kvmesh.errors import ConfigError, Unavailable, UnknownInstance

if TYPE_CHECKING:
    from kvmesh.rpc.pb import instance_pb2

FLUSH_S = 2.0  # services write their spans about once a second
OUTSIDE = ("embedding", "head", "sampling", "rest")  # of a step's functions, those that are in no layer
Event = dict[str, Any]


@one_line_errors
def profile(
    instance: Annotated[
        str, typer.Argument(help="Its name, as `kvmesh status` shows it, or HOST:PORT of its gRPC server.")
    ],
    steps: Annotated[int, typer.Option(help="How many steps to time.", min=1, max=256)] = 16,
    timeout: Annotated[
        float, typer.Option(help="Seconds for all the steps; those that ran by then are shown.", min=0.1, max=120)
    ] = 10.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a Perfetto file there: the steps' functions beside the spans of requests."),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="The memory's limit, in place of what a copy reaches.", metavar="GB/s")
    ] = None,
    compute: Annotated[
        float | None, typer.Option(help="The products' limit, in place of a measured one.", metavar="GFLOP/s")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers of the tables, as JSON.")] = False,
    conductor: Annotated[
        str | None,
        typer.Option(help="Conductors of a mesh that `kvmesh up` did not start here.", metavar="HOST:PORT[,...]"),
    ] = None,
    run_dir: RunDir = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of spans for --out, as `kvmesh serve --trace-dir` writes them, in place of a run's."),
    ] = None,
) -> None:
    """Show where the time of an instance's steps goes.

    The next steps of a live instance are timed, at each of its ranks: how long norms, projections, the writing of KV,
    attention, the MLP and sums over ranks take, what of it is Python, and how many bytes and products that is beside
    what the machine could do. Answers stay the same. Steps must run meanwhile: send requests. docs/operate/profile.md
    says how to read the table. Examples:

        kvmesh profile decode-0

        kvmesh profile prefill-0 --steps 4 --timeout 60

        kvmesh profile 10.0.0.5:7020 --steps 32 --out steps.json   # open it at ui.perfetto.dev
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"out={str(out)!r}: {out.parent} is no folder", field="out")
    for name, given in (("bandwidth", bandwidth), ("compute", compute)):
        if given is not None and given <= 0:
            raise ConfigError(f"{name}={given:g}: must be more than 0", field=name)
    if trace_dir is not None and not trace_dir.is_dir():
        raise ConfigError(f"trace_dir={str(trace_dir)!r}: no such folder", field="trace_dir")
    answer, traces = asyncio.run(_asked(instance, steps, timeout, conductor, run_dir))
    name = answer.instance.instance_id or instance
    looks = [RankLook.of(rank, (bandwidth or 0) * 1e9, (compute or 0) * 1e9) for rank in answer.ranks]
    shown = console()
    if as_json:
        told = {"instance": name, "ranks": [asdict(look) for look in looks]}
        shown.out(json.dumps(told, indent=2), highlight=False)
    else:
        wide_enough(shown)
        for number, look in enumerate(looks):
            title, tables, summary = _screen(f"{name}, rank {number} of {len(looks)}", look, steps)
            shown.print(escape(title))
            shown.print(tables)
            for line in summary:
                shown.print(escape(line), soft_wrap=True)
    if out is not None:
        spans = _spans_during(trace_dir or traces, answer.ranks)
        events = chrome_events(name, answer.ranks, spans)
        try:
            out.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"out={str(out)!r}: {error.strerror}", field="out") from None
        text = f"{out}: {len(events):,} events, {len(spans)} spans of requests; open it at https://ui.perfetto.dev"
        console(stderr=as_json).print(text, markup=False, soft_wrap=True)


async def _asked(
    instance: str, steps: int, timeout_s: float, conductor: str | None, run_dir: Path | None
) -> tuple[instance_pb2.ProfileResponse, Path | None]:
    """The instance's answer, and where spans of its requests lie, if that is known. Raises KvmeshError."""
    from kvmesh.instance.profiling import ANSWER_S
    from kvmesh.rpc.pb import instance_pb2

    run = None
    address = host_port(instance)
    if address and conductor is None:
        runs.secure(None)
    else:
        run = None if conductor else runs.find_running(run_dir)
        runs.secure(run)
        address = address or await _address(instance, conductor or (runs.conductors(run) if run else ""))
    request = instance_pb2.ProfileRequest(steps=steps, deadline_ms=round(timeout_s * 1000))
    call = call_instance(address, "Profile", request, timeout_s + ANSWER_S)
    answer: instance_pb2.ProfileResponse = await patiently(f"timing {steps} steps of {instance}", call)
    return answer, run.run_dir / "traces" if run else None


async def _address(instance: str, conductors: str) -> str:
    """Where the instance listens, as a conductor knows it. UnknownInstance names those that are there."""
    from kvmesh.cli.collect import ask_conductors

    told = await ask_conductors(conductors)
    if "error" in told:
        raise Unavailable(f"conductor {told.get('address', conductors)}: {told['error']}")
    known = {one["instance"]["instance_id"]: str(one["instance"]["address"]) for one in told.get("instances", [])}
    if instance not in known:
        there = ", ".join(sorted(known)) or "none"
        raise UnknownInstance(f"instance={instance!r}: the conductor knows no such instance; there are: {there}")
    return known[instance]


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FunctionLook:
    """One function: of an average step, and of a layer where it is in the layers (None: it is not). Shares of limits
    are None where a limit is not known, or nothing was counted."""

    name: str
    step_us: float
    step_share: float
    layer_us: float | None
    layer_share: float | None
    moved_bytes: float
    products: float
    of_bandwidth: float | None
    of_compute: float | None


@dataclass(frozen=True)
class ExpertsLook:
    """For how many of the steps' tokens each expert of one layer was chosen; `imbalance` is the busiest's number over
    the mean."""

    layer: int
    imbalance: float
    tokens: list[int]


@dataclass(frozen=True)
class RankLook:
    """What one rank's profile comes to; all but limits and counts are of an average step."""

    device: str
    layers: int
    steps: int
    rows: float
    context_tokens: float
    prefill_tokens: float
    step_us: float
    functions: list[FunctionLook]
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    activation_bytes: float
    products: float
    bytes_per_s: float
    products_per_s: float
    least_us: float  # that the limits allow a step; 0: unknown
    bound_by: str  # "memory", "products" or ""
    experts: list[ExpertsLook]  # of each layer that has any

    @classmethod
    def of(cls, rank: instance_pb2.RankProfile, bytes_per_s: float = 0.0, products_per_s: float = 0.0) -> RankLook:
        """`bytes_per_s` and `products_per_s` stand in the place of the measured limits; 0: the measured ones."""
        bytes_per_s, products_per_s = bytes_per_s or rank.bytes_per_s, products_per_s or rank.products_per_s
        count = len(rank.steps)
        whole_ns = sum(step.duration_ns for step in rank.steps)
        in_layers = sum(one.busy_ns for one in rank.functions if one.name not in OUTSIDE)
        functions = []
        for one in rank.functions:
            layered = one.name not in OUTSIDE
            moved = one.weight_bytes + one.kv_read_bytes + one.kv_written_bytes + one.activation_bytes
            functions.append(
                FunctionLook(
                    one.name,
                    one.busy_ns / count / 1e3,
                    _ratio(one.busy_ns, whole_ns) or 0.0,
                    one.busy_ns / count / max(rank.layers, 1) / 1e3 if layered else None,
                    _ratio(one.busy_ns, in_layers) if layered else None,
                    moved / count,
                    one.products / count,
                    _ratio(moved * 1e9, one.busy_ns * bytes_per_s) or None,
                    _ratio(one.products * 1e9, one.busy_ns * products_per_s) or None,
                )
            )
        weights, read, written, activations = (
            sum(getattr(one, f"{kind}_bytes") for one in rank.functions) / count
            for kind in ("weight", "kv_read", "kv_written", "activation")
        )
        products = sum(one.products for one in rank.functions) / count
        moved = weights + read + written + activations
        moving, multiplying = _ratio(moved, bytes_per_s) or 0.0, _ratio(products, products_per_s) or 0.0
        known = bytes_per_s > 0 and products_per_s > 0
        return cls(
            rank.device,
            rank.layers,
            count,
            sum(step.rows for step in rank.steps) / count,
            sum(step.context_tokens for step in rank.steps) / count,
            sum(step.prefill_tokens for step in rank.steps) / count,
            whole_ns / count / 1e3,
            functions,
            weights,
            read,
            written,
            activations,
            products,
            bytes_per_s,
            products_per_s,
            max(moving, multiplying) * 1e6 if known else 0.0,
            ("memory" if moving >= multiplying else "products") if known else "",
            [ExpertsLook(one.layer, _imbalance(one.tokens), list(one.tokens)) for one in rank.experts],
        )


def _imbalance(tokens: Sequence[int]) -> float:
    return max(tokens) * len(tokens) / total if (total := sum(tokens)) else 0.0


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _screen(title: str, look: RankLook, wanted: int) -> tuple[str, Table, list[str]]:
    fewer = f" of {wanted} (the others did not run in time)" if look.steps < wanted else ""
    made = f"{look.rows:.3g} rows behind {look.context_tokens:,.0f} tokens, {look.prefill_tokens:,.0f} prompt tokens"
    head = f"{title}: {look.device}; {look.steps} steps{fewer}, {look.step_us / 1e3:.2f} ms each: {made}"
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("function")
    for name in ("us a layer", "of layer", "us a step", "of step", "moves", "of memory", "MFLOP", "of products"):
        table.add_column(name, justify="right", no_wrap=True)
    inside = [one for one in look.functions if one.layer_us is not None]
    for one in (*inside, *(other for other in look.functions if other.layer_us is None)):
        table.add_row(
            one.name,
            "" if one.layer_us is None else f"{one.layer_us:,.1f}",
            _percent(one.layer_share),
            f"{one.step_us:,.0f}",
            _percent(one.step_share),
            size(one.moved_bytes) if one.moved_bytes else "",
            _percent(one.of_bandwidth),
            f"{one.products / 1e6:,.1f}" if one.products else "",
            _percent(one.of_compute),
        )
    layer_us = sum(one.layer_us or 0.0 for one in inside)
    moved = look.weight_bytes + look.kv_read_bytes + look.kv_written_bytes + look.activation_bytes
    table.add_section()
    table.add_row(
        "all",
        f"{layer_us:,.1f}",
        "",
        f"{look.step_us:,.0f}",
        "",
        size(moved),
        _percent(_ratio(moved * 1e6, look.step_us * look.bytes_per_s)),
        f"{look.products / 1e6:,.1f}",
        _percent(_ratio(look.products * 1e6, look.step_us * look.products_per_s)),
        style="bold",
    )
    parts = (("weights", look.weight_bytes), ("KV read", look.kv_read_bytes), ("KV written", look.kv_written_bytes))
    bytes_of = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in (*parts, ("activations", look.activation_bytes)))
    lines = [f"a step moves {bytes_of}"]
    if look.bound_by:
        limits = f"{look.bytes_per_s / 1e9:,.1f} GB/s and {look.products_per_s / 1e9:,.0f} GFLOP/s"
        least = f"{look.least_us / 1e3:.2f} ms a step, bound by {look.bound_by}"
        lines.append(f"limits {limits}: {least}; it took {look.step_us / look.least_us:.1f} times as long")
    else:
        lines.append("limits not measured: give --bandwidth and --compute")
    if look.experts:
        worst = max(look.experts, key=lambda one: one.imbalance)
        usual = median(one.imbalance for one in look.experts)
        busiest = worst.tokens.index(max(worst.tokens))
        lines.append(
            f"experts: the busiest of a layer has {usual:.1f} times the mean (median of {len(look.experts)} layers), "
            f"at most {worst.imbalance:.1f} times: expert {busiest} of layer {worst.layer}, {max(worst.tokens):,} "
            f"tokens; {worst.tokens.count(0)} of its {len(worst.tokens)} experts had none"
        )
    return head, table, lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


# ── the picture ───────────────────────────────────────────────────────────────────────────────────


def _window(ranks: Iterable[instance_pb2.RankProfile]) -> tuple[int, int]:
    """When the first step began and the last one ended, in nanoseconds since 1970."""
    steps = [step for rank in ranks for step in rank.steps]
    return min(s.start_unix_ns for s in steps), max(s.start_unix_ns + s.duration_ns for s in steps)


def during(spans: Sequence[dict[str, Any]], start_ns: int, end_ns: int) -> list[dict[str, Any]]:
    """Returns all spans of the traces of which one was under way then."""
    traces = {span["trace_id"] for span in spans if span["start_ns"] < end_ns and span["end_ns"] > start_ns}
    return [span for span in spans if span["trace_id"] in traces]


def _spans_during(folder: Path | None, ranks: Sequence[instance_pb2.RankProfile]) -> list[dict[str, Any]]:
    """What has been written of them within FLUSH_S; a request that still runs has written little."""
    if folder is None or not folder.is_dir():
        return []
    time.sleep(FLUSH_S)
    return during(list(read_spans(folder)), *_window(ranks))


def lanes(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Returns a track for each span (start and end, sorted by start, the longer first): in one track, spans lie apart
    or one wholly inside the other, as the viewer wants it."""
    open_ends: list[list[int]] = []
    found = []
    for start, end in spans:
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        free = (number for number, ends in enumerate(open_ends) if not ends or ends[-1] >= end)
        number = next(free, len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(end)
        found.append(number)
    return found


def chrome_events(name: str, ranks: Sequence[instance_pb2.RankProfile], spans: Sequence[dict[str, Any]]) -> list[Event]:
    """Returns Chrome trace events: a track for each rank, with its steps and their functions (or kernels), and a
    process for each service, with the spans of requests. All on one clock, from the earliest event on."""
    base = min([_window(ranks)[0], *(span["start_ns"] for span in spans)])
    events: list[Event] = [_named(1, "process_name", name)]
    for number, rank in enumerate(ranks):
        events += _rank_events(number, rank, base)
    by_place: dict[str, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: (span["start_ns"], -span["end_ns"])):
        by_place.setdefault(f"requests: {span.get('instance') or span['service']}", []).append(span)
    for process, (place, own) in enumerate(sorted(by_place.items()), 2):
        events.append(_named(process, "process_name", place))
        for span, lane in zip(own, lanes((one["start_ns"], one["end_ns"]) for one in own), strict=True):
            told = {"trace": span["trace_id"], **span["attributes"]}
            took = span["end_ns"] - span["start_ns"]
            events.append(_slice(str(span["name"]), process, lane, span["start_ns"] - base, took, told))
    return events


def _rank_events(number: int, rank: instance_pb2.RankProfile, base: int) -> Iterator[Event]:
    yield _named(1, "thread_name", f"rank {number}", number)
    for step in rank.steps:
        told = {"rows": step.rows, "context_tokens": step.context_tokens, "prefill_tokens": step.prefill_tokens}
        yield _slice("step", 1, number, step.start_unix_ns - base, step.duration_ns, told)
    first = rank.steps[0].start_unix_ns - base if rank.steps else 0
    for which, start, took in zip(rank.piece_which, rank.piece_starts_ns, rank.piece_ns, strict=True):
        yield _slice(rank.piece_names[which], 1, number, first + start, took, {})


def _named(process: int, what: str, name: str, track: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _slice(name: str, process: int, track: int, start_ns: int, took_ns: int, told: dict[str, Any]) -> Event:
    place = {"pid": process, "tid": track, "ts": start_ns / 1e3, "dur": took_ns / 1e3}
    return {"ph": "X", "name": name, **place, "args": told}
