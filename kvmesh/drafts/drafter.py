"""The seam between what guesses tokens and the step that verifies them (docs/internals/speculation.md).

A *draft* is a guess of an answer's next tokens. The engine computes a row's last token and its draft in one step, and
keeps each guess that equals what it samples itself, so a drafter decides about speed and about nothing else: it may be
wrong, late, or forget everything.

Every rank of a group drafts for itself and must come to the same drafts, since a step of theirs has as many tokens at
each: a drafter may depend on what it was given and on nothing else, neither time nor chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Draft(NamedTuple):
    """Is a guess of the tokens that come next. `strength` says how good the drafter's grounds are, from 0 to
    MOST_STRENGTH: of each strength it is learned how many of its tokens are kept (`kvmesh.drafts.lengths`)."""

    tokens: Sequence[int] = ()
    strength: int = 0


MOST_STRENGTH = 7
NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses for the rows of one rank, which are named by their handles. Whoever makes a row `begin` makes it `end`:
    what a drafter keeps of a row is given back there. All methods are called between two steps, on the thread that
    steps.

    With `needs_hidden` it is given what the model computes behind its last layer, before the final norm's product with
    the vocabulary. One that `computes` takes the device's time for its drafts: that is measured, and it is asked where
    it is worth that."""

    name: str
    needs_hidden: bool
    computes: bool

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Takes a row that joins the batch: its prompt, and the answer so far, of which the last token's KV is not
        computed yet. It may have been here before, as after a preemption."""

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        """Takes the tokens by which one step has made the answer longer, one at least. `hidden [len(tokens), width]`
        has, for each, the row of the target that it was sampled from: that of the token before it. None where it is not
        known, as in steps that were launched ahead."""

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        """Returns a draft of each row, of at most `most[i]` tokens, which is positive; NO_DRAFT where there is no
        guess."""

    def end(self, handle: int) -> None:
        """Forgets a row, which left the batch."""
