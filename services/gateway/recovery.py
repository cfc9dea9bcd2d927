"""What becomes of an answer whose attempt failed: made again, gone on with elsewhere, or one clear error.

Pure: the time and chance are arguments.

Before its first token an attempt is made anew. Afterwards the answer is carried to another placement (a migration): an
attempt that brought a token and failed begins one, at most `max_migrations` times. Either way the request is placed
again and again until its next token, for `reach_s` or `migration_timeout_s`: the mesh may need a moment to notice a
death, or to start somebody. But of these attempts only one more than `max_retries` may fail at instances that had
taken them: a request that kills whoever serves it must not go through the whole mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.errors import KvmeshError, Overloaded, Paused, WeightsChanged

BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_DOUBLINGS = 8  # enough for MAX_BACKOFF_S, and no overflow


@dataclass(frozen=True, slots=True)
class RecoveryPatience:
    """How often and for how long failed attempts are made again: see GatewayConfig. `max_migrations` 0: an answer that
    has begun is not carried anywhere."""

    max_retries: int
    reach_s: float
    max_migrations: int
    migration_timeout_s: float


class Failure(NamedTuple):
    """How one attempt of an answer failed."""

    error: KvmeshError
    instance: str  # the decode instance; "": none was placed
    answered: int  # tokens of the answer that have come, by all attempts
    fresh: int  # ... by this one
    delivered: bool  # the client has seen some of it
    taken: bool  # an instance had it; else nobody was asked, or who was could not be reached


class RecoveryPlan(NamedTuple):
    """Another attempt, `delay_s` from now. `anew`: forgetting what has come; nobody has seen it."""

    delay_s: float
    anew: bool


class _Loss(NamedTuple):
    at: float
    failure: Failure


class AttemptRecovery:
    """Decides what becomes of one answer when attempts fail. Times are seconds on one clock."""

    __slots__ = ("_last", "_loss", "_patience", "_since", "_taken", "_tries", "migrations")

    def __init__(self, patience: RecoveryPatience) -> None:
        self._patience = patience
        self._loss: _Loss | None = None
        self._last: KvmeshError | None = None  # of the last attempt that failed since the loss
        self._since = 0.0  # before the first token: of the first failure
        self._tries = 0  # attempts that failed since the last token
        self._taken = 0  # those of them that an instance had
        self.migrations = 0
        """Times the answer was carried on, or is being carried now."""

    def failed(self, failure: Failure, now: float, chance: float) -> RecoveryPlan:
        """Returns what to do next. `chance` scales the back-off, about 1. Raises the one error that the client gets."""
        patience, error = self._patience, failure.error
        if isinstance(error, Paused | WeightsChanged):
            return self._held(failure, now, chance)
        if not failure.answered or not (patience.max_migrations or failure.delivered):
            return self._anew(failure, now, chance)
        if not patience.max_migrations or (failure.fresh and not error.retryable):
            raise error
        return self._lost(failure, now) if failure.fresh else self._again(failure, now, chance)

    def _held(self, failure: Failure, now: float, chance: float) -> RecoveryPlan:
        """Nobody has failed: the request goes on when the model is resumed, with the weights that it has then. Only the
        request's own deadline ends that. Raises the error for an answer that cannot go on."""
        if failure.delivered and not self._patience.max_migrations:
            raise failure.error
        self._loss, self._last = _Loss(now, failure), None
        self._tries = self._taken = 0
        return RecoveryPlan(BACKOFF_S * chance, anew=not failure.answered or not self._patience.max_migrations)

    def _anew(self, failure: Failure, now: float, chance: float) -> RecoveryPlan:
        if not self._tries:
            self._since = now
        delay_s = self._back_off_s(chance)
        self._taken += failure.taken
        patience = self._patience
        enough = self._tries > patience.max_retries and now + delay_s >= self._since + patience.reach_s
        if not failure.error.retryable or self._taken > patience.max_retries or enough:
            raise failure.error
        return RecoveryPlan(delay_s, anew=True)

    def _back_off_s(self, chance: float) -> float:
        self._tries += 1
        return min(MAX_BACKOFF_S, BACKOFF_S * 4.0 ** min(self._tries - 1, MAX_DOUBLINGS)) * chance

    def _lost(self, failure: Failure, now: float) -> RecoveryPlan:
        self._loss, self._last = _Loss(now, failure), None
        self._tries = self._taken = 0
        most = self._patience.max_migrations
        if self.migrations >= most:
            raise self._ended(failure.error, f"it was moved max_migrations={most} times before")
        self.migrations += 1
        return RecoveryPlan(0.0, anew=False)

    def _again(self, failure: Failure, now: float, chance: float) -> RecoveryPlan:
        patience, error = self._patience, failure.error
        assert self._loss is not None, "an answer that has begun and fails without a new token was lost before"
        if not error.retryable:
            raise self._ended(error, error.message)
        self._last = error
        delay_s = self._back_off_s(chance)
        self._taken += failure.taken and not isinstance(error, Overloaded)
        if self._taken > patience.max_retries:
            why = f"max_retries={patience.max_retries} and one more attempt failed, the last one: {error.message}"
            raise self._ended(error, why)
        if now + delay_s >= self.ends_at:
            raise self.late()
        return RecoveryPlan(delay_s, anew=False)

    def went_on(self) -> None:
        """A token has come."""
        self._loss = self._last = None
        self._tries = self._taken = 0

    @property
    def ends_at(self) -> float:
        """When the migration under way is given up."""
        assert self._loss is not None, "asked during a migration"
        return self._loss.at + self._patience.migration_timeout_s

    def late(self) -> KvmeshError:
        """The error of a migration that took too long; it names why the last attempt failed, if one has."""
        assert self._loss is not None, "asked during a migration"
        why = f"no further token came within migration_timeout_s={self._patience.migration_timeout_s:g}"
        last = self._last
        return self._ended(last or self._loss.failure.error, f"{why} ({last.message})" if last else why)

    def _ended(self, kind: KvmeshError, why: str) -> KvmeshError:
        assert self._loss is not None
        lost = self._loss.failure
        text = (
            f"the answer was lost at {lost.instance} after {lost.answered} tokens ({lost.error.message}) "
            f"and cannot go on: {why}"
        )
        return type(kind)(text, retry_after_ms=kind.retry_after_ms)
