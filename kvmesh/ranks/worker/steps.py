"""A step of one rank computes prompt chunks or the rows of the batch, or both in one pass over the weights.

`Steps.run` is the one place where a step's composition is decided: the chunks that the front has sent, and every row
that has room for its next token.

On a device that runs behind the host a step of rows alone is launched before the tokens of the one before it are read:
it takes them on the device (docs/internals/engine.md). At most one step is in flight when commands are taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvmesh.drafts.drafter import Draft
from kvmesh.drafts.speculator import DraftOf, Speculator
from kvmesh.drafts.step_share import StepShare
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
from kvmesh.ranks.worker.verification import (
    DraftedBatch,
    RowVariants,
    expand,
    note_accepted,
    sampled_at,
    until_stop,
)

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


class DraftedRows(NamedTuple):
    """Is the rows of a step with their drafts: of each row what was proposed (`found`) and what of it is computed
    (`drafts`), its inputs without a draft (`batch`), and the batch of all of them (`wide`)."""

    handles: list[int]
    found: list[DraftOf]
    drafts: list[list[int]]
    batch: DecodeBatch
    wide: DraftedBatch
    began_ns: int

    @property
    def tokens(self) -> int:
        """How many tokens are computed as drafts."""
        return sum(map(len, self.drafts))


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
    def share_ppm(self) -> int:
        """What one more token adds to a step of the live rows, in millionths; 0 where no drafts are made."""
        return 0 if self._speculator is None else self._share.ppm

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
        self, prefill: m.PrefillStep | None, between_layers: Callable[[], None], share_ppm: int | None = None
    ) -> None:
        """Runs one step of what there is, if anything, or launches it and reads the one before. `between_layers` is
        called while chunks are computed. A step that may verify drafts is not launched ahead, since these follow from
        the tokens before; `share_ppm` is the leader's (None: this rank's own)."""
        share_ppm = self.share_ppm if share_ppm is None else share_ppm
        hopes: bool | None = None  # where it is known already
        if self.begin is not None and prefill is None:
            # Where no row has room for a draft nothing is worth the wait for the step in flight.
            hopes = any(self.rows.room_for_drafts(bool(self._snapshots))) and self._hopes(share_ppm)
            if not hopes:
                self._run_ahead(self.begin)
                return
        self.settle()
        self.rows = self.batches.take_turn()
        for handle in self.rows.stall():
            self._send(m.Stalled(handle))
        hopes = self._hopes(share_ppm) if hopes is None else hopes
        drafted = self._proposed(share_ppm) if hopes else None
        if prefill is not None or self.rows.live:
            self._run(prefill, self.rows.live > 0, between_layers, drafted)
        else:
            self._runner.serve(between_layers)

    def _run(
        self,
        step: m.PrefillStep | None,
        decode: bool,
        between_layers: Callable[[], None],
        drafted: DraftedRows | None = None,
    ) -> None:
        """Runs one step, with the live rows if `decode`, or with these and their drafts, `drafted`. A failure is
        reported to the side, prefill or decode, whose requests failed. The others lose nothing: computing them again
        writes the same bytes."""
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
        batch = drafted.batch if drafted is not None else self.rows.batch() if decode else NOBODY
        rows, roles = len(batch.positions), self.rows.live_roles()
        named: list[GroupTables] | None = None
        late: list[Callable[[], Chosen]] = []
        hidden: list[torch.Tensor] = []
        made: list[list[int]] = []
        handles = self.rows.handles() if decode and self._wants_hidden else ()
        on_late = late.append if len(self.batches.all) > 1 else None
        with_draft = [roles[row] for row, draft in enumerate(drafted.drafts) if draft] if drafted and roles else []
        states = self._snapshots.keep(with_draft)
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
            wide = batch if drafted is None else drafted.wide.batch
            first, chosen = self._runner.step(inputs, wide, written, wanted, on_late, on_hidden)
            if self._snapshots:
                self._snapshots.save([tables.roles for tables in named])
                if drafted is None:
                    self._snapshots.save_at_borders(batch.positions + 1, roles)
            if drafted is not None and not late:
                made = sampled_at(chosen, drafted.wide.firsts, drafted.drafts)
                if states is not None:
                    self._roll_back(states, batch, roles, drafted.drafts, made)
        except NonFiniteLogits as error:
            if drafted is not None:  # some row's, perhaps behind a draft alone: computed again, it shows whose
                self._run(step, decode, between_layers)
                return
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
            self._await_tokens(self.rows, late[0], drafted)
        elif rows:
            beside, context = sum(len(item.token_ids) for item in items), int(batch.positions.sum())
            drafts: tuple[tuple[str, int, int], ...] = ()
            lost: tuple[int, ...] = ()
            faults: dict[int, str] = {}
            if drafted is not None:
                said, counts = self.rows.advance_by(made, _scores_of(chosen, drafted.wide.firsts, made))
                tokens, lost, faults = said.tokens, said.bad, _faults_of(chosen, drafted)
                if self._snapshots:
                    self._snapshots.save_at_borders(batch.positions + np.array(counts), roles)
                for row, own in enumerate(made):
                    note_accepted(batch.params[row], own[: counts[row]])
                drafts = self._drafts_told(drafted, made)
                learn = partial(self._learn, drafted, made, counts, {*said.ended, *said.bad}, hidden)
            else:
                if chosen.token_ids.min() < 0:
                    step_rows = self.rows.launched()
                    faults = _faults(step_rows.handles, chosen)
                    collected = self.rows.collected(step_rows, chosen)
                    tokens, lost = collected.tokens, collected.bad
                else:
                    tokens = self.rows.advance(chosen)
                behind = {handle: hidden[0][row : row + 1] for row, handle in enumerate(handles)} if hidden else {}
                learn = partial(self._tell_drafters, tokens, lost, behind)
            since, others = self.batches.step_ended(self.rows, start, end)
            if others:  # they are of the batch, too, and their contexts taken to be as long
                context += context * others // rows
            self._send(
                m.DecodeStepDone(start, end, rows + others, context, tokens, beside, since_ns=since, drafts=drafts)
            )
            self._rows_lost(lost, faults)
            if self._speculator is None:
                pass
            elif len(self.batches.all) > 1:  # stages draft alike: they learn at the same place among steps and commands
                self.batches.postpone(self.rows, learn)
            else:
                learn()
        if self._speculator is not None and rows and step is None:  # a step with a prompt does not tell what rows cost
            took_ns = end - start if drafted is None else time.monotonic_ns() - drafted.began_ns
            self._share.add(0 if drafted is None else drafted.tokens, took_ns)

    # ── drafts ───────────────────────────────────────────────────────────────────────────────────

    def _hopes(self, share_ppm: int) -> bool:
        """Whether a draft for any of the rows may be worth its cost."""
        return self._speculator is not None and self._speculator.hopes(self.rows.handles(), share_ppm)

    def _proposed(self, share_ppm: int) -> DraftedRows | None:
        """Returns what `_propose` does. Where that fails the live rows do, as in any other step; it raises where other
        ranks may not have failed, for then it is unknown where they stand."""
        try:
            return self._propose(share_ppm)
        except Exception as error:
            if self._runner.mesh.world.size > 1 and not isinstance(error, KvmeshError):
                raise
            log.exception("drafts failed")
            self._rows_failed(self.rows.handles(), error)
            return None

    def _propose(self, share_ppm: int) -> DraftedRows | None:
        """Returns the live rows with their drafts; None where there is no draft."""
        assert self._speculator is not None
        rows, handles, began_ns = self.rows, self.rows.handles(), time.monotonic_ns()
        batch, room = rows.batch(), rows.room_for_drafts(bool(self._snapshots))
        if len(self.batches.all) > 1:  # only the last stage knows what a grammar forbids
            room = [0 if params.grammar is not None else most for params, most in zip(batch.params, room, strict=True)]
        found = self._speculator.propose(handles, room, share_ppm)
        drafts, variants = [], []
        for row, one in enumerate(found):
            draft = until_stop(one.draft.tokens, rows.stops(row))
            behind = self._variants.of(handles[row], batch.params[row], draft) if draft else []
            drafts.append(list(draft[: len(behind)]))
            variants.append(behind)
        if not any(drafts):
            return None
        return DraftedRows(handles, found, drafts, batch, expand(batch, drafts, variants), began_ns)

    def _drafts_told(self, drafted: DraftedRows, made: Sequence[Sequence[int]]) -> tuple[tuple[str, int, int], ...]:
        """Returns how many tokens of each drafter were computed and kept, as DecodeStepDone has it."""
        assert self._speculator is not None
        drafters = self._speculator.drafters
        computed, kept = [0] * len(drafters), [0] * len(drafters)
        for one, draft, own in zip(drafted.found, drafted.drafts, made, strict=True):
            computed[one.by] += len(draft)
            kept[one.by] += max(0, len(own) - 1)
        return tuple(zip((drafter.name for drafter in drafters), computed, kept, strict=True))

    def _learn(
        self,
        drafted: DraftedRows,
        made: Sequence[Sequence[int]],
        counts: Sequence[int],
        gone: Collection[int],
        hidden: Sequence[torch.Tensor] = (),
    ) -> None:
        """Tells the drafters what became of drafts: the tokens `made`, of which `counts` are the answers', the rows
        that are `gone`, and what the target has computed behind each token of the step, if that is known."""
        assert self._speculator is not None
        for row, handle in enumerate(drafted.handles):
            draft, one = drafted.drafts[row], drafted.found[row]
            if draft:
                computed = one._replace(draft=Draft(draft, one.draft.strength))
                self._speculator.verified(handle, computed, max(0, len(made[row]) - 1))
            if handle in gone:
                self._forget_drafts(handle)
                continue
            first, own = drafted.wide.firsts[row], made[row][: counts[row]]
            self._speculator.extend(handle, own, hidden[0][first : first + len(own)] if hidden else None)

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

    def _tell_drafters(
        self, tokens: Sequence[m.Token], lost: Iterable[int], hidden: Mapping[int, torch.Tensor]
    ) -> None:
        """Tells of the tokens of a step without drafts, one a row, of rows that were `lost` in it, and of the target's
        `hidden [1, width]` of each row where they are known."""
        assert self._speculator is not None
        for token in tokens:
            if token.finish:
                self._forget_drafts(token.handle)
            else:
                self._speculator.extend(token.handle, (token.token_id,), hidden.get(token.handle))
        for handle in lost:
            self._forget_drafts(handle)

    def _forget_drafts(self, handle: int) -> None:
        if self._speculator is not None:
            self._speculator.end(handle)
            self._variants.end(handle)

    def _await_tokens(self, rows: RunningRows, tokens: Callable[[], Chosen], drafted: DraftedRows | None) -> None:
        """Has the rows go on with the tokens that the last stage chooses, before their micro-batch's next step. It
        tells the front of them."""

        def apply() -> None:
            chosen = tokens()
            if drafted is not None:
                made = sampled_at(chosen, drafted.wide.firsts, drafted.drafts)
                said, counts = rows.advance_by(made, [[None] * len(own) for own in made])
                self._learn(drafted, made, counts, {*said.ended, *said.bad})
                return
            lost: tuple[int, ...] = ()
            if chosen.token_ids.min() < 0:
                collected = rows.collected(rows.launched(), chosen)
                told, lost = collected.tokens, collected.bad
            else:
                told = rows.advance(chosen)
            if self._speculator is not None:
                self._tell_drafters(told, lost, {})

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
                self._share.add(0, end - start)
                self._tell_drafters(made.tokens, made.bad, {})
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
        logits were not finite. Drafters are told of them with the step's tokens."""
        handles = tuple(handles)
        for handle in handles:
            if handle in faults:
                self._rows_failed((handle,), GrammarFailed(faults[handle]), forget=False)
        if rest := [handle for handle in handles if handle not in faults]:
            self._rows_failed(rest, NonFiniteLogits("logits are not finite"), forget=False)

    def _rows_failed(self, handles: Iterable[int], error: Exception, forget: bool = True) -> None:
        """Takes rows out of the batch; those that the step in flight has are reported when it is over. Drafters
        `forget` them at once."""
        text, code, free = f"decode step: {error}", _own_code(error), []
        for handle in handles:
            self.rows.leave(handle)
            if forget:
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


def _scores_of(chosen: Chosen, firsts: Sequence[int], made: Sequence[Sequence[int]]) -> list[list[m.Logprobs | None]]:
    """Returns the log-probabilities of each row's tokens, where they were asked for."""
    return [
        [logprobs(token) if (token := chosen.scored.get(first + at)) else None for at in range(len(own))]
        for first, own in zip(firsts, made, strict=True)
    ]


def _faults_of(chosen: Chosen, drafted: DraftedRows) -> dict[int, str]:
    """Says by handle why a row's grammar has no token behind its last one."""
    return {
        handle: token.fault
        for handle, first in zip(drafted.handles, drafted.wide.firsts, strict=True)
        if (token := chosen.scored.get(first)) is not None and token.fault
    }


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
