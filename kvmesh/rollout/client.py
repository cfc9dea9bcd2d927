"""A trainer's client of a mesh: groups of answers to one prompt, and the orders that change the weights behind them."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx
import orjson

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.rollout.trainer import TrainerSegment

CONNECT_S = 10.0


class RolloutRefused(KvmeshError):
    """The mesh has refused a call; `status` is the answer's, and `field` and the message are the mesh's. With
    `retry_after_s` it says when the same call may succeed."""

    code = "refused"

    def __init__(
        self, message: str, *, status: int, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class RolloutSample:
    """One answer. `epochs` are pairs (index of a token, weights epoch from it on), () while the weights are those of
    the checkpoint; `finish` is "stop", "length" or "" where it was ended before."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    finish: str = ""

    def epoch_of(self, index: int) -> int:
        """Returns by which weights a token was made."""
        return next((epoch for first, epoch in reversed(self.epochs) if first <= index), 0)

    @property
    def token_epochs(self) -> list[int]:
        """The weights epoch of each token."""
        return [self.epoch_of(index) for index in range(len(self.token_ids))]


@dataclass(slots=True)
class RolloutGroup:
    """The answers to one prompt, which is computed once for all of them."""

    prompt: list[int]
    samples: list[RolloutSample]
    error: str = ""  # why it ended before its samples were whole; "": it did not, or its caller ended it
    seconds: float = 0.0

    @property
    def finished(self) -> int:
        """How many samples are whole."""
        return sum(bool(sample.finish) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """What an update took. `instances` says for each what it wrote in which time, or its `error`."""

    epoch: int
    paused_s: float
    ended: int  # requests that were in flight; with "keep" they go on
    instances: tuple[dict[str, Any], ...]

    @property
    def whole(self) -> bool:
        """Whether all instances have the new weights."""
        return not any("error" in one for one in self.instances)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Which instances go on with a model's answers, which are free now, how many answers moved, and why no more were
    freed."""

    kept: tuple[str, ...]
    freed: tuple[str, ...]
    moved: int
    why: str


@dataclass(frozen=True, slots=True)
class MemoryGivenBack:
    """What a sleep gave back. `instances` says for each the bytes of pages and of weights."""

    ended: int  # requests that were in flight; with "keep" they go on
    instances: tuple[dict[str, Any], ...]

    @property
    def page_bytes(self) -> int:
        return sum(int(one["page_bytes"]) for one in self.instances)

    @property
    def weight_bytes(self) -> int:
        return sum(int(one["weight_bytes"]) for one in self.instances)


_last = itertools.count()


def new_epoch() -> int:
    """Returns an id for weights that no trainer on earth has used: nanoseconds of the clock, and never the same or an
    earlier one twice in this process."""
    global _last
    made = max(time.time_ns(), next(_last))
    _last = itertools.count(made + 1)
    return made


class RolloutClient:
    """Speaks to one gateway, whose setting `rollout` must be on: `async with RolloutClient("http://host") as mesh`.

    Raises RolloutRefused for what the mesh refuses, and Unavailable where it cannot be reached."""

    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", timeout_s: float = 600.0, connections: int = 4096
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S), limits=limits
        )
        self._model = {"model": model} if model else {}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def group(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        logprobs: bool = True,
        enough: Callable[[RolloutGroup], bool] | None = None,
        **sampling: Any,
    ) -> RolloutGroup:
        """Returns `n` answers to `prompt`. It may be cancelled at any time: nothing of the group runs on. `enough` is
        asked after each piece of it; where it says so the whole group is ended, with what has come. An error in the
        middle (as of a pause that aborts) is the group's `error`, and what has come stays. A mesh that is too full for
        the group now is asked again when it says so, for `timeout_s` of this client. Raises RolloutRefused where nothing
        has begun."""
        params = {"max_tokens": max_tokens, "temperature": temperature, "n": n, "ignore_eos": ignore_eos, **sampling}
        params |= {"seed": seed} if seed is not None else {}
        params |= {"logprobs": 0} if logprobs else {}
        body = {**self._model, "token_ids": list(prompt), "sampling_params": params, "stream": True}
        start = time.monotonic()
        while True:
            try:
                return await self._streamed(body, RolloutGroup(list(prompt), [RolloutSample() for _ in range(n)]), enough)
            except RolloutRefused as refused:
                if refused.status != 429 or refused.retry_after_s is None:
                    raise
                wait_s = refused.retry_after_s * random.uniform(1.0, 1.25)  # not all groups in the same moment
                if time.monotonic() - start + wait_s > self._timeout_s:
                    raise
            await asyncio.sleep(wait_s)

    async def _streamed(
        self, body: dict[str, Any], group: RolloutGroup, enough: Callable[[RolloutGroup], bool] | None
    ) -> RolloutGroup:
        start = time.monotonic()
        try:
            async with self._http.stream("POST", "/inference/v1/generate", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refused(answer)
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    told = orjson.loads(line[6:])
                    if "error" in told:
                        group.error = str(told["error"].get("message", told["error"]))
                        break
                    for choice in told.get("choices", ()):
                        _add(group.samples[choice["index"]], choice)
                    if enough is not None and enough(group):
                        break
        except httpx.TransportError as error:
            raise Unavailable(f"the gateway at {self._http.base_url}: {error or type(error).__name__}") from None
        group.seconds = time.monotonic() - start
        return group

    async def pause(self, mode: str = "keep", timeout_s: float = 60.0, for_s: float | None = None) -> int:
        """Pauses the model: no new tokens until `resume`, or for `for_s` where that is told. Requests in flight go on
        then ("keep"), end now ("abort"), or end before the pause begins ("finish"). Returns how many did not finish."""
        return int((await self._order("pause", {"mode": mode, "for_s": for_s}, timeout_s))["ended"])

    async def resume(self) -> int:
        """Lets the model go on. Returns the epoch of its weights."""
        return int((await self._order("resume", {}, None))["weights_epoch"])

    async def gather(self, slower: float = 0.25, timeout_s: float = 60.0) -> Gathered:
        """Has few running answers go on at fewer instances, if that pays; a step may be longer than one of a single row
        by the share `slower`. Instances that are freed are paused, as for training, until `resume`."""
        told = await self._order("gather", {"slower": slower}, timeout_s)
        return Gathered(tuple(told["kept"]), tuple(told["freed"]), int(told["moved"]), told["why"])

    async def update_weights(
        self,
        *,
        path: str = "",
        trainer: TrainerSegment | None = None,
        epoch: int | None = None,
        mode: str = "keep",
        timeout_s: float = 600.0,
        stay_paused: bool = False,
    ) -> WeightsUpdated:
        """Gives the model other weights, out of a folder or of a trainer's memory, at all its instances at once.
        `epoch` names them for ever and grows from update to update; None: `new_epoch()`."""
        body: dict[str, Any] = {"mode": mode, "epoch": epoch or new_epoch(), "stay_paused": stay_paused}
        if path:
            body["path"] = path
        if trainer is not None:
            body["segment"] = base64.b64encode(trainer.descriptor).decode()
            body["tensors"] = [
                {"name": one.name, "dtype": one.dtype, "shape": one.shape, "offset": one.offset}
                for one in trainer.tensors
            ]
        told = await self._order("update_weights", body, timeout_s)
        return WeightsUpdated(told["weights_epoch"], told["paused_s"], told["ended"], tuple(told["instances"]))

    async def sleep(self, level: int = 1, *, mode: str = "keep", timeout_s: float = 60.0) -> MemoryGivenBack:
        """Pauses the model and has its instances give the memory of KV pages and weights back, until `wake`. `level` 1
        keeps the weights in host memory, 2 drops them. `mode` is that of `pause`."""
        told = await self._order("sleep", {"level": level, "mode": mode}, timeout_s)
        return MemoryGivenBack(told["ended"], tuple(told["instances"]))

    async def wake(self, timeout_s: float = 600.0) -> int:
        """Has pages and weights again, and lets the model go on, unless it is paused by hand. Weights that
        were dropped are those of an update since, else the checkpoint's. Returns the epoch of its weights."""
        return int((await self._order("wake", {}, timeout_s))["weights_epoch"])

    async def _order(self, name: str, body: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        body |= self._model | ({} if timeout_s is None else {"timeout_s": timeout_s})
        try:
            answer = await self._http.post(f"/v1/rollout/{name}", json=body)
        except httpx.TransportError as error:
            raise Unavailable(f"the gateway at {self._http.base_url}: {error or type(error).__name__}") from None
        if answer.status_code != 200:
            raise _refused(answer)
        found: dict[str, Any] = orjson.loads(answer.content)
        return found


def _add(sample: RolloutSample, choice: dict[str, Any]) -> None:
    sample.token_ids += choice["token_ids"]
    if choice.get("logprobs"):
        sample.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
    for first, epoch in choice.get("weights_epochs", ()):
        if not sample.epochs or sample.epochs[-1][1] != epoch:
            sample.epochs.append((first, epoch))
    sample.finish = choice.get("finish_reason") or sample.finish


def _refused(answer: httpx.Response) -> RolloutRefused:
    status, body = answer.status_code, answer.content
    wait_ms = answer.headers.get("retry-after-ms", "")
    retry_after_s = int(wait_ms) / 1000 if wait_ms.isdecimal() else None
    try:
        error = orjson.loads(body)["error"]
        message, field = str(error["message"]), error.get("param")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message, field = f"status {status}: {body[:200]!r}", None
    return RolloutRefused(message, status=status, field=field, retry_after_s=retry_after_s)
