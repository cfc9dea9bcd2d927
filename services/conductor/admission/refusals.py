"""Why a request that fits no usable pair of instances is refused, in words that name what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvmesh.errors import ContextTooLong, ModelNotFound, Overloaded, Paused, Unavailable
from kvmesh.services.conductor.domain import Refuse, Schedule
from kvmesh.services.conductor.fleet.instance import Instance

MAX_NAMED = 8
PAUSED_RETRY_MS = 100


def refuse_unplaceable(
    request: Schedule, serving: Sequence[Instance], why: Mapping[str, str], expected: bool, models: Iterable[str]
) -> Refuse:
    """Returns the refusal of a request for which no usable instances exist. `serving` are the registered instances of
    the model, `why` says why they may get no work ("" when they may), `expected` that the model was served here or may
    be soon."""
    if not serving:
        if expected:
            missing = f"no prefill and no decode instance of model {request.model!r} is registered"
            return Refuse(Unavailable(missing), "no_instance")
        known = ", ".join(sorted(models)[:MAX_NAMED])
        text = f"model={request.model!r}: not served here; served: {known or 'none'}"
        return Refuse(ModelNotFound(text, field="model"), "unknown_model")
    fits_prefill = [i for i in serving if i.role.prefills and i.can_prefill(request.prompt_tokens)]
    fits_decode = [i for i in serving if i.role.decodes and i.can_decode(request.prompt_tokens)]
    prefillers = [i for i in serving if i.role.prefills]
    decoders = [i for i in serving if i.role.decodes]
    for role, all_of_it, fitting in (("prefill", prefillers, fits_prefill), ("decode", decoders, fits_decode)):
        if all_of_it and not fitting:
            longest = max(_longest(i) for i in all_of_it)
            text = (
                f"longer than any {role} instance of {request.model!r} can hold; the longest prompt is {longest} tokens"
            )
            return Refuse(
                ContextTooLong(f"prompt_tokens={request.prompt_tokens}: {text}", field="prompt_tokens"), "capacity"
            )
    parts = []
    for role, fitting in (("prefill", fits_prefill), ("decode", fits_decode)):
        if not any(why[i.ref.instance_id] == "" for i in fitting):
            named = [f"{i.ref.instance_id}: {why[i.ref.instance_id]}" for i in fitting[:MAX_NAMED]]
            parts.append(f"no ready {role} instance ({'; '.join(named) or 'none registered'})")
    if not fits_prefill and (short := [i for i in fits_decode if i.alone_tokens]):
        few = "; ".join(f"{i.ref.instance_id} at most {i.alone_tokens:,}" for i in short[:MAX_NAMED])
        parts.append(f"too many uncached tokens for those that compute short prompts themselves ({few})")
    text = f"model {request.model!r} has {' and '.join(parts)}"
    if any(reason.startswith(Paused.PREFIX) for reason in why.values()):
        return Refuse(Paused(text, retry_after_ms=PAUSED_RETRY_MS), "no_instance")
    return Refuse(Unavailable(text), "no_instance")


def idle_only(retry_s: float) -> Refuse:
    """Returns the refusal of a batch request that has to wait."""
    retry_ms = round(1000 * retry_s)
    text = f"the batch lane takes only what is idle, and nothing is; try again in {retry_ms} ms"
    return Refuse(Overloaded(text, retry_after_ms=retry_ms), "busy")


def _longest(instance: Instance) -> int:
    tokens = instance.capacity_blocks * instance.model.block_tokens - (0 if instance.role.prefills else 1)
    limit = instance.model.max_context_tokens
    return min(tokens, limit - 1) if limit else tokens
