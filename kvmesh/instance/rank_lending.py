"""How an instance finds machines for its ranks without being told their addresses (ADR 44): rank hosts say to the store
masters that they are there, and an instance asks the leading one for as many as it needs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from kvmesh.errors import DeadlinePassed, KvmeshError, NotLeader, Unavailable
from kvmesh.instance.config import InstanceConfig
from kvmesh.instance.front import check_config
from kvmesh.instance.host_link import build
from kvmesh.ranks.host_memory import available_bytes
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import ranks_pb2, store_pb2
from kvmesh.rpc.protocol import PROTOCOL_VERSION

log = logging.getLogger(__name__)

CALL_S = 2.0
GOODBYE_S = 1.0
REFUSED_S = 5.0  # before a master that refuses us for what we are is asked again
ASK_S = 0.5  # between two questions of an instance that waits
SAY_S = 30.0  # between two lines in the log of one that waits for the same
PROBE_S = 60.0
STORE = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
NVIDIA = Path("/dev/nvidiactl")
COUNT_GPUS = (
    "import torch as t; c = t.cuda; print(*(c.get_device_properties(i).total_memory for i in range(c.device_count())))"
)

C = TypeVar("C", bound=InstanceConfig)


@cache
def gpu_memory() -> tuple[int, ...]:
    """Returns the bytes of each GPU that ranks of this machine could use. Another process looks, for torch is large."""
    if not NVIDIA.exists():
        return ()
    try:
        argv = [sys.executable, "-c", COUNT_GPUS]
        told = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_S, check=True).stdout
        return tuple(map(int, told.split()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("GPUs of this machine cannot be counted, none are lent: %s", error)
        return ()


def memory_for_ranks() -> int:
    """Returns bytes that ranks here can have: of each GPU (the smallest), without GPUs of the machine in all."""
    return min(gpu_memory(), default=0) or available_bytes()


def fingerprint(model: str, cache_dir: str) -> str:
    """Returns that of a checkpoint folder; the first time all of it is read. Raises CheckpointError."""
    from kvmesh.engine.checkpoint import open_checkpoint

    with open_checkpoint(model, cache_dir=cache_dir) as checkpoint:
        return checkpoint.fingerprint


class RankLender:
    """Tells the store masters of one rank host, again and again. `state` returns what it is now."""

    def __init__(self, store: str, state: Callable[[], ranks_pb2.RankHostState]) -> None:
        self._client = LeaderClient(STORE, LeaderTracker(store))
        self._state = state
        self.registered = ""  # the address of the master that has taken it
        self._heard_at = time.monotonic()

    @property
    def unheard_s(self) -> float:
        """Seconds since the last answer; 0: a master has taken it."""
        return 0.0 if self.registered else time.monotonic() - self._heard_at

    async def run(self) -> None:
        """Goes on until it is cancelled. Raises nothing else."""
        complained = ""
        while True:
            try:
                wait_s = await self._lend() / 1000
            except KvmeshError as error:
                unheard = isinstance(error, Unavailable | DeadlinePassed | NotLeader)
                wait_s = ASK_S if unheard else REFUSED_S
                if complained != error.message:
                    log.warning("no store master takes this rank host: %s", error.message)
                self.registered, complained = "", error.message
            else:
                complained = ""
            await asyncio.sleep(wait_s)

    async def _lend(self) -> int:
        request = store_pb2.LendRanksRequest(protocol_version=PROTOCOL_VERSION, host=self._state())
        answer: store_pb2.LendRanksResponse = await self._client.call("LendRanks", request, CALL_S)
        at = self._client.leaders.current
        if self.registered != at:
            log.info("registered with the store master at %s: instances may have ranks here", at)
        self.registered, self._heard_at = at, time.monotonic()
        return max(answer.interval_ms, 10)

    async def close(self) -> None:
        """Says goodbye, and ends the connections. `run` must have ended."""
        if self.registered:
            request = store_pb2.LendRanksRequest(protocol_version=PROTOCOL_VERSION, host=self._state(), leaves=True)
            with contextlib.suppress(KvmeshError):
                await self._client.call("LendRanks", request, GOODBYE_S)
        await self._client.close()


async def placed(config: C, stop: asyncio.Event) -> C | None:
    """Returns `config` with addresses of rank hosts where `rank_hosts` is a number; it waits until there are as many.
    Returns None when `stop` is set before. Raises KvmeshError as `check_config` and the store master do."""
    if not config.rank_host_count:
        return config
    check_config(config)
    request = store_pb2.PlaceRanksRequest(
        instance=pb.InstanceRef(instance_id=config.instance_id, incarnation=time.time_ns()),
        build=build(),
        hosts=config.rank_host_count,
        ranks_each=config.axes.world // (config.rank_host_count + 1),
        gpus=config.device.startswith("cuda"),
        fingerprint=await asyncio.to_thread(fingerprint, config.model, config.cache_dir),
    )
    said, said_at = "", 0.0
    async with LeaderClient(STORE, LeaderTracker(config.store)) as client:
        while not stop.is_set():
            try:
                answer: store_pb2.PlaceRanksResponse = await client.call("PlaceRanks", request, CALL_S)
            except (Unavailable, DeadlinePassed, NotLeader) as error:
                why = error.message
            else:
                if answer.addresses:
                    log.info("ranks are placed on this machine and %s", ", ".join(answer.addresses))
                    return dataclasses.replace(config, rank_hosts=",".join(answer.addresses))
                why = answer.why_not
            if why != said or time.monotonic() - said_at > SAY_S:
                log.info("waits for rank hosts (kvmesh up --join ... --as ranks): %s", why)
                said, said_at = why, time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await stop.wait()
    return None
