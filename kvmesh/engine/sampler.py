"""From logits to tokens, for all rows of a step at once. Order of processing (docs/reference/sampling.md):

    logprobs (raw) · bias · repetition · frequency, presence · temperature · min_p · top_k · top_p · draw

Temperature 0 takes the best logit after the penalties. Else each row draws one uniform number from (seed, index in the
answer) and looks it up in the cumulative distribution of what the filters leave, in token-id order and float64. No
generator has state, so a row's token depends neither on the other rows nor on where the request ran before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine.batch import Chosen, Column, SampledToken, SampleParams
from kvmesh.engine.kernels import kernels_for
from kvmesh.engine.sampling.adjust import Adjustments
from kvmesh.engine.sampling.filters import Filters
from kvmesh.engine.sampling.history import History
from kvmesh.engine.sampling.noise import Noise
from kvmesh.errors import NonFiniteLogits

BLOCK_BYTES = 8 << 20  # of float64 logits that a CPU works on at a time: they stay in its cache, and memory stays small


class Sampler:
    """Chooses tokens, and keeps what follows from a batch's rows while the rows stay the same: the same SampleParams
    objects, in order. Of these only `token_index` (by the caller, and not looked at by `choose`) and `history` (here)
    may change while a row runs."""

    def __init__(self) -> None:
        self._batch: _Batch | None = None

    def sample(self, logits: torch.Tensor, params: Sequence[SampleParams]) -> list[SampledToken]:
        """As `choose`, each row's index being its `answered + token_index`."""
        indices = np.array([p.answered + p.token_index for p in params], np.int64)
        return self.choose(logits, params, indices).tokens()

    def choose(self, logits: torch.Tensor, params: Sequence[SampleParams], indices: Column) -> Chosen:
        """Chooses one token a row of `logits [rows, vocab]` (any float dtype, any device), which stay as they are; each
        goes into its row's history. Raises NonFiniteLogits naming the rows; then nothing has changed."""
        return self._kept(logits, params).sample(logits, indices)

    def _kept(self, logits: torch.Tensor, params: Sequence[SampleParams]) -> _Batch:
        batch = self._batch
        if batch is None or batch.vocab != logits.shape[-1] or batch.params != list(params):
            self._batch = None  # of the old one nothing is needed: histories are with their rows
            batch = self._batch = _Batch(params, logits.shape[-1], logits.device)
        return batch

    def launch(self, logits: torch.Tensor, params: Sequence[SampleParams], indices: Column) -> TokensInFlight:
        """As `choose`, but does not wait for the device. Rows whose logits are not finite leave the others' tokens as
        they are. Where rows have a history and are not those of the step before, the tokens of that step must have been
        read (`TokensInFlight.result`)."""
        return self._kept(logits, params).launch(logits, indices)


