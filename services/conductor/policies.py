"""Who gets a request: the mesh's own way (kinds.py) or one of the plain policies it is compared with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.conductor import kinds
from services.conductor.domain import Schedule
from services.conductor.index import Place
from services.conductor.instance import Instance
from services.conductor.kinds import Found
from services.conductor.placement import Terms
from services.conductor.routes import Mesh
from services.conductor.settings import Policy


class Chooser:
    """By one policy; some remember whose turn it is."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def choose(
        self,
        request: Schedule,
        prefills: Sequence[Instance],
        decodes: Sequence[Instance],
        places: Mapping[str, Place],
        mesh: Mesh,
        terms: Terms,
    ) -> Found:
        """See `kinds.choose`."""
        return kinds.choose(request, prefills, decodes, places, mesh, terms)
