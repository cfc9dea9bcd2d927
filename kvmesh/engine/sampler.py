"""From logits to tokens, for all rows of a step at once. Order of processing (docs/reference/sampling.md):

    logprobs (raw) · grammar · bias · repetition · frequency, presence · temperature · min_p · top_k · top_p · draw

A grammar takes the tokens away that it does not allow, so what comes after it sees only the others; a row whose grammar
allows one token has that. Temperature 0 takes the best logit after the penalties. Else each row draws one uniform
number from (seed, index in the answer) and looks it up in the cumulative distribution of what the filters leave, in
token-id order and float64. No generator has state, so a row's token depends neither on the other rows nor on where the
request ran before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine.batch import Chosen, Column, SampledToken, SampleParams
from kvmesh.engine.kernels import kernels_for
from kvmesh.engine.ops import on_native
from kvmesh.engine.sampling.adjust import Adjustments
from kvmesh.engine.sampling.filters import Filters
from kvmesh.engine.sampling.grammar import WORD_BITS, AnswerGrammar, MaskMaker, StepMasks
from kvmesh.engine.sampling.history import History
from kvmesh.engine.sampling.noise import Noise
from kvmesh.engine.upload import Array, Upload
from kvmesh.errors import NonFiniteLogits

CPU = torch.device("cpu")
NO_BITS = torch.empty(0, dtype=torch.int32)
NO_NOISE, NO_LINES = torch.empty(0, dtype=torch.float64), np.empty((0, 2))
# What top_k and top_p leave is found on a GPU by the kernels; False: by torch's topk and sort, which need one more
# read of the device for each block in which a row wants more than `filters.CANDIDATES` tokens.
CUT_BY_KERNELS = True
FEW = 4  # times the allowed tokens are at most the vocabulary: then a CPU looks at these alone
BLOCK_BYTES = 8 << 20  # of float64 logits that a CPU works on at a time: they stay in its cache, and memory stays small


class Sampler:
    """Chooses tokens on `device`, and keeps what follows from a batch's rows while the rows stay the same: the same
    SampleParams objects, in order. Of these only `token_index` (by the caller, and not looked at by `choose`),
    `history` and `grammar` (here) may change while a row runs."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._upload = Upload(device)
        self._masks, self._mask_maker = Upload(device), MaskMaker()
        self._batch: _Batch | None = None
        self._constrained: _Batch | None = None  # the rows with a grammar, where they are apart

    def sample(self, logits: torch.Tensor, params: Sequence[SampleParams]) -> list[SampledToken]:
        """Prepares and chooses, each row's index being its `answered + token_index`."""
        indices = np.array([p.answered + p.token_index for p in params], np.int64)
        return self.choose(logits, self.prepare(params, indices, logits.shape[-1])).tokens()

    def prepare(
        self,
        params: Sequence[SampleParams],
        indices: Column,
        vocab: int,
        beside: Sequence[Array] = (),
        *,
        apart: bool = False,
    ) -> Preparation:
        """Sends to the device what choosing a token a row takes, and the arrays `beside` with it: one copy, which runs
        before whatever is launched after this call. Without rows only `beside` is sent. The masks of rows with a
        grammar, all of whose tokens are known by now, are computed while the caller launches the forward, and sent when
        a choice is made. `apart`: rows with a grammar come and go while the others stay what they are."""
        if not len(params):
            return Preparation((), self._upload.send(beside))
        constrained = [row for row, p in enumerate(params) if p.grammar is not None] if apart else []
        self._constrained = self._constrained if constrained else None
        if not constrained or len(constrained) == len(params):
            wanted: list[tuple[list[SampleParams], Column | None]] = [(list(params), None)]
        else:
            free = [row for row, p in enumerate(params) if p.grammar is None]
            wanted = [([params[row] for row in rows], np.array(rows, np.int64)) for rows in (free, constrained)]
        arrays, batches = list(beside), []
        for (given, rows), kept in zip(wanted, (self._batch, self._constrained), strict=False):
            batch = kept
            if batch is None or batch.vocab != vocab or batch.params != given:
                # Of the old one nothing is needed: histories are with their rows.
                batch = _Batch(given, vocab, self._upload, self._masks)
            batches.append(batch)
            arrays += batch.arrays
            if len(batch.drawing):
                arrays.append(batch.noise.at((indices if rows is None else indices[rows])[batch.drawing]))
            if rows is not None:
                arrays.append(rows)
        self._batch = self._constrained = None
        sent = self._upload.send(arrays)
        rest, parts = iter(sent[len(beside) :]), []
        for batch, (_, rows) in zip(batches, wanted, strict=True):
            batch.receive(rest)
            noise = next(rest) if len(batch.drawing) else NO_NOISE
            masks = self._mask_maker.begin(batch.grammars, vocab) if batch.grammars else None
            parts.append(PreparedRows(batch, noise, masks, rows, None if rows is None else next(rest)))
        self._batch, self._constrained = batches[0], batches[1] if len(batches) > 1 else None
        return Preparation(parts, sent[: len(beside)])

    def choose(self, logits: torch.Tensor, ready: Preparation) -> Chosen:
        """Chooses one token a row of `logits [rows, vocab]` (any float dtype), which stay as they are; each goes into
        its row's history. Waits for the device once, to read tokens and log-probabilities. Raises NonFiniteLogits
        naming the rows; then nothing has changed. The rows were not prepared `apart`."""
        [part] = ready.parts
        return part.batch.choose(logits, part.noise, part.made_masks())

    def launch(self, logits: torch.Tensor, ready: Preparation) -> TokensInFlight:
        """As `choose`, but does not wait for the device. Rows whose logits are not finite leave the others' tokens as
        they are. Where rows have a history and are not those of the step before, but for rows with a grammar that are
        `apart`, the tokens of that step must have been read (`TokensInFlight.result`) before these were prepared. The
        same holds for every row with a grammar."""
        made = [part.launch(logits) for part in ready.parts]
        if len(made) == 1:
            tokens = made[0][0]
        else:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            for part, (own, _) in zip(ready.parts, made, strict=True):
                assert part.on_device is not None, "apart"
                tokens[part.on_device] = own
        return TokensInFlight(tokens, [unread for _, unread in made])


