"""Fields of OpenAI's bodies that say how a request is to be served, not what: its SLO, its lane, what it belongs to."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.generation import BATCH, MAX_SLO_MS, MAX_TOKENS, refused

# OpenAI's `service_tier` and the lane it asks for.
TIERS = {"auto": None, "default": None, "flex": BATCH}


def told(description: str, low: float, high: float) -> Any:
    """A number's description and bounds for the documentation; `Generation.check` enforces them."""
    return Field(description=description, json_schema_extra={"minimum": low, "maximum": high})


class Strict(BaseModel):
    """No coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ServiceFields(Strict):
    """kvmesh's own but for service_tier and prompt_cache_key, which are OpenAI's; headers may tell the same (see
    serving_headers.py)."""

    priority: Annotated[int | None, Field(description="A smaller one goes first. Default 0")] = None
    ttft_slo_ms: Annotated[
        int | None, told("Refused (429) if the first token would take longer. Default: the model's", 1, MAX_SLO_MS)
    ] = None
    tbt_slo_ms: Annotated[
        int | None, told("Refused (429) if tokens would come further apart. Default: the model's", 1, MAX_SLO_MS)
    ] = None
    lane: Annotated[
        str | None,
        Field(description="batch: waits, up to its timeout, for what nobody else wants; as service_tier=flex"),
    ] = None
    service_tier: str | None = None
    session: Annotated[str | None, Field(description="Name of the conversation: its requests may be kept together")] = (
        None
    )
    origin: Annotated[
        str | None, Field(description="Of requests that share much of their prompts; default: prompt_cache_key")
    ] = None
    prompt_cache_key: str | None = None
    expected_tokens: Annotated[int | None, told("A guess at the length of the answer", 1, MAX_TOKENS)] = None

    def service(self) -> dict[str, Any]:
        """Fields of a Generation. InvalidRequest: OpenAI's field and ours say different things."""
        return {
            "priority": self.priority,
            "ttft_slo_ms": self.ttft_slo_ms,
            "tbt_slo_ms": self.tbt_slo_ms,
            "lane": self._lane(),
            "session": self.session or None,
            "origin": self._origin(),
            "expected_tokens": self.expected_tokens,
        }

    def _lane(self) -> str | None:
        if self.service_tier is None:
            return self.lane
        if self.service_tier not in TIERS:
            raise refused("service_tier", self.service_tier, f"not supported by kvmesh; {', '.join(TIERS)} are")
        lane = TIERS[self.service_tier]
        if None not in (lane, self.lane) and lane != self.lane:
            raise refused("service_tier", self.service_tier, f"differs from lane={self.lane!r}")
        return lane or self.lane

    def _origin(self) -> str | None:
        """OpenAI's prompt_cache_key gathers requests with a common prefix: what an origin is."""
        if self.origin and self.prompt_cache_key and self.origin != self.prompt_cache_key:
            raise refused("prompt_cache_key", self.prompt_cache_key, f"differs from origin={self.origin!r}")
        return self.origin or self.prompt_cache_key or None
