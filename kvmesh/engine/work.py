"""What a step moves and multiplies, by function of the model, counted from its shapes alone: the numerators of a
roofline. Pure.

Bytes are those that a perfect implementation moves between memory and the processor: each matrix once a step, each
token's KV once for each layer that sees it, activations where they enter and leave a function. Products are the
multiplications and additions of matrix products and attention; what norms and activations compute is not counted.

A layer of linear attention keeps no KV: its states are read and written once for each row and chunk, and each number of
the delta rule's state takes three multiply-adds a token (what the key finds there, what is put there, the answer); that
chunked kernels multiply more is their choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvmesh.engine.config import ModelConfig

# Functions of a layer, in the order of their work; HOST is the time of a layer that none of the others took.
HOST = "host"
IN_LAYER = ("norm", "projections", "rotary", "write", "attention", "mlp", "collectives", HOST)
# Functions of a step outside its layers; REST is the step's time that nothing else took.
REST = "rest"
OUTSIDE = ("embedding", "head", "sampling", REST)
FUNCTIONS = (*IN_LAYER, *OUTSIDE)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Says what one step computed: the position of each decode row's token, the first token and the length of each
    prompt chunk, and how many tokens were sampled."""

    positions: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    sampled: int

    @property
    def tokens(self) -> int:
        return len(self.positions) + sum(length for _, length in self.chunks)


@dataclass(frozen=True, slots=True)
class FunctionWork:
    """Holds bytes by what they are, and floating-point operations (two for each multiply-add)."""

    weights: int = 0
    kv_read: int = 0
    kv_written: int = 0
    activations: int = 0
    products: int = 0

    @property
    def moved(self) -> int:
        """All bytes together."""
        return self.weights + self.kv_read + self.kv_written + self.activations

    def plus(self, other: FunctionWork) -> FunctionWork:
        return FunctionWork(
            self.weights + other.weights,
            self.kv_read + other.kv_read,
            self.kv_written + other.kv_written,
            self.activations + other.activations,
            self.products + other.products,
        )


def seen(position: int, window: int, chunk: int = 0) -> int:
    """Returns how many tokens the one at `position` attends to, itself included."""
    if chunk:
        return position % chunk + 1
    return min(position + 1, window) if window else position + 1


def attended(shape: StepShape, window: int, chunk: int = 0) -> tuple[int, int]:
    """Returns, for one layer with this window or attention chunk (0: none), the pairs of a query and a token that it
    sees, and the tokens whose KV is read: once for a chunk of a prompt, whose queries share it."""
    pairs = read = sum(seen(position, window, chunk) for position in shape.positions)
    for start, length in shape.chunks:
        pairs += sum(seen(position, window, chunk) for position in range(start, start + length))
        read += seen(start, window, chunk) - 1 + length
    return pairs, read


class _Mlps(NamedTuple):
    """Counts weights of the MLPs and experts of all layers."""

    read: int  # in one step
    of_token: int  # that each token is multiplied by
    columns: int  # of gates that each token has


def _mlps(own: ModelConfig, tokens: int) -> _Mlps:
    """Counts as if every expert were as likely for each token; routers are float32 and counted like the others."""
    hidden, dense, experts = own.hidden_size, own.layers, own.experts
    read = of_token = columns = 0
    if experts is not None:
        sparse = len(experts.layers)
        dense -= sparse
        touched = round(experts.count * (1 - (1 - experts.chosen / experts.count) ** tokens))
        read = sparse * hidden * (3 * (touched * experts.inner + experts.shared_inner) + experts.count)
        columns = sparse * (experts.chosen * experts.inner + experts.shared_inner)
        of_token = hidden * (3 * columns + sparse * experts.count)
    mlp = dense * own.intermediate_size
    return _Mlps(read + 3 * hidden * mlp, of_token + 3 * hidden * mlp, columns + mlp)


class _Widths(NamedTuple):
    """Counts what one layer's attention has of a token, in elements, and of a pair of a query and a token."""

    weights: int  # that each token is multiplied by
    asked: int  # queries, and what is written of the token
    rotated: int
    kept: int  # in pages
    answered: int
    of_row: int  # products of a pair in a decode row
    of_chunk: int  # ... and in a chunk


class _Linear(NamedTuple):
    """Counts what all layers of linear attention together have of a token, in elements, and of a request."""

    weights: int = 0  # that each token is multiplied by
    made: int = 0  # of them: channels, the answer's gates, decays and rates
    channels: int = 0
    answered: int = 0
    filters: int = 0  # of the convolutions, float32
    products: int = 0  # multiply-adds of convolution and delta rule
    state_bytes: int = 0  # of a request


def _linear(own: ModelConfig, itemsize: int) -> _Linear:
    delta = own.delta
    if delta is None:
        return _Linear()
    layers, channels, answered = len(delta.layers), delta.key_heads * delta.width, delta.value_heads * delta.value_dim
    made, numbers = channels + answered + 2 * delta.value_heads, answered * delta.key_dim
    return _Linear(
        layers * own.hidden_size * (made + answered),
        layers * made,
        layers * channels,
        layers * answered,
        layers * channels * delta.kernel,
        layers * (3 * numbers + channels * delta.kernel),
        layers * (4 * numbers + (delta.kernel - 1) * channels * itemsize),
    )


