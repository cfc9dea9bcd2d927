"""`kvmesh replay`: a production trace through the live gateway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.cli.console import one_line_errors
from kvmesh.cli.load.options import LoadOptions
from kvmesh.cli.options import together
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.cli.load.load import Job, LoadOutcome
    from kvmesh.sim.workloads.trace import Made, Shaped, TokenMaker, TraceShape

HIT_DEFINITIONS = {
    "live.by_tokens": "cached prompt tokens / prompt tokens, over answered requests",
    "live.by_blocks": "trace blocks all of whose tokens were cached / trace blocks, over answered requests",
    "ideal": "of the requests sent, offline, in file order: an unbounded cache, empty at first, each prompt complete "
    "before the next comes; the longest prefix of blocks (hash ids) seen before counts, a partly filled last one too",
    "reachable": "as ideal, by the engine's rules: only full engine blocks are kept, and at least the last token of a "
    "prompt is computed",
}


def speed_of(text: str) -> float:
    """Trace seconds a second; math.inf for "inf" and 0. ConfigError names the value."""
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not speed >= 0:
        raise ConfigError(f"speed={text!r}: must be a number over 0, or inf (0) for as fast as it goes", field="speed")
    return speed or math.inf


def scale_of(text: str) -> Fraction:
    """0.0625 or 1/16. ConfigError names the value."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if not 0 < scale <= 1:
        raise ConfigError(
            f"scale_tokens={text!r}: must be over 0 and at most 1, as 0.0625 or 1/16", field="scale_tokens"
        )
    return scale


def jobs_of(made: Sequence[Made], maker: TokenMaker, block: int, speed: float) -> list[Job]:
    """Requests to send, at their times from the first one's, divided by `speed`; without times when it is inf."""
    from kvmesh.cli.load.load import Job

    def prompt(one: Made) -> Any:
        return lambda: maker.prompt(one, block)

    first = made[0].request.at_ms if made else 0.0
    return [
        Job(
            index,
            prompt(one),
            one.output_tokens,
            None if math.isinf(speed) else (one.request.at_ms - first) / 1000 / speed,
        )
        for index, one in enumerate(made)
    ]


