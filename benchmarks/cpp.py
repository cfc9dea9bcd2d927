"""Chunked pipelines: the time to the first token of one long prompt over 1, 2 and 4 stages, against its prediction.

    python -m benchmarks.cpp [--tokens 1024] [--chunk 64] [--stages 1,2,4] [--json FILE]

Real ranks over gloo, one thread each, compute the tokens of a tiny model; what a layer of a large model would take is
slept, between its KV and its attention, so that two cores show what eight GPUs would do:

    seconds of a layer = (A * n + B * n * (start + n / 2)) / layers     of n tokens behind `start` others

A prompt's chunk k ends at stage s at f[k][s] = max(f[k - 1][s], f[k][s - 1]) + t[k] / stages, where t[k] is what the
chunk takes in all layers: slept, and computed as one rank takes for it without sleep. The bubble is what the stages
wait for, of all their time.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_TOKENS, LAYERS = 64, 8
LINEAR_S, PAIR_S = 1e-3, 2e-6  # A and B: about 1 s each of a prompt of 1,024 tokens


class Chunk(NamedTuple):
    start: int
    tokens: int

    @property
    def layer_s(self) -> float:
        """What a layer of it is slept for."""
        return (LINEAR_S * self.tokens + PAIR_S * self.tokens * (self.start + self.tokens / 2)) / LAYERS


def cut(tokens: int, chunk: int) -> list[Chunk]:
    return [Chunk(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)]


def predicted(times: Sequence[float], stages: int) -> float:
    """Returns when the last chunk leaves the last stage; `times` are of the chunks in all layers."""
    ends = [0.0] * (stages + 1)
    for taken in times:
        ends[0] = 0.0
        for stage in range(1, stages + 1):
            ends[stage] = max(ends[stage], ends[stage - 1]) + taken / stages
    return ends[-1]


def sleep_layer(seconds: float, _: int) -> None:
    time.sleep(seconds)


def run_rank(rank: int, stages: int, path: Path, chunks: list[Chunk], slept: bool, folder: Path) -> None:
    """Computes the prompt as one stage; writes when each chunk began and ended here (CLOCK_MONOTONIC), and the token
    where it is known."""
    import torch

    from kvmesh.engine.axes import Axes
    from kvmesh.engine.checkpoint import open_checkpoint
    from kvmesh.engine.parallel import RankMesh
    from kvmesh.engine.runner import PrefillInput, Runner, SampleParams, shard_layout

    torch.set_num_threads(1)
    mesh = RankMesh(Axes(pp=stages), rank, str(folder / "meet"), timeout_s=60)
    checkpoint, tokens = open_checkpoint(path), sum(chunk.tokens for chunk in chunks)
    layout = shard_layout(checkpoint.config, "float32", BLOCK_TOKENS, mesh.axes, rank)
    count = -(-tokens // BLOCK_TOKENS)
    pages = torch.zeros(count, *layout.shape)
    runner, prompt = (
        Runner(checkpoint, "float32", "cpu", BLOCK_TOKENS, pages, mesh),
        [7 * i % 250 for i in range(tokens)],
    )
    mesh.connect(60)
    for _ in range(2):  # the first steps of a process take longer, and so does the first touch of pages
        runner.prefill([PrefillInput(prompt[: chunks[0].tokens], 0, range(count), SampleParams())])
    said: dict[str, Any] = {"begins": [], "ends": [], "token": -1}
    ready = mesh.world.all_max(torch.tensor([time.monotonic() + 0.2], dtype=torch.float64))
    time.sleep(max(0.0, float(ready) - time.monotonic()))
    for chunk in chunks:
        said["begins"].append(time.monotonic())
        last = SampleParams() if chunk is chunks[-1] else None
        item = PrefillInput(prompt[chunk.start : chunk.start + chunk.tokens], chunk.start, range(count), last)
        [token] = runner.prefill([item], partial(sleep_layer, chunk.layer_s if slept else 0.0))
        said["ends"].append(time.monotonic())
        said["token"] = token.token_id if token is not None else -1
    (folder / f"{stages}-{slept}-{rank}.json").write_text(json.dumps(said))
    mesh.world.all_max(torch.zeros(1))  # nobody leaves while something is on its way
    mesh.close()


def measured(stages: int, path: Path, chunks: list[Chunk], slept: bool, folder: Path) -> list[dict[str, Any]]:
    """Returns what each stage said."""
    from torch.multiprocessing.spawn import spawn

    spawn(run_rank, (stages, path, chunks, slept, folder), nprocs=stages)  # type: ignore[no-untyped-call]
    (folder / "meet").unlink(missing_ok=True)  # of the next one
    return [json.loads((folder / f"{stages}-{slept}-{rank}.json").read_text()) for rank in range(stages)]


def main() -> None:
    from tests.support.checkpoints import make_checkpoint

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=3, help="the least of so many runs counts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chunks, rows = cut(args.tokens, args.chunk), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = make_checkpoint(
            folder / "model", family="llama", num_hidden_layers=LAYERS, max_position_embeddings=1 << 20
        )
        [alone] = measured(1, path, chunks, False, folder)
        computed = [end - begin for begin, end in zip(alone["begins"], alone["ends"], strict=True)]
        times = [LAYERS * chunk.layer_s + own for chunk, own in zip(chunks, computed, strict=True)]
        print(f"{args.tokens:,} tokens in {len(chunks)} chunks: {sum(times) - sum(computed):.3f} s slept, "
              f"{sum(computed):.3f} s computed")  # fmt: skip
        print(f"{'stages':>6} {'TTFT s':>8} {'predicted':>9} {'error':>7} {'speed-up':>8} {'bubble':>7}")
        for stages in map(int, args.stages.split(",")):
            expected, taken = predicted(times, stages), math.inf
            for _ in range(args.repeats):
                said = measured(stages, path, chunks, True, folder)
                taken = min(taken, said[-1]["ends"][-1] - said[0]["begins"][0])
                assert said[-1]["token"] == alone["token"], "the tokens are one rank's"
            row = {
                "stages": stages,
                "ttft_s": taken,
                "predicted_s": expected,
                "bubble": 1 - sum(times) / stages / taken,
            }
            rows.append(row)
            speed = rows[0]["ttft_s"] / taken
            error = taken / expected - 1
            print(f"{stages:6} {taken:8.3f} {expected:9.3f} {error:+7.1%} {speed:8.2f} {row['bubble']:7.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
