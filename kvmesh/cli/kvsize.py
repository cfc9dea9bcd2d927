"""`kvmesh kvsize`: what the KV of a model weighs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.sim.hardware.shapes import ModelShape

GIB = 1 << 30

HELP = """Bytes of KV cache: of a token, of a block, of each rank, and how many tokens a GiB holds.

MODEL is a preset's name, a config.json of Hugging Face, or a folder that holds one. Multi-head, grouped and \
multi-query attention keep 2 x layers x KV heads x head size numbers a token; multi-head latent attention (DeepSeek, \
Kimi) keeps layers x (latent + rotary key), whatever its config says of KV heads. Examples:

    kvmesh kvsize deepseek-v3

    kvmesh kvsize llama3-70b --tp 8 --block-tokens 256

    kvmesh kvsize ./my-model/ --dtype fp8 --json

    kvmesh kvsize kimi-k2 --gpu h200 --gpus 8

    kvmesh kvsize gemma3-27b --compare

Layers that keep other things than all tokens' keys and values (a window, a chunk, a state) are shown group by \
group. With --gpu it says how many tokens fit beside the weights of a node's GPUs: under tensor parallelism (TP), \
with each request's tokens dealt out to the GPUs (DCP), and with requests of their own at each GPU (DP). With \
--compare it says how many tokens of running requests a GiB holds, beside what it would hold if every layer kept a \
block of keys and values for every token.
"""
CONTEXTS = (4096, 32_768, 131_072)


def sizes(
    model: str, dtype: str, tp: int, block_tokens: int, gpu: str = "", gpus: int = 8, *, comparing: bool = False
) -> dict[str, Any]:
    """Everything that is printed. ConfigError names what is missing or wrong."""
    from kvmesh.kvcache.cache_groups import is_single
    from kvmesh.sim.hardware.shapes import shape_of

    if block_tokens < 1:
        raise ConfigError(f"block_tokens={block_tokens}: must be at least 1", field="block_tokens")
    shape = shape_of(model)
    token, rank = shape.kv_bytes_per_token(dtype), shape.kv_bytes_per_rank(tp, dtype)
    beyond = 0
    if shape.window_layers:
        beyond = token * (shape.kv_layers - shape.window_layers) // shape.kv_layers
    grouped = {} if is_single(shape.groups) else _by_groups(shape, dtype, block_tokens)
    return {
        "model": shape.name,
        "attention": _attention(shape),
        "layers": shape.layers,
        "kv_layers": shape.kv_layers,
        "params": shape.params,
        "active_params": shape.active_params,
        "dtype": dtype,
        "bytes_per_token": token,
        "block_tokens": block_tokens,
        "bytes_per_block": token * block_tokens,
        "tokens_per_gib": GIB // token,
        "tp": tp,
        "bytes_per_token_of_a_rank": rank,
        "copies": rank * tp / token,
        "window_tokens": shape.window,
        "window_layers": shape.window_layers,
        "bytes_per_token_beyond_window": beyond,
        **grouped,
        **({"gpu": gpu, "gpus": gpus, "room": _room(shape, gpu, gpus, dtype, block_tokens)} if gpu else {}),
        **({"compared": compared(shape, dtype, block_tokens)} if comparing else {}),
    }


def compared(shape: ModelShape, dtype: str, block_tokens: int) -> list[dict[str, Any]]:
    """Returns, for running requests of each length, how many of their tokens a GiB holds: by cache groups, and if every
    layer kept a block of keys and values (of MLA those of all heads, made of the latent) for every token. Requests are
    counted in whole blocks, the one begun included, and with both slots of a state."""
    from kvmesh.kvcache.cache_groups import object_shard
    from kvmesh.sim.hardware.shape_groups import row_objects
    from kvmesh.sim.hardware.shapes import itemsize

    objects = [(g, object_shard(g, block_tokens, itemsize(g.layout.dtype or dtype)).shard_bytes) for g in shape.groups]
    every_block = shape.full_heads_per_token * itemsize(dtype) * block_tokens
    found = []
    for tokens in CONTEXTS:
        by_groups = sum(nbytes * row_objects(group, block_tokens, tokens) for group, nbytes in objects)
        in_every_layer = every_block * -(-(tokens + 1) // block_tokens)
        found.append(
            {
                "context": tokens,
                "row_bytes": by_groups,
                "row_bytes_in_every_layer": in_every_layer,
                "tokens_per_gib": GIB * tokens // by_groups,
                "tokens_per_gib_in_every_layer": GIB * tokens // in_every_layer,
            }
        )
    return found


def _by_groups(shape: ModelShape, dtype: str, block_tokens: int) -> dict[str, Any]:
    """Each group and their sums, and how many tokens a GiB holds in requests of each length: by groups, and were keys
    and values of every token kept in every layer."""
    from kvmesh.sim.hardware.shape_groups import group_bytes
    from kvmesh.sim.hardware.shapes import itemsize

    groups = [
        group_bytes(group, block_tokens, itemsize(group.layout.dtype or dtype), CONTEXTS) for group in shape.groups
    ]
    sums: dict[str, dict[str, int]] = {
        what: {str(at): sum(group[what][str(at)] for group in groups) for at in CONTEXTS}  # type: ignore[index]
        for what in ("row_bytes", "prefix_bytes")
    }
    every = shape.kv_bytes_per_token(dtype) // shape.kv_layers * shape.layers
    return {
        "groups": groups,
        **sums,
        "tokens_per_gib_by_groups": {str(at): GIB * at // sums["row_bytes"][str(at)] for at in CONTEXTS},
        "tokens_per_gib_in_every_layer": GIB // every,
    }


def _room(shape: ModelShape, gpu: str, gpus: int, dtype: str, block_tokens: int) -> list[dict[str, Any]]:
    from kvmesh.sim.hardware.hardware import hardware
    from kvmesh.sim.hardware.node_room import rooms

    return [asdict(one) for one in rooms(shape, hardware(gpu), gpus, dtype, block_tokens)]


def _attention(shape: ModelShape) -> str:
    if shape.mla:
        return f"MLA, latent of {shape.kv_lora_rank} + {shape.rope_dim}"
    kind = "MHA" if shape.kv_heads == shape.heads else "MQA" if shape.kv_heads == 1 else "GQA"
    return f"{kind}, {shape.kv_heads} KV head{'s' if shape.kv_heads > 1 else ''} of {shape.head_dim}"


def lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person reads."""
    found = [
        ("model", f"{told['model']}, {_billions(told)}, {told['layers']} layers, {told['attention']}"),
        (f"KV of a token, {told['dtype']}", f"{told['bytes_per_token']:,} B"),
        (f"of a block of {told['block_tokens']} tokens", f"{told['bytes_per_block']:,} B"),
        ("tokens in a GiB", f"{told['tokens_per_gib']:,}"),
    ]
    if told["tp"] > 1:
        copies = f" (kept {told['copies']:g} times in all)" if told["copies"] > 1 else ""
        found.append((f"of a token, each of {told['tp']} ranks", f"{told['bytes_per_token_of_a_rank']:,} B{copies}"))
    if told["window_layers"]:
        seen = f"{told['window_layers']} of {told['kv_layers']} layers see {told['window_tokens']:,} tokens back"
        beyond = f"{told['bytes_per_token_beyond_window']:,} B"
        found.append(("sliding window", f"{seen}; a token before them needs {beyond}"))
    if told["kv_layers"] < told["layers"]:
        found.append(("layers with KV", f"{told['kv_layers']} of {told['layers']}"))
    for group in told.get("groups", ()):
        found.append((f"group {group['name']}", _group_text(group, told["block_tokens"])))
    for what, text in (("row_bytes", "a running request"), ("prefix_bytes", "a stored prefix")):
        if what in told:
            found.append((f"{text} of {_contexts(told[what])} tokens", _sized(told[what])))
    if "tokens_per_gib_by_groups" in told:
        of_each = " / ".join(f"{tokens:,}" for tokens in told["tokens_per_gib_by_groups"].values())
        text = f"{of_each}; {told['tokens_per_gib_in_every_layer']:,} if every layer kept every token"
        found.append((f"tokens in a GiB, in requests of {_contexts(told['tokens_per_gib_by_groups'])}", text))
    for one in told.get("compared", ()):
        here, there = one["tokens_per_gib"], one["tokens_per_gib_in_every_layer"]
        times = one["row_bytes_in_every_layer"] / one["row_bytes"]
        text = f"{here:,}, {times:.2f} times the {there:,} of a block of every layer for every token"
        found.append((f"tokens in a GiB, in requests of {one['context'] // 1024}k", text))
    for one in told.get("room", ()):
        name = f"{told['gpus']} x {told['gpu']}, {one['spread'].upper()}{told['gpus']}, {one['weights']} weights"
        found.append((name, one["why_not"] or _room_text(one)))
    return found


