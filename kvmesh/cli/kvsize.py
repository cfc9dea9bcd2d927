"""`kvmesh kvsize`: what the KV of a model weighs."""

from __future__ import annotations

import json
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
"""


def sizes(model: str, dtype: str, tp: int, block_tokens: int) -> dict[str, Any]:
    """Everything that is printed. ConfigError names what is missing or wrong."""
    from kvmesh.sim.hardware.shapes import shape_of

    if block_tokens < 1:
        raise ConfigError(f"block_tokens={block_tokens}: must be at least 1", field="block_tokens")
    shape = shape_of(model)
    token, rank = shape.kv_bytes_per_token(dtype), shape.kv_bytes_per_rank(tp, dtype)
    beyond = 0
    if shape.window_layers:
        beyond = token * (shape.kv_layers - shape.window_layers) // shape.kv_layers
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
    }


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
    return found


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
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Bytes of KV cache of a model."""
    told = sizes(model, dtype, tp, block_tokens)
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
