"""How many tokens of KV fit into the GPUs of one node beside a model's weights, by how the model is spread over them.

tp    weights and heads are dealt out to all GPUs; a latent, and heads that are fewer than GPUs, lie there several
      times
dcp   weights as in tp; the tokens of every request are dealt out, so nothing lies there twice
dp    each GPU has requests of its own, and all weights but those of experts, which are dealt out
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, is_single
from kvmesh.sim.hardware.hardware import Hardware
from kvmesh.sim.hardware.shape_groups import group_bytes
from kvmesh.sim.hardware.shapes import ModelShape, itemsize

ROW_TOKENS = 32_768  # of the requests that are counted with, where a model keeps less of old tokens
BF16 = 2.0
# Bytes of one parameter of the matrices that such checkpoints quantize. INT4 has a bf16 scale for each 32 weights; of a
# model with experts they quantize the experts alone. Embedding and head stay bf16.
WEIGHTS = {"int4": 0.5 + 2 / 32, "fp8": 1.0, "bf16": BF16}
SPREADS = ("tp", "dcp", "dp")


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """One way to spread a model. `tokens` fit in all, of which one request can have `longest`; `why_not` says why there
    are none."""

    weights: str
    spread: str
    weight_bytes: float  # at each GPU
    tokens: int
    longest: int
    why_not: str = ""


def rooms(shape: ModelShape, gpu: Hardware, gpus: int, dtype: str, block_tokens: int) -> list[NodeRoom]:
    """Returns what fits for each kind of weights and each spread. Raises ConfigError for no GPU or an unknown dtype."""
    if gpus < 1:
        raise ConfigError(f"gpus={gpus}: must be at least 1", field="gpus")
    itemsize(dtype)
    return [_room(shape, gpu, gpus, dtype, block_tokens, kind, spread) for kind in WEIGHTS for spread in SPREADS]


def _room(
    shape: ModelShape, gpu: Hardware, gpus: int, dtype: str, block_tokens: int, kind: str, spread: str
) -> NodeRoom:
    weights = weight_bytes(shape, kind, gpus, spread == "dp")
    try:
        of_token = token_bytes(shape, gpus if spread == "tp" else 1, dtype, block_tokens)
    except ConfigError as error:
        return NodeRoom(kind, spread, weights, 0, 0, error.message)
    free = gpu.memory_bytes * gpu.efficiency.device_memory - weights
    if free < 0:
        return NodeRoom(kind, spread, weights, 0, 0, "the weights do not fit")
    here = int(free / of_token)
    if spread == "tp":
        return NodeRoom(kind, spread, weights, here, here)
    return NodeRoom(kind, spread, weights, gpus * here, here if spread == "dp" else gpus * here)


def weight_bytes(shape: ModelShape, kind: str, gpus: int, own_rows: bool) -> float:
    """Returns the bytes of weights at each of `gpus` GPUs; with `own_rows` only experts are dealt out."""
    experts = shape.expert_layers * shape.experts * shape.expert_params
    others = shape.layer_params - experts
    vocabulary = shape.params - shape.layer_params
    of_others = BF16 if experts and kind == "int4" else WEIGHTS[kind]
    everywhere = others * of_others + vocabulary * BF16
    return experts * WEIGHTS[kind] / gpus + (everywhere if own_rows else everywhere / gpus)


def token_bytes(shape: ModelShape, tp: int, dtype: str, block_tokens: int) -> float:
    """Returns the bytes of one token at one of `tp` ranks that deal out heads; of a token among ROW_TOKENS where the
    model does not keep all of every token."""
    if is_single(shape.groups):
        return shape.kv_bytes_per_rank(tp, dtype)
    shape.kv_bytes_per_rank(tp, dtype)  # refuses heads that do not divide
    total = 0.0
    for group in shape.groups:
        row = group_bytes(group, block_tokens, itemsize(group.layout.dtype or dtype), (ROW_TOKENS,))["row_bytes"]
        assert isinstance(row, dict)
        total += row[str(ROW_TOKENS)] / _parts(shape, group, tp)
    return total / ROW_TOKENS


def _parts(shape: ModelShape, group: CacheGroup, tp: int) -> int:
    """Returns into how many parts the ranks cut an object: those of a state are channels or heads, one head is kept
    whole by all."""
    return tp if group.kind is CacheKind.STATE else min(group.layout.heads, tp)