def _contexts(by_context: dict[str, int]) -> str:
    return " / ".join(f"{int(at) // 1024}k" for at in by_context)


def _sized(by_context: dict[str, int]) -> str:
    return " / ".join(f"{nbytes / (1 << 20):,.1f} MiB" for nbytes in by_context.values())


def _group_text(group: dict[str, Any], block_tokens: int) -> str:
    layers = f"{group['layers']} layers"
    if group["kind"] == "state":
        return f"{layers} keep a state of {group['object_bytes']:,} B"
    kept = {
        "all": "all tokens",
        "window": f"the last {group['keep']:,} tokens",
        "chunk": f"tokens since the last multiple of {group['keep']:,}",
    }[group["kind"]]
    sizes = f"{group['bytes_per_token']:,} B a token in view, {group['bytes_per_token_beyond']:,} B beyond"
    return f"{layers} keep {kept}: {sizes}, {group['object_bytes']:,} B a block of {block_tokens}"


def _room_text(one: dict[str, Any]) -> str:
    longest = f", of one request {one['longest']:,}" if one["longest"] < one["tokens"] else ""
    return f"{one['tokens']:,} tokens{longest}; {one['weight_bytes'] / GIB:,.1f} GiB of weights at each"


def _billions(told: dict[str, Any]) -> str:
    text = f"{_short(told['params'])} parameters"
    return text if told["active_params"] == told["params"] else f"{text} ({_short(told['active_params'])} active)"


def _short(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e8 else f"{count / 1e6:.3g}M"


@one_line_errors
def kvsize(
    model: Annotated[str, typer.Argument(help="Preset, config.json, or a folder with one.", metavar="MODEL")],
    dtype: Annotated[str, typer.Option(help="Of the KV: bf16, fp16, fp32, fp8 or int8.")] = "bf16",
    tp: Annotated[int, typer.Option(help="Ranks of tensor parallelism.", metavar="N", min=1)] = 1,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.", metavar="N", min=1)] = 64,
    gpu: Annotated[str, typer.Option(help="A kind of GPU: what fits into a node of them.", metavar="NAME")] = "",
    gpus: Annotated[int, typer.Option(help="GPUs of that node.", metavar="N", min=1)] = 8,
    compare: Annotated[bool, typer.Option("--compare", help="Beside a block of every layer for every token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Bytes of KV cache of a model."""
    told = sizes(model, dtype, tp, block_tokens, gpu, gpus, comparing=compare)
    out = console()
    if as_json:
        out.out(json.dumps(told, indent=2), highlight=False)
        return
    from rich.table import Table

    wide_enough(out)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in lines(told):
        table.add_row(f"[dim]{name}[/]", value)
    out.print(table)
