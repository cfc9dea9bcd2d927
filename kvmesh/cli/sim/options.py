"""What `kvmesh sim run` is told: one value per option, sweeps over them, and the checks that need no simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.sim.workloads.sessions import SessionConfig
    from kvmesh.sim.workloads.synthetic import LengthDistribution, SyntheticConfig

MAX_RUNS = 64
LEAST_LOADED = "least-loaded"
DEFAULT_POLICY = "kvcache"


def _opt(default: Any, text: str, metavar: str = "", *, least: int | None = None, flags: tuple[str, ...] = ()) -> Any:
    """A field that is an option; `least`: its least value."""
    return field(default=default, metadata={"help": text, "metavar": metavar or None, "least": least, "flags": flags})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is served."""

    trace: Path | None = _opt(None, "Trace of Mooncake's format.", "FILE")  # noqa: RUF009
    csv: Path | None = _opt(None, "Table with a header: time (s, or time_ms), input, output.", "FILE")  # noqa: RUF009
    synthetic: str | None = _opt(
        None,
        "Sessions over prefix trees: rate (requests/s), burstiness (1: Poisson, 0: evenly apart), "
        "applications, zipf, depth, branching, "
        "turns, think_s, and lengths as MEAN[:SPREAD[:MOST]]: system, node, user, output.",
        "NAME=VALUE,...",
    )
    sessions: str | None = _opt(
        None,
        "Agents: S sessions of T turns, each with all before it; start_s (within which they begin), think_s, "
        "applications, and lengths as above: system, user, output.",
        "SxT[,NAME=VALUE,...]",
    )
    closed: int | None = _opt(None, "N in flight: the next comes when one has ended, whatever its time.", "N", least=1)
    requests: int | None = _opt(None, "The first N.", "N", least=1)
    skip: int = _opt(0, "Leave out the first N.", "N", least=0)
    speed: float = _opt(1.0, "2: arrivals twice as dense.", "X")
    max_output: int | None = _opt(None, "Cut answers.", "TOKENS", least=1)
    trace_block: int = _opt(512, "Tokens behind one hash id.", "N", least=1)
    block_tokens: int = _opt(256, "Tokens of a block.", "N", least=1)
    seed: int = _opt(0, "Of arrivals, lengths and ties.", "N")


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What serves it."""

    gpu: str = _opt("a800", "a100, a800, h100, h800, h20, h200 or l20.", "NAME")
    gpus: int = _opt(
        8, "Of an instance, in tensor parallelism; 8 fill a node.", "N", least=1, flags=("--gpus", "--gpus-per-node")
    )
    prefill_mesh: str | None = _opt(
        None,
        "Parallel axes of a prefill instance instead of --gpus: sizes of dp, pp, cp, tp, dcp, and by ep the axes that "
        "experts are dealt out over; 8 ranks are a node.",
        "pp=4,tp=2",
    )
    decode_mesh: str | None = _opt(None, "Likewise of a decode instance.", "dp=8,ep=dp")
    coupled_mesh: str | None = _opt(None, "Likewise of a coupled instance.", "tp=8,dcp=8")
    fp8_products: bool = _opt(False, "Of instances with axes: matrices are multiplied, and tokens sent, in FP8.")
    speculate: str | None = _opt(None, "Rows have drafts: mtp, ngram or suffix.", "DRAFTER")
    accept: str = _opt(
        "0.85,0.7,0.55",
        "Chance that each token of a draft is kept where those before it were; as many as the longest draft has.",
        "X,X,...",
    )
    micro_batches: int = _opt(1, "2: their rows go in halves, which hides all-to-all.", "N", least=1)
    model: str = _opt("llama3-70b", "Preset, config.json or its folder: see kvmesh kvsize.", "MODEL")
    weight_dtype: str = _opt("bf16", "bf16, fp8, ...", "DTYPE")
    kv_dtype: str = _opt("bf16", "bf16, fp8, ...", "DTYPE")
    prefill: int | None = _opt(None, "Prefill instances; by default 8.", "N", least=1)
    decode: int | None = _opt(None, "Decode instances; by default 8.", "N", least=1)
    coupled: int | None = _opt(None, "Instances that do both, instead of these.", "N", least=1)
    coupled_mode: str = _opt("prefill-first", "prefill-first or chunked.", "MODE")
    prefix_cache: bool = _opt(True, "Of coupled instances, in device memory.")
    times: Path | None = _opt(None, "Fitted step times instead of the roofline's.", "FILE")  # noqa: RUF009
    nic_gbps: float | None = _opt(None, "NICs of a node of 8 GPUs.", "Gb/s")
    dram_gib: float | None = _opt(None, "Host memory for KV of a node; by default 1024.", "GiB")
    dram_tokens: int | None = _opt(None, "The same of an instance.", "TOKENS", least=1)
    ssd_gib: float | None = _opt(None, "SSD for KV of a node; by default none.", "GiB")
    tenant_fairness: bool = _opt(True, "Prefill is fair between the tenants of the trace; else one queue for all.")
    kv_tokens: int | None = _opt(None, "Device memory for KV of an instance.", "TOKENS", least=1)
    chunk_tokens: int | None = _opt(None, "Of a prefill step; by default 8192, beside rows 512.", "N", least=1)
    max_running: int = _opt(256, "Rows of a decode batch.", "N", least=1)


@dataclass(frozen=True, kw_only=True)
class Unforeseen:
    """What no conductor is told. Seconds are virtual ones; instances are p0, p1, ... and d0, d1, ..."""

    unknown: bool = _opt(
        False, "Conductors begin with their priors and learn from heartbeats alone; else they have profiled."
    )
    noise: float = _opt(0.0, "Scatter of each step's time: deviation of its logarithm.", "X")
    spread: float = _opt(0.0, "Likewise of instances, each for good.", "X")
    slow: str | None = _opt(None, "Steps take TIMES as long; no UNTIL: to the end.", "NODE:FROM-UNTIL:TIMES,...")
    freeze: str | None = _opt(None, "It stands still as under SIGSTOP.", "NODE:FROM-UNTIL,...")
    kill: str | None = _opt(None, "It dies; BACK s later a newcomer has its name.", "NODE:AT[+BACK],...")
    join: str | None = _opt(None, "It is not there before; may be one more than --prefill or --decode.", "NODE:AT,...")
    leave: str | None = _opt(None, "It ends what it has, and goes.", "NODE:AT,...")
    heartbeat: float | None = _opt(
        None,
        "Between heartbeats; by default 1000, with any of the options above, or engines of others, 200, as live.",
        "MS",
    )

    @property
    def unforeseen(self) -> bool:
        """Whether any of these is given."""
        return any(getattr(self, one.name) for one in fields(Unforeseen) if one.name != "heartbeat")


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """What decides, and by which bounds. SLOs in ms."""

    policy: str = _opt(
        DEFAULT_POLICY,
        "kvcache, cache-aware, least-loaded, power-of-two, round-robin, random, session-hash, or one of an installed "
        "package.",
        "NAME",
    )
    admission: str = _opt("predicted", "off, baseline, early or predicted.", "MODE")
    admission_confidence: float = _opt(
        0.0,
        "Share of taken requests that shall keep their SLO; 0: predictions at their word (docs/operate/admission.md).",
        "X",
    )
    threshold: str = _opt("1", "Balancing threshold: a number, or adaptive.", "X")
    fetch: str = _opt("cheaper", "Prefixes of others: cheaper, always or never.", "WHEN")
    routing: str = _opt(
        LEAST_LOADED,
        "Who places at --coupled instances: least-loaded, round-robin, or conductor, by --policy, to whom they are "
        "engines of others: which blocks they hold is believed; conductor-exact: they report it.",
        "NAME",
    )
    conductors: int = _opt(1, "How many.", "N", least=1)
    orders: bool = _opt(False, "Carry out the leader's orders (replicas, roles).")
    retries: int = _opt(
        0,
        "Times that a refused client comes again, when its Retry-After says so.",
        "N",
        least=0,
        flags=("--retries", "--obey-retry-after"),
    )
    slo_ttft: float = _opt(30_000.0, "TTFT, for admission and goodput.", "MS")
    slo_tbt: float | None = _opt(None, "TBT for admission; by default the last of --tbt-slos.", "MS")
    tbt_slos: str = _opt("100,200,300", "TBT for goodput.", "MS,...")


@dataclass(frozen=True, kw_only=True)
class Options(Deciding, Unforeseen, Machines, Workload):
    """One run. Fields are the options of `kvmesh sim run`, one by one."""

    def __post_init__(self) -> None:
        """What contradicts itself."""
        given = [name for name in ("trace", "csv", "synthetic", "sessions") if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(f"--{name}" for name in given) or "none"
            raise ConfigError(f"{told}: give one of --trace, --csv, --synthetic and --sessions", field="trace")
        if self.sessions is not None:
            for name in ("closed", "requests", "skip", "max_output"):
                if getattr(self, name):
                    raise ConfigError(f"{name}={getattr(self, name)}: not with --sessions", field=name)
        if self.coupled is not None:
            # Of `unknown` a plain router takes no notice: one sweep may have it and conductors.
            for name in (one.name for one in fields(Unforeseen) if one.name not in ("unknown", "heartbeat")):
                if getattr(self, name):
                    raise ConfigError(f"{name}={getattr(self, name)}: not with --coupled", field=name)
        elif self.routing != LEAST_LOADED:
            raise ConfigError(f"routing={self.routing!r}: only with --coupled", field="routing")
        if self.coupled is not None and not self.conducts_engines and self.policy != DEFAULT_POLICY:
            why = f"with --coupled only where --routing is conductor or conductor-exact, and it is {self.routing}"
            raise ConfigError(f"policy={self.policy!r}: {why}", field="policy")
        if self.heartbeat is not None and not 0 < self.heartbeat < math.inf:
            raise ConfigError(f"heartbeat={self.heartbeat:g}: must be over 0 ms", field="heartbeat")
        self._check_meshes()
        if self.coupled is not None and (self.prefill is not None or self.decode is not None):
            raise ConfigError(f"coupled={self.coupled}: not with --prefill or --decode", field="coupled")
        for name in ("prefill", "decode", "coupled"):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= 100_000:
                raise ConfigError(f"{name}={count}: must be at least 1", field=name)
        if not 0 <= self.admission_confidence <= 1:
            text = f"admission_confidence={self.admission_confidence:g}: must be between 0 and 1"
            raise ConfigError(text, field="admission_confidence")
        if not 0 < self.slo_ttft < math.inf:
            raise ConfigError(f"slo_ttft={self.slo_ttft:g}: must be over 0 ms", field="slo_ttft")
        if self.slo_tbt is not None and not 0 < self.slo_tbt < math.inf:
            raise ConfigError(f"slo_tbt={self.slo_tbt:g}: must be over 0 ms", field="slo_tbt")

    def _check_meshes(self) -> None:
        given = {name: getattr(self, name) for name in ("prefill_mesh", "decode_mesh", "coupled_mesh")}
        others = ("prefill_mesh", "decode_mesh") if self.coupled is not None else ("coupled_mesh",)
        for name in others:
            if given[name] is not None:
                what = "not with" if self.coupled is not None else "only with"
                raise ConfigError(f"{name}={given[name]!r}: {what} --coupled", field=name)
        if self.times is not None and any(one is not None for one in given.values()):
            name = next(name for name, one in given.items() if one is not None)
            raise ConfigError(f"{name}={given[name]!r}: not with --times", field=name)
        if self.times is not None and self.speculate is not None:
            raise ConfigError(f"speculate={self.speculate!r}: not with --times", field="speculate")
        if not 1 <= self.micro_batches <= 2:
            raise ConfigError(f"micro_batches={self.micro_batches}: must be 1 or 2", field="micro_batches")

    @property
    def conducts_engines(self) -> bool:
        """Whether conductors place at coupled instances, as at engines of others."""
        return self.coupled is not None and self.routing.startswith("conductor")

    @property
    def tbt_bounds_s(self) -> list[float]:
        """What goodput is judged by, rising."""
        found = sorted(number_of("tbt_slos", word) for word in self.tbt_slos.split(","))
        for bound in found:
            if not 0 < bound < math.inf:
                raise ConfigError(f"tbt_slos={self.tbt_slos!r}: must be over 0 ms", field="tbt_slos")
        return [bound / 1000 for bound in found]

    @property
    def source(self) -> str:
        """What the requests come from, for a title."""
        if self.synthetic is not None:
            return f"synthetic ({self.synthetic})" if self.synthetic else "synthetic"
        if self.sessions is not None:
            return f"sessions {self.sessions}"
        path = self.trace or self.csv
        assert path is not None
        return path.name

    @property
    def hardware(self) -> str:
        """What serves them, for a title: where fitted times take the place of a GPU's, what is still of that."""
        if self.times is None:
            return f"{self.gpu}, {self.model}"
        memory = "" if self.kv_tokens and self.dram_tokens else f"memory of {self.gpu}, "
        return f"step times of {self.times.name}, {memory}KV of {self.model}"

    def to_json(self) -> dict[str, Any]:
        """For a report: all that was given or has a default; nothing of what does not apply."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.coupled is None:
            del found["coupled_mode"], found["prefix_cache"], found["routing"]
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in found.items() if value is not None
        }


def number_of(name: str, text: str) -> float:
    """ConfigError names the option."""
    try:
        found = float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: is no number", field=name) from None
    if not math.isfinite(found):
        raise ConfigError(f"{name}={text!r}: must be finite", field=name)
    return found


def value_of(name: str, kind: Any, text: str) -> Any:
    """`text` as a field of this type. ConfigError names field and value."""
    kinds = get_args(kind) or (kind,)
    if bool in kinds:
        if text not in ("true", "false"):
            raise ConfigError(f"{name}={text!r}: must be true or false", field=name)
        return text == "true"
    if int in kinds:
        found = number_of(name, text)
        if found != int(found):
            raise ConfigError(f"{name}={text!r}: must be a whole number", field=name)
        return int(found)
    if float in kinds:
        return number_of(name, text)
    return Path(text) if Path in kinds else text


# ── sweeps ────────────────────────────────────────────────────────────────────────────────────────


def sweeps(base: Options, texts: Sequence[str]) -> Iterator[tuple[dict[str, str], Options]]:
    """Every combination of `NAME=VALUE,VALUE,...`: (what differs, the options). ConfigError: an unknown name, one given
    twice, too many runs."""
    kinds = get_type_hints(Options)
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or name not in kinds or name == "tbt_slos":
            known = ", ".join(one for one in kinds if one != "tbt_slos")
            raise ConfigError(f"sweep={text!r}: must be NAME=VALUE,VALUE,... with NAME one of {known}", field="sweep")
        if name in axes:
            raise ConfigError(f"sweep={text!r}: {name} stands twice", field="sweep")
        words = values.split(";" if ";" in values else ",")
        axes[name] = [word.strip() for word in words]
        if len(set(axes[name])) != len(axes[name]):
            raise ConfigError(f"sweep={text!r}: a value stands twice", field="sweep")
    if (runs := math.prod(map(len, axes.values()))) > MAX_RUNS:
        raise ConfigError(f"sweep={list(texts)}: makes {runs} runs, at most {MAX_RUNS}", field="sweep")
    for combination in product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        yield chosen, replace(base, **{name: value_of(name, kinds[name], text) for name, text in chosen.items()})


def label(chosen: dict[str, str]) -> str:
    """Names one run of a sweep, in characters that a folder's name may have."""
    text = ",".join(f"{name}={value}" for name, value in chosen.items()) or "run"
    return "".join(char if char.isalnum() or char in "=,._-" else "_" for char in text)


