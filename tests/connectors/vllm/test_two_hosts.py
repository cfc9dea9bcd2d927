"""Two hosts, each with a real vLLM server: what one has computed is loaded by the other out of the pool, and pushed to
it, over tcp. The answers are those of computing, also when the cable between them falls silent in the middle, and when
one of them does not say by which address others reach it.

The hosts are network namespaces. They have one boot id and one /dev/shm, and shm between them is ruled out as it is
between containers: who is in another network namespace is not asked over it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvmesh.connectors.vllm.mover import NOT_SAVED
from kvmesh.connectors.vllm.push.receiver import NOT_PUSHED
from kvmesh.rpc.authorisation import CallerRole, Identity
from kvmesh.rpc.certificates import make_role_certificates
from tests.connectors.vllm.engines import BLOCK_TOKENS, PYTHON_ENV, python_of_vllm
from tests.connectors.vllm.test_prefill_decode import OPTIONS, SLOW_S, VllmServer, prompt, taken
from tests.support.mesh.namespaces import Machine, metric, two_machines, until, why_not
from tests.support.paths import ROOT

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        not python_of_vllm(), reason=f"{PYTHON_ENV} names no Python with vLLM (`make vllm-env` prints one)"
    ),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

T = TypeVar("T")

MASTER, MASTER_METRICS, POOL, HTTP, PROXY, PUSH = 7002, 7003, 7004, 8000, 8080, 7100
TOKENS, BLOCKS = 330, 10  # of a prompt, and its whole blocks
POOLED = BLOCKS * BLOCK_TOKENS
BLOCK_BYTES = 131_072
RATE = "4mbit"  # a prompt's KV then takes three seconds
BEGUN = 400_000  # bytes of it that have left when the cable falls silent
WAIT_S = 120.0
SETTINGS = {
    "namespace": "team",
    "model_identity": "demo-1",
    "load_timeout_ms": 8_000,
    "push": True,
    "push_timeout_ms": 8_000,
    "push_staging_mb": 1,  # so that a prompt has several windows
    "pause_ms": 0,
}


class HostServer(VllmServer):
    """Is a vLLM server on one of the hosts, which is asked from there."""

    def __init__(self, machine: Machine, port: int, log: Path, env: dict[str, str], **extra: Any) -> None:
        self.machine = machine
        transfer = {
            "kv_connector": "KvmeshConnector",
            "kv_connector_module_path": "kvmesh.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**SETTINGS, **extra},
        }
        argv = [python_of_vllm(), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(ROOT / "examples" / "demo-model"), "--host", machine.address, "--port", str(port)]
        argv += ["--enforce-eager", "--enable-prompt-tokens-details"]
        options = OPTIONS | {"num-gpu-blocks-override": "64"}
        argv += [word for name, value in options.items() for word in (f"--{name}", value)]
        argv += ["--kv-transfer-config", json.dumps(transfer)]
        super().__init__(machine.inside(*argv), log, VLLM_HOST_IP=machine.address, **env)

    def begin(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Makes a call in a thread that is on the host."""
        return self.machine.submit(call, *args)

    def wait_ready(self, path: str) -> None:
        self.begin(super().wait_ready, path).result()

    def begin_answer(self, tokens: list[int], max_tokens: int = 12, transfer: dict[str, Any] | None = None) -> Any:
        return self.begin(super().complete, tokens, max_tokens, transfer)

    def complete(self, tokens: list[int], max_tokens: int = 12, transfer: dict[str, Any] | None = None) -> Any:
        return self.begin_answer(tokens, max_tokens, transfer).result()

    def taken(self) -> int:
        """How many tokens it has had from others, or waited for."""
        return int(self.begin(taken, self).result())

    def counted(self, name: str) -> int:
        """The sum of what its log says of a count of the connector, every ten seconds."""
        return sum(map(int, re.findall(rf"KV Transfer metrics: .*\b{name}=(\d+)", self.log.read_text())))

    def wait_log(self, *texts: str) -> None:
        """Returns when one line has all of these."""

        def said() -> bool:
            return any(all(text in line for text in texts) for line in self.log.read_text().splitlines())

        until(said, " ... ".join(texts), WAIT_S)


