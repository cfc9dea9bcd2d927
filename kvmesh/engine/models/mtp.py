"""MTP heads: one layer behind the model's own that predicts one token more (DeepSeek-V3's report, section 2.2).

At position i the head is given what the model made of tokens 0 to i, normed as for the output matrix, and token i + 1,
which the model has chosen by then. It norms both, joins them by one matrix, and computes one layer of the model's own
kind, which attends to the head's own keys and values of positions up to i; what that answers, normed, gives by the
output matrix the logits of token i + 2. Given its own answer in place of the model's, and the token that it chose, it
goes on from draft to draft. That the answers are normed first is not in the report: the published weights are used so
(as vLLM and SGLang do; for drafts of drafts SGLang does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvmesh.engine.attention.backend import AttentionBackend
from kvmesh.engine.attention.choice import make_backend, make_latent_backend
from kvmesh.engine.config import AttentionSpec, ModelConfig
from kvmesh.engine.linear import Linear
from kvmesh.engine.matrix import Matrix, read_matrix
from kvmesh.engine.models import deepseek, qwen3_moe
from kvmesh.engine.models.blocks import Attend, DecoderModel, Layer, RMSNorm, norm_weight
from kvmesh.engine.models.latent import LatentAttention
from kvmesh.engine.models.qwen3_next import GatedAttention, Qwen3NextLayer
from kvmesh.engine.parallel import MLP_AXES, Cut
from kvmesh.engine.tensors import EMBED, HEAD, MTP_EMBED, MTP_HEAD, MTP_JOIN, layer_prefix
from kvmesh.engine.weights import Weights

# Architecture → the function that builds a layer of the model's own kind.
LAYERS: Mapping[str, Callable[[ModelConfig, Weights, int], Layer]] = {
    "Glm4MoeForCausalLM": qwen3_moe.build_layer,
    "Qwen3NextForCausalLM": Qwen3NextLayer,
    "DeepseekV3ForCausalLM": deepseek.build_layer,
    "KimiK2ForCausalLM": deepseek.build_layer,
}


class MtpHead:
    """Is the head of `model`, whose embedding and output matrix it shares unless the files bring others. Raises
    CheckpointError where the files have no whole head."""

    def __init__(self, config: ModelConfig, weights: Weights, model: DecoderModel) -> None:
        weights.checkpoint.check_mtp()
        prefix, eps = layer_prefix(config.layers), config.rms_norm_eps
        self.config, self.model = config, model
        self.layer = LAYERS[config.architecture](config, weights, config.layers)
        self.embed_norm, self.hidden_norm, self.norm = (
            RMSNorm(norm_weight(weights, f"{prefix}{name}.weight"), eps)
            for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self.join = Linear(weights, [prefix + MTP_JOIN.removesuffix(".weight")], False)
        self.embed = self._own(weights, prefix + MTP_EMBED, EMBED) or model.embed or read_matrix(weights, [EMBED])
        words = Cut(0, ((config.vocab_size, 1),), MLP_AXES)
        output = HEAD if HEAD in weights else EMBED
        self.head = self._own(weights, prefix + MTP_HEAD, output, words) or model.head

    @staticmethod
    def _own(weights: Weights, name: str, shared: str, cut: Cut | None = None) -> Matrix | None:
        """Reads a matrix of the head's own; None where the files have none, or the model's once more."""
        if name not in weights or torch.equal(weights.view(name), weights.view(shared)):
            return None
        return read_matrix(weights, [name], cut)

    def backend(self, pages: torch.Tensor) -> AttentionBackend:
        """Returns what attends over the head's pages, `[num_pages, 1, planes, K, block_tokens, D]`."""
        if isinstance(self.layer.attention, LatentAttention):
            return make_latent_backend(pages, self.layer.attention.latent, [self.layer.attention.up])
        return make_backend(pages, self.config.heads, [AttentionSpec(self.config.attention_scale)])

    def __call__(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Computes int64 `[T]` token ids, the normed answers at the tokens before them, `[T, hidden_size]`, and those
        tokens' positions → the head's own normed answers, `[T, hidden_size]`."""
        embedded = self.embed.rows(token_ids)
        x = self.join(torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), -1))
        assert self.layer.input_norm is not None, "the families with heads norm what a layer is given"
        normed, mixer = self.layer.input_norm(x), self.layer.attention
        rotation = mixer.rotation(*self.model.rope(positions))
        if isinstance(mixer, GatedAttention):
            qkv, gate = mixer.project_gated(normed)
            attended = attend(0, qkv, rotation) * gate.sigmoid()
        else:
            attended = attend(0, mixer.project(normed), rotation)
        return self.layer.after(x, attended, self.norm)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the head's normed answers `[T, hidden_size]` → `[T, vocab_size]`, float32, the same bytes at every
        rank."""
        return self.model.group.all_gather(self.head.logits(hidden), self.model.words)
