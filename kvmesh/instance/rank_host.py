"""`kvmesh serve ranks` starts ranks on this machine for fronts on others, and carries their frames (ADR 0044).

A front opens one stream, over which its certificate says which instance it is. The ranks are this process's children;
they end with the stream, with a front that says nothing for its `silence_ms`, and with this process. It decides
nothing: of the messages it looks at the first alone, Configure, in which it sets what belongs to this machine.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from kvmesh.errors import InvalidRequest, Overloaded, ProtocolMismatch, Unavailable
from kvmesh.instance.host_link import BEAT_S, PIECE_BYTES, build
from kvmesh.instance.rank_host_config import RanksConfig
from kvmesh.instance.rank_lending import RankLender, fingerprint, gpu_memory, memory_for_ranks
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankProcess, rank_env, rank_socket, start_process
from kvmesh.ranks.front_port import FrontPort
from kvmesh.ranks.ipc import HEADER, MAX_FRAME_BYTES, frame
from kvmesh.ranks.network import find_interface
from kvmesh.rpc import protocol
from kvmesh.rpc.bidi import ServerStream
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import ranks_pb2, ranks_pb2_grpc
from kvmesh.rpc.runner import observed
from kvmesh.rpc.server import Server, join

log = logging.getLogger(__name__)

SERVICE = "kvmesh.v1.RankHost"
STOP_GRACE_S = 0.5
REAP_S = 2.0
MOST_THREADS = 1024
MOST_SILENCE_MS = 3_600_000  # a front that says nothing for an hour does not hold processes any longer
RETRY_AFTER_MS = 1_000
HELD_BYTES = 4 << 20  # read from a rank and not taken by its front: then it is not read any further
ENDS_KEPT, NAME_KEPT = 16, 256
ANY_ADDRESS = ("0.0.0.0", "::")


async def run(config: RanksConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serves until `stop`; `started` hears the addresses. Raises ConfigError when a port is in use."""
    async with observed("ranks", config.node_id, config) as metrics:
        server = Server(config.host, config.port)
        servicer = RankHostServicer(config)
        ranks_pb2_grpc.add_RankHostServicer_to_server(servicer, server.grpc)
        server.serves(SERVICE)
        await asyncio.to_thread(gpu_memory)
        if config.store and config.model:
            servicer.fingerprint = await asyncio.to_thread(fingerprint, config.model, config.cache_dir)
        port = await server.start()
        servicer.address = join(config.advertise_host or config.host, port)
        lender = RankLender(config.store, servicer.state) if config.store else None
        servicer.lender = lender
        lending = asyncio.create_task(lender.run(), name="lend ranks") if lender is not None else None
        try:
            server.set_ready(True)
            started({"address": server.address, "metrics": metrics})
            await stop.wait()
        finally:
            servicer.end("was ended: its rank host stops")
            if lender is not None and lending is not None:
                lending.cancel()
                await asyncio.gather(lending, return_exceptions=True)
                await lender.close()
            await server.stop(STOP_GRACE_S)


