"""Log-probabilities of the tokens of one prompt, as decode tells them, and as clients are told them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import orjson

from kvmesh.errors import InternalError
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.rpc.pb import common_pb2

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


def number(logprob: float) -> float:
    """Returns a logprob that JSON can hold."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt after the first, given those before it: its rank is 1 where it is the likeliest. `top` has
    (token id, logprob) of the likeliest, in order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class ScoredPrompt:
    """The tokens of a prompt with the log-probabilities of all but the first."""

    __slots__ = ("_logprobs", "_ranks", "_top", "_top_ids", "message", "token_ids")

    def __init__(self, message: common_pb2.PromptLogprobs, token_ids: bytes) -> None:
        """Takes what decode says of the prompt `token_ids`, packed. Raises InternalError where it is not of that
        prompt."""
        self.message = message
        self.token_ids = unpack_tokens(token_ids)
        self._logprobs = _filled(array("f"), message.logprobs)
        self._ranks = _filled(array("I"), message.ranks)
        self._top_ids = _filled(array("I"), message.top_ids)
        count = len(self.token_ids) - 1
        self._top = len(self._top_ids) // count if count else 0
        if (len(self._logprobs), len(self._ranks), len(self._top_ids)) != (
            count * (1 + self._top),
            count,
            count * self._top,
        ):
            raise InternalError(
                f"log-probabilities of a prompt of {count + 1} tokens came as {len(self._logprobs)} numbers, "
                f"{len(self._ranks)} ranks and {len(self._top_ids)} ids"
            )

    def tokens(self, top: int) -> Iterator[PromptToken]:
        """Returns the tokens after the first, with `top` of the likeliest."""
        shown, width = min(top, self._top), 1 + self._top
        for at, token_id in enumerate(self.token_ids[1:]):
            own, first = at * width, at * self._top
            best = zip(self._top_ids[first : first + shown], self._logprobs[own + 1 : own + 1 + shown], strict=True)
            yield PromptToken(token_id, number(self._logprobs[own]), self._ranks[at], tuple(best))


Number = TypeVar("Number", int, float)


def _filled(found: array[Number], data: bytes) -> array[Number]:
    if len(data) % found.itemsize:
        raise InternalError(f"log-probabilities of a prompt came as {len(data)} bytes")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def vllm_form(scored: ScoredPrompt, top: int, text: Callable[[int], str]) -> orjson.Fragment:
    """Returns `prompt_logprobs` as vLLM tells them: null for the first token, for each other one an object by token id,
    its own id first. `text` reads one token."""
    names: dict[int, str] = {}

    def entry(token_id: int, logprob: float, rank: int) -> str:
        name = names.get(token_id)
        if name is None:
            name = names[token_id] = orjson.dumps(text(token_id)).decode()
        return f'"{token_id}":{{"logprob":{number(logprob)!r},"rank":{rank},"decoded_token":{name}}}'

    parts = ["null"]
    for token in scored.tokens(top):
        entries = [entry(token.token_id, token.logprob, token.rank)]
        entries += [
            entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(token.top, 1)
            if token_id != token.token_id
        ]
        parts.append("{" + ",".join(entries) + "}")
    return orjson.Fragment("[" + ",".join(parts) + "]")
