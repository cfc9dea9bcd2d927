"""What a decision of the endpoint picker costs: decisions a second of one core, and how long one takes at half of that.

    python -m benchmarks.picker                  prompts of 8,192 tokens, nine tenths and more known from earlier turns
    python -m benchmarks.picker --known 0        nothing is known: every prompt is tokenized whole

A picker and a conductor are processes of their own, with engines registered that do nothing; this one is the proxy, and
speaks ext-proc (full duplex bodies). A core's rate is told by the CPU seconds that the picker takes for a decision, all
its threads together, so that other work on the machine does not count; the wall's rate is told beside it. The limit is
a server of grpc.aio alone, which answers the same messages with constants and decides nothing: both are asked in turns,
and `picker_to_limit` is the ratio of their CPU seconds. Latencies are the proxy's: the body's last piece is written
until the endpoints are read, while 1,000 more streams are open: `p99_ms` at half of the goal's rate, `half_core_p99_ms`
at half of what the core was found to do, which on two cores is most of what they do for proxy, picker and conductor.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from kvmesh.quantiles import quantile
from kvmesh.rpc import channels, protocol
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from kvmesh.rpc.pb import envoy_external_processor_pb2_grpc as pb_grpc
from kvmesh.services.gateway.text.tokenizer import Tokenizer

ROUNDS = 5  # of picker and limit in turn
ROOT = Path(__file__).resolve().parent.parent
MODEL, BLOCK_TOKENS, ENGINES = "demo-model", 16, 8
GOAL_RATE, GOAL_P99_MS = 300.0, 20.0
START_S = 60.0
_HEADERS = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}


class BenchedService:
    """One process that serves, and writes its address into its ready file. It must be stopped."""

    def __init__(self, folder: Path, service: str, *command: str) -> None:
        self._ready = folder / f"{service}.json"
        self._process = subprocess.Popen([sys.executable, "-m", *command, "--ready-file", str(self._ready)], cwd=ROOT)

    @classmethod
    def of_kvmesh(cls, folder: Path, service: str, *flags: str) -> BenchedService:
        """Starts one of kvmesh's services."""
        return cls(folder, service, "kvmesh.cli", "serve", service, "--port", "0", "--log-level", "warning", *flags)

    def wait(self) -> str:
        """Returns its address."""
        deadline = time.monotonic() + START_S
        while not self._ready.exists():
            assert self._process.poll() is None and time.monotonic() < deadline, "it does not start"
            time.sleep(0.05)
        return str(json.loads(self._ready.read_text())["address"])

    def cpu_s(self) -> float:
        """Returns the CPU seconds that it has taken so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


class LimitServicer(pb_grpc.ExternalProcessorServicer):
    """Answers as the picker does, with constants: what is left is the transport's."""

    async def Process(  # type: ignore[override]  # noqa: N802 - it writes its answers
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: Any
    ) -> None:
        """Serves one request of a proxy."""
        endpoint = pb.ProcessingResponse(dynamic_metadata={"endpoint": "127.0.0.1:9"})
        endpoint.request_headers.response.header_mutation.set_headers.add().header.key = "x-endpoint"
        seen = pb.ProcessingResponse()
        seen.response_headers.SetInParent()
        while (message := await context.read()) is not channels.grpc.aio.EOF:
            if message.HasField("request_body"):
                await context.write(endpoint)
                passed = pb.ProcessingResponse()
                passed.request_body.response.body_mutation.streamed_response.body = message.request_body.body
                await context.write(passed)
            elif message.HasField("response_headers"):
                await context.write(seen)


