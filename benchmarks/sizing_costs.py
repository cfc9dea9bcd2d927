"""Which events each service's CPU time is solved for, and what they cost: part of benchmarks/sizing.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.sizing_solve import Fit, Window, fit

CALLED = "conductor beats each 10 ms", "store beats each 10 ms"  # meshes whose instances beat that often
FLIGHT = 32  # calls in flight where the next is sent when one is answered
IDLE = "idle"
SATURATED = f"{FLIGHT} in flight"
WIRE = "wire"  # bytes instead of CPU seconds, in windows of the fleet
FRONT = ("seconds", "own_conductor_beats", "own_store_beats", "own_announcements", "requests")
LIVE: Mapping[str, tuple[str, ...]] = {
    "conductor": ("seconds", "conductor_beats", "requests", "blocks", "relayed"),
    "store": ("seconds", "store_beats", "announcements", "keys"),
    "prefill": (*FRONT, "blocks", "chunks"),
    "decode": (*FRONT, "blocks", "steps", "tokens"),
}
GATEWAY = ("requests", "prompt_tokens", "blocks", "steps", "tokens")
FLEET: Mapping[str, tuple[str, ...]] = {
    "conductor": ("seconds", "conductor_beats", "requests", "blocks", "relayed", "keys"),
    "store": ("seconds", "store_beats", "announcements", "keys"),
    WIRE: ("seconds", "conductor_beats", "store_beats", "announcements", "keys", "requests", "blocks"),
}


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of each event. `live`: of a small mesh, all its services; `fleet`: of conductor and store master when
    1,000 instances are there (under WIRE: bytes). `full`: the same when FLIGHT calls are in flight: a
    process that never rests is not woken for each."""

    live: Mapping[str, Fit]
    fleet: Mapping[str, Fit]
    full: Mapping[str, Fit]


def costs_of(windows: Sequence[Window], fleet: Sequence[Window]) -> Costs:
    """ValueError: windows are missing."""
    live = {service: fit(_of(windows, service), service, events) for service, events in LIVE.items()}
    for door in ("rest", "grpc"):
        events = ("seconds", *(f"{event}_{door}" for event in GATEWAY))
        own = [w for w in windows if IDLE in w.group or w.group.endswith(door)]
        live[f"gateway, {door}"] = fit(_of(own, "gateway"), "gateway", events)
    calm = [window for window in fleet if SATURATED not in window.group]
    full = [window for window in fleet if SATURATED in window.group or window.group == IDLE]
    return Costs(
        live,
        {service: fit(calm, service, events) for service, events in FLEET.items()},
        {service: fit(full, service, events) for service, events in FLEET.items() if service != WIRE},
    )


def _of(windows: Sequence[Window], service: str) -> list[Window]:
    """Without those whose interval changes this service's own rounds: the master ticks and tells watchers as often."""
    if service in ("prefill", "decode"):
        return list(windows)
    return [window for window in windows if CALLED[1] not in window.group]


def read_windows(rows: Sequence[Mapping[str, Any]]) -> list[Window]:
    """Of the file."""
    return [Window(row["group"], row["repeat"], row["counts"], row["cpu_s"]) for row in rows]
