"""Whether one tenant can tell by time what another has asked: TTFT of equal and of fresh prompts, in turn.

Two API keys at one gateway. In every round tenant A sends a new prompt (so that its KV lies all over the mesh); then
tenant B sends, in random order, the same prompt and one that nobody has sent. If the two differ for B, A's cache leaks.
As a control the same is asked of A itself, where the prompt that is known must be faster. Printed: medians, their
difference, and the share of random relabellings with a difference as large (a permutation test).

    python -m benchmarks.tenants --rounds 60
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks import progress
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings

ROOT = Path(__file__).resolve().parents[1]
KEYS = {"a": "sk-tenant-a-000000000000", "b": "sk-tenant-b-000000000000"}


def ttft_ms(client: httpx.Client, model: str, who: str, prompt: list[int]) -> float:
    """Sent → first token, of a stream."""
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    start = time.perf_counter()
    with client.stream(
        "POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {KEYS[who]}"}
    ) as answer:
        answer.raise_for_status()
        first = 0.0
        for line in answer.iter_lines():
            if line.startswith("data: {") and not first:
                first = (time.perf_counter() - start) * 1e3
    return first


def p_value(one: list[float], two: list[float], rng: random.Random, tries: int = 5000) -> float:
    """Share of relabellings of the pairs whose difference of medians is as large as the one seen."""
    seen = abs(statistics.median(one) - statistics.median(two))
    as_large = 0
    for _ in range(tries):
        pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in zip(one, two, strict=True)]
        as_large += abs(statistics.median(a for a, _ in pairs) - statistics.median(b for _, b in pairs)) >= seen
    return as_large / tries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    times: dict[str, list[float]] = {"b same": [], "b fresh": [], "a same": [], "a fresh": []}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        entries = ((name, hashlib.sha256(key.encode()).hexdigest()) for name, key in KEYS.items())
        keys.write_text("".join(f'[[key]]\nname = "{name}"\nsha256 = "{digest}"\n' for name, digest in entries))
        settings = MeshSettings(
            model=str(ROOT / "examples" / "demo-model"), http_port=0, grpc_port=0, prefill=2, run_dir=folder,
            flags={"gateway": {"api_keys": str(keys)}}, log_level="warning",
        )  # fmt: skip
        with Mesh(settings) as mesh:
            mesh.wait_ready(180)
            time.sleep(2)  # registration reaches the gateway; not part of what is measured
            with httpx.Client(base_url=mesh.url, timeout=60) as client:
                for n in range(args.rounds + 3):
                    known, *fresh = [[rng.randrange(20, 250) for _ in range(args.prompt_tokens)] for _ in range(3)]
                    ttft_ms(client, settings.model_name, "a", known)
                    for who in ("b", "a"):
                        both = [(f"{who} same", known), (f"{who} fresh", fresh.pop())]
                        rng.shuffle(both)
                        for label, prompt in both:
                            ms = ttft_ms(client, settings.model_name, who, prompt)
                            if n >= 3:  # the first rounds warm up
                                times[label].append(ms)
                    progress.tell(f"round {n}/{args.rounds + 2}")
    progress.tell("")
    results = {}
    for who, what in (
        ("b", "another tenant's prompt against a fresh one"),
        ("a", "its own prompt against a fresh one"),
    ):
        same, fresh_ms = times[f"{who} same"], times[f"{who} fresh"]
        p = p_value(same, fresh_ms, rng)
        medians = statistics.median(same), statistics.median(fresh_ms)
        results[who] = {"same_ms": medians[0], "fresh_ms": medians[1], "p": p}
        print(
            f"{what}: TTFT p50 {medians[0]:.2f} ms against {medians[1]:.2f} ms, "
            f"difference {medians[0] - medians[1]:+.2f} ms, p = {p:.3f}"
        )
    if args.json:
        told = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args)}
        Path(args.json).write_text(json.dumps({**told, "results": results, "times_ms": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
