"""Time to first token of a vLLM instance on a prefix that another one has computed: through kvmesh's Store, through the
connectors that vLLM brings (Mooncake's store, the example one over files), and computed again.

For each connector instance A answers prompts, saves their blocks and ends. Then all instances B are up, and take turns:
a prompt that their A had (loaded), the same again (in vLLM's own prefix cache), and one of the same length that nobody
had (computed), a token each; the own prefix cache is emptied before the first and the last. All are real vLLM processes
for CPUs, on random weights of Qwen3-0.6B's shape, in bfloat16, over TCP on one machine where they use a network.

    PYTHON_OF_VLLM=.venv-vllm/bin/python python -m benchmarks.vllm_store
    ... python -m benchmarks.vllm_store --small --tokens 512 --rounds 6 --peers kvmesh example

A rate is the bytes of the prefix's KV by what a loaded prompt takes longer than one in the own cache. Mooncake's
connector waits for a CUDA event before it saves; where torch has no CUDA it gets one that is over at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import mooncake_env
from benchmarks.peers.link import PeerMissing, Worker
from benchmarks.progress import tell
from benchmarks.store_contest import free_port, mooncake_master
from benchmarks.turns import interval, ratios
from kvmesh.connectors.vllm.keys import split_layers
from tests.connectors.vllm.engines import (
    BLOCK_TOKENS,
    PYTHON_ENV,
    EngineProcess,
    make_model,
    python_of_vllm,
    store_processes,
    transfer_config,
)
from tests.connectors.vllm.test_vllm import stored_blocks
from tests.support.services import until

FULL = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
SMALL = {**FULL, "vocab_size": 8192, "num_hidden_layers": 6}
SETTLE_S = 5.0  # for a connector that does not tell what it has saved, after A's last answer
KINDS = ("loaded", "cached", "computed")


@dataclass
class Connector:
    """Is one way of prefixes from A to B. `saved` returns once A's blocks are there."""

    name: str
    transfer: dict[str, Any]
    saved: Callable[[], None]
    env: dict[str, str] = field(default_factory=dict)
    driver: Path | None = None
    answers: list[Any] = field(default_factory=list)  # of A
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="six layers in place of 28")
    parser.add_argument("--transports", default="auto", help="of kvmesh")
    parser.add_argument("--memory-mb", type=int, default=2048, help="of each store")
    parser.add_argument("--peers", nargs="+", default=list(STARTS), choices=list(STARTS), help="all")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    if not python_of_vllm():
        parser.error(f"{PYTHON_ENV} names no Python with vLLM")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / "model", 3, **fields_of(args))
        connectors = []
        for peer in args.peers:
            try:
                connectors.append(stack.enter_context(STARTS[peer](args, folder)))
            except PeerMissing as why:
                print(f"without {peer}: {why}", file=sys.stderr)
        report(args, measure(args, folder, model, connectors))


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    return SMALL if args.small else FULL


def page_bytes(fields: dict[str, Any]) -> int:
    """Returns the bytes of a block of one layer: K and V, bfloat16."""
    return 2 * 2 * int(fields["num_key_value_heads"]) * int(fields["head_dim"]) * BLOCK_TOKENS


@contextlib.contextmanager
def kvmesh(args: argparse.Namespace, folder: Path) -> Iterator[Connector]:
    layers = int(fields_of(args)["num_hidden_layers"])
    parts = len(split_layers([page_bytes(fields_of(args))] * layers, 1 << 20))
    wanted = args.tokens // BLOCK_TOKENS * parts * (args.rounds + 1)
    with store_processes(folder, memory_mb=args.memory_mb) as (master, pool):

        def saved() -> None:
            async def there() -> bool:
                return await stored_blocks(master.address, pool.address) >= wanted

            asyncio.run(until(there, 120.0))

        times = {"load_timeout_ms": 60_000, "lookup_timeout_ms": 5_000}
        yield Connector("kvmesh", transfer_config(master.address, transports=args.transports, **times), saved)


@contextlib.contextmanager
def mooncake(args: argparse.Namespace, folder: Path) -> Iterator[Connector]:
    """A node that is neither A nor B has the memory, as kvmesh's pool does."""
    with contextlib.ExitStack() as stack:
        master, python, env = stack.enter_context(mooncake_master())
        node = Worker("benchmarks.peers.store_mooncake", python=python, env=env)
        stack.callback(node.close)
        node.call("node", master=master, port=free_port(), nbytes=args.memory_mb << 20)
        config = folder / "mooncake.json"
        told = {
            "mode": "standalone-store", "metadata_server": "P2PHANDSHAKE", "master_server_address": master,
            "protocol": "tcp", "global_segment_size": 0, "local_buffer_size": 256 << 20,
        }  # fmt: skip
        config.write_text(json.dumps(told))
        more = {key: value for key, value in env.items() if key != "PYTHONPATH"}
        yield Connector(
            "mooncake",
            {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}},
            lambda: time.sleep(SETTLE_S),
            {**more, "MOONCAKE_CONFIG_PATH": str(config), "EXTRA_PYTHONPATH": str(mooncake_env.alone())},
            Path(__file__).parent / "peers" / "vllm_mooncake.py",
        )


