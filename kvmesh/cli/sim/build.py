"""Options of `kvmesh sim run` → what the simulator takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from kvmesh.cli.sim.options import Options, number_of, sessions_of, synthetic_of
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.engine.axes import Axes
    from kvmesh.services.conductor.settings import Settings
    from kvmesh.sim.config import SimConfig
    from kvmesh.sim.hardware.speculation import SpeculationModel
    from kvmesh.sim.hardware.times import NodeSpec
    from kvmesh.sim.host import HostModel
    from kvmesh.sim.workloads.workload import Clients, SimRequest

CHUNK = 8192  # tokens of a prefill step where nothing else runs
HEARTBEAT_MS, LIVE_HEARTBEAT_MS = 1000.0, 200.0
MIXED_CHUNK = 512  # beside rows: what vLLM 0.5 took by default
E = TypeVar("E", bound=Enum)


def load_of(options: Options) -> Iterator[SimRequest] | Clients:
    """The workload and what its clients wait for, anew each time. ConfigError: a value, or, while it is read, a line
    that cannot be."""
    from kvmesh.sim.workloads.sessions import SessionClients
    from kvmesh.sim.workloads.workload import ClosedLoop

    if options.sessions is not None:
        return SessionClients(sessions_of(options.sessions, options.block_tokens, options.speed), options.seed)
    requests = requests_of(options)
    return requests if options.closed is None else ClosedLoop(requests, options.closed)


def requests_of(options: Options) -> Iterator[SimRequest]:
    """Requests that wait for nobody. ConfigError: see `load_of`."""
    from kvmesh.sim.workloads import csv_file as workload_csv
    from kvmesh.sim.workloads import workload
    from kvmesh.sim.workloads.synthetic import synthetic

    if options.synthetic is not None:
        config = synthetic_of(options.synthetic, options.requests, options.block_tokens, options.speed)
        made = itertools.islice(synthetic(config, options.seed), options.skip, None)
        return made if options.max_output is None else _cut(made, options.max_output)
    reading = workload.Reading(
        block_tokens=options.block_tokens,
        speed=options.speed,
        limit=options.requests,
        skip=options.skip,
        max_output=options.max_output,
    )
    if options.trace is not None:
        return workload.mooncake(options.trace, reading, trace_block=options.trace_block)
    assert options.csv is not None
    return workload_csv.read(options.csv, reading)


def _cut(requests: Iterator[SimRequest], most: int) -> Iterator[SimRequest]:
    return (replace(one, output_tokens=min(one.output_tokens, most)) for one in requests)


def count_of(options: Options) -> int | None:
    """How many requests there will be, for a progress bar; None: as many as the file has."""
    if options.sessions is not None:
        config = sessions_of(options.sessions, options.block_tokens, options.speed)
        return config.sessions * config.turns
    if options.synthetic is not None:
        return synthetic_of(options.synthetic, options.requests, options.block_tokens, options.speed).requests or None
    path = options.trace or options.csv
    assert path is not None
    try:
        with path.open("rb") as file:
            lines = sum(not line.isspace() for line in file)
    except OSError as err:
        name = "trace" if options.trace else "csv"
        raise ConfigError(f"{name}={str(path)!r}: {err.strerror}", field=name) from None
    lines -= options.csv is not None  # its header
    left = max(0, lines - options.skip)
    return left if options.requests is None else min(left, options.requests)


def config_of(options: Options) -> SimConfig:
    """The machines and their conductor. ConfigError names option and value."""
    from kvmesh.sim.changes import changes_of
    from kvmesh.sim.config import MeshMode, Routing, SimConfig
    from kvmesh.sim.hardware.hardware import hardware
    from kvmesh.sim.hardware.shapes import shape_of

    gpu, shape = hardware(options.gpu), shape_of(options.model)
    counts = {"coupled": options.coupled or 0}
    if options.coupled is None:
        counts = {"prefill": options.prefill or 8, "decode": options.decode or 8}
        for pool in counts:
            counts[pool] += _newcomers(options, pool, counts[pool])
    specs = {pool: (node_of(options, pool),) * count for pool, count in counts.items() if count}
    coupled = {"prefill-first": MeshMode.COUPLED_PREFILL_FIRST, "chunked": MeshMode.COUPLED_CHUNKED}
    if options.coupled_mode not in coupled:
        raise ConfigError(
            f"coupled_mode={options.coupled_mode!r}: choose one of {', '.join(coupled)}", field="coupled_mode"
        )
    mode = coupled[options.coupled_mode] if options.coupled else MeshMode.DISAGGREGATED
    routing = _member(Routing, "routing", options.routing)
    live = options.unforeseen or options.conducts_engines
    chunk = options.chunk_tokens or (MIXED_CHUNK if mode is MeshMode.COUPLED_CHUNKED else CHUNK)
    return SimConfig(
        mode=mode,
        prefill=specs.get("prefill", ()),
        decode=specs.get("decode", ()),
        coupled=specs.get("coupled", ()),
        block_tokens=options.block_tokens,
        seed=options.seed,
        conductor=_settings(options),
        conductors=options.conductors,
        orders=options.orders,
        retries=options.retries,
        chunk_tokens=chunk,
        batch_tokens=chunk,
        layers=shape.layers,
        max_running=options.max_running,
        load_bytes_per_s=gpus_of(options, "coupled" if options.coupled else "decode")
        * gpu.host_bytes_per_s
        * gpu.efficiency.host,
        routing=routing,
        prefix_cache=options.prefix_cache,
        tenant_fairness=options.tenant_fairness,
        host=_host_of(options),
        heartbeat_s=(options.heartbeat or (LIVE_HEARTBEAT_MS if live else HEARTBEAT_MS)) / 1000,
        profiled=not options.unknown,
        noise=options.noise,
        spread=options.spread,
        slow=changes_of("slow", options.slow or ""),
        freeze=changes_of("freeze", options.freeze or ""),
        kill=changes_of("kill", options.kill or ""),
        join=changes_of("join", options.join or ""),
        leave=changes_of("leave", options.leave or ""),
    )


def _newcomers(options: Options, pool: str, there: int) -> int:
    """How many of `--join` are beyond those of the pool. ConfigError: a name between is left out."""
    from kvmesh.sim.changes import changes_of

    numbers = {int(one.node[1:]) for one in changes_of("join", options.join or "") if one.node[0] == pool[0]}
    beyond = sorted(number for number in numbers if number >= there)
    for at, number in enumerate(beyond, there):
        if at != number:
            text = f"join='{pool[0]}{number}': the next one of {there} {pool} instances is {pool[0]}{at}"
            raise ConfigError(text, field="join")
    return len(beyond)


def _host_of(options: Options) -> HostModel | None:
    """What instances share, where the file of fitted times says so; coupled ones share nothing."""
    from kvmesh.sim.fitting.mesh_fit import read_fit

    return None if options.times is None or options.coupled else read_fit(options.times).host


def axes_of(options: Options, pool: str) -> Axes | None:
    """The axes of an instance of the pool; None: its GPUs are in tensor parallelism. ConfigError names the option."""
    from kvmesh.engine.axes import Axes

    text = getattr(options, f"{pool}_mesh")
    if text is None:
        return None
    try:
        return Axes.parse(text)
    except ConfigError as err:
        raise ConfigError(f"{pool}_{err.message}", field=f"{pool}_mesh") from None


def gpus_of(options: Options, pool: str) -> int:
    """How many GPUs an instance of the pool has."""
    axes = axes_of(options, pool)
    return options.gpus if axes is None else axes.world


def speculation_of(options: Options) -> SpeculationModel | None:
    """What rows draft, and how much of it is kept; None: they draft nothing. ConfigError names the option."""
    from kvmesh.sim.hardware.speculation import SpeculationModel

    if options.speculate is None:
        return None
    return SpeculationModel(
        options.speculate, tuple(number_of("accept", word) for word in options.accept.split(",") if word.strip())
    )


def node_of(options: Options, pool: str = "decode") -> NodeSpec:
    """One instance of "prefill", "decode" or "coupled": the roofline of its GPUs or, with `times`, what was fitted."""
    from kvmesh.engine.axes import Axes
    from kvmesh.sim.fitting.mesh_fit import read_fit
    from kvmesh.sim.hardware.axes_times import AxesRoofline, axes_node_spec
    from kvmesh.sim.hardware.hardware import changed, hardware
    from kvmesh.sim.hardware.shapes import shape_of
    from kvmesh.sim.hardware.speculation import Speculation
    from kvmesh.sim.hardware.times import Fitted, node_spec

    gpu = changed(hardware(options.gpu), nic_gbps=options.nic_gbps, dram_gib=options.dram_gib, ssd_gib=options.ssd_gib)
    axes = axes_of(options, pool)
    shape, weights, kv = shape_of(options.model), options.weight_dtype, options.kv_dtype
    speculation = speculation_of(options) if pool != "prefill" else None
    if axes is None and speculation is not None:
        axes = Axes(tp=options.gpus)
    if axes is None:
        spec = node_spec(gpu, options.gpus, shape, weight_dtype=weights, kv_dtype=kv, block_tokens=options.block_tokens)
    else:
        times = AxesRoofline(
            gpu,
            axes,
            shape,
            weight_dtype=weights,
            kv_dtype=kv,
            fp8_products=options.fp8_products,
            micro_batches=options.micro_batches,
            chunk_tokens=options.chunk_tokens or CHUNK,
            block_tokens=options.block_tokens,
            mtp=speculation is not None and speculation.drafter == "mtp",
        )
        spec = axes_node_spec(times, options.kv_dtype, options.block_tokens)
        if speculation is not None:
            spec = replace(spec, speculation=Speculation(speculation, times))
    for name in ("kv_tokens", "dram_tokens"):
        if (tokens := getattr(options, name)) is not None:
            spec = replace(spec, **{name: tokens})
    if options.times is None:
        return spec
    costs = read_fit(options.times).costs
    if options.nic_gbps is None and costs.transfer.b > 0:
        spec = replace(spec, nic_bytes_per_s=1 / costs.transfer.b)
    return replace(spec, times=Fitted(costs))


def check_names(*, policy: str, admission: str, fetch: str) -> None:
    """ConfigError: one of these is no name of a policy, of a mode of admission or of a way to fetch."""
    from kvmesh.services.conductor.domain import Fetch
    from kvmesh.services.conductor.settings import Mode

    _policy(policy)
    _member(Mode, "admission", admission)
    _member(Fetch, "fetch", fetch)


def _policy(name: str) -> str:
    """Returns the policy's own name. Raises ConfigError naming those that are known."""
    from kvmesh.services.conductor.policies.registry import POLICY_NAMES, checked

    return name if name in POLICY_NAMES else checked(name.replace("-", "_"))