class TokensInFlight:
    """Has the tokens of a step that was launched: on the device in `token_ids`, int64 `[rows]`, where the next step
    reads them (ids of the vocabulary, whatever a row's logits were), and on their way to the host."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        found: torch.Tensor,
        scores: torch.Tensor | None,
        historic: Sequence[tuple[int, History]],
        scored: Sequence[tuple[int, int]],
    ) -> None:
        self.token_ids = token_ids
        self._historic, self._scored = historic, scored
        self._host, self._host_scores = found, scores
        self._copied: torch.cuda.Event | None = None
        if found.is_cuda:
            self._host = _to_host(found)
            self._host_scores = None if scores is None else _to_host(scores)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> Chosen:
        """Waits for the tokens, which go into the rows' histories; -1 stands for those whose logits were not finite.
        It is called once, in the order of the steps."""
        if self._copied is not None:
            self._copied.synchronize()
        found: Column = self._host.numpy()
        for row, history in self._historic:
            if found[row] >= 0:
                history.add(int(found[row]))
        scored = {} if self._host_scores is None else dict(_scores(self._host_scores, self._scored))
        return Chosen(found, {row: token for row, token in scored.items() if found[row] >= 0})


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begins to copy a tensor into pinned memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _Batch:
    """Splits the rows: those that take the best logit as it is need nothing, the others lie in blocks of one kind
    each."""

    def __init__(self, params: Sequence[SampleParams], vocab: int, device: torch.device) -> None:
        self.params = list(params)
        self.vocab = vocab
        self._device = device
        kinds: dict[tuple[bool, bool, bool], list[int]] = {}
        for row, p in enumerate(self.params):
            draws, adjusted = p.temperature > 0, p.penalised or bool(p.logit_bias)
            if draws or adjusted:
                kinds.setdefault((draws, draws and p.filtered, adjusted), []).append(row)
        room = max(1, BLOCK_BYTES // (8 * vocab)) if device.type == "cpu" else len(self.params)
        self._blocks = [
            _Block(rows[at : at + room], self.params, vocab, device)
            for rows in kinds.values()
            for at in range(0, len(rows), room)
        ]
        self._historic = [(row, p.history) for row, p in enumerate(self.params) if p.history is not None]
        self._scored = [(row, p.logprobs) for row, p in enumerate(self.params) if p.logprobs is not None]
        self._all_worked = sum(map(len, kinds.values())) == len(self.params)

    def sample(self, logits: torch.Tensor, indices: Column) -> Chosen:
        """One read of the device for the tokens, and one for logprobs where rows ask for them (top_k over
        filters.CANDIDATES and top_p read once more a block)."""
        best, tokens, good = self._best(logits)
        if self._blocks and self._device.type == "cpu":
            # What follows wants numbers; elsewhere it is looked at with the tokens.
            _check(good.to(torch.int64).numpy() - 1)
        for block in self._blocks:
            tokens[block.rows] = block.tokens(logits, indices, best)
        found: Column = torch.where(good, tokens, -1).cpu().numpy()
        _check(found)
        for block in self._blocks:
            block.took(tokens)
        for row, history in self._historic:
            history.add(int(found[row]))
        return Chosen(found, dict(_scores(self._with_logprobs(logits, tokens), self._scored)) if self._scored else {})

    def launch(self, logits: torch.Tensor, indices: Column) -> TokensInFlight:
        """Waits for nothing (but for top_k over filters.CANDIDATES and top_p, which read the device once a block)."""
        best, tokens, good = self._best(logits)
        chosen_from = logits
        if self._blocks and self._device.type == "cpu" and not bool(good.all()):
            chosen_from = torch.where(good[:, None], logits, 0.0)  # what follows wants numbers
            best = torch.where(good, best, 0.0)
        for block in self._blocks:
            tokens[block.rows] = block.tokens(chosen_from, indices, best)
        found = torch.where(good, tokens, -1)
        tokens = found.clamp(min=0)  # what a device looks up must be there, whatever the logits were
        scores = self._with_logprobs(logits, tokens) if self._scored else None
        for block in self._blocks:
            block.took(tokens)
        return TokensInFlight(tokens, found, scores, self._historic, self._scored)

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns of each row the greatest logit, its token (0 where no row takes it as it is), and whether all logits
        are numbers."""
        if self._all_worked:
            best = logits.amax(-1)
            tokens = torch.zeros(len(best), dtype=torch.int64, device=self._device)
        else:
            best, tokens = logits.max(-1)
        # max passes NaN on: one look at the best logit of each row finds NaN, +inf and rows of -inf. What is finite
        # differs from itself by nothing: `isfinite` is four launches on a GPU.
        return best, tokens, best - best == 0

    def _with_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Computes log-probabilities of the rows that ask for them, from the logits as they came: float64, which holds
        all of token, its log-probability, the best tokens and theirs."""
        rows = torch.tensor([row for row, _ in self._scored], device=self._device)
        raw = logits[rows].float().log_softmax(-1)
        top = raw.topk(min(max(n for _, n in self._scored), self.vocab))
        chosen = tokens[rows, None]
        return torch.cat([p.double() for p in (chosen, raw.gather(1, chosen), top.indices, top.values)], 1)


def _scores(lines: torch.Tensor, scored: Sequence[tuple[int, int]]) -> Iterator[tuple[int, SampledToken]]:
    """Reads what `_with_logprobs` made of the rows `scored`, (row, how many of the best)."""
    width = (lines.shape[-1] - 2) // 2
    for (row, n), line in zip(scored, lines.tolist(), strict=True):
        ids, values = map(int, line[2 : 2 + width]), line[2 + width :]
        yield row, SampledToken(int(line[0]), line[1], tuple(zip(ids, values, strict=True))[:n])


class _Block:
    """Holds rows of one kind: all draw or none does, all are filtered or none is, all are adjusted or none is."""

    def __init__(self, rows: list[int], params: Sequence[SampleParams], vocab: int, device: torch.device) -> None:
        self.rows = torch.tensor(rows, device=device)
        self._places = np.array(rows)
        mine = [params[row] for row in rows]
        self._adjust = Adjustments(mine, device) if mine[0].penalised or mine[0].logit_bias else None
        self._temperature = self._noise = self._filters = self._min_p = None
        self._kernels: ModuleType | None = None
        if mine[0].temperature > 0:
            self._temperature = torch.tensor([[p.temperature] for p in mine], dtype=torch.float64, device=device)
            self._noise = Noise([p.seed for p in mine])
            self._filters = Filters(mine, vocab, device) if mine[0].filtered else None
            self._min_p = torch.zeros_like(self._temperature) if self._filters is None else self._filters.min_p
            if self._adjust is None and not (self._filters and self._filters.ordered):
                self._kernels = kernels_for(device.type, "sample")

    def tokens(self, logits: torch.Tensor, indices: Column, best: torch.Tensor) -> torch.Tensor:
        """int64 `[rows]`, of logits, indices and greatest logits of the whole batch."""
        if self._kernels is not None and self._noise is not None and logits.dtype == torch.float32:
            noise = _sent(self._noise.at(indices[self._places]), self.rows.device)
            drawn = self._kernels.draw(logits, self.rows, best, self._temperature, self._min_p, noise)
            return cast(torch.Tensor, drawn)
        x = logits[self.rows].double()
        if self._adjust is not None:
            self._adjust.apply(x)
        if self._temperature is None or self._noise is None:
            return x.max(-1).indices
        # The best first to 0: a tiny temperature then overflows to -inf, never to NaN.
        weights = x.sub_(x.amax(-1, keepdim=True)).div_(self._temperature).exp_()
        if self._filters is not None:
            weights.masked_fill_(weights < self._filters.cut(weights)[:, None], 0.0)
        return _draw(weights, _sent(self._noise.at(indices[self._places]), weights.device))

    def took(self, tokens: torch.Tensor) -> None:
        """The whole batch's tokens are final."""
        if self._adjust is not None:
            self._adjust.add(tokens[self.rows])


def _sent(array: npt.NDArray[np.float64], device: torch.device) -> torch.Tensor:
    """Copies to the device without waiting for the copy."""
    made = torch.from_numpy(array)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Returns int64 `[rows]`: where the cumulative sum of `weights [rows, vocab]`, which is overwritten, exceeds the
    share `noise` of its total."""
    cumulative = weights.cumsum_(-1)
    total = cumulative[:, -1]
    target = noise * total
    # Rounding must not reach the end: the last token whose weight is not zero is where `total` is first attained.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _check(found: Column) -> None:
    """Raises NonFiniteLogits for the negative ones among the tokens."""
    if found.min() < 0:
        rows = tuple(np.flatnonzero(found < 0).tolist())
        raise NonFiniteLogits(f"logits of batch rows {list(rows)[:16]} are not finite", rows=rows)