class PreparedRows(NamedTuple):
    """Holds what choosing tokens of some rows needs: their batch and, on the device, the noise of those that draw.
    `masks` waits for the masks of those with a grammar; None: there are none. `rows` are their numbers in the step, and
    `on_device` the same; None: all rows, in order."""

    batch: _Batch
    noise: torch.Tensor
    masks: Callable[[], StepMasks] | None
    rows: Column | None
    on_device: torch.Tensor | None

    def made_masks(self) -> StepMasks | None:
        """Waits for the masks."""
        return None if self.masks is None else self.masks()

    def launch(self, logits: torch.Tensor) -> tuple[torch.Tensor, UnreadTokens]:
        """Returns these rows' tokens on the device, and on their way to the host."""
        own = logits if self.on_device is None else logits[self.on_device]
        tokens, unread = self.batch.launch(own, self.noise, self.made_masks())
        unread.rows = self.rows
        return tokens, unread


class Preparation(NamedTuple):
    """Holds what one choice needs on the device: of each part of the rows (none without rows), and what was sent
    beside."""

    parts: Sequence[PreparedRows]
    beside: list[torch.Tensor]


class UnreadTokens:
    """Has tokens of rows that are on their way to the host. `rows` are their numbers in the step; None: all rows, in
    order."""

    rows: Column | None = None

    def __init__(
        self,
        found: torch.Tensor,
        scores: torch.Tensor | None,
        historic: Sequence[tuple[int, History | AnswerGrammar]],
        scored: Sequence[tuple[int, int]],
        faults: Mapping[int, str],
    ) -> None:
        self._historic, self._scored, self._faults = historic, scored, faults
        self._host, self._host_scores = found, scores
        self._copied: torch.cuda.Event | None = None
        if found.is_cuda:
            self._host = _to_host(found)
            self._host_scores = None if scores is None else _to_host(scores)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> Chosen:
        """Waits for the tokens. See TokensInFlight."""
        if self._copied is not None:
            self._copied.synchronize()
        found: Column = self._host.numpy()
        faults = _mark(found, self._faults)
        for row, history in self._historic:
            if found[row] >= 0:
                history.add(int(found[row]))
        lines = [] if self._host_scores is None else self._host_scores.tolist()
        scores = {row: token for row, token in _with_logprobs(self._scored, lines) if found[row] >= 0}
        return Chosen(found, scores | faults)


