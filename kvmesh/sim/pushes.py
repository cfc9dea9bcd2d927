"""KV on its way from prefill to decode, layer by layer while it is computed.

All layers of a chunk but the last have left the device, or can, when its step ends; so a step's KV is fed evenly while
the step runs, all but one layer's share, and that at the end. Nothing is sent of blocks that decode has; nothing at all
before decode has room. A transfer ends with its last byte, never before the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.sim.life import Life
from kvmesh.sim.links import Links
from kvmesh.sim.node import Node
from services.prefill.planner import Chunk


class _Step:
    """The step that computes a piece of one request, up to token `end`; `nbytes` of it are to be sent."""

    __slots__ = ("began_s", "end", "nbytes", "seconds")

    def __init__(self, began_s: float, seconds: float, end: int) -> None:
        self.began_s, self.seconds, self.end, self.nbytes = began_s, seconds, end, 0.0


class Pushes:
    """All of a simulation. `done` is told of every request whose KV has arrived."""

    def __init__(self, links: Links, layers: int, done: Callable[[Life], None]) -> None:
        self._links, self._done = links, done
        self._early = 1 - 1 / layers  # share of a chunk that leaves while it is computed
        self._steps: dict[Life, _Step] = {}

    def computing(self, life: Life, chunk: Chunk, now: float, seconds: float) -> None:
        """A step with a chunk of it begins."""
        self._steps[life] = _Step(now, seconds, chunk.end)
        if life.flow is not None:
            self._feed(life)

    def landing(self, life: Life, source: Node, target: Node, at_decode: int) -> None:
        """There is room at decode, where the prompt's first `at_decode` tokens lie already."""
        life.sent_to = at_decode
        life.bytes_per_token = source.spec.kv_bytes_per_token
        life.push_bytes = (life.tokens - at_decode) * life.bytes_per_token
        life.flow = self._links.open((source.tx, target.rx), lambda: self._done(life))
        self._feed(life)

    def computed(self, life: Life, chunk: Chunk) -> None:
        """The step with this chunk has ended."""
        life.computed = chunk.end
        step = self._steps.pop(life, None)
        if step is None:
            return
        if life.flow is not None and (step.nbytes or life.over):
            life.flow.feed(step.nbytes * (1 - self._early), close=life.over)

    def stop(self, life: Life) -> None:
        """Nobody wants the rest."""
        if life.flow is not None:
            life.flow.cancel()
        if life.lost:
            life.flow = None
            self._steps.pop(life, None)

    def _feed(self, life: Life) -> None:
        """What was computed before the step under way can be sent now, what that computes as it comes."""
        step, flow = self._steps.get(life), life.flow
        assert flow is not None
        at_once, produced = self._bytes(life, life.computed), 0.0
        if step is not None:
            step.nbytes = self._bytes(life, step.end)
            produced = step.nbytes * self._early / step.seconds
            at_once += produced * (self._links.loop.now - step.began_s)
        flow.feed(at_once, produced=produced, close=life.over)

    @staticmethod
    def _bytes(life: Life, end: int) -> float:
        """Of the prompt's tokens before `end` that were not counted yet."""
        tokens = max(0, end - life.sent_to)
        life.sent_to += tokens
        return tokens * life.bytes_per_token