def _widths(own: ModelConfig) -> _Widths:
    """A decode row of latent attention meets latents; a chunk meets keys and values, which are made of them, and the
    products that make them of tokens before the chunk are not counted: a perfect implementation need not."""
    hidden, heads, kv_heads, dim, latent = own.hidden_size, own.heads, own.kv_heads, own.head_dim, own.latent
    if latent is None:
        asked, kept = (heads + 2 * kv_heads) * dim, 2 * kv_heads * dim
        pair = 2 * heads * dim
        if own.delta is not None:  # Qwen3-Next's queries have gates beside them
            asked += heads * dim
        return _Widths(hidden * (asked + heads * dim), asked, (heads + kv_heads) * dim, kept, heads * dim, pair, pair)
    queries, answered = heads * (latent.nope + latent.rope), heads * latent.value
    weights = hidden * (dim + answered) + latent.latent * heads * (latent.nope + latent.value)
    weights += latent.query_rank * (hidden + queries) if latent.query_rank else hidden * queries
    return _Widths(
        weights,
        queries + dim,
        (heads + 1) * latent.rope,
        dim,
        answered,
        heads * (dim + latent.latent),
        queries + answered,
    )


def of_stage(own: ModelConfig, layers: range) -> ModelConfig:
    """Returns the configuration of the model as if a stage's layers were all of them: what `work_of` counts of it."""
    experts, delta = own.experts, own.delta
    return replace(
        own,
        layers=len(layers),
        windows=own.windows[layers.start : layers.stop],
        chunks=own.chunks[layers.start : layers.stop],
        experts=None if experts is None else replace(experts, layers=_within(experts.layers, layers)),
        delta=None if delta is None else replace(delta, layers=_within(delta.layers, layers)),
    )


def _within(numbers: Iterable[int], layers: range) -> tuple[int, ...]:
    return tuple(number - layers.start for number in numbers if number in layers)


def work_of(
    own: ModelConfig, itemsize: int, shape: StepShape, *, ranks: int = 1, words: int = 0
) -> dict[str, FunctionWork]:
    """Returns what one rank's part of one step takes, by function. `own` is the model as this rank has it
    (`parallel.share_of`), `words` its part of the vocabulary (0: all of it)."""
    tokens, hidden, layers = shape.tokens, own.hidden_size, own.layers
    words = words or own.vocab_size
    widths, linear = _widths(own), _linear(own, itemsize)
    none = () if own.delta is None else own.delta.layers
    with_kv, held = layers - len(none), (len(shape.positions) + len(shape.chunks)) * linear.state_bytes
    norms = 2 * (own.pre_norms + own.post_norms)
    mlps = _mlps(own, tokens)
    reading, pairs, of_chunks = 0, 0, 0
    for sees, count in Counter(spec.sees for at, spec in enumerate(own.attention) if at not in none).items():
        layer_pairs, layer_read = attended(shape, *sees)
        pairs += count * layer_pairs
        of_chunks += count * attended(replace(shape, positions=()), *sees)[0]
        reading += count * layer_read
    token_kv = widths.kept * itemsize  # of one layer
    found = {
        "norm": FunctionWork(
            weights=layers * norms * hidden * itemsize, activations=layers * norms * 2 * tokens * hidden * itemsize
        ),
        "projections": FunctionWork(
            weights=(with_kv * widths.weights + linear.weights) * itemsize,
            activations=tokens
            * (layers * 2 * hidden + with_kv * (widths.asked + widths.answered) + linear.made + linear.answered)
            * itemsize,
            products=2 * tokens * (with_kv * widths.weights + linear.weights),
        ),
        "rotary": FunctionWork(activations=with_kv * 2 * tokens * widths.rotated * itemsize),
        "write": FunctionWork(kv_written=with_kv * tokens * token_kv + held, activations=with_kv * tokens * token_kv),
        "attention": FunctionWork(
            weights=linear.filters * 4,
            kv_read=reading * token_kv + held,
            activations=tokens * (with_kv * 2 * widths.answered + linear.channels + linear.answered) * itemsize,
            products=2 * (widths.of_row * (pairs - of_chunks) + widths.of_chunk * of_chunks + linear.products * tokens),
        ),
        "mlp": FunctionWork(
            weights=mlps.read * itemsize,
            activations=tokens * (layers * 2 * hidden + 6 * mlps.columns) * itemsize,
            products=2 * tokens * mlps.of_token,
        ),
        "embedding": FunctionWork(weights=tokens * hidden * itemsize, activations=tokens * hidden * itemsize),
    }
    if ranks > 1:  # two sums a layer, each read and written here
        found["collectives"] = FunctionWork(activations=layers * 2 * 2 * tokens * hidden * itemsize)
    if shape.sampled:
        rows = shape.sampled
        found["head"] = FunctionWork(
            weights=(words * hidden + hidden) * itemsize,
            activations=rows * (3 * hidden * itemsize + words * 4),
            products=2 * rows * words * hidden,
        )
        found["sampling"] = FunctionWork(activations=rows * own.vocab_size * 4)
    return found


def chunk_products(config: ModelConfig) -> tuple[float, float]:
    """Returns what a chunk of a prompt costs in products: of each token, and of each pair of a query and a token that
    grows with the context. What layers with a window see counts among the former."""
    tokens, deep = 512, max(512, *config.windows, *config.chunks)
    near, far = (
        sum(work.products for work in work_of(config, 1, StepShape((), ((start, tokens),), 0)).values())
        for start in (deep, 2 * deep)
    )
    pair = (far - near) / (tokens * deep)
    return near / tokens - pair * (deep + (tokens + 1) / 2), pair


def summed(parts: Iterable[Mapping[str, FunctionWork]]) -> dict[str, FunctionWork]:
    """Returns the work of several steps together."""
    total: dict[str, FunctionWork] = {}
    for part in parts:
        for name, work in part.items():
            total[name] = total.get(name, FunctionWork()).plus(work)
    return total
