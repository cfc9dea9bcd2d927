"""Chunks of one prompt that go through the stages of a pipeline one behind the other (CPP): where the prompt is cut so
that every chunk takes equal compute, and when its last token is through. Pure.

A later chunk attends to more tokens than an earlier one, so chunks of equal tokens take longer and longer, and the
stages wait for the slowest. With the cost of a chunk [start, end) of

    step + token · (end - start) + pair · pairs         pairs: each token sees all before it, and itself

all of a prompt behind `cached` tokens costs a quadratic of its length, so a border is the root of one. In a stage each
of m equal chunks then takes w / m + step seconds, where w is what the stage takes for all of the prompt, and of p equal
stages the last one ends after

    (m + p - 1) · (w / m + step)          m chunks, and p - 1 more to fill the pipeline: the bubble is (p-1) / (m+p-1)

(GPipe, Huang et al. 2019, section 2; facts on CPP: Mooncake, FAST'25, section 5.1.) The least of it is at
m = sqrt((p - 1) · w / step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What computing a chunk costs, in any unit: `step` once, `token` for each token, `pair` for each (query, key) pair
    of attention. Raises ConfigError for a negative cost, or one without a part that grows."""

    token: float
    pair: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        for name in ("token", "pair", "step"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: must be a number, at least 0", field=name)
        if not (self.token or self.pair):
            raise ConfigError("token=0: a chunk must cost something by its tokens or its pairs", field="token")

    def work(self, start: int, end: int) -> float:
        """Returns the cost of tokens [start, end) behind all before them, without `step`."""
        tokens = end - start
        return self.token * tokens + self.pair * tokens * (start + (tokens + 1) / 2)

    def of(self, start: int, end: int) -> float:
        """Returns the cost of the chunk [start, end)."""
        return self.step + self.work(start, end)

    def scaled(self, factor: float, step: float) -> ChunkCost:
        """Returns the cost where tokens and pairs cost `factor` times as much, and a chunk `step`."""
        return ChunkCost(self.token * factor, self.pair * factor, step)


class FittedChunkCost:
    """Learns what chunks cost from what a stage took for them, in seconds: the least squares of step + token · tokens +
    pair · pairs with no negative part, over recent chunks. Until these are enough, and of contexts that differ enough
    to tell tokens from pairs, it goes by a prior, whose unit is none and which has no `step`."""

    KEPT = 0.98  # of each chunk's weight, when the next one is there
    ENOUGH = 16
    APART = 2.0  # times: the mean contexts of the chunks must lie so far apart
    MOST_OFF = 8.0  # times: pairs do not cost more, or less, than this of what the prior says
    LEAST_STEP_TOKENS = 1.0  # a chunk costs as much as so many tokens more: else more and more chunks would seem free

    def __init__(self, prior: ChunkCost) -> None:
        self.cost = self._prior = prior
        self._products = [[0.0] * 4 for _ in range(3)]  # of (1, tokens, pairs) with themselves and the seconds
        self._count = 0
        self._least = self._most = 0.0  # of the mean contexts

    def add(self, tokens: int, pairs: float, seconds: float) -> None:
        """Takes one more chunk, or several that were computed together."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        mean = pairs / tokens
        self._least, self._most = (min(self._least, mean), max(self._most, mean)) if self._count else (mean, mean)
        self._count += 1
        row = (1.0, tokens * self._prior.token, pairs * self._prior.pair)  # of about the same size
        for own, value in zip(self._products, row, strict=True):
            own[:] = [kept * self.KEPT + value * other for kept, other in zip(own, (*row, seconds), strict=True)]
        if self._count >= self.ENOUGH and self._most >= self.APART * self._least:
            self.cost = self._fitted()

    def _fitted(self) -> ChunkCost:
        """Returns the cost by all subsets of the three parts of which none comes out negative: the one with the least
        squares, which is the one that explains most."""
        best, explained = (0.0, 0.0, 0.0), 0.0
        for parts in ((0, 1, 2), (0, 1), (1, 2), (0, 2), (1,), (2,)):
            found = _solved([[self._products[row][column] for column in (*parts, 3)] for row in parts])
            if found is None or min(found) < 0:
                continue
            gain = sum(value * self._products[part][3] for part, value in zip(parts, found, strict=True))
            if gain > explained:
                values = dict(zip(parts, found, strict=True))
                best, explained = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)), gain
        step, token, pair = best
        if not (token or pair):
            return self.cost
        token = max(token, pair / self.MOST_OFF)
        pair = min(max(pair, token / self.MOST_OFF), token * self.MOST_OFF)
        token *= self._prior.token
        return ChunkCost(token, pair * self._prior.pair, max(step, self.LEAST_STEP_TOKENS * token))


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Returns the solution of linear equations, whose right sides stand last; None where there are several."""
    size, scale = len(rows), [math.sqrt(row[at]) for at, row in enumerate(rows)]
    if not all(scale):
        return None
    for at, row in enumerate(rows):
        row[:] = [value / scale[at] / (scale[other] if other < size else 1.0) for other, value in enumerate(row)]
    for at in range(size):  # symmetric and positive definite: no pivots are needed
        if rows[at][at] < 1e-9:
            return None
        for below in rows[at + 1 :]:
            factor = below[at] / rows[at][at]
            below[:] = [value - factor * other for value, other in zip(below, rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = rows[at][size] - sum(rows[at][other] * found[other] for other in range(at + 1, size))
        found[at] = rest / rows[at][at]
    return [value / one for value, one in zip(found, scale, strict=True)]


def equal_compute_borders(tokens: int, chunks: int, cost: ChunkCost, *, cached: int = 0, block: int = 1) -> list[int]:
    """Returns the ends of `chunks` chunks of tokens [cached, tokens), ascending, the last one `tokens`: each costs the
    same but for the rounding of its borders to multiples of `block`, at most half a block each. A prompt with too few
    blocks has fewer chunks. Raises ConfigError for sizes that cannot be."""
    _check(tokens, cached, block)
    if chunks < 1:
        raise ConfigError(f"chunks={chunks}: must be at least 1", field="chunks")
    each = cost.work(cached, tokens) / chunks
    ends: list[int] = []
    last = cached
    for number in range(1, chunks):
        # Halves go up: borders at most n blocks apart stay so.
        end = math.floor(_reach(cost, cached, number * each) / block + 0.5) * block
        if end >= tokens:
            break
        if end > last:
            ends.append(end)
            last = end
    return [*ends, tokens]


def bounded_borders(
    tokens: int, most: int, cost: ChunkCost, *, cached: int = 0, block: int = 1, least: int = 0, wanted: int = 0
) -> list[int]:
    """Returns the ends of chunks of which none has more than `most` tokens, a multiple of `block`, and that take equal
    compute as far as this allows: where so many chunks would be needed that there are more than `wanted` (0: any
    number), or that the last ones have less than `least` tokens, whose fixed costs no longer hide, the first ones have
    `most` tokens and take less. Raises ConfigError for sizes that cannot be."""
    _check(tokens, cached, block)
    if most < block or most % block:
        raise ConfigError(f"most={most}: must be a multiple of block={block}", field="most")
    target = max(cost.work(cached, cached + most), cost.work(max(cached, tokens - least), tokens))
    if wanted:
        target = max(target, cost.work(cached, tokens) / wanted)
    ends: list[int] = []
    start = cached
    while tokens - start > most and cost.work(start, start + most) < target:
        start += most - start % block
        ends.append(start)
    if tokens - start <= most:
        return [*ends, tokens]
    chunks = math.ceil(cost.work(start, tokens) / target)
    while True:
        rest = equal_compute_borders(tokens, chunks, cost, cached=start, block=block)
        if max(after - before for before, after in zip([start, *rest], rest, strict=False)) <= most:
            return [*ends, *rest]
        chunks += 1 + chunks // 32  # of many, a few more than are needed: each try takes as long as there are chunks


def best_chunks(work_s: float, stages: int, step_s: float, most: int = 4096) -> int:
    """Returns the number of chunks with the least time through `stages` equal stages, each of which takes `work_s` for
    all of the prompt and `step_s` more a chunk; at most `most`."""
    if stages < 2:
        return 1
    if step_s <= 0:
        return most
    about = math.sqrt((stages - 1) * work_s / step_s)
    near = {min(most, max(1, math.floor(about))), min(most, max(1, math.ceil(about)))}
    return min(sorted(near), key=lambda chunks: (chunks + stages - 1) * (work_s / chunks + step_s))


def _check(tokens: int, cached: int, block: int) -> None:
    if block < 1:
        raise ConfigError(f"block={block}: must be at least 1", field="block")
    if not 0 <= cached < tokens:
        raise ConfigError(f"tokens={tokens}: must be more than the {max(0, cached)} cached ones", field="tokens")


def _reach(cost: ChunkCost, cached: int, work: float) -> float:
    """Returns up to which token a prompt behind `cached` tokens comes with so much work: the root of
    pair/2 · x² + (token + pair/2) · x = work + the same at `cached`."""
    square, line = cost.pair / 2, cost.token + cost.pair / 2
    known = work + square * cached * cached + line * cached
    return 2 * known / (line + math.sqrt(line * line + 4 * square * known))


# Chunks in the stages of a pipeline.


def pipeline_ends(stage_s: Sequence[Sequence[float]], send_s: Sequence[float] | float = 0.0) -> list[list[float]]:
    """Returns when each chunk ends in each stage: `stage_s[k][s]` is what stage s takes for chunk k. A stage begins a
    chunk when it has ended the one before it and has what the stage before it sent, `send_s` (a number, or one for each
    chunk) after that one's end; sending holds up no stage."""
    ends: list[list[float]] = []
    for chunk, times in enumerate(stage_s):
        send = send_s if isinstance(send_s, int | float) else send_s[chunk]
        ends.append(stage_ends(ends[-1] if ends else [0.0] * len(times), times, send))
    return ends


def stage_ends(free_s: Sequence[float], times: Sequence[float], send_s: float, now: float = 0.0) -> list[float]:
    """Returns when a chunk that is there `now` ends in each stage, where stages are free from `free_s` on."""
    found: list[float] = []
    for stage, (free, seconds) in enumerate(zip(free_s, times, strict=True)):
        ready = found[stage - 1] + send_s if stage else now
        found.append(max(free, ready) + seconds)
    return found


def stage_layers(layers: int, stages: int) -> list[int]:
    """Returns how many layers each stage has: as equal as can be, the earlier stages have one more. Raises ConfigError
    where a stage would have none."""
    if not 1 <= stages <= layers:
        raise ConfigError(f"pp={stages}: must be between 1 and the {layers} layers of the model", field="pp")
    whole, more = divmod(layers, stages)
    return [whole + (stage < more) for stage in range(stages)]


@dataclass(frozen=True, slots=True)
class PipelinePrediction:
    """What a prompt takes through a pipeline that is empty. `ends` are the borders of its chunks, `one_stage_s` is what
    one stage with all layers would take for the same chunks."""

    ttft_s: float
    ends: tuple[int, ...]
    bubble: float  # share of the stages' time in which they stand still, from the first chunk's begin to the last's end
    one_stage_s: float

    @property
    def speedup(self) -> float:
        """How many times as fast as one stage with all layers."""
        return self.one_stage_s / self.ttft_s


def predict_pipeline(
    tokens: int,
    stages: Sequence[int] | int,
    layer: ChunkCost,
    *,
    layers: int = 0,
    ends: Sequence[int] = (),
    chunks: int = 0,
    cached: int = 0,
    block: int = 1,
    step_s: float = 0.0,
    send_s: float = 0.0,
    send_token_s: float = 0.0,
    head_s: float = 0.0,
) -> PipelinePrediction:
    """Predicts the TTFT of a prompt of `tokens` tokens behind `cached` ones from what one layer takes for a chunk.

    `stages` lists the layers of each stage, or is a number of stages that `layers` layers are dealt to. The prompt is
    cut at `ends`, else into `chunks` of equal compute. A stage takes `step_s` more a chunk, the last one `head_s` for
    the first token; a chunk is at the next stage `send_s` and `send_token_s` a token after its end. Raises ConfigError
    for sizes that cannot be."""
    of_stage = stage_layers(layers, stages) if isinstance(stages, int) else list(stages)
    if not of_stage or min(of_stage) < 1:
        raise ConfigError(f"stages={stages!r}: each must have a layer", field="stages")
    if not ends:
        whole = layer.scaled(max(of_stage), max(of_stage) * layer.step + step_s)
        ends = equal_compute_borders(tokens, chunks or 1, whole, cached=cached, block=block)
    _check(tokens, cached, block)
    starts = [cached, *ends[:-1]]
    if ends[-1] != tokens or any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise ConfigError(f"ends={list(ends)!r}: must ascend from {cached} to {tokens}", field="ends")
    of_chunk = [layer.of(start, end) for start, end in zip(starts, ends, strict=True)]
    times = [[count * seconds + step_s for count in of_stage] for seconds in of_chunk]
    times[-1][-1] += head_s
    sends = [send_s + send_token_s * (end - start) for start, end in zip(starts, ends, strict=True)]
    ttft_s = pipeline_ends(times, sends)[-1][-1]
    busy_s = sum(map(sum, times))
    one_stage_s = sum(sum(of_stage) * seconds + step_s for seconds in of_chunk) + head_s
    return PipelinePrediction(ttft_s, tuple(ends), 1 - busy_s / (len(of_stage) * ttft_s), one_stage_s)


def pipelined_s(alone_s: float, chunks: float, stages: int) -> float:
    """Returns what a prompt takes through `stages` stages, where `alone_s` is what each stage takes for all of its
    equal chunks: `stages` - 1 of these more, which fill the pipeline. So a model that was fitted to the time of one
    stage predicts a pipeline."""
    return alone_s * (1 + (stages - 1) / max(1.0, chunks))