def _settings(options: Options) -> Settings:
    from kvmesh.services.conductor.domain import Fetch
    from kvmesh.services.conductor.settings import AdmissionSettings, Mode, Settings, ThresholdMode

    adaptive = options.threshold == "adaptive"
    threshold = 1.0 if adaptive else number_of("threshold", options.threshold)
    if threshold < 0:
        raise ConfigError(f"threshold={options.threshold!r}: must be at least 0, or adaptive", field="threshold")
    bounds_s = options.tbt_bounds_s
    return Settings(
        slo_ttft_s=options.slo_ttft / 1000,
        slo_tbt_s=bounds_s[-1] if options.slo_tbt is None else options.slo_tbt / 1000,
        balancing_threshold=threshold,
        threshold_mode=ThresholdMode.ADAPTIVE if adaptive else ThresholdMode.FIXED,
        fetch=_member(Fetch, "fetch", options.fetch),
        policy=_policy(options.policy),
        admission=AdmissionSettings(
            mode=_member(Mode, "admission", options.admission), confidence=options.admission_confidence
        ),
    )


def _member(kind: type[E], name: str, text: str) -> E:
    """ConfigError names what there is to choose from."""
    try:
        return kind(text)
    except ValueError:
        values = ", ".join(str(one.value) for one in kind)
        raise ConfigError(f"{name}={text!r}: choose one of {values}", field=name) from None
