"""Tiny random checkpoints with an MTP head, and the head in plain torch as its papers state it.

transformers has no heads, but it has the layers that they are made of: a model of one layer more is drawn, whose last
layer becomes the head's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.reference import reference_model

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next")
QWEN3_NEXT = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


class MtpReference:
    """Computes the model below its last layer, and the head that is made of it."""

    def __init__(self, path: Path, own: dict[str, torch.Tensor], adds_one: bool) -> None:
        model = reference_model(str(path))
        self.model, self.own, self.adds_one = model.model, own, float(adds_one)
        self.layers, self.layer = list(model.model.layers)[:-1], model.model.layers[-1]
        self.output = model.lm_head.weight
        self.eps = model.config.rms_norm_eps

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], eps=self.eps) * (self.adds_one + self.own[name])

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns what the model's layers answer, before the last norm: `[T, hidden_size]`."""
        seen: list[torch.Tensor] = []
        hook = self.layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        self.model(torch.tensor([list(token_ids)]), use_cache=False)
        hook.remove()
        return seen[0][0]

    @torch.inference_mode()
    def ahead(self, hidden: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the head's normed answers of normed hidden states and the tokens after them: `[T, hidden_size]`."""
        embedded = self.model.embed_tokens(torch.tensor(list(token_ids)))
        joined = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), -1) @ self.own["eh_proj"].T
        count = len(joined)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = self.model.rotary_emb(joined[None], torch.arange(count)[None])
        answer = self.layer(joined[None], attention_mask=mask, position_embeddings=angles, position_ids=None)
        answer = answer[0] if isinstance(answer, tuple) else answer
        return self._norm(answer[0] if answer.dim() == 3 else answer, "shared_head.norm")

    @torch.inference_mode()
    def drafts(self, hidden: torch.Tensor, token_ids: Sequence[int], count: int) -> list[int]:
        """Returns the drafts behind the last token, which nothing has been computed of but its choice."""
        states, tokens = self.model.norm(hidden), list(token_ids)
        for _ in range(count):
            answer = self.ahead(states, tokens)[-1:]
            tokens.append(int((answer @ self.output.T).argmax()))
            states = torch.cat((states, answer))
        return tokens[len(token_ids) :]


def make_mtp(family: str, path: Path, seed: int = 3) -> tuple[Path, MtpReference]:
    """Writes a checkpoint of the family with a head, and returns it with its reference."""
    whole, folder = path / "whole", path / "cut"
    if family == "qwen3_next":
        make_qwen3_next(whole, seed=seed, num_hidden_layers=6)
        make_qwen3_next(folder, seed=seed, num_hidden_layers=6)
    else:
        keys: dict[str, Any] = FAMILY_ZOO[family] | {"shards": 1}
        make_checkpoint(whole, seed=seed, **keys)
        make_checkpoint(folder, seed=seed, **keys)
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    hidden, last = raw["hidden_size"], raw["num_hidden_layers"] - 1
    generator = torch.Generator().manual_seed(seed)
    adds_one = family == "qwen3_next"
    own = {
        name: (0.0 if adds_one else 1.0) + 0.3 * torch.randn(hidden, generator=generator)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    own["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5
    reference = MtpReference(whole, own, adds_one)
    prefix = f"model.layers.{last}."
    if family == "qwen3_next":
        tensors = {name.replace(prefix, "mtp.layers.0."): value for name, value in tensors.items()}
        tensors |= {f"mtp.{QWEN3_NEXT[name]}.weight": value for name, value in own.items()}
        raw["layer_types"] = raw["layer_types"][:last]
    else:
        tensors |= {f"{prefix}{name}.weight": value for name, value in own.items()}
        raw["num_nextn_predict_layers"] = 1
    raw["num_hidden_layers"] = last
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, reference
