"""The set-up of all figures: `paper_parameters.toml`, read strictly, and what a figure may vary of it (`Case`)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Fetch
from kvmesh.services.conductor.settings import AdmissionSettings, Settings
from kvmesh.services.conductor.settings import Mode as Admission
from kvmesh.sim.config import MeshMode, Routing, SimConfig
from kvmesh.sim.hardware.hardware import Efficiency, changed, hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.times import NodeSpec, node_spec
from kvmesh.sim.report.summary import Summary
from kvmesh.sim.workloads.synthetic import LengthDistribution, SyntheticConfig, synthetic
from kvmesh.sim.workloads.workload import Reading, SimRequest, mooncake

PARAMETERS = Path(__file__).with_name("paper_parameters.toml")
T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    gpu: str
    gpus: int
    nic_gbps: float
    nodes: int
    prefill: int
    decode: int


@dataclass(frozen=True)
class Model:
    name: str
    dtype: str


@dataclass(frozen=True)
class Engine:
    block_tokens: int
    chunk_tokens: int
    max_running: int
    coupled_chunk_tokens: int
    dram_tokens: int


@dataclass(frozen=True)
class Conductor:
    threshold: float
    fetch: str
    routing: str


@dataclass(frozen=True)
class Slo:
    ttft_s: float
    tbt_s: tuple[float, ...]


@dataclass(frozen=True)
class Synthetic:
    """See the file; lengths in tokens, log-normal."""

    requests: int
    rate: float
    applications: int
    system: int
    branching: int
    document: int
    document_spread: float
    turns: float
    think_s: float
    user: int
    user_spread: float
    output: int
    output_spread: float


@dataclass(frozen=True)
class Run:
    seed: int


@dataclass(frozen=True)
class Parameters:
    """All of the file."""

    cluster: Cluster
    model: Model
    efficiency: Efficiency
    engine: Engine
    conductor: Conductor
    slo: Slo
    synthetic: Synthetic
    run: Run

    def told(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def read(path: Path = PARAMETERS) -> Parameters:
    """ConfigError: a file that is none, a key that is missing, unknown, or of another type."""
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"parameters={str(path)!r}: {err}", field="parameters") from None
    return _section(Parameters, given, "")


def _section(kind: type[T], given: dict[str, Any], where: str) -> T:
    """Every field of `kind` must be given, those with a default too: one file says all."""
    hints = get_type_hints(kind)
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(f"{where}{unknown[0]}: unknown; there are {', '.join(names)}", field=f"{where}{unknown[0]}")
    found = {name: _value(hints[name], given.get(name, MISSING), f"{where}{name}") for name in names}
    return kind(**found)


def _value(kind: Any, value: Any, name: str) -> Any:
    if value is MISSING:
        raise ConfigError(f"{name}: missing", field=name)
    if is_dataclass(kind) and isinstance(value, dict):
        return _section(kind, value, f"{name}.")  # type: ignore[arg-type]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[float, ...] and isinstance(value, list) and value:
        return tuple(_value(float, one, name) for one in value)
    if kind in (int, float, str) and type(value) is kind:
        return value
    raise ConfigError(f"{name}={value!r}: must be {getattr(kind, '__name__', kind)}", field=name)


@dataclass(frozen=True)
class Case:
    """One run: what it varies of the set-up. `coupled`: "", or the baseline, "plain", "prefix" or "chunked", on all
    nodes. None: as the file has it."""

    policy: str = "kvcache"
    admission: str = "off"
    coupled: str = ""
    prefill: int | None = None
    decode: int | None = None
    nic_gbps: float | None = None
    max_output: int | None = None
    speed: float = 1.0
    synthetic: bool = False

    @property
    def name(self) -> str:
        """What differs from the set-up."""
        base = Case()
        different = [
            f"{one.name}={getattr(self, one.name)}"
            for one in fields(self)
            if getattr(self, one.name) != getattr(base, one.name)
        ]
        return " ".join(different) or "set-up"


COUPLED = {
    "plain": (MeshMode.COUPLED_PREFILL_FIRST, False),
    "prefix": (MeshMode.COUPLED_PREFILL_FIRST, True),
    "chunked": (MeshMode.COUPLED_CHUNKED, False),
}


def node_of(at: Parameters, case: Case) -> NodeSpec:
    """One instance: all GPUs of a node."""
    nic_gbps = at.cluster.nic_gbps if case.nic_gbps is None else case.nic_gbps
    gpu = replace(changed(hardware(at.cluster.gpu), nic_gbps=nic_gbps), efficiency=at.efficiency)
    shape, dtype = shape_of(at.model.name), at.model.dtype
    spec = node_spec(gpu, at.cluster.gpus, shape, weight_dtype=dtype, kv_dtype=dtype)
    return replace(spec, dram_tokens=at.engine.dram_tokens)


def config_of(at: Parameters, case: Case) -> SimConfig:
    """ConfigError: a name that there is not."""
    node, gpu = node_of(at, case), hardware(at.cluster.gpu)
    mode, prefix_cache = COUPLED[case.coupled] if case.coupled else (MeshMode.DISAGGREGATED, True)
    chunk = at.engine.coupled_chunk_tokens if mode is MeshMode.COUPLED_CHUNKED else at.engine.chunk_tokens
    coupled = bool(case.coupled)
    prefill = at.cluster.prefill if case.prefill is None else case.prefill
    decode = at.cluster.decode if case.decode is None else case.decode
    return SimConfig(
        mode=mode,
        prefill=() if coupled else (node,) * prefill,
        decode=() if coupled else (node,) * decode,
        coupled=(node,) * at.cluster.nodes if coupled else (),
        block_tokens=at.engine.block_tokens,
        seed=at.run.seed,
        conductor=_settings(at, case),
        chunk_tokens=chunk,
        batch_tokens=chunk,
        size_weight=0.0,  # the paper's queues go by arrival; see benchmarks/better.py
        layers=shape_of(at.model.name).layers,
        max_running=at.engine.max_running,
        load_bytes_per_s=at.cluster.gpus * gpu.host_bytes_per_s * at.efficiency.host,
        routing=Routing(at.conductor.routing),
        prefix_cache=prefix_cache,
    )


def _settings(at: Parameters, case: Case) -> Settings:
    return Settings(
        slo_ttft_s=at.slo.ttft_s,
        slo_tbt_s=at.slo.tbt_s[-1],
        balancing_threshold=at.conductor.threshold,
        fetch=Fetch(at.conductor.fetch),
        policy=case.policy,
        admission=AdmissionSettings(mode=Admission(case.admission)),
    )


def requests_of(at: Parameters, case: Case, trace: Path, limit: int | None = None) -> Iterator[SimRequest]:
    """The workload of a case, its first `limit` requests."""
    if not case.synthetic:
        reading = Reading(
            block_tokens=at.engine.block_tokens, speed=case.speed, limit=limit, max_output=case.max_output
        )
        return mooncake(trace, reading)
    requests = at.synthetic.requests if limit is None else min(limit, at.synthetic.requests)
    return synthetic(synthetic_of(at, case, requests), at.run.seed)


def synthetic_of(at: Parameters, case: Case, requests: int) -> SyntheticConfig:
    """One prompt is an instruction, a document and the questions on it so far."""
    its = at.synthetic
    return SyntheticConfig(
        requests=requests,
        rate=its.rate * case.speed,
        block_tokens=at.engine.block_tokens,
        applications=its.applications,
        zipf=0.0,
        system=LengthDistribution(its.system, 0.0),
        depth=1,
        branching=its.branching,
        node=LengthDistribution(its.document, its.document_spread, 100_000),
        turns=its.turns,
        think_s=its.think_s,
        user=LengthDistribution(its.user, its.user_spread, 32_000),
        output=LengthDistribution(its.output, its.output_spread, 8_000),
    )


def summary_of(at: Parameters) -> Summary:
    """Judged by the paper's SLOs."""
    return Summary(ttft_slo_s=at.slo.ttft_s, tbt_slos_s=at.slo.tbt_s)
