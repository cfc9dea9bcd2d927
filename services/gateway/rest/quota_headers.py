"""Headers that tell where the quotas of the caller's key stand, as OpenAI's and as Anthropic's clients know them. What
has no limit has no headers. Values are those of when the request was taken or refused; answer tokens of requests that
still run are not in them."""

from __future__ import annotations

import datetime

from kvmesh.services.gateway.quotas import ANSWER, PROMPT, REQUESTS, QuotaStanding

Headers = list[tuple[bytes, bytes]]
OWN_SHARE = b"x-kvmesh-quota-share"
"""On answers of a gateway that has only its share of every quota, since Redis does not answer."""


def openai(standing: QuotaStanding) -> Headers:
    """OpenAI knows one number of tokens: here it is that of prompts. Answer tokens have headers of the same form."""
    found = _share(standing)
    for which, noun in ((REQUESTS, "requests"), (PROMPT, "tokens"), (ANSWER, "answer-tokens")):
        if standing.limit(which):
            values = (
                ("limit", str(standing.limit(which))),
                ("remaining", str(standing.remaining(which))),
                ("reset", duration(standing.reset_s(which))),
            )
            found += [(f"x-ratelimit-{what}-{noun}".encode(), value.encode()) for what, value in values]
    return found


def anthropic(standing: QuotaStanding, now: datetime.datetime) -> Headers:
    """Returns them as the Messages API has them: resets are moments (RFC 3339)."""
    found = _share(standing)
    for which, noun in ((REQUESTS, "requests"), (PROMPT, "input-tokens"), (ANSWER, "output-tokens")):
        if standing.limit(which):
            seconds = min(standing.reset_s(which), 365 * 86400.0)
            at = (now + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
            values = (
                ("limit", str(standing.limit(which))),
                ("remaining", str(standing.remaining(which))),
                ("reset", at),
            )
            found += [(f"anthropic-ratelimit-{noun}-{what}".encode(), value.encode()) for what, value in values]
    return found


def _share(standing: QuotaStanding) -> Headers:
    return [] if standing.share == 1 else [(OWN_SHARE, f"{standing.share:.4g}".encode())]


def duration(seconds: float) -> str:
    """Returns a time as Go writes it, which OpenAI's headers do: 120ms, 1.5s, 6m0s."""
    ms = round(1000 * seconds)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{ms / 1000:g}s"
