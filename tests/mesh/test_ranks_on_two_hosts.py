"""Instances of two ranks on two hosts, under TLS: network namespaces joined by a cable, the second with a clock of its
own. Their tokens; and when a member is killed, frozen or cut off in mid-step: the instance ends as one, its requests go
on elsewhere with the same tokens, and nothing is left of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmesh.rpc.certificates import make_certificates
from tests.support.mesh.inside import Inside
from tests.support.mesh.namespaces import Machine, two_machines, until, why_not
from tests.support.paths import ROOT
from tests.support.reference import assert_matches_reference
from tests.support.warm_processes import children

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

MODEL = "examples/demo-model"
READY_S, OVER_S, ANSWER_S = 180.0, 30.0, 120.0
TIMEOUT_MS = 3000  # of ranks for one another, and of front and rank host
STORE, CONDUCTOR, GATEWAY, HTTP, RANKS = range(7001, 7006)
OTHER_CLOCK = ("unshare", "--time", "--monotonic", "100000")  # B has been up for a day longer
PLAIN = {"prefill-plain": 7010, "decode-plain": 7011}  # of one rank, on A
WIDE = {"prefill-pp2": 7020, "decode-tp2": 7021, "decode-pp2": 7022}  # with a rank on A and one on B
ANSWERS, TOKENS, BEGUN = 6, 300, 8
LONG_PROMPTS, LONG = 3, 1500


class Service:
    """A process on one of the machines."""

    def __init__(self, machine: Machine, env: dict[str, str], log: Path, *argv: str, clock: Sequence[str] = ()) -> None:
        self.log, self._begun = log, log.stat().st_size if log.exists() else 0
        command = [*clock, *machine.inside(sys.executable, "-m", "kvmesh.cli", "serve", *argv)]
        with log.open("a") as out:
            self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ranks(self) -> list[int]:
        return [child.pid for child in children(self.pid)]

    @property
    def said(self) -> str:
        """What this process has logged."""
        return self.log.read_text()[self._begun :]

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


class Stream:
    """An answer as it comes, read in a thread that is inside a machine."""

    def __init__(self, machine: Machine, body: dict[str, Any]) -> None:
        self._host, self._body = machine.address, body
        self.tokens: list[int] = []
        self.told: dict[str, Any] = {}  # which instances, how often it was moved
        self.error = ""
        self._over = threading.Event()
        machine.submit(self._run)

    def ended(self) -> Stream:
        assert self._over.wait(ANSWER_S), f"{len(self.tokens)} tokens, no end"
        assert not self.error, self.error
        return self

    def _run(self) -> None:
        link = http.client.HTTPConnection(self._host, HTTP, timeout=ANSWER_S)
        try:
            headers = {"Content-Type": "application/json", "x-kvmesh-timings": "1"}
            link.request("POST", "/v1/completions", json.dumps(self._body), headers)
            for line in link.getresponse():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
                elif line.startswith(b"{"):
                    self.error = line.decode()
        except OSError as error:
            self.error = str(error)
        finally:
            link.close()
            self._over.set()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            self.tokens += choice.get("token_ids", ())
        if "kvmesh" in event:
            (self.told,) = event["kvmesh"]["choices"]


class World:
    """Everything but the second rank of the wide instances is on A. There is one wide decode instance at a time."""

    def __init__(self, a: Machine, b: Machine, folder: Path, stack: ExitStack) -> None:
        self.a, self.b, self._folder, self._stack = a, b, folder, stack
        self._memory = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
        stack.callback(shutil.rmtree, self._memory, ignore_errors=True)
        make_certificates(folder / "tls", [a.address, b.address])
        self._env = {**os.environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1", "KVMESH_MEMORY_MB": "32"}
        self._env |= {f"KVMESH_TLS_{one.upper()}": str(folder / "tls" / f"{one}.pem") for one in ("cert", "key", "ca")}
        store, conductor = f"--store={a.address}:{STORE}", f"--conductor={a.address}:{CONDUCTOR}"
        self._known = (f"--model={MODEL}", "--dtype=float32", "--transports=tcp", "--block-tokens=16", store, conductor)
        self._start("store", "store", STORE)
        self._start("conductor", "conductor", CONDUCTOR, store, "--admission=off")
        self._start("gateway", "gateway", GATEWAY, f"--model={MODEL}", f"--http-port={HTTP}", conductor)
        self.plain = {name: self._start_instance(name, port) for name, port in PLAIN.items()}
        self.wide: dict[str, Service] = {}
        self.host: Service | None = None
        self.inside = Inside(a, f"{a.address}:{CONDUCTOR}", self._env)
        stack.callback(self.inside.close)

    def _start(self, service: str, name: str, port: int, *args: str) -> Service:
        argv = (service, f"--host={self.a.address}", f"--port={port}", *args)
        made = Service(self.a, self._env, self._folder / f"{name}.log", *argv)
        self._stack.callback(made.end)
        return made

    def _start_instance(self, name: str, port: int, *args: str) -> Service:
        return self._start(name.partition("-")[0], name, port, f"--instance-id={name}", *self._known, *args)

    def _start_host(self) -> Service:
        argv = ("ranks", f"--host={self.b.address}", f"--port={RANKS}", f"--model={ROOT / MODEL}", "--transports=tcp")
        made = Service(self.b, self._env, self._folder / "ranks.log", *argv, *self._kept("b"), clock=OTHER_CLOCK)
        self._stack.callback(made.end)
        return made

    def _kept(self, name: str) -> tuple[str, str]:
        """Where a host or an instance keeps blocks that outlive processes."""
        return f"--ssd-path={self._folder / f'ssd-{name}'}", f"--warm-segment={self._memory / name}"

    def written(self, folder: str) -> bool:
        """Whether blocks lie in this folder of a disk."""
        return sum(path.stat().st_blocks for path in (self._folder / folder).glob("*") if path.is_file()) > 100

    def mend(self, decode: str = "decode-tp2") -> None:
        """Starts what is over, with this wide decode instance, and waits until all have their ranks and the conductor
        knows them. Only the wide ones get work."""
        self.b.link("up")
        if self.host is None or self.host.over():
            self.host = self._start_host()
        own = {
            "prefill-pp2": ("--mesh=pp=2", "--prefill-chunk-tokens=64"),
            "decode-tp2": ("--mesh=tp=2", "--ssd-offload-percent=0", *self._kept("decode-tp2")),
            "decode-pp2": ("--mesh=pp=2", "--ssd-offload-percent=0", *self._kept("decode-pp2")),
        }
        hosts = (f"--rank-hosts={self.b.address}:{RANKS}", "--rank-network=10.78.0.0/24")
        names = ("prefill-pp2", decode)
        for name in names:
            if name not in self.wide or self.wide[name].over():
                timeout = f"--rank-timeout-ms={TIMEOUT_MS}"
                self.wide[name] = self._start_instance(name, WIDE[name], *own[name], *hosts, timeout)

        def all_known() -> bool:
            for name in names:
                assert not self.wide[name].over(), self.wide[name].said[-3000:]
            return self.inside.ready() >= {*PLAIN, *names}

        until(all_known, "the mesh", READY_S)
        assert len(self.host.ranks) == len(names)
        self.inside.cordon(*PLAIN)
        until(lambda: self.a.call(get, self.a.address, "/ready"), "the gateway", READY_S)

    def rank_on_b(self, name: str) -> int:
        assert self.host is not None
        return int(re.findall(rf"{name}: ranks \[1\] as processes \[(\d+)\]", self.host.said)[-1])

    def answers(self, salt: str) -> list[Stream]:
        """Half of them greedy, half seeded."""
        prompts = [[(i * 131 + j * j * 7 + j) % 1900 + 20 for j in range(90)] for i in range(ANSWERS)]
        return [self._ask(prompt, TOKENS, salt, i if i % 2 else 0) for i, prompt in enumerate(prompts)]

    def long_prompts(self, salt: str) -> list[Stream]:
        prompts = [[(i * 17 + j * j * 3 + j) % 1900 + 20 for j in range(LONG)] for i in range(LONG_PROMPTS)]
        return [self._ask(prompt, 4, salt, 0) for prompt in prompts]

    def _ask(self, prompt: list[int], max_tokens: int, salt: str, seed: int) -> Stream:
        body = {"model": "demo-model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "cache_salt": salt, "temperature": 0.8 if seed else 0, "seed": seed}
        return Stream(self.a, body)


def get(host: str, path: str) -> bool:
    link = http.client.HTTPConnection(host, HTTP, timeout=60)
    try:
        link.request("GET", path)
        return link.getresponse().status == 200
    except OSError:
        return False
    finally:
        link.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with two_machines() as (a, b), ExitStack() as stack:
        yield World(a, b, tmp_path_factory.mktemp("world"), stack)


@pytest.fixture(scope="module")
def right(world: World) -> list[list[int]]:
    """The tokens of all answers and long prompts, while nothing fails; the greedy ones are those of one rank."""
    world.mend()
    asked = [*world.answers("right"), *world.long_prompts("right")]
    tokens = [stream.ended().tokens for stream in asked]
    assert {stream.told["prefill_instance"] for stream in asked} == {"prefill-pp2"}
    assert {stream.told["decode_instance"] for stream in asked} == {"decode-tp2"}
    assert [len(each) for each in tokens] == [TOKENS] * ANSWERS + [4] * LONG_PROMPTS
    for stream in (asked[0], asked[-1]):
        assert_matches_reference(ROOT / MODEL, stream._body["prompt"], stream.tokens)
    until(lambda: all(map(world.written, ("ssd-decode-tp2/rank-0", "ssd-b/decode-tp2/rank-1"))), "blocks on both disks")
    return tokens


@pytest.mark.parametrize(
    ("what", "decode", "causes"),
    [
        ("ranks killed", "decode-tp2", ("was killed by SIGKILL", "was killed by SIGKILL")),
        pytest.param("cable pulled", "decode-pp2", ("lost its host", "lost its host"), marks=pytest.mark.long),
        pytest.param(
            "rank frozen, host killed",
            "decode-pp2",
            ("lost the other ranks in a step", "lost its host"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_instance_ends_as_one_and_its_requests_go_on(
    world: World, right: list[list[int]], what: str, decode: str, causes: tuple[str, str]
) -> None:
    """A decode instance in the middle of answers, a prefill instance in the middle of prompts; the cable is one for
    both."""
    prefill, kept = "prefill-pp2", decode in world.wide
    world.mend(decode)
    if kept and what != "ranks killed":
        back = re.findall(r"warm segment: (\d+) of \d+ blocks are here again", world.wide[decode].said)
        assert back and int(back[0]), "each host has kept its part of the blocks"
    host = world.host
    assert host is not None
    there = {name: world.rank_on_b(name) for name in (prefill, decode)}
    ranks = {name: [*world.wide[name].ranks, there[name]] for name in there}

    def over(name: str) -> bool:
        return world.wide[name].over() and not any(map(psutil.pid_exists, ranks[name]))

    answers = world.answers(what)
    until(lambda: all(len(stream.tokens) >= BEGUN for stream in answers), "tokens", ANSWER_S)
    if what != "cable pulled":
        os.kill(there[decode], signal.SIGKILL if what == "ranks killed" else signal.SIGSTOP)
        world.inside.cordon("decode-plain", keep=False)
        until(lambda: over(decode), f"the end of {decode} and all its ranks", OVER_S)
        assert all(map(psutil.pid_exists, ranks[prefill]))
    prompts = world.long_prompts(what)
    busy(there[prefill])
    if what == "ranks killed":
        os.kill(there[prefill], signal.SIGKILL)
    elif what == "cable pulled":
        world.b.link("down")
    else:
        os.kill(host.pid, signal.SIGKILL)
    world.inside.cordon(*PLAIN, keep=False)
    found = [stream.ended() for stream in (*answers, *prompts)]
    assert [stream.tokens for stream in found] == right
    assert all(stream.told["migrations"] >= 1 for stream in answers), [stream.told for stream in answers]
    assert {stream.told["decode_instance"] for stream in found} == {"decode-plain"}
    assert any(stream.told["prefill_instance"] == "prefill-plain" for stream in prompts)
    for name, cause in zip((decode, prefill), causes, strict=True):
        until(lambda name=name: over(name), f"the end of {name} and all its ranks", OVER_S)  # type: ignore[misc]
        said = world.wide[name].said
        assert world.wide[name].process.returncode
        assert cause in said or "lost the other ranks in a step" in said, said
    until(lambda: world.inside.ready() == {*PLAIN}, "a conductor that knows it", OVER_S)
    for name, port in PLAIN.items():
        asked = f"{world.a.address}:{port}", name.partition("-")[0]
        until(lambda asked=asked: not world.inside.leaks(*asked), f"{name} to hold nothing", OVER_S)  # type: ignore[misc]


def busy(pid: int) -> None:
    """Waits until the process computes."""
    before = psutil.Process(pid).cpu_times().user
    until(lambda: psutil.Process(pid).cpu_times().user > before + 0.05, f"work of {pid}")
