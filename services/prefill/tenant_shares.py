"""How much of an instance each tenant has had: who goes next where prompts of several tenants wait. Pure.

Each tenant has a counter: the uncached prompt tokens that were computed for it, over its weight. Whoever has the least
goes next. That is deficit round robin with the deficit written the other way round: what a tenant lacks to the others'
counters is its deficit, and the quantum is what one step computes (Sheng et al. 2024 call it a virtual token counter).

- A tenant that comes back counts from the least counter of those that are there: what it did not use while it was away
  is no credit, and what it had beyond the others stays a debt.
- Among tenants that are always there, counters never differ by more than what one step computes for a tenant, or, where
  a prompt cannot be interrupted, by one prompt, over the weight. So each one's share converges to its weight's, and
  nobody waits for ever: a counter that stays is passed by all others.
- Counters start anew when nobody is there.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
MAX_COUNTERS = 4096  # of tenants that are away; those with the least debts are forgotten


@dataclass(slots=True)
class TenantCounter:
    """`served`: tokens over `weight`. `present`: prompts of the tenant that wait or are being computed."""

    served: float = 0.0
    weight: float = 1.0
    present: int = 0


class TenantShares:
    """Counts for one instance. A prompt is present from `enter` to `leave`, and is named by its handle."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantCounter] = {}
        self._owner: dict[int, str] = {}  # of each prompt that is present
        self._present = 0  # tenants

    @property
    def several(self) -> bool:
        """Whether prompts of more than one tenant are present."""
        return self._present > 1

    def tenant(self, handle: int) -> str:
        """Returns whose prompt it is. Raises KeyError when it is not present."""
        return self._owner[handle]

    def counter(self, tenant: str) -> TenantCounter:
        """Returns the counter of a tenant that is present. Raises KeyError."""
        return self._tenants[tenant]

    def enter(self, handle: int, tenant: str, weight: float = 1.0) -> None:
        """A prompt comes. `weight` is its tenant's from now on."""
        assert handle not in self._owner and weight > 0
        counter = self._tenants.setdefault(tenant, TenantCounter())
        counter.weight = weight
        if not counter.present:
            if self._present:
                counter.served = max(counter.served, self._least())
            else:
                self._tenants = {tenant: counter}
                counter.served = 0.0
            self._present += 1
        counter.present += 1
        self._owner[handle] = tenant

    def charge(self, handle: int, tokens: int) -> None:
        """So many tokens of a prompt are computed."""
        counter = self._tenants[self._owner[handle]]
        counter.served += tokens / counter.weight

    def leave(self, handle: int) -> None:
        """A prompt has been computed, or is given up. An unknown handle is ignored."""
        tenant = self._owner.pop(handle, None)
        if tenant is None:
            return
        counter = self._tenants[tenant]
        counter.present -= 1
        if counter.present:
            return
        self._present -= 1
        if len(self._tenants) > MAX_COUNTERS + self._present:
            self._forget()

    def _least(self) -> float:
        return min(counter.served for counter in self._tenants.values() if counter.present)

    def _forget(self) -> None:
        """Halves the tenants that are away."""
        away = sorted((c.served, tenant) for tenant, c in self._tenants.items() if not c.present)
        for _, tenant in away[: len(away) // 2 + 1]:
            del self._tenants[tenant]