# ── synthetic workloads ───────────────────────────────────────────────────────────────────────────


def synthetic_of(text: str, requests: int | None, block_tokens: int, speed: float) -> SyntheticConfig:
    """`NAME=VALUE,...` with the fields of SyntheticConfig; lengths are MEAN[:SPREAD[:MOST]]. `speed` multiplies the
    rate. ConfigError names field and value."""
    from kvmesh.sim.workloads.synthetic import SyntheticConfig

    told = _told("synthetic", text, SyntheticConfig, _GIVEN)
    _check_speed(speed)
    told["rate"] = told.get("rate", 1.0) * speed
    if requests is not None:
        told["requests"] = requests
    return SyntheticConfig(**told, block_tokens=block_tokens)


def sessions_of(text: str, block_tokens: int, speed: float) -> SessionConfig:
    """`SxT[,NAME=VALUE,...]` with the fields of SessionConfig. `speed` shortens what users think, and the time within
    which sessions begin. ConfigError names field and value."""
    from kvmesh.sim.workloads.sessions import SessionConfig

    size, _, rest = text.partition(",")
    sessions, times, turns = size.strip().partition("x")
    if not (times and all(one.isascii() and one.isdigit() and len(one) < 9 for one in (sessions, turns))):
        raise ConfigError(f"sessions={size!r}: must be SESSIONSxTURNS, as 24x7", field="sessions")
    _check_speed(speed)
    told = _told("sessions", rest, SessionConfig, ("sessions", "turns", "block_tokens"))
    config = SessionConfig(**told, sessions=int(sessions), turns=int(turns), block_tokens=block_tokens)
    return replace(config, start_s=config.start_s / speed, think_s=config.think_s / speed)