@contextlib.contextmanager
def example(args: argparse.Namespace, folder: Path) -> Iterator[Connector]:
    extra = {"shared_storage_path": str(folder / "example")}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    yield Connector("example", transfer, lambda: None)  # it saves within the step


STARTS = {"kvmesh": kvmesh, "mooncake": mooncake, "example": example}


def measure(
    args: argparse.Namespace, folder: Path, model: Path, connectors: list[Connector]
) -> list[tuple[Connector, bool]]:
    """Returns the connectors that work here, and whether B's tokens were A's."""
    options = {"dtype": "bfloat16", "max_model_len": args.tokens + 64, "max_num_batched_tokens": args.tokens + 64}
    draw = random.Random(1)

    def prompts() -> list[list[int]]:
        return [[draw.randrange(8192) for _ in range(args.tokens + 8)] for _ in range(args.rounds + 1)]

    shared = prompts()
    able: list[Connector] = []
    for one in connectors:
        tell(f"instance A of {one.name}")
        try:
            with engine(one, model, folder / f"{one.name}-a.log", options) as first:
                one.answers = [first.run(prompt, max_tokens=1)["tokens"] for prompt in shared]
                one.saved()
            able.append(one)
        except AssertionError as why:
            print(f"without {one.name}: {str(why)[-1500:]}", file=sys.stderr)
    found = []
    with contextlib.ExitStack() as stack:
        engines = []
        for one in able:
            tell(f"instance B of {one.name}")
            engines.append((one, stack.enter_context(engine(one, model, folder / f"{one.name}-b.log", options))))
        equal = {one.name: True for one in able}
        for at, known in enumerate(shared):
            for one, second in engines if at % 2 else reversed(engines):
                tell(f"round {at} of {args.rounds}: {one.name}")
                fresh = [draw.randrange(8192) for _ in range(args.tokens + 8)]
                asked = {
                    "loaded": second.run(known, max_tokens=1, forget=True),
                    "cached": second.run(known, max_tokens=1),
                    "computed": second.run(fresh, max_tokens=1, forget=True),
                }
                if not asked["loaded"]["cached"][0] or asked["computed"]["cached"][0]:
                    print(f"{one.name}: {asked['loaded']['cached'][0]} tokens of a prompt were loaded", file=sys.stderr)
                equal[one.name] &= asked["loaded"]["tokens"] == one.answers[at]
                for kind in KINDS if at else ():  # the first of each warms up
                    one.seconds[kind].append(asked[kind]["seconds"])
        found = [(one, equal[one.name]) for one in able]
    tell("")
    return found


@contextlib.contextmanager
def engine(one: Connector, model: Path, log: Path, options: dict[str, Any]) -> Iterator[EngineProcess]:
    process = EngineProcess(model, one.transfer, log, env=one.env, driver=one.driver, **options)
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


def report(args: argparse.Namespace, found: list[tuple[Connector, bool]]) -> None:
    fields = fields_of(args)
    nbytes = page_bytes(fields) * int(fields["num_hidden_layers"]) * (args.tokens // BLOCK_TOKENS)
    print(f"{args.tokens + 8} tokens, {nbytes / 1e6:.0f} MB of KV, medians of {args.rounds} rounds")
    print(f"{'':10}{'loaded':>10}{'cached':>10}{'computed':>10}{'':4}computed/loaded [95%]    GB/s  tokens equal")
    rows = []
    for one, equal in found:
        times = {kind: statistics.median(one.seconds[kind]) for kind in KINDS}
        each = ratios(one.seconds["computed"], one.seconds["loaded"])
        low, high = interval(each)
        more_s = statistics.median(a - b for a, b in zip(one.seconds["loaded"], one.seconds["cached"], strict=True))
        rate = nbytes / more_s / 1e9 if more_s > 0 else float("inf")
        shown = "".join(f"{times[kind]:9.3f}s" for kind in KINDS)
        print(f"{one.name:10}{shown}{statistics.median(each):12.2f} [{low:.2f}, {high:.2f}]{rate:12.2f}  {equal}")
        rows.append({"name": one.name, "seconds": one.seconds, "gb_s": rate, "tokens_equal": equal})
    if args.json:
        told = {"tokens": args.tokens, "layers": fields["num_hidden_layers"], "kv_bytes": nbytes, "rows": rows}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
