"""A pipeline of two stages whose link is slow: the time to the first token against its prediction, and equal tokens.

    python -m benchmarks.cpp_link [--mbit 0,8,2,1] [--tokens 1024] [--chunks 16] [--json FILE]     (as root, on Linux)

Two ranks in two network namespaces compute over gloo, as benchmarks.cpp has it; between them lies a cable that lets
through so many Mbit/s each way (tc's token bucket; 0: as fast as it is). A chunk is on the link for its bytes, tokens
times `hidden_size` times 4, over the rate. gloo sends when the other end has asked, and a stage asks when it has
computed the chunk before: the prediction is that of a second stage which takes both times, one behind the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.cpp import (
    LAYERS,
    MEET_S,
    Chunk,
    add_options,
    alone,
    bubble,
    compute,
    cut,
    predicted,
    tiny_model,
    ttft_s,
)

PORT = 29_411
BURST = 4096  # bytes that the bucket lets through at once
HEADERS = 1 + 66 / 1448  # of a TCP segment on the cable


def shape(machine: str, cable: str, mbit: float) -> None:
    """Has this end of the cable let through so many Mbit/s; 0: all."""
    tc = ["ip", "netns", "exec", machine, "tc", "qdisc"]
    subprocess.run([*tc, "del", "dev", cable, "root"], capture_output=True, check=False)
    if mbit:
        bucket = ["rate", f"{mbit:g}mbit", "burst", str(BURST), "latency", "10s"]
        subprocess.run([*tc, "add", "dev", cable, "root", "tbf", *bucket], check=True)


def run_rank(rank: int, path: Path, chunks: list[Chunk], address: str, cable: str, slept: bool, told: Path) -> None:
    """Computes the prompt as one of two stages, inside a namespace."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    from kvmesh.engine.axes import Axes
    from kvmesh.engine.parallel import RankMesh

    store = TCPStore(address, PORT, 2, rank == 0, timeout=timedelta(seconds=MEET_S))
    mesh = RankMesh(Axes(pp=2), rank, "", timeout_s=MEET_S, store=store, interface=cable)
    told.write_text(json.dumps(compute(mesh, path, chunks, slept)))


def main() -> None:
    from tests.support.mesh.namespaces import two_machines, why_not

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--mbit", default="0,8,2,1")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chunks = cut(args.tokens, args.chunks, args.cut, args.slow)
    if args.rank:
        one = json.loads(args.rank)
        run_rank(one["rank"], Path(one["path"]), chunks, one["address"], one["cable"], True, Path(one["told"]))
        return
    if why := why_not():
        sys.exit(f"benchmarks.cpp_link: {why}")
    from kvmesh.engine.checkpoint import open_checkpoint

    rows = []
    with tempfile.TemporaryDirectory() as name, two_machines() as machines:
        folder = Path(name)
        path = tiny_model(folder)
        hidden = open_checkpoint(path).config.hidden_size
        computed, token = alone(path, chunks, args.repeats)
        times = [LAYERS * chunk.layer_s + own for chunk, own in zip(chunks, computed, strict=True)]
        nbytes = [chunk.tokens * hidden * 4 for chunk in chunks]
        print(f"{args.tokens:,} tokens in {len(chunks)} chunks of equal {args.cut}: {sum(times):.3f} s in all layers, "
              f"{sum(nbytes) / 1e3:.0f} kB over the link")  # fmt: skip
        print(f"{'Mbit/s':>6} {'link s':>7} {'TTFT s':>8} {'predicted':>9} {'ratio':>6} {'bubble':>7} {'predicted':>9}")
        for mbit in map(float, args.mbit.split(",")):
            for one in machines:
                shape(one.name, one.cable, mbit)
            sends = [count * 8 * HEADERS / (mbit * 1e6) if mbit else 0.0 for count in nbytes]
            expected, best = predicted(times, 2, sends), None
            for _ in range(args.repeats):
                told = [folder / f"{rank}.json" for rank in range(2)]
                ranks = []
                for rank, machine in enumerate(machines):
                    this = {"rank": rank, "path": str(path), "address": machines[0].address}
                    this |= {"cable": machine.cable, "told": str(told[rank])}
                    options = ["--rank", json.dumps(this), "--tokens", str(args.tokens), "--chunks", str(args.chunks)]
                    options += ["--cut", args.cut, "--slow", str(args.slow)]
                    command = machine.inside(sys.executable, "-m", "benchmarks.cpp_link", *options)
                    ranks.append(subprocess.Popen(command, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}))
                try:
                    codes = [rank.wait(2 * MEET_S) for rank in ranks]
                finally:
                    for process in ranks:
                        process.kill()
                assert codes == [0, 0], f"ranks ended with {codes}"
                said = [json.loads(one.read_text()) for one in told]
                assert said[-1]["token"] == token, "the tokens are one rank's"
                best = said if best is None or ttft_s(said) < ttft_s(best) else best
            assert best is not None
            taken = ttft_s(best)
            row = {
                "mbit": mbit,
                "ttft_s": taken,
                "predicted_s": expected.ttft_s,
                "ratio": taken / expected.ttft_s,
                "bubble": bubble(best),
                "predicted_bubble": expected.bubble,
            }
            rows.append(row)
            print(f"{mbit:6g} {sum(sends):7.3f} {taken:8.3f} {expected.ttft_s:9.3f} {row['ratio']:6.2f} "
                  f"{row['bubble']:7.1%} {expected.bubble:9.1%}", flush=True)  # fmt: skip
    print("tokens equal at every rate")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
