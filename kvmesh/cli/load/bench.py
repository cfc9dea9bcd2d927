"""`kvmesh bench`: load on a running mesh, and what its clients saw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.cli.console import one_line_errors
from kvmesh.cli.load.options import LoadOptions
from kvmesh.cli.options import together
from kvmesh.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from kvmesh.cli.load.load import Job
    from kvmesh.sim.workloads.trace import TokenMaker

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 4
SECONDS = 1e9


@dataclass(frozen=True)
class UniformLengths:
    """Tokens, uniform in low..high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> UniformLengths:
        """ "128" or "64:256". ConfigError names the option and the value."""
        first, colon, last = text.partition(":")
        try:
            low, high = int(first), int(last if colon else first)
        except ValueError:
            raise ConfigError(f"{name}={text!r}: must be N or LOW:HIGH, in tokens", field=name) from None
        if not 1 <= low <= high:
            raise ConfigError(f"{name}={text!r}: must be at least 1, the lower first", field=name)
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class BenchWorkload:
    """What is sent. Every figure of request i depends on (seed, i) alone. ConfigError names what cannot be.

    `prefix_share` of each prompt's tokens, rounded, are the beginning of one of `prefixes` common texts, chosen at
    random; the rest occurs in no other prompt. `rate`: requests a second, Poisson arrivals; None: no times."""

    input: UniformLengths
    output: UniformLengths
    prefix_share: float = 0.0
    prefixes: int = 1
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_share <= 1:
            raise ConfigError(f"prefix_share={self.prefix_share:g}: must be between 0 and 1", field="prefix_share")
        if self.prefixes < 1:
            raise ConfigError(f"prefixes={self.prefixes}: must be at least 1", field="prefixes")
        if self.rate is not None and not 0 < self.rate < SECONDS:
            raise ConfigError(f"rate={self.rate:g}: must be over 0", field="rate")

    def jobs(self, maker: TokenMaker, count: int | None, name: str = "") -> Iterator[Job]:
        """The first `count` requests (None: without end); `name` keeps their tokens from those of other names."""
        from kvmesh.cli.load.load import Job

        clock = random.Random(f"{self.seed}:{name}:arrivals")
        at_s, index = 0.0, 0
        while count is None or index < count:
            if self.rate is not None:
                at_s += clock.expovariate(self.rate)
            source = random.Random(f"{self.seed}:{name}:{index}")
            length, prefix = self.input.draw(source), source.randrange(self.prefixes)
            tokens = self._prompt(maker, f"{name}:{index}", length, prefix)
            yield Job(index, tokens, self.output.draw(source), at_s if self.rate is not None else None)
            index += 1

    def _prompt(self, maker: TokenMaker, name: str, length: int, prefix: int) -> Any:
        shared = round(length * self.prefix_share)

        def make() -> list[int]:
            return maker.noise(f"prefix:{prefix}", shared) + maker.noise(f"rest:{name}", length - shared)

        return make


HELP = """Send load to a running mesh; print TTFT, TBT, throughput, goodput and the hit rate as its clients saw them.

Prompts are random token ids, answers have exactly the length asked for. TBT of a request is the mean of its longest \
10% token intervals; goodput counts requests with TTFT and TBT within --slo-ttft and --slo-tbt; the hit rate is \
cached prompt tokens / prompt tokens. Ctrl-C prints what there is. Examples:

    kvmesh bench --concurrency 8 --requests 200

    kvmesh bench --rate 5 --duration 60 --input-tokens 128:512 --slo-ttft 500 --slo-tbt 50

    kvmesh bench --concurrency 4 --prefix-share 0.8 --prefixes 4 --warmup 8 --json bench.json
"""


@one_line_errors
@together
def bench(
    *,
    rate: Annotated[float | None, typer.Option(help="Requests a second, Poisson arrivals.", metavar="R")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests in flight; the next is sent when one ends.", metavar="N", min=1)
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Send so many.", metavar="N", min=1)] = None,
    duration: Annotated[float | None, typer.Option(help="Send for so long.", metavar="SECONDS", min=0.1)] = None,
    input_tokens: Annotated[
        str, typer.Option(help="Prompt length: N, or LOW:HIGH (uniform).", metavar="N|A:B")
    ] = "256",
    output_tokens: Annotated[str, typer.Option(help="Answer length: N or LOW:HIGH.", metavar="N|A:B")] = "32",
    prefix_share: Annotated[
        float, typer.Option(help="Share of each prompt that is a common prefix, 0 to 1.", metavar="X")
    ] = 0.0,
    prefixes: Annotated[int, typer.Option(help="How many common prefixes there are.", metavar="K")] = 1,
    warmup: Annotated[int, typer.Option(help="Requests sent before, which do not count.", metavar="N", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and tokens.")] = 0,
    load: LoadOptions,
) -> None:
    """Send load to a running mesh."""
    from kvmesh.cli.load import drive
    from kvmesh.cli.load.load import Generator
    from kvmesh.cli.load.report import summarise
    from kvmesh.sim.workloads.trace import TokenMaker

    if rate is not None and concurrency is not None:
        raise ConfigError(f"concurrency={concurrency}: give --rate or --concurrency, not both", field="concurrency")
    work = BenchWorkload(
        input=UniformLengths.parse("input_tokens", input_tokens),
        output=UniformLengths.parse("output_tokens", output_tokens),
        prefix_share=prefix_share, prefixes=prefixes, rate=rate, seed=seed,
    )  # fmt: skip
    drive.check_writable(load.json_to)
    where = load.target()
    longest = work.input.high + work.output.high
    if where.context_tokens and longest > where.context_tokens:
        why = f"with {work.output.high} output tokens exceeds the context of {where.context_tokens}"
        raise ConfigError(f"input_tokens={input_tokens!r}: {why}", field="input_tokens")
    count = requests if requests is not None else (None if duration else DEFAULT_REQUESTS)
    limit = 0 if rate is not None else concurrency or DEFAULT_CONCURRENCY
    salt = load.salt("bench")
    maker = TokenMaker(where.vocab_size, seed)
    how = f"{rate:g} requests/s" if rate is not None else f"{limit} at once"
    load.screen.print(f"[bold]{where.model}[/] at {where.url}: {how}, {input_tokens} → {output_tokens} tokens")
    stopped = False
    if warmup:
        before = Generator(where, salt=salt, timeout_s=load.timeout, concurrency=limit or DEFAULT_CONCURRENCY)
        jobs = [*BenchWorkload(**{**vars(work), "rate": None}).jobs(maker, warmup, "warmup")]
        stopped = drive.drive(before, jobs, "warming up", total=warmup)
        if not stopped and not any(one.ok for one in before.results):
            raise Unavailable(f"no request of the warm-up was answered: {before.results[0].message}")
    generator = Generator(where, salt=salt, timeout_s=load.timeout, concurrency=limit)
    if not stopped:
        stopped = drive.drive(generator, work.jobs(maker, count), "sending", total=count, duration_s=duration)
    told = {
        "kind": "bench", "url": where.url, "model": where.model,
        "interrupted": stopped, "in_flight_dropped": generator.dropped,
        "workload": {
            "rate": rate, "concurrency": limit or None, "input_tokens": input_tokens, "output_tokens": output_tokens,
            "prefix_share": prefix_share, "prefixes": prefixes, "warmup": warmup, "seed": seed,
            "reuse_cache": load.reuse,
        },
        **summarise(generator.results, generator.wall_s, load.slo),
    }  # fmt: skip
    drive.finish(load, told)
