"""A mesh on one machine as a file: what `kvmesh sim fit` writes and a simulation reads. One JSON object:

{"kvmesh_fit": 1,
 "costs": {"kvmesh_costs": 1, ...},       step times as instances report them (services/conductor/costs/file.py)
 "host": {"cores": 2, ...},               what they share (host.py)
 "told": {...}}                           where it comes from, and how close the fit came; for people
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.costs.file import Costs, fit_all
from kvmesh.services.conductor.domain import Register
from kvmesh.sim.config import SimConfig
from kvmesh.sim.fitting.observed import Observed
from kvmesh.sim.hardware.times import Fitted, NodeSpec
from kvmesh.sim.host import HostModel

VERSION = 1
MARK = "kvmesh_fit"
# KV between processes of one host is copied in memory while the next layers are computed; what of it a request waits
# for is in `handoff_s`. A push is reported to take as long as the computing that feeds it: no rate comes of that.
MEMORY_BYTES_PER_S = 4e9


@dataclass(frozen=True)
class MeshFit:
    """One measured mesh."""

    costs: Costs
    host: HostModel | None = None  # None: nothing is shared
    told: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For a file; see above."""
        host = None if self.host is None else self.host.to_json()
        return {MARK: VERSION, "costs": self.costs.to_json(), "host": host, "told": dict(self.told)}

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> MeshFit:
        """As `to_json` wrote it, or a plain file of costs. ConfigError names field and value."""
        if MARK not in told:
            return cls(Costs.of_json(told))
        if told[MARK] != VERSION:
            raise ConfigError(f"{MARK}={told[MARK]!r}: must be {VERSION}", field=MARK)
        if strange := sorted(set(told) - {MARK, "costs", "host", "told"}):
            raise ConfigError(f"{strange[0]}: no such part of a fitted mesh", field=strange[0])
        costs, host = told.get("costs"), told.get("host")
        if not isinstance(costs, dict):
            raise ConfigError(f"costs={costs!r}: must be an object", field="costs")
        known = None if host is None else HostModel.of_json(host)
        return cls(Costs.of_json(costs), known, told.get("told") or {})


def read_fit(path: Path) -> MeshFit:
    """A file of `kvmesh sim fit`, or of costs alone. ConfigError names it, and the field that is wrong."""
    try:
        told: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"times={str(path)!r}: {err.strerror}", field="times") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"times={str(path)!r}: is not JSON", field="times") from None
    if not isinstance(told, dict):
        raise ConfigError(f"times={str(path)!r}: holds no object", field="times")
    try:
        return MeshFit.of_json(told)
    except ConfigError as err:
        raise ConfigError(f"times={str(path)!r}: {err.message}", field="times") from None


def costs_of(observed: Observed) -> Costs:
    """By least squares, of all instances together, as they report them."""
    found = fit_all(observed.prefills.values(), observed.rows)
    return replace(found, transfer=replace(found.transfer, b=1 / MEMORY_BYTES_PER_S, c=1 / MEMORY_BYTES_PER_S))


def config_of(observed: Observed, fit: MeshFit, **other: Any) -> SimConfig:
    """The mesh that a log tells of: as many instances, with the same memory, decided by the same settings. `other`: of
    SimConfig, what no log tells. ConfigError: an instance that does both, or none."""
    prefills = [one for one in observed.instances.values() if not one.role.decodes]
    decodes = [one for one in observed.instances.values() if not one.role.prefills]
    if not prefills or not decodes or len(prefills) + len(decodes) != len(observed.instances):
        roles = ", ".join(f"{name}: {one.role.value}" for name, one in observed.instances.items()) or "none"
        raise ConfigError(f"decision log: instances {roles}: must be prefill and decode apart", field="decisions")
    card = decodes[0].model
    times = Fitted(fit.costs)

    def spec(one: Register) -> NodeSpec:
        blocks = observed.store_blocks.get(one.ref.instance_id, 0) or one.capacity_blocks
        return NodeSpec(
            times=times,
            kv_tokens=one.capacity_blocks * card.block_tokens,
            dram_tokens=blocks * card.block_tokens,
            ssd_tokens=0,
            nic_bytes_per_s=MEMORY_BYTES_PER_S,
            ssd_read_bytes_per_s=0.0,
            kv_bytes_per_token=card.kv_bytes_per_token,
        )

    told: dict[str, Any] = {
        "heartbeat_s": 0.2,
        "chunk_tokens": 512,
        "batch_tokens": 512,
        "long_tokens": 512,
        "size_weight": prefills[0].size_weight,
        "max_running": decodes[0].max_running,
    }
    return SimConfig(
        prefill=tuple(map(spec, prefills)),
        decode=tuple(map(spec, decodes)),
        block_tokens=card.block_tokens,
        conductor=observed.settings,
        host=fit.host,
        **told | other,
    )
