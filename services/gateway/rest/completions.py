"""POST /v1/completions: OpenAI's completions, as bodies and as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema

from kvmesh.rpc.protocol import MAX_TOP_LOGPROBS
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.generation import Generation, Prompt, between, refused
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest.frames import Frames, Piece
from kvmesh.services.gateway.rest.interface import AnswerWriter
from kvmesh.services.gateway.rest.openai import TEXTS, UNSUPPORTED, OpenAIFields, check_ids, limits_of, wrong
from kvmesh.services.gateway.text.completion import Delta, TokenLogprob
from kvmesh.services.gateway.text.prompt_logprobs import number

DEFAULT_COMPLETION_TOKENS = 16


def _check_prompt(value: Any, info: ValidationInfo) -> tuple[Prompt, ...]:
    """string | [string] | [id] | [[id]] to a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong("must be a string, a list of strings, a list of token ids or a list of lists of them")
    if not value:
        raise wrong("must not be empty")
    if isinstance(value[0], str | list):
        limit = limits_of(info).max_choices
        if len(value) > limit:
            raise wrong(f"{len(value)} prompts; at most {limit} are allowed")
        for one in value:
            if type(one) is not type(value[0]):
                raise wrong("its prompts must all be strings or all be lists of token ids")
            if isinstance(one, list):
                check_ids("prompt", one)
        return tuple(value)
    check_ids("prompt", value)
    return (value,)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


class CompletionRequest(OpenAIFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        tuple[Any, ...],
        PlainValidator(_check_prompt),
        WithJsonSchema({"anyOf": [{"type": "string"}, TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
    ]
    echo: Annotated[
        bool | None, Field(description="The answer's text begins with the prompt's; with logprobs its tokens are told")
    ] = None
    logprobs: int | None = None
    best_of: Annotated[
        int | None, Field(description="So many answers are made, and the n likeliest a token returned; not with stream")
    ] = None

    route: ClassVar[str] = "completions"
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {k: v for k, v in UNSUPPORTED.items() if k != "best_of"}

    def generation(self, limits: GatewayLimits) -> Generation:
        """The request in the gateway's own terms. InvalidRequest: a value is out of range."""
        between("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        shown = -1 if self.logprobs is None else self.logprobs
        returned = 1 if self.n is None else self.n
        made = returned if self.best_of is None else self.best_of
        between("best_of", self.best_of, returned, limits.max_choices)
        if made > returned and self.stream:
            raise refused("best_of", made, "not together with stream: which answers are returned is known at the end")
        return self._generation(
            n=made,
            returned=returned if made > returned else None,
            prompts=self.prompt,
            max_tokens=DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=shown,
            echo=bool(self.echo),
            prompt_logprobs=max(self.asked_of_prompt, shown if self.echo else -1),
        ).check(limits)

    def writer(self, request: Request, *, timings: bool) -> AnswerWriter:
        """See InterfaceBody."""
        return CompletionWriter(request, self.frame_options(timings))


class CompletionWriter(Frames):
    """Writes completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    text_key, text_end = b',"text":', b""

    def opening(self, index: int) -> bytes:
        """See Frames."""
        echo = self.request.generation.echo
        echoed = self.request.choices[index].prompt.text if echo else ""
        first = {"text": echoed, **self.prompt_logprobs(index)}
        if self.options.token_ids:
            first["prompt_token_ids"] = self.prompt_ids(index)
        if echo and self._wants_logprobs:
            first["logprobs"] = self._echoed(index)
        if len(first) > 1:
            return self._chunk(index, first, None, "", {})
        return self.text(index, echoed) if echo else b""

    def gained(self, delta: Delta) -> dict[str, Any]:
        """See Frames."""
        return {"text": delta.text}

    def said(self, index: int) -> dict[str, Any]:
        """See Frames."""
        choice = self.request.choices[index]
        said: dict[str, Any] = {
            "text": (choice.prompt.text if self.request.generation.echo else "") + choice.whole.text
        }
        if self.options.token_ids:
            said["prompt_token_ids"] = self.prompt_ids(index)
        return said | self.prompt_logprobs(index)

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """See Frames."""
        before = len(self.request.choices[index].prompt.text) if self.request.generation.echo else 0
        return completion_logprobs(entries, self.piece, before)

    def all_logprobs(self, index: int) -> dict[str, Any]:
        """See Frames."""
        answer = super().all_logprobs(index)
        if not self.request.generation.echo:
            return answer
        echoed = self._echoed(index)
        return {name: echoed[name] + answer[name] for name in echoed}

    def _echoed(self, index: int) -> dict[str, Any]:
        """Returns the logprobs object of the prompt: of its first token nothing is known."""
        choice, shown = self.request.choices[index], self.request.generation.logprobs
        scored = choice.scored_prompt
        assert scored is not None, "asked for"
        offsets = self.request.text_offsets(scored.token_ids)
        entries = [
            TokenLogprob(token.token_id, token.logprob, token.top, start)
            for token, start in zip(scored.tokens(shown), offsets[1:], strict=True)
        ]
        told = completion_logprobs(entries, self.piece)
        first = {"tokens": self.piece(scored.token_ids[0])[0], "text_offset": offsets[0]}
        return {name: [first.get(name), *values] for name, values in told.items()}


def completion_logprobs(entries: Sequence[TokenLogprob], piece: Piece, before: int = 0) -> dict[str, Any]:
    """Returns the logprobs object of a completion, in whose text `before` characters stand before the answer."""

    def top(e: TokenLogprob) -> dict[str, float]:
        best: dict[str, float] = {}
        for token, logprob in (*e.top, (e.token_id, e.logprob)):
            best.setdefault(piece(token)[0], number(logprob))
        return best

    return {
        "tokens": [piece(e.token_id)[0] for e in entries],
        "token_logprobs": [number(e.logprob) for e in entries],
        "top_logprobs": [top(e) for e in entries],
        "text_offset": [before + e.start for e in entries],
    }
