"""What drafts cost and bring in a decode step: chances that their tokens are kept, and the shape of an MTP head.

A step of n rows that computes drafts of D tokens in all has n + D queries; each row attends to its KV once, whatever it
drafts. Of a row whose draft has d tokens the step makes 1 + k, k being the length up to which all were kept:

    tokens a step    1 + a₁ + a₁a₂ + ... + a₁…a_d     aⱼ: the chance of the j-th token, those before it kept

A drafter that copies ("ngram", "suffix") costs nothing here. An MTP head ("mtp") is stepped once for each token of the
longest draft: one layer of the model's last kind, a product of two hidden rows with the width, and the output matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvmesh.drafts.speculator import MOST_DRAFT
from kvmesh.errors import ConfigError
from kvmesh.sim.hardware.shapes import ModelShape

DRAFTERS = ("mtp", "ngram", "suffix")
# Seconds of one step of an MTP head beside its kernels: it is launched behind the model's step, and hands on one token
# a row. Some fifty small kernels at 5 us in a graph. It is no field of `Efficiency`, all of which every set-up names.
HEAD_STEP_S = 0.00025
HEAD_PAGES = 0.25  # pages of a head, as a share of the model's (`kvmesh up --speculate mtp`): it sees answers alone


class SpeculationTimes(Protocol):
    """One instance's hardware where rows have drafts."""

    def drafted_s(self, pieces: Sequence[tuple[int, int]], batch: int, context_tokens: float, queries: float) -> float:
        """One step of `batch` rows that computes so many tokens of each on average, beside these pieces of prompts."""

    def head_s(self, batch: int, answer_tokens: float, queries: float = 1.0) -> float:
        """One step of the MTP head for `batch` rows, which sees so many tokens of their answers in all."""


@dataclass(frozen=True, slots=True)
class SpeculationModel:
    """Who drafts, and the chance of the j-th token of each draft to be kept where those before it were. With `adapts`
    the live policy decides how long drafts are (`kvmesh.drafts.speculator`); without, each is as long as `accept`. Rows
    have drafts in steps that compute a prompt's chunk, too, only with `beside_chunks`: the live ranks verify none
    there."""

    drafter: str
    accept: tuple[float, ...]
    adapts: bool = True
    beside_chunks: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError naming field and value."""
        if self.drafter not in DRAFTERS:
            raise ConfigError(f"speculate={self.drafter!r}: choose one of {', '.join(DRAFTERS)}", field="speculate")
        if not 1 <= len(self.accept) <= MOST_DRAFT:
            told = f"accept={','.join(f'{one:g}' for one in self.accept)!r}: must have 1 to {MOST_DRAFT} chances"
            raise ConfigError(told, field="accept")
        for chance in self.accept:
            if not 0 <= chance <= 1:
                raise ConfigError(f"accept={chance:g}: must be between 0 and 1", field="accept")

    @property
    def most(self) -> int:
        """Tokens of the longest draft."""
        return len(self.accept)

    def tokens_a_step(self, drafted: int) -> float:
        """Returns how many tokens a step is expected to make of a row whose draft has so many."""
        found = reached = 1.0
        for chance in self.accept[:drafted]:
            reached *= chance
            found += reached
        return found


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts of one kind of instance."""

    model: SpeculationModel
    times: SpeculationTimes

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """Returns what conductors take a step for: the seconds in which a row is expected to make a token, drafts
        having the best length for that. An MTP head's KV is left out, one layer's of answers alone."""
        model, times = self.model, self.times
        head_s = times.head_s(batch, 0.0) if model.drafter == "mtp" else 0.0
        return min(
            (times.drafted_s((), batch, context_tokens, 1.0 + length) + length * head_s) / model.tokens_a_step(length)
            for length in range(model.most + 1)
        )


def head_shape(shape: ModelShape) -> ModelShape:
    """Returns the shape of the model's MTP head: one layer of its last kind, before which the token's embedding and the
    model's answer to the token before it are joined. Embedding and output matrix are the model's."""
    own = shape.shared_params if shape.experts else shape.dense_params // shape.layers
    return replace(
        shape,
        name=f"{shape.name}'s MTP head",
        layers=1,
        kv_layers=1,
        window_layers=0,
        attention_params=shape.attention_params // shape.layers + 2 * shape.hidden**2,
        dense_params=own,
        expert_layers=1 if shape.experts else 0,
        groups=(),
    )
