"""What a leading conductor orders so that load stays even: copies of hot prefixes (hot.py), roles (roles.py); and
hints to autoscalers (scale.py). Pure.

Every conductor watches its placements (heat.py, demand.py), so that one that comes to lead knows what is hot; orders
are for the leader alone. An order is under way until `OrderEnded` tells its end, or its time is over.

A round is spread over ticks, none of which looks at more than INSTANCES, so that no decision waits long for it:
instances are met some at a time, and added up; who has met all of them judges. Of 1,000 instances it takes half a
second, of more in proportion, and the next one begins after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvmesh.services.conductor.balance.demand import Demands
from kvmesh.services.conductor.balance.heat import PrefixHeat
from kvmesh.services.conductor.balance.hot import FleetSurvey, Replication, ReplicationContext
from kvmesh.services.conductor.balance.roles import Roles
from kvmesh.services.conductor.balance.scale import Hint as Hint
from kvmesh.services.conductor.balance.scale import Scale
from kvmesh.services.conductor.balance.tally import Tally
from kvmesh.services.conductor.balance.uses import ModelUses
from kvmesh.services.conductor.domain import Action, OrderEnded, RequestsHeld, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.fleet.walk import Pace, Walk
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.prefixes.index import PrefixSurvey
from kvmesh.services.conductor.settings import Settings

LOOKS = 20  # in one half-life of what is measured
LEAST_S = 0.2  # between two
INSTANCES = Pace(2000, 40)  # looked at: one takes some 10 us


class Balance:
    """Observes placements; `tick` gives orders while this conductor leads."""

    def __init__(self, settings: Settings) -> None:
        numbers = itertools.count(1)
        self._settings = settings.balance
        self._every_s = max(LEAST_S, settings.balance.window_s / LOOKS)
        self._began_at = float("-inf")
        self._walk = Walk(INSTANCES)
        self._tallies: dict[str, Tally] = {}  # of those met in this round, by model
        self._field: FleetSurvey | None = None  # likewise; None: no copies are to be ordered by it
        self._heat = PrefixHeat(settings.balance.window_s)
        self._demands = Demands(settings)
        self._replication = Replication(settings.balance, lambda: next(numbers))
        self._roles = Roles(settings.balance, lambda: next(numbers))
        self._uses = ModelUses()
        self._scale = Scale(settings.balance)

    def wanted(self, model: str, now: float) -> None:
        """Notes that somebody wants a model that is served here, or was."""
        self._uses.used(model, now)

    def held(self, event: RequestsHeld, now: float) -> None:
        """Notes what a gateway holds while no instance is there."""
        self._uses.held(event.requests, now)

    def asked(self, request: Schedule, now: float) -> None:
        """Notes a request for a model that is served here, which more instances might have served."""
        self._demands.asked(request, now)

    def saw(self, request: Schedule, survey: PrefixSurvey, now: float) -> None:
        """Notes that a request was weighed. `survey` says who holds its blocks."""
        self._heat.use(request, survey, now)

    def placed(self, request: Schedule, choice: PlacementChoice, now: float) -> None:
        """Notes a placement."""
        self._demands.placed(request, choice, now)

    def computed_elsewhere(self, instance: Instance, seconds: float, now: float) -> None:
        """Notes that the instance has computed a prompt that another conductor placed; `seconds` is the prediction for
        that prompt alone."""
        self._uses.used(instance.model.name, now)
        self._demands.computed_elsewhere(instance.model.name, seconds / instance.queue.speedup, now)

    def ended(self, event: OrderEnded, now: float) -> None:
        """Notes the end of an order."""
        if not self._replication.ended(event, now):
            self._roles.ended(event, now)

    def due(self, now: float) -> bool:
        """Says whether it is time for a `tick`."""
        return self._walk.under_way or self._replication.under_way or now - self._began_at >= self._every_s

    def tick(self, moment: ReplicationContext, *, leads: bool) -> Sequence[Action]:
        """Returns the orders of this moment."""
        if not leads:
            self._replication.stop()
            self._roles.stop()
        orders: list[Action] = []
        over = self._meet(moment, leads=leads)
        if over and leads and self._field is not None:
            self._replication.begin(self._heat, self._field, moment.now)
        if self._replication.under_way:
            orders += self._replication.look(moment)
        if over:
            orders += self._judge(moment.now, leads=leads)
        return orders

    def _meet(self, moment: ReplicationContext, *, leads: bool) -> bool:
        """Visits the next instances of the round; returns whether the round is over."""
        now = moment.now
        if not self._walk.under_way:
            if now - self._began_at < self._every_s:
                return False
            self._began_at = now
            self._tallies, self._field = {}, FleetSurvey() if leads and self._settings.replicate else None
            self._walk.begin(moment.everybody())
        for instance in self._walk.next(moment.passed_s):
            if not moment.may(instance):
                continue
            name = instance.model.name
            tally = self._tallies.get(name) or self._tallies.setdefault(name, self._demands.tally(name))
            tally.add(instance, now)
            if self._field is not None:
                self._field.add(instance, moment.index, now)
        return not self._walk.under_way

    def _judge(self, now: float, *, leads: bool) -> Sequence[Action]:
        tallies, self._tallies = self._tallies, {}
        demands = self._demands.look(tallies, now)
        self._uses.look(tallies, now)
        self._scale.look(tallies, demands, self._uses, now)
        return self._roles.look(tallies, demands, now) if leads and self._settings.switch_roles else ()

    @property
    def hints(self) -> Sequence[Hint]:
        """How many instances each pool wanted at the end of the last round."""
        return self._scale.hints