class Deployment:
    """Host A has the master, the pool node and a vLLM server, host B a vLLM server; and maybe a second one, which does
    not say by which address others reach it."""

    def __init__(self, machines: tuple[Machine, Machine], folder: Path, stack: contextlib.ExitStack) -> None:
        self.machine_a, self.machine_b = machines
        self._folder, self._stack = folder, stack
        self._env: dict[str, dict[str, str]] = {CallerRole.STORE: {}, CallerRole.CLIENT: {}}
        self._seeds = itertools.count(1)

    @property
    def master(self) -> str:
        return f"{self.machine_a.address}:{MASTER}"

    def start(self, *, tls: bool = False, unaddressed: bool = False) -> None:
        a, b = self.machine_a, self.machine_b
        if tls:
            roles = {str(role): (Identity(role, "*"),) for role in (CallerRole.STORE, CallerRole.CLIENT)}
            made = make_role_certificates(self._folder / "tls", roles, [a.address, b.address])
            for role, one in made.items():
                paths = {"CERT": one.cert, "KEY": one.key, "CA": one.ca}
                self._env[role] = {f"KVMESH_TLS_{name}": str(path) for name, path in paths.items()}
        self._serve("store", "--port", str(MASTER), "--metrics-port", str(MASTER_METRICS), "--metrics-tls", "off")
        self._serve("pool", "--port", str(POOL), "--store", self.master, "--memory-mb", "256")
        self.a = self._server(a, "vllm-a", HTTP, host=a.address, push_port=PUSH)
        self.b = self._server(b, "vllm-b", HTTP, host=b.address, push_port=PUSH)
        servers = [self.a, self.b]
        if unaddressed:
            self.unaddressed = self._server(b, "vllm-unaddressed", HTTP + 1)
            servers.append(self.unaddressed)
        for one in servers:
            one.wait_ready("/health")

    def _serve(self, role: str, *words: str) -> None:
        argv = [sys.executable, "-m", "kvmesh.cli", "serve", role, "--host", self.machine_a.address, *words]
        with (self._folder / f"{role}.log").open("w") as out:
            env = {**os.environ, **self._env[CallerRole.STORE]}
            process = subprocess.Popen(self.machine_a.inside(*argv), cwd=ROOT, env=env, stdout=out, stderr=out)
        self._stack.callback(process.wait, 20)
        self._stack.callback(process.kill)

    def _server(self, machine: Machine, name: str, port: int, **extra: Any) -> HostServer:
        log, env = self._folder / f"{name}.log", self._env[CallerRole.CLIENT]
        made = HostServer(machine, port, log, env, store=self.master, **extra)
        self._stack.callback(made.kill)
        return made

    def prompt(self, tokens: int = TOKENS) -> list[int]:
        """A prompt that nobody has seen."""
        return prompt(next(self._seeds), tokens)

    def computed(self, server: HostServer, asked: list[int]) -> list[int]:
        """Has a server compute a prompt for the first time, and returns the tokens when the pool has the blocks."""
        before = self._blocks()
        tokens, told = server.complete(asked)
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        until(lambda: self._blocks() >= before + len(asked) // BLOCK_TOKENS, "blocks in the pool", WAIT_S)
        return list(tokens)

    def _blocks(self) -> int:
        address = f"{self.machine_a.address}:{MASTER_METRICS}"
        return int(self.machine_a.call(metric, address, "kvmesh_store_blocks_count"))

    def check_load(self, computes: HostServer, loads: HostServer) -> bool:
        """Whether what one host has computed is loaded by the other. The tokens are the same in any case."""
        asked = self.prompt()
        alone = self.computed(computes, asked)
        found, told = loads.complete(asked)
        assert found == alone
        return bool(told["usage"]["prompt_tokens_details"]["cached_tokens"] == POOLED)

    def check_push(self, tokens: int) -> None:
        """B takes a prompt that A has computed."""
        asked, before = self.prompt(tokens), self.b.taken()
        alone, _ = self.a.complete(asked)
        found, _ = self.b.complete(asked, transfer=self.a.prefill(asked))
        assert (found, self.b.taken() - before) == (alone, tokens)


@pytest.fixture(scope="module")
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Is up once for all tests that ask for it "plain", or under "tls"."""
    with two_machines() as machines, contextlib.ExitStack() as stack:
        made = Deployment(machines, tmp_path_factory.mktemp(request.param), stack)
        made.start(tls=request.param == "tls", unaddressed=request.param == "plain")
        yield made


PLAIN = pytest.mark.parametrize("deployed", ["plain"], indirect=True)


def check_both_ways(made: Deployment) -> None:
    """B loads what A has computed, A what B has, and B takes pushes, all of it by the cable."""
    sent = made.machine_a.sent_bytes()
    assert made.check_load(made.a, made.b)
    assert made.machine_a.sent_bytes() - sent > BLOCKS * BLOCK_BYTES
    sent = made.machine_b.sent_bytes()
    assert made.check_load(made.b, made.a)
    assert made.machine_b.sent_bytes() - sent > BLOCKS * BLOCK_BYTES  # the pool node reads what B saves
    lengths = (TOKENS, 20, POOLED, 33)
    for tokens in lengths:
        made.check_push(tokens)
    blocks = sum(-(-tokens // BLOCK_TOKENS) for tokens in lengths)
    until(lambda: made.b.counted("blocks_received") >= blocks, "what B has counted", WAIT_S)
    assert (made.b.counted("blocks_received"), made.b.counted("blocks_not_received")) == (blocks, 0)


@pytest.mark.parametrize("deployed", ["plain", "tls"], indirect=True)
def test_two_hosts_load_and_push(deployed: Deployment, tmp_path: Path) -> None:
    check_both_ways(deployed)
    script = str(ROOT / "examples" / "prefill_decode_proxy.py")  # a router on A
    argv = [sys.executable, script, "--prefill", deployed.a.url, "--decode", deployed.b.url, "--port", str(PROXY)]
    proxy = VllmServer(deployed.machine_a.inside(*argv), tmp_path / "proxy.log")
    try:
        deployed.machine_a.submit(proxy.wait_ready, "/").result()
        asked, before = deployed.prompt(), deployed.b.taken()
        found, _ = deployed.machine_a.submit(proxy.complete, asked).result()
        assert deployed.b.taken() - before == len(asked)
        assert found == deployed.a.complete(asked)[0]
    finally:
        proxy.kill()


@PLAIN
@pytest.mark.parametrize("what", ["load", "push"])
def test_the_cable_falls_silent_in_the_middle(deployed: Deployment, what: str) -> None:
    """B waits for its time, keeps what has come, and computes the rest; so do both as long as it lasts."""
    asked = deployed.prompt()
    alone = deployed.computed(deployed.a, asked)
    transfer = deployed.a.prefill(asked) if what == "push" else None
    deployed.machine_a.slow(RATE)
    try:
        sent = deployed.machine_a.sent_bytes()
        answer = deployed.b.begin_answer(asked, 12, transfer)
        until(lambda: deployed.machine_a.sent_bytes() - sent > BEGUN, "bytes on their way")
        deployed.machine_a.silence()
        assert not answer.done()
        found, told = answer.result()
        assert found == alone and told["seconds"] < SLOW_S
        lonely = deployed.prompt()
        found, told = deployed.b.complete(lonely)
        assert told["seconds"] < SLOW_S
        alone, told = deployed.a.complete(lonely)
        assert found == alone and told["seconds"] < SLOW_S
    finally:
        deployed.machine_a.silence(on=False)
        deployed.machine_a.slow("")
    deployed.b.wait_log("KV Transfer metrics", "loads_late=1" if what == "load" else "receives_late=1")
    until(lambda: deployed.check_load(deployed.a, deployed.b), "a load after it", WAIT_S)
    received = deployed.b.counted("blocks_received")
    deployed.check_push(TOKENS)
    until(lambda: deployed.b.counted("blocks_received") - received >= BLOCKS + 1, "a push after it", WAIT_S)


@PLAIN
def test_a_host_that_does_not_say_where_it_is_is_named(deployed: Deployment) -> None:
    """It loads what others save, and neither saves nor pushes nor takes pushes: the log of whom it concerns says so,
    with the setting. Nothing hangs, and the tokens are right."""
    other, todo = deployed.unaddressed, "advertise_host"
    other.wait_log("WARNING", "host='127.0.0.1': pool nodes on other machines cannot read", todo)
    assert deployed.check_load(deployed.a, other)
    lonely = deployed.prompt()
    tokens, _ = other.complete(lonely)
    other.wait_log("WARNING", NOT_SAVED, "says host='127.0.0.1'", todo)
    assert deployed.a.complete(lonely)[0] == tokens
    to, by = deployed.prompt(), deployed.prompt()
    assert other.complete(to, transfer=deployed.a.prefill(to))[0] == deployed.a.complete(to)[0]
    other.wait_log("WARNING", NOT_PUSHED, f"at {deployed.machine_a.address}:{PUSH}", "says host='127.0.0.1'", todo)
    assert deployed.a.complete(by, transfer=other.prefill(by))[0] == other.complete(by)[0]
    deployed.a.wait_log("WARNING", NOT_PUSHED, "at 127.0.0.1:", todo)
