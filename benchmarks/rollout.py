"""Rollouts with a long tail while the weights change three times: what each way of changing them costs.

    python -m benchmarks.rollout [--prompts 256] [--samples 4] [--out FILE]

The same groups (one length each, one in ten much longer) run on the same mesh, and the weights change when a quarter,
a half and three quarters of the groups are whole:

- `keep`: those in flight go on under the new weights, their KV computed again;
- `finish`: what is in flight ends first, and nothing new begins meanwhile;
- `abort`: what is in flight is ended and begun again;
- `restart`: as `abort`, but the mesh is stopped and started with the new weights, as without `UpdateWeights`.

Tokens that were made and thrown away are counted. Weights are those of the demo model, moved a little at each step, so
that all ways compute as much for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rollout import RolloutClient, RolloutGroup

DEMO = Path(__file__).parent.parent / "examples" / "demo-model"
WAYS = ("keep", "finish", "abort", "restart")
SHORT, LONG = (12, 40), (150, 300)  # tokens of an answer
UPDATES = 3
PAUSED_S = 1.0  # what was in flight has ended by then


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    tokens: int
    seed: int


@dataclass
class RolloutRun:
    """What one way took. `wasted` tokens were made and thrown away; `stale` tokens name no weights that the mesh had
    when they were made, of which there must be none."""

    way: str
    seconds: float
    paused_s: list[float]
    tokens: int
    wasted: int
    two_epochs: int  # answers with tokens of several
    stale: int


def jobs(count: int, seed: int = 5) -> list[Job]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = rng.randint(*(LONG if rng.random() < 0.1 else SHORT))
        made.append(Job([rng.randrange(5, 2000) for _ in range(rng.randint(24, 96))], length, number))
    return made


def weights(folder: Path, step: int) -> Path:
    """The demo model after so many steps of something like training."""
    made = folder / f"step-{step}"
    shutil.copytree(DEMO, made)
    generator = torch.Generator().manual_seed(step)
    tensors = load_file(DEMO / "model.safetensors")
    for tensor in tensors.values():
        tensor += (torch.randn(tensor.shape, generator=generator) * 0.002 * step).to(tensor.dtype)
    save_file(tensors, made / "model.safetensors")
    return made


class RolloutMesh:
    """A mesh that can be stopped and started with other weights."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._mesh: Mesh | None = None

    def start(self, model: Path) -> None:
        self._mesh = Mesh(
            MeshSettings(
                model=str(model), prefill=1, decode=1, http_port=0, grpc_port=0, run_dir=str(self._run_dir),
                memory_mb=192, block_tokens=32, rollout=True, flags={"gateway": {"served_name": "policy"},
                "prefill": {"served_name": "policy"}, "decode": {"served_name": "policy"}},
            )
        )  # fmt: skip
        self._mesh.start()
        self._mesh.wait_ready(180)

    @property
    def url(self) -> str:
        assert self._mesh is not None
        return self._mesh.url

    def stop(self) -> None:
        if self._mesh is not None:
            self._mesh.stop()
            self._mesh = None


def tokens_of(group: RolloutGroup) -> int:
    return sum(len(sample.token_ids) for sample in group.samples)


async def run(way: str, mesh: RolloutMesh, steps: list[Path], todo: list[Job], samples: int) -> RolloutRun:
    """Runs all groups, with an update at each quarter of them."""
    client = RolloutClient(mesh.url)
    epochs: list[tuple[float, int]] = [(0.0, (await client.update_weights(path=str(steps[0]))).epoch)]
    whole: list[RolloutGroup] = []
    running: dict[asyncio.Task[RolloutGroup], Job] = {}
    left: list[Job] = []
    paused_s, wasted, start = [], 0, time.monotonic()

    def begin(job: Job) -> None:
        task = asyncio.create_task(
            client.group(job.prompt, samples, max_tokens=job.tokens, seed=job.seed, ignore_eos=True, logprobs=False)
        )
        running[task] = job

    async def change(model: Path) -> None:
        nonlocal client, wasted
        at = time.monotonic()
        if way != "restart":
            epochs.append((at, (await client.update_weights(path=str(model), mode=way)).epoch))
        else:
            await client.pause("abort")
            await asyncio.wait(running, timeout=PAUSED_S)  # who has not begun waits for a mesh that does not come back
            again = list(running.items())
            running.clear()
            for task, job in again:
                task.cancel()
                [group] = await asyncio.gather(task, return_exceptions=True)
                if isinstance(group, RolloutGroup) and group.finished == samples:
                    whole.append(group)
                    continue
                wasted += tokens_of(group) if isinstance(group, RolloutGroup) else 0
                left.append(job)
            await client.close()
            await asyncio.to_thread(mesh.stop)
            await asyncio.to_thread(mesh.start, model)
            client = RolloutClient(mesh.url)
            epochs.append((at, 0))
            while left:
                begin(left.pop())
        paused_s.append(time.monotonic() - at)

    for job in todo:
        begin(job)
    for number in range(UPDATES + 1):
        quarter = len(todo) * (number + 1) // (UPDATES + 1)
        while len(whole) < quarter:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                job, group = running.pop(task), task.result()
                if group.error:
                    wasted += tokens_of(group)
                    begin(job)
                else:
                    whole.append(group)
        if number < UPDATES:
            await change(steps[number + 1])
    seconds = time.monotonic() - start
    await client.close()
    known = {epoch for _, epoch in epochs}
    answers = [sample for group in whole for sample in group.samples]
    return RolloutRun(
        way,
        seconds,
        paused_s,
        sum(map(tokens_of, whole)),
        wasted,
        sum(len(answer.epochs) > 1 for answer in answers),
        sum(epoch not in known for answer in answers for epoch in answer.token_epochs),
    )


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    todo, found = jobs(args.prompts), []
    with tempfile.TemporaryDirectory() as folder:
        steps = [weights(Path(folder), step) for step in range(UPDATES + 1)]
        for way in args.ways.split(","):
            mesh = RolloutMesh(Path(folder, f"run-{way}"))
            mesh.start(steps[0])
            try:
                found.append(asyncio.run(run(way, mesh, steps, todo, args.samples)))
            finally:
                mesh.stop()
            one = found[-1]
            changes = ", ".join(f"{seconds:.2f}" for seconds in one.paused_s)
            say(
                f"{one.way:8s} {one.seconds:7.1f} s  {one.tokens} tokens, {one.wasted} thrown away; changes took "
                f"{changes} s; {one.two_epochs} answers of several epochs, {one.stale} stale tokens"
            )
    if args.out is not None:
        told = {"prompts": args.prompts, "samples": args.samples, "runs": [asdict(one) for one in found]}
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
