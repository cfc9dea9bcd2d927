"""A step of one rank computes prompt chunks or the rows of the batch, or both in one pass over the weights.

`Steps.run` is the one place where a step's composition is decided: the chunks that the front has sent, and every row
that has room for its next token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvmesh.engine.batch import PrefillInput, SampleParams
from kvmesh.engine.runner import NOBODY, Runner
from kvmesh.engine.sampling.history import History
from kvmesh.errors import KvmeshError, NonFiniteLogits
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.pusher import Pusher
from kvmesh.ranks.worker.rows import RunningRows, logprobs

log = logging.getLogger("kvmesh.rank")


class Steps:
    """Keeps the running rows, and runs the steps. All methods run on the rank's main thread."""

    def __init__(self, runner: Runner, pusher: Pusher, block_tokens: int, send: Callable[[m.ToFront], None]) -> None:
        self.rows = RunningRows(block_tokens)
        self._runner = runner
        self._pusher = pusher
        self._send = send

    @property
    def has_work(self) -> bool:
        """Whether some row can go on."""
        return self.rows.live > 0

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, j: m.Join) -> None:
        """Adds a row to the batch."""
        self.rows.join(j, _params(j.sampling, j.history))

    def grant(self, grant: m.Grant) -> None:
        """Gives a row more pages; does nothing when the row has left."""
        self.rows.grant(grant.handle, grant.pages)

    def leave(self, handle: int) -> None:
        """Takes a row out of the batch: no later step touches its pages."""
        self.rows.leave(handle)
        self._send(m.Left(handle))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def run(self, prefill: m.PrefillStep | None, between_layers: Callable[[], None]) -> None:
        """Runs one step of what there is, if anything. `between_layers` is called while chunks are computed."""
        for handle in self.rows.stall():
            self._send(m.Stalled(handle))
        if prefill is not None or self.rows.live:
            self._run(prefill, self.rows.live > 0, between_layers)

    def _run(self, step: m.PrefillStep | None, decode: bool, between_layers: Callable[[], None]) -> None:
        """Runs one step, with the live rows if `decode`. A failure is reported to the side, prefill or decode, whose
        requests failed. The others lose nothing: computing them again writes the same bytes."""
        items = step.items if step is not None else ()
        pushed = tuple(item for item in items if item.push)

        def on_layer(layer: int) -> None:
            self._pusher.layer_written(pushed, layer)
            between_layers()

        start = time.monotonic_ns()
        batch = self.rows.batch() if decode else NOBODY
        rows = len(batch.pages)
        self._pusher.step_begins(pushed)
        try:
            first, chosen = self._runner.step(_inputs(items), batch, on_layer if items else None)
        except NonFiniteLogits as error:
            bad = set(error.rows)
            bad_items = {item.handle for at, item in enumerate(items, rows) if at in bad}
            self._rows_failed([at for at in sorted(bad) if at < rows], error)
            self._items_failed(tuple(bad_items), error)
            if step is not None:
                rest = m.PrefillStep(step.step_id, tuple(i for i in items if i.handle not in bad_items))
                self._run(rest, decode, between_layers)
            return
        except Exception as error:
            if self._runner.group.size > 1 and not isinstance(error, KvmeshError):
                raise  # the other ranks may not have failed, so it is unknown where they stand
            if items and rows:  # which of the two fails shows when they run apart
                self._run(step, False, between_layers)
                self._run(None, True, between_layers)
                return
            log.exception("%s step failed", "prefill" if items else "decode")
            self._rows_failed(range(rows), error)
            self._items_failed(tuple(item.handle for item in items), error)
            return
        end = time.monotonic_ns()
        if step is not None:
            sampled = tuple(
                m.Sampled(item.handle, token.token_id, logprobs(token))
                for item, token in zip(items, first, strict=True)
                if token is not None
            )
            self._send(m.PrefillStepDone(step.step_id, start, end, sampled))
        if rows:
            tokens = self.rows.advance(chosen)
            beside = sum(len(item.token_ids) for item in items)
            self._send(m.DecodeStepDone(start, end, rows, int(batch.positions.sum()), tokens, beside))

    def _items_failed(self, handles: tuple[int, ...], error: Exception) -> None:
        if handles:
            self._pusher.step_failed(handles)
            self._send(m.RankError(handles, f"prefill step: {error}"))

    def _rows_failed(self, rows: Sequence[int], error: Exception) -> None:
        handles = tuple(self.rows.handle(row) for row in rows)
        for handle in handles:
            self.rows.leave(handle)
        if handles:
            self._send(m.RankError(handles, f"decode step: {error}"))


def _inputs(items: Sequence[m.PrefillItem]) -> list[PrefillInput]:
    return [
        PrefillInput(i.token_ids, i.start, i.pages, _params(i.sample, i.history) if i.sample else None) for i in items
    ]


def _params(sampling: m.Sampling, history: m.TokenHistory | None) -> SampleParams:
    return SampleParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        logprobs=sampling.logprobs if sampling.logprobs >= 0 else None,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        answered=sampling.answered,
        history=History(unpack_tokens(history.prompt), unpack_tokens(history.answer)) if history else None,
    )
