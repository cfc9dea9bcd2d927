"""What instances are thought to take before they have told of any step: the priors of models.py, which are of one rank,
by the axes along which an instance's ranks share its model. Pure.

Collectives cost nothing here, since neither model nor GPU is known: what is thought slow would never be tried. A few
samples replace all of this.

- Matrices and the pairs of a prompt's attention are shared over tp and cp, and each of pp stages has its part of them:
  a prompt in n chunks takes (n + pp - 1) / n of what one stage takes for it (kvmesh.chunk_pipeline). The form that is
  fitted grows with the length of a prompt; its coefficients are those of a prompt of TYPICAL_TOKENS.
- A row that decodes goes through all stages, one after the other. Ranks of tp read a part of the weights each; contexts
  lie at tp, cp and dcp, of which tp is all or a part of the heads. Copies of dp are instances of their own here.
"""

from __future__ import annotations

from kvmesh.chunk_pipeline import pipelined_s
from kvmesh.services.conductor.costs.fit import Coefficients
from kvmesh.services.conductor.costs.models import DECODE_PRIOR, PREFILL_PRIOR
from kvmesh.services.conductor.domain import InstanceAxes

TYPICAL_TOKENS, TYPICAL_CHUNK = 8192, 512


def first_prefill(axes: InstanceAxes) -> Coefficients:
    """Returns what a prompt is thought to take."""
    one, chunks = PREFILL_PRIOR, TYPICAL_TOKENS / TYPICAL_CHUNK
    share = pipelined_s(1.0, chunks, axes.pp) / (axes.pp * axes.cp * axes.tp)
    return Coefficients(a=pipelined_s(one.a, chunks, axes.pp), b=one.b * share, c=one.c * share)


def first_decode_step(axes: InstanceAxes) -> Coefficients:
    """Returns what a decode step is thought to take."""
    one = DECODE_PRIOR
    return Coefficients(one.a / axes.tp, one.b / axes.tp, one.c / (axes.cp * axes.tp), one.d, one.knee)
