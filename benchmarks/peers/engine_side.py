"""One engine in a process of its own, driven over its standard input: `python engine_side.py kvmesh|vllm|transformers`.

Runs in the engine's own environment, so it imports nothing of this project but what its side is. A request is one JSON
line, the answer another, on the file descriptor that standard output had at the start (whatever engines print goes to
standard error). A side says {"ready": true} when it has answered its first token.

    {"do": "prefill", "ids": [[...]]}                     → {"seconds": ...} until the first token
    {"do": "cached", "ids": [[...]], "before": n}         → ... after the KV of the first n tokens has been made
    {"do": "decode", "ids": [[...], ...], "steps": n}     → {"seconds": ...} of n steps after the first token of all
    {"do": "hold", "ids": [[...], ...], "steps": n}       → {}: the prompts have their first tokens, n steps may follow
    {"do": "step", "steps": n}                            → {"seconds": ...} of n steps of what is held
    {"do": "drop"}                                        → {}: nothing is held
    {"do": "memory"}                                      → {"peak_bytes": ...}

An answer with seconds says in "cpu_s" what all threads of the process took until it was there, what is not timed
included, and in "by" which of several implementations of its own the engine took, if it has several.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

BLOCK_TOKENS = 64
EXPERTS = ("grouped_mm", "batched_mm", "eager")  # what transformers has for experts on a CPU
BATCHED_TOKENS = 4  # batched_mm copies the weights of every token's experts: gigabytes for a prompt


class Side(ABC):
    @abstractmethod
    def prefill(self, ids: list[list[int]]) -> float:
        """Seconds from asking to the first token."""

    @abstractmethod
    def cached(self, ids: list[list[int]], before: int) -> float:
        """Seconds from asking for a prompt to its first token, where the KV of its first `before` tokens is there."""

    @abstractmethod
    def hold(self, ids: list[list[int]], steps: int) -> None:
        """Makes the first token of every prompt of `ids`; as many steps as said may follow."""

    @abstractmethod
    def step(self, steps: int) -> float:
        """Seconds of `steps` steps in each of which every prompt held gets one token."""

    @abstractmethod
    def drop(self) -> None:
        """Ends what is held."""

    def decode(self, ids: list[list[int]], steps: int) -> float:
        """Seconds of `steps` steps in each of which every prompt of `ids` gets one token."""
        self.hold(ids, steps)
        try:
            return self.step(steps)
        finally:
            self.drop()

    by = ""  # the implementation that was taken last


class Kvmesh(Side):
    def __init__(self, model: str, kv_bytes: int, threads: int) -> None:
        import torch

        from kvmesh.testing.local_engine import LocalEngine

        torch.set_num_threads(threads)
        from kvmesh.engine.checkpoint import open_checkpoint
        from kvmesh.engine.runner import shard_layout

        opened = open_checkpoint(model)
        pages = kv_bytes // shard_layout(opened.config, "bfloat16", BLOCK_TOKENS).shard_bytes
        self.engine = LocalEngine(
            opened,
            dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
            num_pages=pages,
            max_batch=64,
            prefill_chunk_tokens=2048,
        )
        self.engine.runner.attention.pages.zero_()  # as a rank does: all of it is there before the first prompt

    def _submit(self, ids: list[list[int]], tokens: int) -> None:
        from kvmesh.testing.local_engine import GenerateParams

        for prompt in ids:
            self.engine.submit(prompt, GenerateParams(max_tokens=tokens))

    def prefill(self, ids: list[list[int]]) -> float:
        started = time.perf_counter()
        self._submit(ids, 1)
        while self.engine.busy:
            self.engine.step()
        return time.perf_counter() - started

    def cached(self, ids: list[list[int]], before: int) -> float:
        from kvmesh.engine.batch import PrefillInput, SampleParams

        [prompt], runner = ids, self.engine.runner
        pages = tuple(range(-(-len(prompt) // BLOCK_TOKENS)))  # of nobody, as no request runs
        for start in range(0, before, 2048):
            runner.prefill([PrefillInput(prompt[start : min(start + 2048, before)], start, pages)])
        started = time.perf_counter()
        runner.prefill([PrefillInput(prompt[before:], before, pages, SampleParams())])
        return time.perf_counter() - started

    def hold(self, ids: list[list[int]], steps: int) -> None:
        self._submit(ids, steps + 64)
        self.held: set[int] = set()
        while len(self.held) < len(ids):
            self.held.update(token.handle for token in self.engine.step())
        self.engine.step()

    def step(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            made = len(self.engine.step())
            assert made == len(self.held), f"{made} tokens in a step of {len(self.held)}"
        return time.perf_counter() - started

    def drop(self) -> None:
        for handle in self.held:
            self.engine.cancel(handle)


class Vllm(Side):
    def __init__(self, model: str, kv_bytes: int, threads: int) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, kv_bytes >> 30))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import LLM  # type: ignore[import-not-found]  # in its own environment

        self.llm: Any = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=16384,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._names = 0

    def _submit(self, ids: list[list[int]], tokens: int) -> list[str]:
        from vllm import SamplingParams  # in its own environment

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = []
        for prompt in ids:
            self._names += 1
            names.append(str(self._names))
            self.llm.llm_engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        return names

    def prefill(self, ids: list[list[int]]) -> float:
        started = time.perf_counter()
        self._submit(ids, 1)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        return time.perf_counter() - started

    def cached(self, ids: list[list[int]], before: int) -> float:
        self.prefill([prompt[:before] for prompt in ids])
        return self.prefill(ids)

    def hold(self, ids: list[list[int]], steps: int) -> None:
        engine = self.llm.llm_engine
        self.held = self._submit(ids, steps + 64)
        have: set[str] = set()
        while len(have) < len(ids):
            have.update(out.request_id for out in engine.step() if out.outputs)
        engine.step()

    def step(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            made = len(self.llm.llm_engine.step())
            assert made == len(self.held), f"{made} tokens in a step of {len(self.held)}"
        return time.perf_counter() - started

    def drop(self) -> None:
        engine = self.llm.llm_engine
        engine.abort_request(self.held)
        while engine.has_unfinished_requests():
            engine.step()


class Transformers(Side):
    def __init__(self, model: str, kv_bytes: int, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch: Any = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._fastest: dict[int, str] = {}

    def _forward(self, ids: Any, kept: Any = None) -> tuple[Any, Any]:
        """The next token of each row, and the cache: greedy, without what `generate` does around it."""
        with self.torch.inference_mode():
            answer = self.model(ids, past_key_values=kept, use_cache=True, logits_to_keep=1)
            return answer.logits[:, -1:].argmax(-1), answer.past_key_values

    def _choose(self, tokens: int, work: Callable[[], Any]) -> None:
        """Takes the fastest of transformers' implementations of experts for steps of so many tokens, by trying each."""
        config = self.model.config
        if not getattr(config, "_experts_implementation", None) or not hasattr(config, "num_experts_per_tok"):
            return
        kind = min(tokens, 512)  # longer prompts take what 512 tokens do
        if kind not in self._fastest:
            took = {}
            for name in EXPERTS:
                if name == "batched_mm" and tokens > BATCHED_TOKENS:
                    continue
                self.model.set_experts_implementation(name)
                took[name] = min(timed(work), timed(work))
            self._fastest[kind] = min(took, key=lambda name: took[name])
        self.by = self._fastest[kind]
        self.model.set_experts_implementation(self.by)

    def prefill(self, ids: list[list[int]]) -> float:
        prompt = self.torch.tensor(ids)
        self._choose(prompt.numel(), lambda: self._forward(prompt[:, :512])[0].tolist())
        return timed(lambda: self._forward(prompt)[0].tolist())

    def cached(self, ids: list[list[int]], before: int) -> float:
        prompt = self.torch.tensor(ids)
        _, kept = self._forward(prompt[:, :before])
        return timed(lambda: self._forward(prompt[:, before:], kept)[0].tolist())

    def hold(self, ids: list[list[int]], steps: int) -> None:
        first = self.torch.tensor(ids[:1])
        self._choose(first.numel(), lambda: self._forward(first)[0].tolist())
        rows = [self._forward(self.torch.tensor([prompt])) for prompt in ids]  # one prompt a time is the faster way
        self.next, self.kept = self.torch.cat([token for token, _ in rows]), rows[0][1]
        for layer, *others in zip(*(kept.layers for _, kept in rows), strict=True):
            layer.keys = self.torch.cat([layer.keys, *(other.keys for other in others)])
            layer.values = self.torch.cat([layer.values, *(other.values for other in others)])
        self.step(1)

    def step(self, steps: int) -> float:
        self._choose(len(self.next), self._one)
        started = time.perf_counter()
        for _ in range(steps):
            self._one()
        return time.perf_counter() - started

    def _one(self) -> None:
        self.next, self.kept = self._forward(self.next, self.kept)
        self.next.tolist()

    def drop(self) -> None:
        self.kept = None


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


SIDES: dict[str, type[Side]] = {"kvmesh": Kvmesh, "vllm": Vllm, "transformers": Transformers}


def peak_bytes() -> int:
    """Of this program. getrusage's would count what its parent had when it forked."""
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, model, kv_bytes, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    side = SIDES[name](model, kv_bytes, threads)  # type: ignore[call-arg]
    side.prefill([[1, 2, 3, 4]])
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(side, asked)), file=out)


def answer(side: Side, asked: dict[str, Any]) -> dict[str, Any]:
    do = asked.pop("do")
    if do == "memory":
        return {"peak_bytes": peak_bytes()}
    if do in ("hold", "drop"):
        getattr(side, do)(**asked)
        return {}
    works = {"prefill": side.prefill, "cached": side.cached, "decode": side.decode, "step": side.step}
    cpu = time.process_time()
    seconds = works[do](**asked)
    return {"seconds": seconds, "cpu_s": time.process_time() - cpu, "by": side.by}


if __name__ == "__main__":
    main()
