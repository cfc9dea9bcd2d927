"""Chunked pipelines: the time to the first token of one long prompt over 1, 2 and 4 stages, against its prediction.

    python -m benchmarks.cpp [--tokens 1024] [--chunks 16] [--cut compute|tokens] [--stages 1,2,4] [--json FILE]

Real ranks over gloo, one thread each, compute the tokens of a tiny model; what a layer of a large model would take is
slept, between its KV and its attention, so that two cores show what eight GPUs would do:

    seconds of a layer = (A * n + B * n * (start + (n + 1) / 2)) / layers     of n tokens behind `start` others

The prediction is `kvmesh.chunk_pipeline.pipeline_ends` of what each chunk takes in a stage: its part of what is slept,
and of what one rank takes to compute it without sleep. The bubble is what the stages' own clocks saw, as in the traces
of requests: the share of their time, from the first chunk's begin to the last one's end, in which they waited.
`benchmarks.cpp_link` does the same over two network namespaces whose link is slow.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from kvmesh.chunk_pipeline import ChunkCost, equal_compute_borders, pipeline_ends

if TYPE_CHECKING:
    from kvmesh.engine.parallel import RankMesh

BLOCK_TOKENS, LAYERS = 64, 8
LINEAR_S, PAIR_S = 1e-3, 2e-6  # A and B: about 1 s each of a prompt of 1,024 tokens
BORDER = 16  # tokens of which a chunk of equal compute has a multiple
MEET_S = 120.0


class Chunk(NamedTuple):
    start: int
    tokens: int
    layer_s: float  # that a layer of it is slept for


def cut(tokens: int, chunks: int, by: str, slow: float) -> list[Chunk]:
    """Returns chunks of equal compute, or of equal tokens, whose layers are slept `slow` times as long."""
    cost = ChunkCost(LINEAR_S, PAIR_S)
    if by == "compute":
        ends = equal_compute_borders(tokens, chunks, cost, block=BORDER)
    else:
        ends = [*range(-(-tokens // chunks), tokens, -(-tokens // chunks)), tokens]
    layer = cost.scaled(slow / LAYERS, 0.0)
    return [Chunk(start, end - start, layer.work(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class Predicted(NamedTuple):
    ttft_s: float
    bubble: float


def predicted(times: Sequence[float], stages: int, send_s: Sequence[float] = ()) -> Predicted:
    """Returns when the last chunk leaves the last stage, where chunks take `times` in all layers; and `send_s`, if that
    is given, from one stage to the next, which asks for a chunk when it has computed the one before."""
    sends = send_s or [0.0] * len(times)
    pairs = zip(times, sends, strict=True)
    steps = [[taken / stages, *[send + taken / stages] * (stages - 1)] for taken, send in pairs]
    ttft_s = pipeline_ends(steps)[-1][-1]
    return Predicted(ttft_s, 1 - sum(times) / (stages * ttft_s))


def sleep_layer(seconds: float, _: int) -> None:
    time.sleep(seconds)


def compute(mesh: RankMesh, path: Path, chunks: Sequence[Chunk], slept: bool) -> dict[str, Any]:
    """Computes the prompt as one stage. Returns when each chunk began, was computed and ended here (CLOCK_MONOTONIC),
    and the token where it is known."""
    import torch

    from kvmesh.engine.checkpoint import open_checkpoint
    from kvmesh.engine.runner import PrefillInput, Runner, SampleParams, shard_layout

    torch.set_num_threads(1)
    checkpoint, tokens = open_checkpoint(path), sum(chunk.tokens for chunk in chunks)
    layout = shard_layout(checkpoint.config, "float32", BLOCK_TOKENS, mesh.axes, mesh.rank)
    count = -(-tokens // BLOCK_TOKENS)
    runner = Runner(checkpoint, "float32", "cpu", BLOCK_TOKENS, torch.zeros(count, *layout.shape), mesh)
    prompt = [7 * i % 250 for i in range(tokens)]
    mesh.connect(MEET_S)
    for _ in range(2):  # the first steps of a process take longer, and so does the first touch of pages
        runner.prefill([PrefillInput(prompt[: chunks[0].tokens], 0, range(count), SampleParams())])
    said: dict[str, Any] = {"begins": [], "ends": [], "busy": [], "token": -1}
    ready = mesh.world.all_max(torch.tensor([time.monotonic() + 0.2], dtype=torch.float64))
    time.sleep(max(0.0, float(ready) - time.monotonic()))
    for chunk in chunks:
        said["begins"].append(time.monotonic())
        last = SampleParams() if chunk is chunks[-1] else None
        item = PrefillInput(prompt[chunk.start : chunk.start + chunk.tokens], chunk.start, range(count), last)
        [token] = runner.prefill([item], partial(sleep_layer, chunk.layer_s if slept else 0.0))
        said["ends"].append(time.monotonic())
        begun, until = runner.busy(time.monotonic_ns())
        said["busy"].append((begun / 1e9, until / 1e9) if until else (said["begins"][-1], said["ends"][-1]))
        said["token"] = token.token_id if token is not None else -1
    mesh.world.all_max(torch.zeros(1))  # nobody leaves while something is on its way
    mesh.close()
    return said


def run_rank(rank: int, stages: int, path: Path, chunks: list[Chunk], slept: bool, folder: Path) -> None:
    """Computes the prompt as one stage of those on this machine; writes what it says."""
    from kvmesh.engine.axes import Axes
    from kvmesh.engine.parallel import RankMesh

    mesh = RankMesh(Axes(pp=stages), rank, str(folder / "meet"), timeout_s=MEET_S)
    (folder / f"{rank}.json").write_text(json.dumps(compute(mesh, path, chunks, slept)))


def measured(stages: int, path: Path, chunks: list[Chunk], slept: bool) -> list[dict[str, Any]]:
    """Returns what each stage said."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # of its own: ranks of an earlier run met elsewhere
        spawn(run_rank, (stages, path, chunks, slept, folder), nprocs=stages)  # type: ignore[no-untyped-call]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(stages)]


