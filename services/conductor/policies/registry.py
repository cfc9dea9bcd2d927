"""Which placement policies there are: built-in ones, and those that installed packages offer as entry points of the
group `kvmesh.policies`. Both are named, loaded and refused in the same way."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint, entry_points

from kvmesh.errors import ConfigError
from services.conductor.policies.policy import PlacementPolicy

GROUP = "kvmesh.policies"
_HERE = "services.conductor.policies"
BUILT_IN = tuple(
    EntryPoint(name, f"{_HERE}.{value}", GROUP)
    for name, value in (
        ("kvcache", "kvcache:KvCache"),
        ("cache_aware", "cache_aware:CacheAware"),
        ("least_loaded", "least_loaded:LeastLoaded"),
        ("power_of_two", "power_of_two:PowerOfTwo"),
        ("round_robin", "round_robin:RoundRobin"),
        ("random", "random_pick:RandomPick"),
        ("session_hash", "session_hash:SessionHash"),
    )
)


def entries() -> list[EntryPoint]:
    """Returns all policies that can be named, built-in ones first. Another package is not asked for its code."""
    return [*BUILT_IN, *sorted(entry_points(group=GROUP), key=lambda one: one.name)]


class PolicyNames(Collection[str]):
    """The names of all policies, read anew whenever they are asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(one.name for one in entries()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)


POLICY_NAMES = PolicyNames()


def checked(name: str) -> str:
    """Returns `name`. Raises ConfigError, which lists the known ones, when no policy has that name."""
    if name not in POLICY_NAMES:
        raise ConfigError(f"policy={name!r}: choose one of {', '.join(POLICY_NAMES)}", field="policy")
    return name


def make(name: str) -> PlacementPolicy:
    """Returns a new policy of that name. Raises ConfigError when there is none, when two packages offer one, or when
    what is offered does not load or is no PlacementPolicy."""
    found = [one for one in entries() if one.name == checked(name)]
    if len({one.value for one in found}) > 1:
        raise ConfigError(f"policy={name!r}: {' and '.join(one.value for one in found)} have this name", field="policy")
    try:
        made = found[0].load()()
    except Exception as err:
        why = f"{found[0].value} does not load: {type(err).__name__}: {err}"
        raise ConfigError(f"policy={name!r}: {why}", field="policy") from err
    if not isinstance(made, PlacementPolicy):
        why = f"{found[0].value} makes a {type(made).__name__}, not a {PlacementPolicy.__name__}"
        raise ConfigError(f"policy={name!r}: {why}", field="policy")
    return made
