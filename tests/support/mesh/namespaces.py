"""Two machines of one: network namespaces joined by a cable, and what tests do inside them."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
THREADS = 16


def why_not() -> str:
    """Why this machine cannot have two; "" when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    name = f"kvt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=10)


class Machine:
    """A namespace with one interface. `call` runs a function in a thread that is inside."""

    def __init__(self, name: str, address: str, cable: str) -> None:
        self.name, self.address, self.cable = name, address, cable
        self._pool = ThreadPoolExecutor(THREADS, name, initializer=self._enter)

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self.name}").open() as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        return self._pool.submit(function, *args)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        return self.submit(function, *args).result(60)

    def inside(self, *argv: str) -> list[str]:
        """A command line that runs there."""
        return ["ip", "netns", "exec", self.name, *argv]

    def link(self, state: str) -> None:
        """Pull the cable ("down") or put it back ("up")."""
        ip("-n", self.name, "link", "set", self.cable, state)

    def silence(self, *, on: bool = True) -> None:
        """Drop all packets of the cable, in both directions, and keep its link up; or let them pass again."""
        for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o")):
            words = ("iptables", "-w", "-A" if on else "-D", chain, side, self.cable, "-j", "DROP")
            subprocess.run(self.inside(*words), check=on, capture_output=True, timeout=10)

    def slow(self, rate: str) -> None:
        """What leaves here takes its time: `rate` in tc's units ("4mbit"); "" for as fast as it can."""
        own = ("tc", "-n", self.name, "qdisc")
        how = ("tbf", "rate", rate, "burst", "32k", "latency", "2s") if rate else ()
        words = (*own, "replace" if rate else "del", "dev", self.cable, "root", *how)
        subprocess.run(words, check=True, capture_output=True, timeout=10)

    def sent_bytes(self) -> int:
        """What has left by the cable, as the kernel counts it."""
        words = ("ip", "-n", self.name, "-j", "-s", "link", "show", "dev", self.cable)
        (link,) = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=10).stdout)
        return int(link["stats64"]["tx"]["bytes"])

    def pids(self) -> list[int]:
        """Processes inside."""
        told = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False).stdout
        return [int(pid) for pid in told.split() if int(pid) != os.getpid()]

    def close(self) -> None:
        """Kill what is inside, then the namespace goes with its cable."""
        self._pool.shutdown(cancel_futures=True)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", self.name], check=False)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """10.78.0.1 and 10.78.0.2, in namespaces that are deleted whatever happens."""
    number = os.getpid()
    a, b = (Machine(f"kvmesh-{x}-{number}", f"10.78.0.{i}", f"kv{x}{number}") for x, i in (("a", 1), ("b", 2)))
    try:
        for one in (a, b):
            ip("netns", "add", one.name)
        ip("link", "add", a.cable, "netns", a.name, "type", "veth", "peer", "name", b.cable, "netns", b.name)
        for one in (a, b):
            ip("-n", one.name, "addr", "add", f"{one.address}/24", "dev", one.cable)
            ip("-n", one.name, "link", "set", "lo", "up")
            one.link("up")
        yield a, b
    finally:
        a.close()
        b.close()


# ── what runs inside ──────────────────────────────────────────────────────────────────────────────


class Failed(Exception):
    """A request's one clear error."""


def complete(url: str, prompt: list[int], salt: str, max_tokens: int = 24, timeout_s: float = 60) -> str:
    """The answer's text. Failed: the gateway said why not."""
    host, port = url.removeprefix("http://").split(":")
    link = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    body = {
        "model": "demo-model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "cache_salt": salt,
    }  # fmt: skip
    try:
        link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        told = json.loads(answer.read())
    finally:
        link.close()
    if answer.status != 200:
        raise Failed(told["error"]["message"])
    assert told["usage"]["completion_tokens"] == max_tokens
    return str(told["choices"][0]["text"])


def metric(address: str, name: str, *labels: str) -> float:
    """The sum of a metric's lines that hold all of `labels`."""
    host, _, port = address.rpartition(":")
    link = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        link.request("GET", "/metrics")
        lines = link.getresponse().read().decode().splitlines()
    finally:
        link.close()
    found = [
        line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(one in line for one in labels)
    ]
    return sum(float(line.rpartition(" ")[2]) for line in found if all(one in line for one in labels))


def until(check: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Poll until it answers something true."""
    end = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
    return found
