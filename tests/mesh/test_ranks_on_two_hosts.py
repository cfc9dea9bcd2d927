"""A decode instance of two ranks on two hosts, under TLS: network namespaces joined by a cable, the second with a clock
of its own. Its tokens, and its end as one when a member dies, freezes or is cut off."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmesh.rpc.certificates import make_certificates
from tests.support.mesh.namespaces import Machine, two_machines, until, why_not
from tests.support.paths import ROOT
from tests.support.reference import assert_matches_reference

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

MODEL = "examples/demo-model"
READY_S, OVER_S = 180.0, 30.0
TIMEOUT_MS = 3000  # of ranks for one another, and of front and rank host
STORE, CONDUCTOR, PREFILL, DECODE, GATEWAY, HTTP, RANKS = range(7001, 7008)
OTHER_CLOCK = ("unshare", "--time", "--monotonic", "100000")  # B has been up for a day longer
PROMPT = list(range(10, 310))
LONG = 2000  # tokens of an answer that is still made when something happens to a rank


class Service:
    """A process on one of the machines."""

    def __init__(self, machine: Machine, folder: Path, name: str, *args: str, clock: tuple[str, ...] = ()) -> None:
        self.log = folder / f"{name}.log"
        argv = [*clock, *machine.inside(sys.executable, "-m", "kvmesh.cli", "serve", name, *args)]
        env = {**os.environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1", "KVMESH_MEMORY_MB": "16"}
        env |= {f"KVMESH_TLS_{one.upper()}": str(folder / "tls" / f"{one}.pem") for one in ("cert", "key", "ca")}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(argv, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ranks(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children()]

    def over(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        for stop in (self.process.terminate, self.process.kill):
            stop()
            try:
                self.process.wait(20)
                return
            except subprocess.TimeoutExpired:
                continue


class World:
    """Everything but the decode instance's rank is on A."""

    def __init__(self, a: Machine, b: Machine, folder: Path, stack: ExitStack) -> None:
        self.a, self.b, self._folder, self._stack = a, b, folder, stack
        self._memory = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
        stack.callback(shutil.rmtree, self._memory, ignore_errors=True)
        make_certificates(folder / "tls", [a.address, b.address])
        known = (f"--conductor={a.address}:{CONDUCTOR}", f"--store={a.address}:{STORE}")
        self._model = (f"--model={MODEL}", "--dtype=float32", "--transports=tcp", "--block-tokens=16")
        self._known = known
        self.start("store", f"--port={STORE}")
        self.start("conductor", f"--port={CONDUCTOR}", known[1])
        self.start("prefill", *self._model, f"--port={PREFILL}", *known)
        ports = (f"--port={GATEWAY}", f"--http-port={HTTP}")
        self.start("gateway", f"--model={MODEL}", *ports, known[0])
        self.host, self.decode = self.start_host(), self.start_decode()

    def start(self, name: str, *args: str) -> Service:
        made = Service(self.a, self._folder, name, f"--host={self.a.address}", *args)
        self._stack.callback(made.end)
        return made

    def start_host(self) -> Service:
        host = self.b.address
        args = (f"--host={host}", f"--port={RANKS}", f"--model={ROOT / MODEL}", "--transports=tcp", *self._kept("b"))
        made = Service(self.b, self._folder, "ranks", *args, clock=OTHER_CLOCK)
        self._stack.callback(made.end)
        return made

    def start_decode(self) -> Service:
        two = ("--tensor-parallel=2", f"--rank-hosts={self.b.address}:{RANKS}", "--rank-network=10.78.0.0/24")
        timeout = f"--rank-timeout-ms={TIMEOUT_MS}"
        more = ("--instance-id=decode-0", "--ssd-offload-percent=0", *self._kept("a"))
        return self.start("decode", *self._model, f"--port={DECODE}", *self._known, *two, timeout, *more)

    def _kept(self, host: str) -> tuple[str, str]:
        """Where this host keeps blocks that outlive processes."""
        return f"--ssd-path={self._folder / f'ssd-{host}'}", f"--warm-segment={self._memory / host}"

    def written(self, folder: str) -> bool:
        """Whether blocks lie in this folder of a disk."""
        return sum(path.stat().st_blocks for path in (self._folder / folder).glob("*") if path.is_file()) > 100

    def ready(self) -> None:
        """Waits until the gateway serves, and the decode instance has its rank on B."""

        def serves() -> bool:
            assert not self.decode.over(), self.decode.log.read_text()[-3000:]
            return bool(self.a.call(get, self.a.address, "/ready"))

        until(serves, "the mesh", READY_S)
        until(lambda: len(self.host.ranks) == 1, "the rank on B")

    def ask(self, max_tokens: int = 8) -> Future[list[int] | str]:
        body = {"model": "demo-model", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return self.a.submit(complete, self.a.address, body)

    def check(self) -> None:
        tokens = self.ask().result(60)
        assert isinstance(tokens, list), tokens
        assert_matches_reference(ROOT / MODEL, PROMPT, tokens)


def get(host: str, path: str) -> bool:
    link = http.client.HTTPConnection(host, HTTP, timeout=60)
    try:
        link.request("GET", path)
        return link.getresponse().status == 200
    except OSError:
        return False
    finally:
        link.close()


def complete(host: str, body: dict[str, Any]) -> list[int] | str:
    """The tokens, or the gateway's error."""
    link = http.client.HTTPConnection(host, HTTP, timeout=60)
    try:
        link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        told = json.loads(link.getresponse().read())
    finally:
        link.close()
    if "error" in told:
        return str(told["error"]["message"])
    tokens: list[int] = told["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with two_machines() as (a, b), ExitStack() as stack:
        yield World(a, b, tmp_path_factory.mktemp("world"), stack)


def test_tokens_are_those_of_one_rank(world: World) -> None:
    world.ready()
    world.check()
    world.check()  # its blocks lie at both ranks
    until(lambda: all(map(world.written, ("ssd-a/rank-0", "ssd-b/decode-0/rank-1"))), "blocks on both disks")


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("rank killed", "was killed by SIGKILL"),
        ("rank frozen", "lost the other ranks in a step"),
        ("host killed", "lost its host"),
        ("cable pulled", "lost its host"),
    ],
)
def test_an_instance_ends_as_one(world: World, what: str, cause: str) -> None:
    """In the middle of an answer. No process of it is left on either machine, and it comes back."""
    world.ready()
    host, decode = world.host, world.decode
    (remote,), (local,) = host.ranks, decode.ranks
    begun = decode.log.read_text()
    world.ask(LONG)  # it goes on at the next instance, or fails at the gateway: neither is looked at here
    until(lambda: psutil.Process(remote).cpu_times().user > 0 and busy(remote), "steps")
    acts: dict[str, Callable[[], None]] = {
        "rank killed": lambda: os.kill(remote, signal.SIGKILL),
        "rank frozen": lambda: os.kill(remote, signal.SIGSTOP),
        "host killed": lambda: os.kill(host.pid, signal.SIGKILL),
        "cable pulled": lambda: world.b.link("down"),
    }
    acts[what]()
    until(decode.over, f"the end of decode: {what}", OVER_S)
    until(lambda: not any(map(psutil.pid_exists, (remote, local))), "the end of the ranks", OVER_S)
    assert decode.process.returncode != 0
    log = decode.log.read_text()[len(begun) :]
    assert cause in log or "lost the other ranks" in log, log
    if what == "cable pulled":
        world.b.link("up")
    if what == "host killed":
        world.host = world.start_host()
    world.decode = world.start_decode()
    world.ready()
    world.check()
    back = re.findall(r"warm segment: (\d+) of \d+ blocks are here again", world.decode.log.read_text()[len(begun) :])
    assert back and int(back[0]), "each host has kept its part of the blocks"


def busy(pid: int) -> bool:
    """Whether the process computes now."""
    before = psutil.Process(pid).cpu_times().user
    until(lambda: psutil.Process(pid).cpu_times().user > before + 0.05, f"work of {pid}")
    return True
