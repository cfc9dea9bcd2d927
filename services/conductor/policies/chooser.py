"""Asks the configured policy where a request goes, and predicts what follows from its answer. Pure, except for its log.

Every policy chooses among the same instances: those that may get the request, without those to avoid. For two instances
that it picked, the prediction is what weighing them would predict, without fetching from others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from kvmesh.services.conductor.domain import Fetch, Role, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.placing import decodes as decoding
from kvmesh.services.conductor.placing import placement
from kvmesh.services.conductor.placing.placement import Option, PlacementChoice, ServingMode, WeighedModes
from kvmesh.services.conductor.placing.scoring_context import ScoringContext
from kvmesh.services.conductor.policies import registry
from kvmesh.services.conductor.policies.policy import Choices, Pick, Pool, Weigh
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner
from kvmesh.services.conductor.prefixes.index import PrefixPlace

LOGGED_EVERY_S = 60.0  # failures of a policy

log = logging.getLogger(__name__)


class Chooser:
    """Asks one placement policy; some policies keep state. Raises ConfigError as `registry.make` does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0  # requests that the policy failed to answer
        self._policy = registry.make(name)
        self._logged_at = float("-inf")

    def choose(
        self,
        request: Schedule,
        prefills: Sequence[Instance],
        decodes: Sequence[Instance],
        places: Mapping[str, PrefixPlace],
        planner: FetchPlanner,
        scoring: ScoringContext,
    ) -> WeighedModes:
        """Returns the answer to a request, and what was weighed for it. The arguments are those of
        `placement.choose`."""
        offer = _Offer(request, prefills, decodes, places, planner, scoring)
        chosen = self._ask(request, offer, scoring.now)
        if isinstance(chosen, Pick):
            return offer.taken(chosen, self.name)
        if not chosen.fetch:
            scoring = replace(scoring, fetch=Fetch.NEVER)
        return placement.choose(request, prefills, decodes, places, planner, scoring)

    def _ask(self, request: Schedule, offer: _Offer, now: float) -> Pick | Weigh:
        """Returns the policy's answer, or `Weigh` when the policy raises or names what was not offered."""
        try:
            chosen: object = self._policy.choose(request, offer)
            if isinstance(chosen, Weigh) or (isinstance(chosen, Pick) and offer.allows(chosen)):
                return chosen
            failed, error = f"answers {chosen!r:.200}, which was not offered", None
        except Exception as err:
            failed, error = f"raises {type(err).__name__}: {err}", err
        self.failures += 1
        if now - self._logged_at >= LOGGED_EVERY_S:
            self._logged_at = now
            log.error(
                "policy=%s %s; request %s is weighed instead (%d so far)",
                self.name,
                failed,
                request.request_id,
                self.failures,
                exc_info=error,
            )
        return Weigh()


class _Offer(Choices):
    """One request and the instances that may get it. They are listed when the policy asks for them, so a policy that
    leaves the choice to the cost pays for no list."""

    def __init__(
        self,
        request: Schedule,
        prefills: Sequence[Instance],
        decodes: Sequence[Instance],
        places: Mapping[str, PrefixPlace],
        planner: FetchPlanner,
        scoring: ScoringContext,
    ) -> None:
        self.now, self.rng = scoring.now, scoring.rng
        self._request, self._among, self._decodes = request, prefills, decodes
        self._places, self._planner, self._scoring = places, planner, scoring

    @cached_property
    def _homes(self) -> dict[str, Instance]:
        """The instances that could compute the prompt: for another's batch, or for their own if they do both. Where
        there are none, decode instances whose `alone_tokens` cover what is missing of this prompt."""
        decodes, survey = self._decodes, self._planner.survey
        both = {id(d) for d in decodes if d.role is Role.BOTH}
        homes = [p for p in self._among if id(p) in both or any(d is not p for d in decodes)]
        if not homes:
            homes = [
                d
                for d in decodes
                if d.alone_tokens and not placement.too_much(self._request, d, self._place(d), survey)
            ]
        return _by_name([i for i in homes if i.ref.instance_id not in self._request.avoid] or homes)

    @cached_property
    def prefills(self) -> Pool:
        homes, now = self._homes, self.now
        return Pool(
            "prefill",
            tuple(homes),
            lambda name: homes[name].queue.wait_s(now),
            lambda name: len(homes[name].queue.works),
            lambda name: self._cached_tokens(homes[name]),
        )

    def decodes(self, prefill: str) -> Pool:
        decodes = self._partners(self._homes[prefill])
        return Pool(
            "decode",
            tuple(decodes),
            lambda name: self._tbt_s(decodes[name]),
            lambda name: decodes[name].batch.requests,
            lambda name: self._cached_tokens(decodes[name]),
        )

    def _partners(self, home: Instance) -> dict[str, Instance]:
        others = [i for i in self._decodes if i is not home]
        if home in self._decodes and (home.role is Role.BOTH or not others):
            return {}
        return _by_name([i for i in others if i.ref.instance_id not in self._request.avoid] or others)

    def _place(self, instance: Instance) -> PrefixPlace:
        return self._places[instance.ref.instance_id]

    def _cached_tokens(self, instance: Instance) -> int:
        tokens = self._planner.survey.depth(self._place(instance)) * instance.model.block_tokens
        return min(tokens, self._request.prompt_tokens)

    def _tbt_s(self, instance: Instance) -> float:
        found = decoding.choice(self._request, instance, self._place(instance), self._planner.survey, self.now)
        return found.tbt_s + found.landing_wait_s + found.slot_wait_s

    def allows(self, pick: Pick) -> bool:
        """Says whether these two were offered together."""
        home = self._homes.get(pick.prefill)
        if home is None:
            return False
        partners = self._partners(home)
        return pick.decode in partners if partners else pick.decode == pick.prefill

    def taken(self, pick: Pick, policy: str) -> WeighedModes:
        """Returns what is predicted for a pick that is allowed."""
        scoring, home = replace(self._scoring, fetch=Fetch.NEVER), self._homes[pick.prefill]
        if pick.decode == pick.prefill:
            return self._alone(home, scoring, policy)
        return self._pair(home, self._partners(home)[pick.decode], scoring, policy)

    def _alone(self, instance: Instance, scoring: ScoringContext, policy: str) -> WeighedModes:
        found = placement.weigh_alone(self._request, instance, self._place(instance), self._planner, scoring)
        kind = ServingMode.COUPLED if instance.role is Role.BOTH else ServingMode.DECODE
        cost_s = placement.cost_s(found.choice, self._request.max_tokens)
        option = Option(kind, instance, instance, found.choice, found.refused, cost_s=cost_s)
        return WeighedModes(found.refused or found.choice, (option,), None, picked_by=policy)

    def _pair(self, prefill: Instance, decode: Instance, scoring: ScoringContext, policy: str) -> WeighedModes:
        found = placement.choose_pair(self._request, [prefill], [decode], self._places, self._planner, scoring)
        if isinstance(found.answer, PlacementChoice):
            cost_s = placement.cost_s(found.answer, self._request.max_tokens)
            option = Option(ServingMode.PAIR, prefill, decode, found.answer, cost_s=cost_s)
        else:
            option = Option(ServingMode.PAIR, prefill, decode, refused=found.answer)
        return WeighedModes(found.answer, (option,), found, picked_by=policy)


def _by_name(instances: Sequence[Instance]) -> dict[str, Instance]:
    return {i.ref.instance_id: i for i in instances}
