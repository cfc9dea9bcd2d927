"""What it is worth to place requests of one session where the last one went, and requests of one origin together.
Affinity is a term of the score, not a router of its own. Pure.

    session   The instances of its last request hold more of it than the index knows: decode has its answer sealed or
              about to be, and prefill the end of the prompt, which no announcement has reported yet.
    sibling   The answers to one prompt of one request (`n`) are placed where the first one went: its blocks are coming
              there, so the prompt is computed once. Anywhere else it would be computed again, which takes the sibling
              as long as waiting for the first one and costs the mesh a whole prefill: so much is it worth, and
              SIBLING_S at least.
    origin    Requests that share much of their prompts and run in one batch share reads of the KV (cascade attention),
              so they gather at one decode instance, among those where they went lately.

Each term is what it costs a request, in seconds, *not* to be placed there (nearness.py). Those of sessions and origins
are at most what `AffinitySettings` says, and fall with time. Where an instance's load costs more than that, requests go
elsewhere, so they do not accumulate at one instance.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.placing.nearness import NOTHING, NOWHERE, NearInstances, Nearness
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.score import COUNTED_TOKENS
from kvmesh.services.conductor.settings import AffinitySettings

SESSION_FADES_S, ORIGIN_FADES_S = 60.0, 10.0  # to 1/e
# Siblings are placed within milliseconds: waiting where the first one is and computing elsewhere come to the same, but
# for the last block of each, which every answer to the prompt computes.
SIBLING_S = 1.0
MAX_SESSIONS, MAX_ORIGINS, MAX_PLACES = 65_536, 8_192, 4


class Affinity:
    """Remembers where sessions and origins were placed lately; the least recently used are forgotten first."""

    def __init__(self, settings: AffinitySettings) -> None:
        self._settings = settings
        self._sessions: OrderedDict[Hashable, tuple[str, str, float]] = OrderedDict()  # prefill, decode, when
        # Decode instance → when, the latest last.
        self._origins: OrderedDict[Hashable, OrderedDict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        """Returns how many sessions and origins are remembered."""
        return len(self._sessions) + len(self._origins)

    def near(self, request: Schedule, now: float, prompt_s: float = 0.0) -> Nearness:
        """Returns the affinity terms of the request's score. `prompt_s` is how long its whole prompt takes to compute
        where a sibling is."""
        most = self._settings
        last = self._sessions.get(_session(request)) if most.session_s > 0 and request.session else None
        places = self._origins.get(_origin(request)) if most.origin_s > 0 and request.origin else None
        sibling = request.sibling_prefill
        if last is None and places is None and not sibling:
            return NOWHERE
        prefill = decode = together = NOTHING
        prefills = {sibling: max(SIBLING_S, prompt_s)} if sibling else {}
        if last is not None:
            worth_s = most.session_s * math.exp(-max(0.0, now - last[2]) / SESSION_FADES_S)
            prefills[last[0]] = prefills.get(last[0], 0.0) + worth_s
            decode = NearInstances({last[1]: worth_s / COUNTED_TOKENS})
        if prefills:
            prefill = NearInstances(prefills)
        if places is not None:
            each_s = most.origin_s / COUNTED_TOKENS
            faded = {i: math.exp(-max(0.0, now - at) / ORIGIN_FADES_S) for i, at in places.items()}
            together = NearInstances({i: each_s * share for i, share in faded.items()})
        return Nearness(prefill, decode, together)

    def placed(self, request: Schedule, choice: PlacementChoice, now: float) -> None:
        """Notes where a request was placed."""
        prefill, decode = choice.prefill.instance.ref.instance_id, choice.decode.instance.ref.instance_id
        if request.session and self._settings.session_s > 0:
            self._sessions[_session(request)] = prefill, decode, now
            self._sessions.move_to_end(_session(request))
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        if request.origin and self._settings.origin_s > 0:
            places = self._origins.setdefault(_origin(request), OrderedDict())
            places[decode] = now
            places.move_to_end(decode)
            self._origins.move_to_end(_origin(request))
            if len(places) > MAX_PLACES:
                places.popitem(last=False)
            if len(self._origins) > MAX_ORIGINS:
                self._origins.popitem(last=False)


def _session(request: Schedule) -> Hashable:
    return request.model, request.tenant, request.session


def _origin(request: Schedule) -> Hashable:
    return request.model, request.tenant, request.origin
