"""Where the processes of a storm live: a network namespace each, around one bridge (root only), or one loopback.

    this process ─ veth ─┐
    m0 ─ eth0 ─ veth ────┤ bridge in a namespace "hub"
    n0 ─ eth0 ─ veth ────┘

Cuts: a host's port leaves the bridge (nothing passes, its link stays up), or a host's route to another becomes a black
hole (one way: what the other sends arrives). Slow: a token bucket on what the hub sends to it and what it sends. Who is
named no host here lives beside this process, and shares its sockets' names: its memory can be mapped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

TIMEOUT_S = 20.0


def run(*words: str) -> str:
    """OSError with what it printed when it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Loopback:
    """All on 127.0.0.1: nothing can be cut."""

    links = False

    @property
    def me(self) -> str:
        """Address of this process."""
        return "127.0.0.1"

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def inside(self, host: str) -> list[str]:
        """What a command line begins with that runs there."""
        return []

    def heal(self, host: str) -> None:
        pass


class Namespaces(Loopback):
    links = True

    @property
    def me(self) -> str:
        return f"{self._net}.1"

    def __init__(self, hosts: Sequence[str]) -> None:
        pid = os.getpid()
        self._tag = f"kvc{pid}"
        self._net = f"10.{200 + pid // 250 % 50}.{pid % 250}"
        self._hosts = {host: i + 2 for i, host in enumerate(hosts)}
        self._made: list[str] = []
        self._cut: dict[str, set[str]] = {}  # host → those it cannot reach ("": anybody)

    def start(self) -> None:
        """OSError when there are no namespaces here."""
        self._add("hub")
        self._ip("hub", "link", "add", "br0", "type", "bridge")
        self._ip("hub", "link", "set", "br0", "up")
        for host in self._hosts:
            self._add(host)
            self._wire(host, ["netns", self._name(host), "name", "eth0"])
            self._ip(host, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._ip(host, "link", "set", "eth0", "up")
        mine = f"{self._tag}"[:15]
        self._wire("me", ["netns", str(os.getpid()), "name", mine])
        run("ip", "address", "add", f"{self.me}/24", "dev", mine)
        run("ip", "link", "set", mine, "up")

    def _add(self, host: str) -> None:
        run("ip", "netns", "add", self._name(host))
        self._made.append(host)
        self._ip(host, "link", "set", "lo", "up")

    def _wire(self, host: str, peer: list[str]) -> None:
        port = f"p-{host}"
        self._ip("hub", "link", "add", port, "type", "veth", "peer", *peer)
        self._ip("hub", "link", "set", port, "master", "br0")
        self._ip("hub", "link", "set", port, "up")

    def _name(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _ip(self, host: str, *words: str) -> None:
        run("ip", "-n", self._name(host), *words)

    def address(self, host: str) -> str:
        return f"{self._net}.{self._hosts[host]}" if host in self._hosts else self.me

    def inside(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self._name(host)] if host in self._hosts else []

    # ── faults ────────────────────────────────────────────────────────────────────────────────────

    def cut(self, host: str) -> None:
        """From everybody."""
        self._ip("hub", "link", "set", f"p-{host}", "nomaster")
        self._cut.setdefault(host, set()).add("")

    def cut_one_way(self, host: str, peer: str) -> None:
        """What `host` sends to `peer` is lost."""
        self._ip(host, "route", "replace", "blackhole", f"{self.address(peer)}/32")
        self._cut.setdefault(host, set()).add(peer)

    def slow(self, host: str, rate: str) -> None:
        """`rate` in tc's units ("2mbit"), each way."""
        words = ("root", "tbf", "rate", rate, "burst", "16k", "latency", "400ms")
        run("tc", "-n", self._name(host), "qdisc", "replace", "dev", "eth0", *words)
        run("tc", "-n", self._name("hub"), "qdisc", "replace", "dev", f"p-{host}", *words)

    def heal(self, host: str) -> None:
        """Whatever was done to it here ends."""
        if host not in self._hosts:
            return
        for peer in self._cut.pop(host, set()):
            if peer:
                self._ip(host, "route", "delete", "blackhole", f"{self.address(peer)}/32")
            else:
                self._ip("hub", "link", "set", f"p-{host}", "master", "br0")
        for name, device in ((host, "eth0"), ("hub", f"p-{host}")):
            with suppress(OSError):  # it was not slow
                run("tc", "-n", self._name(name), "qdisc", "delete", "dev", device, "root")

    def close(self) -> None:
        for host in reversed(self._made):
            with suppress(OSError):
                run("ip", "netns", "delete", self._name(host))


def sweep() -> None:
    """Delete what tests left that were killed: namespaces of processes that are no more."""
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        tag, _, host = name.partition("-")
        if tag.startswith("kvc") and host and tag[3:].isdigit() and not os.path.exists(f"/proc/{tag[3:]}"):
            with suppress(OSError):
                run("ip", "netns", "delete", name)


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Loopback]:
    """Namespaces where they can be had, else loopback."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        yield Loopback()
        return
    made = Namespaces(hosts)
    try:
        try:
            sweep()
            made.start()
        except OSError as err:
            print(f"no network namespaces, no cuts: {err}")
            yield Loopback()
            return
        yield made
    finally:
        made.close()
