"""A step of one rank computes prompt chunks or the rows of the batch, or both in one pass over the weights.

`Steps.run` is the one place where a step's composition is decided: the chunks that the front has sent, and every row
that has room for its next token.

On a device that runs behind the host a step of rows alone is launched before the tokens of the one before it are read:
it takes them on the device (docs/internals/engine.md). At most one step is in flight when commands are taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvmesh.drafts.drafter import Draft
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.step_share import NO_COSTS, DraftCosts, StepShare
from kvmesh.engine.batch import Chosen, DecodeBatch, PrefillInput, SampleParams
from kvmesh.engine.runner import NOBODY, Runner
from kvmesh.engine.sampler import TokensInFlight
from kvmesh.engine.sampling.grammar import GrammarCompiler
from kvmesh.engine.sampling.history import History
from kvmesh.engine.sampling.prompt_scores import TokenScores
from kvmesh.errors import ContextTooLong, GrammarFailed, InternalError, InvalidRequest, KvmeshError, NonFiniteLogits
from kvmesh.kvcache.cache_groups import CacheGroup
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.micro_batches import MicroBatches
from kvmesh.ranks.worker.pusher import Pusher
from kvmesh.ranks.worker.rows import LaunchedRows, PageHolds, RunningRows, logprobs
from kvmesh.ranks.worker.snapshots import KeptStates, Roles, Snapshots
from kvmesh.ranks.worker.tables import GroupTables, tables_of
from kvmesh.ranks.worker.verification import RowVariants, expand, note_accepted, sampled_at, until_stop

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvmesh.rank")


Launch = Callable[[], TokensInFlight]


@dataclass(slots=True, eq=False)
class StepInFlight:
    """Is a step of rows that was launched and whose tokens have not been read. `tokens` raises what made it fail."""

    tokens: Launch
    batch: DecodeBatch
    rows: LaunchedRows
    launched_ns: int
    roles: Sequence[Roles] = ()  # of each row, where the model has states

    def may_precede(self, batch: DecodeBatch) -> bool:
        """Whether the step of `batch` can be sampled before this one's tokens are known: the sampler reads histories on
        the host when rows come and go. Those with a grammar are in either step or none, and no row but they begins
        anew with them."""
        free, before = _without_grammar(batch.params), _without_grammar(self.batch.params)
        return free == before or all(p.history is None for p in free)


def _without_grammar(params: Sequence[SampleParams]) -> list[SampleParams]:
    return [p for p in params if p.grammar is None]


class Steps:
    """Keeps the running rows, and runs the steps. `begin` gives the device a step for which nobody waits, and returns
    what waits until the device has begun it; None: every step is waited for. With `groups`, those of the model, pages
    are named by cache group. Without `grammars` no request has one. All methods run on the rank's main thread.

    A step over states changes them in place, so it is never computed again: what is not finite fails alone, and any
    other error fails all that were in the step, whose states are lost. Nor is a step of a pipeline, of which only the
    last stage sees what is not finite."""

    def __init__(
        self,
        runner: Runner,
        pusher: Pusher,
        block_tokens: int,
        send: Callable[[m.ToFront], None],
        begin: Callable[[Launch], Launch] | None = None,
        groups: Sequence[CacheGroup] = (),
        grammars: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self._grammars = grammars
        self.batches = MicroBatches(runner.mesh.axes.pp, lambda: RunningRows(block_tokens, groups))
        self.rows = self.batches.all[0]  # of the step that runs, or ran last
        self._groups = tuple(groups)
        self._snapshots = Snapshots(runner, groups, block_tokens)
        runner.tolerant |= bool(self._snapshots)
        self.begin = begin
        self._runner = runner
        self._pusher = pusher
        self._send = send
        self._flight: StepInFlight | None = None
        self._holds: PageHolds[m.Left | m.RankError] = PageHolds()
        self._ended_ns = 0
        self._speculator = speculator
        self._share = StepShare()
        self._wants_hidden = speculator is not None and speculator.needs_hidden
        self._variants = RowVariants(speculator.most if speculator is not None else 0)

    @property
    def has_work(self) -> bool:
        """Whether some row can go on, or has gone on and nobody knows with which token."""
        return self.batches.has_work or self._flight is not None

    @property
    def draft_costs(self) -> DraftCosts:
        """What a token of a draft costs in a step of the live rows; nothing where no drafts are made."""
        if self._speculator is None:
            return NO_COSTS
        return DraftCosts(self._share.ppm, self._speculator.drafting.ppm(self._share.plain_ns))

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, j: m.Join) -> None:
        """Adds a row to the batch."""
        self.batches.for_join(j.handle).join(j, self._params(j.sampling, j.history))
        if self._speculator is not None and j.said is not None:
            self._speculator.begin(j.handle, unpack_tokens(j.said.prompt), unpack_tokens(j.said.answer))
        if self._snapshots:
            self._snapshots.save_at_borders(np.array([j.context_tokens]), [tables_of(self._groups, j.groups).roles])

    def grant(self, grant: m.Grant) -> None:
        """Gives a row more pages; does nothing when the row has left."""
        self.batches.of(grant.handle).grant(grant.handle, grant.pages, grant.groups)

    def drop(self, message: m.DropPages) -> None:
        """Takes pages from a row that no later step reads; does nothing when the row has left."""
        self.batches.of(message.handle).drop(message.handle, message.group, message.first)

    def leave(self, handle: int) -> None:
        """Takes a row out of the batch: no later step touches its pages. Left waits for a step that has it."""
        self.batches.of(handle, leaves=True).leave(handle)
        self._forget_drafts(handle)
        if self._holds.out(handle, m.Left(handle)):
            self._send(m.Left(handle))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def run(
        self, prefill: m.PrefillStep | None, between_layers: Callable[[], None], costs: DraftCosts | None = None
    ) -> None:
        """Runs one step of what there is, if anything, or launches it and reads the one before. `between_layers` is
        called while chunks are computed. A step that may verify drafts is not launched ahead, since these follow from
        the tokens before; `costs` are the leader's (None: this rank's own)."""
        costs = self.draft_costs if costs is None else costs
        drafts = False
        if self._speculator is not None and prefill is None:
            drafts = self._speculator.hopes(self.rows.handles(), costs)
        if self.begin is not None and prefill is None and not drafts:
            self._run_ahead(self.begin)
            return
        self.settle()
        self.rows = self.batches.take_turn()
        for handle in self.rows.stall():
            self._send(m.Stalled(handle))
        if drafts and self._run_drafted(costs, between_layers):
            return
        if prefill is not None or self.rows.live:
            self._run(prefill, self.rows.live > 0, between_layers)
        else:
            self._runner.serve(between_layers)

    def _run(self, step: m.PrefillStep | None, decode: bool, between_layers: Callable[[], None]) -> None:
        """Runs one step, with the live rows if `decode`. A failure is reported to the side, prefill or decode, whose
        requests failed. The others lose nothing: computing them again writes the same bytes."""
        items = step.items if step is not None else ()
        pushed = tuple(item for item in items if item.push)

        def on_layer(layer: int) -> None:
            self._pusher.layer_written(pushed, layer)
            between_layers()

        scores: list[tuple[int, m.PromptScores]] = []

        def on_scores(at: int, found: TokenScores) -> None:
            if self._runner.mesh.speaks:  # every rank of a stage has computed the same
                scores.append((items[at].handle, packed_scores(found)))

        start = time.monotonic_ns()
        batch = self.rows.batch() if decode else NOBODY
        rows, roles = len(batch.positions), self.rows.live_roles()
        named: list[GroupTables] | None = None
        late: list[Callable[[], Chosen]] = []
        hidden: list[torch.Tensor] = []
        handles = self.rows.handles() if decode and self._wants_hidden else ()
        on_late = late.append if len(self.batches.all) > 1 else None
        self._pusher.step_begins(pushed)
        try:
            named = [tables_of(self._groups, item.groups) for item in items] if self._groups else []
            if self._snapshots:
                self._snapshots.load([tables.roles for tables in named])
            wanted = on_scores if any(item.scores >= 0 for item in items) else None
            # Ranks of experts may compute prompts of others in this step.
            written = on_layer if items or self._runner.rounds is not None else None
            inputs = self._inputs(items, named)
            on_hidden = hidden.append if handles else None
            first, chosen = self._runner.step(inputs, batch, written, wanted, on_late, on_hidden)
            if self._snapshots:
                self._snapshots.save([tables.roles for tables in named])
                self._snapshots.save_at_borders(batch.positions + 1, roles)
        except NonFiniteLogits as error:
            bad = set(error.rows)
            bad_items = {item.handle for at, item in enumerate(items, rows) if at in bad}
            self._rows_failed([self.rows.handle(at) for at in sorted(bad) if at < rows], error)
            self._items_failed(tuple(bad_items), error)
            if step is not None:
                rest = m.PrefillStep(step.step_id, tuple(i for i in items if i.handle not in bad_items))
                self._run(rest, decode, between_layers)
            return
        except Exception as error:
            if self._runner.mesh.world.size > 1 and not isinstance(error, KvmeshError):
                raise  # the other ranks may not have failed, so it is unknown where they stand
            nothing_done = named is None or isinstance(error, InvalidRequest | ContextTooLong)
            if items and rows and (nothing_done or not self._snapshots):  # which of the two fails shows apart
                self._run(step, False, between_layers)
                self._run(None, True, between_layers)
                return
            log.exception("%s step failed", "prefill" if items else "decode")
            self._rows_failed([self.rows.handle(row) for row in range(rows)], error)
            self._items_failed(tuple(item.handle for item in items), error)
            return
        end = time.monotonic_ns()
        if step is not None:
            answers = [(item, token) for item, token in zip(items, first, strict=True) if token is not None]
            # Only a step that is not computed again answers what is not finite by -1.
            bad_items = {item.handle for item, token in answers if token.token_id < 0 and not token.fault}
            self._items_failed(tuple(bad_items), NonFiniteLogits("logits are not finite"))
            for item, token in answers:
                if token.fault:
                    self._items_failed((item.handle,), GrammarFailed(token.fault))
            sampled = tuple(
                m.Sampled(item.handle, token.token_id, logprobs(token))
                for item, token in answers
                if token.token_id >= 0
            )
            busy = self._runner.busy(end)
            self._send(m.PrefillStepDone(step.step_id, start, end, sampled, tuple(scores), *busy))
        if late:
            self._await_tokens(self.rows, late[0])
        elif rows:
            lost: tuple[int, ...] = ()
            faults: dict[int, str] = {}
            if chosen.token_ids.min() < 0:
                step_rows = self.rows.launched()
                faults = _faults(step_rows.handles, chosen)
                made = self.rows.collected(step_rows, chosen)
                tokens, lost = made.tokens, made.bad
            else:
                tokens = self.rows.advance(chosen)
            beside, context = sum(len(item.token_ids) for item in items), int(batch.positions.sum())
            since, others = self.batches.step_ended(self.rows, start, end)
            if others:  # they are of the batch, too, and their contexts taken to be as long
                context += context * others // rows
            self._send(m.DecodeStepDone(start, end, rows + others, context, tokens, beside, since_ns=since))
            self._rows_lost(lost, faults)
            if self._speculator is not None:
                behind = {handle: hidden[0][row : row + 1] for row, handle in enumerate(handles)} if hidden else {}
                self._tell_drafters(tokens, end - start if step is None else 0, behind)

    # ── drafts ───────────────────────────────────────────────────────────────────────────────────

    def _run_drafted(self, costs: DraftCosts, between_layers: Callable[[], None]) -> bool:
        """Runs a step that verifies drafts of the live rows; returns False, and does nothing, where there is none."""
        assert self._speculator is not None
        rows, handles, began = self.rows, self.rows.handles(), time.monotonic_ns()
        found = self._speculator.propose(handles, rows.room_for_drafts(bool(self._snapshots)), costs)
        if not any(one.draft.tokens for one in found):
            return False
        batch, roles, start = rows.batch(), rows.live_roles(), time.monotonic_ns()
        drafting_ns = self._speculator.drafting_ns
        drafts, variants = [], []
        for row, one in enumerate(found):
            draft = until_stop(one.draft.tokens, rows.stops(row))
            behind = self._variants.of(handles[row], batch.params[row], draft) if draft else []
            drafts.append(list(draft[: len(behind)]))
            variants.append(behind)
        step = expand(batch, drafts, variants)
        hidden: list[torch.Tensor] = []
        drafted = [roles[row] for row, draft in enumerate(drafts) if draft] if self._snapshots else []
        states = self._snapshots.keep(drafted)
        self._pusher.step_begins(())
        try:
            wanted = hidden.append if self._wants_hidden else None
            _, chosen = self._runner.step((), step.batch, on_hidden=wanted)
            made = sampled_at(chosen, step.firsts, drafts)
            if states is not None:
                self._roll_back(states, batch, roles, drafts, made)
        except NonFiniteLogits:  # some row's, perhaps behind a draft alone: computed again, it shows whose
            self._run(None, True, between_layers)
            return True
        except Exception as error:
            if self._runner.mesh.world.size > 1 and not isinstance(error, KvmeshError):
                raise  # the other ranks may not have failed, so it is unknown where they stand
            log.exception("decode step failed")
            self._rows_failed(handles, error)
            return True
        end = time.monotonic_ns()
        scored = [
            [logprobs(token) if (token := chosen.scored.get(first + at)) else None for at in range(len(own))]
            for first, own in zip(step.firsts, made, strict=True)
        ]
        faults = {
            handle: token.fault
            for handle, first in zip(handles, step.firsts, strict=True)
            if (token := chosen.scored.get(first)) is not None and token.fault
        }
        said, counts = rows.advance_by(made, scored)
        if self._snapshots:
            self._snapshots.save_at_borders(batch.positions + np.array(counts), roles)
        drafters = self._speculator.drafters
        computed, held = [0] * len(drafters), [0] * len(drafters)
        ended = {*said.ended, *said.bad}
        for row, handle in enumerate(handles):
            own, draft = made[row][: counts[row]], drafts[row]
            if draft:
                kept = max(0, len(made[row]) - 1)
                computed[found[row].by] += len(draft)
                held[found[row].by] += kept
                self._speculator.verified(
                    handle, found[row]._replace(draft=Draft(draft, found[row].draft.strength)), kept
                )
            if handle in ended:
                self._forget_drafts(handle)
                continue
            note_accepted(batch.params[row], own)
            first = step.firsts[row]
            self._speculator.extend(handle, own, hidden[0][first : first + len(own)] if hidden else None)
        context = int(batch.positions.sum())
        drafts_told = zip((drafter.name for drafter in drafters), computed, held, strict=True)
        self._send(m.DecodeStepDone(start, end, len(handles), context, said.tokens, drafts=tuple(drafts_told)))
        self._rows_lost(said.bad, faults)
        took = time.monotonic_ns() - began - drafting_ns
        self._share.add(len(step.batch.positions) - len(handles), took)
        return True

    def _roll_back(
        self,
        states: KeptStates,
        batch: DecodeBatch,
        roles: Sequence[Roles],
        drafts: Sequence[Sequence[int]],
        made: Sequence[Sequence[int]],
    ) -> None:
        """Gives rows whose draft was not kept whole the states behind what was kept: those before the step, moved on by
        these tokens once more."""
        drafted = [row for row, draft in enumerate(drafts) if draft]
        cut = [at for at, row in enumerate(drafted) if 0 < len(made[row]) <= len(drafts[row])]
        if not cut:
            return
        self._snapshots.put_back(states, cut)
        again = []
        for row in (drafted[at] for at in cut):
            tokens = (int(batch.token_ids[row]), *drafts[row][: len(made[row]) - 1])
            groups = [table[row] for table in batch.groups]
            again.append(PrefillInput(tokens, int(batch.positions[row]), groups=groups))
        self._runner.step(again, NOBODY)

    def _tell_drafters(self, tokens: Sequence[m.Token], took_ns: int, hidden: Mapping[int, torch.Tensor]) -> None:
        """Tells of the tokens of a step without drafts, one a row, and of the target's `hidden [1, width]` of each row
        where they are known; `took_ns` 0: its time says nothing."""
        assert self._speculator is not None
        for token in tokens:
            if token.finish:
                self._forget_drafts(token.handle)
            else:
                self._speculator.extend(token.handle, (token.token_id,), hidden.get(token.handle))
        if took_ns:
            self._share.add(0, took_ns)

    def _forget_drafts(self, handle: int) -> None:
        if self._speculator is not None:
            self._speculator.end(handle)
            self._variants.end(handle)

    def _await_tokens(self, rows: RunningRows, tokens: Callable[[], Chosen]) -> None:
        """Has the rows go on with the tokens that the last stage chooses, before their micro-batch's next step. It
        tells the front of them."""

        def apply() -> None:
            chosen = tokens()
            if chosen.token_ids.min() < 0:
                rows.collected(rows.launched(), chosen)
            else:
                rows.advance(chosen)

        self.batches.postpone(rows, apply)

    # ── steps in flight ──────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Reads the tokens of the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._collect(flight, None)

    def _run_ahead(self, begin: Callable[[Launch], Launch]) -> None:
        """Launches the next step of the rows, then reads the one before."""
        stalled = self.rows.stall()
        resting = self.rows.rest() if self._flight is not None else []
        if self._flight is not None and not (self.rows.live and self._flight.may_precede(self.rows.batch())):
            self.settle()
            self.rows.wake(resting)
            resting = []
        before = self._flight
        self._flight = self._launch(begin, before) if self.rows.live else None
        self.rows.wake(resting)
        if before is not None:
            self._collect(before, self._flight)
        for handle in stalled:  # once the front knows the token before, which may have been the last
            if handle in self.rows:
                self._send(m.Stalled(handle))

    def _launch(self, begin: Callable[[Launch], Launch], before: StepInFlight | None) -> StepInFlight | None:
        """Launches a step of the live rows; None if it failed."""
        batch, launched_ns = self.rows.batch(), time.monotonic_ns()
        source, roles = self.rows.source(), self.rows.live_roles()

        def launch() -> TokensInFlight:
            if self._snapshots:
                self._snapshots.save_at_borders(batch.positions, roles)
            if before is None:
                return self._runner.launch(batch)
            return self._runner.launch(batch, before.tokens(), source)

        try:
            tokens = begin(launch)
        except Exception as error:
            log.exception("decode step failed")
            self._rows_failed([self.rows.handle(row) for row in range(self.rows.live)], error)
            return None
        rows = self.rows.launched()
        self._holds.launched(rows.handles)
        return StepInFlight(tokens, batch, rows, launched_ns, roles)

    def _collect(self, flight: StepInFlight, following: StepInFlight | None) -> None:
        """Reads what a step has made and reports it. Rows that end here are in the `following` step in vain: their
        pages are given back when that is over."""
        rows, next_rows = flight.rows, following.rows if following is not None else None
        try:
            chosen = flight.tokens().result()
            if self._snapshots:
                self._save_last(flight, following)
        except Exception as error:
            log.exception("decode step failed")
            handles = [handle for handle in rows.handles if handle not in rows.vain]
            if next_rows is not None:
                next_rows.vain.update(handles)
            over = self._holds.over()
            self._rows_failed(handles, error)
        else:
            start, end = max(flight.launched_ns, self._ended_ns), time.monotonic_ns()
            self._ended_ns = end
            faults = _faults(rows.handles, chosen)
            made = self.rows.collected(rows, chosen, next_rows)
            over = self._holds.over()
            held = tuple(handle for handle in made.ended if not self._holds.out(handle, m.Left(handle)))
            context = int(flight.batch.positions.sum())
            self._send(m.DecodeStepDone(start, end, len(rows.handles), context, made.tokens, held=held))
            self._rows_lost(made.bad, faults)
            if self._speculator is not None:
                self._tell_drafters(made.tokens, end - start, {})
        for message in over:
            self._send(message)

    def _save_last(self, flight: StepInFlight, following: StepInFlight | None) -> None:
        """Saves the states of rows at a border whose last step was this one, as far as is known. For those in the
        `following` one that was done before it was launched."""
        others = flight.rows.vain.union(following.rows.handles if following is not None else ())
        last = [at for at, handle in enumerate(flight.rows.handles) if handle not in others]
        self._snapshots.save_at_borders(flight.batch.positions[last] + 1, [flight.roles[at] for at in last])

    def _items_failed(self, handles: tuple[int, ...], error: Exception) -> None:
        if handles:
            self._pusher.step_failed(handles)
            self._send(m.RankError(handles, f"prefill step: {error}", _own_code(error)))

    def _rows_lost(self, handles: Iterable[int], faults: Mapping[int, str]) -> None:
        """Reports rows that a step has made no token for: their grammar failed, which `faults` say by handle, or their
        logits were not finite."""
        handles = tuple(handles)
        for handle in handles:
            if handle in faults:
                self._rows_failed((handle,), GrammarFailed(faults[handle]))
        if rest := [handle for handle in handles if handle not in faults]:
            self._rows_failed(rest, NonFiniteLogits("logits are not finite"))

    def _rows_failed(self, handles: Iterable[int], error: Exception) -> None:
        """Takes rows out of the batch; those that the step in flight has are reported when it is over."""
        text, code, free = f"decode step: {error}", _own_code(error), []
        for handle in handles:
            self.rows.leave(handle)
            self._forget_drafts(handle)
            if self._holds.out(handle, m.RankError((handle,), text, code)):
                free.append(handle)
        if free:
            self._send(m.RankError(tuple(free), text, code))

    # ── what the engine is asked ─────────────────────────────────────────────────────────────────

    def _inputs(self, items: Sequence[m.PrefillItem], named: Sequence[GroupTables] = ()) -> list[PrefillInput]:
        """Returns what the runner is asked; `named` are the items' tables of a model that is kept by cache groups."""
        inputs = [
            PrefillInput(i.token_ids, i.start, i.pages, self._params(i.sample, i.history) if i.sample else None)
            for i in items
        ]
        for one, tables in zip(inputs, named, strict=False):
            one.groups = tables.tables
        for one, item in zip(inputs, items, strict=True):
            if item.scores >= 0:
                one.targets = item.token_ids[1:] + ((item.next_token,) if item.next_token >= 0 else ())
                one.top = item.scores
        return inputs

    def _params(self, sampling: m.Sampling, history: m.TokenHistory | None) -> SampleParams:
        params = SampleParams(
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
        )
        answer = unpack_tokens(history.answer) if history is not None else ()
        if history is not None and params.penalised:
            params.history = History(unpack_tokens(history.prompt), answer)
        if sampling.grammar:
            if self._grammars is None:
                raise InternalError("this rank compiles no grammars")
            params.grammar = self._grammars.begin(sampling.grammar, answer, may_end=sampling.may_end)
        return params


def _faults(handles: Sequence[int], chosen: Chosen) -> dict[int, str]:
    """Says by handle why a row's grammar has no token."""
    return {handles[row]: token.fault for row, token in chosen.scored.items() if token.fault}


def packed_scores(scores: TokenScores) -> m.PromptScores:
    """Returns log-probabilities of a prompt's tokens in the form in which the front gets them."""
    return m.PromptScores(
        scores.logprobs.astype("<f4").tobytes(),
        scores.ranks.astype("<u4").tobytes(),
        scores.top_ids.astype("<u4").tobytes(),
    )


def _own_code(error: Exception) -> str:
    """Returns the name of an error that is the requests' own."""
    return error.code if isinstance(error, GrammarFailed) else ""