def _check_speed(speed: float) -> None:
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed={speed:g}: must be over 0", field="speed")


def _told(option: str, text: str, config: type[Any], given: Sequence[str]) -> dict[str, Any]:
    """Fields of `config` by name, but for those that are `given` otherwise."""
    from kvmesh.sim.workloads.synthetic import LengthDistribution

    kinds = {name: kind for name, kind in get_type_hints(config).items() if name not in given}
    told: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in kinds or name in told:
            raise ConfigError(f"{option}={part!r}: must be NAME=VALUE, once, of {', '.join(kinds)}", field=option)
        told[name] = _lengths(name, value) if kinds[name] is LengthDistribution else value_of(name, kinds[name], value)
    return told


_GIVEN = ("requests", "block_tokens")  # by options of their own


def _lengths(name: str, text: str) -> LengthDistribution:
    from kvmesh.sim.workloads.synthetic import LengthDistribution

    numbers = [number_of(name, word) for word in text.split(":")]
    if len(numbers) > 3:
        raise ConfigError(f"{name}={text!r}: must be MEAN, MEAN:SPREAD or MEAN:SPREAD:MOST", field=name)
    found = LengthDistribution(numbers[0])
    found = replace(found, spread=numbers[1]) if len(numbers) > 1 else found
    return replace(found, most=int(numbers[2])) if len(numbers) > 2 else found
