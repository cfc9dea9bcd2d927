"""Runs one vLLM engine for a test: a line of JSON in is a list of prompts of token ids, a line out is what came of it.

    PYTHON engine_driver.py MODEL KV_TRANSFER_CONFIG_JSON OPTIONS_JSON

Nothing of the tests is imported, as this runs with the Python of vLLM's own environment. Lines for the test begin with
`@`; all else is vLLM's log.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def tree_rss() -> int:
    """Bytes of this process and of its children, the engine's among them, without shared memory."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        status = Path(f"/proc/{process.pid}/status").read_text()
        total += sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))
    return total


def yield_to_threads(core: Any) -> None:
    """Sleeps a millisecond after each step that had nothing to compute, as vLLM's own engine process does and an engine
    within its caller's process does not: threads that load pages would wait for the interpreter."""
    step = core.step_fn

    def stepped() -> Any:
        outputs, computed = step()
        if not computed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, computed

    core.step_fn = stepped


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    model, transfer, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(model=model, skip_tokenizer_init=True, kv_transfer_config=transfer or None, **options)
    yield_to_threads(llm.llm_engine.engine_core.engine_core)
    print("@" + json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        begun = time.perf_counter()
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=asked["max_tokens"],
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": asked["transfer"]} if asked.get("transfer") else None,
        )
        prompts = [TokensPrompt(prompt_token_ids=one) for one in asked["prompts"]]
        if asked.get("forget"):
            llm.reset_prefix_cache()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        llm.llm_engine.step()  # what is ordered as a request ends goes with a step of its own
        answer = {
            "tokens": [list(one.outputs[0].token_ids) for one in outputs],
            "cached": [one.num_cached_tokens for one in outputs],
            "seconds": time.perf_counter() - begun,
            "rss": tree_rss(),
            "transfer": outputs[0].kv_transfer_params,
        }
        print("@" + json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