class HostedRank:
    """Owns one rank process and the socket to it, for a front elsewhere. `prepare` sets in its Configure what belongs
    to this machine; `news` is called when `take` or `ended` have something new."""

    def __init__(
        self, rank: int, threads: int, prepare: Callable[[m.Configure], m.Configure], news: Callable[[], None]
    ) -> None:
        self.rank, self.ended = rank, ""
        self._prepare, self._news = prepare, news
        self._first: bytearray | None = bytearray()  # the first frame, while it comes
        self._taken = bytearray()
        self._loop = asyncio.get_running_loop()
        ours, theirs = rank_socket()
        try:
            self._process: RankProcess = start_process([theirs.fileno()], rank_env(threads))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._port = FrontPort(ours, self._came, self._closed)

    @property
    def pid(self) -> int:
        return self._process.pid

    def feed(self, data: bytes) -> None:
        """Passes on a piece of what the front sends. Raises InvalidRequest where it does not begin with Configure."""
        if self._first is not None:
            self._first += data
            data = self._configured(self._first)
            if not data:
                return
            self._first = None
        if self._port.queued > MAX_FRAME_BYTES:
            self.kill("takes no messages")
            return
        self._port.send(data)

    def take(self) -> bytes:
        """Returns what the rank has sent since the last call."""
        taken, self._taken = bytes(self._taken), bytearray()
        self._port.resume()
        return taken

    def _configured(self, first: bytearray) -> bytes:
        """Returns what has come once the first frame is whole, with this machine's settings; b"" before."""
        if len(first) < HEADER.size:
            return b""
        (length,) = HEADER.unpack_from(first)
        if length > PIECE_BYTES:
            raise InvalidRequest.of("frames", length, f"the first frame has at most {PIECE_BYTES} bytes")
        end = HEADER.size + length
        if len(first) < end:
            return b""
        try:
            message = msgspec.msgpack.decode(bytes(first[HEADER.size : end]), type=m.ToRank)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"frames: the first message cannot be read: {error}", field="frames") from None
        if not isinstance(message, m.Configure) or message.rank != self.rank:
            raise InvalidRequest(f"frames: the first message is not the Configure of rank {self.rank}", field="frames")
        return frame(self._prepare(message)) + bytes(first[end:])

    def _came(self, data: bytes) -> None:
        self._taken += data
        if len(self._taken) > HELD_BYTES:
            self._port.pause()
        self._news()

    def _closed(self, _: str) -> None:
        """The rank has closed its socket: the kernel does so a moment before the process is gone."""
        self._loop.create_task(self._reap(), name=f"end of rank {self.rank}")

    async def _reap(self) -> None:
        code = await asyncio.to_thread(self._waited, REAP_S)
        if code is None:
            self.kill("closed its socket")
        elif not self.ended:
            self.ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        self._news()

    def _waited(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, why: str) -> None:
        """Ends the process now."""
        self.ended = self.ended or why
        self._process.kill()
        self._port.close()
        self._news()

    async def close(self) -> None:
        """Kills the process and waits until it is gone."""
        self._process.kill()
        self._port.close()
        await asyncio.to_thread(self._waited, REAP_S)


class HostedRanks:
    """Is what runs here of one instance, for one stream of its front."""

    def __init__(self, hello: ranks_pb2.RankHostHello, prepare: Callable[[m.Configure], m.Configure]) -> None:
        self.instance_id, self.incarnation = hello.instance.instance_id, hello.instance.incarnation
        self.news, self.over = asyncio.Event(), asyncio.Event()
        self.why = ""
        self._silence_s = hello.silence_ms / 1000
        self._heard_at = time.monotonic()
        self._beat_due = True
        self._told: set[int] = set()
        self._ranks: dict[int, HostedRank] = {}
        try:
            for rank in hello.ranks:
                self._ranks[rank] = HostedRank(rank, hello.threads, prepare, self.news.set)
        except BaseException:
            self.end("not all of them could start")
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks.values()]

    @property
    def numbers(self) -> list[int]:
        """The ranks, as the instance counts them."""
        return list(self._ranks)

    def take(self, request: ranks_pb2.RankHostRequest) -> None:
        """Takes a message of the front. Raises InvalidRequest for a rank that is not here."""
        self._heard_at = time.monotonic()
        kind = request.WhichOneof("kind")
        if kind == "beat":
            self._beat_due = True
            self.news.set()
            return
        if kind not in ("frames", "kill"):
            raise InvalidRequest.of("kind", kind, "frames, beat or kill")
        number = request.frames.rank if kind == "frames" else request.kill.rank
        rank = self._ranks.get(number)
        if rank is None:
            raise InvalidRequest.of("rank", number, f"one of {sorted(self._ranks)}")
        if kind == "frames":
            rank.feed(request.frames.data)
        else:
            rank.kill("was killed by its front")

    def outgoing(self) -> Sequence[ranks_pb2.RankHostEvent]:
        """Returns what the front is to hear now: every rank's bytes before its end."""
        events: list[ranks_pb2.RankHostEvent] = []
        if self._beat_due:
            self._beat_due = False
            events.append(ranks_pb2.RankHostEvent(beat=ranks_pb2.RankHostBeat(host_ns=time.monotonic_ns())))
        for number, rank in self._ranks.items():
            data = rank.take()
            for at in range(0, len(data), PIECE_BYTES):
                piece = ranks_pb2.RankFrames(rank=number, data=data[at : at + PIECE_BYTES])
                events.append(ranks_pb2.RankHostEvent(frames=piece))
            if rank.ended and number not in self._told:
                self._told.add(number)
                events.append(ranks_pb2.RankHostEvent(ended=ranks_pb2.RankEnded(rank=number, cause=rank.ended)))
        return events

    async def watch(self) -> None:
        """Ends the ranks of a front that is silent for too long."""
        while (silent := time.monotonic() - self._heard_at) <= self._silence_s:
            await asyncio.sleep(min(BEAT_S, self._silence_s / 4))
            self._beat_due = True  # the front waits for this process's word, too
            self.news.set()
        self.end(f"its front has been silent for {silent:.1f} s")

    def end(self, why: str) -> None:
        """Kills all ranks, and the stream with them."""
        self.why = self.why or why
        for rank in self._ranks.values():
            rank.kill(why)
        self.over.set()
        self.news.set()

    async def close(self) -> None:
        """Leaves no process behind."""
        await asyncio.gather(*(rank.close() for rank in self._ranks.values()))


