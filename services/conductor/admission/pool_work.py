"""What one more request would take of the pools of its model: how far apart those who wait can be let in. Pure."""

from __future__ import annotations

from services.conductor.admission.context import AdmissionContext
from services.conductor.admission.turns import PoolWork
from services.conductor.domain import Schedule


def pool_work(request: Schedule, among: AdmissionContext, answer_tokens: float) -> PoolWork:
    """`answer_tokens`: predicted. Instances that were not weighed are taken to be like those that were."""
    prompts_s: dict[str, float] = {}
    for way in among.prompts():
        name, seconds = way.instance.ref.instance_id, way.prefill_s / way.instance.queue.speedup
        prompts_s[name] = min(seconds, prompts_s.get(name, seconds))
    if not prompts_s and among.prefills:  # refused before any was weighed
        one = among.prefills.first
        prompts_s[""] = one.prefill.predict(request.prompt_tokens, 0) / one.queue.speedup
    # Such requests that each could take in a second: prompts one after the other, answers in the rows there are now.
    prompts = [1 / max(seconds, 1e-9) for seconds in prompts_s.values()]
    answering = {c.instance.ref.instance_id: c for c in among.answers()}
    answers = [c.instance.batch.requests / max(answer_tokens * c.tbt_s, 1e-9) for c in answering.values()]
    return PoolWork(_each_s(prompts, len(among.prefills)), _each_s(answers, len(among.decodes)))


def _each_s(rates: list[float], instances: int) -> float:
    """Seconds between two, where each of some instances has such a rate; 0: nothing is known."""
    rate = sum(rates) * max(1.0, instances / len(rates)) if rates else 0.0
    return 1 / rate if rate > 0 else 0.0
