"""What a prompt and the rows of a batch cost each other where one device computes both, in mixed steps. Pure.

A prompt of p seconds (alone) in k chunks, beside n rows whose own step takes s seconds, is computed in k steps of
s + p/k seconds. (The two parts add up: a chunk keeps the arithmetic busy, rows wait for memory.) So

    the prompt takes      p + k·s         while rows run
    the rows stand still  p, each: n·p row-seconds in all
    their TBT becomes     s + p/k · min(1, b / (0.1·stay))

TBT is what `kvmesh replay` measures: the mean of the longest tenth of a request's token intervals. Of the intervals of
a row that stays `stay` seconds the share b / stay is mixed, when prompts are computed for b seconds meanwhile: this one
and what is queued before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.services.conductor import score
from kvmesh.services.conductor.fleet.instance import Instance


@dataclass(frozen=True, slots=True)
class PromptAmongRows:
    """What a prompt and the running rows cost each other, in seconds."""

    rows: int
    slower_s: float  # what the rows' share of the steps adds to the prompt
    stall_s: float  # row-seconds that they stand still
    rows_tbt_s: float  # theirs meanwhile, as admission counts it


NOBODY = PromptAmongRows(0, 0.0, 0.0, 0.0)


def shared(
    instance: Instance, computed: int, prompt_s: float, admission_prompt_s: float, now: float
) -> PromptAmongRows:
    """Returns what computing `computed` tokens costs the rows there, and what these cost the prompt."""
    batch = instance.batch
    rows = min(batch.requests, instance.max_running or batch.requests) if instance.mixes else 0
    if not rows:
        return NOBODY
    chunks = instance.chunks(computed)
    step_s, admission_step_s = instance.decode.both(rows, batch.context_tokens, now)
    busy_s = instance.queue.wait_s(now) + prompt_s
    return PromptAmongRows(
        rows,
        score.slower_s(rows, chunks, step_s),
        score.stall_s(rows, prompt_s),
        score.mixed_tbt_s(admission_step_s, admission_prompt_s / chunks, busy_s, batch.residence_s),
    )


def without_rows_s(instance: Instance, computed: int, seconds: float, steps: int = 1) -> float:
    """Returns the prompt's own part of its measured time: the rows that ran beside it (as last reported) in `steps`
    steps or more are subtracted. At least a quarter remains, since the models are no better than that."""
    load = instance.load
    if not instance.mixes or not load.running_requests or computed <= 0:
        return seconds
    step_s = instance.decode.predict(load.running_requests, load.context_tokens)
    return max(seconds / 4, seconds - max(steps, instance.chunks(computed)) * step_s)