def hit_rates(
    made: Sequence[Made], outcomes: Sequence[LoadOutcome], shape: TraceShape, maker: TokenMaker, block_tokens: int
) -> dict[str, Any]:
    """Live, ideal and reachable hit rates, and what each means."""
    from kvmesh.sim.workloads import trace

    good = [(made[one.index], one) for one in outcomes if one.ok]
    blocks = sum(len(asked.hash_ids) for asked, _ in good)
    tokens = sum(one.prompt_tokens for _, one in good)
    live = trace.HitRate(
        blocks,
        sum(one.cached_tokens // shape.block for _, one in good),
        tokens,
        sum(one.cached_tokens for _, one in good),
    )
    sent = sorted(one.index for one in outcomes)
    best = trace.ideal(((made[i].hash_ids, made[i].prompt_tokens) for i in sent), shape.block)
    told = {"live": _plain(live), "ideal": _plain(best)}
    if block_tokens:
        prompts = (maker.prompt(made[i], shape.block) for i in sent)
        told["reachable"] = {**_plain(trace.reachable(prompts, block_tokens)), "block_tokens": block_tokens}
        del told["reachable"]["by_blocks"]
    return {**told, "definitions": HIT_DEFINITIONS}


def _plain(found: Any) -> dict[str, Any]:
    return {
        "by_blocks": round(found.by_blocks, 4), "by_tokens": round(found.by_tokens, 4), "blocks": found.blocks,
        "hit_blocks": found.hit_blocks, "tokens": found.tokens, "hit_tokens": found.hit_tokens,
    }  # fmt: skip


def hit_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    """The hit rates for the screen."""
    live, best = told["live"], told["ideal"]
    lines = [
        ("  by blocks", f"{live['by_blocks']:.1%} of trace blocks; ideal {best['by_blocks']:.1%}"),
        ("  by tokens", f"{live['by_tokens']:.1%} of prompt tokens; ideal {best['by_tokens']:.1%}"),
    ]
    if "reachable" in told:
        reach = told["reachable"]
        text = f"{reach['by_tokens']:.1%} of prompt tokens, with engine blocks of {reach['block_tokens']} tokens"
        lines.append(("  reachable", text))
    meaning = (
        "[dim]ideal: unbounded cache, file order, this slice alone, last partial block counts; reachable: only "
        "full engine blocks, the last token always computed[/]"
    )
    return [*lines, ("", meaning)]


HELP = """Send a production trace through a running mesh: at its times, and equal hash ids are equal tokens.

A block of 512 trace tokens becomes F x 512 tokens, a partial last block F times its tokens rounded down (at least \
1), an answer F times its tokens rounded up. What then exceeds the model's context is cut to leading whole blocks, \
or left out (--too-long skip), and counted. Printed beside the live hit rate: the ideal one of the same slice \
(unbounded cache, file order), and the one reachable with the engine's blocks. Examples:

    kvmesh replay conversation_trace.jsonl --speed 10 --to 600

    kvmesh replay conversation_trace.jsonl --speed inf --requests 200 --scale-tokens 1/32

    kvmesh replay trace.jsonl --speed 2 --slo-ttft 2000 --slo-tbt 100 --json replay.json
"""


@one_line_errors
@together
def replay(
    *,
    trace: Annotated[Path, typer.Argument(help="JSON lines: timestamp, input_length, output_length, hash_ids.")],
    speed: Annotated[str, typer.Option(help="Trace seconds a second; inf or 0: in order, as fast as it goes.")] = "1",
    concurrency: Annotated[int, typer.Option(help="Requests in flight with --speed inf.", metavar="N", min=1)] = 1,
    from_s: Annotated[
        float, typer.Option("--from", help="Begin at this second of the trace.", metavar="SECONDS", min=0)
    ] = 0.0,
    to_s: Annotated[
        float | None, typer.Option("--to", help="End before this second.", metavar="SECONDS", min=0)
    ] = None,
    requests: Annotated[int | None, typer.Option(help="At most so many.", metavar="N", min=1)] = None,
    scale_tokens: Annotated[
        str, typer.Option(help="Lengths times this, so that a small model's context holds them.", metavar="F|A/B")
    ] = "1",
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of the trace behind one hash id.", metavar="N", min=1)
    ] = 512,
    too_long: Annotated[str, typer.Option(help="What exceeds the context: cut, or skip.", metavar="cut|skip")] = "cut",
    max_output: Annotated[int | None, typer.Option(help="Longest answer.", metavar="TOKENS", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the tokens behind a hash id.")] = 0,
    load: LoadOptions,
) -> None:
    """Send a trace through a running mesh."""
    from kvmesh.cli.load import drive
    from kvmesh.cli.load.load import Generator
    from kvmesh.cli.load.report import summarise
    from kvmesh.sim.workloads import trace as traces

    pace, scale = speed_of(speed), scale_of(scale_tokens)
    if concurrency != 1 and not math.isinf(pace):
        raise ConfigError(f"concurrency={concurrency}: only with --speed inf", field="concurrency")
    drive.check_writable(load.json_to)
    traces.TraceShape(scale=scale, trace_block=block_tokens, too_long=too_long)
    slice_ = traces.between(traces.read(trace, block_tokens), from_s, to_s, requests)
    if not slice_:
        raise ConfigError(f"trace={str(trace)!r}: {_no_slice(trace, block_tokens)}", field="trace")
    where = load.target()
    shape = traces.TraceShape(
        scale=scale, trace_block=block_tokens, context_tokens=where.context_tokens or None, max_output=max_output,
        too_long=too_long,
    )  # fmt: skip
    shaped = traces.fit(slice_, shape)
    if not shaped.made:
        why = f"nothing of this slice fits a context of {where.context_tokens} tokens; try a smaller one"
        raise ConfigError(f"scale_tokens={scale_tokens!r}: {why}", field="scale_tokens")
    maker = traces.TokenMaker(where.vocab_size, seed)
    load.screen.print(_about(slice_, shaped, shape, where, pace, concurrency))
    salt = load.salt("replay")
    generator = Generator(where, salt=salt, timeout_s=load.timeout, concurrency=concurrency if math.isinf(pace) else 0)
    jobs = jobs_of(shaped.made, maker, shape.block, pace)
    stopped = drive.drive(generator, jobs, "replaying", total=len(jobs))
    hits = hit_rates(shaped.made, generator.results, shape, maker, where.block_tokens)
    told = {
        "kind": "replay", "url": where.url, "model": where.model,
        "interrupted": stopped, "in_flight_dropped": generator.dropped,
        "trace": {
            "file": str(trace), "speed": None if math.isinf(pace) else pace, "from_s": from_s, "to_s": to_s,
            "scale_tokens": str(scale), "trace_block_tokens": block_tokens, "block_tokens": shape.block, "seed": seed,
            "requests": len(slice_), "cut": shaped.cut, "skipped": shaped.skipped, "reuse_cache": load.reuse,
            "concurrency": concurrency if math.isinf(pace) else None,
        },
        **summarise(generator.results, generator.wall_s, load.slo),
        "hit_rates": hits,
    }  # fmt: skip
    drive.finish(load, told, hit_lines(hits))


def _no_slice(trace: Path, block_tokens: int) -> str:
    from kvmesh.sim.workloads import trace as traces

    times = [request.at_ms / 1000 for request in traces.read(trace, block_tokens)]
    return (
        f"no request lies in this slice; its requests are of seconds {times[0]:g} to {times[-1]:g}"
        if times
        else "holds no request"
    )


def _about(slice_: Sequence[Any], shaped: Shaped, shape: TraceShape, where: Any, pace: float, concurrency: int) -> str:
    seconds = (slice_[-1].at_ms - slice_[0].at_ms) / 1000
    how = f"in order, {concurrency} at once" if math.isinf(pace) else f"at {pace:g}x"
    lengths = f"a hash id is {shape.block} tokens" + (f" (x {shape.scale})" if shape.scale != 1 else "")
    changed = [f"{shaped.cut} cut"] * bool(shaped.cut) + [f"{shaped.skipped} left out"] * bool(shaped.skipped)
    fits = f"; to fit the context of {where.context_tokens} tokens: {', '.join(changed)}" if changed else ""
    return (
        f"[bold]{where.model}[/] at {where.url}: {len(slice_):,} requests of {seconds:,.0f} s of the trace {how}; "
        f"{lengths}{fits}"
    )
