"""One engine in a process of its own, driven over its standard input: `python engine_side.py kvmesh|vllm|transformers`.

Runs in the engine's own environment, so it imports nothing of this project but what its side is. A request is one JSON
line, the answer another, on the file descriptor that standard output had at the start (whatever engines print goes to
standard error). A side says {"ready": true} when it has answered its first token.

    {"do": "prefill", "ids": [[...]]}                     → {"seconds": ...} until the first token
    {"do": "cached", "ids": [[...]], "before": n}         → ... after the KV of the first n tokens has been made
    {"do": "decode", "ids": [[...], ...], "steps": n}     → {"seconds": ...} of n steps after the first token of all
    {"do": "memory"}                                      → {"peak_bytes": ...}
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

BLOCK_TOKENS = 64


class Side(ABC):
    @abstractmethod
    def prefill(self, ids: list[list[int]]) -> float:
        """Seconds from asking to the first token."""

    @abstractmethod
    def cached(self, ids: list[list[int]], before: int) -> float:
        """Seconds from asking for a prompt to its first token, where the KV of its first `before` tokens is there."""

    @abstractmethod
    def decode(self, ids: list[list[int]], steps: int) -> float:
        """Seconds of `steps` steps in each of which every prompt of `ids` gets one token."""


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

    def decode(self, ids: list[list[int]], steps: int) -> float:
        self._submit(ids, steps + 64)
        first: set[int] = set()
        while len(first) < len(ids):
            first.update(token.handle for token in self.engine.step())
        self.engine.step()
        started = time.perf_counter()
        for _ in range(steps):
            made = len(self.engine.step())
            assert made == len(ids), f"{made} tokens in a step of {len(ids)}"
        seconds = time.perf_counter() - started
        for handle in first:
            self.engine.cancel(handle)
        return seconds


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

    def decode(self, ids: list[list[int]], steps: int) -> float:
        engine = self.llm.llm_engine
        names = self._submit(ids, steps + 64)
        have: dict[str, int] = {}
        while len(have) < len(ids):
            have.update({out.request_id: len(out.outputs[0].token_ids) for out in engine.step() if out.outputs})
        engine.step()
        started = time.perf_counter()
        for _ in range(steps):
            made = len(engine.step())
            assert made == len(ids), f"{made} tokens in a step of {len(ids)}"
        seconds = time.perf_counter() - started
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return seconds


class Transformers(Side):
    def __init__(self, model: str, kv_bytes: int, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch: Any = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def _generate(self, ids: list[list[int]], tokens: int) -> float:
        torch = self.torch
        prompt = torch.tensor(ids)
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - started

    def prefill(self, ids: list[list[int]]) -> float:
        return self._generate(ids, 1)

    def cached(self, ids: list[list[int]], before: int) -> float:
        torch = self.torch
        [prompt] = ids
        with torch.inference_mode():
            kept = self.model(torch.tensor([prompt[:before]]), use_cache=True, logits_to_keep=1).past_key_values
            started = time.perf_counter()
            logits = self.model(torch.tensor([prompt[before:]]), past_key_values=kept, logits_to_keep=1).logits
            logits.argmax(-1).item()
            return time.perf_counter() - started

    def decode(self, ids: list[list[int]], steps: int) -> float:
        return max(1e-9, self._generate(ids, steps + 1) - self._generate(ids, 1))


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
        if asked["do"] == "prefill":
            print(json.dumps({"seconds": side.prefill(asked["ids"])}), file=out)
        elif asked["do"] == "cached":
            print(json.dumps({"seconds": side.cached(asked["ids"], asked["before"])}), file=out)
        elif asked["do"] == "decode":
            print(json.dumps({"seconds": side.decode(asked["ids"], asked["steps"])}), file=out)
        else:
            print(json.dumps({"peak_bytes": peak_bytes()}), file=out)


if __name__ == "__main__":
    main()