class TokensInFlight:
    """Has the tokens of a step that was launched: on the device in `token_ids`, int64 `[rows]`, where the next step
    reads them (ids of the vocabulary, whatever a row's logits were), and on their way to the host."""

    def __init__(self, token_ids: torch.Tensor, parts: Sequence[UnreadTokens]) -> None:
        self.token_ids = token_ids
        self._parts = parts

    def result(self) -> Chosen:
        """Waits for the tokens, which go into the rows' histories and grammars; -1 stands for those whose logits were
        not finite, or whose grammar failed. It is called once, in the order of the steps."""
        if len(self._parts) == 1:
            return self._parts[0].result()
        whole = np.empty(len(self.token_ids), np.int64)
        scored: dict[int, SampledToken] = {}
        for part in self._parts:
            rows, chosen = part.rows, part.result()
            assert rows is not None, "apart"
            whole[rows] = chosen.token_ids
            scored.update((int(rows[row]), token) for row, token in chosen.scored.items())
        return Chosen(whole, scored)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begins to copy a tensor into pinned memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _Batch:
    """Splits the rows: those that take the best logit as it is need nothing, the others lie in blocks of one kind
    each. `drawing` are the rows that draw, block by block, and `noise` is theirs; `arrays` are still to be sent."""

    def __init__(self, params: Sequence[SampleParams], vocab: int, upload: Upload, masks: Upload) -> None:
        self.params = list(params)
        self.vocab = vocab
        self._upload, self._masks = upload, masks
        kinds: dict[tuple[bool, bool, bool, bool], list[int]] = {}
        constrained = [row for row, p in enumerate(self.params) if p.grammar is not None]
        for row, p in enumerate(self.params):
            draws, adjusted, masked = p.temperature > 0, p.penalised or bool(p.logit_bias), p.grammar is not None
            if draws or adjusted or masked:
                kinds.setdefault((draws, draws and p.filtered, adjusted, masked), []).append(row)
        most = max(1, BLOCK_BYTES // (8 * vocab)) if upload.shares_memory else len(self.params)
        self._blocks: list[_Block] = []
        drawing: list[int] = []
        for (draws, _, adjusted, masked), rows in kinds.items():
            room = most
            if masked and upload.shares_memory:
                # One operator chooses all greedy rows; of the others a row alone is passed over if its token is forced.
                room = 1 if draws or adjusted else len(rows)
            for at in range(0, len(rows), room):
                mine = rows[at : at + room]
                places = [constrained.index(row) for row in mine] if masked else None
                block = _Block(mine, self.params, vocab, upload.device, len(drawing), places)
                drawing += mine if block.draws else []
                self._blocks.append(block)
        self.drawing = np.array(drawing, np.int64)
        self.noise = Noise([self.params[row].seed for row in drawing])
        self._constrained = constrained
        self.grammars = [p.grammar for p in self.params if p.grammar is not None]
        self._historic: list[tuple[int, History | AnswerGrammar]] = [
            (row, p.history) for row, p in enumerate(self.params) if p.history is not None
        ]
        self._historic += zip(constrained, self.grammars, strict=True)
        self._scored = [(row, p.logprobs) for row, p in enumerate(self.params) if p.logprobs is not None]
        self._all_worked = sum(map(len, kinds.values())) == len(self.params)
        self.arrays = [array for block in self._blocks for array in block.arrays]
        if self._scored:
            self.arrays.append(np.array([row for row, _ in self._scored], np.int64))

    def receive(self, sent: Iterator[torch.Tensor]) -> None:
        """Takes `arrays` as they are on the device, if they were not taken before."""
        if self.arrays:
            for block in self._blocks:
                block.receive(sent)
            if self._scored:
                self._scored_rows = next(sent)
            self.arrays = []

    def choose(self, logits: torch.Tensor, noise: torch.Tensor, masks: StepMasks | None) -> Chosen:
        best, tokens, good = self._best(logits)
        bits = self._sent(masks)
        if self._blocks and self._upload.shares_memory:
            # What follows wants numbers; elsewhere it is looked at with the tokens.
            _check(good.to(torch.int64).numpy() - 1)
        for block in self._blocks:
            block.choose(tokens, logits, noise, best, masks, bits)
        chosen = torch.where(good, tokens, -1)
        if self._scored and not self._upload.shares_memory:
            # Torch's draw from a row that is not finite may lie beyond its end.
            scores = self._scores(logits, tokens.clamp(max=self.vocab - 1))
            read = read_back(torch.cat((chosen.double(), scores.flatten())))
            found = read[: len(chosen)].astype(np.int64)
            lines = read[len(chosen) :].reshape(scores.shape)
            _check(found)
        else:
            found = read_back(chosen)
            _check(found)
            lines = self._scores(logits, tokens).numpy() if self._scored else NO_LINES
        for block in self._blocks:
            block.took(tokens)
        faults = _mark(found, self._faults(masks))
        for row, history in self._historic:
            if found[row] >= 0:
                history.add(int(found[row]))
        return Chosen(found, dict(_with_logprobs(self._scored, lines.tolist())) | faults if self._scored else faults)

    def launch(
        self, logits: torch.Tensor, noise: torch.Tensor, masks: StepMasks | None
    ) -> tuple[torch.Tensor, UnreadTokens]:
        best, tokens, good = self._best(logits)
        bits = self._sent(masks)
        chosen_from = logits
        if self._blocks and self._upload.shares_memory and not bool(good.all()):
            chosen_from = torch.where(good[:, None], logits, 0.0)  # what follows wants numbers
            best = torch.where(good, best, 0.0)
        for block in self._blocks:
            block.choose(tokens, chosen_from, noise, best, masks, bits)
        found = torch.where(good, tokens, -1)
        tokens = found.clamp(min=0)  # what a device looks up must be there, whatever the logits were
        scores = self._scores(logits, tokens) if self._scored else None
        for block in self._blocks:
            block.took(tokens)
        return tokens, UnreadTokens(found, scores, self._historic, self._scored, self._faults(masks))

    def _sent(self, masks: StepMasks | None) -> torch.Tensor:
        """Returns the masks' bits on the device, whose launches of the forward stand before the copy."""
        return NO_BITS if masks is None else self._masks.send([masks.bits])[0]

    def _faults(self, masks: StepMasks | None) -> dict[int, str]:
        """Says by row why its grammar has no answer."""
        return {} if masks is None else {self._constrained[place]: why for place, why in masks.failed.items()}

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns of each row the greatest logit, its token (0 where no row takes it as it is), and whether all logits
        are numbers."""
        if self._all_worked:
            best = logits.amax(-1)
            tokens = torch.zeros(len(best), dtype=torch.int64, device=logits.device)
        else:
            best, tokens = logits.max(-1)
        # max passes NaN on: one look at the best logit of each row finds NaN, +inf and rows of -inf. What is finite
        # differs from itself by nothing: `isfinite` is four launches on a GPU.
        return best, tokens, best - best == 0

    def _scores(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns a line of float64, which holds all of it, for each row that asks for log-probabilities: the chosen
        token and its own, then the best tokens and theirs. They are of the logits as they came."""
        rows = self._scored_rows
        raw = logits[rows].float().log_softmax(-1)
        top = raw.topk(min(max(n for _, n in self._scored), self.vocab))
        chosen = tokens[rows, None]
        parts = (chosen, raw.gather(1, chosen), top.indices, top.values)
        return torch.cat([p.double() for p in parts], 1)


def _mark(found: Column, faults: Mapping[int, str]) -> dict[int, SampledToken]:
    """Takes the tokens of rows whose grammar failed away, and returns what is said of them."""
    for row in faults:
        found[row] = -1
    return {row: SampledToken(-1, fault=why) for row, why in faults.items()}


def _with_logprobs(
    scored: Sequence[tuple[int, int]], lines: Sequence[Sequence[float]]
) -> Iterator[tuple[int, SampledToken]]:
    """Reads what `_Batch._scores` returned of the rows `scored`: (row, how many of the best)."""
    for (row, n), line in zip(scored, lines, strict=True):
        width = (len(line) - 2) // 2
        ids, values = map(int, line[2 : 2 + width]), line[2 + width :]
        yield row, SampledToken(int(line[0]), line[1], tuple(zip(ids, values, strict=True))[:n])


class _Block:
    """Holds rows of one kind: all draw or none does, all are filtered or none is, all are adjusted or none is, all have
    a grammar or none has. `arrays` are still to be sent. The noise of its rows is the batch's from `first` on; the mask
    of row i is the `places[i]`-th of the batch."""

    def __init__(
        self,
        rows: list[int],
        params: Sequence[SampleParams],
        vocab: int,
        device: torch.device,
        first: int,
        places: list[int] | None,
    ) -> None:
        mine = [params[row] for row in rows]
        self.draws, self._noise = mine[0].temperature > 0, slice(first, first + len(rows))
        self._adjust = Adjustments(mine) if mine[0].penalised or mine[0].logit_bias else None
        self._filters = Filters(mine, vocab) if self.draws and mine[0].filtered else None
        self._places_of_masks = places
        self._mask_kernels = kernels_for(device.type, "mask") if places is not None else None
        self._kernels = kernels_for(device.type, "sample") if self.draws else None
        if self._filters is not None and self._filters.ordered and not CUT_BY_KERNELS:
            self._kernels = None
        self.arrays: list[Array] = [
            np.array(rows, np.int64),
            np.arange(len(rows)),
            np.array([[p.temperature] for p in mine], np.float64),
            np.zeros(len(rows)),
        ]
        if places is not None:
            self.arrays.append(np.array(places, np.int64))
        for part in (self._adjust, self._filters):
            self.arrays += part.arrays if part is not None else ()

    def receive(self, sent: Iterator[torch.Tensor]) -> None:
        """Takes `arrays` as they are on the device."""
        self.rows, self._places, self._temperature, self._zeros = (next(sent) for _ in range(4))
        if self._places_of_masks is not None:
            self._mask_rows = next(sent)
        for part in (self._adjust, self._filters):
            if part is not None:
                part.receive(sent)

    def choose(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        noise: torch.Tensor,
        best: torch.Tensor,
        masks: StepMasks | None,
        bits: torch.Tensor,
    ) -> None:
        """Writes this block's tokens among the batch's: of logits, noise, greatest logits and masks of the whole
        batch."""
        noise = noise[self._noise]
        if masks is not None and self._places_of_masks is not None and not bits.is_cuda:
            if self._adjust is None and not self.draws and on_native(logits) and logits.stride(1) == 1:
                tokens[self.rows] = torch.ops.kvmesh.best_allowed.default(logits, self.rows, bits, self._mask_rows)
                return
            for row, place in zip(self.rows.tolist(), self._places_of_masks, strict=True):
                forced = int(masks.forced[place])
                tokens[row] = forced if forced >= 0 else self._constrained(logits[row], noise, masks, place)
            return
        tokens[self.rows] = self._tokens(logits, noise, best, bits)

    def _constrained(self, logits: torch.Tensor, noise: torch.Tensor, masks: StepMasks, place: int) -> int:
        """Returns the token of one row on a CPU; one that draws or is adjusted is alone in its block. Where few tokens
        are allowed, the others are left out; the draw is the same, as they have no weight. One row is too little for
        torch's threads, so numpy does what it can."""
        vocab, names = len(logits), None
        given = (logits if logits.dtype in (torch.float32, torch.float64) else logits.float()).numpy()
        allowed = np.unpackbits(masks.bits[place].view(np.uint8), count=vocab, bitorder="little").view(np.bool_)
        if self._adjust is None and masks.allowed[place] * FEW <= vocab:
            names = np.flatnonzero(allowed)
            # One token of no weight beside them: filters may ask for more than there are.
            x = np.append(given[names], given.dtype.type(-np.inf))
        else:
            x = np.where(allowed, given, given.dtype.type(-np.inf))
        if self._adjust is None and not self.draws:
            token = int(x.argmax())
        else:
            token = int(self._picked(torch.from_numpy(x)[None], noise)[0])
        if token >= len(allowed if names is None else names) or not allowed[token if names is None else names[token]]:
            return int(np.flatnonzero(allowed)[0])  # the model gives nothing to any token that is allowed
        return token if names is None else int(names[token])

    def _picked(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Returns the places of tokens among `x [rows, tokens]`, logits of this block's rows that no kernel draws
        from."""
        if self._adjust is not None:
            x = x.double()
            self._adjust.apply(x)
        if not self.draws:
            return x.max(-1).indices
        x = x.double()
        # The best first to 0: a tiny temperature then overflows to -inf, never to NaN.
        weights = x.sub_(x.amax(-1, keepdim=True)).div_(self._temperature).exp_()
        if self._filters is not None:
            weights.masked_fill_(weights < self._filters.cut(weights)[:, None], 0.0)
        return _draw(weights, noise)

    def _tokens(
        self, logits: torch.Tensor, noise: torch.Tensor, best: torch.Tensor, bits: torch.Tensor
    ) -> torch.Tensor:
        rows = self.rows
        if self._places_of_masks is not None:
            logits, rows = self._masked(logits, bits), self._places
            if self._adjust is None and not self.draws:
                return logits.max(-1).indices
            best = logits.amax(-1)
        if self._kernels is not None and self._adjust is None:
            return self._drawn_by(self._kernels, logits, rows, best, noise)
        x = (logits[rows] if self._places_of_masks is None else logits).double()
        if self._adjust is None or not self.draws or self._kernels is None:
            return self._picked(x, noise)
        self._adjust.apply(x)
        return self._drawn_by(self._kernels, x, self._places, x.amax(-1), noise)

    def _masked(self, logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Returns this block's logits on a GPU, -inf where the mask does not allow the token."""
        if self._mask_kernels is not None:
            return cast(torch.Tensor, self._mask_kernels.masked(logits, self.rows, bits, self._mask_rows))
        places = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
        allowed = ((bits[self._mask_rows][:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[-1]] != 0
        least = torch.finfo(logits.dtype).min  # a logit of -inf may be all that is allowed
        return torch.where(allowed, logits[self.rows].clamp(min=least), -torch.inf)

    def _drawn_by(
        self, kernels: ModuleType, logits: torch.Tensor, rows: torch.Tensor, best: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        given = (logits, rows, best, self._temperature)
        least, filters = self._zeros, self._filters
        if filters is not None:
            least = filters.min_p
            if filters.limited:
                least = kernels.cut(*given, least, filters.top_k, counts=True)
            if filters.nucleus:
                least = kernels.cut(*given, least, filters.top_p, counts=False)
        return cast(torch.Tensor, kernels.draw(*given, least, noise))

    def took(self, tokens: torch.Tensor) -> None:
        """The whole batch's tokens are final."""
        if self._adjust is not None:
            self._adjust.add(tokens[self.rows])


def read_back(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Waits for the device and returns the values: the only place where sampling does."""
    read: npt.NDArray[Any] = tensor.cpu().numpy()
    return read


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