class RankHostServicer(ranks_pb2_grpc.RankHostServicer):
    """Serves the fronts whose ranks run on this machine."""

    def __init__(self, config: RanksConfig) -> None:
        self._config = config
        self._incarnation = time.time_ns()
        self._hosted: dict[str, HostedRanks] = {}
        self._count = 0  # of ranks
        self._ended: deque[ranks_pb2.RankHostEnd] = deque(maxlen=ENDS_KEPT)
        self._ends = 0
        self.address = ""  # where others reach it
        self.fingerprint = ""  # of its checkpoint, where it has one for all
        self.lender: RankLender | None = None

    def state(self) -> ranks_pb2.RankHostState:
        """Returns what store masters are told."""
        config = self._config
        name = config.instance_id or f"ranks-{config.node_id}"
        return ranks_pb2.RankHostState(
            instance=pb.InstanceRef(instance_id=name, address=self.address, incarnation=self._incarnation),
            node_id=config.node_id,
            build=build(),
            max_ranks=config.max_ranks,
            gpus=len(gpu_memory()),
            memory_bytes=memory_for_ranks(),
            fingerprint=self.fingerprint,
            uses=[
                ranks_pb2.RankHostUse(instance_id=name, ranks=hosted.numbers)
                for name, hosted in self._hosted.items()
                if not hosted.over.is_set()
            ],
        )

    async def GetStatus(  # noqa: N802
        self, request: ranks_pb2.GetRankHostStatusRequest, context: Any
    ) -> ranks_pb2.GetRankHostStatusResponse:
        """Says what runs here, how the last ones have ended, and whether a store master knows of this host."""
        lender = self.lender
        return ranks_pb2.GetRankHostStatusResponse(
            host=self.state(),
            ended=self._ended,
            ends=self._ends,
            registered=lender.registered if lender is not None else "",
            unheard_ms=int(lender.unheard_s * 1000) if lender is not None else 0,
        )

    def end(self, why: str) -> None:
        """Ends all ranks."""
        for hosted in self._hosted.values():
            hosted.end(why)

    async def Run(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[ranks_pb2.RankHostRequest], context: Any
    ) -> None:
        """Runs the ranks of one instance until its front ends the stream. Raises InvalidRequest, ProtocolMismatch,
        Overloaded, or Unavailable when a newer incarnation is here."""
        stream: ServerStream[ranks_pb2.RankHostRequest, ranks_pb2.RankHostEvent] = ServerStream(
            request_iterator, context
        )
        hello = await stream.hello()
        self._check(hello)
        name = hello.instance.instance_id
        stream.who = f"the front of {name}"
        await self._supersede(name, hello.instance.incarnation)
        if self._count + len(hello.ranks) > self._config.max_ranks:
            raise Overloaded(
                f"max_ranks={self._config.max_ranks}: {self._count} ranks run here, {len(hello.ranks)} more are asked "
                "for",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._count += len(hello.ranks)
        hosted: HostedRanks | None = None
        watching: asyncio.Task[None] | None = None
        try:
            hosted = self._hosted[name] = HostedRanks(hello, partial(prepared, self._config, _host(context.peer())))
            log.info("%s: ranks %s as processes %s", name, list(hello.ranks), hosted.pids)
            welcome = ranks_pb2.RankHostWelcome(
                protocol_version=protocol.PROTOCOL_VERSION, pids=hosted.pids, host_ns=time.monotonic_ns()
            )
            await stream.write(ranks_pb2.RankHostEvent(hello=welcome))
            watching = asyncio.create_task(hosted.watch(), name=f"silence of {name}")
            await stream.serve(hosted.take, hosted.outgoing, hosted.news, hosted.over.is_set)
        finally:
            if watching is not None:
                watching.cancel()
            if hosted is not None:
                hosted.end("its front has ended, or is out of reach")
                log.info("%s: ranks %s end: %s", name, list(hello.ranks), hosted.why)
                self._ends += 1
                self._ended.append(
                    ranks_pb2.RankHostEnd(instance_id=name[:NAME_KEPT], ranks=hello.ranks, cause=hosted.why)
                )
                await asyncio.shield(self._closed(name, hosted))
            self._count -= len(hello.ranks)

    async def _closed(self, name: str, hosted: HostedRanks) -> None:
        await hosted.close()
        if self._hosted.get(name) is hosted:
            del self._hosted[name]

    async def _supersede(self, name: str, incarnation: int) -> None:
        """Ends what an earlier incarnation of this instance has left here: its front's end may not be known yet. Raises
        Unavailable when the one that is here is newer."""
        old = self._hosted.get(name)
        if old is None:
            return
        if old.incarnation >= incarnation:
            raise Unavailable(
                f"{name} runs here as incarnation {old.incarnation:x}, which is not before {incarnation:x}"
            )
        old.end("a newer incarnation of its front has come")
        await self._closed(name, old)

    def _check(self, hello: ranks_pb2.RankHostHello) -> None:
        protocol.check(hello.protocol_version, "the front")
        if hello.build != build():
            raise ProtocolMismatch(
                f"build={hello.build[:80]!r}: this rank host is {build()!r}; run the same kvmesh on all hosts of an "
                "instance",
                field="build",
            )
        name, ranks = hello.instance.instance_id, list(hello.ranks)
        if not name or len(name) > NAME_KEPT or not name.isprintable():  # else no store master takes this host
            why = f"an instance's name of 1 to {NAME_KEPT} characters that can be printed"
            raise InvalidRequest.of("instance_id", name[:NAME_KEPT], why)
        if not ranks or len(set(ranks)) < len(ranks) or len(ranks) > self._config.max_ranks:
            raise InvalidRequest.of("ranks", ranks[:20], f"1 to {self._config.max_ranks} different ranks (max_ranks)")
        if not 1 <= hello.threads <= MOST_THREADS:
            raise InvalidRequest.of("threads", hello.threads, f"in 1..{MOST_THREADS}")
        if not 1 <= hello.silence_ms <= MOST_SILENCE_MS:
            raise InvalidRequest.of("silence_ms", hello.silence_ms, f"in 1..{MOST_SILENCE_MS}")


def prepared(config: RanksConfig, front: str, configure: m.Configure) -> m.Configure:
    """Returns a rank's settings with this machine's part: where its files and certificates lie, what its network
    interfaces are. `front` is the host that the front calls from."""
    advertised = config.advertise_host
    if not advertised and config.host in ANY_ADDRESS:
        advertised = find_interface("", front).address
    return msgspec.structs.replace(
        configure,
        model_path=config.model or configure.model_path,
        cache_dir=config.cache_dir,
        ssd_path=_own_folder("ssd_path", config.ssd_path, configure.ssd_path, configure.instance_id),
        warm_segment=_own_folder("warm_segment", config.warm_segment, configure.warm_segment, configure.instance_id),
        transports=config.transport_list,
        nics=config.nic_list,
        topology=config.topology,
        rdma=config.rdma_settings,
        host=config.host,
        advertise_host=advertised,
        leave_host=config.leave_host,
        tls=config.transfer_tls,
        rank_network=config.rank_network or configure.rank_network,
        rank_route=front,
    )


def _own_folder(key: str, here: str, asked: str, instance_id: str) -> str:
    """Returns this machine's folder for what the front keeps in the folder `asked`; "" where that keeps none. Raises
    InvalidRequest where this machine has no place for it."""
    if not asked:
        return ""
    if not here:
        raise InvalidRequest(
            f"{key}={asked!r}: this rank host has no folder for it (its own --{key.replace('_', '-')})"
        )
    name = quote(instance_id, safe="")
    return str(Path(here).absolute() / (f"%2E{name[1:]}" if name.startswith(".") else name))


def _host(peer: str) -> str:
    """Returns the host of gRPC's word for a peer: ipv4:10.0.0.1:4711, ipv6:[::1]:4711."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
