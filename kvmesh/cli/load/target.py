"""The mesh that a load is sent to: its URL, model, key, and what the model can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvmesh.cli import runs
from kvmesh.cli.stream import authorization, cards_of, trust, trusted
from kvmesh.errors import ConfigError, Unavailable


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """`context_tokens`: longest prompt + answer; `block_tokens`: of the engine, 0 when nobody tells."""

    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    context_tokens: int
    vocab_size: int
    block_tokens: int


def find(
    url: str | None, run_dir: Path | None, model: str | None, api_key: str | None, vocab: int | None
) -> LoadTarget:
    """Ask `url`, or the mesh of `run_dir` (the latest), what it serves. ConfigError: no such model, or a fact that
    nobody tells; Unavailable: nothing answers."""
    if url is None:
        run = runs.find_running(run_dir)
        trust(run.http_ca)
        url = runs.rest(run)
    url = url.rstrip("/").removesuffix("/v1")
    headers = authorization(api_key)
    card = _card(url, headers, model)
    vocab = vocab or card.get("vocab_size")
    if not vocab:
        raise ConfigError("vocab: this gateway does not tell the size of the vocabulary; give --vocab N", field="vocab")
    return LoadTarget(
        url=url,
        model=card["id"],
        headers=headers,
        context_tokens=int(card.get("max_context_tokens") or 0),
        vocab_size=int(vocab),
        block_tokens=int(card.get("block_tokens") or 0),
    )


def _card(url: str, headers: dict[str, str], model: str | None) -> dict[str, Any]:
    cards = {str(card["id"]): card for card in cards_of(url, headers)}
    if not cards:
        raise Unavailable(f"{url} serves no model yet")
    if model is not None and model not in cards:
        raise ConfigError(f"model={model!r}: {url} serves {', '.join(cards)}", field="model")
    found: dict[str, Any] = cards[model] if model else next(iter(cards.values()))
    return found


def client(target: LoadTarget, timeout_s: float) -> httpx.AsyncClient:
    """A client without bounds on connections of its own; the caller closes it."""
    return httpx.AsyncClient(
        headers={**target.headers, "Accept-Encoding": "identity"},
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        verify=trusted(),
        trust_env=False,
    )
