"""A policy that learns on a live mesh: rollouts, rewards, a gradient step, and the new weights go into the mesh.

    python examples/rollout.py                       # starts a mesh of the demo model on this machine; about a minute
    python examples/rollout.py --url http://host:8000 --model examples/demo-model   # of a mesh with `rollout` on

The reward of an answer is the share of its tokens that hold a digit. Each step asks for a few groups of answers, each
to one prompt; an answer that does better than its group is made likelier (GRPO's advantage, one step of gradient). The
model is read out of this process's memory by the ranks (`TrainerSegment`): no file is written. Rollouts of the next
step begin before the weights change: those in flight then go on with the new ones, so an answer may have tokens of two
epochs. Each token is trained on with its own log-probability, as the mesh told it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rollout import RolloutClient, RolloutGroup, TrainerSegment

DEMO = Path(__file__).parent / "demo-model"
PROMPTS = ["The code of Mira is", "Count: 1 2 3", "Oskar wrote", "The next number is", "Nina said", "In the year"]
EPS = 1e-6


class Policy:
    """The demo model (Qwen 3, tied head) with gradients: what it says, and no more."""

    def __init__(self, folder: Path) -> None:
        self.weights = {k: v.float().requires_grad_() for k, v in load_file(folder / "model.safetensors").items()}
        self.heads, self.kv_heads, self.dim, self.theta = 4, 2, 64, 1e6
        self.layers = 1 + max(int(name.split(".")[2]) for name in self.weights if ".layers." in name)

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the log-probability of each token but the first, `[tokens - 1]`."""
        w, x = self.weights, self.weights["model.embed_tokens.weight"][tokens]
        angles = torch.arange(len(tokens))[:, None] * self.theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        for index in range(self.layers):
            own = f"model.layers.{index}."
            normed = _norm(x, w[own + "input_layernorm.weight"])
            q, k, v = (
                (normed @ w[f"{own}self_attn.{name}_proj.weight"].T).view(len(tokens), -1, self.dim).transpose(0, 1)
                for name in "qkv"
            )
            q, k = (
                _rotated(_norm(part, w[f"{own}self_attn.{name}_norm.weight"]), cos, sin)
                for part, name in ((q, "q"), (k, "k"))
            )
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 0) for part in (k, v))
            said = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            x = x + said.transpose(0, 1).reshape(len(tokens), -1) @ w[own + "self_attn.o_proj.weight"].T
            normed = _norm(x, w[own + "post_attention_layernorm.weight"])
            gate, up = (normed @ w[f"{own}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (functional.silu(gate) * up) @ w[own + "mlp.down_proj.weight"].T
        logits = _norm(x[:-1], w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    def give(self, segment: TrainerSegment) -> None:
        """Copies the weights to where ranks read them."""
        for name, tensor in self.weights.items():
            data = tensor.detach().contiguous()
            segment.add(name, "F32", data.shape, memoryview(data.numpy()))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def loss_of(policy: Policy, groups: list[RolloutGroup], rewards: list[torch.Tensor]) -> torch.Tensor:
    """Returns what a step makes smaller: advantage times likelihood ratio to the weights that made the token, clipped
    as in PPO, so that tokens of older weights count for what they are."""
    total, count = torch.zeros(()), 0
    for group, got in zip(groups, rewards, strict=True):
        advantages = (got - got.mean()) / (got.std() + 1e-3)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            tokens = torch.tensor(group.prompt + sample.token_ids)
            new = policy.logprobs(tokens)[len(group.prompt) - 1 :]
            ratio = (new - torch.tensor(sample.logprobs)).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.25) * advantage).sum()
            count += len(sample.token_ids)
    return total / count


async def learn(url: str, folder: Path, steps: int, n: int, tokens: int) -> list[float]:
    """Returns the mean reward of each step."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores = torch.tensor([any(c.isdigit() for c in tokenizer.decode([i])) for i in range(tokenizer.get_vocab_size())])
    policy, told = Policy(folder), []
    optimizer = torch.optim.Adam(policy.weights.values(), lr=1e-3)

    async with RolloutClient(url) as mesh:
        with TrainerSegment() as segment:

            def begin(step: int) -> list[asyncio.Task[RolloutGroup]]:
                asked = [tokenizer.encode(text).ids for text in PROMPTS]
                return [
                    asyncio.create_task(mesh.group(ids, n, max_tokens=tokens, seed=1000 * step + i, ignore_eos=True))
                    for i, ids in enumerate(asked)
                ]

            running = begin(0)
            for step in range(steps):
                start = time.monotonic()
                groups = await asyncio.gather(*running)
                running = begin(step + 1) if step + 1 < steps else []  # beside the gradient
                rewards = [torch.stack([scores[s.token_ids].float().mean() for s in g.samples]) for g in groups]
                told.append(float(torch.cat(rewards).mean()))
                loss = await asyncio.to_thread(loss_of, policy, groups, rewards)
                optimizer.zero_grad()
                await asyncio.to_thread(loss.backward)
                torch.nn.utils.clip_grad_norm_(policy.weights.values(), 1.0)
                optimizer.step()
                policy.give(segment)
                update = await mesh.update_weights(trainer=segment)
                mixed = sum(len(s.epochs) > 1 for g in groups for s in g.samples)
                print(
                    f"step {step:2d}  reward {told[-1]:.3f}  {time.monotonic() - start:5.2f} s, of which the mesh was "
                    f"paused for {update.paused_s:.2f} s; {mixed} answers of two epochs",
                    flush=True,
                )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="", help="of a gateway; default: a mesh is started here")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=6, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    args = parser.parse_args()
    if args.url:
        asyncio.run(learn(args.url, args.model, args.steps, args.samples, args.tokens))
        return
    with tempfile.TemporaryDirectory() as folder:
        mesh = Mesh(
            MeshSettings(
                model=str(args.model), dtype="float32", run_dir=folder, http_port=0, grpc_port=0, rollout=True,
                memory_mb=64,
            )
        )  # fmt: skip
        mesh.start()
        try:
            mesh.wait_ready(120)
            rewards = asyncio.run(learn(mesh.url, args.model, args.steps, args.samples, args.tokens))
        finally:
            mesh.stop()
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
