"""A mesh that shares blocks, in short words."""

import dataclasses

from kvmesh.services.conductor.domain import Placed, Role, Source
from tests.support.conductor.brain import BLOCK, IDLE, Brain, chain, reset

X = chain("x", 64)
LONG = 64 * BLOCK + 5  # X and a bit
BYTES = BLOCK * 1024  # of a block
BUSY = dataclasses.replace(IDLE, queued_tokens=20_000)


def mesh(prefills: int = 2, decodes: int = 1, pools: int = 0, **more: object) -> Brain:
    brain = Brain(**more)
    names = [f"p{i}" for i in range(prefills)] + [f"d{i}" for i in range(decodes)]
    for name in names:
        brain.add(name, Role.PREFILL if name[0] == "p" else Role.DECODE)
    brain.step(reset(1, *names, *(f"pool{i}" for i in range(pools))))
    return brain


def ranges(pulls: object) -> list[tuple[str, int, int]]:
    return [(r.instance_id, r.first_block, r.blocks) for r in pulls]  # type: ignore[attr-defined]


def other(brain: Brain, prompt: int = LONG, keys: tuple[bytes, ...] = X, **more: object) -> Placed:
    """Placed with p0 too busy to take it."""
    brain.beat("p0", BUSY)
    return brain.placed(prompt, keys=keys, **more)


def monotone(sources: bytes) -> bool:
    order = [Source.AT_DECODE, Source.DECODE_PULLS, Source.PREFILL_PUSHES]
    at = [order.index(Source(b)) for b in sources]
    return at == sorted(at)
