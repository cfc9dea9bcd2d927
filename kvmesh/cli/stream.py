"""One streamed chat completion over HTTP, for `kvmesh up` and `kvmesh chat`."""

from __future__ import annotations

import json
import math
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError, Overloaded, Unauthorized, Unavailable

Message = dict[str, str]


@dataclass(frozen=True)
class ChatAnswer:
    """What one request brought; `ttft_s` as this client saw it."""

    text: str
    request_id: str
    finish_reason: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def summary(self) -> str:
        """One line of figures."""
        rest = max(self.completion_tokens - 1, 0)
        tbt = f", TBT {(self.total_s - self.ttft_s) / rest * 1000:.0f} ms" if rest else ""
        return (
            f"TTFT {self.ttft_s * 1000:.0f} ms{tbt}, {self.completion_tokens} tokens; "
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens came from the cache"
        )


_CONTEXTS: dict[str, ssl.SSLContext] = {}


def trust(ca: str) -> None:
    """From now on this process also believes certificates that the authority in the file `ca` has signed. Raises
    ConfigError when the file is gone."""
    if ca:
        try:
            trusted().load_verify_locations(cafile=ca)
        except OSError as err:
            raise ConfigError(f"http_ca={ca!r}: {err.strerror or err}", field="http_ca") from None


def trusted() -> ssl.SSLContext:
    """What HTTPS is checked by: the machine's authorities (SSL_CERT_FILE is minded) and those of `trust`."""
    if "" not in _CONTEXTS:
        _CONTEXTS[""] = ssl.create_default_context()
    return _CONTEXTS[""]


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that a key travels in."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def cards_of(url: str, headers: dict[str, str], timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """What the mesh says of the models it serves. KvmeshError: refused or unreachable."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=timeout_s, verify=trusted())
    except (httpx.HTTPError, httpx.InvalidURL) as err:
        raise _unreachable(url, err) from None
    _refuse(answer)
    found: list[dict[str, Any]] = answer.json().get("data", [])
    return found


def models(url: str, api_key: str | None = None) -> list[str]:
    """Names the mesh serves."""
    return [str(model["id"]) for model in cards_of(url, authorization(api_key))]


def chat(
    url: str,
    model: str,
    messages: list[Message],
    on_text: Callable[[str], None],
    *,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    **parameters: Any,
) -> ChatAnswer:
    """Send `messages`, call `on_text` for every piece of the answer. KvmeshError: refused, failed or unreachable."""
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{key: value for key, value in parameters.items() if value is not None},
    }
    try:
        content = json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("message: is not UTF-8 text", field="message") from None
    except ValueError:
        bad = next(key for key, value in parameters.items() if isinstance(value, float) and not math.isfinite(value))
        raise InvalidRequest.of(bad, parameters[bad], "must be a finite number") from None
    headers = {"Content-Type": "application/json", **authorization(api_key)}
    start = time.monotonic()
    first = 0.0
    parts: list[str] = []
    found: dict[str, Any] = {"usage": {}, "finish_reason": "", "id": ""}
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    try:
        target = f"{url}/v1/chat/completions"
        with httpx.stream(
            "POST", target, content=content, headers=headers, timeout=timeout, verify=trusted()
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                _refuse(answer)
            for event in _events(answer.iter_lines()):
                text = _take(event, found)
                if text:
                    first = first or time.monotonic()
                    parts.append(text)
                    on_text(text)
    except httpx.HTTPError as err:
        raise _unreachable(url, err) from None
    end = time.monotonic()
    usage = found["usage"]
    return ChatAnswer(
        text="".join(parts),
        request_id=found["id"],
        finish_reason=found["finish_reason"],
        ttft_s=(first or end) - start,
        total_s=end - start,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]."""
    for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
    raise Unavailable("the answer ended in the middle")


def _take(event: dict[str, Any], found: dict[str, Any]) -> str:
    if "error" in event:
        raise _named(event["error"], 500)
    found["id"] = event.get("id") or found["id"]
    found["usage"] = event.get("usage") or found["usage"]
    text = ""
    for choice in event.get("choices", []):
        text += choice.get("delta", {}).get("content") or ""
        found["finish_reason"] = choice.get("finish_reason") or found["finish_reason"]
    return text


def _refuse(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        return
    try:
        told = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        told = {"message": f"HTTP {answer.status_code} from {answer.request.url}"}
    raise _named(told, answer.status_code)


def _named(told: Any, status: int) -> KvmeshError:
    message = str(told.get("message", told)) if isinstance(told, dict) else str(told)
    if status == 429:
        return Overloaded(message)
    if status == 401:
        return Unauthorized(f"{message} (--api-key, or KVMESH_API_KEY)")
    return (InvalidRequest if 400 <= status < 500 else Unavailable)(message)


def _unreachable(url: str, err: Exception) -> KvmeshError:
    if isinstance(err, httpx.ConnectError) and "SSL" in str(err):
        return Unavailable(f"{url}: {err}; does the gateway speak plain http, or is its certificate unknown here?")
    if isinstance(err, httpx.ConnectError):
        return Unavailable(f"nothing answers at {url}: is the mesh up? (kvmesh up, or --url)")
    return Unavailable(f"{url}: {err or type(err).__name__}")
