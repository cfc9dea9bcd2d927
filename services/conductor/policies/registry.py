"""Which placement policies there are: built-in ones, and those that installed packages offer as entry points of the
group `kvmesh.policies`. Both are named, loaded and refused in the same way (`kvmesh.plugins`)."""

from __future__ import annotations

from kvmesh.errors import ConfigError
from kvmesh.plugins import Plugins
from kvmesh.services.conductor.policies.policy import PlacementPolicy

_HERE = "kvmesh.services.conductor.policies"
BUILT_IN = {
    "kvcache": f"{_HERE}.kvcache:KvCache",
    "cache_aware": f"{_HERE}.cache_aware:CacheAware",
    "least_loaded": f"{_HERE}.least_loaded:LeastLoaded",
    "power_of_two": f"{_HERE}.power_of_two:PowerOfTwo",
    "round_robin": f"{_HERE}.round_robin:RoundRobin",
    "random": f"{_HERE}.random_pick:RandomPick",
    "session_hash": f"{_HERE}.session_hash:SessionHash",
}
POLICY_NAMES = Plugins("kvmesh.policies", BUILT_IN)


def checked(name: str) -> str:
    """Returns `name`. Raises ConfigError, which lists the known ones, when no policy has that name."""
    if name not in POLICY_NAMES:
        raise ConfigError(f"policy={name!r}: choose one of {', '.join(POLICY_NAMES)}", field="policy")
    return name


def make(name: str) -> PlacementPolicy:
    """Returns a new policy of that name. Raises ConfigError when there is none, when two packages offer one, or when
    what is offered does not load or is no PlacementPolicy."""
    offered = POLICY_NAMES.load(name, "policy")
    where = f"{getattr(offered, '__module__', '?')}:{getattr(offered, '__name__', offered)}"
    try:
        made = offered()
    except Exception as err:
        raise ConfigError(
            f"policy={name!r}: {where} does not load: {type(err).__name__}: {err}", field="policy"
        ) from err
    if not isinstance(made, PlacementPolicy):
        why = f"{where} makes a {type(made).__name__}, not a {PlacementPolicy.__name__}"
        raise ConfigError(f"policy={name!r}: {why}", field="policy")
    return made
