"""Routes each completion to a prefill vLLM first and then to a decode vLLM, as vLLM's `kv_transfer_params` have it.

    python examples/prefill_decode_proxy.py --prefill http://10.0.0.1:8001 --decode http://10.0.0.2:8002 --port 8000

The prefill engine computes the prompt and says where its KV is; the decode engine is told so and has the KV pushed to
it. Where prefill does not answer, decode computes the prompt. Several of each are taken in turn.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

PATHS = ("/v1/completions", "/v1/chat/completions")
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def proxy(prefill: list[str], decode: list[str], prefill_s: float) -> FastAPI:
    """Returns the application that serves PATHS."""
    app = FastAPI()
    http = httpx.AsyncClient(timeout=httpx.Timeout(600.0, connect=2.0))
    prefills, decodes = itertools.cycle(prefill), itertools.cycle(decode)

    async def prefilled(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Has a prompt computed, and returns where its KV is."""
        first = body | {"kv_transfer_params": ASKED, "stream": False, "max_tokens": 1}
        first |= {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
        first.pop("stream_options", None)
        try:
            answer = await http.post(next(prefills) + path, json=first, timeout=prefill_s)
            params = answer.json().get("kv_transfer_params") if answer.status_code == 200 else None
            return params if isinstance(params, dict) else None
        except (httpx.HTTPError, ValueError):
            return None

    async def serve(request: Request) -> Response:
        path, body = request.url.path, await request.json()
        if params := await prefilled(path, body):
            body["kv_transfer_params"] = params
        answer = await http.send(http.build_request("POST", next(decodes) + path, json=body), stream=True)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_bytes():
                    yield part
            finally:
                await answer.aclose()  # a client that leaves ends the decoding, too

        return StreamingResponse(parts(), answer.status_code, media_type=answer.headers.get("content-type"))

    for path in PATHS:
        app.add_api_route(path, serve, methods=["POST"])
    return app


def main() -> None:
    """Runs the proxy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prefill", action="append", required=True, help="URL of a prefill vLLM; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="URL of a decode vLLM; may be repeated")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-s", type=float, default=60.0, help="a prompt that takes longer goes to decode alone")
    given = parser.parse_args()
    uvicorn.run(proxy(given.prefill, given.decode, given.prefill_s), port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
