"""The steps of one rank on a CPU that runs behind the host, and a front that gives it requests: pages, joins, grants,
preemption and cancels as decode's brain orders them, and what every page may be used for.

Pages that are free hold NaN: a step that reads or writes them shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher

from kvmesh.drafts.speculator import Speculator
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import Runner, shard_layout
from kvmesh.engine.sampler import TokensInFlight
from kvmesh.engine.sampling.grammar import GrammarCompiler
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import LateStep, StagedCpuMemory
from kvmesh.ranks.worker.pusher import Pusher
from kvmesh.ranks.worker.rows import logprobs
from kvmesh.ranks.worker.slices import Moves
from kvmesh.ranks.worker.steps import Steps
from kvmesh.testing.local_engine import GenerateParams, LocalEngine, LocalToken
from kvmesh.transfer import TransferEngine

BLOCK, PAGES, EXTENTS = 4, 28, 16
MOST_REQUESTS = 5  # all of them find pages, whatever waits for a step
# Which letters may come next depends on the one before; the answer never has to end.
LETTERS = LLMatcher.grammar_from_regex("(a[bc]|b[ad]{2}|c[efg]|e{3}[a-d]|[fg]h)+")
SAMPLING = [
    GenerateParams(),
    GenerateParams(temperature=1.0, seed=7),
    GenerateParams(temperature=0.8, top_k=9, min_p=0.02, seed=8, logprobs=2),
    GenerateParams(logprobs=1, logit_bias=((5, 2.0),)),
    GenerateParams(temperature=1.2, seed=9, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3),
    GenerateParams(
        repetition_penalty=1.01, frequency_penalty=2.0, logit_bias=((5, 40.0), (6, 39.5), (7, 39.0))
    ),  # each token is decided by the ones before
    GenerateParams(temperature=1.0, seed=11, grammar=LETTERS, may_end=False),
    GenerateParams(
        temperature=0.9,
        seed=12,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        logprobs=1,
        grammar=LETTERS,
        may_end=False,
    ),
]
GRAMMAR, PENALISED_GRAMMAR = len(SAMPLING) - 2, len(SAMPLING) - 1
Launch = Callable[[], TokensInFlight]


@dataclass
class Device:
    """A model over staged pages, and the same model alone, which says what every answer must be."""

    path: Path
    engine: TransferEngine
    known: dict[tuple[Any, ...], list[LocalToken]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checkpoint = open_checkpoint(self.path)
        layout = shard_layout(checkpoint.config, "float32", BLOCK)
        configure: Any = type("Configure", (), {"dtype": "float32"})
        self.memory = StagedCpuMemory(configure, layout, PAGES, self.engine, "cpu:0")
        self.memory.open_extents(self.engine.allocate(EXTENTS * layout.shard_bytes, "cpu:0"), EXTENTS)
        self.runner = Runner(checkpoint, "float32", "cpu", BLOCK, self.memory.pages)
        self.layout = layout
        self.grammars = GrammarCompiler(self.path, checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
        self.alone = LocalEngine(self.path, block_tokens=BLOCK, num_pages=16)

    def answer(self, prompt: tuple[int, ...], kind: int, most: int) -> list[LocalToken]:
        """What this prompt is answered by, whatever runs beside it."""
        key = (prompt, kind, most)
        if key not in self.known:
            given = SAMPLING[kind]
            asked = GenerateParams(**{name: getattr(given, name) for name in given.__slots__} | {"max_tokens": most})
            [answer] = self.alone.generate([list(prompt)], asked)
            self.known[key] = answer.tokens
        return self.known[key]


@dataclass
class Request:
    """One request at the front."""

    handle: int
    prompt: tuple[int, ...]
    kind: int
    expected: list[LocalToken]
    stop: tuple[int, ...]
    most: int
    least: int
    pages: list[int]
    extents: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    in_batch: bool = False
    leaving: bool = False
    swapping: bool = False
    swapped: bool = False
    stalled: bool = False
    ended: bool = False  # the client has its end
    spoiled: bool = False

    @property
    def context(self) -> int:
        return len(self.prompt) + len(self.made) - 1

    def finish_at(self, index: int) -> int:
        """How the token at this index ends the answer, as the protocol says it."""
        length = index + 1
        if self.expected[index].sampled.token_id in self.stop and length >= self.least:
            return 1
        return 2 if length >= self.most else 0


class World:
    """Front and rank. `ahead`: steps are launched ahead, else each is waited for."""

    def __init__(self, device: Device, ahead: bool = True, speculator: Speculator | None = None) -> None:
        self.device, self.memory = device, device.memory
        self.said: deque[m.ToFront] = deque()
        pusher = Pusher(device.engine, device.layout, 0, self.said.append)
        begin = self._begin if ahead else None
        self.speculator = speculator
        self.kept = 0  # tokens that drafts foresaw
        self.drafts_beside = 0  # steps with drafts that computed prompts, too
        self.steps = Steps(
            device.runner,
            pusher,
            BLOCK,
            self.said.append,
            begin,
            grammars=device.grammars,
            speculator=speculator,
        )
        self.moves = Moves(self.memory, self.said.append)
        self.launched: list[tuple[LateStep[Any], dict[int, set[int]]]] = []  # with the pages of each row
        self.prompts: deque[m.PrefillItem] = deque()
        self.requests: dict[int, Request] = {}
        self.free = list(range(PAGES))
        self.free_extents = list(range(EXTENTS))
        self.memory.pages.fill_(torch.nan)
        self.hurries = False  # whether the device begins steps at once
        self.errors = 0

    # ── the device ───────────────────────────────────────────────────────────────────────────────

    def _begin(self, launch: Launch) -> Launch:
        rows = self.steps.rows
        batch = rows.batch()
        pages = {rows.handle(row): set(batch.pages[row]) for row in range(rows.live)}
        begun = self.memory.begin_step(launch)
        assert self.memory._newest is not None
        self.launched = [entry for entry in self.launched if entry[0].waits]
        self.launched.append((self.memory._newest, pages))
        if self.hurries:
            self.memory._newest.run()
        return begun

    def in_use(self) -> set[int]:
        """Pages that a step may touch that the device has not computed yet."""
        return {p for step, rows in self.launched if step.waits for pages in rows.values() for p in pages}

    def check(self) -> None:
        assert not self.in_use() & set(self.free), "a page is free while a step may touch it"
        assert bool(self.memory.pages[self.free].isnan().all()), "something wrote to a free page"

    # ── pages ────────────────────────────────────────────────────────────────────────────────────

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return taken

    def give_back(self, request: Request) -> None:
        """The front believes that nobody touches these pages: they go to somebody else at once."""
        used = self.in_use()
        assert not used & set(request.pages), f"{request.handle} gives back pages {request.pages}, {used} are in use"
        self.memory.pages[request.pages] = torch.nan
        self.free = [*request.pages, *self.free]
        request.pages = []

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def start(self, prompt: tuple[int, ...], kind: int, most: int, stop_at: int, least: int, spare: int) -> None:
        handle = len(self.requests) + 1
        expected = self.device.answer(prompt, kind, most)
        stop = (expected[stop_at].sampled.token_id,) if stop_at < most else ()
        pages = self.take(-(-len(prompt) // BLOCK) + spare)
        self.requests[handle] = Request(handle, prompt, kind, expected, stop, most, least, pages)
        item = m.PrefillItem(
            handle, prompt, 0, tuple(pages), self._sampling(kind), push=False, history=self._history(prompt, kind, [])
        )
        self.prompts.append(item)

    @staticmethod
    def _sampling(kind: int) -> m.Sampling:
        p = SAMPLING[kind]
        return m.Sampling(
            p.temperature,
            p.top_p,
            p.top_k,
            p.seed,
            -1 if p.logprobs is None else p.logprobs,
            p.min_p,
            p.presence_penalty,
            p.frequency_penalty,
            p.repetition_penalty,
            p.logit_bias,
            grammar=p.grammar,
            may_end=p.may_end,
        )

    @staticmethod
    def _history(prompt: tuple[int, ...], kind: int, made: list[int]) -> m.TokenHistory | None:
        needed = SAMPLING[kind].repetition_penalty != 1 or SAMPLING[kind].grammar
        return m.TokenHistory(pack_tokens(prompt), pack_tokens(made)) if needed else None

    def _join(self, request: Request) -> None:
        request.in_batch, request.stalled = True, False
        history = self._history(request.prompt, request.kind, request.made)
        self.steps.join(
            m.Join(
                request.handle,
                tuple(request.pages),
                request.context,
                request.made[-1],
                len(request.made) - 1,
                request.most,
                request.least,
                request.stop,
                self._sampling(request.kind),
                history,
                said=m.TokenHistory(pack_tokens(request.prompt), pack_tokens(request.made)),
            )
        )

    def live(self) -> list[Request]:
        return [request for request in self.requests.values() if not (request.ended and not request.pages)]

    def cancel(self, request: Request) -> None:
        """The client has gone."""
        request.ended = True
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.in_batch and not request.leaving:
            request.leaving = True
            self.steps.leave(request.handle)

    def preempt(self, request: Request) -> None:
        request.swapping = True
        self._leave(request)

    def resume(self, request: Request) -> None:
        """Copies a request that was preempted into other pages."""
        used = len(request.extents)
        request.pages = self.take(used)
        request.swapped = False
        self.moves.add(m.CopyIn(request.handle, tuple(request.extents), tuple(request.pages)))

    def grant(self, request: Request) -> None:
        pages = self.take(1)
        request.pages += pages
        request.stalled = False
        self.steps.grant(m.Grant(request.handle, tuple(pages)))

    def spoil(self, request: Request) -> None:
        """Its KV is damaged."""
        request.spoiled = True
        self.memory.pages[request.pages[0]] = torch.nan

    # ── the rank's loop ──────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        self.memory.poll()
        self.moves.advance()
        prefill = m.PrefillStep(1, tuple(self.prompts)) if self.prompts else None
        self.prompts.clear()
        self.steps.run(prefill, lambda: None)
        self.check()

    # ── the front ────────────────────────────────────────────────────────────────────────────────

    def hear(self, most: int = 1_000_000) -> None:
        while self.said and most:
            most -= 1
            match self.said.popleft():
                case m.PrefillStepDone(_, _, _, sampled):
                    for token in sampled:
                        self._first(self.requests[token.handle], token)
                case m.DecodeStepDone() as step:
                    self.kept += sum(kept for _, _, kept in step.drafts)
                    self.drafts_beside += bool(step.drafts and step.prefill_tokens)
                    for made in step.tokens:
                        self._token(self.requests[made.handle], made, made.handle in step.held)
                    assert set(step.held) <= {token.handle for token in step.tokens if token.finish}
                case m.Stalled(handle):
                    request = self.requests[handle]
                    # Room may have been granted while this was on its way.
                    request.stalled = len(request.pages) * BLOCK <= request.context
                case m.Left(handle):
                    if self.requests[handle].leaving:
                        self._out(self.requests[handle])
                case m.RankError(handles):
                    for request in map(self.requests.__getitem__, handles):
                        assert request.spoiled, f"{request.handle} failed"
                        self.errors += 1
                        if request.in_batch or not request.made:
                            request.ended, request.swapping = True, False
                            self._out(request)
                case m.Copied(handle, into_pages):
                    self._copied(self.requests[handle], into_pages)
                case other:
                    raise AssertionError(f"unexpected {other}")
            self.check()

    def _first(self, request: Request, token: m.Sampled) -> None:
        request.made.append(token.token_id)
        assert token.token_id == request.expected[0].sampled.token_id
        if request.finish_at(0):
            request.ended = True
        if request.ended:
            self.give_back(request)
        else:
            self._join(request)

    def _token(self, request: Request, token: m.Token, held: bool) -> None:
        index = len(request.made)
        assert request.in_batch, f"{request.handle} is out of the batch, and has a token"
        assert token.token_index == index and not (request.made and request.finish_at(index - 1)), "one too many"
        expected = request.expected[index].sampled
        assert token.token_id == expected.token_id, f"{request.handle}: token {index} is another"
        assert _like(token.logprobs, logprobs(expected))
        assert token.finish == request.finish_at(index)
        request.made.append(token.token_id)
        if token.finish:
            request.ended, request.swapping = True, False
            if held:
                request.leaving = True
            else:
                self._out(request)

    def _out(self, request: Request) -> None:
        """No step has the request any more."""
        request.in_batch = request.leaving = False
        if not request.swapping:
            self.give_back(request)
            return
        used = -(-request.context // BLOCK)
        request.extents, self.free_extents = self.free_extents[:used], self.free_extents[used:]
        self.moves.add(m.CopyOut(request.handle, tuple(request.pages[:used]), tuple(request.extents)))

    def _copied(self, request: Request, into_pages: bool) -> None:
        if into_pages:
            self.free_extents += request.extents
            request.extents = []
            if request.ended:
                self.give_back(request)
            else:
                self._join(request)
        else:
            self.give_back(request)
            request.swapping, request.swapped = False, True

    def wind_down(self) -> None:
        """Everybody is served to the end."""
        for _ in range(400):
            self.hear()
            waits = [request for request in self.requests.values() if request.swapped]
            if not self.live() and not waits and not self.steps.has_work:
                break
            for request in waits:
                if request.ended:
                    self.free_extents += request.extents
                    request.extents, request.swapped = [], False
                else:
                    self.resume(request)
            for request in self.live():
                if request.stalled and request.in_batch and not request.leaving:
                    self.grant(request)
            self.step()
        assert not self.said and not self.steps.has_work and not len(self.steps.rows), "somebody is not served"
        assert sorted(self.free) == list(range(PAGES)) and sorted(self.free_extents) == list(range(EXTENTS))


def _like(one: m.Logprobs | None, other: m.Logprobs | None) -> bool:
    """Whether these are equal but for the last bits, which may differ with the rows beside."""
    if one is None or other is None:
        return one is other
    numbers = [[x.logprob, *(value for _, value in x.top)] for x in (one, other)]
    return all(abs(a - b) < 1e-4 for a, b in zip(*numbers, strict=True))