async def serve_limit(ready: Path) -> None:
    """Serves LimitServicer until the process is ended."""
    server = channels.grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", 1000)])
    pb_grpc.add_ExternalProcessorServicer_to_server(LimitServicer(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.to_thread(ready.write_text, json.dumps({"address": f"127.0.0.1:{port}"}))
    await server.wait_for_termination()


async def register(stub: Any, context_tokens: int) -> None:
    """Registers engines whose leases outlast the measurement."""
    card = common_pb2.ModelCard(
        name=MODEL, fingerprint="external-bench", block_tokens=BLOCK_TOKENS, kv_dtype="float16",
        max_context_tokens=2 * context_tokens, vocab_size=1024, eos_token_ids=[0], kv_bytes_per_token=1024,
    )  # fmt: skip
    for number in range(ENGINES):
        ref = common_pb2.InstanceRef(instance_id=f"e{number}", address="127.0.0.1:9", incarnation=1)
        await stub.Register(
            conductor_pb2.RegisterInstanceRequest(
                protocol_version=protocol.PROTOCOL_VERSION, instance=ref, role=common_pb2.ROLE_BOTH,
                node_id=f"n{number}", model=card, capacity_blocks=1 << 20, max_running_requests=4096,
                http_url=f"http://127.0.0.1:{7100 + number}", knowledge=conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK,
            ),
            timeout=10,
        )  # fmt: skip


async def beat(stub: Any) -> None:
    """Says for all engines that they are there and idle, until cancelled: who is silent is forgotten."""
    load = conductor_pb2.Load(free_pages=1 << 20, free_extents=1 << 20)
    seq = 0
    while True:
        seq += 1
        for number in range(ENGINES):
            ref = common_pb2.InstanceRef(instance_id=f"e{number}", address="127.0.0.1:9", incarnation=1)
            beats = conductor_pb2.HeartbeatRequest(instance=ref, seq=seq, ready=True, load=load)
            await stub.Heartbeat(beats, timeout=30)
        await asyncio.sleep(5.0)


class PromptMaker:
    """Bodies of so many tokens, of which a share begins as the same conversation's earlier ones did."""

    def __init__(self, tokenizer: Tokenizer, tokens: int, known: float, sessions: int) -> None:
        self._words = (ROOT / "docs" / "concepts.md").read_text().split()
        self._rng = random.Random(1)
        sample = self._text(4000)
        chars = len(sample) / len(tokenizer.encode(sample, add_special_tokens=False)) * tokens
        self._new_chars = round(chars * (1 - known))
        self._begins = [self._long(round(chars * known)) for _ in range(sessions)]

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(self._words, k=words))

    def _long(self, chars: int) -> str:
        return self._text(chars // 3 + 1)[:chars]

    def bodies(self, count: int) -> list[bytes]:
        """Returns bodies of sessions in turn."""
        texts = (self._begins[n % len(self._begins)] + " " + self._long(self._new_chars) for n in range(count))
        return [json.dumps({"model": MODEL, "prompt": text, "max_tokens": 64}).encode() for text in texts]


def _first(body: bytes) -> list[pb.ProcessingRequest]:
    head = pb.ProcessingRequest(protocol_config={"request_body_mode": "FULL_DUPLEX_STREAMED"})
    for name, value in _HEADERS.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return [head, pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))]


def _answered() -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    return message


async def one(stub: Any, body: bytes, hold: asyncio.Event | None = None, decided: list[float] | None = None) -> float:
    """One request to the end of its answer, which begins when `hold` is set. Returns the seconds of the decision, which
    `decided` gets at once."""
    call = stub.Process()
    head, whole = _first(body)
    await call.write(head)
    start = time.perf_counter()
    await call.write(whole)
    answer = await call.read()
    took = time.perf_counter() - start
    assert answer.dynamic_metadata.fields, f"refused: {answer}"
    if decided is not None:
        decided.append(took)
    if hold is not None:
        await hold.wait()
    await call.write(_answered())
    await call.done_writing()
    while await call.read() is not channels.grpc.aio.EOF:
        pass
    return took


def core_ms() -> float:
    """Returns the CPU milliseconds of a million steps of a loop in Python: some 25 on a usual core, more on a slow or
    shared one."""
    start = time.thread_time()
    for _ in range(1_000_000):
        pass
    return 1000 * (time.thread_time() - start)


async def _known(stub: Any) -> None:
    """Waits until the picker knows the engines."""
    head = pb.ProcessingRequest()
    head.request_headers.end_of_stream = True
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        call = stub.Process()
        await call.write(head)
        await call.done_writing()
        if (await call.read()).dynamic_metadata.fields:
            return
        await asyncio.sleep(0.2)  # it looks for them every second
    raise AssertionError("the picker does not find the engines")


async def closed_loop(stub: Any, bodies: Sequence[bytes], at_once: int) -> float:
    """Asks for all of them, so many at once; returns the seconds."""
    left = iter(bodies)
    start = time.perf_counter()

    async def worker() -> None:
        for body in left:
            await one(stub, body)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return time.perf_counter() - start


async def open_loop(stub: Any, bodies: Sequence[bytes], rate: float) -> list[float]:
    """Asks at random times, `rate` a second; returns the seconds of each decision."""
    rng, tasks = random.Random(2), []
    due = asyncio.get_running_loop().time()
    for body in bodies:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        tasks.append(asyncio.create_task(one(stub, body)))
    return list(await asyncio.gather(*tasks))


@dataclass(frozen=True)
class Benched:
    """What is measured. `asks` and `asks_limit` are stubs of the picker and of the limit."""

    conductor: BenchedService
    picker: BenchedService
    limit: BenchedService
    asks: Any
    asks_limit: Any


