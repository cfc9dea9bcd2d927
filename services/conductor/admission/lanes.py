"""Who goes without when there is not enough for all: shares of the room by priority, and the batch lane's rules. Pure.

*Room* is what lies between what a request would be served with in an idle mesh and the SLO. Urgent requests may use all
of it, others only a share, so that the least urgent are refused first as load rises (trunk reservation):

    priority <= 0   the whole room         priority p > 0   1 - p/10 of it, half at least

The batch lane has no SLO of its own and is taken in one of two ways:

1. Idle: the queue of its prefill instance is short (QUEUE_SHARE of the TTFT SLO) and stays, with it, within
   `head_room` of that SLO (a longer prompt waits `patience_s` for an empty queue); its decode instance has room for the
   KV of prompt and answer, and the TBT of all rows there stays within `head_room` of the TBT's room. And where
   interactive requests came lately, it makes them slower by no more than `batch_slowdown`, a fraction that slowdown.py
   corrects by what they feel: the TBT of the rows beside it, and their TTFT. Who comes while a prompt of the lane is
   being computed waits for half of it on the average (of a chunk, where long prompts are cut), so the share of the time
   for which it computes prompts is bounded (`pause_s`).
2. In turn: it has waited `patience_s`, nobody of the lane has waited longer, and what the lane got this way is within
   `batch_share` of the machine time of interactive requests; all rows keep the TBT SLO with it.

The second way keeps the lane from starving while interactive load is steady and within capacity: every interactive
placement earns the lane its share, the oldest takes it, and debts are paid by the next ones. Above capacity decode has
no room within the SLO and the lane waits.

Work of the batch lane yields: no interactive request is refused because of it (see judge.py for decode; at prefill it
is overtaken, see `PrefillQueue.ahead_s`). What it may cost them is lateness: at a prefill instance the prompt that is
being computed, at a decode instance the rows that the two rules let in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from kvmesh.services.conductor.settings import AdmissionSettings

QUEUE_SHARE = 0.1
LEAST_SHARE = 0.5
SHARE_STEP = 0.1
MAX_WAITING = 16_384
# A request of the batch lane that has not asked again for so many times its Retry-After is not waiting any more.
GONE_FACTOR, GONE_S = 3.0, 5.0
MAX_SAVED_S = 60.0  # of machine time that the lane may have earned and not used


def share_of(priority: int) -> float:
    """Returns the share of the room that a request of this priority may use."""
    return min(1.0, max(LEAST_SHARE, 1.0 - SHARE_STEP * priority))


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of the batch lane with its best choice; times are in seconds. `tbt_s` is the TBT of all rows with it,
    `idle_tbt_s` that of the request alone. `slower` is the fraction by which it would slow interactive rows down, of
    which `allowed` is the limit (infinite if there are none). `early_s` is how much too early it is for their TTFT."""

    request_id: str
    ttft_slo_s: float
    tbt_slo_s: float
    queue_s: float
    prefill_s: float
    tbt_s: float
    idle_tbt_s: float
    room: bool  # for KV and rows, now
    slower: float = 0.0
    allowed: float = math.inf
    early_s: float = 0.0


def pause_s(prompt_s: float, chunk_s: float, ttft_s: float, allowed: float, instances: int) -> float:
    """Returns the seconds from one prompt of the batch lane to the next, so that with `instances` equal instances the
    mean TTFT of interactive requests (`ttft_s` without the lane) grows by at most the fraction `allowed`."""
    if allowed == math.inf:
        return 0.0
    busy = min(1.0, allowed * 2 * ttft_s / max(chunk_s, 1e-9)) if ttft_s > 0 else min(1.0, allowed)
    return prompt_s / max(busy * instances, 1e-9)


class BatchLane:
    """Remembers since when each request of the batch lane waits, and how much machine time the lane has earned."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._waiting: OrderedDict[str, tuple[float, float]] = OrderedDict()  # first asked, counts as gone at
        self._saved_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def earn(self, machine_s: float) -> None:
        """Credits the lane with its share of `machine_s` seconds that an interactive request takes."""
        self._saved_s = min(MAX_SAVED_S, self._saved_s + self._settings.batch_share * machine_s)

    def way_in(self, asked: BatchRequest, now: float) -> str:
        """Returns "idle" or "turn" when the request may enter, "" when it must wait."""
        waited = now - self._since(asked.request_id, now) >= self._settings.patience_s
        if not asked.room:
            return ""
        if self._idle(asked, waited=waited):
            return "idle"
        turn = waited and self._saved_s > 0 and self._oldest(now) == asked.request_id
        return "turn" if turn and asked.tbt_s <= max(asked.tbt_slo_s, asked.idle_tbt_s) else ""

    def taken(self, request_id: str, way: str, machine_s: float) -> None:
        """Notes a placement; `way` is what `way_in` returned."""
        self._waiting.pop(request_id, None)
        if way == "turn":
            self._saved_s -= machine_s

    def told_to_wait(self, request_id: str, retry_s: float, now: float) -> None:
        """Notes a refusal: the request waits until it asks again, or has been silent for long."""
        first = self._since(request_id, now)
        self._waiting[request_id] = first, now + GONE_FACTOR * retry_s + GONE_S
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem()  # the newest: whoever waits is not forgotten for newcomers

    def queue_bound_s(self, ttft_slo_s: float) -> float:
        """Returns the longest queue, in seconds, that counts as idle."""
        return QUEUE_SHARE * ttft_slo_s

    def tbt_bound_s(self, asked: BatchRequest) -> float:
        """Returns the greatest TBT that counts as idle."""
        return asked.idle_tbt_s + self._settings.head_room * max(0.0, asked.tbt_slo_s - asked.idle_tbt_s)

    def _idle(self, asked: BatchRequest, *, waited: bool) -> bool:
        if asked.tbt_s > self.tbt_bound_s(asked) or asked.queue_s > self.queue_bound_s(asked.ttft_slo_s):
            return False
        if asked.allowed < math.inf and (asked.early_s > 0 or asked.slower > asked.allowed or not asked.allowed):
            return False
        fits = asked.queue_s + asked.prefill_s <= self._settings.head_room * asked.ttft_slo_s
        return fits or (waited and asked.queue_s <= 0)

    def _since(self, request_id: str, now: float) -> float:
        """Returns when the request first came; it counts as new if it had been silent for too long."""
        first, gone_at = self._waiting.get(request_id, (now, now))
        if gone_at <= now:
            self._waiting.pop(request_id, None)
            return now
        return first

    def _oldest(self, now: float) -> str:
        while self._waiting:
            request_id, (_, gone_at) = next(iter(self._waiting.items()))
            if gone_at > now:
                return request_id
            del self._waiting[request_id]
        return ""
