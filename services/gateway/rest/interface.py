"""What an interface of the REST door is: how it reads bodies and writes answers. Each is one file beside this."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import orjson

from kvmesh.errors import KvmeshError
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import Generation
from kvmesh.services.gateway.quotas import QuotaStanding
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest import quota_headers
from kvmesh.services.gateway.rest.frames import error_event, error_json
from kvmesh.services.gateway.text.completion import Delta


class AnswerWriter(Protocol):
    """Writes the answers of one request. Of a stream `step` and then `end` are called, of a whole answer `whole`."""

    def step(self, index: int, delta: Delta) -> bytes:
        """Returns the events of what choice `index` gained; before the first one, what opens the stream."""
        ...

    def end(self) -> bytes:
        """Returns what follows the last choice's finish."""
        ...

    def whole(self) -> bytes:
        """Returns the body of an answer that is not streamed."""
        ...


class ErrorStyle:
    """How errors are written: what is here is OpenAI's way. `request_id` is the id that the client knows; "" when its
    headers were refused."""

    id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id",)
    """Headers of every answer that tell the request's id."""

    @classmethod
    def status(cls, err: KvmeshError) -> int:
        """Returns the HTTP status of an error."""
        return err.http_status

    @classmethod
    def quota_headers(cls, standing: QuotaStanding) -> list[tuple[bytes, bytes]]:
        """Returns headers that tell where the caller's key stands."""
        return quota_headers.openai(standing)

    @classmethod
    def error_body(cls, err: KvmeshError, request_id: str) -> bytes:
        """Returns the body of an error."""
        return orjson.dumps(error_json(err))

    @classmethod
    def error_event(cls, err: KvmeshError, request_id: str) -> bytes:
        """Returns the last event of a stream that failed after its first byte."""
        return error_event(err)


class InterfaceBody(ErrorStyle):
    """The body of a request of one interface. What is here serves interfaces without memory."""

    route: ClassVar[str]

    @classmethod
    def read(cls, body: Any, limits: GatewayLimits) -> Self:
        """Validates a parsed JSON body (which it may change). Raises InvalidRequest naming the first wrong field."""
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        """Whether the answer is to be streamed."""
        raise NotImplementedError

    @property
    def tells_token_ids(self) -> bool:
        """Whether the client is told token ids: a stream then has a step for tokens without text, too."""
        return False

    @property
    def refers_to_stored(self) -> bool:
        """Whether a part of the prompt is what `resolve` fetches."""
        return False

    async def resolve(self, core: GatewayCore, tenant: Tenant) -> None:
        """Fetches what the body refers to, within a deadline of its own."""

    def generation(self, limits: GatewayLimits) -> Generation:
        """Returns the request in the gateway's own terms. Raises InvalidRequest for a value out of range."""
        raise NotImplementedError

    def writer(self, request: Request, *, timings: bool) -> AnswerWriter:
        """Returns a writer of the answers of `request`; `timings`: the client wants to know where the time went."""
        raise NotImplementedError

    async def ended(self, request: Request, writer: AnswerWriter, err: KvmeshError | None) -> None:
        """The answers are whole, or have failed; called before the last bytes are sent."""

    def last_words(self, writer: AnswerWriter, err: KvmeshError, *, begun: bool) -> bytes | None:
        """Returns what ends the answer of a request that failed: of a stream that has `begun` its last event, else the
        body of an answer with status 200; None: the error is the answer."""
        return None
