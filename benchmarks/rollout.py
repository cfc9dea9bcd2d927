"""Rollouts with a long tail while the weights change three times: what each way of changing them costs.

    python -m benchmarks.rollout [--prompts 256] [--samples 4] [--rounds 1] [--out FILE]

The same groups (one length each, log-normal: most are short, few are very long) run on the same mesh, and the weights
change when a quarter, a half and three quarters of the groups are whole:

- `keep`: those in flight go on under the new weights, their KV computed again;
- `finish`: what is in flight ends first, and nothing new begins meanwhile;
- `abort`: what is in flight is ended and begun again;
- `restart`: as `abort`, but the mesh is stopped and started with the new weights, as without `UpdateWeights`.

Every round runs all ways, each round beginning with another one. Tokens that were made and thrown away are counted.
Weights are those of the demo model, moved a little at each step, so that all ways compute as much for a token.

Each token of each whole answer is checked (`EpochCheck`): the weights that it names had been ordered when it came, were
not replaced before its request was sent, and are those that give it the log-probability that the mesh told, after
prompt and answer up to it. That is transformers' word, in float32; so a token that was made by other weights, or on KV
that other weights had made, is found wherever the weights differ in what they think of it (`told apart`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rollout import RolloutClient, RolloutGroup

DEMO = Path(__file__).parent.parent / "examples" / "demo-model"
WAYS = ("keep", "finish", "abort", "restart")
MEDIAN, SPREAD, LONGEST = 16, 1.0, 240  # tokens of an answer: log-normal, cut
UPDATES = 3
PAUSED_S = 1.0  # what was in flight has ended by then
TOLERANCE = 0.001  # of a log-probability: float32 on both sides, in other orders
LOOKS_EVERY = 8  # of so many groups one is compared with all weights, not only with those that its tokens name


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    tokens: int
    seed: int


@dataclass
class Tokens:
    """The tokens of one answer as they came. `steps[i]` numbers the weights that token i names, -1: none that the mesh
    has had; `ordered[i]` is the last step that had been ordered when it came, `sent` the one that was served when its
    request was sent."""

    sent: int
    ordered: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass
class Whole:
    """A group whose answers are all there."""

    group: RolloutGroup
    tokens: list[Tokens]


@dataclass
class RolloutRun:
    """What one way took. `wasted` tokens were made and thrown away. Of `tokens`, `stale` name weights that cannot have
    been current, and `wrong` have not the log-probability that the named weights give: there must be none of either.
    `told_apart` is the share of tokens, of those compared with all weights, for which no others give it as well."""

    way: str
    seconds: float
    paused_s: list[float]
    tokens: int
    wasted: int
    two_epochs: int  # answers with tokens of several
    stale: int = 0
    wrong: int = 0
    told_apart: float = 0.0
    largest_error: float = 0.0
    ended: list[str] = field(default_factory=list)  # why groups had to be asked for again


def jobs(count: int, seed: int = 5) -> list[Job]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = max(4, min(LONGEST, round(MEDIAN * rng.lognormvariate(0, SPREAD))))
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
                memory_mb=192, block_tokens=32, dtype="float32", rollout=True, slo_ttft_ms=600_000, slo_tbt_ms=60_000,
                flags={name: {"served_name": "policy"} for name in ("gateway", "prefill", "decode")},
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


class EpochCheck:
    """Knows what each step's weights think of a token."""

    def __init__(self, steps: Sequence[Path]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        load: Any = AutoModelForCausalLM.from_pretrained
        self._models = [load(str(step), dtype=torch.float32).eval() for step in steps]

    @torch.inference_mode()
    def logprobs(self, step: int, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns `[answers, tokens]`, of answers of one length."""
        ids = torch.tensor([[*prompt, *answer] for answer in answers])
        logits = self._models[step](ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
        found: torch.Tensor = logits.log_softmax(-1).gather(2, ids[:, len(prompt) :, None])[:, :, 0]
        return found

    def judge(self, run: RolloutRun, groups: Sequence[Whole]) -> None:
        """Counts what is stale or wrong, and how many tokens could tell."""
        seen = apart = 0
        for number, whole in enumerate(groups):
            samples, prompt = whole.group.samples, whole.group.prompt
            told = torch.tensor([sample.logprobs for sample in samples])
            named = torch.tensor([one.steps for one in whole.tokens])
            ordered = torch.tensor([one.ordered for one in whole.tokens])
            sent = torch.tensor([[one.sent] for one in whole.tokens])
            back = (named[:, 1:] < named[:, :-1]).sum()
            run.stale += int(((named < sent) | (named > ordered)).sum() + back)
            looks = number % LOOKS_EVERY == 0
            steps = range(len(self._models)) if looks else sorted({*named.flatten().tolist()} - {-1})
            near = {step: self.logprobs(step, prompt, [s.token_ids for s in samples]) - told for step in steps}
            for step, error in near.items():
                own = error[named == step].abs()
                run.wrong += int((own > TOLERANCE).sum())
                run.largest_error = max(run.largest_error, float(own.max()) if len(own) else 0.0)
            if looks:
                others = torch.stack([error.abs().masked_fill(named == step, 9.0) for step, error in near.items()])
                apart, seen = apart + int((others > TOLERANCE).all(0).sum()), seen + named.numel()
        run.told_apart = apart / max(1, seen)


@dataclass
class Trial:
    """One way on one mesh: `run` gives what it took and the groups that are whole."""

    way: str
    mesh: RolloutMesh
    steps: list[Path]
    samples: int

    async def run(self, todo: Sequence[Job]) -> tuple[RolloutRun, list[Whole]]:
        """Runs all groups, with an update at each quarter of them."""
        self._client = RolloutClient(self.mesh.url)
        self._whole: list[Whole] = []
        self._running: dict[asyncio.Task[Whole], Job] = {}
        self._ordered = self._served = 0
        self._wasted, self._ended = 0, list[str]()
        # By epoch; a mesh that was started anew has the weights of its checkpoint, of epoch 0.
        self._step_of = {(await self._client.update_weights(path=str(self.steps[0]))).epoch: 0}
        paused_s, start = [], time.monotonic()
        for job in todo:
            self._begin(job)
        for number in range(UPDATES + 1):
            await self._until(len(todo) * (number + 1) // (UPDATES + 1))
            if number < UPDATES:
                at = time.monotonic()
                await self._change(number + 1)
                paused_s.append(time.monotonic() - at)
        seconds = time.monotonic() - start
        await self._client.close()
        groups = [whole.group for whole in self._whole]
        two = sum(len(sample.epochs) > 1 for group in groups for sample in group.samples)
        return RolloutRun(
            self.way, seconds, paused_s, sum(map(tokens_of, groups)), self._wasted, two, ended=self._ended
        ), self._whole

    def _begin(self, job: Job) -> None:
        self._running[asyncio.create_task(self._group(job))] = job

    async def _group(self, job: Job) -> Whole:
        client, tokens = self._client, [Tokens(self._served) for _ in range(self.samples)]
        asked: RolloutGroup | None = None

        def came(group: RolloutGroup) -> bool:
            nonlocal asked, tokens
            if asked is not None and asked is not group:  # one of its samples found no room: all of it once more
                self._wasted += tokens_of(asked)
                tokens = [Tokens(self._served) for _ in range(self.samples)]
            asked = group
            for sample, one in zip(group.samples, tokens, strict=True):
                one.ordered += [self._ordered] * (len(sample.token_ids) - len(one.ordered))
            return False

        group = await client.group(
            job.prompt, self.samples, max_tokens=job.tokens, seed=job.seed, ignore_eos=True, enough=came
        )
        for sample, one in zip(group.samples, tokens, strict=True):
            one.steps = [self._step_of.get(epoch, -1) for epoch in sample.token_epochs]
        return Whole(group, tokens)

    async def _until(self, count: int) -> None:
        """Waits until so many groups are whole."""
        while len(self._whole) < count:
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                job, whole = self._running.pop(task), task.result()
                if whole.group.error:
                    self._wasted += tokens_of(whole.group)
                    self._ended.append(whole.group.error)
                    self._begin(job)
                else:
                    self._whole.append(whole)

    async def _change(self, step: int) -> None:
        if self.way == "restart":
            await self._restart(step)
            return
        epoch = time.time_ns()
        self._step_of[epoch] = self._ordered = step
        await self._client.update_weights(path=str(self.steps[step]), mode=self.way, epoch=epoch)
        self._served = step

    async def _restart(self, step: int) -> None:
        await self._client.pause("abort")
        await asyncio.wait(
            self._running, timeout=PAUSED_S
        )  # who has not begun waits for a mesh that does not come back
        again, left = list(self._running.items()), list[Job]()
        self._running.clear()
        for task, _ in again:
            task.cancel()
        for (_, job), ended in zip(again, await asyncio.gather(*dict(again), return_exceptions=True), strict=True):
            if isinstance(ended, Whole) and ended.group.finished == self.samples:
                self._whole.append(ended)
                continue
            self._wasted += tokens_of(ended.group) if isinstance(ended, Whole) else 0
            left.append(job)
        await self._client.close()
        await asyncio.to_thread(self.mesh.stop)
        await asyncio.to_thread(self.mesh.start, self.steps[step])
        self._client = RolloutClient(self.mesh.url)
        self._step_of = {0: step}
        self._ordered = self._served = step
        for job in left:
            self._begin(job)


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    todo, found, ways = jobs(args.prompts), list[RolloutRun](), args.ways.split(",")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        steps = [weights(Path(folder), step) for step in range(UPDATES + 1)]
        check, mesh = EpochCheck(steps), RolloutMesh(Path(folder, "run"))
        mesh.start(steps[0])
        try:
            for turn in range(args.rounds):
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    run, whole = asyncio.run(Trial(way, mesh, steps, args.samples).run(todo))
                    check.judge(run, whole)
                    found.append(run)
                    say(_line(run))
        finally:
            mesh.stop()
    if args.out is not None:
        command = f"python -m benchmarks.rollout --prompts {args.prompts} --samples {args.samples}"
        told = {"command": f"{command} --rounds {args.rounds}", "runs": [asdict(one) for one in found]}
        args.out.write_text(json.dumps(told, indent=1) + "\n")
    if any(run.stale or run.wrong for run in found):
        raise SystemExit("some tokens were not made by the weights that they name")


def _line(run: RolloutRun) -> str:
    changes = ", ".join(f"{seconds:.2f}" for seconds in run.paused_s)
    return (
        f"{run.way:8s} {run.seconds:7.1f} s  {run.tokens} tokens, {run.wasted} thrown away; changes took {changes} s; "
        f"{run.two_epochs} answers of several epochs; {run.stale} stale and {run.wrong} wrong tokens, "
        f"{100 * run.told_apart:.1f}% told apart, largest error {run.largest_error:.1e}"
    )


if __name__ == "__main__":
    main()
