"""What a leading conductor orders so that load stays even: copies of hot prefixes (hot.py), roles (roles.py); and
hints to autoscalers (scale.py). Pure.

Every conductor watches its placements (heat.py, demand.py), so that one that comes to lead knows what is hot; orders
are for the leader alone. An order is under way until `OrderEnded` tells its end, or its time is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from services.conductor.balance.demand import Demands, by_model
from services.conductor.balance.heat import Heat
from services.conductor.balance.hot import Moment, Replication
from services.conductor.balance.roles import Roles
from services.conductor.balance.scale import Hint as Hint
from services.conductor.balance.scale import Scale
from services.conductor.domain import Action, OrderEnded, Schedule
from services.conductor.placing.placement import Choice
from services.conductor.prefixes.index import Survey
from services.conductor.settings import Settings

LOOKS = 20  # in one half-life of what is measured
LEAST_S = 0.2  # between two


class Balance:
    """Watches placements; `tick` gives orders while this conductor leads."""

    def __init__(self, settings: Settings) -> None:
        numbers = itertools.count(1)
        self._settings = settings.balance
        self._every_s = max(LEAST_S, settings.balance.window_s / LOOKS)
        self._looked_at = float("-inf")
        self._heat = Heat(settings.balance.window_s)
        self._demands = Demands(settings)
        self._replication = Replication(settings.balance, lambda: next(numbers))
        self._roles = Roles(settings.balance, lambda: next(numbers))
        self._scale = Scale(settings.balance)

    def asked(self, request: Schedule, now: float) -> None:
        """A request for a model that is served here has come, whatever becomes of it."""
        self._demands.asked(request, now)

    def saw(self, request: Schedule, survey: Survey, now: float) -> None:
        """A request was weighed; `survey`: who holds its blocks."""
        self._heat.use(request, survey, now)

    def placed(self, request: Schedule, choice: Choice, now: float) -> None:
        """It got a place."""
        self._demands.placed(request, choice, now)

    def ended(self, event: OrderEnded, now: float) -> None:
        """An order has come to its end."""
        if not self._replication.ended(event, now):
            self._roles.ended(event, now)

    def due(self, now: float) -> bool:
        """Whether it is time for a `tick`."""
        return now - self._looked_at >= self._every_s

    def tick(self, moment: Moment, *, leads: bool) -> Sequence[Action]:
        """Orders of this moment."""
        now = self._looked_at = moment.now
        models = by_model(moment.able)
        demands = self._demands.look(models, now)
        self._scale.look(models, demands, now)
        if not leads:
            self._replication.stop()
            self._roles.stop()
            return ()
        orders: list[Action] = []
        if self._settings.replicate:
            orders += self._replication.look(self._heat, moment)
        if self._settings.switch_roles:
            orders += self._roles.look(models, demands, now)
        return orders

    @property
    def hints(self) -> Sequence[Hint]:
        """How many instances each pool wanted at the last `tick`."""
        return self._scale.hints
