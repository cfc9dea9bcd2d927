"""The steps of one rank: prompt chunks and the rows of the batch, alone or both in one pass over the weights.

`Steps.run` is the one place where a step's composition is decided: the chunks that the front has sent, and every row
that has room for its next token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampledToken, SampleParams
from kvmesh.engine.runner import Runner
from kvmesh.engine.sampling.history import History
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.node import messages as m
from kvmesh.node.pusher import Pusher
from kvmesh.rpc.errors import KvmeshError, NonFiniteLogits

log = logging.getLogger("kvmesh.rank")


@dataclass(slots=True)
class Row:
    """One running request. `step` is what the engine reads: its token is sampled, not yet computed, its position is
    the number of tokens whose KV lies in its pages. It is advanced in place, step by step."""

    handle: int
    step: DecodeInput
    max_tokens: int
    min_tokens: int
    stop: frozenset[int]
    stalled: bool = False


class Steps:
    """The running rows, and what is computed. All methods run on the rank's main thread."""

    def __init__(self, runner: Runner, pusher: Pusher, block_tokens: int, send: Callable[[m.ToFront], None]) -> None:
        self.running: dict[int, Row] = {}
        self._runner = runner
        self._pusher = pusher
        self._block_tokens = block_tokens
        self._send = send

    @property
    def has_work(self) -> bool:
        """Some row can go on."""
        return any(not row.stalled for row in self.running.values())

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, j: m.Join) -> None:
        """Into the batch."""
        sample = _params(j.sampling, j.token_index + 1, j.history)
        step = DecodeInput(j.next_token, j.context_tokens, j.pages, sample)
        stop = frozenset(j.stop_token_ids)
        self.running[j.handle] = Row(j.handle, step, j.max_tokens, j.min_tokens, stop)

    def grant(self, grant: m.Grant) -> None:
        """More room; nothing when the row has left."""
        row = self.running.get(grant.handle)
        if row is not None:
            row.step.pages = (*row.step.pages, *grant.pages)
            row.stalled = False

    def leave(self, handle: int) -> None:
        """Out of the batch: no later step touches its pages."""
        self.running.pop(handle, None)
        self._send(m.Left(handle))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def run(self, prefill: m.PrefillStep | None, between_layers: Callable[[], None]) -> None:
        """One step of what is there, if there is anything. `between_layers` is called while chunks are computed."""
        rows = self._runnable() if self.running else []
        if prefill is not None or rows:
            self._run(prefill, rows, between_layers)

    def _run(self, step: m.PrefillStep | None, rows: list[Row], between_layers: Callable[[], None]) -> None:
        """What fails is told to its own side. The others have lost nothing: computing them again writes the same
        bytes."""
        items = step.items if step is not None else ()
        pushed = tuple(item for item in items if item.push)

        def on_layer(layer: int) -> None:
            self._pusher.layer_written(pushed, layer)
            between_layers()

        start = time.monotonic_ns()
        context = sum(row.step.position for row in rows)
        self._pusher.step_begins(pushed)
        try:
            batch = DecodeBatch.of([row.step for row in rows])
            first, chosen = self._runner.step(_inputs(items), batch, on_layer if items else None)
            out = chosen.tokens()
        except NonFiniteLogits as error:
            bad = set(error.rows)
            bad_items = {item.handle for at, item in enumerate(items, len(rows)) if at in bad}
            self._rows_failed([row for at, row in enumerate(rows) if at in bad], error)
            self._items_failed(tuple(bad_items), error)
            if step is not None:
                rest = m.PrefillStep(step.step_id, tuple(i for i in items if i.handle not in bad_items))
                self._run(rest, [row for at, row in enumerate(rows) if at not in bad], between_layers)
            return
        except Exception as error:
            if self._runner.group.size > 1 and not isinstance(error, KvmeshError):
                raise  # the other ranks may not have failed: nobody knows where they stand
            if items and rows:  # whose fault it is shows when they run apart
                self._run(step, [], between_layers)
                self._run(None, rows, between_layers)
                return
            log.exception("%s step failed", "prefill" if items else "decode")
            self._rows_failed(rows, error)
            self._items_failed(tuple(item.handle for item in items), error)
            return
        end = time.monotonic_ns()
        if step is not None:
            sampled = tuple(
                m.Sampled(item.handle, token.token_id, _logprobs(token))
                for item, token in zip(items, first, strict=True)
                if token is not None
            )
            self._send(m.PrefillStepDone(step.step_id, start, end, sampled))
        if rows:
            tokens = tuple(self._advance(row, token) for row, token in zip(rows, out, strict=True))
            beside = sum(len(item.token_ids) for item in items)
            self._send(m.DecodeStepDone(start, end, len(rows), context, tokens, beside))

    def _items_failed(self, handles: tuple[int, ...], error: Exception) -> None:
        if handles:
            self._pusher.step_failed(handles)
            self._send(m.RankError(handles, f"prefill step: {error}"))

    def _rows_failed(self, rows: Sequence[Row], error: Exception) -> None:
        for row in rows:
            del self.running[row.handle]
        if rows:
            self._send(m.RankError(tuple(row.handle for row in rows), f"decode step: {error}"))

    def _runnable(self) -> list[Row]:
        """Rows whose next token has room; the others are reported once as stalled."""
        rows = []
        for row in self.running.values():
            if row.stalled:
                continue
            if row.step.position >= len(row.step.pages) * self._block_tokens:
                row.stalled = True
                self._send(m.Stalled(row.handle))
            else:
                rows.append(row)
        return rows

    def _advance(self, row: Row, token: SampledToken) -> m.Token:
        step = row.step
        index = step.sample.token_index
        step.token_id = token.token_id
        step.position += 1
        step.sample.token_index = index + 1
        finish = 0
        if token.token_id in row.stop and index + 1 >= row.min_tokens:
            finish = 1
        elif index + 1 >= row.max_tokens:
            finish = 2
        if finish:
            del self.running[row.handle]
        return m.Token(row.handle, token.token_id, index, finish, _logprobs(token))


def _inputs(items: Sequence[m.PrefillItem]) -> list[PrefillInput]:
    return [
        PrefillInput(i.token_ids, i.start, i.pages, _params(i.sample, 0, i.history) if i.sample else None)
        for i in items
    ]


def _params(sampling: m.Sampling, token_index: int, history: m.TokenHistory | None) -> SampleParams:
    return SampleParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        token_index=token_index,
        logprobs=sampling.logprobs if sampling.logprobs >= 0 else None,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        answered=sampling.answered,
        history=History(unpack_tokens(history.prompt), unpack_tokens(history.answer)) if history else None,
    )


def _logprobs(token: SampledToken) -> m.Logprobs | None:
    if token.logprob is None:
        return None
    return m.Logprobs(token.logprob, tuple(token.top))