def ttft_s(said: Sequence[dict[str, Any]]) -> float:
    """Returns the seconds from the first stage's begin to the last one's end."""
    return float(said[-1]["ends"][-1] - said[0]["begins"][0])


def bubble(said: Sequence[dict[str, Any]]) -> float:
    """Returns the share of the stages' time in which they waited."""
    busy = sum(until - begun for one in said for begun, until in one["busy"])
    return 1 - busy / (len(said) * (said[-1]["busy"][-1][1] - said[0]["busy"][0][0]))


def alone(path: Path, chunks: list[Chunk], repeats: int) -> tuple[list[float], int]:
    """Returns what one rank takes to compute each chunk without sleep, the least of so many runs, and its token."""
    runs = [measured(1, path, chunks, False)[0] for _ in range(repeats)]
    assert len({one["token"] for one in runs}) == 1, "greedy tokens do not change"
    times = [[end - begin for begin, end in zip(one["begins"], one["ends"], strict=True)] for one in runs]
    return [min(taken) for taken in zip(*times, strict=True)], runs[0]["token"]


def tiny_model(folder: Path) -> Path:
    from tests.support.checkpoints import make_checkpoint

    return make_checkpoint(folder / "model", family="llama", num_hidden_layers=LAYERS, max_position_embeddings=1 << 20)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--cut", choices=("compute", "tokens"), default="compute", help="what chunks have equal")
    parser.add_argument("--slow", type=float, default=1.0, help="sleep so many times as long: on a busy machine")
    parser.add_argument("--repeats", type=int, default=3, help="the least of so many runs counts")
    parser.add_argument("--json", type=Path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--stages", default="1,2,4")
    args = parser.parse_args()
    chunks, rows = cut(args.tokens, args.chunks, args.cut, args.slow), []
    with tempfile.TemporaryDirectory() as name:
        path = tiny_model(Path(name))
        computed, token = alone(path, chunks, args.repeats)
        times = [LAYERS * chunk.layer_s + own for chunk, own in zip(chunks, computed, strict=True)]
        lengths = f"{chunks[0].tokens} to {chunks[-1].tokens}"
        print(f"{args.tokens:,} tokens in {len(chunks)} chunks of equal {args.cut} ({lengths} tokens): "
              f"{sum(times) - sum(computed):.3f} s slept, {sum(computed):.3f} s computed")  # fmt: skip
        print(
            f"{'stages':>6} {'TTFT s':>8} {'predicted':>9} {'ratio':>6} {'speed-up':>8} {'bubble':>7} {'predicted':>9}"
        )
        for stages in map(int, args.stages.split(",")):
            expected, best = predicted(times, stages), None
            for _ in range(args.repeats):
                said = measured(stages, path, chunks, True)
                assert said[-1]["token"] == token, "the tokens are one rank's"
                best = said if best is None or ttft_s(said) < ttft_s(best) else best
            assert best is not None
            taken = ttft_s(best)
            row = {
                "stages": stages,
                "ttft_s": taken,
                "predicted_s": expected.ttft_s,
                "ratio": taken / expected.ttft_s,
                "bubble": bubble(best),
                "predicted_bubble": expected.bubble,
            }
            rows.append(row)
            first = rows[0]["ttft_s"] if rows else math.nan
            print(f"{stages:6} {taken:8.3f} {expected.ttft_s:9.3f} {row['ratio']:6.2f} {first / taken:8.2f} "
                  f"{row['bubble']:7.1%} {expected.bubble:9.1%}", flush=True)  # fmt: skip
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
