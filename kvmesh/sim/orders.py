"""What a leading conductor orders, carried out: copies of hot blocks, and roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmesh.kvcache.sources import PullRange
from kvmesh.sim.node import ADDRESS, Node
from kvmesh.sim.pulls import Pull, Puller
from services.conductor.domain import Action, OrderEnded, Replicate, SwitchRole


class Orders:
    """`ended` tells the leader; `switch` begins to change a role and returns why it cannot."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        puller: Puller,
        ended: Callable[[OrderEnded], None],
        switch: Callable[[SwitchRole], str],
    ) -> None:
        self._nodes, self._puller, self._ended, self._switch = nodes, puller, ended, switch
        self.pulls = 0  # under way

    def carry_out(self, order: Action) -> None:
        """Anything else than an order is passed over."""
        match order:
            case Replicate():
                self._replicate(order)
            case SwitchRole():
                if error := self._switch(order):
                    self._ended(OrderEnded(order.number, error=error))

    def _replicate(self, order: Replicate) -> None:
        """The target pulls what it lacks, as nodes do: nobody writes into another's store."""
        target = self._nodes[order.target.instance_id]
        if target.dead or target.ref != order.target:
            self._ended(OrderEnded(order.number, error=f"{order.target.instance_id} is gone"))
            return
        begun = zip(order.keys, target.store.begin(order.keys), strict=True)
        wanted = [(at, key) for at, (key, extent) in enumerate(begun) if extent is not None]
        source = PullRange(order.source.instance_id, ADDRESS, order.source.incarnation, 0, len(order.keys))

        def over(pull: Pull) -> None:
            self.pulls -= 1
            if target.dead:
                return
            pull.keep(target.store)
            self._ended(OrderEnded(order.number, target.store.peek(order.keys)))

        self.pulls += 1
        self._puller.pull(target, wanted, (source,), over)
