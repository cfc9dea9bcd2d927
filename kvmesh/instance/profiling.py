"""One profile at a time of an instance's ranks: asks all of them, waits for all of their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from kvmesh.errors import DeadlinePassed, InternalError, InvalidRequest, Overloaded, Unavailable
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.rpc.pb import instance_pb2

STEPS, MOST_STEPS = 16, 256
DEADLINE_MS, MOST_DEADLINE_MS = 10_000, 120_000
ANSWER_S = 30.0  # after the deadline: ranks measure limits, and on a GPU read what its profiler saw


class RankProfiles:
    """Carries one profile out at all ranks. All methods belong to the event loop."""

    def __init__(self, ranks: Sequence[RankClient]) -> None:
        self._ranks = ranks
        self._ticket = 0
        self._waiting: asyncio.Future[list[m.Profiled]] | None = None
        self._answers: dict[int, m.Profiled] = {}

    async def profile(self, instance_id: str, steps: int, deadline_ms: int) -> list[m.Profiled]:
        """Times so many steps (0: STEPS) within the deadline (0: DEADLINE_MS); one answer a rank. Raises
        InvalidRequest, Overloaded (another profile runs), DeadlinePassed (nothing ran), Unavailable (a rank was lost),
        InternalError (a rank could not)."""
        steps, deadline_ms = checked(steps, deadline_ms)
        if self._waiting is not None:
            text = f"{instance_id} is being profiled: one profile at a time, try again when it has ended"
            raise Overloaded(text, retry_after_ms=deadline_ms)
        self._ticket += 1
        self._answers = {}
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        deadline_ns = time.monotonic_ns() + deadline_ms * 1_000_000
        for rank in self._ranks:
            rank.send(m.Profile(self._ticket, steps, deadline_ns))
        try:
            async with asyncio.timeout(deadline_ms / 1000 + ANSWER_S):
                answers: list[m.Profiled] = await waiting
        except TimeoutError:
            silent = ", ".join(str(rank.rank) for rank in self._ranks if rank.rank not in self._answers)
            raise DeadlinePassed(f"{instance_id}: no profile came from rank {silent}") from None
        finally:
            self._waiting = None
            for rank in self._ranks:
                if rank.rank not in self._answers:
                    rank.send(m.ProfileStop(self._ticket))
        for number, answer in enumerate(answers):
            if answer.why_not:
                raise InternalError(f"{instance_id}: rank {number} has no profile: {answer.why_not}")
        if not all(answer.steps for answer in answers):
            text = f"{instance_id} ran no step within {deadline_ms / 1000:g} s"
            raise DeadlinePassed(f"{text}: a profile times what runs, so send it requests meanwhile")
        return answers

    def rank_said(self, rank: int, message: m.ToFront) -> bool:
        """Takes a rank's answer; False: the message is for somebody else."""
        if not isinstance(message, m.Profiled):
            return False
        if self._waiting is not None and message.ticket == self._ticket:
            self._answers[rank] = message
            if len(self._answers) == len(self._ranks) and not self._waiting.done():
                self._waiting.set_result([self._answers[one.rank] for one in self._ranks])
        return True

    def ranks_lost(self, cause: str) -> None:
        """A rank has ended: nobody can answer any more."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Unavailable(cause))


def checked(steps: int, deadline_ms: int) -> tuple[int, int]:
    """Returns both, with defaults for 0. Raises InvalidRequest where one is too large."""
    for field, value, most in (("steps", steps, MOST_STEPS), ("deadline_ms", deadline_ms, MOST_DEADLINE_MS)):
        if value > most:
            raise InvalidRequest.of(field, value, f"at most {most}")
    return steps or STEPS, deadline_ms or DEADLINE_MS


def on_wire(answer: m.Profiled) -> instance_pb2.RankProfile:
    """One rank's answer as an instance tells it."""
    pieces = answer.pieces or m.ProfiledPieces((), (), (), ())
    return instance_pb2.RankProfile(
        device=answer.device,
        layers=answer.layers,
        steps=[
            instance_pb2.ProfiledStep(
                start_unix_ns=step.start_ns,
                duration_ns=step.end_ns - step.start_ns,
                rows=step.rows,
                context_tokens=step.context_tokens,
                prefill_tokens=step.prefill_tokens,
            )
            for step in answer.steps
        ],
        functions=[
            instance_pb2.ProfiledFunction(
                name=one.name,
                busy_ns=one.busy_ns,
                weight_bytes=one.weight_bytes,
                kv_read_bytes=one.kv_read_bytes,
                kv_written_bytes=one.kv_written_bytes,
                activation_bytes=one.activation_bytes,
                products=one.products,
            )
            for one in answer.functions
        ],
        piece_names=pieces.names,
        piece_which=pieces.which,
        piece_starts_ns=pieces.starts_ns,
        piece_ns=pieces.took_ns,
        pieces_left_out=pieces.left_out,
        bytes_per_s=answer.bytes_per_s,
        products_per_s=answer.products_per_s,
        experts=[instance_pb2.ProfiledExperts(layer=one.layer, tokens=one.tokens) for one in answer.experts],
    )
