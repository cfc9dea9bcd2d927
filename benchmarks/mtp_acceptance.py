"""How many drafted tokens the model keeps, by drafter and by kind of text: what no machine's load changes.

    python -m benchmarks.mtp_acceptance [--model examples/measured-model] [--chats 12] [--tokens 160] [--drafts 4]

The model answers held-out chats of each kind (`scripts.measured_texts`), greedily. Each drafter then goes through each
answer as speculation does: it is asked behind the last token that is kept, its draft is compared with the answer, and
it goes on behind the first token that is not. "first" is the share of drafts whose first token is kept, "a step" how
many tokens a step makes, the one included that the model itself chooses; "asked" the tokens that are drafted for each
that is kept. `mtp` begins with the answer, as on a decode instance that was given no KV of the head; `mtp+prompt` has
gone through the prompt, too, as where prefill and decode are one instance. `draft` is the model of `--draft-model`,
which reads the prompt itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jinja2 import Template
from tokenizers import Tokenizer

from benchmarks.progress import tell
from kvmesh.drafts.drafter import Drafter
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.suffix import SuffixDrafter
from kvmesh.engine.attention.backend import AttentionBackend, TokenSpan
from kvmesh.engine.batch import DecodeInput, PrefillInput, SampleParams
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.draft_model import MOST_CATCH_UP, ModelDrafter
from kvmesh.engine.mtp import MtpDrafter
from kvmesh.engine.rope import Rotation
from kvmesh.engine.runner import Runner, shard_layout, torch_dtype
from scripts.measured_texts import KINDS, held_out

BLOCK, PAGES = 16, 256


class Answer(NamedTuple):
    """Is one greedy answer: `hidden[i]` is what the model answers at token i of prompt and answer together."""

    prompt: list[int]
    tokens: list[int]
    hidden: torch.Tensor


@dataclass(slots=True)
class Kept:
    """Counts what became of one drafter's drafts of one kind of text."""

    drafts: int = 0
    first: int = 0
    drafted: int = 0
    kept: int = 0
    steps: int = 0
    tokens: int = 0

    def told(self) -> str:
        return (
            f"first {self.first / max(1, self.drafts):.2f}  a step {self.tokens / self.steps:.2f}  "
            f"asked {self.drafted / max(1, self.kept):.2f}"
        )


class Answerer:
    """Is the model in float32, one request at a time."""

    def __init__(self, path: Path, dtype: str) -> None:
        checkpoint = open_checkpoint(path)
        layout = shard_layout(checkpoint.config, dtype, BLOCK)
        pages = torch.zeros(PAGES, *layout.shape, dtype=torch_dtype(dtype))
        self.runner = Runner(checkpoint, dtype, "cpu", BLOCK, pages, mtp=True)
        self.pages = tuple(range(PAGES))
        self.ends = set(checkpoint.config.eos_token_ids)

    def answer(self, prompt: list[int], most: int) -> Answer:
        params = SampleParams()
        [first] = self.runner.prefill([PrefillInput(prompt, 0, self.pages, params)])
        assert first is not None
        tokens = [first.token_id]
        while len(tokens) < most and tokens[-1] not in self.ends:
            row = DecodeInput(tokens[-1], len(prompt) + len(tokens) - 1, self.pages, params)
            tokens.append(self.runner.decode([row])[0].token_id)
        return Answer(prompt, tokens, self._hidden([*prompt, *tokens]))

    @torch.inference_mode()
    def _hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        assert isinstance(self.runner.attention, AttentionBackend)
        plan = self.runner.attention.plan_prefill([TokenSpan(0, len(token_ids), self.pages)])

        def attend(layer: int, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            plan.rotate_and_write(layer, qkv, rotation)
            return plan.attend(layer, qkv)

        return self.runner.model.hidden(torch.tensor(token_ids), plan.positions, attend)


def model_drafter(path: Path, target: Runner) -> ModelDrafter:
    """Returns what drafts for a target by the model in a folder."""
    checkpoint = open_checkpoint(path)
    layout = shard_layout(checkpoint.config, target.dtype, BLOCK)
    pages = torch.zeros(PAGES, *layout.shape, dtype=target.dtype)
    return ModelDrafter(Runner(checkpoint, target.dtype, "cpu", BLOCK, pages), target.config.vocab_size)


def follow(drafter: Drafter, handle: int, answer: Answer, most: int, from_prompt: bool, kept: Kept) -> None:
    """Drafts through one answer, and counts."""
    prompt, tokens, before = answer.prompt, answer.tokens, len(answer.prompt) - 1
    drafter.begin(handle, prompt, tokens[:1])
    if from_prompt:
        for at in range(0, len(prompt), 256):
            told = [*prompt, tokens[0]][at + 1 : at + 257]
            drafter.extend(handle, told, answer.hidden[at : at + len(told)])
            drafter.propose([handle], [1])
    at = 1  # tokens that are known
    if isinstance(drafter, ModelDrafter):
        for _ in range(0, len(prompt), MOST_CATCH_UP):  # as while others draft
            drafter.propose([handle], [1])
    while at < len(tokens):
        [draft] = drafter.propose([handle], [most])
        right = 0
        for token, own in zip(draft.tokens, tokens[at:], strict=False):
            if token != own:
                break
            right += 1
        made = min(right + 1, len(tokens) - at)
        kept.drafts += bool(draft.tokens)
        kept.first += right > 0
        kept.drafted += len(draft.tokens)
        kept.kept += right
        kept.steps += 1
        kept.tokens += made
        drafter.extend(handle, tokens[at : at + made], answer.hidden[before + at : before + at + made])
        at += made
    drafter.end(handle)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mtp_acceptance", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("examples/measured-model"))
    parser.add_argument("--draft-model", type=Path, help="model that drafts, of the same tokenizer; none: no such rows")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chats", type=int, default=12, help="chats of each kind (12)")
    parser.add_argument("--tokens", type=int, default=160, help="longest answer, in tokens (160)")
    parser.add_argument("--drafts", type=int, default=4, help="longest draft, in tokens (4)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Answerer(args.model, args.dtype)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    template = Template(json.loads((args.model / "tokenizer_config.json").read_text())["chat_template"])
    figures: dict[str, dict[str, dict[str, int]]] = {}
    for kind in KINDS:
        answers = []
        for chat in held_out(kind, args.chats):
            asked = template.render(messages=chat[:-1], add_generation_prompt=True)
            answers.append(model.answer(tokenizer.encode(asked).ids, args.tokens))
        tell(f"{kind}: {sum(len(answer.tokens) for answer in answers)} tokens answered")
        drafters: dict[str, Drafter] = {
            "ngram": NgramDrafter(),
            "suffix": SuffixDrafter(),
            "mtp": MtpDrafter(model.runner, PAGES),
            "mtp+prompt": MtpDrafter(model.runner, PAGES),
        }
        if args.draft_model:
            drafters["draft"] = model_drafter(args.draft_model, model.runner)
        figures[kind] = {}
        for name, drafter in drafters.items():
            kept = Kept()
            for handle, answer in enumerate(answers):
                follow(drafter, handle, answer, args.drafts, name.endswith("prompt"), kept)
            print(f"{kind:8} {name:10} {kept.told()}", flush=True)
            figures[kind][name] = asdict(kept)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