@asynccontextmanager
async def processes(args: argparse.Namespace) -> AsyncIterator[Benched]:
    """Starts all three and yields them, once the picker knows the engines."""
    with tempfile.TemporaryDirectory() as folder:
        store = ("--store", "127.0.0.1:1", "--lease-ms", "3600000", "--slo-ttft-ms", "3600000")
        conductor = BenchedService.of_kvmesh(Path(folder), "conductor", *store, "--admission", "off")
        limit = BenchedService(Path(folder), "limit", "benchmarks.picker")
        picker = None
        try:
            address = conductor.wait()
            flags = ("--conductor", address, "--model", str(args.model), "--served-name", MODEL)
            picker = BenchedService.of_kvmesh(Path(folder), "picker", *flags, "--metrics-port", "0")
            async with (
                channels.connect(address) as control,
                channels.connect(picker.wait()) as channel,
                channels.connect(limit.wait()) as bare,
            ):
                known: Any = conductor_pb2_grpc.ConductorStub(control)  # type: ignore[no-untyped-call]
                await register(known, args.tokens)
                beating = asyncio.create_task(beat(known))
                stub = pb_grpc.ExternalProcessorStub(channel)  # type: ignore[no-untyped-call]
                try:
                    await _known(stub)
                    transport: Any = pb_grpc.ExternalProcessorStub(bare)  # type: ignore[no-untyped-call]
                    yield Benched(conductor, picker, limit, stub, transport)
                finally:
                    beating.cancel()
        finally:
            for service in (picker, limit, conductor):
                if service is not None:
                    service.stop()


async def measure(args: argparse.Namespace) -> dict[str, float]:
    """Returns the figures."""
    maker = PromptMaker(Tokenizer.load(args.model), args.tokens, args.known, args.sessions)
    async with processes(args) as benched:
        stub = benched.asks
        await closed_loop(stub, maker.bodies(2 * args.sessions), args.at_once)
        await closed_loop(benched.asks_limit, maker.bodies(2 * args.sessions), args.at_once)
        bodies = maker.bodies(args.requests)
        took_s, wall_s = dict.fromkeys(("picker", "limit", "conductor"), 0.0), 0.0
        size = -(-len(bodies) // ROUNDS)
        for some in (bodies[at : at + size] for at in range(0, len(bodies), size)):
            for name, asked in (("limit", benched.asks_limit), ("picker", stub)):
                of = benched.picker if name == "picker" else benched.limit
                before, conductor_s = of.cpu_s(), benched.conductor.cpu_s()
                seconds = await closed_loop(asked, some, args.at_once)
                took_s[name] += of.cpu_s() - before
                if name == "picker":
                    wall_s += seconds
                    took_s["conductor"] += benched.conductor.cpu_s() - conductor_s
        rate = len(bodies) / took_s["picker"]
        hold = asyncio.Event()
        opened = list[float]()
        held = [asyncio.create_task(one(stub, body, hold, opened)) for body in maker.bodies(args.streams)]
        while len(opened) < len(held):  # noqa: ASYNC110 - each appends to the list
            await asyncio.sleep(0.1)
        gc.collect()
        gc.freeze()  # this process' own pauses are not the picker's
        at_goal = sorted(await open_loop(stub, maker.bodies(args.requests), args.rate))
        at_half = sorted(await open_loop(stub, maker.bodies(args.requests), rate / 2))
        hold.set()
        await asyncio.gather(*held)
        return {
            "requests": len(bodies), "body_kib": sum(map(len, bodies)) / len(bodies) / 1024,
            **{f"{name}_cpu_ms": 1000 * seconds / len(bodies) for name, seconds in took_s.items()},
            "picker_to_limit": took_s["picker"] / took_s["limit"],
            "decisions_per_core_s": rate, "decisions_per_s": len(bodies) / wall_s, "streams": args.streams,
            "core_ms": core_ms(),
            "rate": args.rate, "p50_ms": 1000 * quantile(at_goal, 0.5), "p99_ms": 1000 * quantile(at_goal, 0.99),
            "half_core_p50_ms": 1000 * quantile(at_half, 0.5), "half_core_p99_ms": 1000 * quantile(at_half, 0.99),
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-model", help="folder of the tokenizer")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--known", type=float, default=0.94, help="share of a prompt that its session's last one had")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1000, help="measured, in each part")
    parser.add_argument("--at-once", type=int, default=16, help="requests at once while the core's rate is measured")
    parser.add_argument("--streams", type=int, default=1000, help="open streams while latencies are measured")
    parser.add_argument("--rate", type=float, default=GOAL_RATE / 2, help="decisions a second then")
    parser.add_argument("--ready-file", type=Path, help="serve the limit, and write its address there")
    args = parser.parse_args(argv)
    if args.ready_file is not None:
        uvloop.run(serve_limit(args.ready_file))
        return 0
    found = uvloop.run(measure(args))
    for name, value in found.items():
        print(f"{name:22} {value:10.1f}")
    kept = found["decisions_per_core_s"] >= GOAL_RATE, found["p99_ms"] <= GOAL_P99_MS
    print(f"goals: {GOAL_RATE:.0f} decisions/s a core {'kept' if kept[0] else 'missed'}; "
          f"p99 of {GOAL_P99_MS:.0f} ms at {args.rate:.0f}/s {'kept' if kept[1] else 'missed'}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
