"""Every error a user or a peer can meet, drawn once.

    KvmeshError
    ├── InvalidRequest ............ INVALID_ARGUMENT     400   field, value
    │   ├── ContextTooLong ........ INVALID_ARGUMENT     400
    │   └── GrammarFailed ......... INVALID_ARGUMENT     400   a limit was reached while a grammar's answer was made
    ├── BodyTooLarge .............. INVALID_ARGUMENT     413
    ├── Unauthorized .............. UNAUTHENTICATED      401   no valid API key
    ├── PermissionDenied .......... PERMISSION_DENIED    403   the caller's certificate is of another role or instance
    ├── ModelNotFound ............. NOT_FOUND            404
    ├── UnknownInstance ........... NOT_FOUND            404   register again
    ├── UnknownRequest ............ NOT_FOUND            404   never heard of, or forgotten
    ├── Overloaded ................ RESOURCE_EXHAUSTED   429   retry_after_ms
    │   ├── PinLimit .............. RESOURCE_EXHAUSTED   429   not retryable: somebody must unpin first
    │   └── QuotaExceeded ......... RESOURCE_EXHAUSTED   429   field: the quota of the API key that is used up
    │       └── QuotaTooSmall ..... RESOURCE_EXHAUSTED   429   not retryable: the request is larger than the quota
    ├── Unavailable ............... UNAVAILABLE          503   retryable
    │   ├── Paused ................ UNAVAILABLE          503   retryable: an operator or a trainer has paused the model
    │   ├── WeightsChanged ........ UNAVAILABLE          503   retryable: the request was made for another weights epoch
    │   ├── HandoffLost ........... UNAVAILABLE          503   retryable: writer or holder went away
    │   └── TlsFailed ............. UNAVAILABLE          503   retryable: one side speaks TLS, or distrusts the other
    ├── DeadlinePassed ............ DEADLINE_EXCEEDED    504
    ├── RequestCancelled .......... CANCELLED            499
    │   └── RequestAborted ........ CANCELLED            499   by an operator's or a trainer's pause, not by its client
    ├── OrderLapsed ............... FAILED_PRECONDITION  409   an order's lease has ended at an instance
    ├── ProtocolMismatch .......... FAILED_PRECONDITION  412
    ├── NotLeader ................. FAILED_PRECONDITION  503   retryable: ask the master at `leader`, if it is known
    ├── StaleTerm ................. FAILED_PRECONDITION  409   an order of a master that leads no more
    ├── ConfigError ............... FAILED_PRECONDITION  500   at start, names the key
    │   └── CheckpointError ....... FAILED_PRECONDITION  500   at start, names the file or tensor
    ├── TransferError ............. UNAVAILABLE          503   retryable
    └── InternalError ............. INTERNAL             500
        ├── FailedWeights ......... INTERNAL             500   an update ended in the middle: neither weights are whole
        └── NonFiniteLogits ....... INTERNAL             500   rows: the batch rows whose logits hold NaN or inf

This module imports nothing but the standard library, so that every package may raise from it;
`kvmesh.rpc.status` carries these over gRPC, the gateway writes them as OpenAI's JSON.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KvmeshError(Exception):
    """The base of all named errors. `code` is the error's name in messages between processes."""

    code: ClassVar[str] = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class InvalidRequest(KvmeshError):
    code = "invalid_request"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"

    @classmethod
    def of(cls, field: str, value: Any, why: str) -> InvalidRequest:
        """Returns an error whose message is one line: the field, the value (at most 80 characters) and what is wrong
        with it."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return cls(f"{field}={shown}: {why}", field=field)


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class GrammarFailed(InvalidRequest):
    """The grammar of a request compiled, and its answer cannot go on: a limit of work for one token was reached, or the
    answer's tokens are none of the grammar's."""

    code = "grammar_failed"


class BodyTooLarge(KvmeshError):
    code = "body_too_large"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 413
    openai_type = "invalid_request_error"


class Unauthorized(KvmeshError):
    code = "invalid_api_key"
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "invalid_request_error"


class PermissionDenied(KvmeshError):
    code = "permission_denied"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    openai_type = "invalid_request_error"


class ModelNotFound(KvmeshError):
    code = "model_not_found"
    grpc_status = "NOT_FOUND"
    http_status = 404
    openai_type = "invalid_request_error"


class UnknownInstance(KvmeshError):
    code = "unknown_instance"
    grpc_status = "NOT_FOUND"
    http_status = 404


class UnknownRequest(KvmeshError):
    code = "unknown_request"
    grpc_status = "NOT_FOUND"
    http_status = 404
    openai_type = "invalid_request_error"


class Overloaded(KvmeshError):
    code = "overloaded"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"
    retryable = True


class PinLimit(Overloaded):
    """The limit of hard pins is reached; the same call succeeds only when something has been unpinned."""

    code = "pin_limit"
    retryable = False


class QuotaExceeded(Overloaded):
    """A quota of the API key is used up; `field` is its name in the file of keys."""

    code = "rate_limit_exceeded"


class QuotaTooSmall(QuotaExceeded):
    """The request alone is more than a quota of the API key."""

    code = "request_over_quota"
    retryable = False


class Unavailable(KvmeshError):
    code = "unavailable"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class HandoffLost(Unavailable):
    code = "handoff_lost"


class Paused(Unavailable):
    """An operator or a trainer has paused the model: the request goes on when it is resumed."""

    code = "paused"

    PREFIX: ClassVar[str] = "paused: "
    """What the reason of an instance that is not ready begins with while it is paused."""


class WeightsChanged(Unavailable):
    """The request was made for another epoch of the weights than the instance serves: its block keys are others."""

    code = "weights_changed"


class TlsFailed(Unavailable):
    code = "tls_failed"


class DeadlinePassed(KvmeshError):
    code = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class RequestCancelled(KvmeshError):
    code = "cancelled"
    grpc_status = "CANCELLED"
    http_status = 499


class RequestAborted(RequestCancelled):
    """An operator or a trainer has ended all requests in flight."""

    code = "aborted"


class NotLeader(KvmeshError):
    code = "not_leader"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 503
    retryable = True

    def __init__(self, message: str, *, leader: str = "", field: str | None = None, retry_after_ms: int = 0) -> None:
        super().__init__(message, field=field, retry_after_ms=retry_after_ms)
        self.leader = leader


class StaleTerm(KvmeshError):
    code = "stale_term"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class OrderLapsed(KvmeshError):
    """The lease by which an order holds an instance has ended: it changes nothing there any more."""

    code = "order_lapsed"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class ProtocolMismatch(KvmeshError):
    code = "protocol_mismatch"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 412


class FixedRole(KvmeshError):
    """The instance was started with one fixed role and cannot be switched to another."""

    code = "fixed_role"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class ConfigError(KvmeshError):
    code = "config"
    grpc_status = "FAILED_PRECONDITION"


class CheckpointError(ConfigError):
    code = "checkpoint"


class TransferError(KvmeshError):
    code = "transfer"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class InternalError(KvmeshError):
    pass


class FailedWeights(InternalError):
    """An update of the weights ended in the middle: the instance serves nothing until another one succeeds."""

    code = "failed_weights"


class NonFiniteLogits(InternalError):
    """The model's logits hold NaN or infinity in `rows` of the batch. The other rows may be run again without those."""

    code = "non_finite_logits"

    def __init__(self, message: str, *, rows: tuple[int, ...] = (), **kw: Any) -> None:
        super().__init__(message, **kw)
        self.rows = rows


class RanksLost(RuntimeError):
    """Another rank died or did not come in time: this one is in the middle of a step that nobody can finish. It is no
    KvmeshError, as no request fails by it: the rank ends."""


def _tree(cls: type[KvmeshError]) -> dict[str, type[KvmeshError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        for code, known in _tree(sub).items():
            found.setdefault(code, known)
    return found


BY_CODE: dict[str, type[KvmeshError]] = _tree(KvmeshError) | {"internal": InternalError}
