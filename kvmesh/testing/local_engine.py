"""The whole engine in one process: paged KV, chunked prefill, continuous batching; no services, no transfer.

It is the oracle of mesh tests (the same runner without any of the paths that KV can take) and the floor of benchmarks.
A request's pages are taken when it starts and given back when it ends, so it never stalls; requests start in the
order of `submit`.

    engine = LocalEngine("path/to/checkpoint")
    [answer] = engine.generate([[1, 2, 3]], GenerateParams(max_tokens=8))
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from kvmesh.engine.batch import DecodeInput, PrefillInput, SampledToken, SampleParams
from kvmesh.engine.checkpoint import Checkpoint, open_checkpoint
from kvmesh.engine.runner import Runner, shard_layout, torch_dtype
from kvmesh.engine.sampling.grammar import GrammarCompiler
from kvmesh.engine.sampling.history import History
from kvmesh.errors import ContextTooLong, InvalidRequest

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """`stop_token_ids` end an answer (the stop token is its last one); pass the model's eos ids to honour them."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    may_end: bool = True  # False: a grammar ends only where nothing else is possible


class LocalToken(NamedTuple):
    """One token of one request. `at_ns` is the monotonic time at which its step had ended."""

    handle: int
    token_index: int
    sampled: SampledToken
    finish: Finish
    at_ns: int


@dataclass(slots=True)
class LocalCompletion:
    token_ids: list[int] = field(default_factory=list)
    tokens: list[LocalToken] = field(default_factory=list)
    submitted_ns: int = 0
    finish: Finish = ""


@dataclass(slots=True)
class _Request:
    handle: int
    prompt: list[int]
    params: GenerateParams
    row: DecodeInput
    computed: int = 0  # prompt tokens whose KV is in pages


class LocalEngine:
    """`prefill_chunk_tokens` bounds the prompt tokens of one step, `max_batch` the requests that run at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        block_tokens: int = 64,
        num_pages: int = 256,
        max_batch: int = 64,
        prefill_chunk_tokens: int = 512,
        cuda_graphs: bool = True,
    ) -> None:
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        self.config = opened.config
        self.block_tokens, self.num_pages = block_tokens, num_pages
        self.max_batch, self.prefill_chunk_tokens = max_batch, prefill_chunk_tokens
        layout = shard_layout(self.config, dtype, block_tokens)
        pages = torch.zeros((num_pages, *layout.shape), dtype=torch_dtype(dtype), device=device)
        self.runner = Runner(opened, dtype, device, block_tokens, pages, cuda_graphs=cuda_graphs)
        self._grammars = GrammarCompiler(opened.path, self.config.vocab_size, self.config.eos_token_ids)
        self._free = list(range(num_pages))
        self._waiting: deque[_Request] = deque()
        self._filling: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        self._next_handle = 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._filling or self._running)

    def submit(self, prompt: Sequence[int], params: GenerateParams) -> int:
        """Queue one request; its handle names its tokens in `step`. Raises InvalidRequest, ContextTooLong."""
        if not prompt:
            raise InvalidRequest.of("prompt", list(prompt), "must hold at least one token")
        if params.max_tokens < 1:
            raise InvalidRequest.of("max_tokens", params.max_tokens, "must be at least 1")
        tokens = len(prompt) + params.max_tokens
        limit = min(self.config.max_context_tokens, self.num_pages * self.block_tokens)
        if tokens > limit:
            raise ContextTooLong(f"prompt of {len(prompt)} and answer of {params.max_tokens} tokens exceed {limit}")
        handle = self._next_handle
        self._next_handle += 1
        sample = _sample_params(prompt, params)
        if params.grammar:
            sample.grammar = self._grammars.begin(params.grammar, (), may_end=params.may_end)
        row = DecodeInput(-1, len(prompt), (), sample)
        self._waiting.append(_Request(handle, list(prompt), params, row))
        return handle

    def cancel(self, handle: int) -> None:
        """Drop a request in whatever state; unknown handles are ignored."""
        for queue in (self._waiting, self._filling):
            for request in [r for r in queue if r.handle == handle]:
                queue.remove(request)
                self._release(request)
        if handle in self._running:
            self._release(self._running.pop(handle))

    def step(self) -> list[LocalToken]:
        """One prefill step (if prompts wait) and one decode step (of the requests that ran before it)."""
        self._start()
        running = list(self._running.values())
        tokens = self._prefill() if self._filling else []
        return tokens + self._decode(running) if running else tokens

    def generate(self, prompts: Sequence[Sequence[int]], params: GenerateParams) -> list[LocalCompletion]:
        """All prompts at once, to the end."""
        answers: dict[int, LocalCompletion] = {}
        for prompt in prompts:
            answers[self.submit(prompt, params)] = LocalCompletion(submitted_ns=time.monotonic_ns())
        while self.busy:
            for token in self.step():
                answer = answers[token.handle]
                answer.tokens.append(token)
                answer.token_ids.append(token.sampled.token_id)
                answer.finish = token.finish
        return list(answers.values())

    def _start(self) -> None:
        while self._waiting and len(self._running) + len(self._filling) < self.max_batch:
            request = self._waiting[0]
            need = -(-(len(request.prompt) + request.params.max_tokens) // self.block_tokens)
            if need > len(self._free):
                return
            self._waiting.popleft()
            request.row.pages = tuple(self._free[-need:])
            del self._free[-need:]
            self._filling.append(request)

    def _prefill(self) -> list[LocalToken]:
        budget = self.prefill_chunk_tokens
        items: list[PrefillInput] = []
        taken: list[_Request] = []
        for request in self._filling:
            if budget == 0:
                break
            length = min(budget, len(request.prompt) - request.computed)
            budget -= length
            end = request.computed + length
            sample = request.row.sample if end == len(request.prompt) else None
            items.append(
                PrefillInput(request.prompt[request.computed : end], request.computed, request.row.pages, sample)
            )
            request.computed = end
            taken.append(request)
        sampled = self.runner.prefill(items)
        now = time.monotonic_ns()
        tokens = []
        for request, token in zip(taken, sampled, strict=True):
            if token is not None:
                self._filling.remove(request)
                self._running[request.handle] = request
                tokens.append(self._advance(request, token, now))
        return tokens

    def _decode(self, running: Sequence[_Request]) -> list[LocalToken]:
        sampled = self.runner.decode([request.row for request in running])
        now = time.monotonic_ns()
        tokens = []
        for request, token in zip(running, sampled, strict=True):
            request.row.position += 1
            tokens.append(self._advance(request, token, now))
        return tokens

    def _advance(self, request: _Request, token: SampledToken, now: int) -> LocalToken:
        """Take note of a token; the request leaves when it was its last."""
        row, params = request.row, request.params
        index = row.sample.token_index
        row.token_id = token.token_id
        row.sample.token_index = index + 1
        finish: Finish = ""
        if token.token_id in params.stop_token_ids:
            finish = "stop"
        elif index + 1 >= params.max_tokens:
            finish = "length"
        if finish:
            del self._running[request.handle]
            self._release(request)
        return LocalToken(request.handle, index, token, finish, now)

    def _release(self, request: _Request) -> None:
        self._free.extend(request.row.pages)
        request.row.pages = ()


def _sample_params(prompt: Sequence[int], params: GenerateParams) -> SampleParams:
    sample = SampleParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        logprobs=params.logprobs,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
    )
    if sample.penalised:
        sample.history = History(prompt)
    return sample
